"""``gpusub logs``: what a job and its ranks have written, and write."""

from __future__ import annotations

import re
import sys
import time
from collections.abc import Sequence
from pathlib import Path

import click

from gpuslurm import commands
from gpuslurm.client import SlurmClient, SlurmError
from gpuslurm.queue import QueueEntry
from gpusub import runs, screen, targets
from gpusub.errors import ExitCode, GpusubError
from gpusub.follow import LOG_INTERVAL_S, follow
from gpusub.runs import Run
from gpusub.status import log_of
from gpusub.submission import Submission
from gpusub.tail import Sink, Source, Tail, position_of_last
from gpusub.targets import Target

# Reading the logs of many ranks takes its time on a network file system; no more a second.
READS_PER_S = 300.0
# A run on this machine writes its exit code down this soon after its end.
GONE_S = 3.0


@click.command(context_settings=screen.CONTEXT)
@click.argument("job", metavar="[JOB]", required=False)
@click.option(
    "-f", "--follow", "following", is_flag=True, help="Go on to the job's end; exit with its code."
)
@click.option("--rank", metavar="N|all", help="The log of one rank, or of all, each line marked.")
@click.option(
    "-n", "--lines", type=click.IntRange(0), metavar="N", help="Begin with the last N lines."
)
@screen.common_options
def logs(
    job: str | None, following: bool, rank: str | None, lines: int | None, as_json: bool
) -> int:
    """Print a job's log, by default that of my newest job of gpusub's.

    JOB is a job's id, a task of an array (12_3), a name, a run's token or a run directory. Rank 0
    writes to the job's main log, every other rank to one of its own.
    """
    if as_json and following:
        raise GpusubError("--json and --follow exclude each other; leave one out")
    wanted = _rank(rank)
    client = commands.CommandClient()
    target = _target(job, client, following)
    if any(entry.tasks and entry.state == "PENDING" for entry in target.entries[:1]):
        # It gets its own id, and its log a name, only as it starts.
        raise GpusubError(f"{target.word}: a task of an array that has not started has no log yet")
    plan = target.run.plan() if target.run else {}
    log = log_of(target, plan, client)
    if log is None:
        raise GpusubError(f"job {target.word} has no log, as far as Slurm tells")
    if as_json:
        screen.tell_json(_places(target, log))
        return 0
    if job is None:
        screen.note(f"gpusub: {_title(target)}: {screen.short(log)}")
    active = any(not entry.ended for entry in target.entries)
    may_come = following and active
    source = _source(wanted, Path(log), target, lines, may_come)
    code = _follow(client, target, log, source) if following else _print(source)
    if isinstance(source, AllRanks):
        source.finish()
    return code


def _rank(text: str | None) -> int | str | None:
    if text is None or text == "all":
        return text
    if not re.fullmatch(r"\d+", text, re.ASCII):
        raise GpusubError(f"--rank {text}: write a rank's number, or all")
    return int(text)


def _target(job: str | None, client: SlurmClient, following: bool) -> Target:
    if job is None:
        return _newest(client)
    known = runs.under(runs.default_root())
    # A run directory tells all by itself, also where there is no Slurm.
    if not following and ("/" in job or runs.TOKEN.fullmatch(job)):
        run = runs.at(Path(job).expanduser()) if "/" in job else None
        run = run or next((run for run in known if run.token == job), None)
        if run and runs.value(run.plan(), "log")[1] == "built-in":
            return Target(job, run=run)
    with targets.answered():
        entries = client.queue()
    (target,) = targets.resolve([job], client, entries)
    if len(target.entries) > 1 and not job.isdigit():
        # Of several jobs of one name, the newest.
        newest = target.entries[0]
        return Target(job, (newest,), runs.of_command(newest.command))
    if len(target.entries) > 1 and following:
        return Target(job, (targets.one(target),), target.run, target.former)
    return target


def _newest(client: SlurmClient) -> Target:
    """Return the newest of the user's jobs and of the runs of this directory.

    Raises:
        GpusubError: there is none.
    """
    known = runs.under(runs.default_root())
    entries: tuple[QueueEntry, ...] = ()
    if commands.available():
        try:
            entries = client.queue()
        except SlurmError as error:
            screen.note(f"gpusub: Slurm does not answer ({error}); looking at run directories only")
    ours = {run.token: e for e in entries if (run := runs.of_command(e.command))}
    ids = {run.token: run.job_id or 0 for run in known} | {t: e.id for t, e in ours.items()}
    # Tokens tell the second; within it ids tell the order.
    tokens = sorted(ids, key=lambda token: (token.rpartition("-")[0], ids[token]))
    if not tokens:
        raise GpusubError("no job of yours and no run directory here; name one: gpusub logs JOB")
    target = targets.find(tokens[-1], entries, known)
    assert target is not None
    return target


def _title(target: Target) -> str:
    if target.entries:
        entry = target.entries[0]
        return f"job {entry.shown} ({screen.plain(entry.name)})"
    assert target.run is not None
    return f"job {target.run.job_id}" if target.run.job_id else f"run {target.run.token}"


def _places(target: Target, log: str) -> dict[str, object]:
    run = target.run
    ranks = {0: log} | {rank: str(path) for rank, path in _rank_logs(run).items()}
    return {
        "job_id": target.entries[0].id if target.entries else run.job_id if run else None,
        "token": run.token if run else None,
        "run_dir": str(run.path) if run else None,
        "log": log,
        "ranks": {str(rank): path for rank, path in ranks.items()},
    }


def _rank_logs(run: Run | None) -> dict[int, Path]:
    """Return the logs of the ranks that have one of their own."""
    if run is None:
        return {}
    paths = [path for path in run.ranks.glob("*.log") if path.stem.isdigit()]
    return {int(path.stem): path for path in sorted(paths, key=lambda path: int(path.stem))}


