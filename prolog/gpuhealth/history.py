"""What a node remembers from one run to the next."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Optional


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


# No limit looks further back, and no more stamps are kept than that needs.
WINDOW_S = 24 * 3600.0
MAX_STAMPS = 64
MAX_SEEN = 256
MAX_DEVICES = 256
# Counters whose every step has to keep its time, since limits count steps in a window.
STEPS = ("link_downed", "carrier_down_count")
# Counters that are kept in the newest stamp alone: no limit is about them.
TRAFFIC = (
    "port_xmit_data",
    "port_rcv_data",
    "port_xmit_wait",
    "np_cnp_sent",
    "rp_cnp_handled",
)


def of_boot(history: History, boot_id: str, now_s: float) -> History:
    """Return what of a history holds in the boot ``boot_id``; "" is a boot that nobody knows.

    Times of the future are of no boot: such a history is somebody else's.
    """
    if not boot_id or history.boot_id != boot_id or latest_s(history) > now_s:
        return History(boot_id=boot_id)
    return history


def latest_s(history: History) -> float:
    """Return when anything was last added to a history."""
    times = [stamp.at_s for stamp in history.stamps]
    times += [last for _, last in history.seen.values()]
    return max([history.resumed_s, *times])


def advance(
    history: History,
    *,
    boot_id: str,
    now_s: float,
    ports: Optional[Mapping[str, Mapping[str, int]]] = None,
    seen: Iterable[str] = (),
    answered: Iterable[str] = (),
    full_function: Iterable[str] = (),
) -> History:
    """Return the history after a run.

    ``ports`` are the counters that it read, ``seen`` the keys of what was unknown in it,
    ``answered`` those of what it found to be known again. What it did not look at stays as it is.
    """
    known = of_boot(history, boot_id, now_s)
    stamps = known.stamps
    if ports:
        stamps = thinned((*map(_without_traffic, stamps), Stamp(now_s, ports)), now_s)
    again = frozenset(answered)
    kept = {key: times for key, times in known.seen.items() if key not in again}
    for key in seen:
        first_s, _ = kept.get(key, (now_s, now_s))
        kept[key] = (first_s, now_s)
    newest = sorted(kept, key=lambda key: kept[key][1])[-MAX_SEEN:]
    devices = tuple(dict.fromkeys((*known.full_function, *full_function)))
    return replace(
        known,
        stamps=stamps,
        seen={key: kept[key] for key in newest},
        full_function=devices[:MAX_DEVICES],
    )


def resumed(history: History, boot_id: str, now_s: float) -> History:
    """Return the history after our drain was lifted: what was wrong before is settled."""
    return replace(of_boot(history, boot_id, now_s), resumed_s=now_s)


def _without_traffic(stamp: Stamp) -> Stamp:
    if not any(name in values for values in stamp.ports.values() for name in TRAFFIC):
        return stamp
    return Stamp(
        stamp.at_s,
        {
            port: {name: value for name, value in values.items() if name not in TRAFFIC}
            for port, values in stamp.ports.items()
        },
    )


def thinned(stamps: Sequence[Stamp], now_s: float) -> tuple[Stamp, ...]:
    """Return at most `MAX_STAMPS` of the stamps of the last `WINDOW_S`, the fewer the older.

    What a limit adds up over them stays the same: a step of a link, or a counter that was set
    back, keeps the stamps around it.
    """
    within = [stamp for stamp in stamps if now_s - stamp.at_s <= WINDOW_S]
    kept = _spaced(within, now_s, exact=True)
    if len(kept) > MAX_STAMPS:
        kept = _spaced(within, now_s, exact=False)
    return tuple(kept[-MAX_STAMPS:])


def _spaced(stamps: Sequence[Stamp], now_s: float, exact: bool) -> list[Stamp]:
    # From the oldest on: from the newest on, runs that are closer than the least distance would
    # push each other out for ever.
    kept: list[Stamp] = []
    for index, stamp in enumerate(stamps):
        if kept and index + 1 < len(stamps):
            near = stamp.at_s - kept[-1].at_s < max(20.0, (now_s - stamp.at_s) / 6)
            if near and not (exact and _matters(kept[-1], stamp, stamps[index + 1])):
                continue
        kept.append(stamp)
    return kept


def _matters(before: Stamp, stamp: Stamp, after: Stamp) -> bool:
    for port, values in stamp.ports.items():
        earlier, later = before.ports.get(port), after.ports.get(port)
        if earlier is None or later is None:
            return True
        for name, value in values.items():
            if later.get(name, value) < value or value < earlier.get(name, value):
                return True
            if name in STEPS and earlier.get(name, value) != value:
                return True
    return False
