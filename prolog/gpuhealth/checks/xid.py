"""Xid messages: what the NVIDIA driver has written into the kernel's log about a GPU.

Numbers, meanings and actions are those of NVIDIA's catalog,
https://docs.nvidia.com/deploy/xid-errors/analyzing-xid-catalog.html.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import Optional

from gpuhealth.check import Node, check
from gpuhealth.finding import OFF, Finding, healthy, unhealthy, unknown
from gpuhealth.source import KERNEL_LOG

ID = "xid"
WORD = "NVRM: Xid"
_DRIVER = "/proc/driver/nvidia/gpus"

# A record of /dev/kmsg (linux:Documentation/ABI/testing/dev-kmsg). Facility 0, so a priority
# below 8, is the kernel's own; what a process writes there never has it.
_RECORD = r"([0-7]),[0-9]+,([0-9]+),[^;]*;(.*)"
_XID = r"NVRM: Xid \((?:PCI:)?([0-9a-fA-F:.]+)[^)]*\): ([0-9]+)(?:, (.*))?"

# Those for which the catalog's immediate action is a reset of the GPU, a restart of the machine
# or work on its hardware, whatever the program does. Left out are those that a program can
# cause (13, 31, 43, 45, 68, 109 and most others: restart it), what the driver has dealt with
# itself (63, 92, 94, 156), and NVLink's (74, 144 to 150), where the registers in the message
# decide: the checks nvlink and gpu_recovery see what is left of these.
FATAL = {
    46: "GPU stopped processing",
    48: "double bit ECC error",
    54: "auxiliary power not connected",
    62: "micro-controller halt",
    64: "row remapping failed",
    79: "fallen off the bus",
    95: "uncontained memory error",
    110: "security fault",
    119: "GSP RPC timeout",
    120: "GSP error",
    136: "link training failed",
    140: "unrecovered ECC error",
    143: "GPU initialization error",
    151: "key rotation error",
    158: "fatal timeout",
}
# "GPU recovery action changed from 0x0 (None) to 0x1 (GPU Reset Required)"
RECOVERY = 154
_ACTION = r"to 0x([0-9a-fA-F]+)(?: \(([^)]*)\))?"

_REMEDY = (
    "drain the node, reset the GPU or reboot, and replace it if the same Xid comes again "
    "(NVIDIA's Xid catalog)"
)


@check(
    ID,
    "Xid messages in the kernel's log since boot, or since our last drain was lifted",
    action=OFF,
)
def xid(node: Node) -> Iterator[Finding]:
    """Judge what each GPU's messages leave behind."""
    if node.source.names(_DRIVER).absent and not node.policy.gpus:
        return
    log = node.source.kernel_log((WORD,))
    if log.text is None:
        yield unknown(ID, KERNEL_LOG, log.why, "", "run as root, where dmesg is restricted")
        return
    wrong = _wrong(log.text, node.history.resumed_s)
    for address, observed in sorted(wrong.items()):
        yield unhealthy(ID, address, observed, "no fatal Xid", _REMEDY)
    if not wrong:
        yield healthy(ID, KERNEL_LOG, "no fatal Xid")


def _wrong(text: str, since_s: float) -> dict[str, str]:
    """Return what is wrong with which GPU, by its PCI address.

    The driver's recovery action back at "none" means that it was reset: what was before is over.
    """
    wrong: dict[str, str] = {}
    for line in text.splitlines():
        record = re.match(_RECORD, line)
        # The log starts with the boot, so that nothing in it is older than that.
        if record is None or int(record[2]) < since_s * 1e6:
            continue
        message = re.search(_XID, record[3])
        if message is None:
            continue
        address, number = message[1].lower(), int(message[2])
        if number in FATAL:
            # The first one is the cause, and the others follow from it.
            wrong.setdefault(address, f"Xid {number} {FATAL[number]}")
        elif number == RECOVERY:
            action = _action(message[3] or "")
            if action == "":
                wrong.pop(address, None)
            elif action is not None:
                wrong.setdefault(address, f"Xid {number} {action}")
    return wrong


def _action(text: str) -> Optional[str]:
    """Return the recovery action that an Xid 154 names, "" for none; None if it can't be read."""
    found = re.search(_ACTION, text)
    if found is None:
        return None
    if int(found[1], 16) == 0:
        return ""
    return found[2] or f"recovery action 0x{found[1]}"
