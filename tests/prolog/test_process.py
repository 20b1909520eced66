from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from gpuhealth import process


@contextmanager
def started(work: object) -> Iterator[tuple[int, int]]:
    pid, handle = process.start(work)  # type: ignore[arg-type]
    try:
        yield pid, handle
    finally:
        os.close(handle)
        os.kill(pid, signal.SIGKILL)
        os.waitpid(pid, 0)


def read(handle: int, timeout_s: float = 5) -> bytes:
    os.set_blocking(handle, True)
    deadline = time.monotonic() + timeout_s
    parts = []
    while time.monotonic() < deadline:
        part = os.read(handle, 1 << 16)
        if not part:
            break
        parts.append(part)
    return b"".join(parts)


def test_its_result() -> None:
    with started(lambda handle: process.write_all(handle, b"x" * 300_000)) as (_, handle):
        assert read(handle) == b"x" * 300_000


def test_it_holds_nothing_but_its_pipe() -> None:
    other = os.open("/dev/null", os.O_RDONLY)

    def work(handle: int) -> None:
        links = [str(Path(f"/proc/self/fd/{name}").readlink()) for name in range(3)]
        rest = [name for name in os.listdir("/proc/self/fd") if int(name) > 2]  # noqa: PTH208
        # One more for the listing itself.
        text = f"{links} {len(rest) - 1} {os.getsid(0) == os.getpid()}"
        process.write_all(handle, text.encode())

    with started(work) as (_, handle):
        assert read(handle) == b"['/dev/null', '/dev/null', '/dev/null'] 1 True"
    os.close(other)


def test_its_end_is_that_of_the_pipe_whatever_it_raises() -> None:
    def work(handle: int) -> None:
        raise SystemExit("early")

    with started(work) as (_, handle):
        assert read(handle) == b""


def test_little_is_loaded_for_it() -> None:
    source = Path(process.__file__).parents[1]
    code = (
        "import sys; sys.path.insert(0, sys.argv[1]); import gpuhealth.early; print(*sys.modules)"
    )
    argv = [sys.executable, "-I", "-S", "-c", code, str(source)]
    done = subprocess.run(argv, capture_output=True, text=True, check=True)
    loaded = set(done.stdout.split())
    assert "gpuhealth.early" in loaded
    assert not loaded & {"dataclasses", "inspect", "json", "pynvml", "gpuhealth.isolation"}
