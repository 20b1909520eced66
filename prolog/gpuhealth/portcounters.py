"""Counters of InfiniBand and RoCE ports: what there is, and what two readings of one say.

How wide they are: the PortCounters attribute (IBTA's architecture specification, volume 1,
chapter 16), as torvalds/linux:drivers/infiniband/core/sysfs.c lays it out in sysfs. A counter of
PMA stops at its greatest value. Only differences mean anything: healthy nodes that have been up
for long show errors at their greatest value, and nobody knows from when they are.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Optional, Union

from gpuhealth import hca
from gpuhealth.history import History

if TYPE_CHECKING:
    from gpuhealth.check import Node
    from gpuhealth.reading import Reading
    from gpuhealth.source import Source

_PMA = {
    "link_downed": 8,
    "link_error_recovery": 8,
    "local_link_integrity_errors": 4,
    "excessive_buffer_overrun_errors": 4,
    "symbol_error": 16,
    "port_rcv_errors": 16,
    "port_rcv_remote_physical_errors": 16,
    "port_xmit_discards": 16,
    "VL15_dropped": 16,
    "port_xmit_wait": 32,
    # In units of four bytes.
    "port_xmit_data": 64,
    "port_rcv_data": 64,
}
# The driver's own (torvalds/linux:drivers/infiniband/hw/mlx5/counters.c); others lack some.
_DRIVER = {
    "rnr_nak_retry_err": 32,
    "local_ack_timeout_err": 32,
    "out_of_sequence": 32,
    "packet_seq_err": 32,
}
_ROCE = {"roce_slow_restart": 32, "np_cnp_sent": 64, "rp_cnp_handled": 64}
# Of the net device (Documentation/ABI/testing/sysfs-class-net): how often it lost its carrier.
_NET = {"carrier_down_count": 32}

# Bits of each counter; `read` looks for all of them.
WIDTHS: Mapping[str, int] = {**_PMA, **_DRIVER, **_ROCE, **_NET}

MISSING = "missing"
RESET = "reset"
SATURATED = "saturated"

_LIMIT = 1 << 64
MAX_PORTS = 64


@dataclass(frozen=True)
class Counts:
    """One port's counters: values, and for each of the others why it has none."""

    values: Mapping[str, int] = field(default_factory=dict)
    missing: Mapping[str, str] = field(default_factory=dict)

    def unreadable(self, names: Sequence[str]) -> list[str]:
        """Return those of ``names`` that may be there, though nobody can read them."""
        return [name for name in names if self.missing.get(name, "absent") not in _NOT_THERE]


NO_PMA = "N/A"
_NOT_THERE = ("absent", NO_PMA)


def parse(found: Reading) -> tuple[Optional[int], str]:
    """Return a counter's value, or None and why there is none.

    Ports without a performance agent (virtual functions, some clouds) say ``N/A (no PMA)``.
    """
    if found.text is None:
        return None, found.why
    text = found.text.strip()
    if text.isascii() and text.isdecimal() and len(text) <= 20 and int(text) < _LIMIT:
        return int(text), ""
    if text.startswith("N/A"):
        return None, NO_PMA
    return None, f"{text[:20]!r}" if text else "empty"


def delta(before: Optional[int], after: Optional[int], bits: int) -> Union[int, str]:
    """Return by how much a counter rose, or why nobody can tell.

    ``reset``: it has been set back, so this is a new baseline. ``saturated``: it was at its
    greatest value before, where it stops. ``missing``: there is no value to compare.
    """
    if before is None or after is None:
        return MISSING
    if after < before:
        return RESET
    if before == after == (1 << bits) - 1:
        return SATURATED
    return after - before


@dataclass(frozen=True)
class Rise:
    """By how much a counter rose within ``interval_s``, or since then by at least so much.

    ``why`` is what hides a part of it: ``reset`` or ``saturated``; ``missing`` if there is
    nothing to compare.
    """

    count: int = 0
    interval_s: float = 0.0
    why: str = ""


def rise(series: Sequence[tuple[float, int]], bits: int, since_s: float) -> Rise:
    """Add up how much a counter rose in what was read after ``since_s``.

    ``series`` are times and values, oldest first. The first step may have begun before
    ``since_s``; the interval tells.
    """
    count, why, begin_s = 0, MISSING, 0.0
    for index, (after_s, after) in enumerate(series[1:]):
        before_s, before = series[index]
        if after_s <= since_s:
            continue
        if why == MISSING:
            why, begin_s = "", before_s
        step = delta(before, after, bits)
        if isinstance(step, int):
            count += step
            if step:
                # A port that counts again is not saturated, whatever it was before.
                why = "" if why == SATURATED else why
        else:
            why = step
    return Rise(count, series[-1][0] - begin_s if why != MISSING else 0.0, why)


