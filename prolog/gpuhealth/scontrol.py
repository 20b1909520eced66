"""scontrol, the one way in which gpuhealth speaks to Slurm, with a deadline that holds.

It gets an environment of its own: ``SCONTROL_ALL``, ``SLURM_TIME_FORMAT`` and the like change
what it prints. An update that timed out may still take effect when slurmctld gets to it.
"""

from __future__ import annotations

import os
import select
import signal
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Optional

from gpuhealth import slurmnode
from gpuhealth.slurmnode import SlurmNode

PATH = "/usr/sbin:/usr/bin:/sbin:/bin"
# A node's line has about 900 bytes: room for the largest clusters there are.
LIMIT_BYTES = 16 << 20
TIMEOUT_S = 6.0
# After SIGKILL: a process that can end has done so by then.
_END_WAIT_S = 0.2

ANSWERED = "answered"
REFUSED = "refused"
UNREACHABLE = "unreachable"
TIMED_OUT = "timed out"

# With these, nothing has changed; in other cases of no answer, something may have
# (SchedMD/slurm:src/common/slurm_errno.c).
_NOT_SENT = (
    "Unable to contact slurm controller",
    "Could not establish a configuration source",
    "Munge encode failed",
    "Connection refused",
    "No route to host",
)
_NO_ANSWER = (
    "Socket timed out",
    "Zero Bytes were transmitted",
    "Connection reset",
    "Connection timed out",
    "Transport endpoint",
    "Slurm backup controller in standby",
    "communication",
    "authentication",
)


@dataclass(frozen=True)
class Answer:
    """What came of a call.

    ``outcome`` is ``answered``; ``refused``: slurmctld said no; ``unreachable``: nothing was
    sent; ``timed out``: it may have been sent, and still take effect.
    """

    outcome: str
    text: str = ""

    @property
    def answered(self) -> bool:
        """Whether Slurm did, or said, what it was asked for."""
        return self.outcome == ANSWERED


@dataclass(frozen=True)
class Scontrol:
    """How to run scontrol. ``bin_dir`` and ``conf`` are for Slurms in other places, or ""."""

    bin_dir: str = ""
    conf: str = ""

    def nodes(
        self, deadline_s: float, names: tuple[str, ...] = ()
    ) -> tuple[Answer, list[SlurmNode]]:
        """Return the cluster's nodes, or those named, hidden partitions' too."""
        words = ["-a", "-o", "show", "node"]
        if names:
            words.append(",".join(names))
        answer = self.run(words, deadline_s)
        if not answer.answered:
            return answer, []
        nodes = slurmnode.parse(answer.text)
        if not nodes:
            # rc 0 and nothing said: no owner of a drain can be told from that.
            return Answer(REFUSED, "scontrol show node printed no node"), []
        return answer, nodes

    def drain(self, name: str, reason: str, deadline_s: float) -> Answer:
        """Take a node out of service."""
        words = ["update", f"NodeName={name}", "State=DRAIN", f"Reason={reason}"]
        return self.run(words, deadline_s)

    def undrain(self, name: str, deadline_s: float) -> Answer:
        """Lift a drain, and nothing else: UNDRAIN leaves DOWN and the like as they are."""
        return self.run(["update", f"NodeName={name}", "State=UNDRAIN"], deadline_s)

    def run(self, words: list[str], deadline_s: float) -> Answer:
        """Run scontrol; return by ``deadline_s``, a time of time.monotonic(), whatever hangs."""
        path = self._find()
        if path is None:
            return Answer(UNREACHABLE, f"there is no scontrol in {self._path()}")
        if time.monotonic() >= deadline_s:
            return Answer(UNREACHABLE, "there is no time left to ask")
        environ = {"PATH": self._path(), "LC_ALL": "C", "SLURM_TIME_FORMAT": "standard"}
        if self.conf:
            environ["SLURM_CONF"] = self.conf
        try:
            return _answer(*_run(path, words, environ, deadline_s))
        except OSError as error:
            return Answer(UNREACHABLE, f"{path}: {error.strerror}")

    def _path(self) -> str:
        return f"{self.bin_dir}:{PATH}" if self.bin_dir else PATH

    def _find(self) -> Optional[str]:
        for directory in self._path().split(":"):
            path = f"{directory}/scontrol"
            if directory.startswith("/") and os.access(path, os.X_OK):
                return path
        return None


