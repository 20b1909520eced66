"""A first settings file for a site, written from what Slurm reports.

Lines of explanation start with "# ", examples with "#" alone: without it they are valid as well.
"""

from __future__ import annotations

import json
import re
from collections.abc import Sequence

from gpuslurm.client import Inventory, NodeKind, Partition
from gpusub import __version__
from gpusub.errors import GpusubError
from gpusub.resources import clock

_HEAD = f"""\
# Settings of gpusub for this site: /etc/gpusub/cluster.yaml. The same keys can stand in
# ~/.config/gpusub/config.yaml and in ./gpusub.yaml; later files win, key by key.
# Written by gpusub {__version__} from what Slurm reported. What is in force, and where from:
#   gpusub config
#
# Lines that start with a plain "#" are examples; take the "#" away to use one. Values are read
# as the text that stands here: 12:30:00 and 010 need no quotes.
"""

# Every key of a profile, in the order of the file, with what it does. A {name} is filled in.
_KEYS = """\
# The account that jobs are charged to.
#account: ml-team
# The quality of service.
#qos: normal
# The time limit: hours:minutes:seconds or days-hours. Default: the partition's.
#time: {time}
# Features that the nodes must have.
#constraint: {feature}
# The reservation to run in.
#reservation: maintenance-test
# GPUs of each node: N or TYPE:N. Default: all of them.
#gpus_per_node: {gpus}
# CPUs that go with each GPU. Default: Slurm's DefCpuPerGPU, or the GPU's share.
#cpus_per_gpu: {cpus}
# Memory that goes with each GPU. Default: Slurm's DefMemPerGPU, or the GPU's share.
#mem_per_gpu: {memory}
# How GPUs are asked for: gpus-per-node, gres, or none where the partition implies them.
#gpu_request: gpus-per-node
# true: a job with all GPUs of a node still shares the node with other jobs.
#shared: false
# How the nodes of a job find each other: c10d or static.
#rendezvous: c10d
# The network between the nodes. Each key is an NCCL variable, set as written; what is left out
# NCCL finds by itself.
#fabric:
  # infiniband, roce, ethernet or none.
  #type: infiniband
  # NCCL_IB_HCA: the adapters to use.
  #hcas: ["mlx5_0:1", "mlx5_3:1"]
  # NCCL_IB_SL: InfiniBand's service level, 0 to 15.
  #service_level: 0
  # NCCL_IB_TC: the traffic class, 0 to 255.
  #traffic_class: 0
  # NCCL_NET_GDR_LEVEL: how far apart adapter and GPU may be: PIX, PXB, PHB, SYS.
  #gdr_level: PHB
  # NCCL_IB_GID_INDEX: on RoCE, which entry of the GID table.
  #gid_index: 3
  # NCCL_IB_PKEY: which entry of the table of partition keys.
  #pkey: 0
  # NCCL_IB_QPS_PER_CONNECTION: 1 to 128.
  #qps_per_connection: 1
  # NCCL_SOCKET_IFNAME: the interface for NCCL's own set-up.
  #socket_ifname: eth0
# Where nodes differ, by GPU type or node feature; a node gets the first one that fits it:
#   fabric:
#     {type}: {{type: infiniband, hcas: ["mlx5_0:1"]}}
#     a100: {{type: roce, gid_index: 3}}
# Variables of the program.
#env:
  #TOKENIZERS_PARALLELISM: "false"
# Lines of bash that each node runs before the launch.
#setup:
  #- ulimit -l unlimited
# The job script's template: torchrun, or the path of one of yours, seen from this file.
#template: torchrun
"""


def site_file(inventory: Inventory) -> str:
    """Return the text of a settings file with a profile for each partition that has GPUs.

    Raises:
        GpusubError: there is no such partition.
    """
    found = [
        (partition, kinds)
        for partition in inventory.partitions
        if (kinds := [k for k in inventory.kinds if k.partition == partition.name and k.gpus])
    ]
    if not found:
        names = ", ".join(partition.name for partition in inventory.partitions) or "none"
        raise GpusubError(
            f"Slurm reports no partition with GPUs (partitions: {names}); gres.conf and Gres= in "
            "slurm.conf say which nodes have them"
        )
    first = next((partition for partition, _ in found if partition.default), found[0][0])
    found.sort(key=lambda pair: pair[0] is not first)
    parts = [
        _HEAD,
        "\n# The profile of those who name none with --profile.\n",
        f"default_profile: {_scalar(first.name)}\n",
        "\nprofiles:\n",
    ]
    listed = [_profile(inventory, p, kinds, p is first) for p, kinds in found]
    return "".join(parts) + "\n".join(listed)


