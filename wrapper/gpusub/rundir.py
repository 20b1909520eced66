"""The run directory: made before submission, so that the job is known by its path ever after.

``<root>/<token>/`` holds ``job.sh``, ``plan.json`` and later ``log.out`` and ``exit_code``;
``<root>/<jobid>`` links to it.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import shutil
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from gpusub.errors import GpusubError

# File systems that no other node sees (proc(5), mountinfo).
_NODE_LOCAL_TYPES = frozenset({"tmpfs", "ramfs", "devtmpfs", "proc", "sysfs"})
_NODE_LOCAL_PATHS = (Path("/tmp"), Path("/var/tmp"), Path("/dev"), Path("/run"))


# Says whose it is, so that a user's own is never taken for it.
_GITIGNORE = "# gpusub's run directories\n*\n"


def new_token(now: time.struct_time, random: bytes) -> str:
    """Return a run's unique name, which sorts by time: ``20261130-191500-4f3a9c81``."""
    return f"{time.strftime('%Y%m%d-%H%M%S', now)}-{random.hex()}"


def refuse_node_local(root: Path, mountinfo: str) -> None:
    """Refuse a directory that other nodes would not see, as far as that is certain.

    Raises:
        GpusubError: it is under /tmp and its kin, or on a file system in memory.
    """
    real = Path(os.path.realpath(root))
    problem = None
    if any(real.is_relative_to(path) for path in _NODE_LOCAL_PATHS):
        problem = "every node has its own"
    elif (fstype := _file_system(real, mountinfo)) in _NODE_LOCAL_TYPES:
        problem = f"it is on {fstype}, which no other node sees"
    if problem:
        raise GpusubError(
            f"the run directory would be {root}, and {problem}; submit from a shared file "
            "system, or name one with --run-root DIR"
        )


def _file_system(path: Path, mountinfo: str) -> str:
    """Return the type of the file system that ``path`` is on."""
    best, fstype = "", ""
    for line in mountinfo.splitlines():
        before, _, after = line.partition(" - ")
        point = re.sub(r"\\(\d{3})", lambda m: chr(int(m[1], 8)), before.split()[4])
        # A later mount on the same point hides the earlier one.
        if path.is_relative_to(point) and len(point) >= len(best):
            best, fstype = point, after.split()[0]
    return fstype


def create(
    root: Path,
    token: str,
    script: str,
    plan: Mapping[str, Any],
    extra: Mapping[str, bytes] | None = None,
) -> Path:
    """Make the run directory with the script and the plan in it, readable by the user alone.

    ``extra`` is the content of further files by name.

    Raises:
        GpusubError: it cannot be made; nothing is left of it.
    """
    path, new = root / token, not root.is_dir()
    try:
        # Every step runs the script in it: nobody else may replace that, whatever the umask.
        path.mkdir(mode=0o755, parents=True)
        (path / "ranks").mkdir()
        texts = {"job.sh": script, "plan.json": json.dumps(plan, indent=1, default=str) + "\n"}
        # Arguments that are no UTF-8 keep their bytes.
        contents = {name: text.encode(errors="surrogateescape") for name, text in texts.items()}
        for name, content in {**contents, **(extra or {})}.items():
            _write(path / name, content)
        if new:
            # Only in a directory of our own: elsewhere this would hide the user's files from git.
            (root / ".gitignore").write_text(_GITIGNORE)
    except OSError as error:
        remove(root, token)
        if new:
            with contextlib.suppress(OSError):
                (root / ".gitignore").unlink(missing_ok=True)
                root.rmdir()
        raise GpusubError(
            f"the run directory {path} cannot be made: {error.strerror}; name another place with "
            "--run-root DIR"
        ) from error
    return path


def _write(path: Path, content: bytes) -> None:
    """Write a new file of mode 0600."""
    descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
    with open(descriptor, "wb") as file:
        file.write(content)


def remove(root: Path, token: str) -> None:
    """Take a run directory back whose job was never submitted, and the root if it is empty."""
    shutil.rmtree(root / token, ignore_errors=True)
    if not root.is_dir():
        return
    left = {entry.name for entry in root.iterdir()}
    if left == {".gitignore"} and (root / ".gitignore").read_text() == _GITIGNORE:
        with contextlib.suppress(OSError):  # another submission may be beginning here
            (root / ".gitignore").unlink()
            root.rmdir()


def link(root: Path, token: str, job_id: int) -> None:
    """Let ``<root>/<jobid>`` name the run; ids start again after a controller lost its state.

    Where that cannot be (no links on this file system), the job is there all the same.
    """
    name = root / str(job_id)
    if name.exists() and not name.is_symlink():
        return  # the user's own file
    temporary = root / f".{token}.link"
    with contextlib.suppress(OSError):
        temporary.symlink_to(token)
        temporary.replace(root / str(job_id))
    with contextlib.suppress(OSError):
        temporary.unlink()


def make_log_directory(log: str) -> None:
    """Make the directory that the user's log goes to: Slurm makes none and the job would fail.

    Raises:
        GpusubError: it cannot be made.
    """
    directory = Path(log).parent
    try:
        directory.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise GpusubError(f"--output: {directory} cannot be made: {error.strerror}") from error


def recorded_exit_code(path: Path) -> int | None:
    """Return what the job script wrote down as its end, None if it did not get there."""
    try:
        content = (path / "exit_code").read_text()
    except OSError:
        return None
    return int(content) if content.strip().isdigit() else None
