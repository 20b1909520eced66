"""PCI devices as sysfs shows them: the way from a device to the CPU, and what redirects on it.

The names of distances are those of ``nvidia-smi topo -m``. Config space: linux:include/uapi/
linux/pci_regs.h (PCI_EXT_CAP_ID_ACS and what follows), read through the file ``config`` of
linux:Documentation/ABI/testing/sysfs-bus-pci.
"""

from __future__ import annotations

import errno
import re
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from gpuhealth import hca
from gpuhealth.reading import Reading

if TYPE_CHECKING:
    from gpuhealth.source import Source

DEVICES = "/sys/bus/pci/devices"
GPUS = "/proc/driver/nvidia/gpus"

# From near to far. SYS also stands for "between sockets, whatever is on the way".
DISTANCES = ("PIX", "PXB", "PHB", "NODE", "SYS")
PIX, PXB, PHB, NODE, SYS = DISTANCES
_LEGEND = {
    PIX: "at most one PCIe bridge or switch",
    PXB: "several PCIe switches, and no host bridge",
    PHB: "a PCIe host bridge, so the CPU",
    NODE: "several host bridges of one NUMA node",
    SYS: "the link between NUMA nodes",
}

CONFIG_BYTES = 4096
_CONVENTIONAL_BYTES = 256
_ACS = 0x000D
# The bits of ACS control: source validation alone leaves the way short.
ACS_BITS = (
    (0x01, "SrcValid"),
    (0x02, "TransBlk"),
    (0x04, "ReqRedir"),
    (0x08, "CmpltRedir"),
    (0x10, "UpstreamFwd"),
    (0x20, "EgressCtrl"),
    (0x40, "DirectTrans"),
)
# What sends a peer's requests or completions up to the root complex.
ACS_REDIRECTS = 0x1C

_NVIDIA = "0x10de"
_DISPLAY = ("0x0300", "0x0302")
_ADDRESS = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z")
_HOST_BRIDGE = re.compile(r"pci[0-9a-f]{4,}:[0-9a-f]{2}\Z")


@dataclass(frozen=True)
class Device:
    """A GPU or an HCA, and where it is.

    ``name`` is what people call it. ``chain`` leads from the host bridge (``pci0000:15``) over
    the bridges to the device itself; it is empty, with an errno in ``error``, if that could not
    be read. ``numa`` is the NUMA node, -1 where the machine names none, None if unreadable.
    """

    name: str
    chain: tuple[str, ...] = ()
    numa: Optional[int] = None
    error: int = 0

    @property
    def address(self) -> str:
        """The PCI address; "" if it isn't known."""
        return self.chain[-1] if self.chain else ""


def chain_of(path: str) -> tuple[str, ...]:
    """Return host bridge, bridges and device of a real path below /sys/devices; () if none.

    What is no PCI address at the path's end (a subfunction, a class) is left out.
    """
    found: list[str] = []
    for part in path.split("/"):
        if (_HOST_BRIDGE.match(part) and not found) or _ADDRESS.match(part):
            found.append(part)
    return tuple(found) if len(found) > 1 else ()


def locate(source: Source, name: str, path: str) -> Device:
    """Return the device that a path (a link) leads to."""
    real = source.target(path)
    if real.text is None:
        return Device(name, error=real.error)
    chain = chain_of(real.text)
    if not chain:
        return Device(name, error=errno.ENODEV)
    return Device(name, chain, _numa(source.read(f"{DEVICES}/{chain[-1]}/numa_node")))


def _numa(found: Reading) -> Optional[int]:
    if found.absent:
        return -1  # a kernel without NUMA
    text = found.text or ""
    return int(text) if re.fullmatch(r"-1|[0-9]{1,4}", text) else None


def gpus(source: Source) -> tuple[tuple[Device, ...], int]:
    """Return the GPUs by address, as nvidia-smi counts them, and an errno if they aren't known.

    They are those that the driver has; without it, the display controllers of NVIDIA's.
    """
    held = source.names(GPUS)
    addresses: list[str] = [name.lower() for name in held.names if _ADDRESS.match(name.lower())]
    error = 0
    if not addresses:
        devices = source.names(DEVICES)
        error = devices.error if devices.unreadable else 0
        for name in devices.names:
            vendor = source.read(f"{DEVICES}/{name}/vendor")
            if vendor.unreadable:
                error = vendor.error
            if vendor.text != _NVIDIA:
                continue
            kind = source.read(f"{DEVICES}/{name}/class")
            if kind.unreadable:
                error = kind.error
            if (kind.text or "").startswith(_DISPLAY):
                addresses.append(name)
    found = (locate(source, name, f"{DEVICES}/{name}") for name in sorted(addresses))
    return tuple(found), error


