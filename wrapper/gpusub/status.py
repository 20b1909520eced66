"""``gpusub status``: the user's jobs, and why those that wait do."""

from __future__ import annotations

import datetime
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import click

from gpuslurm import commands
from gpuslurm.client import SlurmClient, SlurmError
from gpuslurm.queue import QueueEntry, Unavailable
from gpusub import reasons, runs, screen, targets
from gpusub.errors import ExitCode
from gpusub.runs import Run
from gpusub.tail import last_lines
from gpusub.targets import Target

LAST_LINES = 8
# sbatch's options among the key values.
_SHOWN = ("time", "partition", "switches")


@click.command(context_settings=screen.CONTEXT)
@click.argument("jobs", metavar="[JOB]...", nargs=-1)
@screen.common_options
def status(jobs: tuple[str, ...], as_json: bool) -> int:
    """Show my jobs and why those that wait do; with JOB, all about it.

    JOB is a job's id, a task of an array (12_3), a name, a run's token or a run directory.
    """
    client = commands.CommandClient()
    now = datetime.datetime.now()
    if jobs:
        return _show_jobs(jobs, client, now, as_json)
    with targets.answered():
        entries = tuple(targets.newest_first(client.queue()))
    out = _unavailable(client, entries)
    if as_json:
        screen.tell_json(
            [
                described(entry, runs.of_command(entry.command), reasons.explain(entry, out, now))
                for entry in entries
            ]
        )
    elif entries:
        screen.tell(*overview(entries, out, now, screen.columns()))
    else:
        screen.note("gpusub: no jobs of yours that Slurm knows")
    return 0


def _unavailable(client: SlurmClient, entries: Sequence[QueueEntry]) -> tuple[Unavailable, ...]:
    """Return the nodes that take no job, if that is why one of the jobs waits."""
    if not any(reasons.needs_nodes(entry) for entry in entries):
        return ()
    with targets.answered():
        return client.unavailable()


# -- the list


def overview(
    entries: Sequence[QueueEntry],
    unavailable: Sequence[Unavailable],
    now: datetime.datetime,
    most: int,
) -> list[str]:
    """Return the lines of the list: one a job, and under a pending one why it waits."""
    rows = [("JOB", "NAME", "STATE", "NODES", "TIME")]
    rows += [
        (e.shown, screen.plain(e.name), state_words(e), e.nodes or str(e.node_count), times(e, now))
        for e in entries
    ]
    head, *lines = screen.table(rows, most, elastic=(0, 1, 3))
    shown = [head]
    for entry, line in zip(entries, lines, strict=True):
        shown.append(line)
        why = reasons.explain(entry, unavailable, now)
        if why:
            shown += screen.wrapped(screen.plain(why), "    ", most)
    return shown


def state_words(entry: QueueEntry) -> str:
    """Return a job's state for people: ``running``, ``failed (3)``, ``node fail``."""
    words = entry.state.lower().replace("_", " ")
    if entry.state == "FAILED" and entry.exit_code:
        words += f" ({entry.exit_code})"
    elif entry.state == "FAILED" and entry.signal:
        words += f" (signal {entry.signal})"
    return words


def times(entry: QueueEntry, now: datetime.datetime) -> str:
    """Return how long a job has run and may run, or when it ended."""
    if entry.ended:
        ended = f"ended {screen.moment(entry.end, now)}" if entry.end else "ended"
        return f"{screen.duration(entry.elapsed_s)}, {ended}"
    elapsed = "-" if entry.state == "PENDING" else screen.duration(entry.elapsed_s)
    return f"{elapsed} / {screen.duration(entry.limit_s)}"


def described(entry: QueueEntry, run: Run | None, why: str) -> dict[str, Any]:
    """Return a job for --json."""
    return {
        "job_id": entry.id,
        "array_id": entry.array_id,
        "shown": entry.shown,
        "name": entry.name,
        "user": entry.user,
        "partition": entry.partition,
        "state": entry.state,
        "ended": entry.ended,
        "reason": entry.reason,
        "why": why or None,
        "nodes": entry.nodes,
        "node_count": entry.node_count,
        "elapsed_s": entry.elapsed_s,
        "limit_s": entry.limit_s,
        "submitted": entry.submitted,
        "start": entry.start,
        "end": entry.end,
        "dependency": entry.dependency,
        "restarts": entry.restarts,
        "exit_code": entry.exit_code if entry.ended else None,
        "signal": entry.signal if entry.ended else None,
        "token": run.token if run else None,
        "run_dir": str(run.path) if run else None,
    }


# -- one job


def _show_jobs(
    jobs: Sequence[str], client: SlurmClient, now: datetime.datetime, as_json: bool
) -> int:
    silent = None
    try:
        entries = client.queue()
    except SlurmError as error:
        # A run directory tells much by itself.
        silent, entries = str(error), ()
        screen.note(f"gpusub: Slurm gave no answer: {error}")
    found = targets.resolve(jobs, None if silent else client, entries)
    _show_targets(found, client, now, as_json)
    unknown = any(not t.entries and t.run and t.run.exit_code() is None for t in found)
    return int(ExitCode.UNCERTAIN) if silent and unknown else 0


def _show_targets(
    found: Sequence[Target], client: SlurmClient, now: datetime.datetime, as_json: bool
) -> None:
    out = _unavailable(client, [entry for target in found for entry in target.entries])
    if as_json:
        answer: list[dict[str, Any]] = []
        for target in found:
            answer += _described(target, client, out, now)
        screen.tell_json(answer)
        return
    for index, target in enumerate(found):
        if index:
            screen.tell("")
        plan = target.run.plan() if target.run else {}
        log = log_of(target, plan, client)
        screen.tell(*detail(target, plan, log, out, now, screen.columns()))
        if log:
            tail = last_lines(Path(log), LAST_LINES)
            if tail:
                screen.tell("", *(screen.plain(line) for line in tail))


