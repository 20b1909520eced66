from __future__ import annotations

import os
import shutil
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from gpusub.cli import COMMANDS, submit

GPUSUB = str(Path(sys.executable).parent / "gpusub")


@pytest.fixture
def completed(work: Path) -> Callable[..., list[str]]:
    """Return what bash is told for a line; its last word is the one being typed."""

    def complete(*line: str, shell: str = "bash") -> list[str]:
        words = list(line)
        done = subprocess.run(
            [GPUSUB],
            env={
                **os.environ,
                "_GPUSUB_COMPLETE": f"{shell}_complete",
                "COMP_WORDS": "\n".join(["gpusub", *words]),
                "COMP_CWORD": words[-1] if shell == "fish" else str(len(words)),
            },
            capture_output=True,
            text=True,
            check=True,
            timeout=10,
        )
        assert done.stderr == ""
        return done.stdout.splitlines() if done.stdout.strip() else []

    return complete


def plain(found: list[str]) -> list[str]:
    return [line.removeprefix("plain,") for line in found]


def test_a_first_word_is_a_command_or_a_script(
    work: Path, completed: Callable[..., list[str]]
) -> None:
    for name in ("train.py", "cancer.py", "data.csv", ".hidden.py"):
        (work / name).touch()
    (work / "canvas").mkdir()
    assert plain(completed("")) == [*COMMANDS, "cancer.py", "train.py"]
    assert plain(completed("canc")) == ["cancel", "cancer.py"]
    assert plain(completed("can")) == ["cancel", "cancer.py", "canvas/"]
    # Where no command fits, the shell looks for the file by itself.
    assert completed("tr") == ["file,tr"]
    assert completed("./c") == ["file,./c"]


@pytest.mark.parametrize(
    "line",
    [
        ["train.py", ""], ["-N", "2", "train.py", "--"], ["-m", "pkg.train", ""], ["--", ""],
        ["--", "python", "-"], ["-N", "2", ""], ["submit", ""], ["train.py", "--nodes", ""],
        ["--output", ""], ["--python", ""], ["-o", ""],
    ],
)  # fmt: skip
def test_the_programs_words_are_files(line: list[str], completed: Callable[..., list[str]]) -> None:
    assert completed(*line) == [f"file,{line[-1]}"]


def test_options(completed: Callable[..., list[str]]) -> None:
    names = plain(completed("-"))
    for parameter in submit.params:
        assert max(parameter.opts, key=len) in names
    assert plain(completed("--no")) == ["--nodes", "--nodelist"]
    assert plain(completed("-N", "2", "--rd")) == ["--rdzv"]
    assert plain(completed("submit", "--dr")) == ["--dry-run"]
    assert plain(completed("config", "--")) == [
        *("--profile", "--init", "--json", "--debug", "--help"),
    ]


@pytest.mark.parametrize(
    ("line", "found"),
    [
        (["--rdzv", ""], ["c10d", "static"]),
        (["--rdzv", "s"], ["static"]),
        (["--rdzv", "=", "s"], ["static"]),  # as bash takes --rdzv=s apart
        (["--rdzv", "="], ["c10d", "static"]),
        (["--rdzv=s"], ["--rdzv=static"]),  # as the others leave it
        (["--template", "to"], ["torchrun"]),
        (["--profile", ""], ["a100", "h100", "h200"]),
        (["--profile", "h1"], ["h100"]),
        (["-N", "2", "--profile", "h2"], ["h200"]),
        (["config", "--profile", "a"], ["a100"]),
        (["-N", ""], []),
        (["-m", ""], []),
        (["--nodes", "2", "-J", ""], []),
        (["config", ""], []),
    ],
)
def test_values_of_options(
    line: list[str], found: list[str], completed: Callable[..., list[str]], work: Path
) -> None:
    (work / "gpusub.yaml").write_text("profiles: {h100: , h200: , a100: }\n")
    assert plain(completed(*line)) == found


def test_a_directory_is_left_to_the_shell(completed: Callable[..., list[str]]) -> None:
    assert completed("--chdir", "d") == ["dir,d"]
    assert completed("--run-root", "") == ["dir,"]
    assert completed("--template", "./") == ["file,./"]


def test_a_settings_file_that_does_not_hold_is_no_matter(
    completed: Callable[..., list[str]], work: Path
) -> None:
    (work / "gpusub.yaml").write_text("profiles: [\n")
    assert completed("--profile", "") == []


