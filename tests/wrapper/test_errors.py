from __future__ import annotations

from gpusub.errors import ExitCode, GpusubError


def test_the_exit_codes_that_scripts_rely_on() -> None:
    assert {code.name: int(code) for code in ExitCode} == {
        "OK": 0,
        "FAILED": 1,
        "USAGE": 2,
        "REFUSED": 3,
        "UNCERTAIN": 4,
        "INTERRUPTED": 130,
    }


def test_an_error_is_the_users_unless_said_otherwise() -> None:
    assert GpusubError("x").code == ExitCode.USAGE
