"""The screens; how they look with real jobs is in tests/cluster/test_daily.py."""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest

from gpuslurm.client import Job, SlurmUnreachableError
from gpuslurm.commands import CommandClient
from gpuslurm.queue import QueueEntry, Unavailable
from gpusub import cli, screen
from gpusub.plan import plain
from gpusub.rundir import create
from gpusub.runs import Run
from gpusub.status import detail, forgotten, log_of, overview, state_words, times
from gpusub.targets import Target

Make = Callable[..., Any]
NOW = datetime.datetime(2026, 11, 30, 20, 31)
TOKEN = "20261130-191500-4f3a9c81"


class Queue(CommandClient):
    """A queue that holds these jobs."""

    def __init__(self, *entries: QueueEntry, stdout: str = "") -> None:
        self.entries, self.stdout = entries, stdout

    def queue(self, job_ids: Sequence[int] | None = None) -> tuple[QueueEntry, ...]:
        return self.entries if job_ids is None else ()

    def unavailable(self) -> tuple[Unavailable, ...]:
        return ()

    def jobs(self, job_id: int) -> tuple[Job, ...]:
        return (Job(job_id, "RUNNING", "None", "", 0, 0, 0, "", self.stdout),)


@pytest.fixture
def answers(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Let Slurm answer with these jobs."""

    def give(*entries: QueueEntry) -> None:
        monkeypatch.setattr("gpuslurm.commands.CommandClient", lambda: Queue(*entries))

    return give


@pytest.fixture
def run(plan_of: Make, request_of: Make, work: Path) -> Run:
    """A run directory as a submission makes it."""
    root = work / ".gpusub"
    plan = plan_of(request_of())
    path = create(root, TOKEN, "#!/bin/bash\n", plain(plan))
    (root / "42").symlink_to(TOKEN)
    return Run(path, (42,))


def test_the_list(entry_of: Make) -> None:
    entries = [
        entry_of(id=3, state="PENDING", reason="Priority", name="next\x07"),
        entry_of(id=2),
        entry_of(id=1, state="FAILED", exit_code=3, end="2026-11-30T20:00:05"),
    ]
    assert overview(entries, (), NOW, 80) == [
        "JOB  NAME   STATE       NODES      TIME",
        "3    next?  pending     2          - / 4:00:00",
        "    jobs of higher priority come first (Priority)",
        "2    train  running     gpu-[5,9]  1:12 / 4:00:00",
        "1    train  failed (3)  gpu-[5,9]  1:12, ended 20:00:05",
    ]


def test_it_fits_whatever_the_names(entry_of: Make) -> None:
    entry = entry_of(
        shown="12345678_[1-100,200-300%16]",
        name="a-name-that-says-all-that-can-be-said-of-a-job",
        nodes="gpu-[001-003,005,007,009-064,100-199]",
        state="OUT_OF_MEMORY",
        end="2026-11-28T20:00:05",
        elapsed_s=86400 * 12,
    )
    for most in (80, 120):
        assert max(map(screen.width, overview([entry], (), NOW, most))) <= most


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"state": "RUNNING"}, "running"),
        ({"state": "FAILED", "exit_code": 137}, "failed (137)"),
        ({"state": "FAILED", "signal": 9}, "failed (signal 9)"),
        ({"state": "NODE_FAIL"}, "node fail"),
        ({"state": "CANCELLED", "signal": 15}, "cancelled"),
    ],
)
def test_states(entry_of: Make, fields: dict[str, Any], words: str) -> None:
    assert state_words(entry_of(**fields)) == words


def test_an_end_without_a_time(entry_of: Make) -> None:
    assert times(entry_of(state="REVOKED"), NOW) == "1:12, ended"


class TestDetail:
    def test_the_plan_with_its_origins(self, run: Run, entry_of: Make) -> None:
        target = Target("42", (entry_of(restarts=2),), run)
        lines = detail(target, run.plan(), str(run.path / "log.out"), (), NOW, 80)
        assert lines[2:] == [
            "  nodes       1  (built-in)",
            "  GPUs        8 a node  (all GPUs of a node, by Slurm)",
            "  CPUs        192 a node  (8 GPUs' share of a node)",
            "  memory      all of a node  (all memory of a node)",
            "  partition   gpu  (Slurm's default partition)",
            "  python      /opt/venv/bin/python  (option --python)",
            "  rendezvous  c10d  (built-in)",
            f"  run         .gpusub/{TOKEN}",
            f"  log         .gpusub/{TOKEN}/log.out",
            "  restarts    2",
        ]

    def test_a_run_directory_that_was_removed(self, entry_of: Make, work: Path) -> None:
        target = Target("42", (entry_of(),), Run(work / TOKEN, (42,)))
        assert detail(target, {}, None, (), NOW, 80)[-1] == f"  run         {TOKEN}  (removed)"

    def test_an_id_that_was_handed_out_twice(self, run: Run, entry_of: Make) -> None:
        target = Target("42", (entry_of(),), former=run)
        words = " ".join(" ".join(detail(target, {}, None, (), NOW, 80)).split())
        assert f".gpusub/{TOKEN} is of another job 42, which Slurm has forgotten" in words

    @pytest.mark.parametrize(
        ("recorded", "known", "words"),
        [
            ("0\n", ("COMPLETED", 0), "completed"),
            ("3\n", ("FAILED", 3), "failed (3)"),
            ("what?", ("UNKNOWN", None), "unknown: it left no exit code"),
            (None, ("UNKNOWN", None), "unknown: it left no exit code"),
        ],
    )
    def test_one_that_slurm_has_forgotten(
        self, run: Run, recorded: str | None, known: tuple[str, int | None], words: str
    ) -> None:
        if recorded is not None:
            (run.path / "exit_code").write_text(recorded)
        assert forgotten(run) == known
        assert detail(Target("42", run=run), run.plan(), None, (), NOW, 80)[:2] == [
            f"{TOKEN}  train  {words}",
            "    job 42; Slurm does not know it",
        ]


class TestLog:
    def test_ours(self, run: Run) -> None:
        log = log_of(Target("42", run=run), run.plan(), CommandClient())
        assert log == str(run.path / "log.out")

    def test_a_pattern_is_slurms_to_know(self, run: Run, entry_of: Make) -> None:
        plan = {"log": {"value": "/w/%j.log", "origin": "option --output"}}
        target = Target("42", (entry_of(),), run)
        assert log_of(target, plan, Queue(stdout="/w/42.log")) == "/w/42.log"
        assert log_of(Target("42", run=run), plan, CommandClient()) is None

    def test_none(self, entry_of: Make) -> None:
        assert log_of(Target("42", (entry_of(),)), {}, Queue()) is None


class TestCommand:
    def test_the_list_as_json(
        self, answers: Make, entry_of: Make, capsys: pytest.CaptureFixture[str]
    ) -> None:
        answers(entry_of(id=1, command=""), entry_of(id=2, state="PENDING", reason="Priority"))
        assert cli.run(["status", "--json"]) == 0
        two, one = json.loads(capsys.readouterr().out)
        assert (two["job_id"], two["token"], two["run_dir"]) == (2, TOKEN, f"/w/.gpusub/{TOKEN}")
        assert two["why"] == "jobs of higher priority come first (Priority)"
        assert (one["job_id"], one["token"], one["why"], one["exit_code"]) == (1, None, None, None)

    def test_no_jobs(self, answers: Make, capsys: pytest.CaptureFixture[str]) -> None:
        answers()
        assert cli.run(["status"]) == 0
        assert capsys.readouterr() == ("", "gpusub: no jobs of yours that Slurm knows\n")
        assert cli.run(["status", "--json"]) == 0
        assert capsys.readouterr().out == "[]\n"

    def test_the_last_lines_of_the_log(
        self, run: Run, answers: Make, entry_of: Make, capsys: pytest.CaptureFixture[str]
    ) -> None:
        answers(entry_of(command=f"{run.path}/job.sh"))
        (run.path / "log.out").write_text("\n".join(map(str, range(99))) + "\n\x1b[2Jend\n")
        assert cli.run(["status", "42"]) == 0
        assert capsys.readouterr().out.endswith("\n97\n98\n?[2Jend\n")

    def test_without_slurm(
        self, run: Run, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
    ) -> None:
        class Down(CommandClient):
            def queue(self, job_ids: Sequence[int] | None = None) -> tuple[QueueEntry, ...]:
                raise SlurmUnreachableError("squeue does not start")

        monkeypatch.setattr("gpuslurm.commands.CommandClient", Down)
        assert cli.run(["status"]) == 4
        assert cli.run(["status", TOKEN]) == 4
        (run.path / "exit_code").write_text("0\n")
        assert cli.run(["status", TOKEN]) == 0
        printed = capsys.readouterr()
        assert "completed" in printed.out
        assert printed.err.count("squeue does not start") == 3
