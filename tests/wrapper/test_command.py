"""From a request to what is said about it.

The client gives the answers of one test's choice: what a real controller answers is in
tests/cluster. Here it is about what is printed where, and what may be left behind.
"""

from __future__ import annotations

import json
import os
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuslurm import commands
from gpuslurm.client import (
    Accepted,
    Inventory,
    Job,
    SlurmAmbiguousError,
    SlurmError,
    SlurmRefusedError,
    SlurmUnreachableError,
)
from gpusub import command, follow, rundir
from gpusub.cli import run

Capture = pytest.CaptureFixture[str]
OUTAGE = "Unable to contact slurm controller (connect failure)"


class Slurm:
    """Answers in place of Slurm: with what it holds, or by raising it."""

    facts: Inventory | SlurmError
    accepts: Accepted | SlurmError
    jobs: Sequence[Callable[[str], Job] | BaseException]

    def __init__(self, facts: Inventory) -> None:
        self.facts, self.accepts = facts, Accepted(42)
        self.jobs = [lambda command: JOB(command)]
        self.submitted: list[tuple[list[str], str]] = []
        self.asked = 0


def JOB(command: str, state: str = "PENDING", **fields: Any) -> Job:
    return replace(Job(42, state, "None", "", 0, 0, 0, command, "/log"), **fields)


@pytest.fixture
def slurm(
    work: Path,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    inventory: Callable[..., Inventory],
) -> Slurm:
    made = Slurm(inventory())

    def answer(value: Any) -> Any:
        if isinstance(value, BaseException):
            raise value
        return value

    class Question(commands.InventoryQuestion):
        def __enter__(self) -> Question:
            return self

        def go_on(self) -> None:
            answer(made.facts)

        def answer(self) -> Inventory:
            facts: Inventory = answer(made.facts)
            return facts

    def submit(
        _: object, options: Sequence[str], script: str, env: Mapping[str, str], cwd: str
    ) -> Accepted:
        made.submitted.append((list(options), script))
        accepted: Accepted = answer(made.accepts)
        return accepted

    def jobs(_: object, job_id: int) -> tuple[Job, ...]:
        found = answer(made.jobs[min(made.asked, len(made.jobs) - 1)])
        made.asked += 1
        return (found(made.submitted[-1][1]),)

    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "sbatch").write_text("#!/bin/sh\nexit 9\n")
    (tmp_path / "bin" / "sbatch").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}{os.pathsep}{os.environ['PATH']}")
    monkeypatch.setattr(commands, "InventoryQuestion", Question)
    monkeypatch.setattr(commands.CommandClient, "submit", submit)
    monkeypatch.setattr(commands.CommandClient, "jobs", jobs)
    # The tests' own directory is one that other nodes would not see.
    monkeypatch.setattr(rundir, "_NODE_LOCAL_PATHS", ())
    monkeypatch.setattr(command, "_mountinfo", lambda: "")
    monkeypatch.setattr(follow, "FIRST_POLL_S", 0.001)
    monkeypatch.setattr(follow, "LOG_INTERVAL_S", 0.001)
    monkeypatch.setattr(follow, "LAST_LOOK_S", 0.01)
    (work / "train.py").touch()
    return made


def token_of(slurm: Slurm) -> str:
    return Path(slurm.submitted[-1][1]).parent.name


