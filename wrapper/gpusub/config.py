"""The files that people write: site, user and project settings, merged, each with its origin.

Every scalar is read as the text that was written. YAML would turn ``12:30:00`` into the number
45000, ``010`` into 8 and ``no`` into false; here the schema says what a text must be.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace
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
    fabric: dict[str, Any] | None = None  # a FabricSchema, or several by GPU type or feature
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

# The least and the most of each number of a fabric (NVIDIA/nccl:src/transport/net_ib,
# InfiniBand's 4 bits of service level and 8 of traffic class).
_RANGES: Mapping[str, tuple[int, int]] = {
    "service_level": (0, 15),
    "traffic_class": (0, 255),
    "gid_index": (0, 255),
    "pkey": (0, 65535),
    "qps_per_connection": (1, 128),
}

# How the keys that are neither text nor number are written.
_EXAMPLES = {
    "hcas": "write a list, as in [mlx5_0:1, mlx5_3:1]",
    "setup": "write a list of lines, each with - in front, in quotes where it holds a colon",
    "env": "write NAME: value below it",
    "fabric": "write keys below it, as in type: infiniband",
    "profiles": "write names below it, as in h100:",
}

# A GPU type or a node feature in front of a fabric of its own.
_SELECTOR = re.compile(r"[A-Za-z0-9][\w.+-]*", re.ASCII)

# The tags that plain YAML has by itself; any other (!env, !include, !!binary) would be dropped.
_TAGS = {
    f"tag:yaml.org,2002:{name}"
    for name in ("str", "int", "float", "bool", "null", "timestamp", "merge", "value", "seq", "map")
}
_NUMBER = r"-?(0|[1-9]\d{0,17})"
_BOOLS = ("true", "false")
# More than any file of settings has; aliases of aliases grow without end in a few lines.
_MOST_NODES = 20_000


@dataclass(frozen=True)
class _File:
    """One file's text as plain values, with the line of every key and of every item of a list."""

    path: Path
    values: Mapping[str, Any]
    lines: Mapping[tuple[str, ...], int]

    def fail(self, keys: tuple[str, ...], problem: str) -> GpusubError:
        """Return the error that names file, line and key."""
        where = self.place(keys)
        named = ".".join(key for key in keys if not key.startswith("["))
        return GpusubError(f"{where}: {named}{': ' if keys else ''}{problem}")

    def place(self, keys: tuple[str, ...]) -> str:
        """Return file and line of a key."""
        line = self.lines.get(keys)
        return f"{self.path}:{line}" if line else str(self.path)


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
                where = file.place(("default_profile",))
                name = Value(document.default_profile, f"{where}: default_profile")
    if name is None:
        return Profile()
    known = sorted({key for _, document in documents for key in document.profiles or {}})
    if name.value not in known:
        near = difflib.get_close_matches(name.value, known, n=1)
        hint = f"; did you mean {near[0]!r}?" if near else ""
        raise GpusubError(
            f"{name.origin}: no profile {name.value!r}"
            + (hint or (f"; there is {', '.join(known)}" if known else "; no file states any"))
        )
    merged = Profile(name.value, origin=name.origin)
    for file, document in documents:
        if name.value in (document.profiles or {}):
            merged = _merge(merged, file, _profile(file, name.value))
    return merged


def profile_names(files: Iterable[Path]) -> list[str]:
    """Return the names of all profiles that ``files`` state.

    Raises:
        GpusubError: a file is not readable or not valid.
    """
    read = [file for file in map(_read, files) if file is not None]
    return sorted({name for file in read for name in _document(file).profiles or {}})


