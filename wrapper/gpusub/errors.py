"""The one error that people see, and the exit codes that scripts see."""

from __future__ import annotations

from enum import IntEnum


class ExitCode(IntEnum):
    """What gpusub itself ends with; with --wait, --follow and --local the job's code comes out."""

    OK = 0
    FAILED = 1  # this machine did not let it be done: a full disk, say
    USAGE = 2  # the request is wrong; nothing was submitted
    REFUSED = 3  # Slurm said no; nothing was submitted
    UNCERTAIN = 4  # Slurm was not reached, or gave no certain answer
    INTERRUPTED = 130


class GpusubError(Exception):
    """What is wrong, where, and what to type instead, on one line."""

    def __init__(self, message: str, code: ExitCode = ExitCode.USAGE) -> None:
        super().__init__(message)
        self.code = code
