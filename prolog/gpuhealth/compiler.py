"""Health policies as people write them: YAML in, a checked `Policy` out.

This is the one module that needs PyYAML; it runs where an admin compiles the policy, and never
on a node before a job.
"""

from __future__ import annotations

import difflib
import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Optional

import gpuhealth.checks  # noqa: F401 - registers them
from gpuhealth import hca, hostlist
from gpuhealth.check import REGISTRY
from gpuhealth.finding import ACTIONS
from gpuhealth.policy import Cap, Policy, Ports, Sku

GPUDIRECT = ("any", "dmabuf", "peermem", "both", "off")
LINK_LAYERS = ("InfiniBand", "Ethernet")
DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")
VERSIONS = ("driver", "kernel", "ofed", "firmware")
LIMITS = ("delta", "per_hour", "per_minute", "per_second", "count", "window_s")

Value = Callable[[Any, str], Any]


class PolicyError(Exception):
    """A policy that makes no sense; the message says where, what, and what to write instead."""


def _fail(node: Any, path: str, what: str) -> PolicyError:
    mark = node.start_mark
    return PolicyError(f"{mark.name}:{mark.line + 1}: {path or 'the policy'}: {what}")


def _is_null(node: Any) -> bool:
    return bool(node.tag == "tag:yaml.org,2002:null")


def _text(node: Any, path: str) -> str:
    if type(node).__name__ != "ScalarNode" or not node.value.strip():
        raise _fail(node, path, "expected a text")
    return str(node.value)


def _number(node: Any, path: str) -> float:
    try:
        value = float(_text(node, path))
    except ValueError:
        raise _fail(node, path, f"expected a number, not {node.value!r}") from None
    if not 0 <= value < 1e12:
        raise _fail(node, path, f"expected a number from 0 on, not {node.value}")
    return value


def _count(node: Any, path: str) -> int:
    text = _text(node, path)
    if not re.fullmatch(r"[0-9]{1,9}", text):
        raise _fail(node, path, f"expected a whole number, not {text!r}")
    return int(text)


def _switch(node: Any, path: str) -> bool:
    # The text itself, since YAML 1.1 takes yes, no, on and off for booleans, too.
    text = _text(node, path).lower()
    if text not in ("true", "yes", "on", "false", "no", "off"):
        raise _fail(node, path, f"expected true or false, not {text!r}")
    return text in ("true", "yes", "on")


def _choice(*choices: str) -> Value:
    def read(node: Any, path: str) -> str:
        text = _text(node, path)
        for choice in choices:
            if text.lower() == choice.lower():
                return choice
        raise _fail(node, path, f"expected {_or(choices)}, not {text!r}{_nearest(text, choices)}")

    return read


def _or(choices: tuple[str, ...]) -> str:
    return choices[0] if len(choices) == 1 else f"{', '.join(choices[:-1])} or {choices[-1]}"


def _nearest(text: str, choices: tuple[str, ...]) -> str:
    near = difflib.get_close_matches(text.lower(), [choice.lower() for choice in choices], 1)
    if not near:
        return ""
    return f"; did you mean {next(c for c in choices if c.lower() == near[0])!r}?"


def _list(of: Value) -> Value:
    def read(node: Any, path: str) -> tuple[Any, ...]:
        if type(node).__name__ != "SequenceNode":
            raise _fail(node, path, "expected a list, [like, this]")
        values = tuple(of(item, f"{path}[{index}]") for index, item in enumerate(node.value))
        twice = {value for value in values if values.count(value) > 1}
        if twice:
            raise _fail(node, path, f"{min(twice)} stands there twice")
        return values

    return read


def _pairs(node: Any, path: str) -> Iterator[tuple[str, Any, Any]]:
    """Yield the entries of a mapping: key, the key's node, the value's node."""
    if node.tag != "tag:yaml.org,2002:map":
        raise _fail(node, path, "expected keys and values")
    for key, value in node.value:
        yield _text(key, path), key, value


def _keys(shape: Mapping[str, Value]) -> Callable[[Any, str], dict[str, Any]]:
    """A mapping with these keys and no others; null is as if the key were not there."""

    def read(node: Any, path: str) -> dict[str, Any]:
        found = {}
        for name, key, value in _pairs(node, path):
            if name not in shape:
                near = _nearest(name, tuple(shape))
                known = "" if near else f"; known are {', '.join(shape)}"
                raise _fail(key, path, f"there is no key {name!r}{near}{known}")
            if not _is_null(value):
                found[name] = shape[name](value, f"{path}.{name}".lstrip("."))
        return found

    return read


def _each(names: tuple[str, ...], what: str, of: Value) -> Callable[[Any, str], dict[str, Any]]:
    """A mapping from some of these names to values of one kind."""

    def read(node: Any, path: str) -> dict[str, Any]:
        found = {}
        for name, key, value in _pairs(node, path):
            if name not in names:
                near = _nearest(name, names)
                hint = near or f"; known are {', '.join(names)}"
                raise _fail(key, path, f"there is no {what} {name!r}{hint}")
            if not _is_null(value):
                found[name] = of(value, f"{path}.{name}")
        return found

    return read


def _nodes(node: Any, path: str) -> str:
    text = _text(node, path)
    try:
        hostlist.split(text)
    except ValueError as error:
        raise _fail(node, path, str(error)) from None
    return text


def _port(node: Any, path: str) -> str:
    text = _text(node, path)
    try:
        hca.split_name(text)
    except ValueError as error:
        raise _fail(node, path, str(error)) from None
    return text


