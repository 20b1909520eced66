"""GPUDirect RDMA: can HCAs reach the GPUs' memory, by which way, and how far is it?

What NCCL looks at: NVIDIA/nccl:src/transport/net_ib/gdr.cc and, before 2.27,
src/transport/net_ib.cc. What the kernel needs: NVIDIA/open-gpu-kernel-modules:kernel-open/
nvidia-peermem/nvidia-peermem.c and kernel-open/nvidia/nv-dmabuf.c.
"""

from __future__ import annotations

import re
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Optional

from gpuhealth import hca, pci
from gpuhealth.check import PERIODIC, Node, check
from gpuhealth.finding import DRAIN, Finding, healthy, unhealthy, unknown
from gpuhealth.reading import NOT_RECORDED, Reading
from gpuhealth.source import Source

ID = "gpudirect"
OBJECT = "RDMA"

_PEERMEM = "/sys/module/nvidia_peermem/version"
_CLIENTS = "/sys/kernel/mm/memory_peers"
_HOLDERS = "/sys/module/ib_core/holders"
_VERSION = "/proc/driver/nvidia/version"
_TAINT = "/sys/module/nvidia/taint"
_RELEASE = "/proc/sys/kernel/osrelease"

# Which releases of NCCL take nvidia_peermem to be there if one of these is: a client's directory
# in memory_peers, or the module.
_MODULE = "module"
_SEEN_BY = (
    ("<= 2.21.5", ("nv_mem", "nvidia-peermem")),
    ("2.22.3", ("nv_mem", "nv_mem_nc")),
    (">= 2.23.4", ("nv_mem", "nv_mem_nc", _MODULE)),
)
# The first NCCL that registers DMA-BUFs.
_DMABUF_SINCE = "NCCL >= 2.13.4"
_DMABUF_KERNEL = (5, 12)

_EXPECTED = {
    "any": "nvidia_peermem or DMA-BUF",
    "dmabuf": "DMA-BUF",
    "peermem": "nvidia_peermem",
    "both": "nvidia_peermem and DMA-BUF",
}
_REMEDY = {
    "any": "install the open NVIDIA kernel module (DMA-BUF), or load nvidia_peermem and look in "
    "dmesg for why it did not register",
    "dmabuf": "install the open NVIDIA kernel module on a kernel from 5.12 on with "
    "CONFIG_PCI_P2PDMA, and load ib_uverbs",
    "peermem": "load nvidia_peermem, and look in dmesg for why it did not register: it must be "
    "built against the RDMA stack that is loaded",
    "both": "load nvidia_peermem, and install the open NVIDIA kernel module",
}


@dataclass(frozen=True)
class _Way:
    """One way to the GPUs' memory: there, not there, or (None) not known, and in words."""

    there: Optional[bool]
    text: str


@check(
    ID,
    "GPUDirect RDMA: nvidia_peermem loaded and registered, or DMA-BUF; which NCCL sees it",
    action=DRAIN,
)
def gpudirect(node: Node) -> Iterator[Finding]:
    """Judge whether HCAs can reach the GPUs' memory.

    A policy that says nothing of it is content with a node that can't; without any policy that is
    told, since GPUs next to a fabric that cannot reach them are hardly meant.
    """
    want = node.policy.gpudirect
    if want == "off":
        return
    devices = node.source.names(hca.CLASS)
    if node.policy.ports is None and (devices.absent or not (devices.error or devices.names)):
        yield healthy(ID, OBJECT, "no HCA")
        return
    if not _has_driver(node.source):
        if want is not None:
            remedy = "install or load the NVIDIA driver, and look in dmesg for why it failed"
            yield unhealthy(ID, OBJECT, "nvidia is not loaded", _EXPECTED[want], remedy)
        return
    peermem, dmabuf = _peermem(node.source), _dmabuf(node)
    there = _judge(want or "any", peermem.there, dmabuf.there)
    observed = f"{peermem.text}; {dmabuf.text}"
    expected = _EXPECTED[want or "any"]
    if there:
        yield healthy(ID, OBJECT, observed)
    elif want is not None and there is None:
        yield unknown(ID, OBJECT, observed, expected)
    elif want is not None:
        yield unhealthy(ID, OBJECT, observed, expected, _REMEDY[want])
    elif there is False and node.sku is None and _is_active(node.source):
        finding = unhealthy(ID, OBJECT, observed, expected, _REMEDY["any"])
        yield replace(finding, systemic=True)
    elif there is False:
        yield healthy(ID, OBJECT, observed, "nothing: the policy doesn't ask for it")


