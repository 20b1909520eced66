from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from gpuslurm.client import Inventory, NodeKind, Partition
from gpusub.config import FabricSchema, ProfileSchema, load, profile_names
from gpusub.errors import GpusubError
from gpusub.request import Value
from gpusub.sitefile import site_file

EXAMPLE = re.compile(r"^( *)#(?! )(?=[A-Za-z-])", re.ASCII | re.MULTILINE)

MIXED = (
    NodeKind("gpu", "a[1-2]", 2, 64, 1, 1, 4, frozenset(), ("a100",)),
    NodeKind("gpu", "b[1-9]", 9, 128, 2, 2_000_000, 8, frozenset({"ndr"}), ("h100",)),
)


@pytest.fixture
def written(tmp_path: Path) -> Callable[[str], Path]:
    def write(text: str) -> Path:
        (tmp_path / "cluster.yaml").write_text(text)
        return tmp_path / "cluster.yaml"

    return write


def test_it_loads_and_asks_for_what_slurm_would_give(
    inventory: Callable[..., Inventory], written: Callable[[str], Path]
) -> None:
    profile = load([written(site_file(inventory()))], None)
    assert profile.name == "gpu"
    assert {key: value.value for key, value in profile.settings.items()} == {"partition": "gpu"}


def test_every_example_in_it_can_be_used(
    inventory: Callable[..., Inventory], written: Callable[[str], Path]
) -> None:
    text = site_file(inventory())
    profile = load([written(EXAMPLE.sub(r"\1", text))], None)
    stated = {*profile.settings, "fabric", "env"}
    assert stated == set(ProfileSchema.__struct_fields__)
    assert set(profile.fabric) == set(FabricSchema.__struct_fields__)
    assert profile.env
    # One by one, too: a fabric without its keys is one that says nothing.
    for example in EXAMPLE.finditer(text):
        alone = text[: example.start()] + example[1] + text[example.end() :]
        if example[1] == "    ":
            load([written(alone)], None)


def test_every_key_is_explained_in_the_line_above(inventory: Callable[..., Inventory]) -> None:
    lines = site_file(inventory()).splitlines()
    for key in (*ProfileSchema.__struct_fields__, *FabricSchema.__struct_fields__):
        (at,) = (i for i, line in enumerate(lines) if re.match(rf" +#?{key}:", line))
        assert lines[at - 1].strip().startswith("# ")
    assert max(map(len, lines)) <= 100


def test_what_slurm_reports_stands_in_it(inventory: Callable[..., Inventory]) -> None:
    text = site_file(
        inventory(
            Partition(
                "gpu",
                True,
                "UP",
                4,
                max_nodes=2,
                max_time_s=172_800,
                max_cpus_per_node=96,
                def_cpu_per_gpu=10,
            ),
            def_mem_per_gpu_mb=4000,
        )
    )
    assert (
        "# 4 nodes gpu-[001-004]: 8 GPUs, for each 24 CPUs, 250000 MB; features h100, ndr\n" in text
    )
    assert "# Limits: time 2-00:00:00, 2 nodes, 96 CPUs a node.\n" in text
    assert "# Slurm's defaults for each GPU: 10 CPUs, 4000 MB.\n" in text
    assert "#cpus_per_gpu: 10\n" in text
    assert "#mem_per_gpu: 250000M\n" in text


def test_a_partition_whose_nodes_differ_gets_the_number_of_most(
    inventory: Callable[..., Inventory], written: Callable[[str], Path]
) -> None:
    facts = inventory(Partition("gpu", False, "UP", 11), kinds=MIXED)
    text = site_file(facts)
    profile = load([written(text)], None)
    assert profile.settings["gpus_per_node"].value == "8"
    assert "# 2 nodes a[1-2]: 4 GPUs (a100), for each 16 CPUs\n" in text
    load([written(EXAMPLE.sub(r"\1", text))], None)


@pytest.mark.parametrize(
    "name", ["no", "NULL", "8", "010", "y", "a b", "it's", "gpu-1.x", "é", "-"]
)
def test_any_name_of_a_partition_comes_through(
    name: str, inventory: Callable[..., Inventory], written: Callable[[str], Path]
) -> None:
    kind = NodeKind(name, "n1", 1, 8, 1, 8000, 1)
    path = written(site_file(inventory(Partition(name, True, "UP", 1), kinds=(kind,))))
    assert profile_names([path]) == [name]
    assert load([path], None).settings["partition"].value == name


def test_each_partition_with_gpus_has_a_profile_the_default_first(
    inventory: Callable[..., Inventory], written: Callable[[str], Path]
) -> None:
    names = ("a", "b", "c")
    facts = inventory(
        *[Partition(name, name == "b", "UP", 1) for name in (*names, "cpu")],
        kinds=(
            *[NodeKind(name, "n1", 1, 8, 1, 8000, 2) for name in names],
            NodeKind("cpu", "n2", 1, 8, 1, 8000, 0),
        ),
    )
    path = written(site_file(facts))
    assert profile_names([path]) == ["a", "b", "c"]
    assert load([path], None).name == "b"
    assert path.read_text().index("  b:\n") < path.read_text().index("  a:\n")
    for name in names:
        assert load([path], Value(name, "x")).settings["partition"].value == name


def test_without_gpus_there_is_nothing_to_write(inventory: Callable[..., Any]) -> None:
    facts = inventory(Partition("cpu", True, "UP", 9))
    with pytest.raises(GpusubError, match=r"no partition with GPUs \(partitions: cpu\)"):
        site_file(facts)
