"""The command line: options to a request, errors to one line and an exit code."""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any, TypeVar

import click

from gpusub import __version__
from gpusub.errors import ExitCode, GpusubError
from gpusub.output import note
from gpusub.request import (
    BUILT_IN,
    NOT_PASSED_ON,
    Nodes,
    Program,
    Request,
    Value,
    parse_assignment,
    parse_nodes,
    parse_sbatch,
    parse_time,
)
from gpusub.words import split

F = TypeVar("F", bound=Callable[..., Any])

# Settings that profiles and SBATCH_* variables can state as well as options.
SBATCH_VARIABLES = {
    "partition": "SBATCH_PARTITION",
    "account": "SBATCH_ACCOUNT",
    "qos": "SBATCH_QOS",
    "time": "SBATCH_TIMELIMIT",
    "constraint": "SBATCH_CONSTRAINT",
    "reservation": "SBATCH_RESERVATION",
    "gpus_per_node": "SBATCH_GPUS_PER_NODE",
    "cpus_per_task": "SBATCH_CPUS_PER_TASK",
    "mem": "SBATCH_MEM_PER_NODE",
    "job_name": "SBATCH_JOB_NAME",
    "output": "SBATCH_OUTPUT",
}
_SETTINGS = (*SBATCH_VARIABLES, "rendezvous", "template")
# Options that go to sbatch under their own name, without a meaning to gpusub.
_TO_SBATCH = ("exclude", "nodelist", "dependency", "comment", "mail_type", "mail_user")

# Every command by its first word: where it is defined, and what it does. Only the one that is
# called is loaded.
COMMANDS: Mapping[str, tuple[str, str]] = {
    "submit": ("gpusub.cli:submit", "Submit a job; what gpusub does without a command."),
    "status": ("gpusub.status:status", "Show my jobs, and why those that wait do."),
    "logs": ("gpusub.logs:logs", "Print or follow what a job and its ranks write."),
    "exec": ("gpusub.exec:exec_command", "Run a command in a running job."),
    "cancel": ("gpusub.cancel:cancel", "End jobs of mine."),
    "clean": ("gpusub.clean:clean", "Remove old run directories of jobs that have ended."),
    "config": ("gpusub.settings:config", "Show the settings in force; write a site's file."),
}


class Command(click.Command):
    """A command with its options in groups; what prints them is loaded with --help alone."""

    def format_options(self, ctx: click.Context, formatter: click.HelpFormatter) -> None:
        """Write the options, and on the first page the commands (see click.Command)."""
        from gpusub.help import write

        write(self, ctx, formatter, COMMANDS if self.name == "gpusub" else {})


EPILOG = """\
From SCRIPT on, every word is the program's own. A first word that names a command is that
command; ./NAME or "gpusub submit NAME" runs a script of that name. gpusub COMMAND --help tells
more of each. Every option can also be set as GPUSUB_<OPTION> in the environment, and most in a
profile: see gpusub config.

\b
Examples:
  gpusub train.py --lr 1e-3              one node, all its GPUs
  gpusub -N 4 -t 12:00:00 train.py       four nodes for half a day
  gpusub -N 4 --follow train.py          show the log till the end
  gpusub -N 2 --gpus-per-node 2 -m a.b   a module, on two GPUs of each node
  gpusub -- nvidia-smi topo -m           any command, once a node
  gpusub --local train.py                this machine, without Slurm
  gpusub --dry-run train.py              print the job script, submit nothing
"""


