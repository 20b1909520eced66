# make help lists the targets.
PYTHON ?= python3
PYTHON39 ?= $(firstword $(wildcard /usr/bin/python3.9 $(HOME)/.pyenv/versions/3.9.*/bin/python3.9))
VENV := .venv
BIN := $(VENV)/bin
CMD ?=

.PHONY: help demo cluster test lint unit unit39 cluster-tests bench bench-prolog clean

help: ## List the targets
	@grep -hE '^[a-z-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 16

demo: $(VENV)/.torch .packages ## Train a small model on two nodes of a real, throw-away Slurm
	@$(BIN)/python tests/cluster/cluster.py bash -c 'cp -r "$$0"/examples . && \
	  printf "\n$$ %s\n" "gpusub -N 2 --gpus-per-node 2 --follow examples/train.py --steps 50" && \
	  exec gpusub -N 2 --gpus-per-node 2 --follow examples/train.py --steps 50' "$(CURDIR)"

cluster: $(VENV)/.torch .packages ## A shell on a throw-away Slurm of ten nodes (CMD="sinfo" runs a command)
	@$(BIN)/python tests/cluster/cluster.py $(if $(CMD),bash -c '$(subst ','\'',$(CMD))')

test: lint $(VENV)/.torch .packages ## Everything: ruff, mypy --strict, unit and cluster tests
	GPUSUB_REQUIRE_CLUSTER=1 $(BIN)/pytest

lint: $(VENV)/.test ## ruff and mypy --strict
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .
	$(BIN)/mypy wrapper/gpusub slurm/gpuslurm prolog/gpuhealth tests
	$(BIN)/vermin --quiet --no-tips --violations --target=3.9- prolog/gpuhealth

unit39: $(VENV)/.test ## gpuhealth's tests on Python 3.9, the nodes' own, where there is one
	@if [ -z "$(PYTHON39)" ]; then echo "no Python 3.9 here: ruff and vermin hold gpuhealth to it"; else \
	  [ -x .venv39/bin/pytest ] || { $(PYTHON39) -m venv .venv39 && \
	  .venv39/bin/python -m pip install --quiet hypothesis pytest pytest-timeout pyyaml nvidia-ml-py; } && \
	  PYTHONPATH=$(CURDIR)/prolog .venv39/bin/pytest -q --confcutdir=tests/prolog tests/prolog; fi

unit: $(VENV)/.test ## The tests that need no Slurm
	$(BIN)/pytest --ignore tests/cluster --ignore tests/examples

bench: $(VENV)/.bench .packages ## What a submission costs, beside sbatch, simple_slurm and submitit
	$(BIN)/python tests/bench/submit.py

bench-prolog: $(VENV)/.test ## What the prolog costs on a node with eight H100s
	$(BIN)/python tests/bench/prolog.py

clean: ## Remove what the targets made
	rm -rf $(VENV) .venv39 dist build .mypy_cache .pytest_cache .ruff_cache .hypothesis

.PHONY: .packages
.packages:
	@tests/cluster/install.sh

$(VENV)/bin/python:
	@$(PYTHON) -c 'import ensurepip' 2>/dev/null || { \
	  echo "installing python3 and python3-venv"; export DEBIAN_FRONTEND=noninteractive; \
	  apt-get update -qq && apt-get install -y -qq --no-install-recommends python3 python3-venv >/dev/null; }
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 10) and "gpusub needs Python 3.10 or newer: make PYTHON=python3.11 ...")'
	$(PYTHON) -m venv $(VENV)

$(VENV)/.test: $(VENV)/bin/python pyproject.toml
	$(BIN)/python -m pip install --quiet --editable '.[test]'
	@touch $@

$(VENV)/.torch: $(VENV)/.test
	$(BIN)/python -m pip install --quiet --editable '.[torch]'
	@touch $@

$(VENV)/.bench: $(VENV)/.torch
	$(BIN)/python -m pip install --quiet --editable '.[bench]'
	@touch $@
