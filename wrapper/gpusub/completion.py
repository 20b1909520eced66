"""Completion in bash, zsh and fish, by click's own scripts and protocol.

``_GPUSUB_COMPLETE=bash_source gpusub`` prints the script for a shell; it calls gpusub again, with
what is typed so far in the environment, for the words that may come next. Nothing that goes wrong
there may be seen or wait: the person is in the middle of a line.
"""

from __future__ import annotations

import contextlib
import os
import signal
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from types import FrameType
from typing import TypeAlias

import click
from click.shell_completion import CompletionItem, ShellComplete, get_completion_class

from gpusub import profile as profiles
from gpusub.cli import COMMANDS, load_command, submit, takes_value
from gpusub.errors import GpusubError
from gpusub.words import split

VARIABLE = "_GPUSUB_COMPLETE"
# Slurm's commands wait for a controller that is down for longer than a person for a TAB.
DEADLINE_S = 2.0

# Before click 8.5 a CompletionItem has no parameter.
Items: TypeAlias = "list[CompletionItem[str]]"

# The words behind a command that click does not take apart by itself.
_POSITIONS: Mapping[str, tuple[str, ...]] = {"exec": ("job", "file")}
# A run that Slurm has forgotten is still one to look at.
_MOST_RUNS = 20


class _TimeIsUp(BaseException):
    """The deadline has passed; past every "except Exception" that might hold it up."""


def complete(instruction: str) -> int:
    """Do what a shell asks for (``bash_source``, ``bash_complete``, …) and return the exit code."""
    shell, _, what = instruction.partition("_")
    base = get_completion_class(shell)
    if base is None or what not in ("source", "complete"):
        sys.stderr.write(
            f"gpusub: error: {VARIABLE}={instruction}: write bash_source, zsh_source or "
            "fish_source\n"
        )
        return 2

    class Complete(base):  # type: ignore[misc, valid-type]
        def get_completions(self, args: list[str], incomplete: str) -> Items:
            return list(words(args, incomplete))

    shell_complete: ShellComplete = Complete(submit, {}, "gpusub", VARIABLE)
    if what == "source":
        sys.stdout.write(shell_complete.source())
        return 0
    with contextlib.suppress(Exception, _TimeIsUp), _silence(), _deadline():
        said = shell_complete.complete()
        if said:
            sys.stdout.buffer.write(f"{said}\n".encode(errors="surrogateescape"))
    return 0


@contextlib.contextmanager
def _deadline() -> Iterator[None]:
    def stop(_number: int, _frame: FrameType | None) -> None:
        raise _TimeIsUp

    signal.signal(signal.SIGALRM, stop)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    try:
        yield
    finally:
        signal.setitimer(signal.ITIMER_REAL, 0)


@contextlib.contextmanager
def _silence() -> Iterator[None]:
    """Let nothing into the line that is being typed."""
    with open(os.devnull, "w") as nowhere, contextlib.redirect_stderr(nowhere):
        yield


def words(args: Sequence[str], incomplete: str) -> Iterator[CompletionItem[str]]:
    """Return what may stand at ``incomplete``, behind the words ``args``."""
    # Bash makes words of its own of the "=" in --profile=h1.
    typed = [word for i, word in enumerate(args) if not (word == "=" and _is_long(args[:i]))]
    if incomplete == "=" and _is_long(args):
        incomplete = ""
    elif _is_long([incomplete]) and "=" in incomplete:
        option, _, incomplete = incomplete.partition("=")
        return _with_option(f"{option}=", _behind([*typed, option], incomplete))
    if not typed and not incomplete.startswith("-"):
        return iter(_first(incomplete))
    return iter(_behind(typed, incomplete))


def _is_long(args: Sequence[str]) -> bool:
    return bool(args) and args[-1].startswith("--") and len(args[-1]) > 2


def _with_option(option: str, found: Items) -> Iterator[CompletionItem[str]]:
    for item in found:
        yield CompletionItem(option + item.value, item.type, item.help)


def _behind(args: Sequence[str], incomplete: str) -> Items:
    if args and args[0] in COMMANDS and args[0] != "submit":
        return _of_command(args[0], load_command(args[0]), args[1:], incomplete)
    rest = list(args[1:] if args and args[0] == "submit" else args)
    try:
        options, program = split(rest, takes_value(submit))
    except GpusubError:  # "--" or "-m" is the last word
        return _files(incomplete) if rest[-1] == "--" else []
    if program is not None:
        return _files(incomplete)
    option = _open_option(submit, options)
    if option is not None:
        return _value(option, incomplete)
    if incomplete.startswith("-"):
        return _options(submit, incomplete)
    return _files(incomplete)


def _first(incomplete: str) -> Items:
    """Return commands, and scripts: a first word that is no command is one."""
    commands = [
        CompletionItem(name, help=text)
        for name, (_, text) in COMMANDS.items()
        if name.startswith(incomplete)
    ]
    if not commands:
        return _files(incomplete)
    # The shells mix no files of their own among given words, so these are listed here.
    scripts = [
        CompletionItem(f"{path.name}/" if path.is_dir() else path.name)
        for path in sorted(Path.cwd().iterdir())
        if path.name.startswith(incomplete)
        and not path.name.startswith(".")
        and (path.suffix == ".py" or (incomplete and path.is_dir()))
    ]
    return [*commands, *scripts]