def _described(
    target: Target,
    client: SlurmClient,
    unavailable: Sequence[Unavailable],
    now: datetime.datetime,
) -> list[dict[str, Any]]:
    plan = target.run.plan() if target.run else {}
    more = {"log": log_of(target, plan, client), "plan": plan or None}
    if target.entries:
        return [
            described(entry, target.run, reasons.explain(entry, unavailable, now)) | more
            for entry in target.entries
        ]
    assert target.run is not None
    state, code = forgotten(target.run)
    return [
        {
            "job_id": target.run.job_id,
            "state": state,
            "ended": code is not None,
            "exit_code": code,
            "token": target.run.token,
            "run_dir": str(target.run.path),
        }
        | more
    ]


def forgotten(run: Run) -> tuple[str, int | None]:
    """Return (state, exit code) of a run that Slurm does not know, by what it left behind."""
    code = run.exit_code()
    if code is None:
        return "UNKNOWN", None
    return ("COMPLETED" if code == 0 else "FAILED"), code


def log_of(target: Target, plan: Mapping[str, Any], client: SlurmClient) -> str | None:
    """Return the path of a job's main log; None where nobody knows it."""
    log, origin = runs.value(plan, "log")
    if log and (origin == "built-in" or "%" not in str(log)):
        return str(log)
    usual = target.run.path / "log.out" if target.run else None
    if usual and usual.exists():
        return str(usual)
    # Only Slurm knows what the patterns of a user's --output come to.
    for entry in target.entries[:1]:
        with targets.answered():
            known = client.jobs(entry.id)
        if known and known[0].stdout:
            return known[0].stdout
    return None


def detail(
    target: Target,
    plan: Mapping[str, Any],
    log: str | None,
    unavailable: Sequence[Unavailable],
    now: datetime.datetime,
    most: int,
) -> list[str]:
    """Return the lines about one job: its state, its plan with origins, and where it writes."""
    lines = []
    if target.entries:
        lines += overview(target.entries, unavailable, now, most)
    elif target.run:
        lines += _forgotten_lines(target.run, plan)
    rows = _plan_rows(plan)
    if target.run:
        gone = "" if target.run.path.is_dir() else "removed"
        rows.append(("run", screen.short(str(target.run.path)), gone))
    if log:
        rows.append(("log", screen.short(log), ""))
    if target.entries and target.run and target.entries[0].restarts:
        rows.append(("restarts", str(target.entries[0].restarts), ""))
    for name, value, origin in rows:
        line = f"  {name:<11} {value}"
        # Paths stay whole, to be copied; where a value is from gives way.
        room = most - screen.width(line) - 4
        lines.append(line + (f"  ({screen.cut(origin, room)})" if origin and room > 8 else ""))
    if target.former:
        former = screen.short(str(target.former.path))
        words = (
            f"{former} is of another job {target.entries[0].array_id}, which Slurm has forgotten"
        )
        lines += screen.wrapped(words, "  ", most)
    return lines


def _forgotten_lines(run: Run, plan: Mapping[str, Any]) -> list[str]:
    state, code = forgotten(run)
    name = _name(plan)
    what = f"job {run.job_id}" if run.job_id else "a run on this machine"
    if runs.value(plan, "local")[0] is not True and not run.job_id:
        what = "a run without a job id"
    ending = {
        "COMPLETED": "completed",
        "FAILED": f"failed ({code})",
        "UNKNOWN": "unknown: it left no exit code",
    }[state]
    known = "" if runs.value(plan, "local")[0] else "; Slurm does not know it"
    return [f"{run.token}  {name}  {ending}", f"    {what}{known}"]


def _name(plan: Mapping[str, Any]) -> str:
    options = plan.get("options")
    for option in options if isinstance(options, list) else []:
        if isinstance(option, dict) and option.get("name") == "job-name":
            return screen.plain(str(option.get("value")))
    target = runs.value(plan, "program", "target")[0]
    return screen.plain(Path(str(target)).name) if target else "?"


def _plan_rows(plan: Mapping[str, Any]) -> list[tuple[str, str, str]]:
    """Return (name, value, origin) of the plan's key values."""
    options = plan.get("options")
    asked = {
        str(option["name"]): option
        for option in (options if isinstance(options, list) else [])
        if isinstance(option, dict) and "name" in option
    }
    found = [
        ("nodes", *runs.value(plan, "resources", "nodes")),
        ("GPUs", *runs.value(plan, "resources", "gpus_per_node")),
        ("CPUs", *runs.value(plan, "resources", "cpus_per_task")),
        ("memory", *runs.value(plan, "resources", "mem")),
        *(
            (n, asked[n].get("value"), str(asked[n].get("origin", "")))
            for n in _SHOWN
            if n in asked
        ),
        ("python", *runs.value(plan, "python")),
        ("rendezvous", *runs.value(plan, "rendezvous")),
    ]
    rows = [
        (name, _value_words(name, value), origin)
        for name, value, origin in found
        if value is not None
    ]
    return [(name, screen.plain(value), screen.plain(origin)) for name, value, origin in rows]


def _value_words(name: str, value: Any) -> str:
    if isinstance(value, dict):
        least, most = value.get("least"), value.get("most")
        return str(least) if least == most else f"{least}-{most}"
    if name in ("GPUs", "CPUs"):
        return f"{value} a node"
    if name == "memory":
        return "all of a node" if str(value) == "0" else f"{value} a node"
    return str(value)
