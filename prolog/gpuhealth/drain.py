"""Taking this node out of service, and never more nodes at once than the policy allows.

There is no daemon that counts; each node decides for itself, and all by the same rule:

a. Read first. Are there as many nodes of ours drained as may be, then this one is not.
b. Drain. That this is about to happen has been written down before.
c. Wait until the second is over in which slurmctld noted the drain. Who is drained later has a
   later time, so that nobody can come in front of this node any more.
d. Reread. A node whose place by (time, name) among ours is within the cap stays drained; any
   other lifts its own drain, if the reason is still its own, byte for byte.
e. What is left open, since slurmctld did not answer or this process was ended, stays written
   down, and the next periodic run settles it as in d.

Without an answer of slurmctld's nobody knows how many nodes are drained, so nothing is drained:
a job on a sick node is one job, a drained fleet is all of them. A prolog must not simply fail
either, for then Slurm drains the node ("Prolog error") whatever the cap says.

Reading and draining are two calls: who drains the node by hand in the few milliseconds between
them loses the reason given.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass
from typing import Optional, Protocol

from gpuhealth import scontrol, slurmnode
from gpuhealth.policy import Cap
from gpuhealth.scontrol import Answer
from gpuhealth.slurmnode import SlurmNode

# Slurm's times have a resolution of one second; a little more, for timers that are early.
SECOND_S = 1.1
# A drain that slurmctld did not answer lands when it gets to it: MessageTimeout is at most
# this, as a rule.
LATE_S = 120.0
# A call may take this long, so that one that hangs leaves time for the next.
CALL_S = scontrol.TIMEOUT_S

DRAINED = "drained"
ALREADY = "already drained by us"
FOREIGN = "already drained by somebody else"
UNSETTLED = "drained, still to be settled"
CAPPED = "not drained: as many nodes are drained as may be"
UNTOUCHED = "not drained: not ours to touch"
RESUMED = "resumed meanwhile"
REFUSED = "not drained: slurmctld refused"
UNREACHED = "not drained: slurmctld did not answer"
LATE = "slurmctld did not answer: the drain may still take effect"
# In these the node takes no jobs, so that a prolog that fails now makes Slurm drain nothing.
_OUT = frozenset((DRAINED, ALREADY, FOREIGN, UNSETTLED))


@dataclass(frozen=True)
class Result:
    """What came of it; ``detail`` is what Slurm said or showed."""

    outcome: str
    detail: str = ""

    @property
    def out_of_service(self) -> bool:
        """Whether the node is known to take no jobs: only then may a prolog fail."""
        return self.outcome in _OUT

    @property
    def text(self) -> str:
        """The result in one line."""
        return f"{self.outcome} ({self.detail})" if self.detail else self.outcome


class Slurm(Protocol):
    """What is asked of Slurm; `gpuhealth.scontrol.Scontrol` is the real one."""

    def nodes(
        self, deadline_s: float, names: tuple[str, ...] = ()
    ) -> tuple[Answer, list[SlurmNode]]:
        """Return the cluster's nodes."""

    def drain(self, name: str, reason: str, deadline_s: float) -> Answer:
        """Take a node out of service."""

    def undrain(self, name: str, deadline_s: float) -> Answer:
        """Lift a node's drain."""


@dataclass(frozen=True)
class Pending:
    """A drain that was begun and is not settled. ``at_s`` is the time of day, since 1970."""

    reason: str
    at_s: float


class Ledger:
    """The file in which a node writes down what it has begun.

    The first of ``paths`` that can be written is used: a sick node's disk may be read-only.
    """

    def __init__(self, *paths: str) -> None:
        self._paths = paths

    def write(self, pending: Pending) -> bool:
        """Write it down; whether that worked."""
        text = json.dumps({"schema": 1, "reason": pending.reason, "at_s": pending.at_s}) + "\n"
        self.clear()
        return any(_write(path, text) for path in self._paths)

    def read(self) -> Optional[Pending]:
        """Return what was written down; None if there is nothing, or nothing that makes sense."""
        for path in self._paths:
            try:
                with open(path, "rb") as file:
                    value = json.loads(file.read(4096))
                reason, at_s = value["reason"], float(value["at_s"])
            except (OSError, ValueError, KeyError, TypeError):
                continue
            if isinstance(reason, str) and slurmnode.ours(reason):
                return Pending(reason, at_s)
        return None

    def clear(self) -> None:
        """Forget it."""
        for path in self._paths:
            try:
                os.unlink(path)  # noqa: PTH108 - pathlib costs 6 ms to import
            except OSError:
                continue


def _write(path: str, text: str) -> bool:
    temporary = f"{path}.{os.getpid()}"
    try:
        os.makedirs(os.path.dirname(path), mode=0o755, exist_ok=True)  # noqa: PTH103, PTH120
        handle = os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_TRUNC | os.O_NOFOLLOW, 0o600)
        try:
            os.write(handle, text.encode())
        finally:
            os.close(handle)
        os.replace(temporary, path)  # noqa: PTH105
    except OSError:
        return False
    return True


def limit(cap: Cap, size: int) -> Optional[int]:
    """Return how many nodes of a partition of ``size`` may be drained; None: any number.

    A percentage is rounded down, but allows one node: else no small partition would ever lose
    its sick node. 0 allows none.
    """
    limits = []
    if cap.count is not None:
        limits.append(max(0, cap.count))
    if cap.percent is not None:
        limits.append(max(1, int(size * cap.percent / 100)) if cap.percent > 0 else 0)
    return min(limits) if limits else None


