"""What a check found, and the verdict over all that was found."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import asdict, dataclass
from typing import Any

HEALTHY = "healthy"
UNHEALTHY = "unhealthy"
UNKNOWN = "unknown"

DRAIN = "drain"
WARN = "warn"
OFF = "off"
ACTIONS = (DRAIN, WARN, OFF)


@dataclass(frozen=True)
class Finding:
    """One check's result for one object.

    ``status`` is ``healthy``, ``unhealthy`` or ``unknown``; unknown means that the check could
    not find out, and nothing in Slurm may change because of it. ``action`` is what the policy
    says of the check, ``drain`` or ``warn``. ``observed`` and ``expected`` are short, in the
    words of the file or tool where the value can be looked up; ``remedy`` is what an admin does.
    ``systemic`` is set where the cause lies most probably outside of this node.
    """

    check: str
    object: str
    status: str
    observed: str = ""
    expected: str = ""
    remedy: str = ""
    action: str = WARN
    systemic: bool = False

    def as_dict(self) -> dict[str, Any]:
        """The finding as ``check --json`` prints it."""
        return asdict(self)


def healthy(check: str, thing: str, observed: str = "", expected: str = "") -> Finding:
    """A check that is content with what it saw."""
    return Finding(check, thing, HEALTHY, observed, expected)


def unhealthy(check: str, thing: str, observed: str, expected: str, remedy: str) -> Finding:
    """A check that is not."""
    return Finding(check, thing, UNHEALTHY, observed, expected, remedy)


def unknown(check: str, thing: str, observed: str, expected: str = "", remedy: str = "") -> Finding:
    """A check that could not find out."""
    return Finding(check, thing, UNKNOWN, observed, expected, remedy)


def verdict(findings: Iterable[Finding]) -> str:
    """Return the worst: unhealthy, then unknown, then healthy."""
    seen = {finding.status for finding in findings}
    for status in (UNHEALTHY, UNKNOWN):
        if status in seen:
            return status
    return HEALTHY


def drains(findings: Iterable[Finding]) -> list[Finding]:
    """Return what takes the node out of service."""
    return [
        finding
        for finding in findings
        if finding.status == UNHEALTHY and finding.action == DRAIN and not finding.systemic
    ]
