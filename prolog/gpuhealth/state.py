"""What a node keeps on its own disk from one run to the next.

Whatever is wrong with that, a full disk, a file of somebody else's, nonsense in it, a run goes on
without a memory: a look then says less, and never something false. Every function returns why
something was not kept, or "".
"""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any, Optional

from gpuhealth.folder import Folder, why
from gpuhealth.history import History, Stamp, of_boot
from gpuhealth.isolation import Abandoned

DIRECTORY = "/var/lib/gpuhealth"
SCHEMA = 1

_STATE = "state.json"
_LOCK = "state.lock"
_LOG = "history.jsonl"
_JOBS = "jobs"
# Twice of it at most: one file of that kind is kept.
LOG_BYTES = 128 << 10
LOCK_WAIT_S = 1.0
MAX_JOBS = 256
# Longer than any job runs: its epilog never came.
JOB_EXPIRES_S = 14 * 24 * 3600.0
_JOB_FILE = re.compile(r"([0-9]{1,10})\.json\Z")
_BOOT_ID = "/proc/sys/kernel/random/boot_id"
_MAX_TIME_S = 1e10
_MAX_COUNT = 1 << 64


def boot_id() -> str:
    """Return the id of this boot; "" if it can't be read, and then nothing is remembered."""
    try:
        with open(_BOOT_ID, encoding="ascii") as file:
            return file.read(64).strip()
    except (OSError, UnicodeDecodeError):
        return ""


@dataclass(frozen=True)
class Memory:
    """What one run leaves to the next one.

    ``verdict`` is that of the last examination, "" before the first. ``stuck`` maps places that
    hung to the processes that were left behind there.
    """

    history: History = field(default_factory=History)
    verdict: str = ""
    stuck: Mapping[str, Abandoned] = field(default_factory=dict)

    def avoid(self) -> tuple[str, ...]:
        """Return the places where a process of an earlier run is stuck still."""
        return tuple(place for place, process in self.stuck.items() if process.lives)


@dataclass(frozen=True)
class JobStart:
    """The ports' counters at a job's start.

    ``at_s`` is the time since boot, ``time`` the date in UTC. ``shared``: another job was on
    the node for a part of the time, so that what was counted is no single job's.
    """

    job: int
    boot_id: str
    at_s: float
    time: str
    ports: Mapping[str, Mapping[str, int]] = field(default_factory=dict)
    shared: bool = False


