from __future__ import annotations

import pytest

from gpuslurm.client import Job


@pytest.mark.parametrize(
    ("state", "ended"),
    [
        # squeue(1), JOB STATE CODES; with PREEMPTED and NODE_FAIL a requeued job is PENDING next.
        ("BOOT_FAIL", True),
        ("CANCELLED", True),
        ("COMPLETED", True),
        ("CONFIGURING", False),
        ("COMPLETING", False),
        ("DEADLINE", True),
        ("FAILED", True),
        ("NODE_FAIL", True),
        ("OUT_OF_MEMORY", True),
        ("PENDING", False),
        ("PREEMPTED", True),
        ("RUNNING", False),
        ("RESV_DEL_HOLD", False),
        ("REQUEUE_FED", False),
        ("REQUEUE_HOLD", False),
        ("REQUEUED", False),
        ("RESIZING", False),
        ("REVOKED", True),
        ("SIGNALING", False),
        ("SPECIAL_EXIT", False),
        ("STAGE_OUT", False),
        ("STOPPED", False),
        ("SUSPENDED", False),
        ("TIMEOUT", True),
        ("UNKNOWN", False),
        ("A_STATE_OF_THE_FUTURE", False),
    ],
)
def test_after_which_states_nothing_comes(state: str, ended: bool) -> None:
    assert Job(1, state, "None", "", 0, 0, 0, "", "").ended is ended