def _pkey(node: Any, path: str) -> int:
    text = _text(node, path)
    try:
        value = int(text, 16 if text.lower().startswith("0x") else 10)
    except ValueError:
        value = 0
    if not 1 <= value <= 0xFFFF:
        raise _fail(node, path, f"expected a P_Key like 0x8001, not {text!r}")
    return value


def _absolute(node: Any, path: str) -> str:
    text = _text(node, path)
    if not text.startswith("/") or "\0" in text or "\n" in text:
        raise _fail(node, path, f"expected an absolute path, not {text!r}")
    return text


def _percent(node: Any, path: str) -> float:
    value = _number(node, path)
    if value > 100:
        raise _fail(node, path, f"expected 0 to 100, not {node.value}")
    return value


_PORTS = _keys(
    {
        "names": _list(_port),
        "rate_gbps": _number,
        "width": _count,
        "link_layer": _choice(*LINK_LAYERS),
        "pkeys": _list(_pkey),
        "mtu_bytes": _count,
        "gid_index": _count,
    }
)
_SKU = _keys(
    {
        "match": _keys({"nodes": _nodes, "gpu": _text}),
        "gpus": _count,
        "nvlinks": _count,
        "gpudirect": _choice(*GPUDIRECT),
        "ports": _PORTS,
        "distance": _choice(*DISTANCES),
        "persistence": _switch,
        "fabric_manager": _switch,
        "versions": _each(VERSIONS, "version", _text),
        "pcie": _each(("gpu", "hca"), "device", _keys({"width": _count, "speed_gts": _number})),
        "modules": _list(_text),
        "mounts": _list(_absolute),
    }
)


def _skus(node: Any, path: str) -> tuple[Sku, ...]:
    skus = []
    for name, key, value in _pairs(node, path):
        found = _SKU(value, f"{path}.{name}")
        match = found.pop("match", {})
        if not match:
            raise _fail(key, f"{path}.{name}", "add match: {nodes: …} or match: {gpu: …}")
        ports = found.pop("ports", None)
        if ports is not None:
            if not ports.get("names"):
                raise _fail(key, f"{path}.{name}.ports", 'add names: ["mlx5_0:1", …]')
            ports = Ports(**ports)
        skus.append(Sku(name=name, ports=ports, **match, **found))
    if not skus:
        raise _fail(node, path, "there is no SKU")
    return tuple(skus)


def _thresholds(node: Any, path: str) -> dict[str, dict[str, dict[str, float]]]:
    """Read ``check.what: {limit: number}``; null switches a limit off."""
    found: dict[str, dict[str, dict[str, float]]] = {}
    known = tuple(f"{one.id}.{what}" for one in REGISTRY.values() for what in one.thresholds)
    for name, key, value in _pairs(node, path):
        if name not in known:
            near = _nearest(name, known)
            hint = near or f"; known are {', '.join(known)}"
            raise _fail(key, path, f"there is no threshold {name!r}{hint}")
        check, _, what = name.partition(".")
        limits: dict[str, float] = {}
        if not _is_null(value):
            limits = _each(LIMITS, "limit", _number)(value, f"{path}.{name}")
        found.setdefault(check, {})[what] = limits
    return found


def _policy(node: Any) -> Policy:
    read = _keys(
        {
            "skus": _skus,
            "checks": _each(tuple(REGISTRY), "check", _choice(*ACTIONS)),
            "thresholds": _thresholds,
            "max_drained": lambda item, path: Cap(
                **_keys({"count": _count, "percent": _percent})(item, path)
            ),
            "report_dir": _absolute,
        }
    )
    return Policy(**read(node, ""))


def compile_policy(text: str, name: str) -> Policy:
    """Return the policy that a YAML text describes; ``name`` is what errors call it."""
    try:
        import yaml
    except ImportError:
        raise PolicyError("compiling needs PyYAML: pip install gpusub, or python3-yaml") from None

    class Loader(yaml.SafeLoader):
        pass

    try:
        loader = Loader(text)
        loader.name = name
        node = loader.get_single_node()
        _merge(loader, node)
    except yaml.MarkedYAMLError as error:
        mark = error.problem_mark
        where = f"{name}:{mark.line + 1}" if mark else name
        raise PolicyError(f"{where}: {error.problem or 'not YAML'}") from None
    except (yaml.YAMLError, RecursionError) as error:
        raise PolicyError(f"{name}: not YAML: {str(error).splitlines()[0]}") from None
    if node is None or _is_null(node):
        raise PolicyError(f"{name}: there is nothing in it")
    return _policy(node)


def _merge(loader: Any, node: Any, seen: Optional[set[int]] = None) -> None:
    """Carry out YAML's merge keys (``<<``), wherever they are."""
    seen = set() if seen is None else seen
    if id(node) in seen or node is None:
        return
    seen.add(id(node))
    if type(node).__name__ == "MappingNode":
        own = [key.value for key, _ in node.value if type(key).__name__ == "ScalarNode"]
        for key, _ in node.value:
            if own.count(key.value) > 1:
                raise _fail(key, "", f"{key.value} stands there twice")
        loader.flatten_mapping(node)
        # What was merged comes first, and gives way.
        last = {str(key.value): (key, value) for key, value in node.value}
        node.value = list(last.values())
        for _, value in node.value:
            _merge(loader, value, seen)
    elif type(node).__name__ == "SequenceNode":
        for item in node.value:
            _merge(loader, item, seen)
