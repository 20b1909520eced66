"""What words name; the jobs are values here, real ones are in tests/cluster/test_daily.py."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest

from gpuslurm.client import SlurmRefusedError, SlurmUnreachableError
from gpuslurm.queue import QueueEntry
from gpusub import targets
from gpusub.errors import ExitCode, GpusubError
from gpusub.runs import Run
from gpusub.targets import Target, find, nearest, one, resolve

Make = Callable[..., QueueEntry]
ONE, TWO = "20261130-191500-4f3a9c81", "20261130-191501-00000000"
ROOT = Path("/w/.gpusub")


def shown(target: Target | None) -> list[str] | None:
    return None if target is None else [entry.shown for entry in target.entries]


@pytest.fixture
def entries(entry_of: Make) -> list[QueueEntry]:
    task = {"array_id": 12, "name": "sweep", "command": f"/w/.gpusub/{TWO}/job.sh"}
    return [
        entry_of(id=10, state="COMPLETED", submitted="2026-11-30T19:00:00"),
        entry_of(id=11, name="plain", command="", submitted="2026-11-30T19:30:00"),
        entry_of(id=13, tasks="1", shown="12_1", **task),
        entry_of(id=12, tasks="2,4-9%2", shown="12_[2,4-9%2]", state="PENDING", **task),
    ]


@pytest.mark.parametrize(
    ("word", "expected"),
    [
        ("10", ["10"]),
        ("12", ["12_1", "12_[2,4-9%2]"]),
        ("13", ["12_1"]),
        ("12_1", ["12_1"]),
        ("12_5", ["12_[2,4-9%2]"]),
        ("12_3", None),
        ("99", None),
        ("plain", ["11"]),
        ("train", ["10"]),
        (TWO, ["12_1", "12_[2,4-9%2]"]),
        ("", None),
    ],
)
def test_a_word(entries: list[QueueEntry], word: str, expected: list[str] | None) -> None:
    assert shown(find(word, entries, ())) == expected


def test_a_job_and_its_run(entries: list[QueueEntry]) -> None:
    target = find("10", entries, ())
    assert target
    assert target.run == Run(ROOT / ONE, (10,))
    assert find("11", entries, ()) == Target("11", (entries[1],))


def test_what_slurm_has_forgotten(entries: list[QueueEntry]) -> None:
    lost = Run(ROOT / "20250101-000000-00000000", (3,))
    for word in ("3", lost.token):
        assert find(word, entries, [lost]) == Target(word, run=lost)


def test_an_id_that_was_handed_out_twice(entries: list[QueueEntry]) -> None:
    former = Run(ROOT / "20250101-000000-00000000", (3, 10, 11))
    for word in ("10", "11"):
        target = find(word, entries, [former])
        assert target
        assert target.former == former
    # By its token each is certain.
    target = find(ONE, entries, [former])
    assert target
    assert target.former is None


@pytest.mark.parametrize(
    ("word", "words"),
    [
        ("swep", "did you mean sweep?"),
        ("1x", "your newest is 12_1 (sweep); gpusub status lists them"),
        ("20250101-000000-0000000", "did you mean 20250101-000000-00000000?"),
    ],
)
def test_the_nearest(entries: list[QueueEntry], word: str, words: str) -> None:
    known = [Run(ROOT / "20250101-000000-00000000", (3,))]
    if word == "1x":
        entries, known = [*entries[:0], *entries[2:3]], []
        words = words.replace("12_1", entries[0].shown)
        assert nearest("zzz", entries, known) == words
    else:
        assert nearest(word, entries, known) == words


def test_nothing_is_near() -> None:
    assert "a run directory can be named by its path" in nearest("x", [], [])


def test_without_slurm_run_directories_are_left(work: Path) -> None:
    run = work / "elsewhere" / ONE
    run.mkdir(parents=True)
    (target,) = resolve([f"elsewhere/{ONE}"], None, ())
    assert target.run == Run(run)
    for word in ("nope", "42", "./nope", "elsewhere/"):
        with pytest.raises(GpusubError):
            resolve([word], None, ())


def test_one_of_several(entry_of: Make) -> None:
    over, first, second = entry_of(id=1, state="FAILED"), entry_of(id=2), entry_of(id=3)
    assert one(Target("x", (over,))) == over
    assert one(Target("x", (over, second))) == second
    with pytest.raises(GpusubError, match="'x' names several jobs: 2, 3; choose one of them"):
        one(Target("x", (first, second)))
    with pytest.raises(GpusubError, match="Slurm does not know it any more"):
        one(Target("x", run=Run(ROOT / ONE)))


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (SlurmRefusedError("no"), ExitCode.REFUSED),
        (SlurmUnreachableError("away"), ExitCode.UNCERTAIN),
    ],
)
def test_errors_of_slurms(error: Exception, code: ExitCode) -> None:
    with pytest.raises(GpusubError) as failed, targets.answered():
        raise error
    assert failed.value.code == code
