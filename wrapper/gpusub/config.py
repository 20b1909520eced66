"""The files that people write: site, user and project settings, merged, each with its origin.

Every scalar is read as the text that was written. YAML would turn ``12:30:00`` into the number
45000, ``010`` into 8 and ``no`` into false; here the schema says what a text must be.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, TypeVar

import msgspec

from gpuhealth.nccl import FABRIC_TYPES, GDR_LEVELS
from gpusub.errors import GpusubError
from gpusub.profile import Profile
from gpusub.request import Value, parse_time

S = TypeVar("S", bound=msgspec.Struct)


class FabricSchema(msgspec.Struct, frozen=True):
    """``fabric`` in a profile (see gpuhealth.nccl.Fabric)."""

    type: str | None = None
    hcas: tuple[str, ...] | None = None
    service_level: int | None = None
    traffic_class: int | None = None
    gdr_level: str | None = None
    gid_index: int | None = None
    pkey: int | None = None
    qps_per_connection: int | None = None
    socket_ifname: str | None = None


class ProfileSchema(msgspec.Struct, frozen=True):
    """One profile."""

    partition: str | None = None
    account: str | None = None
    qos: str | None = None
    time: str | None = None
    constraint: str | None = None
    reservation: str | None = None
    gpus_per_node: str | None = None
    cpus_per_gpu: int | None = None
    mem_per_gpu: str | None = None
    gpu_request: str | None = None
    shared: bool | None = None
    rendezvous: str | None = None
    fabric: FabricSchema | None = None
    env: dict[str, str] | None = None
    setup: list[str] | None = None
    template: str | None = None


class FileSchema(msgspec.Struct, frozen=True):
    """A whole file."""

    default_profile: str | None = None
    profiles: dict[str, Any] | None = None


GPU_REQUESTS = ("gpus-per-node", "gres", "none")
RENDEZVOUS = ("c10d", "static")

_CHOICES: Mapping[str, tuple[str, ...]] = {
    "gpu_request": GPU_REQUESTS,
    "rendezvous": RENDEZVOUS,
    "fabric.type": FABRIC_TYPES,
    "fabric.gdr_level": GDR_LEVELS,
}

# Keys whose text must be of a form, and what to write.
_FORMS: Mapping[str, tuple[str, str]] = {
    "gpus_per_node": (r"(?:[A-Za-z][\w.-]*:)?\d+", "write 8, or TYPE:8 as in h100:8"),
    "cpus_per_gpu": (r"[1-9]\d*", "write 1 or more"),
    "mem_per_gpu": (r"[1-9]\d*[KMGTkmgt]?", "write a size, as in 100G"),
}


@dataclass(frozen=True)
class _File:
    """One file's text as plain values, with the line of every key."""

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[tuple[str, ...], int]

    def fail(self, keys: tuple[str, ...], problem: str) -> GpusubError:
        """Return the error that names file, line and key."""
        line = self.lines.get(keys)
        where = f"{self.path}:{line}" if line else str(self.path)
        return GpusubError(f"{where}: {'.'.join(keys)}{': ' if keys else ''}{problem}")


def load(files: Iterable[Path], profile: Value[str] | None) -> Profile:
    """Return the profile in force, merged from ``files`` in their order.

    ``profile`` is the one asked for; without it, the last file's ``default_profile`` is taken.

    Raises:
        GpusubError: a file is not readable or not valid, or no file holds the profile.
    """
    read = [file for file in map(_read, files) if file is not None]
    documents = [(file, _document(file)) for file in read]
    name = profile
    if name is None:
        for file, document in documents:
            if document.default_profile is not None:
                line = file.lines["default_profile",]
                name = Value(document.default_profile, f"{file.path}:{line}: default_profile")
    if name is None:
        return Profile()
    known = sorted({key for _, document in documents for key in document.profiles or {}})
    if name.value not in known:
        raise GpusubError(
            f"{name.origin}: no profile {name.value!r}"
            + (f"; there is {', '.join(known)}" if known else "; no file states any")
        )
    merged = Profile(name.value)
    for file, document in documents:
        if name.value in (document.profiles or {}):
            merged = _merge(merged, file, _profile(file, name.value))
    return merged


def _merge(below: Profile, file: _File, keys: Mapping[str, Any]) -> Profile:
    origin = f"profile {below.name} ({file.path})"

    def over(old: Mapping[str, Value[Any]], new: Mapping[str, Any] | None) -> dict[str, Value[Any]]:
        # "fabric:" with nothing behind it takes back what stands below, as null does for a key.
        if new is None:
            return {}
        return {**old, **{key: Value(value, origin) for key, value in new.items()}}

    return Profile(
        below.name,
        over(below.settings, {k: v for k, v in keys.items() if k not in ("fabric", "env")}),
        over(below.fabric, keys.get("fabric", {})),
        over(below.env, keys.get("env", {})),
    )


