"""A recording of this node, made in child processes so that nothing that hangs holds it up."""

from __future__ import annotations

import json
import os
import re
import select
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Optional

from gpuhealth import isolation, process
from gpuhealth.reading import HUNG, Listing, Reading
from gpuhealth.source import (
    KERNEL_LOG,
    KERNEL_WORDS,
    LIMIT_BYTES,
    Entries,
    Recorder,
    Source,
    failed,
)

# One read. A busy node's firmware may take a second for one.
READ_TIMEOUT_S = 2.0
# After so many places that hang, the rest is not looked at.
MAX_HUNG = 3

# A device of which one file hangs is not touched again: its other files would hang as well.
_DEVICE = re.compile(
    r"/sys/class/[a-z_]+/[^/]+(?=/)|/proc/driver/nvidia(?=/)|/sys/devices/[^/]+(?:/[0-9a-f:.]+)+(?=/)"
)


@dataclass(frozen=True)
class Collected:
    """What was read.

    ``hung`` are the places that did not answer, each with the process that is stuck there, if
    it could not be ended. ``complete`` is False if time ran out before everything was looked at.
    """

    entries: Entries
    hung: Mapping[str, Optional[isolation.Abandoned]] = field(default_factory=dict)
    complete: bool = True


def place_of(key: str) -> str:
    """Return what hangs if a look at this path does: its whole device, or the path."""
    found = _DEVICE.match(key)
    return found[0] if found else key


class _Avoiding:
    """A source that says "hung" of certain places, and does not go near them."""

    def __init__(self, source: Source, places: tuple[str, ...]) -> None:
        self._source = source
        self._places = places

    def _avoids(self, path: str) -> bool:
        return any(path == place or path.startswith(place + "/") for place in self._places)

    def read(self, path: str, limit: int = LIMIT_BYTES, binary: bool = False) -> Reading:
        if self._avoids(path):
            return Reading(error=HUNG)
        return self._source.read(path, limit, binary)

    def lines(self, path: str, prefixes: tuple[str, ...]) -> Reading:
        return Reading(error=HUNG) if self._avoids(path) else self._source.lines(path, prefixes)

    def names(self, path: str) -> Listing:
        return Listing(error=HUNG) if self._avoids(path) else self._source.names(path)

    def target(self, path: str) -> Reading:
        return Reading(error=HUNG) if self._avoids(path) else self._source.target(path)

    def kind(self, path: str) -> Reading:
        return Reading(error=HUNG) if self._avoids(path) else self._source.kind(path)

    def kernel_log(self, words: tuple[str, ...] = KERNEL_WORDS) -> Reading:
        hung = self._avoids(KERNEL_LOG)
        return Reading(error=HUNG) if hung else self._source.kernel_log(words)


def collect(
    source: Source,
    look: Callable[[Source], None],
    until_s: float,
    entries: Optional[Entries] = None,
    avoid: tuple[str, ...] = (),
) -> Collected:
    """Return what ``look`` looks at in ``source``, by ``until_s`` of time.monotonic().

    ``entries`` is what is known already, and ``avoid`` the places that hang for certain.
    """
    known: Entries = dict(entries or {})
    hung: dict[str, Optional[isolation.Abandoned]] = {}
    while True:
        places = (*avoid, *hung)
        stuck = _one_child(source, look, known, places, until_s)
        if stuck is None:
            return Collected(known, hung)
        key, abandoned = stuck
        if not key:
            return Collected(known, hung, complete=False)
        known[key] = failed(HUNG)
        hung[place_of(key.rstrip("/") or "/")] = abandoned
        if len(hung) >= MAX_HUNG or time.monotonic() >= until_s:
            return Collected(known, hung, complete=False)


def _one_child(
    source: Source,
    look: Callable[[Source], None],
    known: Entries,
    places: tuple[str, ...],
    until_s: float,
) -> Optional[tuple[str, Optional[isolation.Abandoned]]]:
    """Let one child look, and add to ``known``; return where it is stuck, if it is.

    The place is "" if the child is only slow, or has died.
    """
    progress = isolation.Progress()
    child = isolation.start(
        lambda handle: _record(source, look, dict(known), places, progress, handle)
    )
    lines = _Lines(known)
    poll = select.poll()
    poll.register(child.handle, select.POLLIN | select.POLLHUP)
    count, since_s = progress.count, time.monotonic()
    stuck = False
    while not stuck:
        now_s = time.monotonic()
        if progress.count != count:
            count, since_s = progress.count, now_s
        stuck = now_s > since_s + READ_TIMEOUT_S or now_s > until_s
        if poll.poll(0 if stuck else min(50.0, READ_TIMEOUT_S * 250)):
            part = os.read(child.handle, 1 << 16)
            if not part:
                break
            lines.feed(part)
            stuck = False
    slow = time.monotonic() - since_s < READ_TIMEOUT_S
    abandoned = isolation.end(child)
    if lines.finished:
        return None
    return ("" if slow else progress.text), abandoned


class _Lines:
    """Takes what a child writes: a JSON object of entries a line, and ``null`` at its end."""

    def __init__(self, entries: Entries) -> None:
        self._entries = entries
        self._rest = b""
        self.finished = False

    def feed(self, part: bytes) -> None:
        *lines, self._rest = (self._rest + part).split(b"\n")
        for line in lines:
            value = json.loads(line)
            if value is None:
                self.finished = True
            else:
                self._entries.update(value)


def _record(
    source: Source,
    look: Callable[[Source], None],
    known: Entries,
    places: tuple[str, ...],
    progress: isolation.Progress,
    handle: int,
) -> None:
    """Look, in the child, and write down what is seen."""
    sent = len(known)

    def send() -> None:
        nonlocal sent
        fresh = list(recorder.entries.items())[sent:]
        sent += len(fresh)
        if fresh:
            process.write_all(handle, json.dumps(dict(fresh)).encode() + b"\n")

    pending = 0

    def before(key: str) -> None:
        nonlocal pending
        progress.note(key)
        pending += 1
        # In batches: a write for each would wake the parent as often. What is lost in a child
        # that hangs is read again.
        if pending >= 64:
            pending = 0
            send()

    recorder = Recorder(_Avoiding(source, places), known, before)
    look(recorder)
    send()
    process.write_all(handle, b"null\n")