class State:
    """The directory that it is all kept in; it and all in it has to be ``owner``'s."""

    def __init__(
        self,
        directory: str = DIRECTORY,
        owner: Optional[int] = None,
        boot: Optional[str] = None,
    ) -> None:
        """Open nothing yet; ``owner`` is by default who this process runs as, ``boot`` this one."""
        self._directory = directory
        self._boot = boot_id() if boot is None else boot
        self._owner = os.geteuid() if owner is None else owner

    def _folder(self, create: bool = True) -> Folder:
        return Folder(self._directory, self._owner, create=create)

    def _jobs(self, folder: Folder) -> Folder:
        return Folder(_JOBS, self._owner, above=folder)

    def load(self) -> tuple[Memory, str]:
        """Return what is remembered, and why nothing is; no history but that of this boot."""
        found, wrong = Memory(), ""
        try:
            with self._folder(create=False) as folder:
                found, wrong = self._load(folder)
        except FileNotFoundError:
            pass  # nothing was kept so far
        except OSError as error:
            wrong = why(error)
        now_s = time.clock_gettime(time.CLOCK_BOOTTIME)
        return replace(found, history=of_boot(found.history, self._boot, now_s)), wrong

    def _load(self, folder: Folder) -> tuple[Memory, str]:
        try:
            return memory_from(_json(folder.read(_STATE))), ""
        except FileNotFoundError:
            return Memory(), ""
        except OSError as error:
            return Memory(), why(error)
        except ValueError as error:
            return Memory(), f"{_STATE}: {error}"

    def update(
        self, change: Callable[[Memory], Memory], wait_s: float = LOCK_WAIT_S
    ) -> tuple[Memory, str]:
        """Change what is remembered, one process at a time; return it, and why it isn't kept.

        ``change`` is pure, and gets what is remembered by then. If others don't let go in time it
        is changed all the same: two runs at once then keep one's stamp only, which is no harm.
        """
        before = Memory()
        try:
            with self._folder() as folder:
                handle = _lock(folder, wait_s)
                try:
                    before, wrong = self._load(folder)
                    after = change(before)
                    folder.replace(_STATE, _dumped(memory_as_dict(after)))
                finally:
                    os.close(handle)
        except OSError as error:
            return change(before), why(error)
        return after, wrong

    def log(self, entry: Mapping[str, Any]) -> str:
        """Add one line to the bounded log of what changed."""
        try:
            with self._folder() as folder:
                handle = _lock(folder, LOCK_WAIT_S)
                try:
                    folder.append(_LOG, _dumped(entry), LOG_BYTES)
                finally:
                    os.close(handle)
        except OSError as error:
            return why(error)
        return ""

    def begin_job(self, start: JobStart) -> str:
        """Note a job's start, and that it shares the node with those that are there already."""
        name = f"{start.job}.json"
        try:
            with self._folder() as folder, self._jobs(folder) as jobs:
                jobs.remove(f"{start.job}.shared")
                # First this one: of two that start at once at least one sees the other.
                jobs.replace(name, _dumped(_job_as_dict(start)))
                others = self._living(jobs, start.boot_id, start.at_s, start.job)
                for other in others:
                    jobs.touch(f"{other}.shared")
                if others:
                    jobs.touch(f"{start.job}.shared")
        except OSError as error:
            return why(error)
        return ""

    def end_job(self, job: int, boot: str, now_s: float) -> tuple[Optional[JobStart], str]:
        """Return how a job began, and forget it; None if that is not known."""
        try:
            with self._folder() as folder, self._jobs(folder) as jobs:
                start = _job(jobs, job)
                shared = f"{job}.shared" in jobs.names()
                shared = shared or bool(self._living(jobs, boot, now_s, job))
                jobs.remove(f"{job}.json")
                jobs.remove(f"{job}.shared")
        except OSError as error:
            return None, why(error)
        if start is None or start.boot_id != boot or not boot or start.at_s > now_s:
            return None, f"nothing is known of the start of job {job}"
        return JobStart(job, boot, start.at_s, start.time, start.ports, shared), ""

    def _living(self, jobs: Folder, boot: str, now_s: float, own: int) -> list[int]:
        """Return the other jobs that have begun and not ended; clear away what is of none."""
        found: list[tuple[float, int]] = []
        names = jobs.names()
        for name in names:
            match = _JOB_FILE.match(name)
            if match is None or int(match[1]) == own:
                continue
            job = int(match[1])
            start = _job(jobs, job)
            dead = start is None or start.boot_id != boot
            if start is None or dead or not 0 <= now_s - start.at_s <= JOB_EXPIRES_S:
                jobs.remove(name)
                jobs.remove(f"{job}.shared")
            else:
                found.append((start.at_s, job))
        found.sort()
        for _, job in found[:-MAX_JOBS]:
            jobs.remove(f"{job}.json")
            jobs.remove(f"{job}.shared")
        known = {f"{job}.json" for _, job in found} | {f"{own}.json"}
        for name in names:
            # A mark for a job that had just ended.
            if name.endswith(".shared") and name.replace(".shared", ".json") not in known:
                jobs.remove(name)
        return [job for _, job in found[-MAX_JOBS:]]


