"""Slurm's own commands: the one module that runs them.

They run without the user's ``SQUEUE_*``, ``SINFO_*``, ``SACCT_*``, ``SCONTROL_*`` and
``SCANCEL_*``, any of which can empty a listing with exit code 0, and without what a surrounding
job planted.
"""

from __future__ import annotations

import os
import re
import shutil
import subprocess
from collections.abc import Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import TYPE_CHECKING, NoReturn

from gpuslurm import text
from gpuslurm.client import (
    Accepted,
    Inventory,
    Job,
    NodeKind,
    SlurmAmbiguousError,
    SlurmError,
    SlurmRefusedError,
    SlurmUnreachableError,
)

if TYPE_CHECKING:
    from gpuslurm.queue import QueueEntry, Unavailable

# A hung controller is given up on by the commands themselves after MessageTimeout (10 s, and
# some sites use 60); this one is for a command that hangs all the same.
QUERY_TIMEOUT_S = 90.0
# sbatch repeats "temporarily unable to accept job" for 1 + 2 + … + 15 s by itself
# (SchedMD/slurm:src/sbatch/sbatch.c).
SUBMIT_TIMEOUT_S = 240.0

_BLINDING = ("SQUEUE_", "SINFO_", "SACCT_", "SCONTROL_", "SCANCEL_", "SLURM_")

# What stands in stderr where nothing reached the controller …
_UNREACHABLE = (
    "Unable to contact slurm controller",
    "Munge encode failed",
    "If munged is up",
    "Could not establish a configuration source",
    "Unable to process configuration file",
    "Slurm backup controller in standby mode",
    "Unable to resolve",
)
# … and where a request may have been carried out although no answer came back.
_AMBIGUOUS = (
    "Socket timed out on send/recv operation",
    "Connection reset by peer",
    "Connection timed out",
    "Zero Bytes were transmitted or received",
    "Transport endpoint is not connected",
    "Message receive failure",
    "Message send failure",
    "Unexpected message received",
)


def clean_environment(environ: Mapping[str, str]) -> dict[str, str]:
    """Return ``environ`` without what changes the output of Slurm's commands."""
    env = {
        name: value
        for name, value in environ.items()
        if not name.startswith(_BLINDING) or name in ("SLURM_CONF", "SLURM_JWT")
    }
    env["SLURM_TIME_FORMAT"] = "standard"
    # Otherwise squeue cuts an array's list of tasks off after 64 characters.
    env["SLURM_BITSTR_LEN"] = "0"
    return env


def error_of(argv: Sequence[str], stderr: str) -> SlurmError:
    """Return the error that ``stderr`` of a failed command speaks of, on one line."""
    lines = [_strip_prefix(line) for line in stderr.splitlines() if line.strip()]
    message = "; ".join(dict.fromkeys(lines)) or f"{argv[0]} failed without a word"
    # One of two controllers may have taken it before the other was not reached.
    if any(known in stderr for known in _AMBIGUOUS):
        return SlurmAmbiguousError(message)
    if any(known in stderr for known in _UNREACHABLE):
        return SlurmUnreachableError(message)
    return SlurmRefusedError(message)


def _strip_prefix(line: str) -> str:
    return re.sub(r"^(\S+: )?(error|fatal): ", "", line.strip())


