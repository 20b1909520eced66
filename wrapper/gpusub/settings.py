"""``gpusub config``: the settings in force, each with its origin, and a first file for a site."""

from __future__ import annotations

import json
import os
import re
import sys
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import click

from gpusub import profile as profiles
from gpusub.cli import Command, given, settings_of, submit, working_directory
from gpusub.environment import secret
from gpusub.errors import ExitCode, GpusubError
from gpusub.profile import Profile
from gpusub.request import BUILT_IN, Value

WIDTH = 80
MASK = "***"

# What holds of a key that nobody states: a value, or in words what is done instead.
DEFAULTS: Mapping[str, Value[Any]] = {
    "partition": Value(None, "Slurm's default partition"),
    "account": Value(None, "Slurm's default account"),
    "qos": Value(None, "Slurm's default"),
    "time": Value(None, "the partition's default"),
    "constraint": Value(None, "none"),
    "reservation": Value(None, "none"),
    "gpus_per_node": Value(None, "all GPUs of a node"),
    "cpus_per_gpu": Value(None, "DefCpuPerGPU, or its share"),
    "mem_per_gpu": Value(None, "DefMemPerGPU, or its share"),
    "gpu_request": Value("gpus-per-node", BUILT_IN),
    "shared": Value(False, BUILT_IN),
    "rendezvous": Value("c10d", BUILT_IN),
    "fabric": Value(None, "what NCCL finds by itself"),
    "env": Value(None, "none"),
    "setup": Value(None, "none"),
    "template": Value("torchrun", BUILT_IN),
}
# Options that are no settings: what to do this time, and how to show it.
_NOT_SHOWN = ("profile", "as_json", "debug", "dry_run", "follow", "wait", "parsable", "local")


@dataclass(frozen=True)
class Effective:
    """Every setting in force, by key, and the files that were looked at, each with what it is."""

    profile: Value[str] | None
    known: tuple[str, ...]
    settings: Mapping[str, Value[Any]]
    files: tuple[tuple[str, str], ...]


def effective(
    profile: Profile,
    variables: Mapping[str, Value[Any]],
    environ: Mapping[str, str],
    keys: Iterable[str],
    known: Sequence[str] = (),
    files: Sequence[tuple[str, str]] = (),
) -> Effective:
    """Return what is in force of ``profile`` with the user's ``variables`` over it.

    ``keys`` are those of a profile; ``env.NAME`` in ``variables`` are variables of the program.
    Values that are likely to be secrets are masked.
    """
    found: dict[str, Value[Any]] = {}
    for key in dict.fromkeys((*keys, *variables)):
        stated = variables.get(key) or profile.settings.get(key)
        if key == "fabric":
            found |= _under("fabric", profile.fabric)
            for name, block in profile.fabrics.items():
                found |= _under(f"fabric.{name}", block)
            if not profile.fabric and not any(profile.fabrics.values()):
                found[key] = DEFAULTS[key]
        elif key == "env":
            env = {**_under("env", profile.env)}
            env |= {name: value for name, value in variables.items() if name.startswith("env.")}
            found |= env or {key: DEFAULTS[key]}
        elif not key.startswith("env."):
            found[key] = stated or DEFAULTS.get(key, Value(None, "not set"))
    for name in sorted(name for name in environ if name.startswith("NCCL_")):
        found[name] = Value(environ[name], "your environment")
    masked = {key: Value(_masked(key, v.value), v.origin) for key, v in found.items()}
    chosen = None if profile.name is None else Value(profile.name, profile.origin)
    return Effective(chosen, tuple(known), masked, tuple(files))


def _under(prefix: str, values: Mapping[str, Value[Any]]) -> dict[str, Value[Any]]:
    return {f"{prefix}.{key}": value for key, value in values.items()}


# NAME=VALUE with a value as the shell reads one word; the innermost name decides.
_ASSIGNMENT = re.compile(
    r"\b([A-Za-z_]\w*)=(?![A-Za-z_]\w*=)"
    r"""((?:\$?'(?:\\.|[^'\\])*'|"(?:\\.|[^"\\])*"|\\.|[^\s;&|,'"\\])+)"""
)
_SECRET_OPTION = re.compile(
    r"(--?[\w-]*(?:token|key|password|secret)[ =]+|\bbearer\s+)[^\s'\"]+", re.IGNORECASE
)
_URL_PASSWORD = re.compile(r"(://[^/\s:@]*:)[^@\s/]+@")


