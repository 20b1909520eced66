"""What Slurm says of a node: its state, and who drained it, when and why.

States and flags are those of SchedMD/slurm:src/common/slurm_protocol_defs.c (node_state_string,
node_state_flag_string) and the STATE part of scontrol(1) and sinfo(1), for 22.05 to 26.05.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Optional

from gpuhealth.finding import Finding

PREFIX = "gpuhealth: "
REASON_LIMIT = 200

DRAIN = "DRAIN"

# What is said behind a state by one character (sinfo(1), "NODE STATE CODES").
_SUFFIXES = {
    "*": "NOT_RESPONDING",
    "~": "POWERED_DOWN",
    "#": "POWERING_UP",
    "!": "POWER_DOWN",
    "%": "POWERING_DOWN",
    "$": "MAINTENANCE",
    "@": "REBOOT_REQUESTED",
    "^": "REBOOT_ISSUED",
    "-": "PLANNED",
}
# sinfo's states, and older spellings, in scontrol's words: a base state, then flags.
_WORDS = {
    "ALLOC": ("ALLOCATED",),
    "BLOCK": ("IDLE", "BLOCKED"),
    "BLOCKED": ("IDLE", "BLOCKED"),
    "BOOT": ("IDLE", "REBOOT_ISSUED"),
    "REBOOT": ("IDLE", "REBOOT_ISSUED"),
    "COMP": ("COMPLETING",),
    "DRAINED": ("IDLE", DRAIN),
    "DRAINING": ("ALLOCATED", DRAIN),
    "DRNG": ("ALLOCATED", DRAIN),
    "FAILG": ("ALLOCATED", "FAIL"),
    "FAILING": ("ALLOCATED", "FAIL"),
    "FUTR": ("FUTURE",),
    "INVAL": ("IDLE", "INVALID_REG"),
    "MAINT": ("MAINTENANCE",),
    "MIX": ("MIXED",),
    "NO_RESPOND": ("NOT_RESPONDING",),
    "NPC": ("PERFCTRS",),
    "PLND": ("IDLE", "PLANNED"),
    "POW_DN": ("IDLE", "POWERING_DOWN"),
    "POW_UP": ("IDLE", "POWERING_UP"),
    "RESV": ("RESERVED",),
    "UNK": ("UNKNOWN",),
    "UNKN": ("UNKNOWN",),
}
_BASES = ("ALLOCATED", "DOWN", "ERROR", "FUTURE", "IDLE", "MIXED", "UNKNOWN")
# States of a node that is in service, and flags that change nothing in that. What is not here,
# also what a later Slurm adds, is a node to keep one's hands off.
_IN_SERVICE = frozenset(("ALLOCATED", "IDLE", "MIXED"))
_HARMLESS = frozenset(
    (
        "BLOCKED",
        "CLOUD",
        "COMPLETING",
        "DYNAMIC_FUTURE",
        "DYNAMIC_NORM",
        "PERFCTRS",
        "PLANNED",
        "RESERVED",
    )
)


@dataclass(frozen=True)
class State:
    """A node's base state ("" if it was not understood) and its flags, in scontrol's words."""

    base: str = ""
    flags: frozenset[str] = frozenset()

    @property
    def drain(self) -> bool:
        """Whether the node takes no further jobs because somebody said so."""
        return DRAIN in self.flags

    @property
    def text(self) -> str:
        """As scontrol prints it, flags in alphabetical order."""
        return "+".join((self.base or "?", *sorted(self.flags)))


@dataclass(frozen=True)
class SlurmNode:
    """A node as ``scontrol -o show node`` prints it.

    ``reason_time`` is ISO 8601 without a zone, in slurmctld's seconds: such times sort as text.
    A reason is there also after the node is back in service (24.11): look at the state first.
    """

    name: str
    state: State
    reason: str = ""
    reason_user: str = ""
    reason_time: str = ""
    partitions: tuple[str, ...] = ()

    @property
    def drained_by_us(self) -> bool:
        """Whether the node takes no jobs, and that by our doing."""
        return self.state.drain and ours(self.reason)


def parse_state(text: str) -> State:
    """Return the state that ``IDLE+DRAIN+REBOOT_ISSUED``, ``IDLE*``, ``drng`` or ``resv`` says.

    What is no state at all gives no base state, and then nobody may act on it.
    """
    base, flags = "", set()
    for part in text.strip().upper().split("+"):
        word = part
        while word and word[-1] in _SUFFIXES:
            flags.add(_SUFFIXES[word[-1]])
            word = word[:-1]
        # "drain" alone is sinfo's short form of drained; behind a "+" it is the flag.
        words = ("IDLE", DRAIN) if word == DRAIN and "+" not in text else _WORDS.get(word, (word,))
        for item in words:
            if item not in _BASES:
                flags.add(item)
            elif not base:
                base = item
            elif item != base and len(words) == 1:
                return State("", frozenset((*flags, base, item)))
    flags.discard("")
    if not base and flags and "+" not in text and flags <= {*_HARMLESS, "MAINTENANCE", "FAIL"}:
        # sinfo's "resv", "maint", "comp": one word for a node whose base state it doesn't say.
        base = "IDLE"
    return State(base, frozenset(flags))


_START = re.compile(r"^NodeName=(\S+)", re.MULTILINE)
_STATE = re.compile(r" State=(\S*)")
_PARTITIONS = re.compile(r" Partitions=(\S*)")
# Behind a reason scontrol prints who set it and when; only then, further lines of that reason.
_STAMPED = re.compile(
    r" Reason=(.*?) \[([^\s\[\]@]+)@(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d)\]", re.DOTALL
)


def parse(printed: str) -> list[SlurmNode]:
    """Return the nodes that ``scontrol -o show node`` printed, with SLURM_TIME_FORMAT=standard.

    A record that shows no state is left out, as is everything that is no record. A reason
    without its stamp (none is older than Slurm 2) is somebody's own: it is given whole.
    """
    starts = [found.start() for found in _START.finditer(printed)]
    nodes = []
    for start, end in zip(starts, [*starts[1:], len(printed)]):
        node = _parse_one(printed[start:end])
        if node is not None:
            nodes.append(node)
    return nodes


def _parse_one(record: str) -> Optional[SlurmNode]:
    name = record.split(None, 1)[0].partition("=")[2]
    # State and Partitions come before what people write, which may hold anything.
    reason_at = record.find(" Reason=")
    head = record if reason_at < 0 else record[:reason_at]
    state = _STATE.search(head)
    if not name or state is None:
        return None
    partitions = _PARTITIONS.search(head)
    reason, user, time = "", "", ""
    if reason_at >= 0:
        stamped = _STAMPED.match(record, reason_at)
        if stamped:
            reason, user, time = stamped.group(1), stamped.group(2), stamped.group(3)
        else:
            reason = record[reason_at + len(" Reason=") :].strip()
    return SlurmNode(
        name=name,
        state=parse_state(state.group(1)),
        reason=reason,
        reason_user=user,
        reason_time=time,
        partitions=tuple(x for x in partitions.group(1).split(",") if x) if partitions else (),
    )


def ours(reason: str) -> bool:
    """Whether a reason is one that gpuhealth wrote. "Prolog error" is anybody's, so not ours."""
    return reason.startswith(PREFIX)