class _Running:
    """A Slurm command under way, so that several can run at the same time."""

    def __init__(self, argv: Sequence[str]) -> None:
        self.argv = argv
        try:
            self.process = subprocess.Popen(
                argv,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.PIPE,
                stderr=subprocess.PIPE,
                env=clean_environment(os.environ),
                text=True,
                errors="surrogateescape",
            )
        except OSError as error:
            raise SlurmUnreachableError(f"{argv[0]} does not start: {error.strerror}") from error

    def result(self) -> str:
        """Return stdout; raise what stderr says, or SlurmUnreachableError at the deadline."""
        try:
            out, err = self.process.communicate(timeout=QUERY_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self.stop()
            raise SlurmUnreachableError(
                f"{self.argv[0]} gave no answer in {QUERY_TIMEOUT_S:.0f} s"
            ) from None
        if self.process.returncode:
            # Some of scontrol's refusals are on stdout.
            raise error_of(self.argv, err or out)
        return out

    def stop(self) -> None:
        self.process.kill()
        # What a site's wrapper has started may hold the pipes open: nothing more is read of them.
        for pipe in (self.process.stdout, self.process.stderr):
            if pipe is not None:
                pipe.close()
        self.process.wait()


@contextmanager
def _running(*commands: Sequence[str]) -> Iterator[list[_Running]]:
    """Start the commands side by side; those whose result nobody waited for end with the block."""
    running: list[_Running] = []
    try:
        for argv in commands:
            running.append(_Running(argv))
        yield running
    finally:
        for command in running:
            if command.process.returncode is None:
                command.stop()


def _output(*argv: str) -> str:
    """Run one command and return what it printed."""
    with _running(argv) as (command,):
        return command.result()


def available() -> bool:
    """Whether this machine can submit to Slurm at all."""
    return shutil.which("sbatch") is not None


class InventoryQuestion:
    """The inventory, asked for in two rounds of commands that run while the caller does more.

    Slurm takes 15 ms for each, and loading the rest of a program as long. What still runs when
    the ``with`` block ends is stopped.
    """

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._first: list[_Running] = []
        self._second: list[_Running] = []
        self._answers: tuple[str, tuple[NodeKind, ...], str] | None = None

    def __enter__(self) -> InventoryQuestion:
        self._first = self._ask(
            ["scontrol", "--all", "--oneliner", "show", "partition"],
            ["sinfo", "--all", "--noheader", "--format", text.SINFO_FORMAT],
            ["scontrol", "show", "config"],
        )
        return self

    def __exit__(self, *_error: object) -> None:
        self._stack.close()

    def _ask(self, *commands: Sequence[str]) -> list[_Running]:
        return self._stack.enter_context(_running(*commands))

    def go_on(self) -> None:
        """Wait for the first round and start the second.

        That is about the cores and memory that nodes keep for the system. sinfo does not print
        them, so one node of each kind is looked at: a listing of all nodes would take seconds on
        a large cluster.
        """
        shown, listed, config = (command.result() for command in self._first)
        kinds = text.node_kinds(listed)
        samples = ",".join(sorted({text.first_name(kind.names) for kind in kinds}))
        if samples:
            self._second = self._ask(["scontrol", "--all", "--oneliner", "show", "node", samples])
        self._answers = shown, kinds, config

    def answer(self) -> Inventory:
        """Wait for what is still to come and return all of it."""
        if self._answers is None:
            self.go_on()
        assert self._answers is not None
        shown, kinds, config = self._answers
        nodes = "".join(command.result() for command in self._second)
        found = {
            name: (cpus, memory)
            for name, cpus, memory in map(text.usable, filter(None, nodes.splitlines()))
        }
        return Inventory(
            partitions=text.partitions(shown),
            kinds=tuple(_usable(kind, *found[text.first_name(kind.names)]) for kind in kinds),
            defaults=text.config_defaults(config),
        )


def _usable(kind: NodeKind, cpus: int, memory_mb: int) -> NodeKind:
    return replace(kind, cpus=min(kind.cpus, cpus), memory_mb=min(kind.memory_mb, memory_mb))


class CommandClient:
    """SlurmClient over sbatch, scontrol and sinfo; works from Slurm 22.05 on."""

    def inventory(self) -> Inventory:
        """Return the partitions and their nodes (see SlurmClient)."""
        with InventoryQuestion() as question:
            return question.answer()

    def jobs(self, job_id: int) -> tuple[Job, ...]:
        """Return the job or the tasks of the array (see SlurmClient)."""
        try:
            shown = _output("scontrol", "--all", "--oneliner", "show", "job", str(job_id))
        except SlurmRefusedError as error:
            if "Invalid job id" in str(error):
                return ()
            raise
        return text.jobs(shown)

    def queue(self, job_ids: Sequence[int] | None = None) -> tuple[QueueEntry, ...]:
        """Return the user's jobs or those of these ids (see SlurmClient)."""
        if job_ids is None:
            whose = "--me"
        elif job_ids:
            whose = "--jobs=" + ",".join(map(str, job_ids))
        else:
            return ()
        try:
            printed = _output(
                *("squeue", "--all", "--noheader", "--states=all", whose),
                *("--Format", text.QUEUE_FORMAT),
            )
        except SlurmRefusedError as error:
            if "Invalid job id" in str(error):
                return ()
            raise
        return text.queue(printed)

    def unavailable(self) -> tuple[Unavailable, ...]:
        """Return the nodes that take no job now (see SlurmClient)."""
        return text.unavailable(
            _output("sinfo", "--all", "--noheader", "--format", text.UNAVAILABLE_FORMAT)
        )

    def cancel(self, jobs: Sequence[str]) -> None:
        """Run scancel once (see SlurmClient)."""
        _output("scancel", *jobs)

    def submit(
        self, options: Sequence[str], script: str, env: Mapping[str, str], cwd: str
    ) -> Accepted:
        """Run sbatch once (see SlurmClient)."""
        argv = ["sbatch", "--parsable", *options, script]
        try:
            done = subprocess.run(
                argv,
                stdin=subprocess.DEVNULL,
                capture_output=True,
                env=dict(env),
                cwd=cwd,
                text=True,
                errors="surrogateescape",
                timeout=SUBMIT_TIMEOUT_S,
                check=False,
            )
        except OSError as error:
            raise SlurmUnreachableError(f"sbatch does not start: {error.strerror}") from error
        except subprocess.TimeoutExpired:
            raise SlurmAmbiguousError(
                f"sbatch gave no answer in {SUBMIT_TIMEOUT_S:.0f} s"
            ) from None
        if done.returncode:
            raise error_of(argv, done.stderr)
        job_id, _, cluster = done.stdout.strip().partition(";")
        if not job_id.isdigit():
            raise SlurmAmbiguousError(f"sbatch printed {done.stdout!r} in place of a job id")
        return Accepted(int(job_id), cluster or None, done.stderr)


def become_step(
    job_id: int, node: str | None, terminal: bool, words: Sequence[str], env: Mapping[str, str]
) -> NoReturn:
    """Become srun, which runs ``words`` in a job that runs already, beside its other steps.

    Terminal, signals and exit code are srun's own from here on.

    Raises:
        SlurmUnreachableError: srun does not start.
    """
    argv = step_command(job_id, node, terminal, words)
    try:
        os.execvpe(argv[0], argv, env)
    except OSError as error:
        raise SlurmUnreachableError(f"srun does not start: {error.strerror}") from error


def step_command(job_id: int, node: str | None, terminal: bool, words: Sequence[str]) -> list[str]:
    """Return the srun that become_step becomes."""
    return [
        *("srun", f"--jobid={job_id}", "--overlap", "--nodes=1", "--ntasks=1"),
        *((f"--nodelist={node}",) if node else ()),
        *(("--pty",) if terminal else ()),
        "--",
        *words,
    ]
