"""NVML, asked at the very start of a hook: its answer takes longer than all the rest.

The child that asks is started before this process has even loaded the checks. Nothing of that is
needed for a right answer: where it is not started, `gpuhealth.examination` starts one itself.
"""

from __future__ import annotations

import fcntl
import os
import time
from collections.abc import Mapping
from typing import TYPE_CHECKING, Optional

from gpuhealth import process

if TYPE_CHECKING:
    from gpuhealth.isolation import Child

DRIVER = "/proc/driver/nvidia/version"
RUNTIME = "/run/gpuhealth"
# The file that is there while a process of an earlier run is stuck in NVML.
STUCK = f"{RUNTIME}/nvml.stuck"
# The lock that a prolog holds while it examines the node (`gpuhealth.hooks`).
LOCK = f"{RUNTIME}/verdict-gpu.json.lock"
# What is on the GPUs may have changed in more than this.
FRESH_S = 2.0

_asked: Optional[tuple[tuple[int, int], float]] = None


def ask(
    environ: Mapping[str, str], driver: str = DRIVER, stuck: str = STUCK, lock: str = LOCK
) -> None:
    """Start to ask NVML, if this hook will want to know.

    It won't for a job without GPUs, on a node without a driver, or while another prolog is at it
    and will share what it finds. It must not while an earlier child hangs.
    """
    global _asked
    has_gpus = environ.get("SLURM_JOB_GPUS") or environ.get("CUDA_VISIBLE_DEVICES")
    if environ.get("SLURM_JOB_ID") and not has_gpus:
        return
    if not os.path.exists(driver) or os.path.lexists(stuck) or _is_held(lock):  # noqa: PTH110
        return
    _asked = process.start(answer_to), time.monotonic()


def answer_to(handle: int) -> None:
    """Ask NVML for everything, in a child, and write what it says."""
    # What takes longest, first.
    from gpuhealth import nvml

    answer = nvml.to_dict(nvml.read(processes=True))
    import json

    process.write_all(handle, json.dumps(answer).encode())


def _is_held(lock: str) -> bool:
    try:
        handle = os.open(lock, os.O_RDWR | os.O_CLOEXEC | os.O_NOFOLLOW)
    except OSError:
        return False
    try:
        fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(handle)
    return False


def take() -> Optional[Child]:
    """Hand over the child that was started, if its answer is fresh enough; end it if not."""
    global _asked
    if _asked is None:
        return None
    from gpuhealth import isolation

    (started, since_s), _asked = _asked, None
    child = isolation.Child(*started)
    if time.monotonic() - since_s <= FRESH_S:
        return child
    isolation.end(child)
    return None


def drop() -> None:
    """End the child that nobody took."""
    global _asked
    if _asked is not None:
        from gpuhealth import isolation

        (started, _), _asked = _asked, None
        isolation.end(isolation.Child(*started))