def may_drain(state: State) -> bool:
    """Whether a node in this state may be drained by us.

    It has to be in service, and with nobody else: not drained, failing, rebooting, powering up
    or down, in maintenance, or silent.
    """
    return state.base in _IN_SERVICE and state.flags <= _HARMLESS


def may_resume(node: SlurmNode, reason: str) -> bool:
    """Whether our drain of a node may be lifted: ``reason`` is the one that we know of it."""
    return (
        ours(reason)
        and node.reason == reason
        and node.state.drain
        and node.state.base in _IN_SERVICE
        and node.state.flags - {DRAIN} <= _HARMLESS
    )


# A reason is one word of one line to scontrol, to sinfo's columns and to a site's own scripts.
_UNSAFE = str.maketrans(
    {'"': "", "'": "", "`": "", "\\": "/", "[": "(", "]": ")", "|": "/", "$": ""}
)


def plain(text: str) -> str:
    """Return text as one line of printable ASCII without quotes and brackets."""
    shown = text.translate(_UNSAFE)
    shown = "".join(sign if " " <= sign <= "~" else ("?" if sign > " " else " ") for sign in shown)
    return " ".join(shown.split())


def reason_of(finding: Finding) -> str:
    """Return what Slurm is told: ``gpuhealth: <check> <object> <observed> expected <expected>``.

    At most 200 characters; where that is too few, what was expected is what gets cut.
    """
    words = [plain(finding.check), plain(finding.object), plain(finding.observed)[:120]]
    if finding.expected:
        words += ["expected", plain(finding.expected)]
    text = PREFIX + " ".join(word for word in words if word)
    return text if len(text) <= REASON_LIMIT else text[: REASON_LIMIT - 3].rstrip() + "..."
