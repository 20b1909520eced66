"""What a run hands on to the next one: made of what it was told, and of what it saw."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Optional

from gpuhealth import hca, portcounters
from gpuhealth.check import Node
from gpuhealth.checks import hung, ports
from gpuhealth.examination import NVML, Examination, Request
from gpuhealth.history import History, advance, latest_s
from gpuhealth.policy import Sku
from gpuhealth.source import Recording

# Errors of looks that found nothing out.
_NO_ANSWER = ("ETIMEDOUT", "ECANCELED", "ENODATA")
# NVML hung, or its child died: neither is an answer.
_NO_NVML = ("hung", "died")
# What is newer than a run by more than this is of no other run.
_LONGEST_RUN_S = 120.0


def remember(request: Request, done: Examination, history: Optional[History] = None) -> History:
    """Return the history after an examination.

    ``history`` is what is remembered by now; by default what the examination was given. A run
    that had hung for long may find that another one has been faster: then its counters are
    older than the newest stamp, and are left out.
    """
    before = request.history if history is None else history
    node = _node(request, done)
    gone, there = _ports(node)
    stuck = [f"{hung.ID} {place}" for place in done.hung]
    now_s, counted = done.at_s, portcounters.read_all(node)
    if before.boot_id == done.boot_id and latest_s(before) < done.at_s + _LONGEST_RUN_S:
        now_s = max(now_s, latest_s(before))
        if before.stamps and before.stamps[-1].at_s >= done.at_s:
            counted = {}
    return advance(
        before,
        boot_id=done.boot_id,
        now_s=now_s,
        ports=counted,
        seen=[*stuck, *gone],
        answered=[*there, *_answered(before, done)],
        full_function=_full_function(node, done),
    )


def counters_of(request: Request, done: Examination) -> dict[str, dict[str, int]]:
    """Return the counters of every port that an examination looked at: a job's start or end."""
    return portcounters.read_all(_node(request, done))


def _node(request: Request, done: Examination) -> Node:
    sku: Optional[Sku] = None
    if request.policy is not None:
        sku = next((one for one in request.policy.skus if one.name == done.sku), None)
    source = Recording(done.entries, partial=True)
    return Node(done.node, source, sku, context=done.context, now_s=done.at_s)


def _ports(node: Node) -> tuple[list[str], list[str]]:
    """Return the keys of listed ports without a state, and of those that show one."""
    gone, there = [], []
    for port in hca.listed_ports(node):
        if port.device is None:
            continue
        state = node.source.read(f"{port.path}/state")
        if state.text is not None:
            there.append(ports.gone_key(port.name))
        elif ports.is_gone(state):
            gone.append(ports.gone_key(port.name))
    return gone, there


def _answered(history: History, done: Examination) -> Iterator[str]:
    """Yield the keys of what hung in earlier runs and has answered in this one."""
    for key in history.seen:
        check, _, place = key.partition(" ")
        if check != hung.ID or place in done.hung:
            continue
        if place == NVML:
            if done.nvml and done.nvml.get("error", "") not in _NO_NVML:
                yield key
        elif any(_is_answer(place, path, entry) for path, entry in done.entries.items()):
            yield key


def _is_answer(place: str, path: str, entry: Any) -> bool:
    if path != place and not path.startswith(place.rstrip("/") + "/"):
        return False
    return not (isinstance(entry, dict) and entry.get("errno") in _NO_ANSWER)


def _full_function(node: Node, done: Examination) -> Iterator[str]:
    """Yield the devices whose VPD was read in this run and says that jobs may use them."""
    start, end = f"{hca.CLASS}/", "/device/vpd"
    for path, entry in done.entries.items():
        if path.startswith(start) and path.endswith(end) and isinstance(entry, str):
            device = path[len(start) : -len(end)]
            if not hca.is_limited(node, device):
                yield device
