"""What a node says of itself to others: a report, a job's counters, metrics, a line of log."""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Optional

from gpuhealth import isolation, portcounters
from gpuhealth.examination import Examination
from gpuhealth.finding import HEALTHY, UNHEALTHY, UNKNOWN, Finding
from gpuhealth.folder import Folder, why
from gpuhealth.state import JobStart

SCHEMA = 1
DEADLINE_S = 2.0
JOBS_BYTES = 1 << 20
MAX_FINDINGS = 500
_LINE_CHARS = 900
_NAME = re.compile(r"[A-Za-z0-9][A-Za-z0-9._-]{0,254}\Z")
_ORDER = (UNHEALTHY, UNKNOWN, HEALTHY)
# A shared directory may be an admin's, or nobody's (root is nobody on most shared file systems):
# all that counts is that not everybody can write there.
_EVERYBODY = 0o002


def node_report(done: Examination, versions: Optional[Mapping[str, str]] = None) -> dict[str, Any]:
    """Return what stands in ``<node>.json``, for everybody to read.

    ``versions`` are those of the node's software. Findings come worst first, `MAX_FINDINGS` at
    most; ``counts`` says how many there were of each status.
    """
    findings = sorted(done.findings, key=lambda one: _ORDER.index(one.status))
    return {
        "schema": SCHEMA,
        "node": done.node,
        "verdict": done.verdict,
        "sku": done.sku,
        "context": done.context,
        "time": done.time,
        "boot_id": done.boot_id,
        "at_s": round(done.at_s, 3),
        "duration_s": round(done.duration_s, 4),
        "versions": dict(versions or {}),
        "counts": {s: sum(one.status == s for one in done.findings) for s in _ORDER},
        "findings": [one.as_dict() for one in findings[:MAX_FINDINGS]],
    }


def job_report(
    node: str, start: JobStart, ports: Mapping[str, Mapping[str, int]], at_s: float, time: str
) -> dict[str, Any]:
    """Return what a job's ports counted from its start to ``at_s``: a line of ``jobs.jsonl``.

    ``ports`` are the counters at its end. Values are the kernel's (port_xmit_data in units of
    four bytes); ``unknown`` has those that nobody can tell, and why: reset, saturated, missing.
    ``shared`` says that other jobs were there, too, so that they are charged to none.
    """
    risen = portcounters.differences(start.ports, ports)
    known, unknown = {}, {}
    for port, counters in risen.items():
        known[port] = {name: n for name, n in counters.items() if isinstance(n, int)}
        words = {name: n for name, n in counters.items() if isinstance(n, str)}
        if words:
            unknown[port] = words
    return {
        "schema": SCHEMA,
        "node": node,
        "job": start.job,
        "begun": start.time,
        "ended": time,
        "duration_s": round(at_s - start.at_s, 3),
        "shared": start.shared,
        "ports": known,
        "unknown": unknown,
    }


@dataclass(frozen=True)
class Delivery:
    """What came of writing a report: why it is not there ("" if it is).

    ``abandoned`` is the process that is stuck at it: as long as it lives, don't start another.
    """

    why: str = ""
    abandoned: Optional[isolation.Abandoned] = None


def deliver(
    directory: str,
    node: str,
    report: Optional[Mapping[str, Any]] = None,
    job: Optional[Mapping[str, Any]] = None,
    deadline_s: float = DEADLINE_S,
    earlier: Optional[isolation.Abandoned] = None,
) -> Delivery:
    """Write a node's report and a job's counters into a directory that may hang.

    It is done in a child process, which is left behind at the deadline. ``earlier`` is one that
    was left behind by an earlier run: while it lives nothing is tried.
    """
    if not _NAME.match(node):
        return Delivery(f"{node!r:.80} is no name of a node")
    if earlier is not None and earlier.lives:
        return Delivery(f"{directory}: process {earlier.pid} still hangs there", earlier)

    def work() -> bytes:
        return b"." + _write(directory, node, report, job).encode("utf-8", "replace")

    try:
        outcome = isolation.call(work, deadline_s)
    except OSError as error:  # no process to be had
        return Delivery(why(error))
    if outcome.result is None:
        return Delivery(f"{directory}: no answer for {deadline_s:g} s", outcome.abandoned)
    if not outcome.result:
        return Delivery(f"{directory}: the process that writes it died")
    return Delivery(outcome.result[1:].decode("utf-8", "replace"))


