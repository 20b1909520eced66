"""Slurm's text output as values: pure functions over what its commands print.

Text, not JSON: ``scontrol -o`` and ``-o FORMAT`` print the same from 22.05 to 26.05, while the
JSON changed shape and even values between those releases.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from typing import TYPE_CHECKING

from gpuslurm.client import Defaults, Job, NodeKind, Partition

if TYPE_CHECKING:
    from gpuslurm.queue import QueueEntry, Unavailable

# sinfo(1) --format: partition, nodes, CPUs, memory, S:C:T, gres, features, hostlist.
SINFO_FORMAT = "%P|%D|%c|%m|%z|%G|%f|%N"

# ASCII's own separators: no name of a node, partition or file has them, though a job's may.
_FIELD, _RECORD = "\x1f", "\x1e"
# squeue(1) --Format. ":0" lifts the limit of 20 characters. What may hold anything comes last.
_QUEUE_FIELDS = (
    *("JobID", "ArrayJobID", "ArrayTaskID", "JobArrayID", "UserName", "Partition", "State"),
    *("Reason", "NodeList", "NumNodes", "TimeUsed", "TimeLimit", "SubmitTime", "EligibleTime"),
    *("StartTime", "EndTime", "Dependency", "ReqSwitch", "wait4switch", "RestartCnt"),
    *("exit_code", "Command", "Name"),
)
QUEUE_FORMAT = ",".join(f"{name}:0{_FIELD}" for name in _QUEUE_FIELDS[:-1]) + f",Name:0{_RECORD}"
# sinfo(1) --format: partition, state, hostlist, reason.
UNAVAILABLE_FORMAT = _FIELD.join(("%R", "%T", "%N", "%E")) + _RECORD

_KEY = re.compile(r"(?:^|(?<=\s))([A-Z][A-Za-z0-9_/:]*)=")
_GPU_GRES = re.compile(r"^gpu(?::([^:()]+))?:(\d+)(?:\(.*)?$")


def fields(line: str) -> dict[str, str]:
    """Return the ``Key=value`` pairs of one ``scontrol -o`` line; values may hold blanks."""
    found = list(_KEY.finditer(line))
    ends = [*(match.start() for match in found[1:]), len(line)]
    pairs: dict[str, str] = {}
    for match, end in zip(found, ends, strict=False):
        pairs.setdefault(match[1], line[match.end() : end].strip())
    return pairs


def limit(text: str) -> int | None:
    """Return a numeric limit, or None for UNLIMITED, INFINITE, N/A and the like."""
    return int(text) if text.isdigit() else None


def seconds(text: str) -> int | None:
    """Return the seconds of a Slurm time limit, None for "no limit".

    The forms are those of sbatch(1) ``--time``: minutes, minutes:seconds,
    hours:minutes:seconds, days-hours, days-hours:minutes, days-hours:minutes:seconds.

    Raises:
        ValueError: ``text`` is none of them.
    """
    if text.upper() in {"UNLIMITED", "INFINITE", "-1"}:
        return None
    if not re.fullmatch(r"(\d+-\d+(:\d+){0,2}|\d+(:\d+){0,2})", text, re.ASCII):
        raise ValueError(f"not a time limit: {text!r}")
    days, dash, rest = text.rpartition("-")
    parts = [int(part) for part in rest.split(":")]
    if dash:
        hours, minutes, secs = [*parts, 0, 0][:3]
    elif len(parts) == 3:
        hours, minutes, secs = parts
    else:
        hours, (minutes, secs) = 0, [*parts, 0][:2]
    return ((int(days or 0) * 24 + hours) * 60 + minutes) * 60 + secs


def gpus_of_gres(gres: str) -> int:
    """Return the GPUs in a node's Gres (``gpu:h100:4(S:0-1),nvme:1`` is 4)."""
    return sum(int(match[2]) for match in _gpu_gres(gres))


def gpu_types_of_gres(gres: str) -> tuple[str, ...]:
    """Return Slurm's names for the types of a node's GPUs (``gpu:h100:4`` is h100)."""
    return tuple(dict.fromkeys(match[1] for match in _gpu_gres(gres) if match[1]))


def _gpu_gres(gres: str) -> list[re.Match[str]]:
    # A socket list in parentheses may itself hold commas.
    items = re.split(r",(?![^(]*\))", gres)
    return [match for item in items if (match := _GPU_GRES.match(item))]


def _job_defaults(text: str) -> dict[str, int]:
    pairs = (item.partition("=") for item in text.split(","))
    return {key.lower(): int(value) for key, _, value in pairs if value.isdigit()}


