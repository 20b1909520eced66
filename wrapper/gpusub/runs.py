"""The run directories that there are, and which of them a job belongs to."""

from __future__ import annotations

import contextlib
import json
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from gpusub import rundir

TOKEN = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")


@dataclass(frozen=True)
class Run:
    """One run directory; ``job_ids`` are the names of the links beside it that lead there."""

    path: Path
    job_ids: tuple[int, ...] = ()

    @property
    def token(self) -> str:
        """The run's name."""
        return self.path.name

    @property
    def job_id(self) -> int | None:
        """The job's id; None for a run of this machine, or where no link could be made."""
        # Of several the greatest: ids start again only after a controller lost its state.
        return max(self.job_ids, default=None)

    @property
    def ranks(self) -> Path:
        """Where the logs of all ranks but the first are."""
        return self.path / "ranks"

    def exit_code(self) -> int | None:
        """Return what the job wrote down as its end."""
        return rundir.recorded_exit_code(self.path)

    def plan(self) -> Mapping[str, Any]:
        """Return what plan.json says; empty where it cannot be read."""
        try:
            found = json.loads((self.path / "plan.json").read_text(errors="replace"))
        except (OSError, ValueError):
            return {}
        return found if isinstance(found, dict) else {}


def default_root() -> Path:
    """Return where submissions from here put their run directories."""
    asked = os.path.expanduser(os.environ.get("GPUSUB_RUN_ROOT") or ".gpusub")
    try:
        return Path(os.path.abspath(asked))
    except FileNotFoundError:  # the working directory is gone
        return Path("/nonexistent")


def is_job_id(name: str) -> bool:
    """Whether a name is a job's id; isdigit alone takes ² for one."""
    return name.isascii() and name.isdigit()


def of_command(command: str) -> Run | None:
    """Return the run of a job by the path of its batch script; None for a job of another kind."""
    path = Path(command)
    ours = path.is_absolute() and path.name == "job.sh" and TOKEN.fullmatch(path.parent.name)
    return Run(path.parent) if ours else None


def under(root: Path) -> tuple[Run, ...]:
    """Return the runs of a directory, oldest first, each with the job id that links to it."""
    try:
        names = sorted(entry.name for entry in os.scandir(root))
    except OSError:
        return ()
    ids: dict[str, list[int]] = {}
    for name in names:
        if is_job_id(name):
            with contextlib.suppress(OSError):
                ids.setdefault(str((root / name).readlink()), []).append(int(name))
    return tuple(
        Run(root / name, tuple(ids.get(name, ())))
        for name in names
        if TOKEN.fullmatch(name) and not (root / name).is_symlink() and (root / name).is_dir()
    )


def at(path: Path) -> Run | None:
    """Return the run of a directory that somebody names: itself, or a link of a job id to it."""
    real = Path(os.path.realpath(path))
    if real.name == "job.sh":
        real = real.parent
    if not TOKEN.fullmatch(real.name) or not real.is_dir():
        return None
    known = (run for run in under(real.parent) if run.token == real.name)
    return next(known, Run(real))


def value(plan: Mapping[str, Any], *keys: str) -> tuple[Any, str]:
    """Return (value, origin) of a plan's entry; (None, "") where the plan has none."""
    found: Any = plan
    for key in keys:
        found = found.get(key) if isinstance(found, dict) else None
    if isinstance(found, dict) and "value" in found:
        return found["value"], str(found.get("origin", ""))
    return found, ""


def runs_here(run: Run, proc: Path = Path("/proc")) -> bool:
    """Whether a process of the user's on this machine is the run's: one without Slurm."""
    # Not its path: that of one who came by a link is another.
    mark = b"GPUSUB_TOKEN=" + run.token.encode()
    for entry in proc.glob("[0-9]*/environ"):
        with contextlib.suppress(OSError):
            if mark in entry.read_bytes().split(b"\0"):
                return True
    return False
