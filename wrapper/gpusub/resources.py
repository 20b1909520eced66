"""The job's fair share of its nodes: GPUs, CPUs and memory, from what Slurm reports."""

from __future__ import annotations

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from gpuslurm.client import Inventory, NodeKind, Partition
from gpusub.errors import GpusubError
from gpusub.profile import Profile
from gpusub.request import BUILT_IN, Nodes, Request, Value, parse_time


@dataclass(frozen=True)
class Resources:
    """What the job asks of each node.

    ``gpu_type`` is Slurm's type name, where the user or the site states one. ``mem`` is in
    sbatch's notation, "0" for all of a node's; None leaves it to Slurm.
    """

    nodes: Value[Nodes]
    gpus_per_node: Value[int]
    gpu_type: str | None
    cpus_per_task: Value[int]
    mem: Value[str | None]
    exclusive: Value[bool]

    @property
    def workers(self) -> int:
        """Workers on each node: one a GPU, or one where no GPU is asked for."""
        return self.gpus_per_node.value or 1


@dataclass(frozen=True)
class Machine:
    """This machine, for --local: its GPUs and the CPUs that this process may use."""

    gpus: int
    cpus: int


def setting(request: Request, profile: Profile, key: str) -> Value[Any] | None:
    """Return the setting in force: the option or variable, else the profile's, else None."""
    value = request.settings.get(key) or profile.settings.get(key)
    return None if value is None or value.value is None else value


def local_resources(request: Request, profile: Profile, machine: Machine) -> Resources:
    """Return what a run on this machine uses: all its GPUs, unless a number is asked for.

    Raises:
        GpusubError: more than one node is asked for, or a value is no number.
    """
    if request.nodes.value.least > 1:
        raise GpusubError(
            f"{request.nodes.origin}: {request.nodes.value} nodes need Slurm, and this runs on "
            "this machine alone; leave it out"
        )
    asked = request.settings.get("gpus_per_node")
    gpus, gpu_type = _parse_gpus(asked) if asked else (Value(machine.gpus, "this machine"), None)
    cpus = _cpus_asked(request, profile, gpus.value) or Value(machine.cpus, "this machine")
    return Resources(
        nodes=Value(Nodes(1, 1), request.nodes.origin),
        gpus_per_node=gpus,
        gpu_type=gpu_type,
        cpus_per_task=cpus,
        mem=Value(None, "this machine"),
        exclusive=Value(False, BUILT_IN),
    )


def choose_partitions(
    request: Request, profile: Profile, inventory: Inventory
) -> tuple[Value[str], tuple[Partition, ...]]:
    """Return the partition option (one or more names) and the partitions that it names.

    Raises:
        GpusubError: none is asked for and Slurm has no default, or one does not exist.
    """
    known = {partition.name: partition for partition in inventory.partitions}
    asked = setting(request, profile, "partition")
    if asked is None:
        default = next((p for p in inventory.partitions if p.default), None)
        if default is None:
            raise GpusubError(
                f"Slurm has no default partition; choose one with --partition: {', '.join(known)}"
            )
        return Value(default.name, "Slurm's default partition"), (default,)
    for name in asked.value.split(","):
        if name not in known:
            import difflib

            near = difflib.get_close_matches(name, known, n=1)
            raise GpusubError(
                f"{asked.origin}: no partition {name!r}; "
                + (f"did you mean {near[0]!r}?" if near else f"there is {', '.join(known)}")
            )
    return asked, tuple(known[name] for name in asked.value.split(","))