def _groups(nodes: Iterable[SlurmNode], me: SlurmNode) -> list[list[SlurmNode]]:
    """Return the nodes of each of a node's partitions; those in none are a group, too."""
    nodes = list(nodes)
    if not me.partitions:
        return [[node for node in nodes if not node.partitions]]
    return [[node for node in nodes if name in node.partitions] for name in me.partitions]


def _place(node: SlurmNode) -> tuple[str, str]:
    return node.reason_time, node.name


def has_room(nodes: Iterable[SlurmNode], me: SlurmNode, cap: Cap) -> bool:
    """Whether one more node may be drained in each of this one's partitions."""
    for group in _groups(nodes, me):
        most = limit(cap, len(group))
        if most is not None and sum(node.drained_by_us for node in group) >= most:
            return False
    return True


def may_stay(nodes: Iterable[SlurmNode], me: SlurmNode, cap: Cap) -> bool:
    """Whether this node, drained by us, is within the cap in each of its partitions.

    Its place is that by (time, name) among ours.
    """
    for group in _groups(nodes, me):
        most = limit(cap, len(group))
        before = sum(node.drained_by_us and _place(node) < _place(me) for node in group)
        if most is not None and before >= most:
            return False
    return True


@dataclass(frozen=True)
class Drain:
    """How this node is taken out of service. ``deadline_s`` is of ``clock``."""

    name: str
    slurm: Slurm
    ledger: Ledger
    cap: Cap
    deadline_s: float
    clock: Callable[[], float] = time.monotonic
    wall: Callable[[], float] = time.time
    sleep: Callable[[float], None] = time.sleep

    def begin(self, reason: str) -> Result:
        """Drain the node, if that may be."""
        answer, nodes = self.slurm.nodes(self._until())
        if not answer.answered:
            return Result(UNREACHED, answer.text)
        me = self._me(nodes)
        if me is None:
            return Result(UNTOUCHED, f"Slurm knows no node {self.name}")
        if me.state.drain:
            return self._drained(me)
        if not slurmnode.may_drain(me.state):
            return Result(UNTOUCHED, me.state.text)
        if not has_room(nodes, me, self.cap):
            return Result(CAPPED, self._count(nodes, me))
        if not self.ledger.write(Pending(reason, self.wall())):
            return Result(UNTOUCHED, "it can't be written down: no space, or read-only")
        answer = self.slurm.drain(self.name, reason, self._until())
        if answer.outcome == scontrol.REFUSED:
            self.ledger.clear()
            return Result(REFUSED, answer.text)
        if answer.outcome == scontrol.UNREACHABLE:
            self.ledger.clear()
            return Result(UNREACHED, answer.text)
        if not answer.answered:
            return Result(LATE, answer.text)
        return self._settle(reason)

    def settle(self) -> Optional[Result]:
        """Finish what an earlier run left open; None, and no call, if there is nothing."""
        pending = self.ledger.read()
        if pending is None:
            return None
        answer, nodes = self.slurm.nodes(self._until())
        if not answer.answered:
            return Result(UNREACHED, answer.text)
        me = self._me(nodes)
        if me is not None and me.drained_by_us and me.reason == pending.reason:
            return self._settle(pending.reason)
        if not 0 <= self.wall() - pending.at_s < LATE_S:
            self.ledger.clear()
        return Result(RESUMED, me.state.text if me else "")

    def _drained(self, me: SlurmNode) -> Result:
        """Judge a node that was found drained."""
        if not slurmnode.ours(me.reason):
            return Result(FOREIGN, me.reason)
        pending = self.ledger.read()
        if pending is not None and pending.reason == me.reason:
            # Whoever began this was ended before it was settled.
            return self._settle(me.reason)
        return Result(ALREADY, me.reason)

    def _settle(self, reason: str) -> Result:
        """Wait until no node can come in front of this one, and look whether it may stay."""
        self.sleep(SECOND_S)
        answer, nodes = self.slurm.nodes(self._until())
        me = self._me(nodes)
        if not answer.answered or me is None:
            return Result(UNSETTLED, answer.text if not answer.answered else "node is gone")
        if not (me.drained_by_us and me.reason == reason):
            self.ledger.clear()
            return Result(FOREIGN, me.reason) if me.state.drain else Result(RESUMED)
        if may_stay(nodes, me, self.cap):
            self.ledger.clear()
            return Result(DRAINED, reason)
        if not slurmnode.may_resume(me, reason):
            return Result(UNSETTLED, me.state.text)
        answer = self.slurm.undrain(self.name, self._until())
        if not answer.answered:
            # It may be in service again this very moment, so a prolog must not fail now.
            return Result(CAPPED, f"and the drain could not be lifted yet: {answer.text}")
        self.ledger.clear()
        return Result(CAPPED, "others were drained first")

    def _me(self, nodes: Iterable[SlurmNode]) -> Optional[SlurmNode]:
        return next((node for node in nodes if node.name == self.name), None)

    def _until(self) -> float:
        return min(self.deadline_s, self.clock() + CALL_S)

    def _count(self, nodes: Iterable[SlurmNode], me: SlurmNode) -> str:
        """Say how many are drained in the partition with the least room."""
        said = []
        for name, group in zip(me.partitions or ("no partition",), _groups(nodes, me)):
            most = limit(self.cap, len(group))
            if most is not None:
                ours = sum(node.drained_by_us for node in group)
                said.append((most - ours, f"{ours} of at most {most} in {name}"))
        return min(said)[1] if said else ""
