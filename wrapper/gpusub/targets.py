"""What the user means by JOB: an id, a task of an array, a token, a name or a run directory."""

from __future__ import annotations

import difflib
import os
import pwd
import re
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from pathlib import Path

from gpuslurm import text
from gpuslurm.client import SlurmClient, SlurmError, SlurmRefusedError
from gpuslurm.queue import QueueEntry
from gpusub import runs
from gpusub.errors import ExitCode, GpusubError
from gpusub.runs import Run
from gpusub.screen import plain


@dataclass(frozen=True)
class Target:
    """A job that was named: what Slurm knows of it and the run directory, one of them at least.

    ``former`` is another run of the same id, which Slurm has forgotten: after a controller lost
    its state, ids are handed out twice.
    """

    word: str
    entries: tuple[QueueEntry, ...] = ()
    run: Run | None = None
    former: Run | None = None


@contextmanager
def answered() -> Iterator[None]:
    """Turn Slurm's errors into ours.

    Raises:
        GpusubError: UNCERTAIN where no answer came, REFUSED where it was no.
    """
    try:
        yield
    except SlurmRefusedError as error:
        raise GpusubError(f"Slurm refused: {error}", ExitCode.REFUSED) from error
    except SlurmError as error:
        raise GpusubError(f"Slurm gave no answer: {error}", ExitCode.UNCERTAIN) from error


def me() -> str:
    """Return the user's name as Slurm knows it, whatever the environment says."""
    try:
        return pwd.getpwuid(os.geteuid()).pw_name
    except KeyError:
        return str(os.geteuid())


def newest_first(entries: Sequence[QueueEntry]) -> list[QueueEntry]:
    """Return the jobs in the order of a list for people."""
    return sorted(entries, key=lambda entry: (entry.submitted, entry.id), reverse=True)


def find(word: str, entries: Sequence[QueueEntry], known: Sequence[Run]) -> Target | None:
    """Return what ``word`` names among the user's jobs and the runs of a directory.

    A path is none of its business (see ``of_run``).
    """
    if runs.TOKEN.fullmatch(word):
        run = next((run for run in known if run.token == word), None)
        return of_run(word, run, word, entries)
    if re.fullmatch(r"\d+", word, re.ASCII):
        found = tuple(e for e in entries if int(word) in (e.id, e.array_id))
        return _of_id(word, found, known)
    if task := re.fullmatch(r"(\d+)_(\d+)", word, re.ASCII):
        array, number = int(task[1]), int(task[2])
        found = tuple(e for e in entries if e.array_id == array and _holds(e, number))
        return _of_id(word, found, known) if found else None
    named = tuple(e for e in newest_first(entries) if e.name == word)
    return _with_run(Target(word, named)) if named else None


def of_run(word: str, run: Run | None, token: str, entries: Sequence[QueueEntry]) -> Target | None:
    """Return the target of a run directory, with what Slurm knows of its job."""
    found = tuple(e for e in entries if token in Path(e.command).parts)
    if run is None and not found:
        return None
    target = Target(word, found, run)
    return target if run else _with_run(target)


def _of_id(word: str, found: tuple[QueueEntry, ...], known: Sequence[Run]) -> Target | None:
    number = int(word.partition("_")[0])
    linked = next((run for run in known if number in run.job_ids), None)
    if not found:
        return Target(word, run=linked) if linked else None
    target = _with_run(Target(word, found))
    token = target.run.token if target.run else None
    return replace(target, former=linked) if linked and linked.token != token else target


def _with_run(target: Target) -> Target:
    run = runs.of_command(target.entries[0].command)
    return (
        replace(target, run=replace(run, job_ids=(target.entries[0].array_id,))) if run else target
    )


def _holds(entry: QueueEntry, number: int) -> bool:
    return any(number in part for part in text.tasks(entry.tasks))


def nearest(word: str, entries: Sequence[QueueEntry], known: Sequence[Run]) -> str:
    """Return what the user may have meant by a word that names nothing, as half a sentence."""
    words = [w for entry in newest_first(entries) for w in (str(entry.array_id), entry.name)]
    words += [w for run in known for w in (run.token, *map(str, run.job_ids))]
    near = difflib.get_close_matches(word, filter(None, words), n=1, cutoff=0.5)
    if near:
        return f"did you mean {plain(near[0])}?"
    if entries:
        latest = newest_first(entries)[0]
        return f"your newest is {latest.shown} ({plain(latest.name)}); gpusub status lists them"
    return "you have none that Slurm knows; a run directory can be named by its path"


def resolve(
    words: Sequence[str], client: SlurmClient | None, entries: Sequence[QueueEntry]
) -> list[Target]:
    """Return what each word names; other people's jobs are found by id alone.

    ``entries`` are the user's own jobs; without a client run directories are all that is left.

    Raises:
        GpusubError: a word names nothing, and this line names what is nearest.
    """
    known = runs.under(runs.default_root())
    targets = []
    for word in words:
        target = _path(word, entries) if "/" in word else find(word, entries, known)
        if target is None and client and runs.is_job_id(word):
            with answered():
                others = client.queue([int(word)])
            target = Target(word, others) if others else None
        if target is None:
            raise GpusubError(f"{_no_job(word)}; {nearest(word, entries, known)}")
        targets.append(target)
    return targets


def _path(word: str, entries: Sequence[QueueEntry]) -> Target | None:
    run = runs.at(Path(word).expanduser())
    return of_run(word, run, run.token, entries) if run else None


def _no_job(word: str) -> str:
    if "/" in word:
        return f"{word!r} is no run directory"
    if "_[" in word:
        array = word.partition("_")[0]
        return f"{word!r}: for an array's waiting tasks write the array, {array}, or one task"
    return f"no job {word!r}"


def one(target: Target) -> QueueEntry:
    """Return the job of a target that must be a single one.

    Raises:
        GpusubError: Slurm does not know it any more, or the word names several.
    """
    if not target.entries:
        raise GpusubError(f"job {target.word} has ended: Slurm does not know it any more")
    active = [entry for entry in target.entries if not entry.ended]
    if len(active) > 1:
        shown = ", ".join(entry.shown for entry in active[:8])
        raise GpusubError(f"{target.word!r} names several jobs: {shown}; choose one of them")
    return active[0] if active else target.entries[0]
