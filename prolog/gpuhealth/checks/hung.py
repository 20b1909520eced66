"""Places that do not answer: a file of a device, NVML, a file system."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

from gpuhealth.check import CONTEXTS, Node, check
from gpuhealth.finding import DRAIN, Finding, unhealthy, unknown
from gpuhealth.history import persists

ID = "hung"


@check(
    ID,
    "what did not answer in two runs at least 60 s apart",
    contexts=CONTEXTS,
    action=DRAIN,
    gpu=False,
)
def hung(node: Node) -> Iterator[Finding]:
    """Judge what hung in this run: once may be a busy node, again is a broken one."""
    for place in node.hung:
        # A file system that every node mounts is no fault of this one.
        systemic = not place.startswith(("/sys/", "/proc/", "/dev/", "nvml", "verbs"))
        if persists(node.history, f"{ID} {place}", node.now_s):
            first_s, _ = node.history.seen[f"{ID} {place}"]
            remedy = "look in dmesg and for processes in state D, then reboot the node"
            yield replace(
                unhealthy(ID, place, f"no answer for {node.now_s - first_s:.0f} s", "one", remedy),
                systemic=systemic,
            )
        else:
            yield unknown(ID, place, "no answer", "one", "the next run looks again")