def _judge(want: str, peermem: Optional[bool], dmabuf: Optional[bool]) -> Optional[bool]:
    ways = {"peermem": (peermem,), "dmabuf": (dmabuf,)}.get(want, (peermem, dmabuf))
    if want == "any":
        return True if True in ways else None if None in ways else False
    return False if False in ways else None if None in ways else True


def _has_driver(source: Source) -> bool:
    """Whether the NVIDIA driver may be loaded; only what is known not to be there is not."""
    modules = source.names("/sys/module")
    if modules.error or "nvidia" in modules.names:
        return True
    return not source.names(pci.GPUS).absent


def _is_active(source: Source) -> bool:
    """Whether any InfiniBand port is up."""
    return any(
        "ACTIVE" in (source.read(f"{hca.port_path(device, 1)}/state").text or "")
        and source.read(f"{hca.port_path(device, 1)}/link_layer").text == "InfiniBand"
        for device in source.names(hca.CLASS).names
    )


def _peermem(source: Source) -> _Way:
    """Judge nvidia_peermem: its module is there *and* ib_core holds it as a client."""
    module = source.read(_PEERMEM)
    clients = source.names(_CLIENTS)
    found = tuple(name for name in clients.names if name.startswith("nv"))
    if found:
        # Clients are listed there while they are registered, whichever module they are of.
        name = "nvidia_peermem" if module.text is not None else found[0]
        return _Way(True, f"{name} ({_seen_by(found, module.text is not None)})")
    if module.absent:
        if clients.unreadable and clients.error != NOT_RECORDED:
            return _Way(None, f"memory_peers {clients.why}")
        return _Way(False, "no nvidia_peermem")
    if module.text is None:
        return _Way(None, f"nvidia_peermem {module.why}")
    holders = source.names(_HOLDERS)
    if "nvidia_peermem" in holders.names:
        return _Way(True, f"nvidia_peermem ({_seen_by((), True)})")
    if holders.unreadable:
        return _Way(None, f"nvidia_peermem loaded, ib_core's holders {holders.why}")
    if holders.absent and not source.names("/sys/module/ib_core").error:
        return _Way(None, "nvidia_peermem loaded, ib_core built in")  # which has no holders
    return _Way(False, "nvidia_peermem loaded, not registered")


def _seen_by(clients: tuple[str, ...], module: bool) -> str:
    """Return which releases of NCCL see nvidia_peermem."""
    present = {*clients, *([_MODULE] if module else [])}
    seen = [release for release, places in _SEEN_BY if present.intersection(places)]
    blind = [release for release, _ in _SEEN_BY if release not in seen]
    if not blind:
        return "any NCCL"
    return f"NCCL {', '.join(seen)}, not {', '.join(blind)}" if seen else "no NCCL sees it"


def _dmabuf(node: Node) -> _Way:
    """Judge DMA-BUF from what it needs; where the devices were asked themselves, that counts."""
    source = node.source
    is_open, kind = _is_open(source)
    if is_open is not True:
        return _Way(is_open, f"no DMA-BUF: {kind}" if is_open is False else f"DMA-BUF: {kind}")
    release = source.read(_RELEASE)
    version = re.match(r"(\d{1,4})\.(\d{1,4})", release.text or "")
    if version is None:
        return _Way(None, f"DMA-BUF: kernel release {release.why or 'unreadable'}")
    if (int(version[1]), int(version[2])) < _DMABUF_KERNEL:
        return _Way(False, f"no DMA-BUF: kernel {version[0]} is before 5.12")
    uverbs = source.names("/sys/class/infiniband_verbs")
    if uverbs.absent:
        return _Way(False, "no DMA-BUF: ib_uverbs is not loaded")
    if uverbs.error:
        return _Way(None, f"DMA-BUF: ib_uverbs {uverbs.why}")
    asked = {
        device: answer.get("dmabuf")
        for device, answer in node.verbs.items()
        if isinstance(answer, dict)
    }
    refusing = sorted(device for device, answer in asked.items() if answer == "unsupported")
    if refusing:
        return _Way(False, f"no DMA-BUF: not with {', '.join(refusing)}"[:80])
    if asked and set(asked.values()) == {"supported"}:
        return _Way(True, f"DMA-BUF ({_DMABUF_SINCE}), tried")
    config, why = _has_p2pdma(source, release.text or "")
    if config is False:
        return _Way(False, "no DMA-BUF: kernel without CONFIG_PCI_P2PDMA")
    if config is None and why:
        return _Way(None, f"DMA-BUF: kernel configuration {why}")
    return _Way(True, f"DMA-BUF ({_DMABUF_SINCE})")