def _resource_options(command: F) -> F:
    for option in reversed(
        [
            click.option("-N", "--nodes", metavar="N|MIN-MAX", help="Nodes. Default: 1."),
            click.option(
                "--gpus-per-node",
                metavar="[TYPE:]N",
                help="GPUs of each node. Default: all; 0: run on CPUs.",
            ),
            click.option(
                "-c",
                "--cpus-per-task",
                metavar="N",
                help="CPUs of each node. Default: the GPUs' share.",
            ),
            click.option(
                "--mem", metavar="SIZE", help="Memory of each node. Default: the GPUs' share."
            ),
            click.option("-t", "--time", metavar="TIME", help="Time limit, as in 4:00:00 or 2-12."),
            click.option("-p", "--partition", metavar="NAME", help="Partition (or several: a,b)."),
            click.option("-A", "--account", metavar="NAME", help="Account to charge."),
            click.option("-q", "--qos", metavar="NAME", help="Quality of service."),
            click.option("-J", "--job-name", metavar="NAME", help="Default: the program's name."),
            click.option("-C", "--constraint", metavar="LIST", help="Features of the nodes."),
            click.option("-x", "--exclude", metavar="NODES", help="Nodes to leave out."),
            click.option("-w", "--nodelist", metavar="NODES", help="Nodes that must be in."),
            click.option("-d", "--dependency", metavar="SPEC", help="Start after other jobs."),
            click.option("--reservation", metavar="NAME", help="Run in this reservation."),
            click.option("--exclusive", is_flag=True, help="Share no node with other jobs."),
            click.option("--comment", metavar="TEXT", help="A comment of yours on the job."),
            click.option("--mail-type", metavar="TYPES", help="When to send mail, as in END,FAIL."),
            click.option("--mail-user", metavar="USER", help="Who gets it."),
            click.option(
                "-o",
                "--output",
                metavar="FILE",
                help="The log. Default: log.out in the run directory.",
            ),
            click.option(
                "--chdir", metavar="DIR", help="The job's working directory. Default: this one."
            ),
            click.option(
                "--sbatch",
                metavar="KEY[=VALUE]",
                multiple=True,
                help="Any other option of sbatch, by its long name. Repeatable.",
            ),
        ]
    ):
        command = option(command)
    return command


def _run_options(command: F) -> F:
    for option in reversed(
        [
            click.option(
                "-m",
                "module",
                metavar="MODULE ARGS…",
                allow_from_autoenv=False,
                help="Run a Python module.",
            ),
            click.option("--profile", metavar="NAME", help="A profile of the settings files."),
            click.option(
                "--rdzv",
                "rendezvous",
                type=click.Choice(["c10d", "static"]),
                envvar="GPUSUB_RDZV",
                help="How the nodes find each other. Default: c10d.",
            ),
            click.option(
                "--max-restarts",
                type=click.IntRange(0),
                default=0,
                metavar="N",
                help="Restart all workers in place this often. Default: 0.",
            ),
            click.option(
                "--env",
                metavar="NAME[=VALUE]",
                multiple=True,
                help="Set a variable for the program. Repeatable.",
            ),
            click.option(
                "--nccl",
                metavar="NAME=VALUE",
                multiple=True,
                help="Set an NCCL variable, as in IB_SL=5. Repeatable.",
            ),
            click.option(
                "--python",
                metavar="PATH",
                help="The program's Python. Default: the one your shell would run.",
            ),
            click.option("--template", metavar="NAME|PATH", help="The job script's template."),
            click.option(
                "--run-root",
                metavar="DIR",
                default=".gpusub",
                help="Where run directories go. Default: .gpusub.",
            ),
            click.option("--local", is_flag=True, help="Run on this machine, without Slurm."),
            click.option(
                "--follow", is_flag=True, help="Show the log; end with the job, and its exit code."
            ),
            click.option("--wait", is_flag=True, help="End with the job, and its exit code."),
            click.option("--dry-run", is_flag=True, help="Print the job script; submit nothing."),
            click.option("--parsable", is_flag=True, help="Print the job id alone."),
            click.option(
                "--json",
                "as_json",
                is_flag=True,
                envvar="GPUSUB_JSON",
                help="Print one JSON object.",
            ),
            click.option("-v", "--debug", is_flag=True, help="Show where an error came from."),
        ]
    ):
        command = option(command)
    return command


@click.command(
    name="gpusub",
    cls=Command,
    context_settings={
        "help_option_names": ["-h", "--help"],
        "auto_envvar_prefix": "GPUSUB",
        "max_content_width": 80,
    },
    epilog=EPILOG,
    options_metavar="[OPTIONS] SCRIPT [ARGS…]",
    add_help_option=False,
)
@_resource_options
@_run_options
@click.version_option(
    # Sites' modules set GPUSUB_VERSION to something else.
    __version__,
    prog_name="gpusub",
    message="%(prog)s %(version)s",
    allow_from_autoenv=False,
)
# Click's own one is set by GPUSUB_HELP before click 8.2.
@click.help_option("-h", "--help", allow_from_autoenv=False)
@click.pass_context
def submit(context: click.Context, /, **_options: Any) -> int:
    """Train on GPU nodes of a Slurm cluster.

    SCRIPT runs under torch.distributed.run, one worker a GPU. After -m it is a module; after --
    any command, run once a node.
    """
    from gpusub.command import submit_command

    try:
        return submit_command(_request(context), context.params)
    except BrokenPipeError:
        # Nobody reads on; a job goes on all the same. (click would make this a plain 1.)
        return 128 + 13
    except GpusubError:
        if context.params["debug"]:
            import traceback

            traceback.print_exc()
        raise


