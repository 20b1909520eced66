"""What NVML says of a node's GPUs."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Nvml:
    """NVML's answers."""

    error: str = ""