def _is_open(source: Source) -> tuple[Optional[bool], str]:
    """Return whether NVIDIA's kernel module is the open one, and that in words."""
    version = source.read(_VERSION)
    if "Open Kernel Module" in (version.text or ""):
        return True, "open kernel module"
    if "Kernel Module" in (version.text or ""):
        return False, "proprietary kernel module"
    # What a module of a proprietary licence has done to the kernel (linux:Documentation/
    # admin-guide/tainted-kernels.rst); the open one is only built out of tree.
    taint = source.read(_TAINT).text
    if taint and "P" in taint:
        return False, "proprietary kernel module"
    if taint and "O" in taint:
        return True, "open kernel module"
    return None, f"kind of kernel module {version.why or 'unreadable'}"


def _has_p2pdma(source: Source, release: str) -> tuple[Optional[bool], str]:
    """Return whether the kernel has CONFIG_PCI_P2PDMA; None, and why, if that isn't known.

    There may be no configuration to look at at all: then the reason is "".
    """
    if not re.fullmatch(r"[\w.+~-]+", release):
        return None, ""
    for path in (f"/boot/config-{release}", "/proc/config.gz"):
        # CONFIG_PCI tells a configuration from a file that is cut off or empty.
        lines = source.lines(path, ("CONFIG_PCI=", "CONFIG_PCI_P2PDMA="))
        if lines.text is None:
            if lines.unreadable and lines.error != NOT_RECORDED:
                return None, lines.why
            continue
        found = lines.text.splitlines()
        if "CONFIG_PCI_P2PDMA=y" in found:
            return True, ""
        if "CONFIG_PCI=y" in found:
            return False, ""
    return None, ""


def _cards(node: Node) -> tuple[tuple[pci.Device, ...], int]:
    return pci.gpus(node.source)


def _nics(node: Node) -> tuple[pci.Device, ...]:
    """Return the HCAs that the policy lists, or else all."""
    if node.policy.ports is None:
        return pci.hcas(node.source, node.source.names(hca.CLASS).names)
    listed = [port.device for port in hca.listed_ports(node) if port.device is not None]
    return pci.hcas(node.source, dict.fromkeys(listed))


@check(
    "gpu_nic",
    "distance from each GPU to its nearest HCA, as nvidia-smi topo -m names it",
    contexts=(PERIODIC,),
)
def gpu_nic(node: Node) -> Iterator[Finding]:
    """Judge each GPU's way to the nearest listed HCA; without a wanted distance it is told only."""
    id, want = "gpu_nic", node.policy.distance
    cards, error = _cards(node)
    nics = _nics(node)
    if error and not cards:
        if want is not None:
            yield unknown(id, "GPUs", f"{pci.DEVICES} {Reading(error=error).why}", want)
        return
    if not nics:
        return
    for card in cards:
        found = pci.nearest(card, nics)
        if found is None:
            if want is not None:
                why = Reading(error=card.error or nics[0].error).why
                yield unknown(id, card.name, f"place in the PCIe tree {why}", want)
            continue
        how_far, near = found
        observed = f"{near[0].name} {how_far}"
        if want is None:
            yield healthy(id, card.name, observed)
        elif pci.DISTANCES.index(how_far) <= pci.DISTANCES.index(want):
            yield healthy(id, card.name, observed, f"{want} or nearer")
        else:
            yield unhealthy(
                id,
                card.name,
                observed,
                f"{want} or nearer",
                "compare the slots with a healthy node's (gpuhealth check --matrix): the HCA next "
                "to this GPU is missing, elsewhere, or not in the policy",
            )


