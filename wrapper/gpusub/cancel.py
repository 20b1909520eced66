"""``gpusub cancel``: end jobs, and none but those that were meant."""

from __future__ import annotations

import re
import time
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import click

from gpuslurm import commands
from gpuslurm.client import SlurmClient
from gpuslurm.queue import QueueEntry
from gpusub import runs, screen, targets
from gpusub.errors import GpusubError
from gpusub.status import state_words
from gpusub.targets import Target

# How long the end of a cancelled job is waited for: workers may save their work first.
WAIT_S = 5.0
POLL_S = 0.25

_TASK = re.compile(r"\d+_\d+", re.ASCII)


@click.command(context_settings=screen.CONTEXT)
@click.argument("jobs", metavar="JOB...", nargs=-1, required=True)
@screen.common_options
def cancel(jobs: tuple[str, ...], as_json: bool) -> int:
    """End jobs of mine.

    JOB is a job's id, a task of an array (12_3), a name that one job has, a run's token or a run
    directory.
    """
    client = commands.CommandClient()
    with targets.answered():
        entries = client.queue()
    found = targets.resolve(jobs, client, entries)
    # All of them are looked at before the first one is cancelled.
    words = list(dict.fromkeys(_checked(target) for target in found))
    before = {entry.id: entry for target in found for entry in target.entries}
    with targets.answered():
        client.cancel(words)
    left = _left(words, _wait(client, words), before)
    if as_json:
        screen.tell_json([_described(entry) for entry in left])
    else:
        for entry in left:
            screen.tell(f"{entry.shown} ({screen.plain(entry.name)}): {_outcome(entry)}")
    return 0


def _checked(target: Target) -> str:
    """Return what scancel is to be told for a target.

    Raises:
        GpusubError: the job is somebody else's, or over, or it is not certain which one is meant.
    """
    if target.former:
        former = target.former
        raise GpusubError(
            f"{target.word}: {former.path} belongs to another job of this id, which Slurm has "
            f"forgotten (ids start again after a crash); to cancel the one that Slurm has now, use "
            f"scancel {target.word}"
        )
    if not target.entries:
        raise GpusubError(f"{target.word}: the job has ended; Slurm does not know it any more")
    others = sorted({entry.user for entry in target.entries} - {targets.me()})
    if others:
        raise GpusubError(f"{target.word}: the job is {others[0]}'s, not yours")
    active = [entry for entry in target.entries if not entry.ended]
    if not active:
        entry = target.entries[0]
        raise GpusubError(f"{target.word}: the job has ended: {state_words(entry)}")
    arrays = sorted({entry.array_id for entry in active})
    if len(arrays) > 1:
        shown = ", ".join(map(str, arrays))
        raise GpusubError(f"{target.word}: several jobs of yours: {shown}; name them by their ids")
    if _TASK.fullmatch(target.word):
        return target.word
    # A task of an array has an id of its own beside the array's.
    exact = runs.is_job_id(target.word) and int(target.word) not in arrays
    return target.word if exact else str(arrays[0])


def _wait(client: SlurmClient, words: Sequence[str]) -> tuple[QueueEntry, ...]:
    """Return the jobs as they are once all have ended, or after a few seconds."""
    ids = [int(word.partition("_")[0]) for word in words]
    deadline = time.monotonic() + WAIT_S
    while True:
        with targets.answered():
            entries = client.queue(ids)
        named = [target for word in words if (target := targets.find(word, entries, ()))]
        entries = tuple(dict.fromkeys(entry for target in named for entry in target.entries))
        if all(entry.ended for entry in entries) or time.monotonic() > deadline:
            return entries
        time.sleep(POLL_S)


def _left(
    words: Sequence[str], after: Sequence[QueueEntry], before: Mapping[int, QueueEntry]
) -> list[QueueEntry]:
    """Return what became of the jobs, without those that had ended before."""
    left = [entry for entry in after if not (entry.id in before and before[entry.id].ended)]
    for word in words:
        # Of a task that had not started Slurm keeps nothing.
        if not targets.find(word, after, ()):
            known = targets.find(word, list(before.values()), ())
            assert known is not None
            left.append(replace(known.entries[0], shown=word, state="CANCELLED"))
    return left


def _outcome(entry: QueueEntry) -> str:
    if entry.state == "CANCELLED":
        return "cancelled"
    if entry.ended:
        return f"had ended by itself: {state_words(entry)}"
    return f"cancelled, and still {state_words(entry)} on {entry.nodes or 'no node'}"


def _described(entry: QueueEntry) -> dict[str, Any]:
    run = runs.of_command(entry.command)
    return {
        "job_id": entry.id,
        "shown": entry.shown,
        "name": entry.name,
        "state": entry.state,
        "ended": entry.ended,
        "token": run.token if run else None,
    }