def slurm_resources(
    request: Request,
    profile: Profile,
    inventory: Inventory,
    partitions: Sequence[Partition],
) -> Resources:
    """Return what to ask of each node of ``partitions``.

    Raises:
        GpusubError: the nodes cannot give what is asked, or do not say how many GPUs are meant.
    """
    kinds = _with_features(request, profile, partitions, inventory.kinds)
    gpus, gpu_type = _gpus(request, profile, partitions, kinds)
    fitting = [kind for kind in kinds if kind.gpus >= gpus.value]
    _refuse_impossible(request, profile, partitions, gpus, kinds, fitting)
    if gpus.value:
        whole = all(kind.gpus == gpus.value for kind in fitting)
    else:
        whole = setting(request, profile, "cpus_per_task") is None
    ceiling = _most_cpus(partitions, fitting)
    # With MaxCPUsPerNode Slurm lets no job have a node for itself.
    whole = whole and ceiling == max(kind.cpus for kind in fitting)
    exclusive = _exclusive(request, profile, whole, gpus.value)
    cpus = _cpus_asked(request, profile, gpus.value) or _cpus_of_partition(
        inventory, partitions, fitting, gpus.value
    )
    if cpus.value > ceiling:
        raise GpusubError(
            f"{cpus.origin}: {cpus.value} CPUs a node, and no node of "
            f"{_names(partitions)} gives more than {ceiling}; ask for fewer"
        )
    return Resources(
        nodes=request.nodes,
        gpus_per_node=gpus,
        gpu_type=gpu_type,
        cpus_per_task=cpus,
        mem=_memory(
            request,
            profile,
            inventory,
            partitions,
            fitting,
            gpus.value,
            cpus.value,
            exclusive.value,
        ),
        exclusive=exclusive,
    )


def _most_cpus(partitions: Sequence[Partition], kinds: Sequence[NodeKind]) -> int:
    """Return the most CPUs that a job can have of a node."""
    most = max(kind.cpus for kind in kinds)
    caps = [partition.max_cpus_per_node or most for partition in partitions]
    return min(most, max(caps))


def _names(partitions: Iterable[Partition]) -> str:
    names = [partition.name for partition in partitions]
    return f"partition{'s' if len(names) > 1 else ''} {', '.join(names)}"


def _with_features(
    request: Request,
    profile: Profile,
    partitions: Sequence[Partition],
    kinds: Iterable[NodeKind],
) -> list[NodeKind]:
    """Return the kinds of nodes in ``partitions``, only those that a plain constraint admits."""
    names = {partition.name for partition in partitions}
    found = [kind for kind in kinds if kind.partition in names]
    constraint = setting(request, profile, "constraint")
    # Anything beyond "a&b" ([x|y], counts, parentheses) is left for Slurm to judge.
    if constraint is None or not re.fullmatch(r"[\w.-]+([&,][\w.-]+)*", constraint.value):
        return found
    wanted = set(re.split("[&,]", constraint.value))
    admitted = [kind for kind in found if wanted <= kind.features]
    if not admitted:
        features = sorted({feature for kind in found for feature in kind.features})
        raise GpusubError(
            f"{constraint.origin}: no node of {_names(partitions)} has {constraint.value!r}; "
            f"their features are {', '.join(features) or 'none'}"
        )
    return admitted


def _parse_gpus(asked: Value[str]) -> tuple[Value[int], str | None]:
    match = re.fullmatch(r"(?:([A-Za-z][\w.-]*):)?(\d+)", asked.value, re.ASCII)
    if not match:
        raise GpusubError(
            f"{asked.origin}: {asked.value!r} is no number of GPUs; write 8, or TYPE:8 as in h100:8"
        )
    return Value(int(match[2]), asked.origin), match[1]


def _gpus(
    request: Request,
    profile: Profile,
    partitions: Sequence[Partition],
    kinds: Sequence[NodeKind],
) -> tuple[Value[int], str | None]:
    asked = setting(request, profile, "gpus_per_node")
    if asked is not None:
        return _parse_gpus(asked)
    counts = _count_by_gpus(kinds)
    if set(counts) <= {0}:
        raise GpusubError(
            f"the nodes of {_names(partitions)} have no GPUs; choose another with --partition, "
            "or run on CPUs with --gpus-per-node 0"
        )
    if len(counts) > 1:
        listed = ", ".join(f"{gpus} GPUs on {n} nodes" for gpus, n in sorted(counts.items()))
        raise GpusubError(
            f"the nodes of {_names(partitions)} differ: {listed}; say which with --gpus-per-node N"
        )
    return Value(next(iter(counts)), "all GPUs of a node, by Slurm"), None


def _count_by_gpus(kinds: Iterable[NodeKind]) -> dict[int, int]:
    counts: dict[int, int] = {}
    for kind in kinds:
        counts[kind.gpus] = counts.get(kind.gpus, 0) + kind.count
    return counts


