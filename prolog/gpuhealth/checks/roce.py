"""RoCE: the net device behind an RDMA port, and the GID that NCCL will use.

Formats: linux:Documentation/ABI/testing/sysfs-class-net, Documentation/networking/bonding.rst,
Documentation/ABI/stable/sysfs-class-infiniband. NCCL's choice of a GID:
NVIDIA/nccl:src/transport/net_ib/connect.cc.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Optional

from gpuhealth import hca
from gpuhealth.check import PERIODIC, Node, check
from gpuhealth.finding import DRAIN, UNHEALTHY, Finding, healthy, unhealthy, unknown
from gpuhealth.policy import Ports
from gpuhealth.reading import Reading
from gpuhealth.source import Source

ID = "roce"
NET = "/sys/class/net"

# Room for RoCE's largest packet: 4096 bytes and all headers.
FULL_MTU_BYTES = 4200
_MAPPED = "0000:0000:0000:0000:0000:ffff:"
_LINK_LOCAL = re.compile(r"fe[89ab]")
_GID = re.compile(r"[0-9a-f]{4}(?::[0-9a-f]{4}){7}\Z")
_MAX_GIDS = 1024
_CABLE = "check the cable, its modules and the switch's port"
_UP = "bring the interface up (ip link set … up), and look at its configuration"


@dataclass(frozen=True)
class Gid:
    """An entry of a port's GID table; ``kind`` is ``RoCE v2`` or ``IB/RoCE v1``."""

    index: int
    text: str
    kind: str

    @property
    def ipv4(self) -> str:
        """The IPv4 address that it stands for, or ""."""
        if not self.text.startswith(_MAPPED):
            return ""
        digits = self.text[len(_MAPPED) :].replace(":", "")
        return ".".join(str(int(digits[at : at + 2], 16)) for at in (0, 2, 4, 6))


@check(
    ID,
    "RoCE ports that the policy lists: net device, carrier, bond, MTU, the GID that NCCL uses",
    action=DRAIN,
    gpu=False,
)
def roce(node: Node) -> Iterator[Finding]:
    """Judge every listed port whose link layer is Ethernet.

    For InfiniBand a net device is of no account. What can't be read of the port itself is for
    the check of ports to say.
    """
    want = node.policy.ports
    for port in hca.listed_ports(node):
        if want is None or port.device is None or hca.is_limited(node, port.device):
            continue
        if node.source.read(f"{port.path}/link_layer").text == "Ethernet":
            yield _judge(node, port, want)


def _judge(node: Node, port: hca.ListedPort, want: Ports) -> Finding:
    """Return the worst of all that there is to say of one port."""
    net = net_device(node.source, port)
    findings: list[Finding] = []
    notes = [net.text or "?"]
    if net.text is None:
        findings.append(_netless(port.name, net))
    else:
        findings += _link(node.source, port.name, net.text)
        findings += _mtu(node.source, port.name, net.text, want, notes)
    findings += _gid(node.source, port, want, notes)
    if node.context == PERIODIC and net.text is not None:
        notes += _congestion(node.source, port.device or "", net.text)
    findings.sort(key=lambda one: (one.status != UNHEALTHY, one.systemic))
    return findings[0] if findings else healthy(ID, port.name, ", ".join(notes))


def _netless(name: str, net: Reading) -> Finding:
    if net.unreadable:
        return unknown(ID, name, f"net device {net.why}", "one")
    return unhealthy(
        ID, name, "no net device", "one", "look in ip link and dmesg for the HCA's interface"
    )


def net_device(source: Source, port: hca.ListedPort) -> Reading:
    """Return the name of a port's net device: of the bond, if the port is one."""
    table = source.read(f"{port.path}/gid_attrs/ndevs/0")
    if table.text and re.fullmatch(r"[^/\s]{1,15}", table.text):
        return Reading(table.text)
    nets = source.names(f"{hca.CLASS}/{port.device}/device/net")
    if nets.error:
        return Reading(error=nets.error)
    if len(nets.names) > 1:
        # Both ports of one function, or a switchdev's representors, which have no number here.
        for name in nets.names:
            if source.read(f"{NET}/{name}/dev_port").text == str(port.number - 1):
                return Reading(name)
    return Reading(nets.names[0]) if len(nets.names) == 1 else Reading(error=errno.ENOENT)


def _bond(source: Source, net: str) -> tuple[str, Reading]:
    """Return the bond that a net device is, or belongs to, and its legs; "" for none."""
    legs = source.read(f"{NET}/{net}/bonding/slaves")
    if not legs.absent:
        return net, legs
    master = source.target(f"{NET}/{net}/master")
    name = (master.text or "").rpartition("/")[2]
    if name:
        legs = source.read(f"{NET}/{name}/bonding/slaves")
        if not legs.absent:
            return name, legs
    return "", legs


def _link(source: Source, name: str, net: str) -> Iterator[Finding]:
    """Yield what is wrong with the link: a bond's RDMA port stays ACTIVE with one leg down."""
    bond, legs = _bond(source, net)
    if not bond:
        yield from _carrier(source, name, net, net)
        return
    if legs.text is None:
        yield unknown(ID, name, f"{bond} bonding/slaves {legs.why}", "all legs up")
        return
    if not legs.text.split():
        yield unhealthy(ID, name, f"{bond} has no leg", "all legs up", _UP)
    status = source.read(f"{NET}/{bond}/bonding/mii_status")
    if status.text is not None and status.text != "up":
        yield unhealthy(ID, name, f"{bond} {status.text[:20]}", "up", _CABLE)
    for leg in legs.text.split()[:16]:
        yield from _carrier(source, name, leg, f"{bond}'s leg {leg}")


