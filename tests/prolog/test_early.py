from __future__ import annotations

import fcntl
import json
import os
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from gpuhealth import early, isolation, process

GPU_JOB = {"SLURM_JOB_ID": "7", "SLURM_JOB_GPUS": "0,1"}


@pytest.fixture
def places(tmp_path: Path) -> Iterator[dict[str, str]]:
    (tmp_path / "version").touch()
    (tmp_path / "lock").touch()
    yield {name: str(tmp_path / name) for name in ("driver", "stuck", "lock")} | {
        "driver": str(tmp_path / "version")
    }
    early.drop()


def asks(environ: dict[str, str], places: dict[str, str]) -> bool:
    early.ask(environ, **places)
    child = early.take()
    if child is None:
        return False
    outcome = isolation.finish(child, time.monotonic() + 10)
    assert outcome.result is not None
    # Whatever NVML says here, it is an answer.
    assert "gpus" in json.loads(outcome.result)
    return True


@pytest.mark.parametrize(
    "environ",
    [GPU_JOB, {"SLURM_JOB_ID": "7", "CUDA_VISIBLE_DEVICES": "GPU-1"}, {"SLURMD_NODENAME": "gpu-1"}],
    ids=["GPUs", "by UUID", "periodic"],
)
def test_it_is_asked_where_it_will_be_wanted(
    environ: dict[str, str], places: dict[str, str]
) -> None:
    assert asks(environ, places)


def test_not_for_a_job_without_gpus(places: dict[str, str]) -> None:
    assert not asks({"SLURM_JOB_ID": "7"}, places)


def test_not_without_a_driver(places: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "version").unlink()
    assert not asks(GPU_JOB, places)


def test_not_while_an_earlier_one_hangs(places: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "stuck").touch()
    assert not asks(GPU_JOB, places)


def test_not_while_another_prolog_is_at_it(places: dict[str, str]) -> None:
    handle = os.open(places["lock"], os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX)
    assert not asks(GPU_JOB, places)
    os.close(handle)
    assert asks(GPU_JOB, places)


def test_the_lock_is_given_back_at_once(places: dict[str, str]) -> None:
    early.ask(GPU_JOB, **places)
    handle = os.open(places["lock"], os.O_RDWR)
    fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    os.close(handle)


def test_an_old_answer_is_not_taken(
    places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(early, "FRESH_S", 0.0)
    early.ask(GPU_JOB, **places)
    time.sleep(0.01)
    assert early.take() is None


def test_a_child_that_nobody_takes_is_ended(
    places: dict[str, str], monkeypatch: pytest.MonkeyPatch
) -> None:
    before = len(list(Path("/proc/self/fd").iterdir()))
    started: list[tuple[int, int]] = []
    start = process.start

    def remember(work: Callable[[int], None]) -> tuple[int, int]:
        started.append(start(work))
        return started[-1]

    monkeypatch.setattr(process, "start", remember)
    early.ask(GPU_JOB, **places)
    early.drop()
    early.drop()
    assert len(list(Path("/proc/self/fd").iterdir())) == before
    ((pid, _),) = started
    assert not Path(f"/proc/{pid}").exists()
