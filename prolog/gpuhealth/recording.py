"""A node's recording: everything that any check could look at, for a test or a bug report."""

from __future__ import annotations

import json
import re
import time
from collections.abc import Iterable, Mapping
from dataclasses import replace
from typing import Any

import gpuhealth.checks  # noqa: F401 - registers them
from gpuhealth import check, collect, examination, hca, isolation, nvml
from gpuhealth.check import Node
from gpuhealth.policy import Ports, Sku
from gpuhealth.source import Entries, Recording, Source

SCHEMA = 1
HOSTNAME = "/proc/sys/kernel/hostname"
MOUNTS = "/proc/self/mounts"


def _survey(source: Source) -> Sku:
    """Return a SKU that lists every port there is, so that every check looks at each of them."""
    names = []
    for device in source.names(hca.CLASS).names:
        vpd = source.read(f"{hca.CLASS}/{device}/device/vpd", binary=True)
        if vpd.text is not None and "SW_MNG" in vpd.text:
            continue
        numbers = hca.port_numbers(source, device).names
        names += [f"{device}:{number}" for number in numbers if number.isdecimal()]
    # Without any HCA, too, checks have to look at what they would judge listed ports by.
    listed = tuple(names) or ("mlx5_0:1",)
    everything = Ports(names=listed, pkeys=(0x7FFE,), rate_gbps=1, width=1, mtu_bytes=1)
    versions = dict.fromkeys(("driver", "kernel", "ofed", "firmware"), "*")
    return Sku(
        name="everything",
        ports=everything,
        gpus=1,
        nvlinks=1,
        gpudirect="both",
        distance="SYS",
        persistence=True,
        fabric_manager=True,
        versions=versions,
        mounts=("/",),
        pcie={"gpu": {"width": 1, "speed_gts": 1}, "hca": {"width": 1, "speed_gts": 1}},
    )


def _look(source: Source, node: str, gpus: nvml.Nvml) -> None:
    source.read(HOSTNAME)
    source.read(examination.BOOT_ID)
    examination.gpu_model(source)
    sku = _survey(source)
    for known in (None, gpus):
        looker = Node(name=node, source=source, sku=sku, nvml=known)
        for one in check.REGISTRY.values():
            for context in one.contexts:
                check.run(one, replace(looker, context=context))


def record(source: Source, node: str, with_nvml: bool, deadline_s: float = 60.0) -> dict[str, Any]:
    """Return the recording of a node; what hangs in it has the errno ETIMEDOUT."""
    until_s = time.monotonic() + deadline_s
    answer: dict[str, Any] = {}
    if with_nvml:
        answer = ask_nvml(min(deadline_s, examination.NVML_TIMEOUT_S))
    gpus = nvml.from_dict(answer)
    collected = collect.collect(source, lambda s: _look(s, node, gpus), until_s)
    found: dict[str, Any] = {
        examination.RECORDED_BY_US: {"schema": SCHEMA, "complete": collected.complete}
    }
    if answer:
        found[examination.NVML] = answer
    if with_nvml:
        read = Recording(collected.entries, partial=True)
        looker = Node(node, read, _survey(read))
        verbs, _ = examination.ask_verbs(looker, collected.hung, until_s)
        if verbs:
            found[examination.VERBS] = verbs
    found.update(sorted(collected.entries.items()))
    return found


def ask_nvml(deadline_s: float) -> dict[str, Any]:
    """Return what NVML says, with the processes on the GPUs."""
    outcome = isolation.call(
        lambda: json.dumps(nvml.to_dict(nvml.read(processes=True, remotes=True))).encode(),
        deadline_s,
    )
    return examination.answer(outcome)


def node_name(source: Source) -> str:
    """Return the host's name without its domain; "" if it isn't known."""
    return (source.read(HOSTNAME).text or "").partition(".")[0]


_GUID = r"[0-9a-f]{4}(?::[0-9a-f]{4}){3}"
_PRIVATE = re.compile(
    rf"(?P<gid>\b{_GUID}:{_GUID}\b)|(?P<guid>\b{_GUID}\b)"
    r"|(?P<mac>\b[0-9a-f]{2}(?::[0-9a-f]{2}){5}\b)"
    r"|(?P<uuid>\b[0-9a-f]{8}(?:-[0-9a-f]{4}){3}-[0-9a-f]{12}\b)"
    r"|(?P<ip>\b\d{1,3}(?:\.\d{1,3}){3}\b)"
    r"|(?P<process>\bpid=[^,]*, name=[^,]*)",
    re.IGNORECASE,
)
# A GID's first half when it says nothing of the port: link-local, and IPv4-mapped.
_LINK_LOCAL = "fe80:0000:0000:0000"
_MAPPED = "0000:0000:0000:0000:0000:ffff:"


class _Names:
    """Hands out the same stand-in for the same name."""

    def __init__(self) -> None:
        self._known: dict[tuple[str, str], int] = {}
        self._counts: dict[str, int] = {}

    def number(self, kind: str, name: str) -> int:
        key = (kind, name.lower())
        if key not in self._known:
            self._counts[kind] = self._counts.get(kind, 0) + 1
            self._known[key] = self._counts[kind]
        return self._known[key]


def anonymous(recording: Mapping[str, Any]) -> dict[str, Any]:
    """Return a recording without what tells whose it is.

    Replaced, the same by the same: GUIDs, GIDs, MAC and IP addresses, UUIDs, the host's name.
    Left out: what is mounted, the names of processes.
    """
    names = _Names()
    host = recording.get(HOSTNAME)
    hosts = {host.strip(), host.strip().partition(".")[0]} if isinstance(host, str) else set()
    return {
        key: "process"
        if key.endswith("/comm") and isinstance(value, str)
        else _anonymous(value, names, hosts - {""})
        for key, value in recording.items()
        if key != MOUNTS
    }


def _anonymous(value: Any, names: _Names, hosts: Iterable[str]) -> Any:
    if isinstance(value, str):
        for host in sorted(hosts, key=len, reverse=True):
            value = re.sub(rf"(?<![\w-]){re.escape(host)}(?![\w-])", "node", value)
        return _PRIVATE.sub(lambda found: _stand_in(found, names), value)
    if isinstance(value, list):
        return [_anonymous(item, names, hosts) for item in value]
    if isinstance(value, dict):
        return {key: _anonymous(item, names, hosts) for key, item in value.items()}
    return value


def _stand_in(found: re.Match[str], names: _Names) -> str:
    kind, text = found.lastgroup or "", found[0]
    if not text.strip("0:.-"):
        return text
    if kind == "gid":
        if text.lower().startswith(_MAPPED):
            number = names.number("ip", text)
            return f"{_MAPPED}c000:{0x0200 + number:04x}"
        head = text[:19] if text.lower().startswith(_LINK_LOCAL) else "fec0:0000:0000:0000"
        return f"{head}:{_guid(names.number('guid', text[20:]))}"
    number = names.number(kind, text)
    if kind == "guid":
        return _guid(number)
    if kind == "mac":
        return f"02:00:00:00:{number >> 8:02x}:{number & 255:02x}"
    if kind == "uuid":
        return f"00000000-0000-0000-0000-{number:012x}"
    if kind == "ip":
        return f"192.0.2.{number % 256}"
    return "pid=0, name=process"


def _guid(number: int) -> str:
    return f"0000:0000:0000:{number:04x}"


def entries_as_source(recording: Mapping[str, Any]) -> Recording:
    """Return a recording to look at."""
    entries: Entries = {key: value for key, value in recording.items() if key.startswith("/")}
    return Recording(entries, partial=examination.RECORDED_BY_US in recording)
