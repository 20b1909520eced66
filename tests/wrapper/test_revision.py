"""What is kept of the user's git checkout."""

from __future__ import annotations

import subprocess
import time
from pathlib import Path

import pytest

from gpusub import revision
from gpusub.revision import RevisionQuestion, files


def git(directory: Path, *words: str) -> None:
    identity = ["-c", "user.name=a", "-c", "user.email=a@b"]
    subprocess.run(["git", *identity, "-C", directory, *words], check=True, capture_output=True)


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    git(tmp_path, "init", "--quiet")
    (tmp_path / "train.py").write_text("lr = 1\n")
    (tmp_path / "deep").mkdir()
    git(tmp_path, "add", "train.py")
    git(tmp_path, "commit", "--quiet", "--message", "First try")
    return tmp_path


def asked(directory: Path) -> dict[str, bytes]:
    with RevisionQuestion(directory) as question:
        return files(question.answer())


@pytest.mark.parametrize("where", [".", "deep"])
def test_the_commit_and_what_differs_are_kept(checkout: Path, where: str) -> None:
    (checkout / "train.py").write_text("lr = 2\n")
    kept = asked(checkout / where)
    assert kept["commit.txt"].endswith(b" First try\n")
    assert len(kept["commit.txt"].split()[0]) == 40
    assert b"-lr = 1\n+lr = 2\n" in kept["changes.diff"]


def test_a_difference_can_be_put_back(checkout: Path) -> None:
    (checkout / "train.py").write_bytes(b"\0\xff binary\r\n")
    diff = asked(checkout)["changes.diff"]
    git(checkout, "checkout", "train.py")
    subprocess.run(["git", "-C", checkout, "apply", "-"], input=diff, check=True)
    assert (checkout / "train.py").read_bytes() == b"\0\xff binary\r\n"


def test_outside_of_a_checkout_nothing_is_kept(tmp_path: Path) -> None:
    assert asked(tmp_path) == {}


def test_a_checkout_without_a_commit_is_no_error(tmp_path: Path) -> None:
    git(tmp_path, "init", "--quiet")
    assert asked(tmp_path) == {}


def test_no_git_is_no_error(checkout: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PATH", "/nowhere")
    assert asked(checkout) == {}


def test_a_large_difference_is_named_and_not_kept(
    checkout: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(revision, "LARGEST_DIFF_BYTES", 10)
    (checkout / "train.py").write_text("lr = 2\n")
    assert asked(checkout)["changes.diff"].startswith(b"too large: ")


def test_a_git_that_hangs_is_not_waited_for(
    checkout: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "bin").mkdir()
    (tmp_path / "bin" / "git").write_text("#!/bin/sh\nexec sleep 60\n")
    (tmp_path / "bin" / "git").chmod(0o755)
    monkeypatch.setenv("PATH", f"{tmp_path / 'bin'}:/usr/bin:/bin")
    monkeypatch.setattr(revision, "TIMEOUT_S", 0.1)
    before = time.monotonic()
    assert asked(checkout) == {}
    assert time.monotonic() - before < 5


def test_what_nobody_waited_for_ends(checkout: Path) -> None:
    with RevisionQuestion(checkout) as question:
        commands = question._commands
    assert all(command.returncode is not None for command in commands)
