"""What is asked of Slurm, and the values it answers with."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Protocol

if TYPE_CHECKING:
    from gpuslurm.queue import QueueEntry, Unavailable


class SlurmError(Exception):
    """A Slurm command did not do what was asked; the message is Slurm's own, on one line."""


class SlurmRefusedError(SlurmError):
    """The controller answered, and its answer is no."""


class SlurmUnreachableError(SlurmError):
    """The controller was not reached; nothing happened there."""


class SlurmAmbiguousError(SlurmError):
    """The request may or may not have taken effect: no answer came back."""


@dataclass(frozen=True)
class Partition:
    """One partition (scontrol(1), ``show partition``). None is "no limit" or "not set"."""

    name: str
    default: bool
    state: str
    nodes: int
    min_nodes: int = 0
    max_nodes: int | None = None
    max_time_s: int | None = None
    max_cpus_per_node: int | None = None
    max_mem_per_node_mb: int | None = None
    def_cpu_per_gpu: int | None = None
    def_mem_per_gpu_mb: int | None = None


@dataclass(frozen=True)
class NodeKind:
    """The nodes of one partition that are alike.

    ``cpus`` and ``memory_mb`` are what jobs can have of a node, without the cores and memory
    that are set aside for the system (CoreSpecCount, MemSpecLimit). ``names`` is Slurm's
    hostlist expression.
    """

    partition: str
    names: str
    count: int
    cpus: int
    threads_per_core: int
    memory_mb: int
    gpus: int
    features: frozenset[str] = frozenset()
    gpu_types: tuple[str, ...] = ()


@dataclass(frozen=True)
class Defaults:
    """The controller's own JobDefaults (slurm.conf(5)), below those of a partition."""

    def_cpu_per_gpu: int | None = None
    def_mem_per_gpu_mb: int | None = None


@dataclass(frozen=True)
class Inventory:
    """What a submission is planned from, read in one go."""

    partitions: tuple[Partition, ...]
    kinds: tuple[NodeKind, ...]
    defaults: Defaults = field(default_factory=Defaults)


@dataclass(frozen=True)
class Job:
    """One job, or one task of a job array, as the controller knows it.

    ``exit_code`` and ``signal`` are meaningful once the job has ended. ``command`` is the
    path of the batch script, ``stdout`` the path of its output.
    """

    id: int
    state: str
    reason: str
    nodes: str
    exit_code: int
    signal: int
    restarts: int
    command: str
    stdout: str

    @property
    def ended(self) -> bool:
        """Whether the job is over and will not run again by itself."""
        return self.state in ENDED


# squeue(1), JOB STATE CODES: the states after which nothing comes. COMPLETING is not among
# them (the epilog still runs), nor are REQUEUED and its kin (the job will run again).
ENDED = frozenset(
    {
        "BOOT_FAIL",
        "CANCELLED",
        "COMPLETED",
        "DEADLINE",
        "FAILED",
        "NODE_FAIL",
        "OUT_OF_MEMORY",
        "PREEMPTED",
        "REVOKED",
        "TIMEOUT",
    }
)


@dataclass(frozen=True)
class Accepted:
    """sbatch's answer: the job's id, and the cluster's name where several are federated.

    ``message`` is what sbatch or a site's wrapper of it said beside, for people.
    """

    job_id: int
    cluster: str | None = None
    message: str = ""


class SlurmClient(Protocol):
    """Everything that the tools ask of Slurm. Every call ends within a deadline.

    Raises SlurmUnreachableError where the controller gave no answer, SlurmRefusedError where it
    said no; ``submit`` also SlurmAmbiguousError.
    """

    def inventory(self) -> Inventory:
        """Return the partitions that the user can see and the kinds of nodes in them."""
        ...

    def jobs(self, job_id: int) -> tuple[Job, ...]:
        """Return the job, or every task of a job array; empty where Slurm knows none."""
        ...

    def queue(self, job_ids: Sequence[int] | None = None) -> tuple[QueueEntry, ...]:
        """Return the user's own jobs, or those of these ids whoever has them.

        Ended ones are among them as long as the controller remembers them.
        """
        ...

    def unavailable(self) -> tuple[Unavailable, ...]:
        """Return the nodes that take no job now, by partition, state and reason."""
        ...

    def cancel(self, jobs: Sequence[str]) -> None:
        """End jobs, arrays (``12``) or tasks of one (``12_3``); one that is over stays so."""
        ...

    def submit(
        self, options: Sequence[str], script: str, env: Mapping[str, str], cwd: str
    ) -> Accepted:
        """Hand ``script`` to sbatch with ``options``, in ``env`` and from ``cwd``."""
        ...
