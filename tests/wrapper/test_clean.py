from __future__ import annotations

import json
import os
import shutil
import sys
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuslurm.commands import CommandClient
from gpuslurm.queue import QueueEntry
from gpusub import cli
from gpusub.clean import dangling, is_ours, old

Make = Callable[..., Any]
OLD, YOUNG, BUSY = (f"2026113{n}-191500-4f3a9c81" for n in range(3))


def make_run(root: Path, token: str, days: float = 20) -> Path:
    path = root / token
    (path / "ranks").mkdir(parents=True)
    for name in ("job.sh", "plan.json", "log.out", "ranks/1.log"):
        (path / name).write_text("x" * 100)
    when = time.time() - days * 86400
    for file in [path, *path.rglob("*")]:
        os.utime(file, (when, when))
    return path


@pytest.fixture
def root(work: Path, monkeypatch: pytest.MonkeyPatch, entry_of: Make) -> Path:
    """An old run, a young one, and an old one whose job waits."""
    path = work / ".gpusub"
    for number, (token, days) in enumerate([(OLD, 20), (YOUNG, 1), (BUSY, 20)], 1):
        make_run(path, token, days)
        (path / str(number)).symlink_to(token)
    busy = entry_of(id=3, state="PENDING", command=f"{path}/{BUSY}/job.sh")
    over = entry_of(id=1, state="FAILED", command=f"{path}/{OLD}/job.sh")

    class Queue(CommandClient):
        def queue(self, job_ids: Sequence[int] | None = None) -> tuple[QueueEntry, ...]:
            return (busy, over)

    monkeypatch.setattr("gpuslurm.commands.CommandClient", Queue)
    monkeypatch.setattr("gpuslurm.commands.available", lambda: True)
    return path


def left(root: Path) -> set[str]:
    return {path.name for path in root.iterdir()}


ALL = {OLD, YOUNG, BUSY, "1", "2", "3"}


def test_only_the_old_ones_go(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["clean", "--yes"]) == 0
    assert left(root) == ALL - {OLD, "1"}
    printed = capsys.readouterr()
    assert printed.out.splitlines()[1].startswith(f".gpusub/{OLD}  1    ")
    assert printed.out.splitlines()[1].endswith("  400 B")
    assert printed.out.splitlines()[2] == "1 run directory, 400 B"
    assert printed.err == "gpusub: removed 1 of 1\n"


@pytest.mark.parametrize(
    ("words", "gone"),
    [
        (["--yes", "--older-than", "0.5"], {OLD, YOUNG, "1", "2"}),
        (["--yes", "--older-than=30"], set()),
        (["--dry-run"], set()),
        (["--dry-run", "--yes"], set()),
    ],
)
def test_by_age(root: Path, words: list[str], gone: set[str]) -> None:
    assert cli.run(["clean", *words]) == 0
    assert left(root) == ALL - gone


def test_nobody_to_ask(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["clean"]) == 2
    assert "say so with --yes, or look with --dry-run" in capsys.readouterr().err
    assert left(root) == ALL


@pytest.mark.parametrize(("answer", "gone"), [(True, {OLD, "1"}), (False, set())])
def test_somebody_to_ask(
    root: Path, monkeypatch: pytest.MonkeyPatch, answer: bool, gone: set[str]
) -> None:
    monkeypatch.setattr(sys.stdin, "isatty", lambda: True, raising=False)
    monkeypatch.setattr("click.confirm", lambda *_, **__: answer)
    assert cli.run(["clean"]) == 0
    assert left(root) == ALL - gone


def test_links_that_lead_nowhere_go_and_others_stay(root: Path, work: Path) -> None:
    (root / "7").symlink_to("20250101-000000-00000000")
    (root / "8").symlink_to("../elsewhere")
    (root / "9").write_text("mine")
    (root / "x").symlink_to("20250101-000000-00000000")
    assert dangling(root, ()) == [root / "7"]
    assert cli.run(["clean", "--yes"]) == 0
    assert left(root) == (ALL - {OLD, "1"}) | {"8", "9", "x"}


class TestOurs:
    def test_one_of_ours(self, root: Path) -> None:
        assert is_ours(root / OLD)

    def test_another_name(self, root: Path) -> None:
        assert not is_ours((root / OLD).rename(root / "precious"))

    @pytest.mark.parametrize("name", ["job.sh", "plan.json"])
    def test_without_our_files(self, root: Path, work: Path, name: str) -> None:
        file = root / OLD / name
        file.rename(work / name)
        assert not is_ours(root / OLD)
        file.symlink_to(work / name)
        assert not is_ours(root / OLD)

    def test_a_link(self, root: Path, work: Path) -> None:
        moved = shutil.move(root / OLD, work / OLD)
        (root / OLD).symlink_to(moved)
        assert not is_ours(root / OLD)
        assert old(root, time.time(), ()) == old(root, time.time(), (OLD,))

    def test_somebody_elses(self, root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(os, "geteuid", lambda: 12345)
        assert not is_ours(root / OLD)


def test_what_links_lead_to_is_kept(root: Path, work: Path) -> None:
    (work / "data").mkdir()
    (work / "data" / "precious").write_text("x")
    (root / OLD / "data").symlink_to(work / "data")
    assert cli.run(["clean", "--yes"]) == 0
    assert not (root / OLD).exists()
    assert (work / "data" / "precious").exists()


def test_a_run_that_goes_on_without_slurm(root: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("gpuslurm.commands.available", lambda: False)
    for plan in root.glob("*/plan.json"):
        plan.write_text('{"local": true}')
        os.utime(plan, (0, 0))
    monkeypatch.setattr("gpusub.runs.runs_here", lambda run: run.token == OLD)
    assert cli.run(["clean", "--yes"]) == 0
    assert left(root) == ALL - {BUSY, "3"}


def test_without_slurm_what_was_submitted_to_it_stays(
    root: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("gpuslurm.commands.available", lambda: False)
    assert cli.run(["clean", "--yes", "--older-than", "0"]) == 0
    assert left(root) >= {OLD, BUSY}


def test_json(root: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["clean", "--dry-run", "--json"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["token"], one["job_id"], one["removed"]) == (OLD, 1, False)


def test_no_such_place(work: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["clean"]) == 2
    assert "name another with --run-root DIR" in capsys.readouterr().err