# -- what is shown


def _source(
    rank: int | str | None, log: Path, target: Target, lines: int | None, may_come: bool
) -> Source:
    if rank == "all":
        return AllRanks(log, target.run, sys.stdout.buffer, lines)
    path = log if not isinstance(rank, int) or rank == 0 else _rank_log(rank, target, may_come)
    if not (may_come or path.exists()):
        raise GpusubError(f"{screen.short(str(path))}: no such file; {_why_none(target)}")
    return Tail(path, sys.stdout.buffer, 0 if lines is None else position_of_last(path, lines))


def _why_none(target: Target) -> str:
    if any(entry.state == "PENDING" for entry in target.entries):
        return "the job has not started yet; -f waits for it"
    return "it has written nothing, or its log was removed"


def _rank_log(rank: int, target: Target, may_come: bool) -> Path:
    there = _rank_logs(target.run)
    if rank in there:
        return there[rank]
    if may_come and target.run and rank < _world(target.run):
        return target.run.ranks / f"{rank}.log"
    raise GpusubError(f"--rank {rank}: job {target.word} has {_spelt([0, *there])}")


def _world(run: Run) -> int:
    """Return how many ranks the job may have, by its plan."""
    plan = run.plan()
    nodes, gpus = (runs.value(plan, "resources", key)[0] for key in ("nodes", "gpus_per_node"))
    most = nodes.get("most") if isinstance(nodes, dict) else nodes
    return most * (gpus or 1) if isinstance(most, int) and isinstance(gpus, int) else 0


def _spelt(ranks: Sequence[int]) -> str:
    """Return ranks in words: ``ranks 0-3 and 6``."""
    spans: list[list[int]] = []
    for rank in ranks:
        if spans and rank == spans[-1][1] + 1:
            spans[-1][1] = rank
        else:
            spans.append([rank, rank])
    words = [f"{first}-{last}" if last > first else str(first) for first, last in spans]
    if len(ranks) == 1:
        return f"no log of it; there is that of rank {words[0]} alone"
    listed = f"{', '.join(words[:-1])} and {words[-1]}" if len(words) > 1 else words[0]
    return f"no log of it; there are those of ranks {listed}"


class Marked:
    """A stream whose lines each begin with the rank that wrote them."""

    def __init__(self, rank: int, out: Sink) -> None:
        self.mark, self.out, self.rest = f"[rank {rank}] ".encode(), out, b""

    def write(self, data: bytes, /) -> None:
        """Pass on all whole lines; the beginning of another waits for its end."""
        *lines, self.rest = (self.rest + data).split(b"\n")
        self.out.write(b"".join(self.mark + line + b"\n" for line in lines))

    def flush(self) -> None:
        """Flush the stream below."""
        self.out.flush()

    def finish(self) -> None:
        """Show a last line that has no end."""
        if self.rest:
            self.write(b"\n")


class AllRanks:
    """The logs of all ranks, those too that come later, as one that grows."""

    def __init__(self, log: Path, run: Run | None, out: Sink, lines: int | None) -> None:
        self.run, self.out = run, out
        self.tails: dict[int, Tail] = {}
        self.marked: dict[int, Marked] = {}
        self.due = 0.0
        for rank, path in {0: log, **_rank_logs(run)}.items():
            self._add(rank, path, 0 if lines is None else position_of_last(path, lines))

    def _add(self, rank: int, path: Path, position: int = 0) -> None:
        self.marked[rank] = Marked(rank, self.out)
        self.tails[rank] = Tail(path, self.marked[rank], position)

    def copy(self) -> bool:
        """Show what is new of each rank, in their order."""
        if time.monotonic() < self.due:
            return False
        for rank, path in _rank_logs(self.run).items():
            if rank not in self.tails:
                self._add(rank, path)
        new = [self.tails[rank].copy() for rank in sorted(self.tails)]
        self.due = time.monotonic() + len(new) / READS_PER_S
        return any(new)

    def finish(self) -> None:
        """Show what is left, and the last lines that have no end."""
        self.due = 0.0
        self.copy()
        for marked in self.marked.values():
            marked.finish()
        self.out.flush()


# -- until when


def _print(source: Source) -> int:
    source.copy()
    return 0


def _follow(client: SlurmClient, target: Target, log: str, source: Source) -> int:
    """Show what comes until the job has ended; return its exit code."""
    if not target.entries:
        assert target.run is not None
        return _follow_run(target.run, source)
    entry = target.entries[0]
    run = target.run
    submission = Submission(
        entry.id,
        None,
        run.token if run else "",
        run.path if run else Path("/nonexistent"),
        log,
    )
    try:
        ending = follow(client, submission, source, lambda words: screen.note(f"gpusub: {words}"))
    except KeyboardInterrupt:
        screen.note(f"gpusub: job {entry.shown} goes on; end it with gpusub cancel {entry.shown}")
        return int(ExitCode.INTERRUPTED)
    return ending.exit_code


def _follow_run(run: Run, source: Source) -> int:
    """Follow a run that Slurm does not know: one of this machine, or one that it has forgotten."""
    seen_alive = time.monotonic()
    while True:
        code = run.exit_code()
        while source.copy():
            pass
        if code is not None:
            return code
        if runs.runs_here(run):
            seen_alive = time.monotonic()
        elif time.monotonic() > seen_alive + GONE_S:
            raise GpusubError(
                f"nothing runs {run.token} any more, as far as this machine and Slurm know, and it "
                "left no exit code",
                ExitCode.UNCERTAIN,
            )
        time.sleep(LOG_INTERVAL_S)
