"""What the user asked for, as typed: frozen, checked for form, nothing looked up."""

from __future__ import annotations

import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Generic, Literal, TypeVar

from gpuslurm.text import seconds
from gpusub.errors import GpusubError

T = TypeVar("T")

BUILT_IN = "built-in"


@dataclass(frozen=True)
class Value(Generic[T]):
    """A value and where it came from: an option, a variable, a file, Slurm, or built-in."""

    value: T
    origin: str


@dataclass(frozen=True)
class Program:
    """What to run: a Python script, a module (``-m``), or a command (after ``--``)."""

    kind: Literal["script", "module", "command"]
    target: str
    args: tuple[str, ...] = ()

    @property
    def name(self) -> str:
        """The job's default name."""
        base = self.target if self.kind == "module" else Path(self.target).name
        return base.removesuffix(".py") or "gpusub"


@dataclass(frozen=True)
class Nodes:
    """A number of nodes, or a range that Slurm settles at the start."""

    least: int
    most: int

    def __str__(self) -> str:
        return str(self.least) if self.least == self.most else f"{self.least}-{self.most}"


@dataclass(frozen=True)
class Request:
    """One submission as asked for.

    ``settings`` holds what profiles can state too (partition, time, …); ``sbatch`` what goes to
    sbatch as it is, by its long option name. ``env`` maps each name to a value, or to None for
    "as it is in my environment"; ``origins`` says where each variable was asked for.
    """

    program: Program
    cwd: Path
    chdir: Path | None = None
    nodes: Value[Nodes] = field(default=Value(Nodes(1, 1), BUILT_IN))
    settings: Mapping[str, Value[str]] = field(default_factory=dict)
    sbatch: Mapping[str, Value[str | None]] = field(default_factory=dict)
    env: Mapping[str, str | None] = field(default_factory=dict)
    nccl: Mapping[str, str] = field(default_factory=dict)
    origins: Mapping[str, str] = field(default_factory=dict)
    python: str | None = None
    profile: str | None = None
    max_restarts: int = 0
    exclusive: str | None = None
    run_root: Path | None = None
    local: bool = False


def parse_nodes(origin: str, text: str) -> Nodes:
    """Return the nodes of ``N`` or ``MIN-MAX``.

    Raises:
        GpusubError: the text is neither, or names no node at all.
    """
    match = re.fullmatch(r"(\d+)(?:-(\d+))?", text, re.ASCII)
    if not match or not 0 < int(match[1]) <= int(match[2] or match[1]):
        raise GpusubError(
            f"{origin}: {text!r}: write a number of nodes, or MIN-MAX, as in 2 or 2-4"
        )
    return Nodes(int(match[1]), int(match[2] or match[1]))


def parse_assignment(option: str, text: str) -> tuple[str, str | None]:
    """Return name and value of ``NAME=VALUE``, or None as the value of a bare ``NAME``.

    Raises:
        GpusubError: the name is none that a shell can export.
    """
    name, equals, value = text.partition("=")
    if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII):
        raise GpusubError(f"{option}: {name!r} is no variable's name; write NAME=VALUE")
    return name, value if equals else None


def parse_time(origin: str, text: str) -> int | None:
    """Return the seconds of a time limit, None for unlimited, which 0 is too (sbatch(1)).

    Raises:
        GpusubError: the text is no time limit in any of Slurm's forms.
    """
    try:
        return seconds(text) or None
    except ValueError:
        raise GpusubError(
            f"{origin}: {text!r} is no time limit; write hours:minutes:seconds, as in 04:00:00, "
            "or days-hours, as in 2-12"
        ) from None


# Options of sbatch that --sbatch does not take: what to use instead, or why not.
NOT_PASSED_ON: Mapping[str, str] = {
    "array": "job arrays are not supported",
    "chdir": "use --chdir",
    "clusters": "gpusub plans with what one cluster reports; log in to the other",
    "error": "stdout and stderr share one log; use --output",
    "export-file": "values travel in the environment; use --env",
    "export": "values travel in the environment; use --env",
    "gpus": "gpusub counts GPUs by node; use --gpus-per-node",
    "gpus-per-task": "it hides a worker's GPUs from its neighbours and breaks NVLink; "
    "use --gpus-per-node",
    "gpus-per-socket": "gpusub counts GPUs by node; use --gpus-per-node",
    "nodes": "use --nodes",
    "ntasks": "gpusub starts one task a node; use --nodes",
    "ntasks-per-gpu": "gpusub starts one task a node; use --gpus-per-node",
    "ntasks-per-node": "gpusub starts one task a node, and torch.distributed.run its workers; "
    "use --gpus-per-node",
    "ntasks-per-core": "gpusub starts one task a node",
    "ntasks-per-socket": "gpusub starts one task a node",
    "no-requeue": "the job must be requeueable to survive a node that its prolog finds sick",
    "open-mode": "the log of a requeued job goes on in the same file",
    "overcommit": "it leaves the job one CPU a node",
    "parsable": "use gpusub's own --parsable",
    "requeue": "every job is submitted requeueable",
    "test-only": "use --dry-run",
    "wait": "use gpusub's own --wait",
    "wrap": "write the command after --",
    "gpus-per-node": "use --gpus-per-node",
    "cpus-per-task": "use --cpus-per-task",
    "cpus-per-gpu": "use --cpus-per-task, or cpus_per_gpu in a profile",
    "mem": "use --mem",
    "mem-per-cpu": "use --mem",
    "mem-per-gpu": "use --mem, or mem_per_gpu in a profile",
    "time": "use --time",
    "partition": "use --partition",
    "account": "use --account",
    "qos": "use --qos",
    "job-name": "use --job-name",
    "output": "use --output",
    "constraint": "use --constraint",
    "reservation": "use --reservation",
    "exclude": "use --exclude",
    "nodelist": "use --nodelist",
    "dependency": "use --dependency",
    "comment": "use --comment",
    "mail-type": "use --mail-type",
    "mail-user": "use --mail-user",
    "exclusive": "use --exclusive",
    "help": "sbatch would print its help and submit nothing",
    "usage": "sbatch would print its usage and submit nothing",
    "version": "sbatch would print its version and submit nothing",
    "distribution": "gpusub settles the order of the ranks itself",
}


def parse_sbatch(text: str) -> tuple[str, str | None]:
    """Return name and value of an option for sbatch, given as ``KEY[=VALUE]``.

    Raises:
        GpusubError: the key is no option's name, or one that gpusub settles itself.
    """
    key, equals, value = text.removeprefix("--").partition("=")
    if not re.fullmatch(r"[a-z][a-z0-9-]*", key):
        raise GpusubError(
            f"--sbatch {text}: write KEY or KEY=VALUE with sbatch's long name, as in nice=100"
        )
    # sbatch takes the start of a name for the name.
    for name in (key, *NOT_PASSED_ON):
        if name in NOT_PASSED_ON and name.startswith(key):
            raise GpusubError(f"--sbatch {name}: {NOT_PASSED_ON[name]}")
    return key, value if equals else None


def refuse_control_characters(options: Sequence[tuple[str, str]]) -> None:
    """Refuse line breaks and NULs in values for sbatch, which no log or listing survives."""
    for name, value in options:
        if any(character in value for character in "\n\r\0"):
            raise GpusubError(f"--{name} {value!r}: a line break cannot stand in it; remove it")
