"""Why a job waits, in plain words (squeue(1), JOB REASON CODES)."""

from __future__ import annotations

import datetime
import re
from collections.abc import Mapping, Sequence

from gpuslurm.queue import QueueEntry, Unavailable
from gpusub.screen import duration, moment
from gpusub.submission import NEVER_STARTS

# Reasons for which it matters which nodes take no job.
_ABOUT_NODES = ("Resources", "ReqNodeNotAvail", "Nodes required for job", "NodeDown", "Reservation")

# {id} is the job's.
_WORDS: Mapping[str, str] = {
    "Cleaning": "its former run is still being cleaned up",
    "InactiveLimit": "it was inactive for too long",
    "JobArrayTaskLimit": "as many tasks of the array run as it allows at a time",
    "JobHeldAdmin": "held by an administrator, who has to release it",
    "JobHeldUser": "held by you; let it go with: scontrol release {id}",
    "JobHoldMaxRequeue": "requeued too often and held; let it go with: scontrol release {id}",
    "JobLaunchFailure": "its launch failed; the log and the administrator may know why",
    "Licenses": "waits for licenses",
    "NodeDown": "a node that it needs is down",
    "None": "Slurm has not looked at it yet",
    "PartitionConfig": "the partition's limits do not admit it",
    "Priority": "jobs of higher priority come first",
    "Prolog": "the nodes' prologs still run",
    "ReservationDeleted": "its reservation is gone; cancel it, or ask an administrator",
    "SchedDefer": "the scheduler looks at it later",
    "SystemFailure": "Slurm failed; an administrator may know more",
    "job requeued in held state": "requeued and held; let it go with: scontrol release {id}",
    "launch failed requeued held": (
        "a node failed to start it (its prolog, most likely), and Slurm holds it; let it go with: "
        "scontrol release {id}"
    ),
}

_AFTER: Mapping[str, str] = {
    "after": "has started",
    "afterany": "has ended",
    "aftercorr": "has done its task of the same number",
    "afternotok": "has failed",
    "afterok": "has ended well",
}

# Of limits (AssocGrpGRES, QOSMaxCpuPerUserLimit): whose they are, and what they count.
_LIMIT = re.compile(r"(Assoc|QOS)(Grp|Max|Min)?(.*)")
_LIMIT_WORDS = (
    ("GRES", "GPUs and other GRES"),
    ("Cpu", "CPUs"),
    ("CPU", "CPUs"),
    ("Mem", "memory"),
    ("Node", "nodes"),
    ("Wall", "time"),
    ("SubmitJob", "jobs submitted"),
    ("Job", "jobs"),
    ("Billing", "billing units"),
    ("BB", "burst buffers"),
    ("License", "licenses"),
    ("Energy", "energy"),
    ("Resource", "resources"),
    ("Time", "time"),
)


def needs_nodes(entry: QueueEntry) -> bool:
    """Whether the nodes that take no job are part of the reason."""
    return entry.state == "PENDING" and entry.reason.startswith(_ABOUT_NODES)


def explain(entry: QueueEntry, unavailable: Sequence[Unavailable], now: datetime.datetime) -> str:
    """Return why a pending job waits; empty for one that does not wait."""
    if entry.state not in ("PENDING", "REQUEUED", "REQUEUE_HOLD", "SPECIAL_EXIT"):
        return ""
    words = _words(entry, unavailable, now)
    if entry.start and entry.reason in ("Resources", "Priority") and _after(entry.start, now):
        words += f"; may start at {moment(entry.start, now)}"
    return words


def _words(entry: QueueEntry, unavailable: Sequence[Unavailable], now: datetime.datetime) -> str:
    reason = entry.reason.replace("_", " ") or "None"
    if reason in NEVER_STARTS:
        never = NEVER_STARTS[reason]
        if reason == "DependencyNeverSatisfied" and entry.dependency:
            never = f"it waits until {dependency(entry.dependency)}"
        return f"never starts ({reason}): {never}"
    if reason == "Resources":
        return _resources(entry, unavailable, now)
    if reason == "Dependency":
        return f"waits until {dependency(entry.dependency)} (Dependency)"
    if reason == "BeginTime":
        return _begin(entry, now)
    if reason.startswith(("ReqNodeNotAvail", "Nodes required for job")):
        return _nodes(entry, unavailable)
    if reason in _WORDS:
        return f"{_WORDS[reason].format(id=entry.array_id)}{_named(reason)}"
    if match := _LIMIT.fullmatch(reason):
        return f"{_limit(*match.groups())} ({reason})"
    return reason


