"""Jobs as a listing of the queue shows them, and the nodes that take none.

Apart from the other values, so that a submission does not load them.
"""

from __future__ import annotations

from dataclasses import dataclass

from gpuslurm.client import ENDED


@dataclass(frozen=True)
class QueueEntry:
    """One line of the queue: a job, a task of an array, or an array's tasks yet to start.

    ``id`` is the number that Slurm's commands take, ``shown`` what people see (``12_3``,
    ``12_[4-9%2]``); ``array_id`` is the array's number and that of a job without one. ``tasks``
    are those of an array, as written there. Times are Slurm's own text, "" where there is none;
    ``start`` of a pending job is Slurm's estimate. ``limit_s`` None is no limit.
    """

    id: int
    array_id: int
    tasks: str
    shown: str
    user: str
    name: str
    partition: str
    state: str
    reason: str
    nodes: str
    node_count: int
    elapsed_s: int
    limit_s: int | None
    submitted: str
    eligible: str
    start: str
    end: str
    dependency: str
    switches: int
    switches_wait_s: int
    restarts: int
    exit_code: int
    signal: int
    command: str

    @property
    def ended(self) -> bool:
        """Whether the job is over and will not run again by itself."""
        return self.state in ENDED


@dataclass(frozen=True)
class Unavailable:
    """Nodes of a partition that take no job now, and who or what says so."""

    partition: str
    state: str
    nodes: str
    reason: str
