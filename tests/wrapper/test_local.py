from __future__ import annotations

import io
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from gpusub import rundir
from gpusub.follow import Ending, Tail
from gpusub.local import machine, run
from gpusub.plan import Plan, plain
from gpusub.render import render
from gpusub.request import Program

Make = Callable[..., Any]


@pytest.fixture
def proc(tmp_path: Path) -> Path:
    """A /proc of a machine with four GPUs."""
    for number in range(4):
        (tmp_path / f"proc/driver/nvidia/gpus/0000:{number:02x}:00.0").mkdir(parents=True)
    return tmp_path / "proc"


class TestMachine:
    @pytest.mark.parametrize(
        ("visible", "gpus"),
        [
            (None, 4),
            ("0,1,2,3", 4),
            ("0,1", 2),
            ("3", 1),
            (" 0, 1 ", 2),
            ("GPU-3d1cbd64-b0f7-59ea-a40d-e8ee9a1ff1b7", 1),
            ("GPU-3d1cbd64,GPU-3d1cbd65", 2),
            ("MIG-3d1cbd64-b0f7-59ea-a40d-e8ee9a1ff1b7", 1),
            # CUDA stops at the first device that it does not know.
            ("", 0),
            ("-1", 0),
            ("0,-1,1", 1),
            ("NoDevFiles", 0),
            ("none", 0),
            ("0,7,1", 1),
            ("4", 0),
            ("0,,1", 1),
        ],
    )
    def test_its_gpus_as_cuda_shows_them(self, proc: Path, visible: str | None, gpus: int) -> None:
        environ = {} if visible is None else {"CUDA_VISIBLE_DEVICES": visible}
        assert machine(environ, proc).gpus == gpus

    def test_without_a_driver_it_has_none(self, tmp_path: Path) -> None:
        assert machine({}, tmp_path).gpus == 0
        assert machine({"CUDA_VISIBLE_DEVICES": "0,1"}, tmp_path).gpus == 0

    def test_its_cpus_are_those_one_may_use(self, proc: Path) -> None:
        mine = os.sched_getaffinity(0)
        os.sched_setaffinity(0, {min(mine)})
        try:
            assert machine({}, proc).cpus == 1
        finally:
            os.sched_setaffinity(0, mine)
        assert machine({}, proc).cpus == len(mine)


@pytest.fixture
def prepared(plan_of: Make, request_of: Make, profile_of: Make) -> Callable[..., Plan]:
    """Make the run directory of a shell command that is to run here."""

    def make(command: str, profile: dict[str, Any] | None = None) -> Plan:
        program = Program("command", "sh", ("-c", command))
        plan: Plan = plan_of(request_of(program, local=True), profile_of(**(profile or {})))
        root = Path(plan.run_dir).parent
        rundir.create(root, plan.token, render(plan), plain(plan))
        return plan

    return make


ENVIRON = {"PATH": "/usr/bin:/bin"}


class TestRun:
    @pytest.mark.parametrize(
        ("command", "code", "state"),
        [
            ("exit 0", 0, "COMPLETED"),
            ("exit 7", 7, "FAILED"),
            ("kill -9 $$", 137, "FAILED"),
            ("kill -TERM $$", 143, "FAILED"),
            ("nonsense", 127, "FAILED"),
        ],
    )
    def test_its_end(self, prepared: Make, command: str, code: int, state: str) -> None:
        plan = prepared(command)
        assert run(plan, ENVIRON, {}, None) == Ending(code, "local", state)
        assert rundir.recorded_exit_code(Path(plan.run_dir)) == code

    def test_both_streams_are_in_the_log_and_shown(self, prepared: Make) -> None:
        plan = prepared("echo out; echo err >&2; printf '\\377'")
        shown = io.BytesIO()
        run(plan, ENVIRON, {}, Tail(Path(plan.log.value), shown))
        assert shown.getvalue() == Path(plan.log.value).read_bytes() == b"out\nerr\n\xff"

    def test_what_it_writes_is_shown_while_it_runs(self, prepared: Make, work: Path) -> None:
        class Seen(io.BytesIO):
            def write(self, data: Any) -> int:
                if b"first" in bytes(data):
                    (work / "go").touch()
                return super().write(data)

        plan = prepared("echo first; until [ -e go ]; do sleep 0.01; done; echo last")
        shown = Seen()
        run(plan, ENVIRON, {}, Tail(Path(plan.log.value), shown))
        assert shown.getvalue() == b"first\nlast\n"

    def test_its_environment_and_directory(self, prepared: Make, work: Path) -> None:
        plan = prepared('echo "$PWD $HF_TOKEN $A ${RANK-none} $GPUSUB_TOKEN $CUDA_VISIBLE_DEVICES"')
        planted = {"RANK": "3", "A": "a", "CUDA_VISIBLE_DEVICES": "0", "SLURM_JOB_ID": "1"}
        run(plan, {**ENVIRON, **planted}, {"HF_TOKEN": "hunter2"}, None)
        assert Path(plan.log.value).read_text() == f"{work} hunter2 a none {plan.token} 0\n"

    def test_what_a_background_process_still_writes_is_no_reason_to_wait(
        self, prepared: Make
    ) -> None:
        began = time.monotonic()
        run(prepared("sleep 30 & echo $! >pid"), ENVIRON, {}, None)
        assert time.monotonic() - began < 10
        os.kill(int(Path("pid").read_text()), signal.SIGKILL)