def _masked(key: str, value: Any) -> Any:
    if key.startswith("env.") and value is not None and secret(key.removeprefix("env.")):
        return MASK
    if isinstance(value, (list, tuple)):
        return [_masked("", item) for item in value]
    if isinstance(value, str):
        # In a line of the setup, export HF_TOKEN=… is one, too.
        value = _ASSIGNMENT.sub(
            lambda match: f"{match[1]}={MASK}" if secret(match[1]) else match[0], value
        )
        value = _SECRET_OPTION.sub(rf"\1{MASK}", value)
        return _URL_PASSWORD.sub(rf"\1{MASK}@", value)
    return value


def table(shown: Effective, home: str, cwd: str) -> str:
    """Return the settings as aligned lines of at most 80 columns, where the values allow it."""

    def short(path: str) -> str:
        for base, sign in ((home, "~"), (cwd, ".")) if home == cwd else ((cwd, "."), (home, "~")):
            if len(base) > 1 and path.startswith(f"{base}/"):
                return sign + path[len(base) :]
        return path

    def origin(text: str) -> str:
        stated = re.fullmatch(r"profile .* \((.*)\)", text)
        return short(stated[1]) if stated else text.removeprefix("environment ")

    rows: list[tuple[str, str, str]] = []
    for key, setting in shown.settings.items():
        lines = _lines(setting.value)
        rows.append((key, lines[0], origin(setting.origin)))
        rows += [("", line, "") for line in lines[1:]]
    files = [(short(path), what) for path, what in shown.files]
    parts = [_headline(shown, short), "", *_aligned(rows), "", "Files, later ones win:"]
    width = max(len(path) for path, _ in files)
    parts += [f"  {path:<{width}}  {what}" for path, what in files]
    return "\n".join(parts) + "\n"


def _headline(shown: Effective, short: Any) -> str:
    others = [name for name in shown.known if shown.profile is None or name != shown.profile.value]
    more = f"; others: {', '.join(others)}" if others else ""
    if shown.profile is None:
        return "No profile" + (f"; with --profile: {', '.join(others)}" if others else "")
    place, _, what = shown.profile.origin.partition(": ")
    where = f"{what}, {short(place)}" if what else place.removeprefix("environment ")
    return f"Profile {shown.profile.value} ({where}){more}"


def _lines(value: Any) -> list[str]:
    if value is None or value == []:
        return ["-"]
    if isinstance(value, bool):
        return [str(value).lower()]
    if isinstance(value, (list, tuple)):
        return [line for item in value for line in _lines(item)]
    text = str(value)
    return (text.splitlines() if text.isprintable() or "\n" in text else [repr(text)]) or ['""']


def _aligned(rows: Sequence[tuple[str, str, str]]) -> list[str]:
    """Return rows of key, value and origin; an origin that does not fit has a line of its own."""
    keys = max(len(key) for key, _, _ in rows)
    origins = max(len(origin) for _, _, origin in rows)
    values = max(len(value) for _, value, _ in rows)
    values = max(min(values, WIDTH - keys - origins - 6), 12)
    lines = []
    for key, value, origin in rows:
        line = f"  {key:<{keys}}  {value:<{values}}  {origin}".rstrip()
        if len(line) > WIDTH and origin:
            lines.append(f"  {key:<{keys}}  {value}".rstrip())
            line = f"  {'':<{keys}}  {'':<{values}}  {origin}".rstrip()
            if len(line) > WIDTH:
                line = f"  {'':<{keys}}    {origin}"
        lines += [line] if line.strip() else []
    return lines


