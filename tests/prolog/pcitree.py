"""Small trees of a node: PCIe, HCAs, modules, as paths → contents in which all else is absent."""

from __future__ import annotations

import struct
from collections.abc import Mapping
from typing import Any

from gpuhealth.check import REGISTRY, Node, run
from gpuhealth.finding import Finding
from gpuhealth.policy import Policy, Ports, Sku
from gpuhealth.source import Recording

Entries = dict[str, Any]
DEVICES = "/sys/bus/pci/devices"
CLASS = "/sys/class/infiniband"
RELEASE = "5.14.0-427.el9.x86_64"

# Two sockets; below each a PCIe switch with an HCA and two GPUs, and beside it an HCA that is
# a root port's only device.
SWITCHES = {0: 0x15, 1: 0x85}
GPUS = ("0000:19:00.0", "0000:1a:00.0", "0000:89:00.0", "0000:8a:00.0")
HCAS = ("mlx5_0", "mlx5_1", "mlx5_2", "mlx5_3")


def below_switch(bus: int, slot: int) -> tuple[str, ...]:
    """The chain of a device in a slot of the switch below a root bus."""
    return (
        f"pci0000:{bus:02x}",
        f"0000:{bus:02x}:01.0",
        f"0000:{bus + 1:02x}:00.0",
        f"0000:{bus + 2:02x}:{slot:02x}.0",
        f"0000:{bus + 3 + slot:02x}:00.0",
    )


def at_root(bus: int) -> tuple[str, ...]:
    """The chain of a device alone below a root port of the same host bridge."""
    return (f"pci0000:{bus:02x}", f"0000:{bus:02x}:02.0", f"0000:{bus + 9:02x}:00.0")


def real(chain: tuple[str, ...]) -> str:
    return "/sys/devices/" + "/".join(chain)


def config(control: int | None = 0, offset: int = 0x100) -> str:
    """A bridge's config space with an ACS capability, as binary text; None for none."""
    space = bytearray(4096)
    struct.pack_into("<HH", space, 0, 0x1000, 0xC030)
    if control is not None:
        if offset != 0x100:
            struct.pack_into("<I", space, 0x100, 0x0001 | 1 << 16 | offset << 20)
        struct.pack_into("<IHH", space, offset, 0x0001_000D, 0x005F, control)
    return bytes(space).decode("latin-1")


def device(chain: tuple[str, ...], numa: int, vendor: str, kind: str) -> Entries:
    path = f"{DEVICES}/{chain[-1]}"
    tree: Entries = {path: {"link": real(chain)}}
    for name, text in (("numa_node", str(numa)), ("vendor", vendor), ("class", kind)):
        tree[f"{path}/{name}"] = text
    for bridge in chain[1:-1]:
        tree |= {
            f"{DEVICES}/{bridge}": {"link": real(chain[: chain.index(bridge) + 1])},
            f"{DEVICES}/{bridge}/vendor": "0x1000",
            f"{DEVICES}/{bridge}/class": "0x060400",
            f"{DEVICES}/{bridge}/config": config(),
            f"{DEVICES}/{bridge}/max_link_width": "16",
            f"{DEVICES}/{bridge}/max_link_speed": "32.0 GT/s PCIe",
        }
    return tree


def hca(name: str, chain: tuple[str, ...], numa: int) -> Entries:
    path = f"{CLASS}/{name}"
    tree = device(chain, numa, "0x15b3", "0x020700")
    tree |= {
        f"{path}/device": {"link": real(chain)},
        f"{path}/device/vendor": "0x15b3",
        f"{path}/fw_ver": "28.39.1002",
        f"{path}/ports/1/state": "4: ACTIVE",
        f"{path}/ports/1/phys_state": "5: LinkUp",
        f"{path}/ports/1/rate": "400 Gb/sec (4X NDR)",
        f"{path}/ports/1/link_layer": "InfiniBand",
    }
    for which in ("current", "max"):
        tree[f"{path}/device/{which}_link_width"] = "16"
        tree[f"{path}/device/{which}_link_speed"] = "32.0 GT/s PCIe"
    number = name.rpartition("_")[2]
    verbs = f"/sys/class/infiniband_verbs/uverbs{number}"
    tree[f"{verbs}/ibdev"] = name
    tree[f"/dev/infiniband/uverbs{number}"] = {"kind": "char"}
    return tree