def _carrier(source: Source, name: str, net: str, what: str) -> Iterator[Finding]:
    carrier = source.read(f"{NET}/{net}/carrier")
    state = source.read(f"{NET}/{net}/operstate")
    if carrier.text == "0":
        yield unhealthy(ID, name, f"{what} no carrier", "carrier", _CABLE)
    elif carrier.error == errno.EINVAL:
        # So the kernel answers for an interface that is switched off.
        yield unhealthy(ID, name, f"{what} is switched off", "up", _UP)
    elif state.text in ("down", "lowerlayerdown", "notpresent"):
        yield unhealthy(ID, name, f"{what} {state.text}", "up", _UP)
    elif carrier.text != "1":
        seen = carrier.why if carrier.text is None else repr(carrier.text[:20])
        yield unknown(ID, name, f"{what} carrier {seen}", "carrier")


def _mtu(source: Source, name: str, net: str, want: Ports, notes: list[str]) -> Iterator[Finding]:
    found = source.read(f"{NET}/{net}/mtu")
    if not re.fullmatch(r"[0-9]{1,6}", found.text or ""):
        if want.mtu_bytes is not None:
            seen = found.why if found.text is None else repr(found.text[:20])
            yield unknown(ID, name, f"{net} mtu {seen}", str(want.mtu_bytes))
        return
    mtu = int(found.text or "0")
    notes.append(f"mtu {mtu}")
    least = want.mtu_bytes or FULL_MTU_BYTES
    if mtu < least:
        finding = unhealthy(
            ID,
            name,
            f"{net} mtu {mtu}",
            f"{least} or more",
            f"set the MTU of {net} and of the switches' ports (usually 9000)",
        )
        # Nobody has said what it should be, and then it is the same on all nodes.
        yield replace(finding, systemic=want.mtu_bytes is None)


def _gid(source: Source, port: hca.ListedPort, want: Ports, notes: list[str]) -> Iterator[Finding]:
    expected = "a RoCE v2 GID of an IPv4 address"
    remedy = "give the interface its IPv4 address; show_gids lists what there is"
    if want.gid_index is not None:
        expected = f"{expected} at {want.gid_index}"
        found = read_gid(source, port.path, want.gid_index)
        remedy += "; the policy's gid_index may not be right for this node"
    else:
        found = chosen_gid(source, port.path)
    if isinstance(found, Reading):
        if found.unreadable:
            yield unknown(ID, port.name, f"GIDs {found.why}", expected)
            return
        where = "" if want.gid_index is None else f" at {want.gid_index}"
        yield unhealthy(ID, port.name, f"no GID{where}", expected, remedy)
        return
    address = found.ipv4 or found.text
    routable = bool(found.ipv4) or not _LINK_LOCAL.match(found.text)
    if found.kind == "RoCE v2" and (found.ipv4 or (want.gid_index is not None and routable)):
        notes.append(f"GID {found.index} {address}")
        return
    yield unhealthy(ID, port.name, f"GID {found.index} {found.kind} {address}", expected, remedy)


def _gid_at(source: Source, path: str, index: int) -> Reading:
    """Return a GID; an entry that is empty is absent."""
    found = source.read(f"{path}/gids/{index}")
    if found.error == errno.EINVAL or (found.text is not None and not found.text.strip("0:")):
        return Reading(error=errno.ENOENT)
    if found.text is not None and not _GID.match(found.text):
        return Reading(error=errno.EBADMSG)
    return found


def read_gid(source: Source, path: str, index: int) -> Gid | Reading:
    """Return one entry of a port's GID table, or why there is none."""
    found = _gid_at(source, path, index)
    if found.text is None:
        return found
    kind = source.read(f"{path}/gid_attrs/types/{index}")
    if kind.text is None:
        # Without a net device the entry has no type.
        return Reading(error=errno.ENOENT) if kind.error == errno.EINVAL else kind
    return Gid(index, found.text, "RoCE v2" if kind.text == "RoCE v2" else kind.text[:12])


def chosen_gid(source: Source, path: str) -> Gid | Reading:
    """Return the GID that NCCL chooses by itself (from 2.21 on), or why it can't be told.

    With its defaults that is the first one of an IPv4 address and of RoCE v2; without such a
    one, the first of an IPv4 address, and without that, index 0, whatever it is.
    """
    entries = source.names(f"{path}/gids")
    if entries.error:
        return Reading(error=entries.error)
    indices = sorted(int(name) for name in entries.names if name.isascii() and name.isdecimal())
    first: Optional[Gid] = None
    error = 0
    for index in indices[:_MAX_GIDS]:
        found = _gid_at(source, path, index)
        if found.unreadable:
            error = found.error
        if found.text is None or not found.text.startswith(_MAPPED):
            continue
        gid = read_gid(source, path, index)
        if isinstance(gid, Reading):
            error = gid.error if gid.unreadable else error
            continue
        if gid.kind == "RoCE v2":
            return gid
        first = first or gid
    if error:
        return Reading(error=error)
    return first or read_gid(source, path, 0)


def _congestion(source: Source, device: str, net: str) -> list[str]:
    """Return what the driver shows of ECN and of the traffic class; told, never judged.

    The files are those of NVIDIA's OFED. PFC is not to be had without asking netlink.
    """
    notes = []
    for part, name in (("roce_np", "ECN marked"), ("roce_rp", "ECN obeyed")):
        path = f"{NET}/{net}/ecn/{part}/enable"
        on = [x for x in source.names(path).names[:8] if source.read(f"{path}/{x}").text == "1"]
        if on:
            notes.append(f"{name} on priority {','.join(on)}")
    traffic = source.read(f"{hca.CLASS}/{device}/tc/1/traffic_class").text
    if traffic:
        notes.append(traffic.strip()[:40])
    return notes
