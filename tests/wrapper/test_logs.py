"""Logs of ranks; following real jobs is in tests/cluster/test_daily.py."""

from __future__ import annotations

import io
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuslurm.client import SlurmUnreachableError
from gpuslurm.commands import CommandClient
from gpuslurm.queue import QueueEntry
from gpusub import cli
from gpusub import logs as logging
from gpusub.logs import AllRanks, Marked
from gpusub.runs import Run

Make = Callable[..., Any]
TOKEN, LATER = "20261130-191500-4f3a9c81", "20261130-191501-00000000"


@pytest.fixture
def run(work: Path) -> Run:
    """A run of four ranks; the last one has not written yet."""
    path = work / ".gpusub" / TOKEN
    (path / "ranks").mkdir(parents=True)
    plan = {
        "log": {"value": str(path / "log.out"), "origin": "built-in"},
        "resources": {
            "nodes": {"value": {"least": 1, "most": 2}, "origin": "x"},
            "gpus_per_node": {"value": 2, "origin": "x"},
        },
    }
    (path / "plan.json").write_text(json.dumps(plan))
    (path / "log.out").write_text("a\nb\nc\n")
    for rank in (1, 2):
        (path / f"ranks/{rank}.log").write_text(f"one of {rank}\ntwo of {rank}")
    (path / "ranks/notes").touch()
    (work / ".gpusub" / "42").symlink_to(TOKEN)
    return Run(path, (42,))


