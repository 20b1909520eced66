"""What is left behind by each answer of Slurm's.

The client here gives one answer, in place of a controller that would have to be stopped or killed
at the right moment: tests/cluster does that. These tests are about the run directory.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuslurm.client import (
    Accepted,
    Job,
    SlurmAmbiguousError,
    SlurmRefusedError,
    SlurmUnreachableError,
)
from gpuslurm.commands import CommandClient
from gpusub.errors import ExitCode, GpusubError
from gpusub.plan import Plan
from gpusub.request import Value
from gpusub.submission import NEVER_STARTS, Submission, hopeless, submit

Make = Callable[..., Any]
JOB = Job(42, "PENDING", "None", "", 0, 0, 0, "/x/job.sh", "/x/log.out")


class Client(CommandClient):
    """Answers a submission with ``answer``, and keeps what it was given."""

    def __init__(self, answer: Accepted | BaseException) -> None:
        self.answer = answer
        self.given: tuple[Sequence[str], str, Mapping[str, str], str] | None = None

    def submit(
        self, options: Sequence[str], script: str, env: Mapping[str, str], cwd: str
    ) -> Accepted:
        assert Path(script).read_text() == "#!/bin/bash\n"
        self.given = (options, script, env, cwd)
        if isinstance(self.answer, BaseException):
            raise self.answer
        return self.answer


@pytest.fixture
def plan(plan_of: Make, request_of: Make) -> Plan:
    made: Plan = plan_of(request_of())
    return made


def test_a_job_is_known_by_its_id_and_token(plan: Plan, work: Path) -> None:
    client = Client(Accepted(42, "c2"))
    environ = {"RANK": "0", "PATH": "/bin", "HF_TOKEN": "old"}
    done = submit(plan, "#!/bin/bash\n", client, environ, {"HF_TOKEN": "hunter2"}, work)
    run_dir = Path(plan.run_dir)
    assert done == Submission(42, "c2", plan.token, run_dir, plan.log.value)
    assert client.given == (
        [option.text for option in plan.options],
        f"{run_dir}/job.sh",
        {"PATH": "/bin", "HF_TOKEN": "hunter2"},
        str(work),
    )
    assert (work / ".gpusub" / "42").resolve() == run_dir


def test_a_job_is_told_of_although_its_link_cannot_be_made(plan: Plan, work: Path) -> None:
    root = Path(plan.run_dir).parent
    (root / "42" / "mine").mkdir(parents=True)
    assert submit(plan, "#!/bin/bash\n", Client(Accepted(42)), {}, {}, work).job_id == 42


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (SlurmRefusedError("x"), ExitCode.REFUSED, "Slurm refused the job: x"),
        (
            SlurmRefusedError("Invalid qos specification"),
            ExitCode.REFUSED,
            "Slurm refused the job: Invalid qos specification; see yours with: sacctmgr show "
            "associations user=$USER format=account,qos; choose with --qos",
        ),
        (
            SlurmUnreachableError("x"),
            ExitCode.UNCERTAIN,
            "Slurm was not reached, nothing was submitted: x",
        ),
    ],
)
def test_without_a_job_nothing_is_left(
    plan: Plan, work: Path, error: Exception, code: ExitCode, message: str
) -> None:
    with pytest.raises(GpusubError) as refused:
        submit(plan, "#!/bin/bash\n", Client(error), {}, {}, work)
    assert (str(refused.value), refused.value.code) == (message, code)
    assert not list(work.iterdir())


@pytest.mark.parametrize(
    ("error", "code", "message"),
    [
        (SlurmAmbiguousError("x"), ExitCode.UNCERTAIN, "Slurm gave no certain answer (x); a job"),
        (KeyboardInterrupt(), ExitCode.INTERRUPTED, "interrupted while submitting; a job"),
    ],
)
def test_where_a_job_may_exist_its_directory_stays_and_the_way_to_look_is_said(
    plan: Plan, work: Path, error: BaseException, code: ExitCode, message: str
) -> None:
    with pytest.raises(GpusubError) as uncertain:
        submit(plan, "#!/bin/bash\n", Client(error), {}, {}, work)
    assert uncertain.value.code == code
    assert str(uncertain.value).startswith(f"{message} may exist: look with squeue --me ")
    assert f"grep {plan.token}" in str(uncertain.value)
    assert (Path(plan.run_dir) / "job.sh").is_file()


def test_the_logs_directory_is_there_before_the_job(plan: Plan, work: Path) -> None:
    logged = replace(plan, log=Value(str(work / "logs" / "%x-%j.out"), "option --output"))
    submit(logged, "#!/bin/bash\n", Client(Accepted(42)), {}, {}, work)
    assert (work / "logs").is_dir()


@pytest.mark.parametrize(
    ("state", "reason", "lost"),
    [
        *(("PENDING", reason, True) for reason in NEVER_STARTS),
        ("PENDING", "None", False),
        ("PENDING", "Resources", False),
        ("PENDING", "Priority", False),
        ("PENDING", "BeginTime", False),
        ("RUNNING", "PartitionDown", False),
        ("FAILED", "BadConstraints", True),
    ],
)
def test_a_job_that_will_not_start(state: str, reason: str, lost: bool) -> None:
    assert bool(hopeless(replace(JOB, state=state, reason=reason))) == lost