def _answer(code: Optional[int], out: bytes, err: bytes) -> Answer:
    printed = out.decode("utf-8", "replace")
    said = " ".join(err.decode("utf-8", "replace").split())[:300]
    if code is None:
        return Answer(TIMED_OUT, said or "no answer in time")
    if code == 0:
        return Answer(ANSWERED, printed)
    # scontrol says "Node nope not found" on stdout.
    said = said or " ".join(printed.split())[:300] or f"exit code {code}"
    if any(text in said for text in _NOT_SENT):
        return Answer(UNREACHABLE, said)
    if code < 0 or any(text in said for text in _NO_ANSWER):
        return Answer(TIMED_OUT, said)
    return Answer(REFUSED, said)


def _run(
    path: str, words: list[str], environ: Mapping[str, str], deadline_s: float
) -> tuple[Optional[int], bytes, bytes]:
    """Return exit code (None at the deadline), and the two outputs."""
    pipes = [os.pipe(), os.pipe()]
    try:
        pid = os.posix_spawn(
            path,
            [path, *words],
            environ,
            file_actions=[
                (os.POSIX_SPAWN_OPEN, 0, os.devnull, os.O_RDONLY, 0),
                (os.POSIX_SPAWN_DUP2, pipes[0][1], 1),
                (os.POSIX_SPAWN_DUP2, pipes[1][1], 2),
            ],
            setsid=True,
            setsigmask=(),
            setsigdef=(signal.SIGPIPE, signal.SIGTERM, signal.SIGINT),
        )
    except BaseException:
        for handle in (*pipes[0], *pipes[1]):
            os.close(handle)
        raise
    for _, writing in pipes:
        os.close(writing)
    outputs = {pipes[0][0]: bytearray(), pipes[1][0]: bytearray()}
    try:
        whole = _read(outputs, deadline_s)
        code = _wait(pid, deadline_s) if whole else None
    finally:
        for reading, _ in pipes:
            os.close(reading)
    if code is None:
        _kill(pid)
    out, err = (bytes(outputs[reading]) for reading, _ in pipes)
    return code, out, err


def _read(outputs: Mapping[int, bytearray], deadline_s: float) -> bool:
    """Read both outputs to their end; False past the deadline or where they are too long."""
    left = list(outputs)
    while left:
        ready = select.select(left, [], [], max(0.0, deadline_s - time.monotonic()))[0]
        if not ready:
            return False
        for handle in ready:
            data = os.read(handle, 1 << 16)
            if not data:
                left.remove(handle)
            outputs[handle].extend(data)
            if len(outputs[handle]) > LIMIT_BYTES:
                return False
    return True


def _wait(pid: int, deadline_s: float) -> Optional[int]:
    """Return a process's exit code, or None if it has none by the deadline."""
    pause_s = 0.0005
    while True:
        try:
            done, status = os.waitpid(pid, os.WNOHANG)
        except ChildProcessError:
            return None  # SIGCHLD is ignored here: nobody knows how it ended
        if done:
            return _code(status)
        if time.monotonic() >= deadline_s:
            return None
        time.sleep(pause_s)
        pause_s = min(0.02, pause_s * 2)


def _code(status: int) -> int:
    return -os.WTERMSIG(status) if os.WIFSIGNALED(status) else os.WEXITSTATUS(status)


def _kill(pid: int) -> None:
    """End a process and all that it started; one that does not end is left behind."""
    try:
        os.killpg(pid, signal.SIGKILL)
    except ProcessLookupError:
        return
    _wait(pid, time.monotonic() + _END_WAIT_S)
