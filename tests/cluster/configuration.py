"""The configuration files of a cluster: slurm.conf and what it needs beside it, as text."""

from __future__ import annotations

from dataclasses import dataclass, field
from pathlib import Path

# The very file that a site copies.
SITE_LINES = Path(__file__).resolve().parents[2] / "slurm" / "etc" / "gpusub.conf"

HOOK_DIRECTORY = "/usr/libexec/gpusub"
HOOKS = ("prolog", "epilog", "task_prolog", "health_check")

NETWORK = "10.217.0"
LOGIN = f"{NETWORK}.254"
CONTROLLER = f"{NETWORK}.253"

# Keys that have a line for every name.
NAMED = ("nodename", "partitionname", "downnodes", "nodeset")
# In front of whatever SchedulerParameters are wanted: without these a batch job waits up to 3 s
# before anybody looks at it.
PROMPT = "batch_sched_delay=0,sched_interval=1,bf_interval=1"

BASE = f"""
ClusterName=cluster
SlurmctldHost=controller({CONTROLLER})
SlurmUser=root
SlurmdUser=root
# A requeued job waits until its credential has expired: 5 s is the least, 120 the default.
AuthType=auth/munge
AuthInfo=cred_expire=5
CredType=cred/munge
StateSaveLocation=/var/spool/slurmctld
SlurmdSpoolDir=/var/spool/slurmd
SlurmctldPidFile=/run/slurmctld.pid
SlurmdPidFile=/run/slurmd.pid
SlurmctldLogFile=/var/log/slurm/slurmctld.log
SlurmdLogFile=/var/log/slurm/slurmd.log
SlurmctldDebug=verbose
SlurmdDebug=verbose
MailProg=/bin/true
MpiDefault=none
ProctrackType=proctrack/linuxproc
JobAcctGatherType=jobacct_gather/none
JobCompType=jobcomp/filetxt
JobCompLoc=/var/log/slurm/jobcomp.txt
GresTypes=gpu
SelectType=select/cons_tres
SelectTypeParameters=CR_Core_Memory
PreemptType=preempt/partition_prio
PreemptMode=REQUEUE
ReturnToService=0
InactiveLimit=0
KillWait=5
MinJobAge=600
SlurmctldTimeout=60
SlurmdTimeout=60
"""


@dataclass(frozen=True)
class NodeSpec:
    """A node as slurm.conf describes it."""

    name: str
    address: str
    cpus: int
    memory_mb: int
    gpus: int

    def line(self) -> str:
        """The node's line of slurm.conf."""
        sockets = 2 if self.cpus >= 4 and self.cpus % 2 == 0 else 1
        gres = f" Gres=gpu:h100:{self.gpus}" if self.gpus else ""
        return (
            f"NodeName={self.name} NodeAddr={self.address} CPUs={self.cpus} Sockets={sockets}"
            f" CoresPerSocket={self.cpus // sockets} ThreadsPerCore=1"
            f" RealMemory={self.memory_mb}{gres}"
        )