def series(
    history: History, port: str, name: str, now_s: float, now: int
) -> list[tuple[float, int]]:
    """Return what earlier runs read of a counter, and ``now``; nothing from before a resume."""
    found = []
    for stamp in history.stamps:
        value = stamp.ports.get(port, {}).get(name)
        if value is not None and history.resumed_s <= stamp.at_s < now_s:
            found.append((stamp.at_s, value))
    found.append((now_s, now))
    return found


def read(source: Source, device: str, number: int, names: Sequence[str] = ()) -> Counts:
    """Read one port's counters: ``names``, or all that its kind of port has."""
    path = hca.port_path(device, number)
    roce = source.read(f"{path}/link_layer").text == "Ethernet"
    places = {name: f"{path}/counters/{name}" for name in _PMA}
    places.update({name: f"{path}/hw_counters/{name}" for name in _DRIVER})
    if roce:
        places.update({name: f"{path}/hw_counters/{name}" for name in _ROCE})
        interfaces = source.names(f"{hca.CLASS}/{device}/device/net").names
        # With several it is not known which one is the port's.
        if len(interfaces) == 1:
            folder = f"{hca.CLASS}/{device}/device/net/{interfaces[0]}"
            places.update({name: f"{folder}/{name}" for name in _NET})
    values: dict[str, int] = {}
    missing: dict[str, str] = {}
    for name in names or places:
        if name not in places:
            continue
        value, why = parse(source.read(places[name]))
        if value is None:
            missing[name] = why
        else:
            values[name] = value
    return Counts(values, missing)


@dataclass(frozen=True)
class CountedPort:
    """A port whose counters are looked at; ``name`` is the policy's, or else ``mlx5_0:1``."""

    name: str
    device: str
    number: int
    listed: bool = True

    @property
    def key(self) -> str:
        """What a stamp calls it."""
        return f"{self.device}:{self.number}"


def counted_ports(node: Node) -> tuple[CountedPort, ...]:
    """Return the ports that the policy lists; where it lists none, all that are up.

    Devices of the switches' own, on which nothing may be read, and virtual functions, which
    have no counters, are left out, and so is what is not there: that is for others to tell.
    """
    listed = node.policy.ports
    if listed is not None and listed.names:
        devices = node.source.names(hca.CLASS)
        found = [
            CountedPort(port.name, port.device, port.number)
            for port in hca.listed_ports(node)
            if port.device is not None and (devices.error or port.device in devices.names)
        ]
        known = {port.device: _counts(node, port.device) for port in found}
        return tuple(port for port in found if known[port.device])
    return tuple(_active(node))[:MAX_PORTS]


def _counts(node: Node, device: str) -> bool:
    virtual = not node.source.kind(f"{hca.CLASS}/{device}/device/physfn").error
    return not virtual and not hca.is_limited(node, device)


def _active(node: Node) -> list[CountedPort]:
    found = []
    for device in node.source.names(hca.CLASS).names:
        if not _counts(node, device):
            continue
        for number in hca.port_numbers(node.source, device).names:
            if not (number.isascii() and number.isdecimal() and len(number) <= 3):
                continue
            port = hca.read_port(node.source, device, int(number))
            if port.state.text == "ACTIVE" and port.link_layer.text in ("InfiniBand", "Ethernet"):
                name = f"{device}:{number}"
                found.append(CountedPort(name, device, int(number), listed=False))
    return found


def read_all(node: Node) -> dict[str, dict[str, int]]:
    """Return every such port's counters, as a stamp keeps them; ports without any are left out."""
    found = {}
    for port in counted_ports(node)[:MAX_PORTS]:
        values = dict(read(node.source, port.device, port.number).values)
        if values:
            found[port.key] = values
    return found


def differences(
    before: Mapping[str, Mapping[str, int]], after: Mapping[str, Mapping[str, int]]
) -> dict[str, dict[str, Union[int, str]]]:
    """Return how much each counter of each port rose between two stamps, or why that's unknown."""
    found: dict[str, dict[str, Union[int, str]]] = {}
    for port in sorted({*before, *after}):
        old, new = before.get(port, {}), after.get(port, {})
        names = sorted({*old, *new} & set(WIDTHS))
        found[port] = {name: delta(old.get(name), new.get(name), WIDTHS[name]) for name in names}
    return found
