"""``gpusub exec``: a command beside what a job runs, on its nodes and with its GPUs."""

from __future__ import annotations

import os
import sys
from typing import Any

import click

from gpuslurm import commands, text
from gpuslurm.queue import QueueEntry
from gpusub import screen, targets
from gpusub.environment import scrubbed
from gpusub.errors import GpusubError
from gpusub.status import state_words


class _Words(click.Command):
    """A command whose last words are somebody else's: no option of ours is looked for there."""

    def parse_args(self, ctx: click.Context, args: list[str]) -> list[str]:
        """Take the words apart: options, JOB, options, and from CMD on none of ours."""
        ours, job, rest = [], None, list(args)
        while rest:
            word = rest.pop(0)
            if word == "--":
                if job is None and rest:
                    job = rest.pop(0)
                break
            if word.startswith("-") and word != "-":
                ours.append(word)
                if word in ("-w", "--nodelist") and rest:
                    ours.append(rest.pop(0))
            elif job is None:
                job = word
            else:
                rest.insert(0, word)
                break
        ctx.obj = (job, rest)
        return super().parse_args(ctx, ours)

    def collect_usage_pieces(self, ctx: click.Context) -> list[str]:
        """Return how it is called."""
        return ["[OPTIONS]", "JOB", "[-w NODE]", "CMD", "[ARGS]..."]


@click.command(name="exec", cls=_Words, context_settings=screen.CONTEXT)
@click.option("-w", "--nodelist", metavar="NODE", help="Which of its nodes. Default: the first.")
@screen.debug_option
@click.pass_obj
def exec_command(words: tuple[str | None, list[str]], /, **options: Any) -> int:
    """Run CMD in a running job, on one of its nodes and with its GPUs.

    It runs beside the job's own processes. From CMD on every word is CMD's. The terminal is
    CMD's too, and its exit code comes out.

    \b
    Examples:
      gpusub exec 42 nvidia-smi
      gpusub exec train -w gpu-7 bash
      gpusub exec 42 py-spy dump --pid 1234
    """
    job, command = words
    if job is None or not command:
        raise GpusubError("write a job and a command, as in: gpusub exec 42 nvidia-smi")
    client = commands.CommandClient()
    with targets.answered():
        entries = client.queue()
    (target,) = targets.resolve([job], client, entries)
    entry = _running(target)
    node = options["nodelist"] or text.first_name(entry.nodes)
    if node not in text.names(entry.nodes):
        raise GpusubError(f"-w {node}: job {entry.shown} runs on {entry.nodes}; name one of these")
    terminal = sys.stdin.isatty() and sys.stdout.isatty()
    sys.stdout.flush()
    with targets.answered():
        commands.become_step(entry.id, node, terminal, command, scrubbed(os.environ))


def _running(target: targets.Target) -> QueueEntry:
    """Return the job that is meant.

    Raises:
        GpusubError: it does not run, or there are several.
    """
    if target.former:
        raise GpusubError(
            f"{target.word}: {target.former.path} belongs to another job of this id, which Slurm "
            "has forgotten; name the job by its token or its run directory"
        )
    others = sorted({entry.user for entry in target.entries} - {targets.me()})
    if others:
        raise GpusubError(f"{target.word}: the job is {others[0]}'s, not yours")
    running = [entry for entry in target.entries if entry.state == "RUNNING"]
    if len(running) == 1:
        return running[0]
    entry = targets.one(target)
    raise GpusubError(f"job {entry.shown} does not run; its state: {state_words(entry)}")