def _of_command(name: str, command: click.Command, args: Sequence[str], incomplete: str) -> Items:
    values = takes_value(command)
    option = _open_option(command, args)
    if option is not None and "--" not in args:
        return _value(option, incomplete)
    positional = [
        word
        for i, word in enumerate(args)
        if not word.startswith("-") and not (i and values.get(args[i - 1]))
    ]
    names = _POSITIONS.get(name)
    of_exec = names is not None and len(positional) >= 1
    if incomplete.startswith("-") and "--" not in args and not of_exec:
        return _options(command, incomplete)
    if names is None:
        arguments = [p for p in command.params if isinstance(p, click.Argument)]
        names = tuple(p.name or "" for p in arguments)
        if arguments and arguments[-1].nargs == -1 and len(positional) >= len(names):
            names = (*names, *[names[-1]] * (len(positional) - len(names) + 1))
    elif len(positional) >= len(names):
        names = (*names, *["file"] * (len(positional) - len(names) + 1))
    if len(positional) >= len(names):
        return []
    taken = set(positional)
    found = _named(names[len(positional)], incomplete)
    return [item for item in found if item.value not in taken]


def _open_option(command: click.Command, args: Sequence[str]) -> click.Option | None:
    """Return the option that the next word is the value of."""
    if not args or not takes_value(command).get(args[-1]):
        return None
    return next(p for p in command.params if isinstance(p, click.Option) and args[-1] in p.opts)


def _options(command: click.Command, incomplete: str) -> Items:
    context = click.Context(command)
    return [
        CompletionItem(name, help=(parameter.help or "").partition(". ")[0])
        for parameter in command.get_params(context)
        if isinstance(parameter, click.Option) and not parameter.hidden
        for name in sorted(parameter.opts, key=len)[-1:]
        if name.startswith(incomplete)
    ]


def _value(option: click.Option, incomplete: str) -> Items:
    if isinstance(option.type, click.Choice):
        return [CompletionItem(c) for c in option.type.choices if c.startswith(incomplete)]
    name, metavar = option.name or "", option.metavar or ""
    if name in _PROVIDERS:
        return _named(name, incomplete)
    if metavar == "DIR":
        return [CompletionItem(incomplete, type="dir")]
    return _files(incomplete) if any(w in metavar for w in ("FILE", "PATH")) else []


def _named(name: str, incomplete: str) -> Items:
    return _PROVIDERS[name](incomplete) if name in _PROVIDERS else []


def _files(incomplete: str) -> Items:
    return [CompletionItem(incomplete, type="file")]


def _partitions(incomplete: str) -> Items:
    from gpuslurm.commands import CommandClient

    before, comma, start = incomplete.rpartition(",")
    inventory = CommandClient().inventory()
    gpus: dict[str, set[int]] = {}
    for kind in inventory.kinds:
        gpus.setdefault(kind.partition, set()).add(kind.gpus)
    return [
        CompletionItem(
            f"{before}{comma}{p.name}",
            help=f"{p.nodes} nodes, {' or '.join(map(str, sorted(gpus.get(p.name, {0}))))} GPUs",
        )
        for p in inventory.partitions
        if p.name.startswith(start) and p.name not in before.split(",")
    ]


def _jobs(incomplete: str) -> Items:
    """Return the user's jobs, and the runs below ./.gpusub that Slurm has forgotten."""
    from gpuslurm.commands import CommandClient
    from gpusub.runs import is_job_id
    from gpusub.screen import plain

    found: dict[str, str] = {}
    with contextlib.suppress(Exception, _TimeIsUp):
        for entry in CommandClient().queue():
            shown = str(entry.array_id) if "[" in entry.shown else entry.shown
            found.setdefault(shown, f"{plain(entry.name)}, {entry.state.lower()}")
    with contextlib.suppress(OSError):
        runs = [path.name for path in Path(".gpusub").iterdir() if is_job_id(path.name)]
        for run in sorted(runs, key=int)[-_MOST_RUNS:]:
            found.setdefault(run, "run of this directory")
    return [
        CompletionItem(job, help=what) for job, what in found.items() if job.startswith(incomplete)
    ]


def _profiles(incomplete: str) -> Items:
    from gpusub.config import profile_names

    names = profile_names(profiles.paths(Path.home(), Path.cwd()))
    return [CompletionItem(name) for name in names if name.startswith(incomplete)]


def _templates(incomplete: str) -> Items:
    from gpusub.render import template_directory

    names = sorted(path.name.split(".")[0] for path in template_directory().glob("*.sh.j2"))
    return [CompletionItem(n) for n in names if n.startswith(incomplete)] or _files(incomplete)


_PROVIDERS: Mapping[str, Callable[[str], Items]] = {
    "partition": _partitions,
    "profile": _profiles,
    "template": _templates,
    "job": _jobs,
    "jobs": _jobs,
    "file": _files,
    "init": _files,
}
