"""The state of the user's git checkout, kept with the run: its commit, and what differs from it."""

from __future__ import annotations

import contextlib
import subprocess
from dataclasses import dataclass
from pathlib import Path

# A submission does not wait longer for git, nor keep a larger difference.
TIMEOUT_S = 3.0
LARGEST_DIFF_BYTES = 20_000_000


@dataclass(frozen=True)
class Revision:
    """A commit, and the difference of the tracked files to it (git diff's text, or why not)."""

    commit: str
    diff: bytes


class RevisionQuestion:
    """What git is asked, while the caller does more. Outside of a checkout nothing is asked."""

    def __init__(self, directory: Path) -> None:
        self._commands: list[subprocess.Popen[bytes]] = []
        if not any((parent / ".git").exists() for parent in (directory, *directory.parents)):
            return
        for words in (
            ["log", "-1", "--format=%H %cI %s"],
            ["diff", "--no-ext-diff", "--no-textconv", "--binary", "HEAD"],
        ):
            with contextlib.suppress(FileNotFoundError):  # no git here
                self._commands.append(
                    subprocess.Popen(
                        ["git", "--no-optional-locks", "-C", str(directory), *words],
                        stdin=subprocess.DEVNULL,
                        stdout=subprocess.PIPE,
                        stderr=subprocess.DEVNULL,
                    )
                )

    def answer(self) -> Revision | None:
        """Return the revision; None outside of a checkout, or where git does not answer in time."""
        results = [_result(command) for command in self._commands]
        if not results or results[0] is None:
            return None
        diff = results[1]
        if diff is None:
            diff = b"git diff gave no answer\n"
        elif len(diff) > LARGEST_DIFF_BYTES:
            diff = b"too large: %d bytes\n" % len(diff)
        return Revision(results[0].decode(errors="replace").strip(), diff)

    def __enter__(self) -> RevisionQuestion:
        return self

    def __exit__(self, *_error: object) -> None:
        for command in self._commands:
            if command.returncode is None:
                command.kill()
                command.communicate()


def _result(command: subprocess.Popen[bytes]) -> bytes | None:
    try:
        out, _ = command.communicate(timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        command.kill()
        command.communicate()
        return None
    return out if command.returncode == 0 else None


def files(revision: Revision | None) -> dict[str, bytes]:
    """Return the files that a run directory keeps of it."""
    if revision is None:
        return {}
    return {"commit.txt": f"{revision.commit}\n".encode(), "changes.diff": revision.diff}