def _profile(
    inventory: Inventory, partition: Partition, kinds: Sequence[NodeKind], first: bool
) -> str:
    by_gpus: dict[int, int] = {}
    for kind in kinds:
        by_gpus[kind.gpus] = by_gpus.get(kind.gpus, 0) + kind.count
    # The number that most nodes have: with it left out, a mixed partition would be refused.
    gpus = max(by_gpus, key=lambda number: (by_gpus[number], number))
    lines = [f"  # {line}" for line in _facts(inventory, partition, kinds)]
    lines.append(f"  {_scalar(partition.name)}:")
    if first:
        lines.append("    # The partition that jobs go to.")
    lines.append(f"    partition: {_scalar(partition.name)}")
    if len(by_gpus) > 1:
        lines += [
            "    # The nodes differ, so a number must be said.",
            f"    gpus_per_node: {gpus}",
        ]
    if first:
        keys = _KEYS.format(**_examples(inventory, partition, kinds, gpus)).splitlines()
        if len(by_gpus) > 1:
            at = next(i for i, line in enumerate(keys) if line.startswith("#gpus_per_node"))
            del keys[at - 1 : at + 1]
        lines += [f"    {line}" for line in keys]
    return "\n".join(lines) + "\n"


def _facts(inventory: Inventory, partition: Partition, kinds: Sequence[NodeKind]) -> list[str]:
    """Return what Slurm says of a partition, in lines for people."""
    lines = []
    for kind in kinds:
        types = f" ({', '.join(kind.gpu_types)})" if kind.gpu_types else ""
        memory = f", {kind.memory_mb // kind.gpus} MB" if kind.memory_mb > 1 else ""
        features = f"; features {', '.join(sorted(kind.features))}" if kind.features else ""
        lines.append(
            f"{kind.count} node{'s' if kind.count > 1 else ''} {kind.names}: {kind.gpus} GPUs"
            f"{types}, for each {kind.cpus // kind.gpus} CPUs{memory}{features}"
        )
    cpus = partition.def_cpu_per_gpu or inventory.defaults.def_cpu_per_gpu
    memory_mb = partition.def_mem_per_gpu_mb or inventory.defaults.def_mem_per_gpu_mb
    limits = [
        f"time {clock(partition.max_time_s)}" if partition.max_time_s else "",
        f"{partition.max_nodes} nodes" if partition.max_nodes else "",
        f"{partition.max_cpus_per_node} CPUs a node" if partition.max_cpus_per_node else "",
        f"{partition.max_mem_per_node_mb} MB a node" if partition.max_mem_per_node_mb else "",
    ]
    stated = [
        f"{cpus} CPUs" if cpus else "",
        f"{memory_mb} MB" if memory_mb else "",
    ]
    lines.append(f"Limits: {', '.join(filter(None, limits)) or 'none'}.")
    if any(stated):
        lines.append(f"Slurm's defaults for each GPU: {', '.join(filter(None, stated))}.")
    return [part for line in lines for part in _folded(line)]


def _folded(line: str) -> list[str]:
    import textwrap

    return textwrap.wrap(line, 92, subsequent_indent="  ", break_long_words=False)


def _examples(
    inventory: Inventory, partition: Partition, kinds: Sequence[NodeKind], gpus: int
) -> dict[str, str]:
    fitting = [kind for kind in kinds if kind.gpus == gpus]
    feature = min((feature for kind in fitting for feature in kind.features), default="h100")
    gpu_type = next((kind.gpu_types[0] for kind in fitting if kind.gpu_types), "h100")
    memory = min(kind.memory_mb // kind.gpus for kind in fitting)
    cpus = partition.def_cpu_per_gpu or inventory.defaults.def_cpu_per_gpu
    return {
        "time": clock(min(partition.max_time_s or 14400, 14400)),
        "feature": _scalar(feature),
        "gpus": str(gpus),
        "cpus": str(cpus or max(min(kind.cpus // kind.gpus for kind in fitting), 1)),
        "memory": f"{memory}M" if memory > 1 else "64G",
        "type": gpu_type,
    }


def _scalar(text: str) -> str:
    """Return a name as YAML, in quotes where other readers of YAML would make it something else."""
    plain = re.fullmatch(r"[A-Za-z_][\w.-]*", text, re.ASCII)
    words = {"true", "false", "yes", "no", "on", "off", "null", "y", "n"}
    return text if plain and text.lower() not in words else json.dumps(text)