def _refuse_impossible(
    request: Request,
    profile: Profile,
    partitions: Sequence[Partition],
    gpus: Value[int],
    kinds: Sequence[NodeKind],
    fitting: Sequence[NodeKind],
) -> None:
    if not fitting:
        counts = sorted(_count_by_gpus(kinds))
        most = counts[-1] if counts else 0
        if not most:
            raise GpusubError(
                f"{gpus.origin}: {gpus.value} GPUs a node, and the nodes of {_names(partitions)} "
                "have none; choose another with --partition"
            )
        raise GpusubError(
            f"{gpus.origin}: {gpus.value} GPUs a node, and no node of {_names(partitions)} has "
            f"more than {most}; use --nodes to have more GPUs"
        )
    wanted = request.nodes.value.least
    # A node that is in two of the partitions counts twice here, which only makes this milder.
    there = sum(kind.count for kind in fitting)
    if wanted > there:
        what = f" with {gpus.value} GPUs" if gpus.value else ""
        raise GpusubError(
            f"{request.nodes.origin}: {wanted} nodes{what}, and {_names(partitions)} has {there}; "
            "ask for fewer"
        )
    limits = [partition.max_nodes for partition in partitions]
    if all(limit is not None and wanted > limit for limit in limits):
        raise GpusubError(
            f"{request.nodes.origin}: {wanted} nodes, and {_names(partitions)} lets a job have "
            f"{max(limit or 0 for limit in limits)}; ask for fewer"
        )
    fewest = min(partition.min_nodes for partition in partitions)
    if request.nodes.value.most < fewest:
        raise GpusubError(
            f"{request.nodes.origin}: {request.nodes.value} nodes, and {_names(partitions)} gives "
            f"a job no less than {fewest}; ask for more with --nodes"
        )
    time = setting(request, profile, "time")
    if time is None:
        return
    time_s = parse_time(time.origin, time.value)
    longest = [partition.max_time_s for partition in partitions]
    if all(limit is not None and (time_s is None or time_s > limit) for limit in longest):
        raise GpusubError(
            f"{time.origin}: {time.value} is longer than {_names(partitions)} lets a job run "
            f"({clock(max(limit or 0 for limit in longest))}); ask for less"
        )


def clock(time_s: int) -> str:
    """Return seconds as Slurm prints them: [days-]hours:minutes:seconds."""
    days, rest = divmod(time_s, 86400)
    hours, rest = divmod(rest, 3600)
    prefix = f"{days}-" if days else ""
    return f"{prefix}{hours:02}:{rest // 60:02}:{rest % 60:02}"


def _exclusive(request: Request, profile: Profile, whole: bool, gpus: int) -> Value[bool]:
    if request.exclusive is not None:
        return Value(True, request.exclusive)
    shared = setting(request, profile, "shared")
    if shared is not None and shared.value:
        return Value(False, shared.origin)
    if not whole:
        return Value(False, BUILT_IN)
    return Value(True, "all GPUs of a node" if gpus else "all CPUs of a node")


def _cpus_asked(request: Request, profile: Profile, gpus: int) -> Value[int] | None:
    asked = setting(request, profile, "cpus_per_task")
    if asked is not None:
        if not re.fullmatch(r"[1-9]\d*", asked.value, re.ASCII):
            raise GpusubError(f"{asked.origin}: {asked.value!r} is no number of CPUs a node")
        return Value(int(asked.value), asked.origin)
    per_gpu = setting(request, profile, "cpus_per_gpu")
    if per_gpu is None or not gpus:
        return None
    if per_gpu.value < 1:
        raise GpusubError(f"{per_gpu.origin}: cpus_per_gpu {per_gpu.value}: must be 1 or more")
    return Value(per_gpu.value * gpus, f"{per_gpu.origin}: {per_gpu.value} a GPU")


def _default_per_gpu(
    inventory: Inventory, partitions: Sequence[Partition], field: str
) -> Value[int] | None:
    """Return a DefCpuPerGPU or DefMemPerGPU that holds for every one of the partitions."""
    above = getattr(inventory.defaults, field)
    values = {getattr(partition, field) or above for partition in partitions}
    if len(values) != 1 or (value := values.pop()) is None:
        return None
    return Value(value, f"Slurm: {_names(partitions)}")


