"""The same job script on this machine, without Slurm."""

from __future__ import annotations

import contextlib
import itertools
import os
import re
import signal
import subprocess
import time
from collections.abc import Mapping
from pathlib import Path
from types import FrameType

from gpusub.environment import scrubbed
from gpusub.follow import LOG_INTERVAL_S, Ending, Tail
from gpusub.plan import Plan
from gpusub.resources import Machine

# torch.distributed.run gives its workers 30 s after a signal before it kills them.
STOP_TIMEOUT_S = 60.0


def machine(environ: Mapping[str, str], proc: Path = Path("/proc")) -> Machine:
    """Return this machine's GPUs, as CUDA_VISIBLE_DEVICES leaves them, and its usable CPUs."""
    gpus = proc / "driver/nvidia/gpus"
    there = len(list(gpus.iterdir())) if gpus.is_dir() else 0
    visible = environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        listed = visible.split(",") if visible else []
        known = itertools.takewhile(lambda device: _is_there(device.strip(), there), listed)
        there = min(there, len(list(known)))
    return Machine(gpus=there, cpus=len(os.sched_getaffinity(0)))


def _is_there(device: str, gpus: int) -> bool:
    """Whether CUDA knows a device; at the first one that it does not know it stops."""
    if re.fullmatch(r"\d+", device, re.ASCII):
        return int(device) < gpus
    return device.startswith(("GPU-", "MIG-"))


def run(
    plan: Plan, environ: Mapping[str, str], secrets: Mapping[str, str], tail: Tail | None
) -> Ending:
    """Run the script to its end and return it; the log goes to the run directory and ``tail``.

    The program has a process group of its own. A SIGTERM or SIGHUP that reaches this process is
    passed on to its launcher, which passes it on to the workers; a SIGINT or SIGQUIT to all of
    them, as a terminal does.
    """
    run_dir = Path(plan.run_dir)
    early: list[int] = []
    stop_at: list[float] = []
    process: subprocess.Popen[bytes] | None = None

    def pass_on(number: int, _frame: FrameType | None) -> None:
        if process is None:
            early.append(number)
        elif number in (signal.SIGINT, signal.SIGQUIT):
            stop_at.append(time.monotonic() + STOP_TIMEOUT_S)
            _kill_group(process, number)
        else:
            process.send_signal(number)

    before = {
        number: signal.signal(number, pass_on)
        for number in (signal.SIGTERM, signal.SIGHUP, signal.SIGINT, signal.SIGQUIT)
        # Under nohup(1) the program ignores SIGHUP too, and must not be sent it.
        if signal.getsignal(number) != signal.SIG_IGN
    }
    try:
        with open(plan.log.value, "ab") as log:
            process = subprocess.Popen(
                ["/bin/bash", str(run_dir / "job.sh")],
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                cwd=plan.cwd,
                env={**scrubbed(environ), **secrets},
                start_new_session=True,
            )
        for number in early:
            pass_on(number, None)
        code = _wait(process, tail, stop_at)
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
    (run_dir / "exit_code").write_text(f"{code}\n")
    if code and plan.program.kind != "command":
        _show_failure(plan, tail)
    return Ending(code, "local", "COMPLETED" if code == 0 else "FAILED")


def _copied(tail: Tail | None) -> bool:
    """Show what is new in the log; the run goes on where nobody reads it any more."""
    with contextlib.suppress(BrokenPipeError):
        return tail.copy() if tail else False
    return False


def _show_failure(plan: Plan, tail: Tail | None) -> None:
    """Let the script show the log of the rank that failed, as it does at the end of a job."""
    with open(plan.log.value, "ab") as log:
        subprocess.run(
            ["/bin/bash", str(Path(plan.run_dir, "job.sh")), "failure"],
            stdin=subprocess.DEVNULL,
            stdout=log,
            stderr=subprocess.STDOUT,
            timeout=STOP_TIMEOUT_S,
            check=False,
        )
    _copied(tail)


def _kill_group(process: subprocess.Popen[bytes], number: int) -> None:
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, number)


def _wait(process: subprocess.Popen[bytes], tail: Tail | None, stop_at: list[float]) -> int:
    """Show the log until the program ends; return its code.

    ``stop_at`` gets a deadline when the user wants it to stop: it may save its work until then.
    """
    while True:
        code = process.poll()
        new = _copied(tail)
        if code is not None:
            return code if code >= 0 else 128 - code
        if stop_at and time.monotonic() > stop_at[0]:
            _kill_group(process, signal.SIGKILL)
        if not new:
            time.sleep(LOG_INTERVAL_S)