def hcas(source: Source, names: Iterable[str]) -> tuple[Device, ...]:
    """Return HCAs (``mlx5_0``) and where they are."""
    return tuple(locate(source, name, f"{hca.CLASS}/{name}/device") for name in names)


def _shared(one: Device, other: Device) -> int:
    """Return how many elements of two chains are the same, from the host bridge on."""
    count = 0
    for left, right in zip(one.chain, other.chain):
        if left != right:
            break
        count += 1
    return count


def distance(one: Device, other: Device) -> Optional[str]:
    """Return how far two devices are from each other: PIX to SYS; None if that isn't known."""
    if not one.chain or not other.chain:
        return None
    shared = _shared(one, other)
    if shared == 0:
        if one.numa is None or other.numa is None:
            return None
        return NODE if one.numa == other.numa else SYS
    if shared == 1:
        return PHB
    # A switch shows as a bridge for its upstream port, which both have, and one for each
    # downstream port: so one bridge of their own on either side is one switch.
    own = max(len(device.chain) - 1 - shared for device in (one, other))
    return PIX if own <= 1 else PXB


def bridges_between(one: Device, other: Device) -> tuple[str, ...]:
    """Return the bridges over which the shortest way between two devices of one host bridge goes.

    The common one is not among them: what comes from below and goes down again passes the ports
    below it.
    """
    shared = _shared(one, other)
    if shared == 0:
        return ()
    return (*one.chain[shared:-1], *other.chain[shared:-1])


def acs_control(config: str) -> Optional[int]:
    """Return the ACS control word in a config space (one character a byte), 0 if there is none.

    None if that can't be told: a header alone (others than root are given 64 bytes), a device
    that doesn't answer (all ones), or a list of capabilities that makes no sense.
    """
    if config[:2] == "\xff\xff":
        return None
    if len(config) == _CONVENTIONAL_BYTES:
        return 0  # a bridge without extended capabilities
    offset, seen = _CONVENTIONAL_BYTES, set()
    while True:
        if offset in seen or offset < _CONVENTIONAL_BYTES or offset + 8 > len(config):
            return None
        seen.add(offset)
        header = _number(config[offset : offset + 4])
        if header == 0xFFFFFFFF:
            return None
        if header & 0xFFFF == _ACS:
            return _number(config[offset + 6 : offset + 8])
        offset = header >> 20 & 0xFFC
        if offset == 0:
            return 0


def _number(characters: str) -> int:
    return sum(ord(character) << 8 * index for index, character in enumerate(characters))


def acs_text(control: int) -> str:
    """Return the bits that are set, as lspci writes them: ``SrcValid+ ReqRedir+``."""
    return " ".join(f"{name}+" for bit, name in ACS_BITS if control & bit) or "all off"


def nearest(one: Device, others: Iterable[Device]) -> Optional[tuple[str, tuple[Device, ...]]]:
    """Return the least distance to any of ``others``, and which are as near; None if unknown."""
    groups: dict[str, list[Device]] = {}
    for other in others:
        found = distance(one, other)
        if found is not None:
            groups.setdefault(found, []).append(other)
    for name in DISTANCES:
        if name in groups:
            return name, tuple(groups[name])
    return None


def matrix(source: Source) -> str:
    """Return the distances of all GPUs and HCAs as a table for people.

    It is the part of ``nvidia-smi topo -m`` that PCIe decides, from sysfs alone. A distance that
    can't be told is a question mark.
    """
    cards, _ = gpus(source)
    nics = hcas(source, source.names(hca.CLASS).names)
    if not cards and not nics:
        return "no GPU and no HCA\n"
    rows = [f"GPU{index}" for index in range(len(cards))]
    columns = [f"NIC{index}" for index in range(len(nics))]
    table = [["", *columns, "NUMA", "PCI address"]]
    for row, card in zip(rows, cards):
        cells = [distance(card, nic) or "?" for nic in nics]
        table.append([row, *cells, _numa_text(card), card.address or card.name])
    for row, nic in zip(columns, nics):
        cells = ["X" if nic is other else distance(nic, other) or "?" for other in nics]
        table.append([row, *cells, _numa_text(nic), nic.address or "?"])
    lines = _aligned(table)
    if nics:
        lines += ["", *(f"{column} is {nic.name}" for column, nic in zip(columns, nics))]
        lines += ["", *(f"{name:4}  {text}" for name, text in _LEGEND.items())]
    return "\n".join(lines) + "\n"


def _numa_text(device: Device) -> str:
    if device.numa is None:
        return "?"
    return "-" if device.numa < 0 else str(device.numa)


def _aligned(table: Sequence[Sequence[str]]) -> list[str]:
    widths = [max(map(len, column)) for column in zip(*table)]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths)).rstrip() for row in table
    ]