class TestDryRun:
    def test_the_script_is_on_stdout_and_the_rest_beside(
        self, slurm: Slurm, work: Path, capfd: Capture
    ) -> None:
        assert run(["--dry-run", "-J", "it's a name", "train.py"]) == 0
        out, err = capfd.readouterr()
        assert out.startswith("#!/bin/bash\n")
        assert (slurm.submitted, list(work.iterdir())) == ([], [work / "train.py"])
        # What would be run can be run as it is shown.
        words = shlex.split(err.removeprefix("gpusub: would run: "))
        assert words[:3] == ["sbatch", "--partition=gpu", "--nodes=1"]
        assert "--job-name=it's a name" in words
        assert words[-1].endswith("/job.sh")

    def test_as_json_there_is_nothing_beside(self, slurm: Slurm, capfd: Capture) -> None:
        assert run(["--dry-run", "--json", "train.py"]) == 0
        out, err = capfd.readouterr()
        assert err == ""
        assert json.loads(out)["options"][0] == {
            "name": "partition",
            "value": "gpu",
            "origin": "Slurm's default partition",
        }

    def test_warnings_are_said(
        self, slurm: Slurm, capfd: Capture, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setenv("SBATCH_WAIT", "1")
        assert run(["--dry-run", "--json", "train.py"]) == 0
        assert capfd.readouterr().err == (
            "gpusub: SBATCH_WAIT is left out: gpusub has its own --wait\n"
        )


class TestWithoutAJob:
    def refused(self, argv: list[str], code: int, work: Path, capfd: Capture) -> str:
        assert run(argv) == code
        out, err = capfd.readouterr()
        assert out == ""
        assert err.count("\n") == 1
        assert list(work.iterdir()) == [work / "train.py"]
        return err.removeprefix("gpusub: error: ").rstrip("\n")

    @pytest.mark.parametrize(
        ("error", "code", "message"),
        [
            (
                SlurmUnreachableError(OUTAGE),
                4,
                f"Slurm was not reached, nothing was submitted: {OUTAGE}",
            ),
            (
                SlurmAmbiguousError("Socket timed out on send/recv operation"),
                4,
                "Slurm was not reached, nothing was submitted: Socket timed out on send/recv",
            ),
            (SlurmRefusedError("denied"), 3, "Slurm does not say what there is: denied"),
        ],
    )
    def test_slurm_does_not_say_what_there_is(
        self,
        slurm: Slurm,
        work: Path,
        capfd: Capture,
        error: SlurmError,
        code: int,
        message: str,
    ) -> None:
        slurm.facts = error
        assert self.refused(["train.py"], code, work, capfd).startswith(message)
        assert slurm.submitted == []

    @pytest.mark.parametrize(
        ("error", "code", "message"),
        [
            (SlurmRefusedError("no"), 3, "Slurm refused the job: no"),
            (
                SlurmUnreachableError(OUTAGE),
                4,
                f"Slurm was not reached, nothing was submitted: {OUTAGE}",
            ),
        ],
    )
    @pytest.mark.parametrize("how", [[], ["--json"], ["--parsable"], ["--follow"]])
    def test_slurm_takes_none(
        self,
        slurm: Slurm,
        work: Path,
        capfd: Capture,
        error: SlurmError,
        code: int,
        message: str,
        how: list[str],
    ) -> None:
        slurm.accepts = error
        assert self.refused([*how, "train.py"], code, work, capfd) == message

    def test_what_slurm_could_not_give_is_not_asked_for(
        self, slurm: Slurm, work: Path, capfd: Capture
    ) -> None:
        message = self.refused(["-N", "5", "train.py"], 2, work, capfd)
        assert message == (
            "option --nodes: 5 nodes with 8 GPUs, and partition gpu has 4; ask for fewer"
        )
        assert slurm.submitted == []

    def test_a_place_that_other_nodes_do_not_see(
        self,
        slurm: Slurm,
        work: Path,
        capfd: Capture,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        monkeypatch.setattr(command, "_mountinfo", lambda: "1 0 0:1 / / rw - tmpfs none rw\n")
        assert "it is on tmpfs, which no other node sees" in self.refused(
            ["train.py"], 2, work, capfd
        )
        assert slurm.submitted == []


class TestAJob:
    def test_what_a_person_is_told(self, slurm: Slurm, capfd: Capture) -> None:
        assert run(["-N", "2", "train.py"]) == 0
        assert capfd.readouterr() == (
            "Submitted batch job 42\n",
            "  train on 2 nodes of partition gpu: 8 GPUs, 192 CPUs, all memory on each\n"
            f"  log .gpusub/{token_of(slurm)}/log.out\n",
        )

    @pytest.mark.parametrize(
        ("accepted", "line"), [(Accepted(42), "42\n"), (Accepted(42, "c2"), "42;c2\n")]
    )
    def test_parsable_is_the_id_alone(
        self, slurm: Slurm, capfd: Capture, accepted: Accepted, line: str
    ) -> None:
        slurm.accepts = accepted
        assert run(["--parsable", "train.py"]) == 0
        assert capfd.readouterr() == (line, "")

    def test_json_is_one_object(self, slurm: Slurm, work: Path, capfd: Capture) -> None:
        assert run(["--json", "train.py"]) == 0
        out, err = capfd.readouterr()
        run_dir = work / ".gpusub" / token_of(slurm)
        assert err == ""
        assert json.loads(out) == {
            "job_id": 42,
            "cluster": None,
            "token": token_of(slurm),
            "run_dir": str(run_dir),
            "log": str(run_dir / "log.out"),
        }

    def test_the_log_is_where_slurm_writes_it(
        self, slurm: Slurm, work: Path, capfd: Capture
    ) -> None:
        slurm.jobs = [lambda command: JOB(command, stdout="/w/logs/train-42.out")]
        assert run(["--json", "-o", "logs/%x-%j.out", "train.py"]) == 0
        assert json.loads(capfd.readouterr().out)["log"] == "/w/logs/train-42.out"

    def test_one_that_will_not_start_is_told_of(self, slurm: Slurm, capfd: Capture) -> None:
        slurm.jobs = [lambda command: JOB(command, reason="PartitionNodeLimit")]
        assert run(["--parsable", "train.py"]) == 0
        assert capfd.readouterr().err == (
            "gpusub: job 42 was accepted and will not start (PartitionNodeLimit): more or fewer "
            "nodes than the partition lets a job have; take it back with gpusub cancel 42\n"
        )

    def test_another_job_of_that_id_is_not_looked_at(self, slurm: Slurm, capfd: Capture) -> None:
        slurm.jobs = [lambda _: JOB("/other/job.sh", reason="PartitionDown", stdout="/other")]
        assert run(["--json", "-o", "x.out", "train.py"]) == 0
        out, err = capfd.readouterr()
        assert err == ""
        assert json.loads(out)["log"].endswith("/work/x.out")

    @pytest.mark.parametrize("how", [[], ["--json"], ["--parsable"]])
    def test_it_is_told_of_although_slurm_is_away_right_after(
        self, slurm: Slurm, capfd: Capture, how: list[str]
    ) -> None:
        slurm.jobs = [SlurmUnreachableError(OUTAGE)]
        assert run([*how, "train.py"]) == 0
        out, err = capfd.readouterr()
        assert "42" in out
        assert f"gpusub: job 42 was accepted; its state is unknown: {OUTAGE}\n" in err

    @pytest.mark.parametrize("how", [[], ["--json"], ["--parsable"]])
    def test_or_the_person_does_not_wait(
        self, slurm: Slurm, capfd: Capture, how: list[str]
    ) -> None:
        slurm.jobs = [KeyboardInterrupt()]
        assert run([*how, "train.py"]) == 130
        assert "job 42 was accepted" in capfd.readouterr().err


class TestWaiting:
    @pytest.mark.parametrize("how", [["--wait"], ["--follow"], ["--wait", "--follow"]])
    @pytest.mark.parametrize(
        ("end", "code"),
        [
            ({"state": "COMPLETED"}, 0),
            ({"state": "FAILED", "exit_code": 7}, 7),
            ({"state": "CANCELLED", "signal": 15}, 143),
            ({"state": "TIMEOUT"}, 1),
        ],
    )
    def test_the_jobs_exit_code_comes_out(
        self, slurm: Slurm, capfd: Capture, how: list[str], end: dict[str, Any], code: int
    ) -> None:
        slurm.jobs = [JOB, lambda command: JOB(command, **end)]
        assert run([*how, "train.py"]) == code
        out, err = capfd.readouterr()
        assert out == "Submitted batch job 42\n"
        assert err.splitlines()[-1].startswith(f"gpusub: job 42 {str(end['state']).lower()}")

    def test_json_has_the_end_in_it(self, slurm: Slurm, capfd: Capture) -> None:
        slurm.jobs = [JOB, lambda command: JOB(command, "FAILED", exit_code=7)]
        assert run(["--wait", "--json", "train.py"]) == 7
        told = json.loads(capfd.readouterr().out)
        assert (told["job_id"], told["state"]) == (42, "FAILED")
        assert (told["exit_code"], told["exit_source"]) == (7, "slurm")

    def test_the_log_follows_the_submission(self, slurm: Slurm, work: Path, capfd: Capture) -> None:
        def writing(command: str) -> Job:
            Path(command).with_name("log.out").write_text("hello\n")
            return JOB(command, "COMPLETED")

        slurm.jobs = [JOB, JOB, writing]
        assert run(["--follow", "train.py"]) == 0
        assert capfd.readouterr().out == "Submitted batch job 42\nhello\n"

    def test_who_stops_waiting_is_told_how_to_go_on(self, slurm: Slurm, capfd: Capture) -> None:
        slurm.jobs = [JOB, JOB, KeyboardInterrupt()]
        assert run(["--follow", "train.py"]) == 130
        assert capfd.readouterr().err.endswith(
            "gpusub: job 42 goes on; see it with gpusub logs -f 42, end it with gpusub cancel 42\n"
        )