def _merge(below: Profile, file: _File, stated: Mapping[str, Any]) -> Profile:
    """Return ``below`` with what ``file`` states over it, key by key.

    A fabric for all nodes is over the fabrics by GPU type that stand in files below.
    """

    def over(
        old: Mapping[str, Value[Any]], new: Mapping[str, Any], *under: str
    ) -> dict[str, Value[Any]]:
        keys = ("profiles", below.name or "", *under)
        added = {
            key: Value(value, f"profile {below.name} ({file.place((*keys, key))})")
            for key, value in new.items()
        }
        return {**old, **added}

    settings = {key: v for key, v in stated.items() if key not in ("fabric", "fabrics", "env")}
    merged = replace(below, settings=over(below.settings, settings))
    # "env:" with nothing behind it takes back what stands below, as null does for a key.
    if "env" in stated:
        env = stated["env"]
        merged = replace(merged, env={} if env is None else over(below.env, env, "env"))
    if "fabric" in stated and stated["fabric"] is None:
        merged = replace(merged, fabric={}, fabrics={})
    elif "fabric" in stated:
        kept = {
            name: {key: value for key, value in block.items() if key not in stated["fabric"]}
            for name, block in below.fabrics.items()
        }
        merged = replace(
            merged, fabric=over(below.fabric, stated["fabric"], "fabric"), fabrics=kept
        )
    elif "fabrics" in stated:
        fabrics = dict(below.fabrics)
        for name, block in stated["fabrics"].items():
            fabrics[name] = (
                {} if block is None else over(fabrics.get(name, {}), block, "fabric", name)
            )
        merged = replace(merged, fabrics=fabrics)
    return merged


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
        hint = next((hint for sign, hint in _YAML_HINTS.items() if sign in problem), "")
        raise GpusubError(f"{path}:{line + 1}: not valid YAML: {problem}{hint}") from error
    except RecursionError:
        raise GpusubError(f"{path}: not valid YAML: too many brackets within each other") from None
    lines: dict[tuple[str, ...], int] = {}
    if node is None:
        return _File(path, {}, lines)
    try:
        values = _Nodes(path, lines).plain(node, ()) or {}
    except RecursionError:
        raise GpusubError(f"{path}: an alias stands within what it stands for") from None
    if not isinstance(values, dict):
        line = node.start_mark.line + 1
        raise GpusubError(f"{path}:{line}: must hold keys, as in 'profiles:'")
    return _File(path, values, lines)


# What libyaml says of the slips that people make, and what to write.
_YAML_HINTS = {
    "cannot start any token": "; indent with blanks, and put a value that starts with such a "
    "character in quotes",
    "could not find expected ':'": "; write KEY: value, with a blank behind the colon",
    "mapping values are not allowed": "; put a value that holds ': ' in quotes",
    "but found another document": "; keep one, without ---",
}