def partitions(text: str) -> tuple[Partition, ...]:
    """Return the partitions of ``scontrol -o show partition``."""
    return tuple(
        _partition(fields(line)) for line in text.splitlines() if line.startswith("PartitionName=")
    )


def _partition(pairs: dict[str, str]) -> Partition:
    defaults = _job_defaults(pairs.get("JobDefaults", ""))
    return Partition(
        name=pairs["PartitionName"],
        default=pairs.get("Default") == "YES",
        state=pairs.get("State", "UP"),
        nodes=int(pairs.get("TotalNodes", "0")),
        min_nodes=limit(pairs.get("MinNodes", "0")) or 0,
        max_nodes=limit(pairs.get("MaxNodes", "UNLIMITED")),
        max_time_s=seconds(pairs.get("MaxTime", "UNLIMITED")),
        max_cpus_per_node=limit(pairs.get("MaxCPUsPerNode", "UNLIMITED")),
        max_mem_per_node_mb=limit(pairs.get("MaxMemPerNode", "UNLIMITED")),
        def_cpu_per_gpu=defaults.get("defcpupergpu"),
        def_mem_per_gpu_mb=defaults.get("defmempergpu"),
    )


def config_defaults(text: str) -> Defaults:
    """Return JobDefaults from ``scontrol show config``."""
    match = re.search(r"^JobDefaults\s*= (.*)$", text, re.MULTILINE)
    defaults = _job_defaults(match[1]) if match else {}
    return Defaults(defaults.get("defcpupergpu"), defaults.get("defmempergpu"))


def node_kinds(text: str) -> tuple[NodeKind, ...]:
    """Return the kinds of nodes from ``sinfo --noheader -o SINFO_FORMAT``."""
    kinds = []
    for line in text.splitlines():
        columns = line.split("|")
        if len(columns) != 8 or columns[1] == "0":
            continue
        partition, count, cpus, memory, topology, gres, features, names = columns
        sockets, cores, threads = (int(part.rstrip("+") or 1) for part in topology.split(":"))
        # A node may be configured with its cores as CPUs; then threads are not given out.
        whole = int(cpus.rstrip("+")) == sockets * cores * threads
        kinds.append(
            NodeKind(
                partition=partition.rstrip("*"),
                names=names,
                count=int(count),
                cpus=int(cpus.rstrip("+")),
                threads_per_core=threads if whole else 1,
                memory_mb=int(memory.rstrip("+")),
                gpus=gpus_of_gres(gres),
                features=frozenset(features.split(",")) - {"(null)"},
                gpu_types=gpu_types_of_gres(gres),
            )
        )
    return tuple(kinds)


def first_name(hostlist: str) -> str:
    """Return the first node of a hostlist expression (``gpu-[07-09,12]-a,x1`` is gpu-07-a)."""
    first = re.split(r",(?![^[]*\])", hostlist)[0]
    return re.sub(r"\[([^],-]+)[^]]*\]", r"\1", first)


def names(hostlist: str) -> list[str]:
    """Return the nodes of a hostlist expression, in its order (``a[08-10]`` is a08, a09, a10)."""
    found = []
    for part in re.split(r",(?![^[]*\])", hostlist):
        match = re.match(r"([^[]*)\[([^]]*)\](.*)", part)
        if not match:
            found += [part] if part else []
            continue
        for span in match[2].split(","):
            first, _, last = span.partition("-")
            for number in range(int(first), int(last or first) + 1):
                found += names(f"{match[1]}{number:0{len(first)}}{match[3]}")
    return found


def usable(node: str) -> tuple[str, int, int]:
    """Return (name, CPUs, memory in MB) that jobs can have, from ``scontrol -o show node``."""
    pairs = fields(node)
    cpus = int(pairs.get("CPUEfctv") or pairs["CPUTot"])
    memory = int(pairs["RealMemory"]) - int(pairs.get("MemSpecLimit", "0"))
    return pairs["NodeName"], cpus, memory


def jobs(text: str) -> tuple[Job, ...]:
    """Return the jobs of ``scontrol -o show job``."""
    return tuple(_job(line) for line in text.split("\n") if line.startswith("JobId="))