@dataclass(frozen=True)
class Layout:
    """The nodes of a cluster: those of partition gpu and, beside them, smaller ones."""

    gpu_nodes: list[NodeSpec]
    small_nodes: list[NodeSpec] = field(default_factory=list)

    @classmethod
    def of(cls, nodes: int, small: bool) -> Layout:
        """Nodes gpu-5, gpu-6, …: with eight of them, names of one digit and of two.

        Shares of their memory are no round numbers.
        """
        gpu_nodes = [
            NodeSpec(f"gpu-{4 + host}", f"{NETWORK}.{host}", cpus=16, memory_mb=250_003, gpus=4)
            for host in range(1, nodes + 1)
        ]
        if not small:
            return cls(gpu_nodes)
        return cls(
            gpu_nodes,
            [
                NodeSpec("gpu-small", f"{NETWORK}.{nodes + 1}", cpus=8, memory_mb=120_011, gpus=2),
                NodeSpec("cpu-1", f"{NETWORK}.{nodes + 2}", cpus=8, memory_mb=60_017, gpus=0),
            ],
        )

    @property
    def nodes(self) -> list[NodeSpec]:
        """All of them."""
        return [*self.gpu_nodes, *self.small_nodes]

    def partitions(self) -> str:
        """The partitions' lines of slurm.conf."""
        gpu = ",".join(node.name for node in self.gpu_nodes)
        lines = [
            f"PartitionName=gpu Nodes={gpu} Default=YES PriorityTier=1",
            # Its jobs take the nodes of those in gpu, which go back to the queue.
            f"PartitionName=urgent Nodes={gpu} PriorityTier=10 PreemptMode=OFF",
        ]
        if self.small_nodes:
            small, cpu = (node.name for node in self.small_nodes)
            few = ",".join(node.name for node in self.gpu_nodes[:2])
            lines += [
                f"PartitionName=cpu Nodes={cpu} PriorityTier=1",
                f"PartitionName=mixed Nodes={few},{small} PriorityTier=1",
            ]
        return "\n".join(lines)

    def topology(self) -> str:
        """Leaf switches of two nodes, two leaves to a spine, all below one core switch.

        The nodes are dealt out like cards, so that neighbours by name are not neighbours by switch.
        """
        leaves: list[list[str]] = [[] for _ in range(max(1, len(self.gpu_nodes) // 2))]
        for index, node in enumerate(self.gpu_nodes):
            leaves[index % len(leaves)].append(node.name)
        spines = [list(range(i, min(i + 2, len(leaves)))) for i in range(0, len(leaves), 2)]
        if self.small_nodes:
            spines[-1].append(len(leaves))
            leaves.append([node.name for node in self.small_nodes])
        lines = [f"SwitchName=leaf-{i} Nodes={','.join(leaf)}" for i, leaf in enumerate(leaves, 1)]
        lines += [
            f"SwitchName=spine-{i} Switches={','.join(f'leaf-{leaf + 1}' for leaf in below)}"
            for i, below in enumerate(spines, 1)
        ]
        lines.append(
            f"SwitchName=core Switches={','.join(f'spine-{i + 1}' for i in range(len(spines)))}"
        )
        return "\n".join(lines) + "\n"

    def gres(self) -> str:
        """gres.conf: which device files the GPUs are."""
        lines = ["AutoDetect=off"]
        for node in self.nodes:
            if node.gpus:
                files = f"/dev/nvidia[0-{node.gpus - 1}]" if node.gpus > 1 else "/dev/nvidia0"
                lines.append(f"NodeName={node.name} Name=gpu Type=h100 File={files}")
        return "\n".join(lines) + "\n"

    def hosts(self) -> str:
        """/etc/hosts of the whole cluster: slurmctld looks addresses up in reverse, too."""
        lines = ["127.0.0.1 localhost", "::1 localhost", "::ffff:127.0.0.1 localhost"]
        lines += [f"{LOGIN} login", f"{CONTROLLER} controller"]
        lines += [f"{node.address} {node.name}" for node in self.nodes]
        # torch's store listens on IPv6 and looks its clients up by these.
        lines += [f"::ffff:{node.address} {node.name}" for node in self.nodes]
        return "\n".join(lines) + "\n"


def real_cpus(cpus: int = 2) -> Layout:
    """One node with two GPUs and no more CPUs and memory than this machine has."""
    return Layout([NodeSpec("gpu-5", f"{NETWORK}.1", cpus=cpus, memory_mb=2003, gpus=2)])


def files(layout: Layout, version: tuple[int, int], task_plugin: str, conf: str) -> dict[str, str]:
    """What lies in /etc/slurm, by name."""
    real = task_plugin != "task/none"
    settings = _settings(
        BASE,
        # Nodes claim more CPUs and memory than this machine has. Where tasks are bound to real
        # CPUs they may not.
        f"TaskPlugin={task_plugin}\n" + ("" if real else "SlurmdParameters=config_overrides\n"),
        "\n".join(node.line() for node in layout.nodes),
        layout.partitions(),
        SITE_LINES.read_text(),
        conf,
    )
    disabled = "CgroupPlugin=disabled" if version >= (23, 11) else "CgroupPlugin=cgroup/v1"
    return {
        "slurm.conf": "\n".join(settings.values()) + "\n",
        "cgroup.conf": f"{disabled}\n",
        "gres.conf": layout.gres(),
        "topology.conf": layout.topology(),
    }


def _settings(*texts: str) -> dict[str, str]:
    """The lines of several slurm.confs by what they set; later ones override earlier ones."""
    settings: dict[str, str] = {}
    for line in "\n".join(texts).splitlines():
        line = line.strip()
        if not line or line.startswith("#"):
            continue
        key, _, value = line.partition("=")
        key = key.strip().lower()
        settings[f"{key} {value.split()[0]}" if key in NAMED else key] = line
    wanted = settings.get("schedulerparameters", "").partition("=")[2]
    settings["schedulerparameters"] = f"SchedulerParameters={PROMPT},{wanted}".rstrip(",")
    return settings