class _Nodes:
    """Composed YAML nodes as dicts, lists, texts and None, noting each key's line."""

    def __init__(self, path: Path, lines: dict[tuple[str, ...], int]) -> None:
        self.path, self.lines, self.count = path, lines, 0

    def fail(self, node: Any, problem: str) -> GpusubError:
        return GpusubError(f"{self.path}:{node.start_mark.line + 1}: {problem}")

    def plain(self, node: Any, keys: tuple[str, ...]) -> Any:
        self.count += 1
        if self.count > _MOST_NODES:
            raise self.fail(node, "too large for a file of settings; look for aliases of aliases")
        if node.tag not in _TAGS:
            tag = node.tag.replace("tag:yaml.org,2002:", "!!")
            raise self.fail(node, f"{tag} means nothing here; write the value itself")
        if node.id == "scalar":
            if "\0" in node.value:
                raise self.fail(node, "a NUL cannot stand in a value")
            return None if node.tag == "tag:yaml.org,2002:null" else node.value
        if node.id == "sequence":
            for index, item in enumerate(node.value):
                self.lines[(*keys, f"[{index}]")] = item.start_mark.line + 1
            return [
                self.plain(item, (*keys, f"[{index}]")) for index, item in enumerate(node.value)
            ]
        return self.mapping(node, keys)

    def mapping(self, node: Any, keys: tuple[str, ...]) -> dict[str, Any]:
        values: dict[str, Any] = {}
        for key, value in node.value:
            if key.id != "scalar":
                raise self.fail(key, "no plain key; write NAME: value")
            if key.tag == "tag:yaml.org,2002:merge":
                continue
            if key.value in values:
                raise self.fail(key, f"{key.value} stands there twice; keep one of them")
            self.lines[(*keys, key.value)] = key.start_mark.line + 1
            values[key.value] = self.plain(value, (*keys, key.value))
        # What "<<" brings in stands below the keys that are written out, the first one on top.
        for key, value in node.value:
            if key.id == "scalar" and key.tag == "tag:yaml.org,2002:merge":
                for source in value.value if value.id == "sequence" else [value]:
                    if source.id != "mapping":
                        raise self.fail(key, "<< takes in keys; write <<: *NAME of an anchor")
                    self.take_in(source, keys, values)
        return values

    def take_in(self, source: Any, keys: tuple[str, ...], values: dict[str, Any]) -> None:
        other = _Nodes(self.path, {})
        other.count = self.count
        taken = other.plain(source, keys)
        self.count = other.count
        new = {key: value for key, value in taken.items() if key not in values}
        depth = len(keys)
        self.lines.update({at: n for at, n in other.lines.items() if at[depth] in new})
        values.update(new)


def _document(file: _File) -> FileSchema:
    _refuse_unknown(file, (), file.values, FileSchema)
    document = _convert(file, (), file.values, FileSchema)
    for name in document.profiles or {}:
        _profile(file, name)
    return document


def _profile(file: _File, name: str) -> dict[str, Any]:
    """Return the keys that ``file`` states of a profile, typed.

    A fabric by GPU type or feature is under ``fabrics``.
    """
    keys = ("profiles", name)
    stated = file.values["profiles"][name]
    if stated is None:
        return {}
    if not isinstance(stated, dict):
        raise file.fail(keys, "must hold keys, as in 'partition: gpu'")
    _refuse_unknown(file, keys, stated, ProfileSchema)
    profile = _convert(file, keys, stated, ProfileSchema)
    typed = {key: getattr(profile, key) for key in stated}
    _check(file, keys, typed)
    fabric = typed.get("fabric")
    if fabric and _by_node(file, keys, fabric):
        del typed["fabric"]
        typed["fabrics"] = {
            name: None if block is None else _fabric(file, (*keys, "fabric", name), block)
            for name, block in fabric.items()
        }
    elif fabric is not None:
        typed["fabric"] = _fabric(file, (*keys, "fabric"), fabric)
    if typed.get("template"):
        typed["template"] = _beside(file.path, typed["template"])
    return typed


def _by_node(file: _File, keys: tuple[str, ...], fabric: Mapping[str, Any]) -> bool:
    """Whether a fabric is stated by GPU type or node feature: its keys then hold keys.

    Raises:
        GpusubError: some do and some do not.
    """
    known = FabricSchema.__struct_fields__
    named = [key for key, value in fabric.items() if key not in known and isinstance(value, dict)]
    if not named:
        return False
    for key, value in fabric.items():
        if key in known or not (value is None or isinstance(value, dict)):
            raise file.fail(
                (*keys, "fabric", key),
                f"stands beside {named[0]}, which has a fabric of its own; write it in each",
            )
        if not _SELECTOR.fullmatch(key):
            raise file.fail((*keys, "fabric", key), "no GPU type and no node feature of Slurm's")
    return True


