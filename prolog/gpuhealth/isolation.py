"""Work that may hang, done in a child process that can be given up on.

A read of sysfs or a call of NVML can block where no signal reaches (state D). Its process is
killed, waited for a moment, and then left behind: it holds nothing that anybody waits for, since
the first thing it does is to let go of every descriptor but its own pipe. (slurmd reads what a
prolog prints until the last writer has closed.)
"""

from __future__ import annotations

import mmap
import os
import select
import signal
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Optional

from gpuhealth import process

# After SIGKILL: a process that can end has done so by then.
_END_WAIT_S = 0.2


@dataclass(frozen=True)
class Abandoned:
    """A process that SIGKILL did not end, told from a later one with its number by its start."""

    pid: int
    start: str

    @property
    def lives(self) -> bool:
        """Whether it is still there."""
        return bool(self.start) and start_of(self.pid) == self.start


def start_of(pid: int) -> str:
    """Return when a process started, in clock ticks since boot; "" if there is none.

    Field 22 of /proc/PID/stat (proc(5)); the name in front of it may hold blanks and brackets.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read(4096).rpartition(b")")[2].split()
    except OSError:
        return ""
    # A zombie has ended; its parent has not looked yet.
    if len(fields) < 20 or fields[0] in (b"Z", b"X"):
        return ""
    return fields[19].decode("ascii", "replace")


@dataclass(frozen=True)
class Child:
    """A process at work, and the end of the pipe that it writes to."""

    pid: int
    handle: int


def start(work: Callable[[int], None]) -> Child:
    """Start ``work``, which gets the descriptor to write its result to, in a child."""
    return Child(*process.start(work))


def end(child: Child) -> Optional[Abandoned]:
    """Close the pipe, kill the child and wait for it a moment; return it if it doesn't die."""
    os.close(child.handle)
    try:
        os.kill(child.pid, signal.SIGKILL)
    except ProcessLookupError:
        return None
    deadline = time.monotonic() + _END_WAIT_S
    while True:
        try:
            if os.waitpid(child.pid, os.WNOHANG)[0]:
                return None
        except ChildProcessError:
            return None
        if time.monotonic() > deadline:
            return Abandoned(child.pid, start_of(child.pid))
        time.sleep(0.005)


def read(child: Child, until_s: float) -> Optional[bytes]:
    """Return what the child wrote by its end; None if it had not ended at ``until_s``.

    ``until_s`` is a time of time.monotonic().
    """
    poll = select.poll()
    poll.register(child.handle, select.POLLIN | select.POLLHUP)
    parts: list[bytes] = []
    while True:
        left_s = until_s - time.monotonic()
        if left_s <= 0:
            return None
        if not poll.poll(left_s * 1000):
            continue
        part = os.read(child.handle, 1 << 16)
        if not part:
            return b"".join(parts)
        parts.append(part)


@dataclass(frozen=True)
class Outcome:
    """What came of a call: its result, or None and maybe the process that was left behind."""

    result: Optional[bytes]
    abandoned: Optional[Abandoned] = None


def finish(child: Child, until_s: float) -> Outcome:
    """Wait for a child until then, and end it in any case."""
    result = read(child, until_s)
    return Outcome(result, end(child))


def call(work: Callable[[], bytes], deadline_s: float) -> Outcome:
    """Run ``work`` in a child; its result is None if it hangs, and b"" if it raises."""

    def write(handle: int) -> None:
        process.write_all(handle, work())

    return finish(start(write), time.monotonic() + deadline_s)


class Progress:
    """Where a child is: a note that its parent can read, however the child is stuck."""

    _TEXT = 4096

    def __init__(self) -> None:
        self._shared = mmap.mmap(-1, 16 + self._TEXT)

    def note(self, text: str) -> None:
        """Say, in the child, what it is about to do."""
        data = text.encode("utf-8", "replace")[: self._TEXT]
        count = int.from_bytes(self._shared[:8], "little") + 1
        self._shared[16 : 16 + len(data)] = data
        self._shared[8:16] = len(data).to_bytes(8, "little")
        self._shared[:8] = count.to_bytes(8, "little")

    @property
    def count(self) -> int:
        """How many notes there have been."""
        return int.from_bytes(self._shared[:8], "little")

    @property
    def text(self) -> str:
        """The last note; of use once the child has stopped."""
        length = int.from_bytes(self._shared[8:16], "little")
        return self._shared[16 : 16 + length].decode("utf-8", "replace")
