"""What one submission costs, from the start of the process to its end.

`gpusub --parsable` alternates with bare sbatch, the least Python that runs sbatch, simple_slurm
and submitit, all submitting a job for two nodes to a partition that is down. A table then says
where gpusub's milliseconds go. Needs root, and the extra `bench`:

    python tests/bench/submit.py [--rounds N]
"""

from __future__ import annotations

import argparse
import compileall
import json
import re
import statistics
import subprocess
import sys
import time
from collections import defaultdict
from pathlib import Path

HERE = Path(__file__).resolve()

MINIMAL = "import subprocess; subprocess.run(['sbatch', '--parsable', '-N2', 'job.sh'], check=True)"
SIMPLE_SLURM = (
    "from simple_slurm import Slurm; Slurm(nodes=2, ntasks_per_node=1).sbatch('srun true')"
)
SUBMITIT = """
import submitit
executor = submitit.AutoExecutor(folder="submitit", cluster="slurm")
executor.update_parameters(nodes=2, tasks_per_node=1, timeout_min=10)
executor.submit(print, "hello")
"""
# Runs one submission and prints how long its parts took; imports are left to -X importtime.
STAGES = """
import time
started = time.perf_counter()
import json, sys
import gpusub.cli, gpusub.command, gpusub.submission, gpusub.render, gpusub.profile, jinja2
from gpuslurm import commands
imported = time.perf_counter()
spent = {}
def timed(owner, name, label):
    inner = getattr(owner, name)
    def outer(*args, **kwargs):
        before = time.perf_counter()
        try:
            return inner(*args, **kwargs)
        finally:
            spent[label] = spent.get(label, 0) + time.perf_counter() - before
    setattr(owner, name, outer)
for name in ("__enter__", "go_on", "answer"):
    timed(commands.InventoryQuestion, name, "Slurm: partitions and nodes (here not while it loads)")
timed(commands.CommandClient, "submit", "Slurm: sbatch")
timed(commands.CommandClient, "jobs", "Slurm: one look at the new job")
timed(gpusub.render, "render", "render the template")
timed(gpusub.profile, "load", "settings files")
timed(gpusub.rundir, "create", "run directory")
timed(gpusub.plan, "make_plan", "plan")
before = time.perf_counter()
code = gpusub.cli.run(sys.argv[1:])
total = time.perf_counter() - before
spent["the rest of the run (parsing options, …)"] = total - sum(spent.values())
print(json.dumps({"code": code, "imports": imported - started, "stages": spent}), file=sys.stderr)
"""


def ways() -> dict[str, list[str]]:
    """Return the command line of every way to submit."""
    python = sys.executable
    return {
        "sbatch": ["sbatch", "--parsable", "-N2", "job.sh"],
        "python -c pass": [python, "-c", "pass"],
        "python + sbatch": [python, "-c", MINIMAL],
        "simple_slurm": [python, "-c", SIMPLE_SLURM],
        "submitit": [python, "-c", SUBMITIT],
        "gpusub": ["gpusub", "--parsable", "-N2", "train.py"],
    }


def measure(rounds: int) -> dict[str, list[float]]:
    """Return the wall time of every run in milliseconds, the ways taking turns."""
    times: dict[str, list[float]] = defaultdict(list)
    for turn in range(rounds + 1):
        for name, argv in ways().items():
            before = time.perf_counter()
            subprocess.run(argv, check=True, capture_output=True, timeout=60)
            if turn:  # the first round fills caches
                times[name].append((time.perf_counter() - before) * 1000)
    return times


def imports() -> list[tuple[str, float]]:
    """Return the milliseconds that each package's imports take in one submission, most first."""
    done = subprocess.run(
        [sys.executable, "-X", "importtime", "-m", "gpusub", "--parsable", "-N2", "train.py"],
        check=True, capture_output=True, text=True, timeout=60,
    )  # fmt: skip
    ours = ("gpusub", "gpuslurm", "gpuhealth", "click", "jinja2", "msgspec", "yaml", "markupsafe")
    spent: dict[str, float] = defaultdict(float)
    for line in done.stderr.splitlines():
        found = re.match(r"import time:\s*(\d+) \|\s*\d+ \| +(\S+)", line)
        if found:
            top = found[2].split(".")[0]
            spent[top if top in ours else "standard library, site"] += int(found[1]) / 1000
    return sorted(spent.items(), key=lambda item: -item[1])


def stages(rounds: int) -> dict[str, float]:
    """Return the median milliseconds of each part of a submission."""
    seen: dict[str, list[float]] = defaultdict(list)
    for _ in range(rounds):
        done = subprocess.run(
            [sys.executable, "-c", STAGES, "--parsable", "-N2", "train.py"],
            check=True, capture_output=True, text=True, timeout=60,
        )  # fmt: skip
        told = json.loads(done.stderr.splitlines()[-1])
        seen["imports"].append(told["imports"] * 1000)
        for name, spent in told["stages"].items():
            seen[name].append(spent * 1000)
    return {name: statistics.median(spent) for name, spent in seen.items()}


def inside(rounds: int) -> None:
    """Measure on the login side of a cluster and print the tables."""
    Path("train.py").write_text("print('hello')\n")
    Path("job.sh").write_text("#!/bin/sh\nsrun true\n")
    times = measure(rounds)
    base = statistics.median(times["sbatch"])
    print(f"{'one submission, ms':<28}{'min':>8}{'median':>8}{'max':>8}{'x sbatch':>10}")
    for name, spent in times.items():
        median = statistics.median(spent)
        print(f"{name:<28}{min(spent):8.1f}{median:8.1f}{max(spent):8.1f}{median / base:10.1f}")
    print(f"\n{'where gpusub spends them, ms':<52}")
    start = statistics.median(times["python -c pass"])
    parts = {"start and end of Python": start, **stages(rounds)}
    for name, spent_ms in parts.items():
        print(f"  {name:<50}{spent_ms:8.1f}")
    print(f"  {'sum':<50}{sum(parts.values()):8.1f}")
    print(f"\n{'imports by package (-X importtime, which slows them), ms':<52}")
    for name, spent_ms in imports():
        print(f"  {name:<50}{spent_ms:8.1f}")


def main() -> None:
    """Start a cluster and measure in it."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0] if __doc__ else None)
    parser.add_argument("--rounds", type=int, default=20)
    parser.add_argument("--inside", action="store_true", help=argparse.SUPPRESS)
    arguments = parser.parse_args()
    if arguments.inside:
        inside(arguments.rounds)
        return
    sys.path.insert(0, str(HERE.parents[1] / "cluster"))
    from cluster import Cluster

    # As pip does when it installs: the users of a cluster cannot write beside the modules.
    for folder in ("wrapper", "slurm", "prolog"):
        compileall.compile_dir(HERE.parents[2] / folder, quiet=1)
    with Cluster() as cluster:
        cluster.run(["scontrol", "update", "partitionname=gpu", "state=down"], user="root")
        done = cluster.run(
            [sys.executable, str(HERE), "--inside", "--rounds", str(arguments.rounds)],
            timeout=600,
        )
    print(done.stdout, end="")


if __name__ == "__main__":
    main()