def _request(context: click.Context) -> Request:
    """Return the request that options and variables make together."""
    program: Program | None = context.obj
    if program is None:
        raise GpusubError("nothing to run; write a script, as in: gpusub train.py (--help for all)")
    params = context.params
    cwd = Path(working_directory())
    _refuse_flags_together(params)
    settings = settings_of(context)
    if "output" in settings:
        log = settings["output"]
        settings["output"] = Value(os.path.expanduser(log.value), log.origin)
    if "time" in settings:
        parse_time(settings["time"].origin, settings["time"].value)
    sbatch: dict[str, Value[str | None]] = {}
    for key in _TO_SBATCH:
        stated = given(context, key)
        if stated is not None:
            sbatch[key.replace("_", "-")] = Value(stated.value, stated.origin)
    for text, origin in repeated(context, "sbatch"):
        name, option_value = parse_sbatch(text)
        sbatch[name] = Value(option_value, origin)
    env = [(*parse_assignment("--env", text), origin) for text, origin in repeated(context, "env")]
    nccl = [(*_nccl(text), origin) for text, origin in repeated(context, "nccl")]
    nodes = given(context, "nodes")
    chdir = given(context, "chdir")
    return Request(
        program=program,
        cwd=cwd,
        chdir=None if chdir is None else _directory(cwd, chdir),
        nodes=Value(Nodes(1, 1), BUILT_IN)
        if nodes is None
        else Value(parse_nodes(nodes.origin, nodes.value), nodes.origin),
        settings=settings,
        sbatch=sbatch,
        env={name: value for name, value, _ in env},
        nccl={name: value for name, value, _ in nccl},
        origins={name: origin for name, _, origin in (*nccl, *env)},
        python=params["python"],
        profile=params["profile"],
        max_restarts=params["max_restarts"],
        exclusive=_exclusive(context),
        run_root=Path(os.path.abspath(cwd / os.path.expanduser(params["run_root"]))),
        local=params["local"],
    )


def settings_of(context: click.Context) -> dict[str, Value[str]]:
    """Return what options and variables say of the settings that profiles can state too."""
    found = {key: given(context, key) or _from_sbatch(key) for key in _SETTINGS}
    return {key: value for key, value in found.items() if value is not None}


def working_directory() -> str:
    """Return the working directory as the user sees it: $PWD keeps the links in its path."""
    try:
        here = os.getcwd()
        shown = os.environ.get("PWD", "")
        if os.path.isabs(shown) and os.path.samefile(shown, here):  # noqa: PTH117, PTH121
            return shown
    except OSError as error:
        raise GpusubError(f"the working directory is gone ({error.strerror}); cd to one") from error
    return here


def _refuse_flags_together(params: dict[str, Any]) -> None:
    for one, other in (
        ("parsable", "as_json"),
        ("parsable", "dry_run"),
        ("parsable", "follow"),
        ("follow", "as_json"),
        ("follow", "dry_run"),
        ("wait", "dry_run"),
    ):
        if params[one] and params[other]:
            names = [key.replace("as_", "").replace("_", "-") for key in (one, other)]
            raise GpusubError(f"--{names[0]} and --{names[1]} exclude each other; leave one out")


def given(context: click.Context, key: str) -> Value[str] | None:
    """Return what the user gave for an option, on the command line or as GPUSUB_<OPTION>."""
    source = context.get_parameter_source(key)
    value = context.params[key]
    if value is None or source == click.core.ParameterSource.DEFAULT:
        return None
    parameter = next(p for p in context.command.params if p.name == key)
    name = max(parameter.opts, key=len)
    if source == click.core.ParameterSource.ENVIRONMENT:
        return Value(str(value), f"environment GPUSUB_{name.lstrip('-').replace('-', '_').upper()}")
    return Value(str(value), f"option {name}")


def repeated(context: click.Context, key: str) -> list[tuple[str, str]]:
    """Return what was given for an option that can be repeated, each with its origin.

    The option adds to GPUSUB_<OPTION>, which stands in front: later ones win name by name.
    """
    variable = f"GPUSUB_{key.upper()}"
    by_option = context.get_parameter_source(key) == click.core.ParameterSource.COMMANDLINE
    stated = os.environ.get(variable, "").split() if by_option else context.params[key]
    found = [(text, f"environment {variable}") for text in stated]
    return found + [(text, f"option --{key}") for text in context.params[key] if by_option]


