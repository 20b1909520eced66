"""The command ``gpuhealth``: what people type, and what Slurm's hooks run."""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, Optional

from gpuhealth import check, examination, finding, recording
from gpuhealth.check import Node
from gpuhealth.examination import Examination, Request
from gpuhealth.policy import Policy, dump, load
from gpuhealth.source import Directory, Source
from gpuhealth.source import load as load_recording

POLICY = "/etc/gpusub/health.json"
EXITS = {finding.HEALTHY: 0, finding.UNHEALTHY: 1, finding.UNKNOWN: 3}
USAGE = 2
_MAX_FILE_BYTES = 64 << 20


class UsageError(Exception):
    """What was asked for can't be done; the message says why, in one line."""


def main(argv: Optional[Sequence[str]] = None) -> int:
    """Run the command; return its exit code."""
    args = _parser().parse_args(argv)
    try:
        code: int = args.run(args)
        sys.stdout.flush()
    except UsageError as error:
        if args.debug:
            raise
        print(f"gpuhealth: {error}", file=sys.stderr)
        return USAGE
    except BrokenPipeError:
        # Whoever read this has seen enough; nothing may be flushed at the exit.
        os.dup2(os.open(os.devnull, os.O_WRONLY), 1)
        return 141
    except KeyboardInterrupt:
        return 130
    return code


class _Parser(argparse.ArgumentParser):
    def error(self, message: str) -> Any:
        self.exit(USAGE, f"gpuhealth: {message}; see: {self.prog} --help\n")


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(prog="gpuhealth", description="Is this node fit for the job?")
    parser.add_argument("--version", action="version", version=_version())
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")

    def add(name: str, run: Any, about: str, *options: str) -> argparse.ArgumentParser:
        command = commands.add_parser(name, help=about, description=about)
        command.set_defaults(run=run)
        command.add_argument("--debug", action="store_true", help="show where an error arose")
        if "root" in options:
            command.add_argument(
                "--root", default="/", metavar="DIR|FILE", help="look at this tree or recording"
            )
        if "policy" in options:
            command.add_argument(
                "--policy",
                metavar="FILE",
                help=f"what to expect of the node: YAML, or compiled (default: {POLICY})",
            )
        if "node" in options:
            command.add_argument(
                "--node", help="the node's name in Slurm (default: SLURMD_NODENAME, or hostname)"
            )
        if "only" in options:
            command.add_argument(
                "--only", action="append", default=[], metavar="ID", help="run this check alone"
            )
        if "json" in options:
            command.add_argument("--json", action="store_true", help="print JSON")
        return command

    everything = ("root", "policy", "node", "only", "json")
    one = add("check", _check, "examine this node and say what is wrong with it", *everything)
    one.add_argument("-v", "--verbose", action="store_true", help="show what is healthy, too")
    add("env", _env, "print the NCCL settings that are right on this node", *everything[:3], "json")
    listing = add("list", _list, "list the checks, and what the policy makes of them", *everything)
    listing.add_argument(
        "--propose", action="store_true", help="print a policy for nodes like this one"
    )
    keeper = add(
        "record", _record, "print all that checks look at, for a bug report", "root", "node"
    )
    keeper.add_argument(
        "--anonymous", action="store_true", help="without names, addresses and identities"
    )
    compiler = add("compile", _compile, "check a policy (YAML) and print what nodes read (JSON)")
    compiler.add_argument("file", metavar="FILE", help="health.yaml; - is standard input")
    compiler.add_argument("-o", dest="output", metavar="FILE", help="write it there, atomically")
    for name, about in (
        ("prolog", "what Slurm runs on a node before a job"),
        ("epilog", "what Slurm runs on a node after a job"),
        ("periodic", "what Slurm runs on a node now and then"),
    ):
        add(name, _hook, about)
    return parser


def _version() -> str:
    try:
        from importlib.metadata import PackageNotFoundError, version

        return version("gpusub")
    except PackageNotFoundError:
        return "unknown"


def _open(root: str) -> tuple[Optional[dict[str, Any]], Source]:
    """Return the recording, if ``root`` is one, and the source that it or the tree is."""
    if os.path.isdir(root):  # noqa: PTH112
        return None, Directory(root)
    try:
        recorded = load_recording(_file(root))
    except ValueError as error:
        raise UsageError(f"{root}: {error}") from None
    return recorded, recording.entries_as_source(recorded)


def _file(path: str) -> str:
    try:
        if path == "-":
            return sys.stdin.read(_MAX_FILE_BYTES)
        with open(path, encoding="utf-8") as file:
            return file.read(_MAX_FILE_BYTES)
    except (OSError, UnicodeDecodeError) as error:
        why = error.strerror if isinstance(error, OSError) else "not UTF-8"
        raise UsageError(f"{path}: {why}") from None


def _policy(path: Optional[str]) -> Optional[Policy]:
    """Return the policy; None if none is named and none is installed."""
    if path is None:
        if not os.path.exists(POLICY):  # noqa: PTH110
            return None
        path = POLICY
    text = _file(path)
    if path.endswith(".json") or (text.startswith("{") and '"schema"' in text):
        try:
            return load(text)
        except ValueError as error:
            raise UsageError(f"{path}: {error}") from None
    return _compiled(text, path)


def _compiled(text: str, path: str) -> Policy:
    from gpuhealth.compiler import PolicyError, compile_policy

    try:
        return compile_policy(text, path)
    except PolicyError as error:
        raise UsageError(str(error)) from None


