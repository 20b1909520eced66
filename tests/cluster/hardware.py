"""What a healthy node's /sys and /dev show: two InfiniBand HCAs, and GPUs behind PCIe switches.

`common` is what all nodes with as many GPUs share, `own` what differs from node to node. Paths are
relative to /sys, and so are the targets of links.
"""

from __future__ import annotations

import os
import shutil
import stat
import struct
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from pathlib import Path

HCAS = 2


@dataclass(frozen=True)
class Link:
    """A symbolic link, written as relative as sysfs writes them."""

    target: str


Tree = dict[str, "str | bytes | Link"]

# Nothing of the machine's own devices of these kinds may shine through: the overlay takes such a
# directory alone.
OPAQUE = ("class/infiniband", "class/infiniband_verbs", "bus/pci/devices")

COUNTERS = (
    "VL15_dropped",
    "excessive_buffer_overrun_errors",
    "link_downed",
    "link_error_recovery",
    "local_link_integrity_errors",
    "multicast_rcv_packets",
    "multicast_xmit_packets",
    "port_rcv_constraint_errors",
    "port_rcv_data",
    "port_rcv_errors",
    "port_rcv_packets",
    "port_rcv_remote_physical_errors",
    "port_rcv_switch_relay_errors",
    "port_xmit_constraint_errors",
    "port_xmit_data",
    "port_xmit_discards",
    "port_xmit_packets",
    "port_xmit_wait",
    "symbol_error",
    "unicast_rcv_packets",
    "unicast_xmit_packets",
)
HW_COUNTERS = (
    "duplicate_request",
    "implied_nak_seq_err",
    "lifespan",
    "local_ack_timeout_err",
    "out_of_buffer",
    "out_of_sequence",
    "packet_seq_err",
    "req_cqe_error",
    "req_cqe_flush_error",
    "req_remote_access_errors",
    "req_remote_invalid_request",
    "resp_cqe_error",
    "resp_cqe_flush_error",
    "resp_local_length_error",
    "resp_remote_access_errors",
    "rnr_nak_retry_err",
    "rx_atomic_requests",
    "rx_read_requests",
    "rx_write_requests",
)
# What a port that has carried traffic shows, in place of 0.
TRAFFIC = {
    "port_rcv_data": "914735620448",
    "port_rcv_packets": "893296211",
    "port_xmit_data": "914801144276",
    "port_xmit_packets": "893360197",
    "unicast_rcv_packets": "893296203",
    "unicast_xmit_packets": "893360189",
    "lifespan": "10",
}
MODULES = {
    "ib_core": "",
    "ib_uverbs": "",
    "mlx5_core": "",
    "mlx5_ib": "",
    "nvidia": "580.82.07",
    "nvidia_peermem": "580.82.07",
}
HOLDERS = {"ib_core": ("ib_uverbs", "mlx5_ib", "nvidia_peermem"), "nvidia": ("nvidia_peermem",)}