def _exclusive(context: click.Context) -> str | None:
    """Return where whole nodes are asked for."""
    stated = given(context, "exclusive")
    if stated is not None:
        return stated.origin if context.params["exclusive"] else None
    variable = "SBATCH_EXCLUSIVE"
    if "SLURM_JOB_ID" not in os.environ and os.environ.get(variable) in ("", "exclusive"):
        return f"environment {variable}"
    return None


def _from_sbatch(key: str) -> Value[str] | None:
    """Return what the site's or the user's SBATCH_* says; inside a job these are the job's."""
    name = SBATCH_VARIABLES.get(key)
    if name is None or "SLURM_JOB_ID" in os.environ:
        return None
    if key == "mem":
        for other in ("SBATCH_MEM_PER_GPU", "SBATCH_MEM_PER_CPU"):
            if other in os.environ:
                # sbatch reads it by itself; an empty value means that --mem is not given.
                return Value("", f"environment {other}")
    return Value(os.environ[name], f"environment {name}") if os.environ.get(name) else None


def _directory(cwd: Path, asked: Value[str]) -> Path:
    path = Path(os.path.abspath(cwd / os.path.expanduser(asked.value)))
    if not path.is_dir():
        raise GpusubError(f"{asked.origin}: no directory {path}")
    return path


def _nccl(text: str) -> tuple[str, str]:
    name, value = parse_assignment("--nccl", text)
    if value is None:
        raise GpusubError(f"--nccl {text}: write NAME=VALUE, as in IB_SL=5")
    return name if name.startswith("NCCL_") else f"NCCL_{name}", value


def takes_value(command: click.Command) -> dict[str, bool]:
    """Return of every option whether a value follows it."""
    found: dict[str, bool] = {"-h": False, "--help": False}
    for parameter in command.params:
        if isinstance(parameter, click.Option) and parameter.name != "module":
            for name in parameter.opts:
                found[name] = not (parameter.is_flag or parameter.count)
    return found


def load_command(name: str) -> click.Command:
    """Return the command of that name (a key of COMMANDS)."""
    module, _, attribute = COMMANDS[name][0].partition(":")
    command: click.Command = getattr(importlib.import_module(module), attribute)
    return command


def run(argv: Sequence[str]) -> int:
    """Run one command line; return its exit code, with errors on one line of stderr."""
    try:
        if argv and argv[0] in COMMANDS and argv[0] != "submit":
            name = f"gpusub {argv[0]}"
            command = load_command(argv[0])
            if sys.stdout is None:
                sys.stdout = open(os.devnull, "w")  # noqa: SIM115 - for as long as this runs
            code = command.main(args=list(argv[1:]), prog_name=name, standalone_mode=False)
            sys.stdout.flush()
        else:
            words = list(argv[1:]) if argv and argv[0] == "submit" else list(argv or ["--help"])
            options, program = split(words, takes_value(submit))
            code = submit.main(args=options, prog_name="gpusub", standalone_mode=False, obj=program)
    except click.ClickException as error:
        return _fail(_explain(error), ExitCode.USAGE)
    except GpusubError as error:
        return _fail(str(error), error.code)
    except BrokenPipeError:
        return 128 + 13
    except OSError as error:
        return _fail(str(error), ExitCode.FAILED)
    except (KeyboardInterrupt, click.Abort):
        return _fail("interrupted", ExitCode.INTERRUPTED)
    return code if isinstance(code, int) else 0


def _explain(error: click.ClickException) -> str:
    message = error.format_message()
    if isinstance(error, click.NoSuchOption):
        if error.ctx is not None and error.ctx.command is not submit:
            return " ".join(message.split())
        known = NOT_PASSED_ON.get(error.option_name.lstrip("-"))
        if known:
            return f"{error.option_name}: {known}"
        near = " or ".join(sorted(error.possibilities or ()))
        hint = f"did you mean {near}? " if near else ""
        name = error.option_name.removeprefix("--")
        name = "KEY, by its long name" if name.startswith("-") else name
        return f"no option {error.option_name}; {hint}an option of sbatch goes as --sbatch {name}"
    return " ".join(message.split())


def _fail(message: str, code: ExitCode) -> int:
    line = " ".join(message.splitlines())
    note(f"gpusub: error: {line}")
    return int(code)
