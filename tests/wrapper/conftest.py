"""A clean user: an empty home and working directory, nothing of Slurm's or ours exported."""

from __future__ import annotations

import os
import resource
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from pathlib import Path
from typing import Any

import pytest
from hypothesis import settings

from gpuslurm.client import Defaults, Inventory, NodeKind, Partition
from gpuslurm.queue import QueueEntry
from gpusub import profile as profiles
from gpusub.plan import Plan, make_plan
from gpusub.profile import Profile
from gpusub.request import Program, Request, Value
from gpusub.resources import Machine

settings.register_profile("gpusub", deadline=None, derandomize="CI" in os.environ)
settings.load_profile("gpusub")

OURS = (
    "GPUSUB_",
    "SBATCH_",
    "SLURM",
    "NCCL_",
    "PMI",
    "PET_",
    "MASTER_",
    "CUDA_",
    "XDG_",
    "OMP_",
    "VIRTUAL_ENV",
    "CONDA_PREFIX",
)


@pytest.fixture(autouse=True)
def work(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """The user's working directory."""
    for name in os.environ:
        if name.startswith(OURS):
            monkeypatch.delenv(name)
    home, here = tmp_path / "home", tmp_path / "work"
    home.mkdir()
    here.mkdir()
    monkeypatch.setenv("HOME", str(home))
    monkeypatch.chdir(here)
    monkeypatch.setenv("PWD", str(here))
    monkeypatch.setattr(profiles, "SITE_FILE", tmp_path / "site.yaml")
    return here


@pytest.fixture
def no_sbatch(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A PATH like that of a machine without Slurm."""
    usual = tmp_path / "bin"
    usual.mkdir()
    for program in (
        *("bash", "cat", "echo", "hostname", "pwd"),
        *("python3", "sh", "sleep", "timeout", "touch"),
    ):
        (usual / program).symlink_to(
            next(p for p in map(Path, (f"/usr/bin/{program}", f"/bin/{program}")) if p.exists())
        )
    monkeypatch.setenv("PATH", str(usual))


@pytest.fixture
def nobody() -> Iterator[None]:
    """Without root's right to everything; skipped where the tests are not root's anyway."""
    if os.geteuid() != 0:
        yield
        return
    os.setegid(65534)
    os.seteuid(65534)
    yield
    os.seteuid(0)
    os.setegid(0)


@pytest.fixture
def no_room() -> Callable[[], AbstractContextManager[None]]:
    """Files can be made and not be written to, as on a full disk or above a quota.

    For a block, not a whole test: pytest itself may write to a file at a test's end.
    """

    @contextmanager
    def limited() -> Iterator[None]:
        limits = resource.getrlimit(resource.RLIMIT_FSIZE)
        resource.setrlimit(resource.RLIMIT_FSIZE, (0, limits[1]))
        try:
            yield
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, limits)

    return limited


H100 = NodeKind("gpu", "gpu-[001-004]", 4, 192, 2, 2_000_000, 8, frozenset({"h100", "ndr"}))
CPU = NodeKind("cpu", "cpu[1-9]", 9, 128, 1, 512_000, 0)


def _inventory(
    *partitions: Partition, kinds: tuple[NodeKind, ...] = (H100, CPU), **defaults: int
) -> Inventory:
    return Inventory(
        partitions
        or (Partition("gpu", True, "UP", 4, max_time_s=172_800), Partition("cpu", False, "UP", 9)),
        kinds,
        Defaults(**defaults),
    )


@pytest.fixture
def inventory() -> Callable[..., Inventory]:
    """Make what Slurm reports: two partitions, gpu (the default) of four nodes, and cpu of nine."""
    return _inventory


@pytest.fixture
def request_of(work: Path) -> Callable[..., Request]:
    """Make a request: settings by keyword, each from its option."""

    def make(
        program: Program | None = None, settings: dict[str, str] | None = None, **fields: Any
    ) -> Request:
        return Request(
            program=program or Program("script", "train.py"),
            cwd=fields.pop("cwd", work),
            settings={
                key: Value(value, f"option --{key.replace('_', '-')}")
                for key, value in (settings or {}).items()
            },
            run_root=work / ".gpusub",
            **fields,
        )

    return make


@pytest.fixture
def profile_of() -> Callable[..., Profile]:
    """Make a profile, every key stated in the file ``site``."""

    def make(
        fabric: dict[str, Any] | None = None,
        env: dict[str, str] | None = None,
        fabrics: dict[str, dict[str, Any]] | None = None,
        **settings: Any,
    ) -> Profile:
        def stated(values: dict[str, Any] | None) -> dict[str, Value[Any]]:
            return {key: Value(value, "profile p (site)") for key, value in (values or {}).items()}

        blocks = {name: stated(block) for name, block in (fabrics or {}).items()}
        return Profile("p", stated(settings), stated(fabric), stated(env), blocks)

    return make


@pytest.fixture
def plan_of(work: Path) -> Callable[..., Plan]:
    """Make the plan of a request, by default on the cluster of ``inventory``."""

    def make(
        request: Request,
        profile: Profile | None = None,
        facts: Inventory | Machine | None = None,
        environ: dict[str, str] | None = None,
        python: str = "/opt/venv/bin/python",
        run_dir: Path | None = None,
    ) -> Plan:
        if facts is None:
            facts = Machine(gpus=2, cpus=16) if request.local else _inventory()
        command = request.program.kind == "command"
        return make_plan(
            request,
            profile or Profile(),
            facts,
            None if command else Value(python, "option --python"),
            environ or {},
            "20261130-191500-4f3a9c81",
            run_dir or work / ".gpusub" / "20261130-191500-4f3a9c81",
        )

    return make


@pytest.fixture
def entry_of() -> Callable[..., QueueEntry]:
    """Make a line of the queue: by default a running job of two nodes."""

    def make(**fields: Any) -> QueueEntry:
        number = fields.get("id", 42)
        usual: dict[str, Any] = {
            "id": number,
            "array_id": number,
            "tasks": "",
            "shown": str(number),
            "user": "researcher",
            "name": "train",
            "partition": "gpu",
            "state": "RUNNING",
            "reason": "",
            "nodes": "" if fields.get("state") == "PENDING" else "gpu-[5,9]",
            "node_count": 2,
            "elapsed_s": 72,
            "limit_s": 14_400,
            "submitted": "2026-11-30T20:30:00",
            "eligible": "2026-11-30T20:30:00",
            "start": "",
            "end": "",
            "dependency": "",
            "switches": 0,
            "switches_wait_s": 0,
            "restarts": 0,
            "exit_code": 0,
            "signal": 0,
            "command": "/w/.gpusub/20261130-191500-4f3a9c81/job.sh",
        }
        return QueueEntry(**{**usual, **fields})

    return make
