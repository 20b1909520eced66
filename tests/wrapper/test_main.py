"""``gpusub`` as it is started: the installed command and ``python -m gpusub``."""

from __future__ import annotations

import subprocess
import sys
from importlib.metadata import version
from pathlib import Path

import pytest

COMMANDS = [[str(Path(sys.executable).parent / "gpusub")], [sys.executable, "-m", "gpusub"]]


@pytest.mark.parametrize("command", COMMANDS, ids=["gpusub", "python -m gpusub"])
class TestStart:
    def run(self, command: list[str], *argv: str) -> subprocess.CompletedProcess[bytes]:
        return subprocess.run([*command, *argv], capture_output=True, check=False)

    @pytest.mark.parametrize("argv", [["--version"], ["-v", "--version"]])
    def test_its_version_is_that_of_the_distribution(
        self, command: list[str], argv: list[str]
    ) -> None:
        done = self.run(command, *argv)
        assert (done.returncode, done.stderr) == (0, b"")
        assert done.stdout.decode() == f"gpusub {version('gpusub')}\n"

    def test_help_calls_it_gpusub(self, command: list[str]) -> None:
        assert self.run(command, "--help").stdout.startswith(b"Usage: gpusub ")

    @pytest.mark.parametrize("code", [0, 1, 9, 137, 255])
    def test_its_exit_code_is_that_of_the_run(self, command: list[str], code: int) -> None:
        done = self.run(command, "--local", "--", "sh", "-c", f"echo out; exit {code}")
        assert (done.returncode, done.stdout) == (code, b"out\n")

    def test_a_refusal_is_one_line(self, command: list[str]) -> None:
        done = self.run(command, "--local", "nope.py")
        assert (done.returncode, done.stdout) == (2, b"")
        assert done.stderr == (
            b"gpusub: error: 'nope.py': no such file; name the Python script to run\n"
        )


def test_a_long_script_is_printed_whole() -> None:
    # Nothing is left in a buffer when the process ends at once.
    words = ["x" * 100_000] * 10
    command = [sys.executable, "-m", "gpusub", "--local", "--dry-run", "--", "true", *words]
    assert (
        subprocess.run(command, capture_output=True, check=True).stdout.count(words[0].encode())
        == 10
    )


@pytest.mark.parametrize("options", [["--dry-run"], ["--dry-run", "--json"], ["--help"]])
def test_a_reader_that_has_seen_enough_is_no_error(options: list[str]) -> None:
    words = ["x" * 100_000] * 10 if "--help" not in options else []
    command = [sys.executable, "-m", "gpusub", "--local", *options, "--", "true", *words]
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE) as process:
        assert process.stdout is not None
        assert process.stderr is not None
        process.stdout.close()
        said = process.stderr.read()
        process.wait()
    assert said == b""
