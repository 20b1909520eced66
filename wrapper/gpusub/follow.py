"""A job's log as it grows, and the job's end."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import dataclass
from threading import Thread

from gpuslurm.client import Job, SlurmClient, SlurmError
from gpusub import rundir
from gpusub.errors import ExitCode, GpusubError
from gpusub.submission import Submission, hopeless
from gpusub.tail import Source
from gpusub.tail import Tail as Tail  # a part of this module for those that use it

LOG_INTERVAL_S = 0.1
# squeue and scontrol of many waiting users load the controller: the interval grows.
FIRST_POLL_S, LAST_POLL_S = 0.5, 10.0
# How long the log stands still for an answer.
ANSWER_S = 0.2
# How long a job may be unknown to Slurm before that is its end: a restarting controller may
# not know it for a moment.
UNKNOWN_S = 30.0
# What the last node wrote may reach a network file system a moment after the job's end.
LAST_LOOK_S = 1.0


@dataclass(frozen=True)
class Ending:
    """How a job ended: the code to exit with, and who said so (slurm, run directory, local)."""

    exit_code: int
    exit_source: str
    state: str


def exit_code_of(job: Job) -> int:
    """Return the code to exit with for a job that ended: its own, never 0 for a failure."""
    code = job.exit_code or (128 + job.signal if job.signal else 0)
    return code if code or job.state == "COMPLETED" else 1


def follow(
    client: SlurmClient,
    submission: Submission,
    tail: Source | None,
    report: Callable[[str], None],
) -> Ending:
    """Copy the log through ``tail`` until the job has ended; say each change of its state.

    Raises:
        GpusubError: Slurm does not know the job any more and it left no exit code.
    """
    watch = _Watch(client, submission, report)
    while True:
        new = tail.copy() if tail else False
        ending = watch.look()
        if ending is not None:
            deadline = time.monotonic() + LAST_LOOK_S
            while tail and time.monotonic() < deadline:
                if not tail.copy():
                    time.sleep(LOG_INTERVAL_S)
            return ending
        if not new:
            time.sleep(LOG_INTERVAL_S)


class _Watch:
    """The job's state, asked for at a growing interval."""

    def __init__(
        self, client: SlurmClient, submission: Submission, report: Callable[[str], None]
    ) -> None:
        self.client, self.submission, self.report = client, submission, report
        self.interval_s, self.due = FIRST_POLL_S, time.monotonic()
        self.said = ""
        self.thread: Thread | None = None
        self.result: tuple[Job, ...] | BaseException = ()
        self.unknown_since: float | None = None

    def look(self) -> Ending | None:
        """Return the job's end, once it is over."""
        now = time.monotonic()
        if now < self.due:
            return None
        self.interval_s = min(self.interval_s * 1.3, LAST_POLL_S)
        self.due = now + self.interval_s
        answer = self._answer()
        if answer is None:
            self.due = now
            return None
        if isinstance(answer, SlurmError):
            self._say(f"Slurm does not answer ({answer}); asking again")
            return self._recorded("not reached")
        jobs = answer
        # After a controller lost its state, the same id can be somebody else's job.
        ours = [job for job in jobs if self.submission.token in job.command]
        if not ours:
            return self._unknown(now)
        self.unknown_since = None
        job = ours[0]
        self._say(_words(job))
        if job.ended:
            return Ending(exit_code_of(job), "slurm", job.state)
        return None

    def _answer(self) -> tuple[Job, ...] | SlurmError | None:
        """Return Slurm's answer, or None while it lets itself be waited for: the log goes on."""
        if self.thread is None:
            self.thread = Thread(target=self._ask, daemon=True)
            self.thread.start()
        self.thread.join(ANSWER_S)
        if self.thread.is_alive():
            return None
        self.thread = None
        if isinstance(self.result, BaseException) and not isinstance(self.result, SlurmError):
            raise self.result
        return self.result

    def _ask(self) -> None:
        try:
            self.result = self.client.jobs(self.submission.job_id)
        except BaseException as error:  # noqa: BLE001 - raised again where it is waited for
            self.result = error

    def _say(self, words: str) -> None:
        if words != self.said:
            self.report(words)
            self.said, self.interval_s = words, FIRST_POLL_S

    def _recorded(self, state: str) -> Ending | None:
        code = rundir.recorded_exit_code(self.submission.run_dir)
        return None if code is None else Ending(code, "run directory", state)

    def _unknown(self, now: float) -> Ending | None:
        ending = self._recorded("forgotten by Slurm")
        if ending is not None:
            return ending
        self.unknown_since = self.unknown_since or now
        if now - self.unknown_since > UNKNOWN_S:
            raise GpusubError(
                f"Slurm does not know job {self.submission.job_id} any more and it left no exit "
                f"code; its log is {self.submission.log}",
                ExitCode.UNCERTAIN,
            )
        self._say(f"Slurm does not know job {self.submission.job_id}; asking again")
        return None


def _words(job: Job) -> str:
    state = job.state.lower()
    if job.state == "PENDING":
        why = hopeless(job)
        reason = "" if job.reason in ("None", "") else f": {job.reason}"
        return f"job {job.id} is pending{reason}" + (f" ({why})" if why else "")
    if job.state in ("RUNNING", "CONFIGURING", "COMPLETING"):
        return f"job {job.id} is {state} on {job.nodes}"
    if job.ended:
        code = f", exit code {job.exit_code}" if job.exit_code else ""
        signal = f", signal {job.signal}" if job.signal else ""
        return f"job {job.id} {state.replace('_', ' ')}{code}{signal}"
    return f"job {job.id} is {state}"