def _name(args: argparse.Namespace, source: Source) -> str:
    name = args.node or os.environ.get("SLURMD_NODENAME") or recording.node_name(source)
    return name or ("node" if args.root != "/" else os.uname().nodename.partition(".")[0])


def _only(args: argparse.Namespace) -> tuple[str, ...]:
    for one in args.only:
        if one not in check.REGISTRY:
            raise UsageError(f"there is no check {one!r}; they are: {', '.join(check.REGISTRY)}")
    return tuple(args.only)


def _request(args: argparse.Namespace, source: Source) -> Request:
    return Request(_name(args, source), _policy(args.policy), only=_only(args))


def _check(args: argparse.Namespace) -> int:
    recorded, source = _open(args.root)
    request = _request(args, source)
    if args.root == "/":
        # What the node remembers says which counters have risen, and what hangs for long.
        from gpuhealth.state import State

        known, _ = State().load()
        request = replace(request, history=known.history, avoid=known.avoid())
    if recorded is not None:
        done = examination.examine_recording(request, recorded)
    else:
        done = examination.examine(request, source, with_nvml=args.root == "/")
    print(json.dumps(done.as_dict(), indent=1) if args.json else _table(done, args.verbose))
    if args.verbose and not args.json:
        from gpuhealth import pci

        # As nvidia-smi topo -m shows it, from the same PCIe paths that the checks went by.
        print(pci.matrix(source), end="")
    if request.policy is None and not args.json:
        print(
            f"gpuhealth: no policy ({POLICY} or --policy): only what is wrong on any machine was "
            "looked for; gpuhealth list --propose prints a first one",
            file=sys.stderr,
        )
    return EXITS[done.verdict]


def _table(done: Examination, verbose: bool) -> str:
    shown = [one for one in done.findings if verbose or one.status != finding.HEALTHY]
    rows = []
    for one in shown:
        where = f"{one.status:9}  {one.check} {one.object}"
        text = f"{where}: {one.observed}" if one.observed else where
        if one.status != finding.HEALTHY:
            text += f", expected {one.expected}" if one.expected else ""
            text += f" ({one.action})"
            text += f"\n           {one.remedy}" if one.remedy else ""
        rows.append(text)
    healthy = sum(one.status == finding.HEALTHY for one in done.findings)
    sku = f" as {done.sku}" if done.sku else ""
    rows.append(
        f"{done.node} is {done.verdict}{sku}: {healthy} of {len(done.findings)} findings healthy, "
        f"{done.duration_s:.2f} s"
    )
    return "\n".join(rows)


def _env(args: argparse.Namespace) -> int:
    from gpuhealth import environment

    _, source = _open(args.root)
    name, policy = _name(args, source), _policy(args.policy)
    node = Node(name=name, source=source, sku=examination.sku_of(source, policy, name))
    found = environment.variables(node)
    if args.json:
        print(json.dumps([{"name": n, "value": v, "reason": r} for n, v, r in found], indent=1))
    for variable, value, reason in [] if args.json else found:
        print(f"# {reason}\n{variable}={value}")
    return 0


def _list(args: argparse.Namespace) -> int:
    recorded, source = _open(args.root)
    if args.propose:
        from gpuhealth import nvml, proposal

        answer = (recorded or {}).get(examination.NVML) or {}
        if args.root == "/":
            answer = recording.ask_nvml(examination.NVML_TIMEOUT_S)
        gpus = nvml.from_dict(answer) if answer else None
        print(proposal.propose(source, _name(args, source), gpus), end="")
        return 0
    policy, only = _policy(args.policy), _only(args)
    rows = [
        {
            "check": one.id,
            "action": check.action_of(one, policy),
            "contexts": list(one.contexts),
            "about": one.about,
            "thresholds": check.thresholds_of(one, policy),
        }
        for one in check.REGISTRY.values()
        if not only or one.id in only
    ]
    if args.json:
        print(json.dumps(rows, indent=1))
        return 0
    for row in rows:
        print(f"{row['check']:16} {row['action']:6} {','.join(row['contexts']):24} {row['about']}")
    return 0


def _record(args: argparse.Namespace) -> int:
    recorded, source = _open(args.root)
    if recorded is None:
        name = _name(args, source)
        recorded = recording.record(source, name, with_nvml=args.root == "/")
    if args.anonymous:
        recorded = recording.anonymous(recorded)
    print(json.dumps(recorded, indent=1))
    if sys.stdout.isatty():
        print("gpuhealth: to keep it: gpuhealth record > node.json", file=sys.stderr)
    return 0


def _compile(args: argparse.Namespace) -> int:
    text = dump(_compiled(_file(args.file), "standard input" if args.file == "-" else args.file))
    if args.output is None:
        print(text, end="")
        return 0
    # Beside it, since only a rename within one file system is atomic: a node reads it any time.
    temporary = f"{args.output}.{os.getpid()}"
    try:
        with open(temporary, "w", encoding="utf-8") as file:
            file.write(text)
            file.flush()
            os.fsync(file.fileno())
        os.chmod(temporary, 0o644)  # noqa: PTH101
        os.replace(temporary, args.output)  # noqa: PTH105
    except OSError as error:
        if os.path.exists(temporary):  # noqa: PTH110
            os.unlink(temporary)  # noqa: PTH108
        raise UsageError(f"{args.output}: {error.strerror}") from None
    return 0


def _hook(args: argparse.Namespace) -> int:
    from gpuhealth import hooks

    run = {"prolog": hooks.prolog, "epilog": hooks.epilog, "periodic": hooks.periodic}
    return run[args.command](os.environ)
