"""Checks: small functions over what a node shows, and the list of them all.

A check looks at a `Node` and yields one `Finding` an object (a port, a GPU, a module). It is
pure: the node's source is a recording by the time its findings count. While that recording is
made, it runs over the real tree in a child process, and what it yields there is thrown away.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from typing import TYPE_CHECKING, Any, Optional

from gpuhealth.finding import DRAIN, OFF, UNHEALTHY, UNKNOWN, WARN, Finding, unknown
from gpuhealth.history import History
from gpuhealth.policy import Policy, Sku

if TYPE_CHECKING:
    from gpuhealth.nvml import Nvml
    from gpuhealth.source import Source

PROLOG = "prolog"
EPILOG = "epilog"
PERIODIC = "periodic"
CONTEXTS = (PROLOG, EPILOG, PERIODIC)


@dataclass(frozen=True)
class Job:
    """The job that a prolog or epilog runs for.

    ``gpus`` holds what Slurm says of its GPUs: indices, UUIDs or MIG names; None where Slurm
    says nothing, so that it has none.
    """

    id: int
    uid: int
    gpus: Optional[tuple[str, ...]] = None


@dataclass(frozen=True)
class Node:
    """What a check looks at.

    ``thresholds`` are the check's own: its defaults, and over them the policy's. ``sku`` is
    None without a policy. ``job`` is None outside of a job's prolog and epilog. ``now_s`` is
    the time since boot, ``hung`` are the places that did not answer in this run,
    ``verbs`` is what `gpuhealth.verbs.probe` has returned, if it was asked.
    """

    name: str
    source: Source
    sku: Optional[Sku] = None
    nvml: Optional[Nvml] = None
    context: str = PERIODIC
    job: Optional[Job] = None
    history: History = field(default_factory=History)
    thresholds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    now_s: float = 0.0
    hung: tuple[str, ...] = ()
    verbs: Mapping[str, Any] = field(default_factory=dict)

    @property
    def policy(self) -> Sku:
        """The node's SKU in the policy, or one that expects nothing."""
        return self.sku or Sku(name="")


Look = Callable[[Node], Iterator[Finding]]


@dataclass(frozen=True)
class Check:
    """One registered check.

    ``needs`` says where it looks: ``files``, ``nvml``, or ``processes`` (NVML, and fresh for
    each job). A check for ``gpu`` is left out for jobs without GPUs.
    """

    id: str
    about: str
    look: Look
    contexts: tuple[str, ...]
    action: str
    needs: str = "files"
    gpu: bool = True
    thresholds: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


REGISTRY: dict[str, Check] = {}


def check(
    id: str,
    about: str,
    *,
    contexts: tuple[str, ...] = (PROLOG, PERIODIC),
    action: str = WARN,
    needs: str = "files",
    gpu: bool = True,
    thresholds: Optional[Mapping[str, Mapping[str, float]]] = None,
) -> Callable[[Look], Look]:
    """Register a function as a check; ``about`` is its line in ``gpuhealth list``."""

    def register(look: Look) -> Look:
        if id in REGISTRY:
            raise ValueError(f"two checks are called {id}")
        REGISTRY[id] = Check(id, about, look, contexts, action, needs, gpu, thresholds or {})
        return look

    return register


def action_of(one: Check, policy: Optional[Policy]) -> str:
    """Return what a finding of this check leads to.

    Without a policy nobody has said what the node should be: then nothing drains.
    """
    if policy is None:
        return WARN
    return policy.checks.get(one.id, one.action)


def selected(
    policy: Optional[Policy], context: str, job: Optional[Job], only: tuple[str, ...] = ()
) -> list[Check]:
    """Return the checks to run; ``only`` are ids that are run whatever the policy says."""
    chosen = []
    for one in REGISTRY.values():
        if only:
            if one.id in only:
                chosen.append(one)
            continue
        if context not in one.contexts or action_of(one, policy) == OFF:
            continue
        if one.gpu and job is not None and job.gpus is None:
            continue
        chosen.append(one)
    return chosen


def thresholds_of(one: Check, policy: Optional[Policy]) -> dict[str, Mapping[str, float]]:
    """Return a check's thresholds: its own, and over them the policy's."""
    found: dict[str, Mapping[str, float]] = dict(one.thresholds)
    for name, limits in (policy.thresholds.get(one.id, {}) if policy else {}).items():
        found[name] = limits
    return found


def run(one: Check, node: Node, policy: Optional[Policy] = None) -> list[Finding]:
    """Run one check; a bug in it is a finding ``unknown``, for it must drain nothing."""
    node = replace(node, thresholds=thresholds_of(one, policy))
    action = action_of(one, policy)
    if action == OFF:
        action = WARN
    try:
        found = list(one.look(node))
    except Exception as error:  # noqa: BLE001 - whatever a node shows, the prolog goes on
        where = error.__traceback__
        while where is not None and where.tb_next is not None:
            where = where.tb_next
        line = f":{where.tb_lineno}" if where else ""
        found = [
            unknown(
                one.id,
                "check",
                f"{type(error).__name__}{line}: {error}"[:120],
                remedy="report this with the output of gpuhealth record",
            )
        ]
    return [replace(finding, action=action) for finding in found]


def soften(findings: list[Finding]) -> list[Finding]:
    """Return the findings with what is systemic at ``warn``: its cause is not this node."""
    return [
        replace(finding, action=WARN)
        if finding.systemic and finding.status in (UNHEALTHY, UNKNOWN)
        else finding
        for finding in findings
    ]


__all__ = ["DRAIN", "EPILOG", "PERIODIC", "PROLOG", "REGISTRY", "WARN", "Check", "Job", "Node"]
