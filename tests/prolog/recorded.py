"""Recorded nodes to judge, whole and with one thing changed."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest

DATA = Path(__file__).resolve().parents[2].parent / "shared" / "data"
H100 = DATA / "sysfs" / "h100-8x-ndr.json"
CLASS = "/sys/class/infiniband"
# The recording's eight NDR HCAs; its ninth device is an Ethernet bond.
HCAS = (0, 1, 4, 5, 6, 7, 8, 9)
PORTS = tuple(f"mlx5_{number}:1" for number in HCAS)

Entries = dict[str, Any]

_LISTED = ", ".join(f'"{name}"' for name in PORTS)
# With the checks' actions to be filled in.
POLICY = """
skus:
  h100-ndr:
    match: {nodes: "gpu-[1-64]"}
    ports:
      names: [LISTED]
      rate_gbps: 400
      width: 4
      link_layer: InfiniBand
checks: {%s}
""".replace("LISTED", _LISTED)


def h100() -> Entries:
    """The recording of a healthy node with eight H100s: /sys/class/infiniband alone."""
    if not H100.exists():
        pytest.skip(f"there is no {H100.name} here")
    entries: Entries = json.loads(H100.read_text())
    return entries


def without(entries: Mapping[str, Any], prefix: str) -> Entries:
    """Return entries without what is at a path and below it."""
    return {
        path: entry
        for path, entry in entries.items()
        if path != prefix and not path.startswith(prefix.rstrip("/") + "/")
    }


def port(device: str, number: int = 1) -> str:
    """The directory of a port."""
    return f"{CLASS}/{device}/ports/{number}"


def write(entries: Mapping[str, Any], root: Path) -> None:
    """Write the files of a recording below a directory."""
    for path, text in entries.items():
        if path.startswith("/") and isinstance(text, str):
            file = root / path.lstrip("/")
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(text + "\n")