def _write(
    directory: str,
    node: str,
    report: Optional[Mapping[str, Any]],
    job: Optional[Mapping[str, Any]],
) -> str:
    try:
        # It has to be there: an empty mount point is no place for reports.
        with Folder(directory, writable=_EVERYBODY, create=False) as folder:
            if report is not None:
                folder.replace(f"{node}.json", _line(report), 0o644)
            if job is not None:
                folder.append(f"{node}.jobs.jsonl", _line(job), JOBS_BYTES, 0o644)
    except OSError as error:
        return why(error)
    return ""


def _line(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def write_metrics(path: str, text: str) -> str:
    """Replace the file that a textfile collector reads; return why it was not."""
    directory, _, name = path.rpartition("/")
    if not name:
        return f"{path!r} names no file"
    try:
        with Folder(directory or "/", writable=_EVERYBODY, create=False) as folder:
            folder.replace(name, text.encode("utf-8", "replace"), 0o644)
    except OSError as error:
        return why(error)
    return ""


def metrics(done: Examination, time_s: float) -> str:
    """Return the examination as Prometheus' text format; ``time_s`` is the Unix time of it.

    Labels have no measured values in them, since each new one would be a new time series.
    """
    lines: list[str] = []

    def family(name: str, about: str) -> None:
        lines.append(f"# HELP gpuhealth_{name} {about}")
        lines.append(f"# TYPE gpuhealth_{name} gauge")

    family("verdict", "1 for the verdict that holds, 0 for the others.")
    for verdict in _ORDER:
        lines.append(_sample("verdict", {"verdict": verdict}, done.verdict == verdict))
    family("findings", "Findings of the last examination by check and status.")
    counts: dict[tuple[str, str], int] = {}
    for one in done.findings:
        counts[one.check, one.status] = counts.get((one.check, one.status), 0) + 1
    for (check, status), count in sorted(counts.items()):
        lines.append(_sample("findings", {"check": check, "status": status}, count))
    family("finding", "1 for everything that is not healthy.")
    sick = {
        (one.check, one.object, one.status, one.action)
        for one in done.findings
        if one.status != HEALTHY
    }
    for check, thing, status, action in sorted(sick)[:MAX_FINDINGS]:
        labels = {"check": check, "object": thing, "status": status, "action": action}
        lines.append(_sample("finding", labels, 1))
    family("duration_seconds", "How long the last examination took.")
    lines.append(f"gpuhealth_duration_seconds {done.duration_s:.4f}")
    family("last_run_timestamp_seconds", "When the last examination was.")
    lines.append(f"gpuhealth_last_run_timestamp_seconds {time_s:.3f}")
    return "\n".join(lines) + "\n"


def _sample(name: str, labels: Mapping[str, str], value: float) -> str:
    text = ",".join(f'{key}="{_escaped(label)}"' for key, label in labels.items())
    return f"gpuhealth_{name}{{{text}}} {int(value)}"


def _escaped(label: str) -> str:
    text = label.encode("utf-8", "replace").decode()
    return text.replace("\\", "\\\\").replace("\n", "\\n").replace('"', '\\"')


def log_line(done: Examination) -> str:
    """Return the examination as one line of printable ASCII: what is wrong, worst first."""
    sick = [one for one in done.findings if one.status != HEALTHY]
    sick.sort(key=lambda one: (one.status != UNHEALTHY, one.action != "drain"))
    head = f"{done.node} is {done.verdict}" + (f" as {done.sku}" if done.sku else "")
    head += f" ({done.context}, {done.duration_s:.2f} s)"
    line = _plain(head)
    for index, one in enumerate(sick):
        text = _plain(f"; {_of(one)}")
        if len(line) + len(text) > _LINE_CHARS:
            return f"{line}; and {len(sick) - index} more"
        line += text
    return line


def _of(one: Finding) -> str:
    text = f"{one.status} {one.check} {one.object} {one.observed}".rstrip()
    return (
        f"{text} expected {one.expected} ({one.action})"
        if one.expected
        else f"{text} ({one.action})"
    )


def _plain(text: str) -> str:
    """Return text without anything that would end the line or steer a terminal."""
    shown = "".join(sign if " " <= sign <= "~" else " " for sign in text[: 4 * _LINE_CHARS])
    return re.sub(r" {2,}", " ", shown)[:_LINE_CHARS]