@check("acs", "PCIe ACS redirects on bridges between a GPU and its HCA", contexts=(PERIODIC,))
def acs(node: Node) -> Iterator[Finding]:
    """Judge the bridges on each GPU's way to its nearest HCAs.

    In a virtual machine ACS is what keeps guests apart, and nothing that it could switch off.
    """
    id = "acs"
    cards, _ = _cards(node)
    nics = _nics(node)
    bridges: dict[str, str] = {}
    for card in cards:
        found = pci.nearest(card, nics)
        for nic in found[1] if found else ():
            for bridge in pci.bridges_between(card, nic):
                bridges.setdefault(bridge, f"{card.name} and {nic.name}")
    if not bridges:
        lost = [one for one in (*cards, *nics) if Reading(error=one.error).unreadable]
        if lost and cards and lost[0].error != NOT_RECORDED:
            why = Reading(error=lost[0].error).why
            yield unknown(id, lost[0].name, f"place in the PCIe tree {why}", "no redirect")
        return
    virtual = is_virtual(node.source)
    if virtual:
        yield healthy(id, "bridges", "a virtual machine: not looked at")
        return
    unread = []
    for bridge, pair in bridges.items():
        config = node.source.read(f"{pci.DEVICES}/{bridge}/config", pci.CONFIG_BYTES, binary=True)
        control = None if config.text is None else pci.acs_control(config.text)
        if control is None:
            unread.append(f"{bridge} {config.why or 'config space cut off'}")
        elif not control & pci.ACS_REDIRECTS:
            yield healthy(id, bridge, pci.acs_text(control))
        elif virtual is None:
            yield unknown(id, bridge, pci.acs_text(control), "no redirect, if no virtual machine")
        else:
            yield unhealthy(
                id,
                bridge,
                pci.acs_text(control),
                "no redirect",
                f"what {pair} send each other goes through the CPU: clear ACS on the bridge after "
                "each boot (setpci), or switch it off in the firmware's set-up",
            )
    if unread:
        more = f" and {len(unread) - 1} more" if len(unread) > 1 else ""
        yield unknown(id, "bridges", unread[0] + more, "no redirect", "run as root")


_VIRTUAL = re.compile(
    r"\b(?:KVM|QEMU|VMware|VirtualBox|Bochs|Xen|Virtual Machine|OpenStack|Google Compute Engine"
    r"|HVM domU|Standard PC|Cloud Hypervisor|Firecracker|BHYVE)\b",
    re.IGNORECASE,
)


def is_virtual(source: Source) -> Optional[bool]:
    """Return whether this is a virtual machine; None if nothing tells."""
    processor = source.read("/proc/cpuinfo")
    flags = re.search(r"^flags\s*:(.*)", processor.text or "", re.MULTILINE)
    # x86 alone has such a flag, and there it says all.
    if flags is not None and "hypervisor" in flags[1].split():
        return True
    if source.read("/sys/hypervisor/type").text:
        return True
    names = [source.read(f"/sys/class/dmi/id/{x}").text for x in ("sys_vendor", "product_name")]
    if any(name and _VIRTUAL.search(name) for name in names):
        return True
    return False if flags is not None or any(names) else None


@check("iommu", "whether the IOMMU translates what GPUs and HCAs send", contexts=(PERIODIC,))
def iommu(node: Node) -> Iterator[Finding]:
    """Judge the IOMMU: off or passing through is fine, translating costs GPUDirect its speed.

    The types of groups: linux:Documentation/ABI/testing/sysfs-kernel-iommu_groups.
    """
    id = "iommu"
    cards, _ = _cards(node)
    nics = _nics(node)
    devices = [one.address for one in (*cards, *nics) if one.address]
    if not cards or not nics or not devices:
        return
    units = node.source.names("/sys/class/iommu")
    if units.absent or not (units.error or units.names):
        yield healthy(id, "IOMMU", "off")
        return
    kinds: dict[str, list[str]] = {}
    unread = ""
    for address in devices:
        group = node.source.target(f"{pci.DEVICES}/{address}/iommu_group")
        if group.absent:
            continue  # a device that no IOMMU stands before
        number = (group.text or "").rpartition("/")[2]
        kind = node.source.read(f"/sys/kernel/iommu_groups/{number}/type")
        if group.text is None or kind.text is None:
            unread = f"{address} {group.why or kind.why}"
        else:
            kinds.setdefault(kind.text, []).append(address)
    translated = {kind: found for kind, found in kinds.items() if kind.startswith("DMA")}
    if translated and is_virtual(node.source) is False:
        count = sum(map(len, translated.values()))
        yield unhealthy(
            id,
            "IOMMU",
            f"{'/'.join(sorted(translated))} for {count} GPUs and HCAs",
            "identity or off",
            "boot with iommu=pt (or switch it off), as GPUDirect RDMA needs direct addresses",
        )
    elif unread:
        yield unknown(id, "IOMMU", unread, "identity or off")
    elif kinds or units.names:
        yield healthy(id, "IOMMU", "/".join(sorted(kinds)) or "before no GPU and no HCA")