def _named(reason: str) -> str:
    """Return Slurm's own word, where it is one, so that it can be looked up."""
    return "" if reason == "None" or " " in reason else f" ({reason})"


def _resources(
    entry: QueueEntry, unavailable: Sequence[Unavailable], now: datetime.datetime
) -> str:
    count = entry.node_count
    words = f"waits for {count} free node{'s' if count != 1 else ''}"
    if entry.switches:
        # Slurm counts from when it first looks at the job, which is when the job may start.
        until = _plus(entry.eligible, entry.switches_wait_s)
        switches = f"{entry.switches} leaf switch{'es' if entry.switches != 1 else ''}"
        if until is None:
            words += f" below {switches}"
        elif until > now:
            words += f" below {switches} until {moment(until.isoformat(), now)}, then for any"
        else:
            waited = duration(entry.switches_wait_s)
            words += f", below any switches now that the {waited} for {switches} are over"
    out = _out(entry, unavailable)
    return f"{words} (Resources){f'; not to be had: {out}' if out else ''}"


def _nodes(entry: QueueEntry, unavailable: Sequence[Unavailable]) -> str:
    named = re.search(r"UnavailableNodes:\s*(\S+)", entry.reason)
    out = _out(entry, unavailable, named[1] if named else "")
    if not out and named:
        out = named[1]
    if "reserved" in entry.reason and not out:
        return "its nodes are reserved for other jobs, or down (ReqNodeNotAvail)"
    return f"the nodes that it needs are not to be had: {out or 'down, drained or reserved'}"


def _out(entry: QueueEntry, unavailable: Sequence[Unavailable], named: str = "") -> str:
    """Return the nodes of the job's partitions that take no job, each with its state and reason."""
    partitions = entry.partition.split(",")
    seen: dict[tuple[str, str, str], None] = {}
    for group in unavailable:
        if group.partition in partitions:
            seen.setdefault((group.nodes, group.state, group.reason))
    shown = list(seen)
    parts = [
        f"{nodes} {state}{'' if reason in ('none', '') else f' ({reason})'}"
        for nodes, state, reason in shown[:3]
    ]
    if named and not parts:
        return named
    if len(shown) > len(parts):
        parts.append(f"and {len(shown) - len(parts)} more groups")
    return ", ".join(parts)


def dependency(text: str) -> str:
    """Return what a dependency waits for, as half a sentence (``job 5 has ended well``)."""
    if not text:
        return "other jobs have ended"
    either = "?" in text
    parts = []
    for part in re.split(r"[,?]", text):
        if part.startswith("singleton"):
            parts.append("your other jobs of this name have ended")
            continue
        match = re.match(r"(\w+):(\d+(?:_\d+)?)(?:_\*)?(?:\+(\d+))?(\(.*\))?", part)
        if not match or match[1] not in _AFTER:
            parts.append(part)
            continue
        later = f" for {match[3]} min" if match[3] else ""
        failed = " (it did not)" if match[4] == "(failed)" else ""
        parts.append(f"job {match[2]} {_AFTER[match[1]]}{later}{failed}")
    return (" or " if either else " and ").join(parts)


def _begin(entry: QueueEntry, now: datetime.datetime) -> str:
    when = entry.eligible or entry.start
    at = moment(when, now) if when else "its time"
    if entry.restarts:
        return f"requeued; Slurm starts it again after {at} (BeginTime)"
    return f"starts at {at} at the earliest (BeginTime)"


def _limit(whose: str, kind: str | None, what: str) -> str:
    owner = "account" if whose == "Assoc" else "QOS"
    counted = next((words for key, words in _LIMIT_WORDS if key in what), what or "resources")
    if kind == "Grp":
        return f"the {owner}'s jobs together have as many {counted} as they may".replace(
            "many memory", "much memory"
        ).replace("many time", "much time")
    side = "less" if kind == "Min" else "more"
    return f"{side} {counted} than the {owner} admits"


def _plus(moment_text: str, seconds: int) -> datetime.datetime | None:
    try:
        return datetime.datetime.fromisoformat(moment_text) + datetime.timedelta(seconds=seconds)
    except ValueError:
        return None


def _after(moment_text: str, now: datetime.datetime) -> bool:
    when = _plus(moment_text, 0)
    return when is not None and when > now
