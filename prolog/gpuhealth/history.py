"""What a node remembers from one run to the next."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field


@dataclass(frozen=True)
class Stamp:
    """Every listed port's counters at one moment.

    ``at_s`` is the time since boot, ``ports`` maps ``mlx5_0:1`` to its counters' values.
    """

    at_s: float
    ports: Mapping[str, Mapping[str, int]] = field(default_factory=dict)


@dataclass(frozen=True)
class History:
    """What earlier runs of one boot left behind; after a reboot it is empty again.

    ``stamps`` are the counters of earlier runs, oldest first. ``seen`` maps what was unknown
    (``ib_port mlx5_0:1 hung``) to when it was seen first and last, in seconds since boot.
    ``resumed_s`` is when our last drain of this node was lifted, if in this boot.
    ``full_function`` are the HCAs whose VPD says that jobs may use them: it is slow to read, and
    stays as it is until the next boot (`gpuhealth.hca.is_limited`).
    """

    boot_id: str = ""
    stamps: tuple[Stamp, ...] = ()
    seen: Mapping[str, tuple[float, float]] = field(default_factory=dict)
    resumed_s: float = 0.0
    full_function: tuple[str, ...] = ()


PERSISTS_S = 60.0


def persists(history: History, key: str, now_s: float) -> bool:
    """Whether what is seen now (``ib_port mlx5_0:1 gone``) was seen 60 s ago, too, in this boot."""
    seen = history.seen.get(key)
    return seen is not None and now_s - seen[0] >= PERSISTS_S