def _job(line: str) -> Job:
    # The name is the user's, and so is the path: what looks like a field in them is none.
    before, _, rest = line.partition(" JobName=")
    pairs = fields(before) | fields(rest.partition(" UserId=")[2])
    command = re.search(r" Command=(.*?) WorkDir=/", rest)
    code, _, signal = pairs.get("ExitCode", "0:0").partition(":")
    return Job(
        id=int(pairs["JobId"]),
        state=pairs.get("JobState", "UNKNOWN"),
        reason=pairs.get("Reason", "None"),
        nodes=pairs.get("NodeList", "").replace("(null)", ""),
        exit_code=int(code),
        signal=int(signal or 0),
        restarts=int(pairs.get("Restarts", "0")),
        command=command[1] if command else "",
        stdout=pairs.get("StdOut", ""),
    )


def _records(text: str, width: int) -> Iterator[list[str]]:
    """Return the fields of each record; the last field may hold whatever it likes."""
    for record in text.split(f"{_RECORD}\n"):
        columns = record.split(_FIELD, width - 1)
        if len(columns) == width:
            yield columns


def queue(text: str) -> tuple[QueueEntry, ...]:
    """Return the jobs of ``squeue --noheader -O QUEUE_FORMAT``."""
    return tuple(
        _entry(dict(zip(_QUEUE_FIELDS, columns, strict=True)))
        for columns in _records(text, len(_QUEUE_FIELDS))
    )


_NOTHING = frozenset({"N/A", "(null)", "NONE", "Unknown", "None"})


def _stated(text: str) -> str:
    return "" if text in _NOTHING else text


def _entry(pairs: dict[str, str]) -> QueueEntry:
    from gpuslurm.queue import QueueEntry

    code, signal = _ending(pairs["exit_code"])
    return QueueEntry(
        id=int(pairs["JobID"]),
        array_id=int(pairs["ArrayJobID"]),
        tasks=_stated(pairs["ArrayTaskID"]),
        shown=pairs["JobArrayID"],
        user=pairs["UserName"],
        name=pairs["Name"],
        partition=pairs["Partition"],
        state=pairs["State"],
        reason=_stated(pairs["Reason"]),
        nodes=_stated(pairs["NodeList"]),
        node_count=int(pairs["NumNodes"]),
        elapsed_s=_duration(pairs["TimeUsed"]) or 0,
        limit_s=_duration(pairs["TimeLimit"]),
        submitted=_stated(pairs["SubmitTime"]),
        eligible=_stated(pairs["EligibleTime"]),
        start=_stated(pairs["StartTime"]),
        end=_stated(pairs["EndTime"]),
        dependency=_stated(pairs["Dependency"]),
        switches=limit(pairs["ReqSwitch"]) or 0,
        switches_wait_s=_duration(pairs["wait4switch"]) or 0,
        restarts=limit(pairs["RestartCnt"]) or 0,
        exit_code=code,
        signal=signal,
        command=_stated(pairs["Command"]),
    )


def _duration(text: str) -> int | None:
    """Return the seconds of a time that squeue prints; None where it is none (INVALID, …)."""
    try:
        return seconds(text)
    except ValueError:
        return None


def _ending(text: str) -> tuple[int, int]:
    """Return (exit code, signal): 22.05 prints the status of wait(2), later ones ``3:0``."""
    code, colon, signal = text.partition(":")
    if not colon:
        status = limit(code) or 0
        return status >> 8 & 0xFF, status & 0x7F
    return limit(code) or 0, limit(signal) or 0


def unavailable(text: str) -> tuple[Unavailable, ...]:
    """Return the nodes of ``sinfo --noheader --format UNAVAILABLE_FORMAT`` that take no job."""
    from gpuslurm.queue import Unavailable

    return tuple(
        Unavailable(partition, _node_state(state), nodes, reason)
        for partition, state, nodes, reason in _records(text, 4)
        if state.startswith(("drain", "down", "fail", "maint", "reserved", "unk")) or "*" in state
    )


def _node_state(state: str) -> str:
    """Return a node's state without the marks behind it (sinfo(1), NODE STATE CODES)."""
    word = state.rstrip("*~#!%$@^-+")
    # An idle node with the asterisk was not heard from.
    return "not responding" if "*" in state and word in ("idle", "allocated", "mixed") else word


def tasks(text: str) -> Iterator[range]:
    """Return the tasks of an array's list (``1,3-9:2%4`` is 1 and 3, 5, 7, 9)."""
    for part in text.partition("%")[0].split(","):
        match = re.fullmatch(r"(\d+)(?:-(\d+)(?::(\d+))?)?", part.strip("[]"), re.ASCII)
        if match:
            first = int(match[1])
            yield range(first, int(match[2] or first) + 1, int(match[3] or 1) or 1)