@pytest.mark.usefixtures("no_sbatch")
def test_without_slurm_nothing_is_said_and_runs_of_this_directory_are_found(
    completed: Callable[..., list[str]], work: Path
) -> None:
    assert completed("-p", "") == []
    assert completed("logs", "") == []
    for name in ("12", "9", "20261130-191500-4f3a9c81"):
        (work / ".gpusub" / name).mkdir(parents=True)
    assert plain(completed("logs", "")) == ["9", "12"]
    assert plain(completed("cancel", "12", "")) == ["9"]
    assert plain(completed("exec", "1")) == ["12"]
    assert completed("exec", "12", "") == ["file,"]
    assert completed("exec", "12", "python", "-") == ["file,-"]


def test_a_slurm_that_hangs_is_not_waited_for(
    completed: Callable[..., list[str]], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    slow = tmp_path / "slow"
    slow.mkdir()
    for name in ("scontrol", "sinfo", "squeue", "sbatch"):
        (slow / name).write_text("#!/bin/sh\nexec sleep 60\n")
        (slow / name).chmod(0o755)
    monkeypatch.setenv("PATH", f"{slow}:{os.environ['PATH']}")
    for line in (["-p", ""], ["status", ""]):
        start = time.monotonic()
        assert completed(*line) == []
        assert time.monotonic() - start < 4


def test_zsh_and_fish_get_help_beside_the_word(completed: Callable[..., list[str]]) -> None:
    assert completed("sub", shell="zsh") == ["plain", "submit", COMMANDS["submit"][1]]
    assert completed("sub", shell="fish") == [f"plain,submit\t{COMMANDS['submit'][1]}"]
    assert completed("train.py", "x", shell="fish") == ["file,x"]


def test_words_that_no_shell_would_send_do_no_harm(work: Path) -> None:
    for instruction, words, at in (
        ("bash_complete", "gpusub 'x", "1"), ("bash_complete", "", "9"),
        ("bash_complete", "gpusub", "x"), ("zsh_complete", "gpusub \udcff", "1"),
    ):  # fmt: skip
        done = subprocess.run(
            [GPUSUB],
            env={
                **os.environ,
                "_GPUSUB_COMPLETE": instruction,
                "COMP_WORDS": words,
                "COMP_CWORD": at,
            },
            capture_output=True,
            check=False,
        )
        assert (done.returncode, done.stderr) == (0, b"")


@pytest.mark.parametrize("shell", ["bash", "zsh", "fish"])
def test_the_script_of_a_shell_is_one(shell: str, tmp_path: Path) -> None:
    script = subprocess.run(
        [GPUSUB],
        env={**os.environ, "_GPUSUB_COMPLETE": f"{shell}_source"},
        capture_output=True,
        check=True,
    ).stdout
    assert f"_GPUSUB_COMPLETE={shell}_complete".encode() in script
    if shutil.which(shell):
        check = [shell, "--no-execute" if shell == "fish" else "-n"]
        subprocess.run(check, input=script, check=True)


def test_a_shell_that_is_not_known_is_told(work: Path) -> None:
    done = subprocess.run(
        [GPUSUB], env={**os.environ, "_GPUSUB_COMPLETE": "tcsh_source"}, capture_output=True,
        check=False, text=True,
    )  # fmt: skip
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("gpusub: error: _GPUSUB_COMPLETE=tcsh_source: write bash_source")


BASH = r"""
source <(_GPUSUB_COMPLETE=bash_source gpusub)
complete -p gpusub
compopt() { echo "compopt $1 $2"; }  # works only while readline completes
try() {
  COMP_WORDS=("$@") COMP_CWORD=$(($# - 1)) COMPREPLY=()
  _gpusub_completion gpusub "${@: -1}"
  printf '%s|' "${COMPREPLY[@]}"
  echo
}
try gpusub con
try gpusub --rdzv = s
try gpusub --profile ''
try gpusub train.py ''
"""


def test_in_bash_itself(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (work / "gpusub.yaml").write_text("profiles: {h100: , a100: }\n")
    monkeypatch.setenv("PATH", f"{Path(GPUSUB).parent}:{os.environ['PATH']}")
    done = subprocess.run(
        ["bash", "--norc"], input=BASH, capture_output=True, text=True, check=True, timeout=30
    )
    assert done.stderr == ""
    assert done.stdout.splitlines() == [
        "complete -o nosort -F _gpusub_completion gpusub",
        "config|",
        "static|",
        "a100|h100|",
        "compopt -o default",
        "|",
    ]


def test_nothing_of_it_is_loaded_otherwise() -> None:
    code = "import sys; import gpusub.__main__; print('gpusub.cli' in sys.modules)"
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "False\n"
