"""What a listing of the queue says of a job by itself; how it is read is in test_text."""

from __future__ import annotations

import subprocess
import sys
from dataclasses import fields

import pytest

from gpuslurm.queue import QueueEntry


@pytest.mark.parametrize(
    ("state", "ended"),
    [
        ("PENDING", False),
        ("RUNNING", False),
        ("COMPLETING", False),
        ("REQUEUED", False),
        ("COMPLETED", True),
        ("FAILED", True),
        ("TIMEOUT", True),
        ("NODE_FAIL", True),
        ("CANCELLED", True),
    ],
)
def test_a_job_has_ended_once_nothing_comes(state: str, ended: bool) -> None:
    empty = {field.name: "" for field in fields(QueueEntry)}
    assert QueueEntry(**{**empty, "state": state}).ended is ended  # type: ignore[arg-type]


def test_a_submission_does_not_load_it() -> None:
    code = "import sys, gpuslurm.commands; sys.exit('gpuslurm.queue' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0
