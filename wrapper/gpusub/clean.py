"""``gpusub clean``: take away old run directories of jobs that have ended."""

from __future__ import annotations

import contextlib
import os
import shutil
import stat
import sys
import time
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path

import click

from gpuslurm import commands
from gpusub import runs, screen, targets
from gpusub.cli import working_directory
from gpusub.errors import ExitCode, GpusubError
from gpusub.runs import Run

DAY_S = 86400.0


@dataclass(frozen=True)
class Old:
    """A run directory that may go: when something in it last changed, and how large it is."""

    run: Run
    changed: float
    size_bytes: int


@click.command(context_settings=screen.CONTEXT)
@click.option(
    "--older-than",
    "days",
    type=click.FloatRange(0),
    default=14,
    metavar="DAYS",
    help="Unchanged for so many days. Default: 14.",
)
@click.option("-y", "--yes", is_flag=True, help="Do not ask.")
@click.option("--dry-run", is_flag=True, help="List them and remove nothing.")
@click.option(
    "--run-root",
    metavar="DIR",
    envvar="GPUSUB_RUN_ROOT",
    default=".gpusub",
    help="Where they are. Default: .gpusub.",
)
@screen.common_options
def clean(days: float, yes: bool, dry_run: bool, run_root: str, as_json: bool) -> int:
    """Remove old run directories of jobs that have ended, with their logs.

    What Slurm still runs or will run stays, and so does all that gpusub did not make.
    """
    root = Path(os.path.abspath(Path(working_directory(), os.path.expanduser(run_root))))
    if not root.is_dir():
        raise GpusubError(f"no directory {root}; name another with --run-root DIR")
    found = old(root, time.time() - days * DAY_S, _active())
    links = dangling(root, {each.run.token for each in found})
    if not as_json:
        screen.tell(*_listed(found, links, days))
    if dry_run or not (found or links):
        return _answer(found, links, as_json, removed=False)
    if not yes and not _agreed(found):
        screen.note("gpusub: nothing removed")
        return 0
    _remove(found, root)
    for link in dangling(root, ()):
        with contextlib.suppress(OSError):
            link.unlink()
    return _answer(found, links, as_json, removed=True)


def _active() -> frozenset[str] | None:
    """Return the tokens of the user's jobs that are not over; None where there is no Slurm.

    Raises:
        GpusubError: Slurm does not say.
    """
    if not commands.available():
        return None
    with targets.answered():
        entries = commands.CommandClient().queue()
    return frozenset(
        run.token
        for entry in entries
        if not entry.ended and (run := runs.of_command(entry.command))
    )


def old(root: Path, before: float, active: Collection[str] | None) -> list[Old]:
    """Return the runs below ``root`` that are over and did not change since ``before``.

    Without Slurm (``active`` None) only those of this machine: of another nobody here knows
    whether its job waits.
    """
    found = []
    for run in runs.under(root):
        if not is_ours(run.path):
            continue
        if run.plan().get("local") is not True if active is None else run.token in active:
            continue
        changed, size_bytes = _measured(run.path)
        if changed <= before and (run.exit_code() is not None or not runs.runs_here(run)):
            found.append(Old(run, changed, size_bytes))
    return found


def is_ours(path: Path) -> bool:
    """Whether a directory is one that gpusub made for this user."""
    try:
        kinds = [(path / name).lstat() for name in ("job.sh", "plan.json")]
        own = path.lstat()
    except OSError:
        return False
    return (
        runs.TOKEN.fullmatch(path.name) is not None
        and stat.S_ISDIR(own.st_mode)
        and own.st_uid == os.geteuid()
        and all(stat.S_ISREG(kind.st_mode) for kind in kinds)
    )


def _measured(path: Path) -> tuple[float, int]:
    """Return (time of the last change, bytes) of all that lies in a directory."""
    changed, size_bytes = 0.0, 0
    for directory, _, names in os.walk(path):
        for name in names:
            with contextlib.suppress(OSError):
                found = os.lstat(os.path.join(directory, name))  # noqa: PTH118
                changed = max(changed, found.st_mtime)
                size_bytes += found.st_size
    return changed, size_bytes


def dangling(root: Path, going: Collection[str]) -> list[Path]:
    """Return the links of job ids to runs that are gone, or will be."""
    found = []
    for entry in os.scandir(root):
        if not (runs.is_job_id(entry.name) and entry.is_symlink()):
            continue
        token = str(Path(entry.path).readlink())
        gone = token in going or not (root / token).exists()
        if runs.TOKEN.fullmatch(token) and gone:
            found.append(root / entry.name)
    return sorted(found)


def _remove(found: Iterable[Old], root: Path) -> None:
    for each in found:
        # Looked at again: the answer to a question may take its time.
        if each.run.path.parent == root and is_ours(each.run.path):
            try:
                shutil.rmtree(each.run.path)
            except OSError as error:
                screen.note(f"gpusub: {each.run.path}: {error.strerror}: {error.filename}")


def _listed(found: Sequence[Old], links: Sequence[Path], days: float) -> list[str]:
    if not found:
        unused = f"; {len(links)} links lead nowhere" if links else ""
        return [f"no run directory of an ended job is older than {days:g} days{unused}"]
    rows = [("RUN", "JOB", "CHANGED", "SIZE")]
    rows += [
        (
            screen.short(str(each.run.path)),
            str(each.run.job_id or "-"),
            time.strftime("%Y-%m-%d", time.localtime(each.changed)),
            screen.size(each.size_bytes),
        )
        for each in found
    ]
    total = screen.size(sum(each.size_bytes for each in found))
    count = f"{len(found)} run director{'ies' if len(found) > 1 else 'y'}"
    return [*screen.table(rows, screen.columns(), elastic=(0,)), f"{count}, {total}"]


def _agreed(found: Sequence[Old]) -> bool:
    """Ask whether to go on.

    Raises:
        GpusubError: there is nobody to ask.
    """
    if not found:
        return True
    if not sys.stdin.isatty():
        raise GpusubError(
            "nobody to ask whether to remove them; say so with --yes, or look with --dry-run",
            ExitCode.USAGE,
        )
    return click.confirm("Remove them?", err=True)


def _answer(found: Sequence[Old], links: Sequence[Path], as_json: bool, removed: bool) -> int:
    gone = [each for each in found if removed and not each.run.path.exists()]
    if as_json:
        screen.tell_json(
            [
                {
                    "token": each.run.token,
                    "run_dir": str(each.run.path),
                    "job_id": each.run.job_id,
                    "size_bytes": each.size_bytes,
                    "removed": each in gone,
                }
                for each in found
            ]
        )
    elif removed and found:
        screen.note(f"gpusub: removed {len(gone)} of {len(found)}")
    return 0 if not removed or len(gone) == len(found) else 1