def _lock(folder: Folder, wait_s: float) -> int:
    """Return a descriptor that holds the lock, unless others hold it for so long."""
    import fcntl

    handle = folder.lock_file(_LOCK)
    until_s = time.monotonic() + wait_s
    while True:
        try:
            fcntl.flock(handle, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            if time.monotonic() >= until_s:
                return handle
            time.sleep(0.01)
        else:
            return handle


# -- as JSON


def _dumped(value: Mapping[str, Any]) -> bytes:
    return json.dumps(value, separators=(",", ":")).encode() + b"\n"


def _json(data: bytes) -> Any:
    try:
        return json.loads(data)
    except RecursionError:
        raise ValueError("nested too deep") from None


def memory_as_dict(memory: Memory) -> dict[str, Any]:
    """Return what is written; counters go by columns, for a history holds many of them."""
    history = memory.history
    names = sorted({n for s in history.stamps for values in s.ports.values() for n in values})
    return {
        "schema": SCHEMA,
        "verdict": memory.verdict,
        "stuck": {place: [one.pid, one.start] for place, one in memory.stuck.items()},
        "boot_id": history.boot_id,
        "resumed_s": history.resumed_s,
        "full_function": list(history.full_function),
        "seen": {key: list(times) for key, times in history.seen.items()},
        "counters": names,
        "stamps": [
            [
                stamp.at_s,
                {port: [values.get(n) for n in names] for port, values in stamp.ports.items()},
            ]
            for stamp in history.stamps
        ],
    }


def memory_from(value: Any) -> Memory:
    """Return what was written; ValueError if it is anything else."""
    try:
        if value["schema"] != SCHEMA:
            raise ValueError("of another version")
        names = [_text(name) for name in value["counters"]]
        history = History(
            boot_id=_text(value["boot_id"]),
            stamps=tuple(_stamp(row, names) for row in _list(value["stamps"])),
            seen={_text(k): (_time(v[0]), _time(v[1])) for k, v in value["seen"].items()},
            resumed_s=_time(value["resumed_s"]),
            full_function=tuple(_text(name) for name in _list(value["full_function"])),
        )
        stuck = {
            _text(place): Abandoned(_count(one[0]), _text(one[1]))
            for place, one in value["stuck"].items()
        }
        return Memory(history, _text(value["verdict"]), stuck)
    except (KeyError, IndexError, TypeError, AttributeError) as error:
        raise ValueError(f"not what was written there ({type(error).__name__})") from None


def _stamp(row: Any, names: list[str]) -> Stamp:
    at_s, ports = row
    found = {}
    for port, counts in ports.items():
        if len(counts) != len(names):
            raise ValueError("counters are missing")
        found[port] = {n: _count(c) for n, c in zip(names, counts) if c is not None}
    return Stamp(_time(at_s), found)


def _text(value: Any) -> str:
    if not isinstance(value, str):
        raise ValueError(f"{value!r:.40} is no text")  # noqa: TRY004
    return value


def _list(value: Any) -> list[Any]:
    if not isinstance(value, list):
        raise ValueError(f"{value!r:.40} is no list")  # noqa: TRY004
    return value


def _time(value: Any) -> float:
    # NaN is between no numbers.
    if (
        isinstance(value, bool)
        or not isinstance(value, (int, float))
        or not 0 <= value < _MAX_TIME_S
    ):
        raise ValueError(f"{value!r:.40} is no time")
    return float(value)


def _count(value: Any) -> int:
    if isinstance(value, bool) or not isinstance(value, int) or not 0 <= value < _MAX_COUNT:
        raise ValueError(f"{value!r:.40} is no count")
    return value


def _job_as_dict(start: JobStart) -> dict[str, Any]:
    return {
        "schema": SCHEMA,
        "boot_id": start.boot_id,
        "at_s": start.at_s,
        "time": start.time,
        "ports": start.ports,
    }


def _job(jobs: Folder, job: int) -> Optional[JobStart]:
    """Return a job's start; None if there is none that can be believed."""
    try:
        value = _json(jobs.read(f"{job}.json"))
        if value["schema"] != SCHEMA:
            return None
        ports = {
            _text(port): {_text(name): _count(count) for name, count in counts.items()}
            for port, counts in value["ports"].items()
        }
        return JobStart(
            job, _text(value["boot_id"]), _time(value["at_s"]), _text(value["time"]), ports
        )
    except (OSError, ValueError, KeyError, TypeError, AttributeError):
        return None
