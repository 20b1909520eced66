"""PCIe links of HCAs: as wide and as fast as they should be?

linux:Documentation/ABI/testing/sysfs-bus-pci describes the files.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Optional

from gpuhealth import hca, pci
from gpuhealth.check import Node, check
from gpuhealth.finding import Finding, healthy, unhealthy, unknown
from gpuhealth.reading import NOT_RECORDED, Reading
from gpuhealth.source import Source

ID = "hca_pcie"
_REMEDY = (
    "reseat the HCA or its riser, look for PCIe errors in dmesg, and compare with lspci -vv of a "
    "healthy node"
)


@dataclass(frozen=True)
class _Link:
    """Lanes and GT/s, as a text of sysfs and as a number; None where there is none."""

    width: Optional[float]
    speed_gts: Optional[float]
    why: str = ""
    unreadable: bool = False


@check(
    ID,
    "PCIe width and speed of the HCAs that the policy lists",
    gpu=False,
)
def hca_pcie(node: Node) -> Iterator[Finding]:
    """Judge each listed HCA's link against the policy, or against what both of its ends can do."""
    seen = set()
    for port in hca.listed_ports(node):
        if port.device is None or port.device in seen:
            continue
        seen.add(port.device)
        finding = _judge(node, port.device)
        if finding is not None:
            yield finding


def _judge(node: Node, device: str) -> Optional[Finding]:
    path = f"{hca.CLASS}/{device}/device"
    want = node.policy.pcie.get("hca", {})
    now = _link(node.source, path, "current")
    width, speed = want.get("width"), want.get("speed_gts")
    if width is None or speed is None:
        most = _most(node.source, device, path)
        width = most.width if width is None else width
        speed = most.speed_gts if speed is None else speed
    observed, expected = _text(now.width, now.speed_gts), _text(width, speed)
    for have, limit in ((now.width, width), (now.speed_gts, speed)):
        if have is not None and limit is not None and have < limit:
            return unhealthy(ID, device, observed, expected, _REMEDY)
    asked = [now.width] if "width" in want else []
    asked += [now.speed_gts] if "speed_gts" in want else []
    if None in asked:
        return unknown(ID, device, now.why, expected)
    if now.width is None or now.speed_gts is None:
        # A virtual machine's device may have no link ("Unknown"), and nobody has asked.
        return unknown(ID, device, now.why, expected) if now.unreadable else None
    return healthy(ID, device, observed, expected)


def _most(source: Source, device: str, path: str) -> _Link:
    """Return what the HCA and the port above it can both do."""
    own = _link(source, path, "max")
    chain = pci.locate(source, device, path).chain
    if len(chain) < 3:
        return own
    above = _link(source, f"{pci.DEVICES}/{chain[-2]}", "max")
    return _Link(_least(own.width, above.width), _least(own.speed_gts, above.speed_gts))


def _least(one: Optional[float], other: Optional[float]) -> Optional[float]:
    known = [value for value in (one, other) if value is not None]
    return min(known) if known else None


def _link(source: Source, path: str, which: str) -> _Link:
    width = source.read(f"{path}/{which}_link_width")
    speed = source.read(f"{path}/{which}_link_speed")
    # 0 and 63 lanes stand for "no link" and "not read" (all ones).
    number = re.fullmatch(r"[0-9]{1,2}", width.text or "")
    lanes = int(number[0]) if number else 0
    gts = re.match(r"([0-9]{1,3}(?:\.[0-9])?) GT/s", speed.text or "")
    parts = [f"{which}_link_{n} {_why(r)}" for n, r in (("width", width), ("speed", speed))]
    good = (1 <= lanes <= 32, gts is not None)
    return _Link(
        lanes if good[0] else None,
        float(gts[1]) if gts else None,
        next((part for part, fine in zip(parts, good) if not fine), ""),
        any(r.unreadable and r.error != NOT_RECORDED for r in (width, speed)),
    )


def _why(found: Reading) -> str:
    return found.why if found.text is None else repr(found.text[:24])


def _text(width: Optional[float], speed_gts: Optional[float]) -> str:
    """Return ``x16 32 GT/s``."""
    parts = [f"x{width:g}"] if width is not None else []
    parts += [f"{speed_gts:g} GT/s"] if speed_gts is not None else []
    return " ".join(parts)