# What a person or a batch system does to gpusub itself: it runs as a process of its own.
GPUSUB = (
    "import sys, pickle; from pathlib import Path; from gpusub.local import run\n"
    "plan = pickle.loads(Path(sys.argv[1]).read_bytes())\n"
    "sys.exit(run(plan, {'PATH': '/usr/bin:/bin'}, {}, None).exit_code)\n"
)


class TestSignals:
    @pytest.fixture
    def started(
        self, prepared: Make, work: Path
    ) -> Iterator[Callable[..., subprocess.Popen[bytes]]]:
        import pickle

        running: list[subprocess.Popen[bytes]] = []

        def start(command: str, *before: str) -> subprocess.Popen[bytes]:
            plan = prepared(f"{command}; touch ready; while :; do sleep 0.02; done")
            (work / "plan").write_bytes(pickle.dumps(plan))
            process = subprocess.Popen([*before, sys.executable, "-c", GPUSUB, work / "plan"])
            running.append(process)
            deadline = time.monotonic() + 30
            while not (work / "ready").exists():
                assert time.monotonic() < deadline
                assert process.poll() is None
                time.sleep(0.01)
            # The program may be up before gpusub has put its own handlers in place.
            time.sleep(0.2)
            return process

        yield start
        for process in running:
            process.kill()
            process.wait()

    @pytest.mark.parametrize(("number", "name"), [(signal.SIGTERM, "TERM"), (signal.SIGHUP, "HUP")])
    def test_it_is_passed_on_and_the_program_has_the_last_word(
        self, started: Make, work: Path, number: signal.Signals, name: str
    ) -> None:
        process = started(f"trap 'echo got {name}; exit 5' {name}")
        process.send_signal(number)
        assert process.wait(30) == 5
        assert f"got {name}" in next(work.glob(".gpusub/*/log.out")).read_text()

    def test_a_program_that_it_ends_is_reported_as_shells_do(self, started: Make) -> None:
        process = started(":")
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143

    def test_under_nohup_the_end_of_the_terminal_ends_nothing(self, started: Make) -> None:
        # As torch.distributed.run does, the program listens to SIGHUP although it began deaf to it.
        listens = (
            "import pathlib, signal, time; signal.signal(signal.SIGHUP, lambda *_: exit(9));"
            "pathlib.Path('ready').touch(); time.sleep(60)"
        )
        process = started(f'exec {sys.executable} -c "{listens}"', "nohup")
        process.send_signal(signal.SIGHUP)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 143

    def test_after_an_interrupt_the_program_may_save_its_work(self, started: Make) -> None:
        process = started("trap '' INT; trap 'exit 6' TERM", "env", "--default-signal=INT")
        process.send_signal(signal.SIGINT)
        with pytest.raises(subprocess.TimeoutExpired):
            process.wait(0.5)
        process.send_signal(signal.SIGTERM)
        assert process.wait(30) == 6


@pytest.fixture
def heard() -> Iterator[None]:
    """Signals as at a terminal: what is started in the background is deaf to interrupts."""
    numbers = (signal.SIGINT, signal.SIGQUIT)
    before = {number: signal.signal(number, signal.default_int_handler) for number in numbers}
    yield
    for number, handler in before.items():
        signal.signal(number, handler)


def test_one_that_ignores_interrupts_is_killed_in_the_end(
    prepared: Make, heard: None, monkeypatch: pytest.MonkeyPatch
) -> None:
    from gpusub import local

    monkeypatch.setattr(local, "STOP_TIMEOUT_S", 0.3)
    # gpusub is waiting for it by then; an earlier interrupt would end gpusub, and this process.
    plan = prepared("trap '' INT; sleep 0.5; kill -INT $PPID; while :; do sleep 0.02; done")
    assert run(plan, ENVIRON, {}, None).exit_code == 137


def test_afterwards_signals_are_what_they_were(prepared: Make) -> None:
    before = [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)]
    run(prepared("exit 0"), ENVIRON, {}, None)
    assert [signal.getsignal(number) for number in (signal.SIGTERM, signal.SIGHUP)] == before
