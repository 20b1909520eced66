from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from gpuhealth import isolation, process


def hang() -> bytes:
    while True:
        time.sleep(60)


def hang_deaf() -> bytes:
    for number in (signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, signal.SIG_IGN)
    return hang()


def raises() -> bytes:
    raise RuntimeError("broken")


def dies() -> bytes:
    os.kill(os.getpid(), signal.SIGSEGV)
    return hang()


class TestCall:
    def test_a_result(self) -> None:
        assert isolation.call(lambda: b"x" * 300_000, 5).result == b"x" * 300_000

    @pytest.mark.parametrize("work", [raises, dies])
    def test_what_fails_has_no_result(self, work: object) -> None:
        assert isolation.call(work, 5).result == b""  # type: ignore[arg-type]

    @pytest.mark.parametrize("work", [hang, hang_deaf])
    def test_what_hangs_is_ended_in_time(self, work: object) -> None:
        before_s = time.monotonic()
        outcome = isolation.call(work, 0.3)  # type: ignore[arg-type]
        assert time.monotonic() - before_s < 1
        assert outcome.result is None
        assert outcome.abandoned is None

    def test_a_stopped_child_is_ended(self) -> None:
        def stop() -> bytes:
            os.kill(os.getpid(), signal.SIGSTOP)
            return b"woken"

        before_s = time.monotonic()
        assert isolation.call(stop, 0.3).result is None
        assert time.monotonic() - before_s < 1

    def test_a_child_that_cannot_be_ended_is_left_behind(
        self, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        # A mock: no test can put a process into state D. The kill does not arrive.
        killed: list[int] = []
        monkeypatch.setattr(os, "kill", lambda pid, sig: killed.append(pid))
        before_s = time.monotonic()
        outcome = isolation.call(hang, 0.1)
        assert time.monotonic() - before_s < 1
        monkeypatch.undo()
        assert outcome.abandoned is not None
        assert outcome.abandoned.pid == killed[0]
        assert outcome.abandoned.lives
        os.kill(outcome.abandoned.pid, signal.SIGKILL)
        os.waitpid(outcome.abandoned.pid, 0)
        assert not outcome.abandoned.lives

    def test_a_later_process_with_its_number_is_another(self) -> None:
        assert not isolation.Abandoned(os.getpid(), "1").lives
        assert isolation.Abandoned(os.getpid(), isolation.start_of(os.getpid())).lives

    def test_no_descriptor_is_left(self) -> None:
        before = len(list(Path("/proc/self/fd").iterdir()))
        for work in (raises, hang, lambda: b"fine"):
            isolation.call(work, 0.1)
        assert len(list(Path("/proc/self/fd").iterdir())) == before


def test_nobody_waits_for_the_output_of_a_child_that_was_left_behind(tmp_path: Path) -> None:
    # slurmd reads a prolog's output until its last writer has closed it.
    code = (
        "import os, time\n"
        "from gpuhealth import isolation\n"
        f"lock = os.open({str(tmp_path / 'lock')!r}, os.O_CREAT | os.O_RDWR)\n"
        "import fcntl; fcntl.flock(lock, fcntl.LOCK_EX)\n"
        "isolation.os.kill = lambda pid, sig: None\n"
        "gone = isolation.call(lambda: time.sleep(60), 0.1).abandoned\n"
        "print(gone.pid)\n"
    )
    before_s = time.monotonic()
    done = subprocess.run(
        [sys.executable, "-c", code], stdout=subprocess.PIPE, timeout=30, check=True
    )
    assert time.monotonic() - before_s < 10
    pid = int(done.stdout)
    try:
        # Nor does it keep the lock that its parent held.
        taken = subprocess.run(["flock", "-n", str(tmp_path / "lock"), "true"], check=False)
        assert taken.returncode == 0
        assert Path(f"/proc/{pid}").exists()
    finally:
        os.kill(pid, signal.SIGKILL)


def test_progress_is_seen_from_outside() -> None:
    progress = isolation.Progress()

    def work(handle: int) -> None:
        progress.note("/sys/class/infiniband/mlx5_0/ports/1/state")
        progress.note("/short")
        process.write_all(handle, b"at it")
        hang()

    child = isolation.start(work)
    deadline = time.monotonic() + 5
    while progress.count < 2 and time.monotonic() < deadline:
        time.sleep(0.01)
    isolation.end(child)
    assert progress.text == "/short"
    assert progress.count == 2