def node(driver: str = "open", peermem: bool = True) -> Entries:
    """A healthy node with four GPUs and four HCAs; change it, then close it with `whole`."""
    tree: Entries = {
        "/proc/sys/kernel/osrelease": RELEASE,
        "/proc/cpuinfo": "processor\t: 0\nflags\t\t: fpu vme de pse",
        f"/boot/config-{RELEASE}": "CONFIG_PCI=y\nCONFIG_PCI_P2PDMA=y\n",
        f"/lib/modules/{RELEASE}/modules.builtin": "kernel/lib/zlib_inflate/zlib_inflate.ko\n",
        "/proc/driver/nvidia/version": version(driver),
        "/sys/module/nvidia/taint": "POE" if driver == "proprietary" else "OE",
        "/sys/module/nvidia/version": "580.82.07",
        "/sys/module/ib_core/holders/ib_uverbs": {"link": "/sys/module/ib_uverbs"},
        "/sys/module/ib_uverbs/initstate": "live",
        "/sys/module/mlx5_core/version": "24.10-0.7.0",
        "/sys/module/mlx5_ib/initstate": "live",
        "/sys/devices/system/node/possible": "0-1",
    }
    if peermem:
        tree["/sys/module/nvidia_peermem/version"] = "580.82.07"
        holder = "/sys/module/ib_core/holders/nvidia_peermem"
        tree[holder] = {"link": "/sys/module/nvidia_peermem"}
    for numa, bus in SWITCHES.items():
        tree |= hca(f"mlx5_{2 * numa}", below_switch(bus, 0), numa)
        tree |= hca(f"mlx5_{2 * numa + 1}", at_root(bus), numa)
        for slot in (1, 2):
            chain = below_switch(bus, slot)
            tree |= device(chain, numa, "0x10de", "0x030200")
            tree[f"/proc/driver/nvidia/gpus/{chain[-1]}/information"] = "Model: \t NVIDIA H100"
    return tree


def version(driver: str) -> str:
    words = {
        "open": "NVIDIA UNIX Open Kernel Module for x86_64  580.82.07  Release Build",
        "proprietary": "NVIDIA UNIX x86_64 Kernel Module  580.82.07  Wed Aug 27",
    }
    return f"NVRM version: {words[driver]}\nGCC version:  gcc version 11.4.0"


def whole(tree: Mapping[str, Any]) -> Entries:
    """Return the tree with every directory's names, so that what isn't in it is absent."""
    tops = ("sys", "proc", "run", "dev", "boot", "lib")
    listed: dict[str, set[str]] = {f"/{top}/": set() for top in tops}
    for path, entry in tree.items():
        parts = path.strip("/").split("/")
        if isinstance(entry, dict) and entry.get("errno") == "ENOENT":
            continue
        for depth in range(1, len(parts)):
            above = "/" + "/".join(parts[:depth]) + "/"
            listed.setdefault(above, set()).add(parts[depth])
    names = {path: sorted(found) for path, found in listed.items()}
    return {**names, **tree}


def without(tree: Mapping[str, Any], *prefixes: str) -> Entries:
    """Return a tree without what is at these paths and below them."""
    return {
        path: entry
        for path, entry in tree.items()
        if not any(path == prefix or path.startswith(f"{prefix}/") for prefix in prefixes)
    }


def judge(id: str, tree: Mapping[str, Any], sku: Sku | None, **options: Any) -> list[Finding]:
    """What a check says of a tree under a policy that leaves its action as it is."""
    looked = Node("gpu-1", Recording(whole(tree)), sku, **options)
    return run(REGISTRY[id], looked, Policy())


def ports(*names: str, **options: Any) -> Sku:
    """A SKU that lists these HCAs' first ports."""
    listed = Ports(names=tuple(f"{name}:1" for name in names or HCAS))
    return Sku("h100", ports=listed, **options)