def _cpus_of_partition(
    inventory: Inventory, partitions: Sequence[Partition], kinds: Sequence[NodeKind], gpus: int
) -> Value[int]:
    default = _default_per_gpu(inventory, partitions, "def_cpu_per_gpu")
    if default is not None and gpus:
        # More than a node has is no request of the user's.
        most = min(default.value * gpus, *(kind.cpus for kind in kinds))
        return Value(most, f"{default.origin}: DefCpuPerGPU={default.value}")
    caps = [p.max_cpus_per_node for p in partitions if p.max_cpus_per_node]
    share = min(_cpu_share(kind, gpus) for kind in kinds)
    if caps and min(caps) < share:
        return Value(min(caps), f"Slurm: MaxCPUsPerNode of {_names(partitions)}")
    return Value(share, _share_of(gpus) if gpus else "all CPUs of a node")


def _share_of(gpus: int) -> str:
    return "1 GPU's share of a node" if gpus == 1 else f"{gpus} GPUs' share of a node"


def _cpu_share(kind: NodeKind, gpus: int) -> int:
    """Return the CPUs that go with ``gpus`` of the node's, whole cores where that is possible."""
    share = kind.cpus * gpus // kind.gpus if gpus else kind.cpus
    return max(share - share % kind.threads_per_core, 1)


def _memory(
    request: Request,
    profile: Profile,
    inventory: Inventory,
    partitions: Sequence[Partition],
    kinds: Sequence[NodeKind],
    gpus: int,
    cpus: int,
    exclusive: bool,
) -> Value[str | None]:
    asked = setting(request, profile, "mem")
    if asked is not None:
        if asked.value and not re.fullmatch(r"\d+[KMGT]?", asked.value, re.ASCII | re.IGNORECASE):
            raise GpusubError(
                f"{asked.origin}: {asked.value!r} is no size; write 64G, or 0 for all"
            )
        return replace(asked, value=asked.value or None)
    per_gpu = setting(request, profile, "mem_per_gpu")
    if per_gpu is not None and gpus:
        match = re.fullmatch(r"([1-9]\d*)([KMGT]?)", per_gpu.value, re.ASCII | re.IGNORECASE)
        if not match:
            raise GpusubError(f"{per_gpu.origin}: mem_per_gpu {per_gpu.value!r}: write 100G")
        return Value(
            f"{int(match[1]) * gpus}{match[2]}", f"{per_gpu.origin}: {per_gpu.value} a GPU"
        )
    default = _default_per_gpu(inventory, partitions, "def_mem_per_gpu_mb")
    if default is not None and gpus:
        return Value(f"{default.value * gpus}M", f"{default.origin}: DefMemPerGPU={default.value}")
    # RealMemory left at its default of 1 MB means that this site does not count memory.
    if any(kind.memory_mb <= 1 for kind in kinds):
        return Value(None, "Slurm states no memory for these nodes")
    caps = [p.max_mem_per_node_mb for p in partitions if p.max_mem_per_node_mb]
    if exclusive and not caps:
        return Value("0", "all memory of a node")
    share = min(
        kind.memory_mb * gpus // kind.gpus if gpus else kind.memory_mb * cpus // kind.cpus
        for kind in kinds
    )
    if caps and min(caps) < share:
        return Value(f"{min(caps)}M", f"Slurm: MaxMemPerNode of {_names(partitions)}")
    return Value(f"{share}M", _share_of(gpus) if gpus else "the CPUs' share")


def summary(resources: Resources) -> Mapping[str, str]:
    """Return the request in words for people: nodes, and what each gives."""
    gpus, gpu_type = resources.gpus_per_node.value, resources.gpu_type
    mem = resources.mem.value
    nodes = resources.nodes.value
    return {
        "nodes": f"{nodes} node{'s' if nodes.most > 1 else ''}",
        "gpus": f"{gpus} {gpu_type + ' ' if gpu_type else ''}GPU{'s' if gpus != 1 else ''}",
        "cpus": f"{resources.cpus_per_task.value} CPUs",
        "mem": "all memory" if mem == "0" else f"{_readable(mem)} memory" if mem else "",
    }


def _readable(size: str) -> str:
    """Return a size of ours in megabytes in whole gigabytes, where it has any."""
    return f"{int(size[:-1]) // 1024}G" if size.endswith("M") and len(size) > 5 else size