def _read(path: Path) -> _File | None:
    """Return what stands in a file, None where there is no such file."""
    try:
        content = path.read_text(encoding="utf-8")
    except (FileNotFoundError, NotADirectoryError):
        return None
    except OSError as error:
        raise GpusubError(f"{path}: cannot be read: {error.strerror}") from error
    except UnicodeDecodeError as error:
        line = error.object[: error.start].count(b"\n") + 1
        raise GpusubError(f"{path}:{line}: not in UTF-8: {error.reason}") from error
    import yaml

    loader = getattr(yaml, "CSafeLoader", yaml.SafeLoader)
    try:
        node = yaml.compose(content, Loader=loader)
    except yaml.YAMLError as error:
        mark, position = getattr(error, "problem_mark", None), getattr(error, "position", None)
        line = mark.line if mark else content.encode()[:position].count(b"\n")
        problem = getattr(error, "problem", None) or str(error).splitlines()[0]
        raise GpusubError(f"{path}:{line + 1}: not valid YAML: {problem}") from error
    lines: dict[tuple[str, ...], int] = {}
    if node is None:
        return _File(path, {}, lines)
    try:
        values = _plain(path, node, (), lines) or {}
    except RecursionError:
        raise GpusubError(f"{path}: an alias stands within what it stands for") from None
    if not isinstance(values, dict):
        line = node.start_mark.line + 1
        raise GpusubError(f"{path}:{line}: must hold keys, as in 'profiles:'")
    return _File(path, values, lines)


def _plain(path: Path, node: Any, keys: tuple[str, ...], lines: dict[tuple[str, ...], int]) -> Any:
    """Return a composed YAML node as dicts, lists, texts and None, noting each key's line."""
    if node.id == "scalar":
        if "\0" in node.value:
            raise GpusubError(f"{path}:{node.start_mark.line + 1}: a NUL cannot stand in a value")
        return None if node.tag == "tag:yaml.org,2002:null" else node.value
    if node.id == "sequence":
        return [_plain(path, item, keys, lines) for item in node.value]
    values: dict[str, Any] = {}
    for key, value in node.value:
        line = key.start_mark.line + 1
        if key.id != "scalar" or key.value in values:
            problem = f"{key.value} stands there twice" if key.id == "scalar" else "no plain key"
            raise GpusubError(f"{path}:{line}: {problem}")
        lines[(*keys, key.value)] = line
        values[key.value] = _plain(path, value, (*keys, key.value), lines)
    return values


def _document(file: _File) -> FileSchema:
    _refuse_unknown(file, (), file.values, FileSchema)
    document = _convert(file, (), file.values, FileSchema)
    for name in document.profiles or {}:
        _profile(file, name)
    return document


def _profile(file: _File, name: str) -> dict[str, Any]:
    """Return the keys that ``file`` states of a profile, typed."""
    keys = ("profiles", name)
    stated = file.values["profiles"][name]
    if stated is None:
        return {}
    if not isinstance(stated, dict):
        raise file.fail(keys, "must hold keys, as in 'partition: gpu'")
    _refuse_unknown(file, keys, stated, ProfileSchema)
    fabric = stated.get("fabric")
    if isinstance(fabric, dict):
        _refuse_unknown(file, (*keys, "fabric"), fabric, FabricSchema)
    profile = _convert(file, keys, stated, ProfileSchema)
    typed = {key: getattr(profile, key) for key in stated}
    if profile.fabric is not None:
        typed["fabric"] = {key: getattr(profile.fabric, key) for key in fabric or {}}
    _check(file, keys, typed)
    return typed


def _check(file: _File, keys: tuple[str, ...], typed: Mapping[str, Any]) -> None:
    """Refuse what has the right type and still cannot be right."""
    fabric = {f"fabric.{key}": value for key, value in (typed.get("fabric") or {}).items()}
    for key, value in {**typed, **fabric}.items():
        allowed = _CHOICES.get(key)
        if allowed and value is not None and value not in allowed:
            raise file.fail((*keys, *key.split(".")), f"{value!r} is none of {', '.join(allowed)}")
        if key in _FORMS and value is not None:
            form, hint = _FORMS[key]
            if not re.fullmatch(form, str(value), re.ASCII):
                raise file.fail((*keys, key), f"{value!r}: {hint}")
    if typed.get("time") is not None:
        try:
            parse_time("", typed["time"])
        except GpusubError as error:
            raise file.fail((*keys, "time"), str(error).removeprefix(": ")) from None
    for name in typed.get("env") or {}:
        if not re.fullmatch(r"[A-Za-z_][A-Za-z0-9_]*", name, re.ASCII):
            raise file.fail((*keys, "env", name), "no name that a shell can export")


def _refuse_unknown(
    file: _File, keys: tuple[str, ...], stated: Mapping[str, Any], schema: type[msgspec.Struct]
) -> None:
    known = schema.__struct_fields__
    for key in stated:
        if key not in known:
            near = difflib.get_close_matches(key, known, n=1, cutoff=0.5)
            hint = f"did you mean {near[0]!r}?" if near else f"known keys: {', '.join(known)}"
            raise file.fail((*keys, key), f"unknown key; {hint}")


def _convert(
    file: _File,
    keys: tuple[str, ...],
    stated: Any,
    schema: type[S],
) -> S:
    try:
        return msgspec.convert(stated, schema, strict=False)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at ")
        inner = tuple(re.findall(r"\.(\w+)", path))
        problem = problem[0].lower() + problem[1:]
        if "`bool" in problem:
            problem = "write true or false"
        problem = re.sub("`(.*?)`", lambda name: _words(name[1]), problem)
        raise file.fail((*keys, *inner), problem) from None


def _words(types: str) -> str:
    """Return msgspec's names of types in words of people who write YAML."""
    known = {"str": "a text", "int": "a plain number", "array": "a list", "object": "keys"}
    names = types.split(" | ")
    wanted = [name for name in names if name != "null" or len(names) == 1]
    return " or ".join(known.get(name, name) for name in wanted)