@click.command(
    "config",
    cls=Command,
    context_settings={"help_option_names": ["-h", "--help"], "max_content_width": WIDTH},
    epilog="""\
\b
Examples:
  gpusub config                         what a submission from here would use
  gpusub config --profile h100 --json
  gpusub config --init                  a file for this cluster, on stdout
  gpusub config --init /etc/gpusub/cluster.yaml
""",
)
@click.option("--profile", metavar="NAME", envvar="GPUSUB_PROFILE", help="Show this profile.")
@click.option(
    "--init",
    "init",
    metavar="[FILE]",
    is_flag=False,
    flag_value="-",
    help="Write a settings file for this site from what Slurm reports, every key explained, to "
    "FILE, which must not exist, or to stdout.",
)
@click.option("--json", "as_json", is_flag=True, help="Print one JSON object.")
@click.option("-v", "--debug", is_flag=True, help="Show where an error came from.")
@click.pass_context
def config(
    context: click.Context, profile: str | None, init: str | None, as_json: bool, debug: bool
) -> int:
    """Show the settings in force, each with its origin, and the files they are from.

    Built-in values, the site's file, yours, ./gpusub.yaml, SBATCH_<OPTION> and GPUSUB_<OPTION>
    variables: each beats those before it, and options beat them all.
    """
    try:
        if init is not None:
            return _init(init)
        return _show(_asked(context, profile), as_json)
    except GpusubError:
        if debug:
            import traceback

            traceback.print_exc()
        raise


def _asked(context: click.Context, profile: str | None) -> Value[str] | None:
    if not profile:
        return None
    source = context.get_parameter_source("profile")
    by_variable = source == click.core.ParameterSource.ENVIRONMENT
    return Value(profile, "environment GPUSUB_PROFILE" if by_variable else "option --profile")


def _show(asked: Value[str] | None, as_json: bool) -> int:
    from gpusub.config import ProfileSchema, profile_names

    home, cwd = Path.home(), Path(working_directory())
    paths = profiles.paths(home, cwd)
    shown = effective(
        profiles.load(home, cwd, asked),
        _variables(),
        os.environ,
        ProfileSchema.__struct_fields__,
        profile_names(paths),
        [(str(path), "read" if path.exists() else "absent") for path in paths],
    )
    if as_json:
        json.dump(_plain(shown), sys.stdout, indent=1)
        sys.stdout.write("\n")
    else:
        text = table(shown, str(home), str(cwd))
        sys.stdout.write(text.encode(errors="backslashreplace").decode())
    return 0


def _plain(shown: Effective) -> dict[str, Any]:
    profile = shown.profile
    return {
        "profile": None if profile is None else {"value": profile.value, "origin": profile.origin},
        "profiles": list(shown.known),
        "settings": {
            key: {"value": value.value, "origin": value.origin}
            for key, value in shown.settings.items()
        },
        "files": [{"path": path, "state": state} for path, state in shown.files],
    }


def _variables() -> dict[str, Value[Any]]:
    """Return what SBATCH_<OPTION> and GPUSUB_<OPTION> say, by key."""
    context = submit.make_context("gpusub", [])
    found: dict[str, Value[Any]] = dict(settings_of(context))
    for parameter in submit.params:
        key = parameter.name or ""
        if key in found or key in _NOT_SHOWN or key not in context.params:
            continue
        stated = given(context, key)
        value = context.params[key]
        if stated is None:
            continue
        if key in ("env", "nccl"):
            for item in value:
                name, _, text = item.partition("=")
                name = f"NCCL_{name}" if key == "nccl" and not name.startswith("NCCL_") else name
                found[f"env.{name}"] = Value(text, stated.origin)
        else:
            found[key] = Value(list(value) if isinstance(value, tuple) else value, stated.origin)
    return found


def _init(target: str) -> int:
    from gpuslurm.client import SlurmError
    from gpuslurm.commands import CommandClient
    from gpusub.sitefile import site_file

    try:
        text = site_file(CommandClient().inventory())
    except SlurmError as error:
        raise GpusubError(
            f"Slurm does not say what there is: {error}", ExitCode.UNCERTAIN
        ) from error
    if target == "-":
        sys.stdout.write(text)
        return 0
    path = Path(os.path.expanduser(target))
    try:
        # Everybody reads a site's file, whatever the umask of the administrator.
        old = os.umask(0o022)
        try:
            path.parent.mkdir(parents=True, exist_ok=True)
            with path.open("x", encoding="utf-8") as file:
                file.write(text)
        finally:
            os.umask(old)
    except FileExistsError:
        raise GpusubError(
            f"{path}: is there already; name another file, or compare with: gpusub config --init | "
            f"diff {path} -"
        ) from None
    except OSError as error:
        raise GpusubError(f"{path}: cannot be written: {error.strerror}") from error
    sys.stdout.write(f"{path}\n")
    return 0