@pytest.fixture(autouse=True)
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let Slurm answer with these jobs, or not at all."""

    def give(*entries: QueueEntry) -> None:
        class Queue(CommandClient):
            def queue(self, job_ids: Sequence[int] | None = None) -> tuple[QueueEntry, ...]:
                if not entries:
                    raise SlurmUnreachableError("away")
                return entries if job_ids is None else ()

        monkeypatch.setattr("gpuslurm.commands.CommandClient", Queue)
        monkeypatch.setattr("gpuslurm.commands.available", lambda: bool(entries))

    give()
    return give


@pytest.mark.parametrize(
    ("words", "printed"),
    [
        ([], "a\nb\nc\n"),
        (["-n1"], "c\n"),
        (["-n", "0"], ""),
        (["--rank", "0", "-n2"], "b\nc\n"),
        (["--rank=1"], "one of 1\ntwo of 1"),
        (
            ["--rank", "all", "-n1"],
            "[rank 0] c\n[rank 1] two of 1\n[rank 2] two of 2\n",
        ),
    ],
)
@pytest.mark.parametrize("job", [[TOKEN], [f".gpusub/{TOKEN}"], [".gpusub/42"], []])
def test_of_a_run_directory_alone(
    run: Run, capfd: pytest.CaptureFixture[str], words: list[str], printed: str, job: list[str]
) -> None:
    assert cli.run(["logs", *words, *job]) == 0
    assert capfd.readouterr().out == printed


@pytest.mark.parametrize(
    ("words", "says"),
    [
        (["--rank", "3"], "--rank 3: job {token} has no log of it; there are those of ranks 0-2"),
        (["--rank", "x"], "--rank x: write a rank's number, or all"),
        (["-f", "--json"], "--json and --follow exclude each other; leave one out"),
    ],
)
def test_a_refusal(
    run: Run, capfd: pytest.CaptureFixture[str], words: list[str], says: str
) -> None:
    assert cli.run(["logs", *words, TOKEN]) == 2
    assert capfd.readouterr() == ("", f"gpusub: error: {says.format(token=TOKEN)}\n")


def test_the_newest_of_slurms_and_of_this_directory(
    run: Run, answers: Make, entry_of: Make, work: Path, capfd: pytest.CaptureFixture[str]
) -> None:
    other = work / "other" / LATER
    other.mkdir(parents=True)
    (other / "plan.json").write_text((run.path / "plan.json").read_text().replace(TOKEN, LATER))
    (other / "log.out").write_text("later\n")
    (other / "plan.json").unlink()
    answers(entry_of(id=43, name="late", command=f"{other}/job.sh"))
    assert cli.run(["logs"]) == 0
    printed = capfd.readouterr()
    assert printed.out == "later\n"
    assert printed.err == f"gpusub: job 43 (late): other/{LATER}/log.out\n"


def test_nothing_at_all(capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["logs"]) == 2
    assert "no job of yours and no run directory here" in capfd.readouterr().err


def test_one_that_has_not_started(
    run: Run, answers: Make, entry_of: Make, capfd: pytest.CaptureFixture[str]
) -> None:
    (run.path / "log.out").unlink()
    answers(entry_of(state="PENDING", command=f"{run.path}/job.sh"))
    assert cli.run(["logs", "42"]) == 2
    assert "the job has not started yet; -f waits for it" in capfd.readouterr().err


def test_where_they_are(run: Run, capfd: pytest.CaptureFixture[str]) -> None:
    assert cli.run(["logs", "--json", TOKEN]) == 0
    places = json.loads(capfd.readouterr().out)
    assert places["ranks"] == {
        "0": f"{run.path}/log.out",
        "1": f"{run.path}/ranks/1.log",
        "2": f"{run.path}/ranks/2.log",
    }


class TestRunsOfThisMachine:
    @pytest.mark.parametrize("code", [0, 9])
    def test_its_exit_code_comes_out(
        self, run: Run, answers: Make, entry_of: Make, capfd: pytest.CaptureFixture[str], code: int
    ) -> None:
        answers(entry_of(id=1, command=""))
        (run.path / "exit_code").write_text(f"{code}\n")
        assert cli.run(["logs", "-f", TOKEN]) == code
        assert capfd.readouterr().out == "a\nb\nc\n"

    def test_one_that_left_none(
        self,
        run: Run,
        answers: Make,
        entry_of: Make,
        monkeypatch: pytest.MonkeyPatch,
        capfd: pytest.CaptureFixture[str],
    ) -> None:
        monkeypatch.setattr(logging, "GONE_S", 0.05)
        answers(entry_of(id=1, command=""))
        assert cli.run(["logs", "-f", TOKEN]) == 4
        assert "left no exit code" in capfd.readouterr().err


class TestAllRanks:
    def test_they_are_shown_as_they_come(self, run: Run, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(logging, "READS_PER_S", 1e9)
        out = io.BytesIO()
        ranks = AllRanks(run.path / "log.out", run, out, 0)
        assert ranks.copy() is False
        with (run.path / "log.out").open("a") as main:
            main.write("d\n")
        (run.path / "ranks/3.log").write_text("first of 3")
        assert ranks.copy() is False or out.getvalue()
        with (run.path / "ranks/1.log").open("a") as one:
            one.write("\nthree of 1\n")
        ranks.copy()
        ranks.finish()
        assert (
            out.getvalue() == b"[rank 0] d\n[rank 1] \n[rank 1] three of 1\n[rank 3] first of 3\n"
        )

    def test_many_are_not_read_all_the_time(self, run: Run) -> None:
        out = io.BytesIO()
        ranks = AllRanks(run.path / "log.out", run, out, None)
        assert ranks.copy() is True
        (run.path / "log.out").write_text("more of it\n")
        assert ranks.copy() is False
        ranks.finish()
        assert b"more of it" in out.getvalue()


def test_lines_are_marked_whole() -> None:
    out = io.BytesIO()
    marked = Marked(3, out)
    for piece in (b"ab", b"c\nd", b"\n\n", b"e"):
        marked.write(piece)
    assert out.getvalue() == b"[rank 3] abc\n[rank 3] d\n[rank 3] \n"
    marked.finish()
    marked.finish()
    assert out.getvalue().endswith(b"\n[rank 3] e\n")


@pytest.mark.parametrize(
    ("ranks", "words"),
    [
        ([0], "no log of it; there is that of rank 0 alone"),
        ([0, 1, 2, 5, 7, 8], "no log of it; there are those of ranks 0-2, 5 and 7-8"),
    ],
)
def test_ranks_in_words(ranks: list[int], words: str) -> None:
    assert logging._spelt(ranks) == words