def common(gpus: int) -> Tree:
    """What every node with so many GPUs has: an HCA and half of the GPUs behind each switch."""
    tree: Tree = {}
    if not gpus:
        return tree
    for number, bus in enumerate((0x15, 0x85)):
        tree |= _pcie_switch(number, bus, gpus // 2 + (number < gpus % 2))
        tree |= _hca(number)
    for module, version in MODULES.items():
        tree[f"module/{module}/initstate"] = "live\n"
        if version:
            tree[f"module/{module}/version"] = f"{version}\n"
    for module, holders in HOLDERS.items():
        for holder in holders:
            tree[f"module/{module}/holders/{holder}"] = Link(f"module/{holder}")
    return tree


def own(name: str, index: int, gpus: int) -> Tree:
    """What one node alone has: the identities of its HCAs."""
    tree: Tree = {}
    for number in range(HCAS if gpus else 0):
        device = hca_path(number)
        guid = f"a088:c203:00{index:02x}:{0x1000 + number:04x}"
        tree[f"{device}/node_guid"] = f"{guid}\n"
        tree[f"{device}/sys_image_guid"] = f"{guid}\n"
        tree[f"{device}/node_desc"] = f"{name} mlx5_{number}\n"
        tree[f"{device}/ports/1/lid"] = f"0x{16 + HCAS * index + number:x}\n"
        tree[f"{device}/ports/1/gids/0"] = f"fe80:0000:0000:0000:{guid}\n"
    return tree


def hca_path(number: int) -> str:
    """Where an HCA's directory really is, below /sys."""
    bus = (0x15, 0x85)[number]
    return f"{_behind(bus, 0)}/infiniband/mlx5_{number}"


def _behind(bus: int, slot: int) -> str:
    """The device in a slot of the PCIe switch below a root bus."""
    return (
        f"devices/pci0000:{bus:02x}/0000:{bus:02x}:01.0/0000:{bus + 1:02x}:00.0"
        f"/0000:{bus + 2:02x}:{slot:02x}.0/0000:{bus + 3 + slot:02x}:00.0"
    )


def _pcie_switch(numa: int, bus: int, gpus: int) -> Tree:
    nic = Path(_behind(bus, 0))
    upstream, root_port = nic.parents[1], nic.parents[2]
    tree = _pci_device(str(nic), numa, 0x020700, 0x15B3, 0x1021, "mlx5_core")
    tree |= _pci_device(str(nic.parent), numa, 0x060400, 0x1000, 0xC030, "pcieport")
    tree |= _pci_device(str(upstream), numa, 0x060400, 0x1000, 0xC030, "pcieport")
    tree |= _pci_device(str(root_port), numa, 0x060400, 0x8086, 0x352A, "pcieport")
    for slot in range(1, gpus + 1):
        gpu = Path(_behind(bus, slot))
        tree |= _pci_device(str(gpu), numa, 0x030200, 0x10DE, 0x2330, "nvidia")
        tree |= _pci_device(str(gpu.parent), numa, 0x060400, 0x1000, 0xC030, "pcieport")
    return tree


def _pci_device(path: str, numa: int, kind: int, vendor: int, device: int, driver: str) -> Tree:
    address = Path(path).name
    tree: Tree = {
        f"{path}/vendor": f"0x{vendor:04x}\n",
        f"{path}/device": f"0x{device:04x}\n",
        f"{path}/class": f"0x{kind:06x}\n",
        f"{path}/numa_node": f"{numa}\n",
        f"{path}/uevent": f"DRIVER={driver}\nPCI_CLASS={kind:X}\n"
        f"PCI_ID={vendor:04X}:{device:04X}\nPCI_SLOT_NAME={address}\n",
        f"{path}/config": _config_space(vendor, device, kind),
        f"{path}/driver": Link(f"bus/pci/drivers/{driver}"),
        f"{path}/subsystem": Link("bus/pci"),
        f"bus/pci/devices/{address}": Link(path),
        f"bus/pci/drivers/{driver}/{address}": Link(path),
    }
    for which in ("current", "max"):
        tree[f"{path}/{which}_link_speed"] = "32.0 GT/s PCIe\n"
        tree[f"{path}/{which}_link_width"] = "16\n"
    return tree


def _config_space(vendor: int, device: int, kind: int) -> bytes:
    """The 4096 bytes that root reads: the header and, on a bridge, ACS present and off."""
    space = bytearray(4096)
    struct.pack_into("<HH", space, 0x00, vendor, device)
    struct.pack_into("<I", space, 0x08, kind << 8)
    if kind == 0x060400:
        space[0x0E] = 1
        struct.pack_into("<IHH", space, 0x100, 0x0001_000D, 0x005F, 0x0000)
    return bytes(space)


def _hca(number: int) -> Tree:
    name, path = f"mlx5_{number}", hca_path(number)
    pci = str(Path(path).parents[1])
    port = f"{path}/ports/1"
    verbs = f"{pci}/infiniband_verbs/uverbs{number}"
    tree: Tree = {
        f"class/infiniband/{name}": Link(path),
        f"class/infiniband_verbs/uverbs{number}": Link(verbs),
        f"{path}/device": Link(pci),
        f"{path}/subsystem": Link("class/infiniband"),
        f"{path}/node_type": "1: CA\n",
        f"{path}/fw_ver": "28.39.1002\n",
        f"{path}/hca_type": "MT4129\n",
        f"{path}/hw_rev": "0\n",
        f"{path}/board_id": "MT_0000000838\n",
        f"{verbs}/device": Link(pci),
        f"{verbs}/ibdev": f"{name}\n",
        f"{verbs}/abi_version": "1\n",
        f"{verbs}/dev": f"231:{192 + number}\n",
        f"{port}/state": "4: ACTIVE\n",
        f"{port}/phys_state": "5: LinkUp\n",
        f"{port}/rate": "400 Gb/sec (4X NDR)\n",
        f"{port}/link_layer": "InfiniBand\n",
        f"{port}/sm_lid": "0x1\n",
        f"{port}/sm_sl": "0\n",
        f"{port}/lid_mask_count": "0\n",
        f"{port}/cap_mask": "0xa751e848\n",
        f"{port}/pkeys/0": "0xffff\n",
        f"{port}/pkeys/1": "0x0000\n",
        f"{port}/gids/1": "0000:0000:0000:0000:0000:0000:0000:0000\n",
        f"{port}/gid_attrs/types/0": "IB/RoCE v1\n",
    }
    for directory, names in (("counters", COUNTERS), ("hw_counters", HW_COUNTERS)):
        for counter in names:
            tree[f"{port}/{directory}/{counter}"] = TRAFFIC.get(counter, "0") + "\n"
    return tree


def write(tree: Tree, root: Path) -> None:
    """Create a tree in an empty directory."""
    made: set[str] = set()
    for path, value in tree.items():
        parent = os.path.dirname(path)  # noqa: PTH120 - thousands of them, and pathlib is slow
        if parent not in made:
            (root / parent).mkdir(parents=True, exist_ok=True)
            made.add(parent)
        _write_entry(root / path, path, value)


def hide_own_devices(root: Path) -> None:
    """Make the directories of OPAQUE in an overlay's layer hide those of the layers below."""
    for path in OPAQUE:
        (root / path).mkdir(parents=True, exist_ok=True)
        os.setxattr(root / path, "trusted.overlay.opaque", b"y")


def restore(tree: Tree, root: Path) -> None:
    """Put back what differs from the tree in a live /sys, and take away what was added."""
    for path, value in tree.items():
        if not _is_same(root / path, path, value):
            _remove(root / path)
            (root / path).parent.mkdir(parents=True, exist_ok=True)
            _write_entry(root / path, path, value)
    for base in {*OPAQUE, *(path.split("/infiniband/")[0] for path in tree if "/ports/" in path)}:
        for directory, names, files in os.walk(root / base):
            for name in (*names, *files):
                found = Path(directory, name)
                relative = str(found.relative_to(root))
                if relative not in tree and not any(p.startswith(f"{relative}/") for p in tree):
                    _remove(found)


def snapshot(upper: Path) -> dict[str, tuple[int, int]]:
    """What an overlay's upper directory holds: two are equal if nothing was changed between."""
    found: dict[str, tuple[int, int]] = {}
    for directory, names, files in os.walk(upper):
        for name in (*names, *files):
            status = os.lstat(os.path.join(directory, name))  # noqa: PTH118 - as in write()
            found[f"{directory}/{name}"] = (status.st_mtime_ns, status.st_size)
    return found


def _write_entry(place: Path, path: str, value: str | bytes | Link) -> None:
    if isinstance(value, Link):
        os.symlink(os.path.relpath(value.target, os.path.dirname(path)), place)  # noqa: PTH120, PTH211
    elif isinstance(value, bytes):
        place.write_bytes(value)
    else:
        place.write_text(value)


def _is_same(place: Path, path: str, value: str | bytes | Link) -> bool:
    if not os.path.lexists(place):
        return False
    if isinstance(value, Link):
        relative = os.path.relpath(value.target, os.path.dirname(path))  # noqa: PTH120
        return place.is_symlink() and str(place.readlink()) == relative
    # A test may have put a pipe there, to make a read hang: never open that.
    if place.is_symlink() or not stat.S_ISREG(place.stat().st_mode):
        return False
    return place.read_bytes() == (value.encode() if isinstance(value, str) else value)


def _remove(place: Path) -> None:
    if place.is_dir() and not place.is_symlink():
        shutil.rmtree(place)
    else:
        place.unlink(missing_ok=True)


Devices = Mapping[str, tuple[int, int]]


def devices(gpus: int) -> Devices:
    """A node's character devices: path below /dev, major and minor number."""
    found = {
        "null": (1, 3),
        "zero": (1, 5),
        "full": (1, 7),
        "random": (1, 8),
        "urandom": (1, 9),
        "tty": (5, 0),
        "ptmx": (5, 2),
    }
    if gpus:
        found |= {f"nvidia{gpu}": (195, gpu) for gpu in range(gpus)}
        found |= {"nvidiactl": (195, 255)}
        found |= {f"infiniband/uverbs{hca}": (231, 192 + hca) for hca in range(HCAS)}
    return found


def make_devices(wanted: Devices, dev: Path) -> None:
    """Make dev, a node's /dev, hold these devices; it may hold some of them already."""
    for link, target in (("fd", ""), ("stdin", "/0"), ("stdout", "/1"), ("stderr", "/2")):
        if not (dev / link).is_symlink():
            (dev / link).symlink_to(f"/proc/self/fd{target}")
    for directory, mode in (("pts", 0o755), ("shm", 0o1777), ("infiniband", 0o755)):
        (dev / directory).mkdir(exist_ok=True)
        (dev / directory).chmod(mode)
    for path, (major, minor) in wanted.items():
        if not (dev / path).exists():
            os.mknod(dev / path, stat.S_IFCHR | 0o666, os.makedev(major, minor))
            (dev / path).chmod(0o666)
    _remove_others(wanted, [*dev.glob("nvidia*"), *dev.glob("infiniband/*")], dev)


def _remove_others(wanted: Devices, found: Iterable[Path], dev: Path) -> None:
    for place in found:
        if str(place.relative_to(dev)) not in wanted:
            _remove(place)
