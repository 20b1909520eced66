"""A child process that lets go of all that is its parent's.

Apart from `gpuhealth.isolation`, so that one can be started before anything is loaded.
"""

from __future__ import annotations

import os
from collections.abc import Callable

_MAX_FD = 4096


def start(work: Callable[[int], None]) -> tuple[int, int]:
    """Start ``work``, which gets the descriptor to write its result to, in a child.

    Returns the child's number, and the descriptor to read from, which doesn't block.
    """
    reading, writing = os.pipe()
    pid = os.fork()
    if pid == 0:
        code = 1
        try:
            _let_go(writing)
            work(writing)
            code = 0
        except BaseException:  # noqa: BLE001, S110 - the parent learns of it from the code
            pass
        finally:
            os._exit(code)
    os.close(writing)
    os.set_blocking(reading, False)
    return pid, reading


def _let_go(kept: int) -> None:
    """Let go, in a child, of all that is its parent's."""
    import signal

    os.setsid()
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP, signal.SIGPIPE):
        signal.signal(number, signal.SIG_DFL)
    null = os.open("/dev/null", os.O_RDWR)
    for handle in (0, 1, 2):
        os.dup2(null, handle)
    os.closerange(3, kept)
    os.closerange(kept + 1, _MAX_FD)


def write_all(handle: int, data: bytes) -> None:
    """Write all of it."""
    view = memoryview(data)
    while view:
        view = view[os.write(handle, view) :]
