"""InfiniBand and RoCE ports as sysfs shows them.

Formats: torvalds/linux:drivers/infiniband/core/sysfs.c and
Documentation/ABI/stable/sysfs-class-infiniband. Every file is optional on its own.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import TYPE_CHECKING, Optional

from gpuhealth.reading import Listing, Reading

if TYPE_CHECKING:
    from gpuhealth.check import Node
    from gpuhealth.source import Source

CLASS = "/sys/class/infiniband"

# The HCAs that sit on the NVSwitches' side of a baseboard: reading their ports' counters fills
# the kernel's log with errors of the firmware's.
_LIMITED = "SW_MNG"

_PCI = re.compile(r"[0-9a-f]{4,}:[0-9a-f]{2}:[0-9a-f]{2}\.[0-7]\Z", re.IGNORECASE)
_RATE = re.compile(r"(\d+(?:\.\d+)?) Gb/sec(?: \((\d+)X(?: (\w+))?\))?\Z")
_NUMBERED = re.compile(r"(\d+): (.+)\Z")


@dataclass(frozen=True)
class ListedPort:
    """A port that the policy names, and the device that it is on this node.

    ``device`` is None if the node has no such device, or (with ``error``) if that could not be
    found out.
    """

    name: str
    number: int
    device: Optional[str]
    error: int = 0

    @property
    def path(self) -> str:
        """The port's directory."""
        return port_path(self.device or "", self.number)


@dataclass(frozen=True)
class Port:
    """One port's state.

    ``state`` and ``phys_state`` are words as the kernel writes them (ACTIVE, LinkUp).
    ``width`` is the number of lanes, ``rate_gbps`` the rate over all of them.
    """

    state: Reading
    phys_state: Reading
    rate: Reading
    link_layer: Reading
    rate_gbps: Optional[float] = None
    width: Optional[int] = None


def port_path(device: str, number: int) -> str:
    """Return a port's directory."""
    return f"{CLASS}/{device}/ports/{number}"


def split_name(name: str) -> tuple[str, int]:
    """Return device (or PCI address) and number of ``mlx5_0:1``, ``mlx5_0``, ``0000:18:00.0:1``.

    ValueError if it is none of these.
    """
    if _PCI.match(name):
        return name.lower(), 1
    device, colon, number = name.rpartition(":")
    if not colon:
        device, number = name, "1"
    if not number.isascii() or not number.isdecimal() or not 1 <= int(number) <= 255:
        raise ValueError(f"{name!r} is no port like mlx5_0:1 or 0000:18:00.0:1")
    if _PCI.match(device):
        return device.lower(), int(number)
    if not re.fullmatch(r"[A-Za-z0-9_.-]+", device) or device in (".", ".."):
        raise ValueError(f"{name!r} is no port like mlx5_0:1 or 0000:18:00.0:1")
    return device, int(number)


def pci_address(source: Source, device: str) -> Reading:
    """Return the PCI address of a device: ``0000:18:00.0``."""
    found = source.target(f"{CLASS}/{device}/device")
    if found.text is None:
        return found
    return Reading(found.text.rpartition("/")[2])


def listed_ports(node: Node) -> tuple[ListedPort, ...]:
    """Return the ports that the policy lists, in its order."""
    listed = node.policy.ports
    if listed is None:
        return ()
    addresses: Optional[dict[str, str]] = None
    error = 0
    found = []
    for name in listed.names:
        device, number = split_name(name)
        if not _PCI.match(device):
            found.append(ListedPort(name, number, device))
            continue
        if addresses is None:
            addresses, error = _addresses(node.source)
        known = addresses.get(device)
        found.append(ListedPort(name, number, known, 0 if known else error))
    return tuple(found)


def _addresses(source: Source) -> tuple[dict[str, str], int]:
    """Return PCI address → device, and the errno of what could not be read on the way."""
    devices = source.names(CLASS)
    addresses, error = {}, devices.error if devices.unreadable else 0
    for device in devices.names:
        address = pci_address(source, device)
        if address.text is not None:
            addresses[address.text.lower()] = device
        elif address.unreadable:
            error = address.error
    return addresses, error


def is_limited(node: Node, device: str) -> bool:
    """Whether a device is a switch's own: nothing below its ``ports/`` may be touched."""
    if device in node.history.full_function:
        return False
    vpd = node.source.read(f"{CLASS}/{device}/device/vpd", binary=True)
    return vpd.text is not None and _LIMITED in vpd.text


def port_numbers(source: Source, device: str) -> Listing:
    """Return the names in a device's ``ports/``."""
    return source.names(f"{CLASS}/{device}/ports")


def read_port(source: Source, device: str, number: int) -> Port:
    """Read one port."""
    path = port_path(device, number)
    rate = source.read(f"{path}/rate")
    rate_gbps, width = parse_rate(rate.text or "")
    return Port(
        state=_word(source.read(f"{path}/state")),
        phys_state=_word(source.read(f"{path}/phys_state")),
        rate=rate,
        link_layer=source.read(f"{path}/link_layer"),
        rate_gbps=rate_gbps,
        width=width,
    )


def _word(found: Reading) -> Reading:
    """Return ``ACTIVE`` for ``4: ACTIVE``; what is not of this form stays as it is."""
    numbered = _NUMBERED.match(found.text or "")
    return Reading(numbered[2]) if numbered else found


def parse_rate(text: str) -> tuple[Optional[float], Optional[int]]:
    """Return rate (Gb/s) and lanes of ``400 Gb/sec (4X NDR)``; None for what isn't said."""
    found = _RATE.match(text)
    if not found:
        return None, None
    return float(found[1]), int(found[2]) if found[2] else None