def _fabric(file: _File, keys: tuple[str, ...], stated: Mapping[str, Any]) -> dict[str, Any]:
    _refuse_unknown(file, keys, stated, FabricSchema)
    fabric = _convert(file, keys, stated, FabricSchema)
    typed = {key: getattr(fabric, key) for key in stated}
    _check(file, keys, typed, "fabric.")
    for key, (least, most) in _RANGES.items():
        if typed.get(key) is not None and not least <= typed[key] <= most:
            raise file.fail((*keys, key), f"{typed[key]}: write {least} to {most}")
    for index, hca in enumerate(typed.get("hcas") or ()):
        if not hca or re.search(r"[\s,]", hca):
            at = (*keys, "hcas", f"[{index}]")
            raise file.fail(at, f"{hca!r}: write one HCA an item, as in mlx5_0:1")
    return typed


def _beside(path: Path, template: str) -> str:
    """Return a template's path as seen from the file that names it; a name stays a name."""
    if template.startswith("~") or not ("/" in template or template.endswith(".j2")):
        return template
    return str(path.parent / template)


def _check(file: _File, keys: tuple[str, ...], typed: Mapping[str, Any], prefix: str = "") -> None:
    """Refuse what has the right type and still cannot be right."""
    for key, value in typed.items():
        allowed = _CHOICES.get(prefix + key)
        if allowed and value is not None and value not in allowed:
            raise file.fail((*keys, key), f"{value!r} is none of {', '.join(allowed)}")
        if key in _FORMS and value is not None:
            form, hint = _FORMS[key]
            if not re.fullmatch(form, str(value), re.ASCII):
                raise file.fail((*keys, key), f"{value!r}: {hint}")
        if isinstance(value, str) and not value:
            raise file.fail((*keys, key), "nothing in the quotes; write null for 'not set'")
        if isinstance(value, str) and re.search(r"[\x00-\x1f\x7f]", value):
            raise file.fail((*keys, key), "a line break or tab cannot stand in it; remove it")
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


def _convert(file: _File, keys: tuple[str, ...], stated: Any, schema: type[S]) -> S:
    for key, value in stated.items():
        _refuse_other_writings(file, (*keys, key), schema.__annotations__[key], value)
    try:
        return msgspec.convert(stated, schema, strict=False)
    except msgspec.ValidationError as error:
        problem, _, path = str(error).partition(" - at ")
        inner = tuple(re.findall(r"\.(\w+)|(\[\d+\])", path))
        at = tuple(name or index for name, index in inner)
        problem = problem[0].lower() + problem[1:]
        problem = re.sub("`(.*?)`", lambda name: _words(name[1]), problem)
        if at and at[-1] in _EXAMPLES:
            problem = f"{problem}; {_EXAMPLES[at[-1]]}"
        elif at and at[-1].startswith("["):
            problem = f"{problem}; put it in quotes"
        raise file.fail((*keys, *at), problem) from None


def _refuse_other_writings(file: _File, keys: tuple[str, ...], schema: str, value: Any) -> None:
    """Refuse what msgspec would make the best of: 1e3 and 5.0 for a number, 1 for true.

    It also does not say which of the variables of ``env`` is wrong.
    """
    is_text = isinstance(value, str)
    if schema.startswith("int") and is_text and not re.fullmatch(_NUMBER, value, re.ASCII):
        raise file.fail(keys, f"expected a plain number, got {value!r}; write it in digits, as 8")
    if schema.startswith("bool") and value is not None and str(value).lower() not in _BOOLS:
        raise file.fail(keys, "write true or false")
    if schema.startswith("dict[str, str]") and isinstance(value, dict):
        for name, item in value.items():
            if not isinstance(item, str):
                got = "nothing" if item is None else "a list" if isinstance(item, list) else "keys"
                raise file.fail(
                    (*keys, name), f'expected a text, got {got}; write it in quotes, as "1"'
                )


def _words(types: str) -> str:
    """Return msgspec's names of types in words of people who write YAML."""
    known = {"str": "a text", "int": "a plain number", "array": "a list", "object": "keys"}
    names = types.split(" | ")
    wanted = [name for name in names if name != "null" or len(names) == 1]
    return " or ".join(known.get(name, name) for name in wanted)
