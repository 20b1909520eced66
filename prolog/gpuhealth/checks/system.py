"""What is neither a GPU nor a port: modules, versions, mounts, the clock, RDMA's device nodes."""

from __future__ import annotations

import errno
import re
from collections.abc import Iterator
from dataclasses import replace
from typing import Optional

from gpuhealth import hca
from gpuhealth.check import PERIODIC, PROLOG, Node, check
from gpuhealth.finding import DRAIN, Finding, healthy, unhealthy, unknown
from gpuhealth.reading import NOT_RECORDED, Reading
from gpuhealth.source import Source

MODULES = "/sys/module"
RELEASE = "/proc/sys/kernel/osrelease"
MOUNTS = "/proc/self/mounts"
VERBS = "/sys/class/infiniband_verbs"
_MELLANOX = "0x15b3"


@check(
    "rdma_modules",
    "kernel modules that RDMA needs, loaded or built in",
    gpu=False,
)
def rdma_modules(node: Node) -> Iterator[Finding]:
    """Judge the modules that the listed ports need, and those that the policy names."""
    wanted = list(_rdma_modules(node)) if node.policy.ports is not None else []
    wanted += [name.replace("-", "_") for name in node.policy.modules]
    if not wanted:
        return
    loaded = node.source.names(MODULES)
    if loaded.error:
        # Where there is no list of modules at all, this is no node's /sys.
        if loaded.unreadable and loaded.error != NOT_RECORDED:
            yield unknown("rdma_modules", MODULES, loaded.why, ", ".join(wanted))
        return
    missing = [name for name in dict.fromkeys(wanted) if name not in loaded.names]
    builtin = _builtin(node.source) if missing else Reading("")
    names = (builtin.text or "").split()
    for name in missing:
        if name in names:
            continue
        if builtin.text is None:
            # Without the list of what is built in, a module that is not there may still be.
            yield unknown("rdma_modules", name, f"modules.builtin {builtin.why}", "loaded")
            continue
        remedy = f"modprobe {name}, and look in dmesg for why it isn't loaded at boot"
        yield unhealthy("rdma_modules", name, "not loaded, not built in", "loaded", remedy)
    if all(name in names for name in missing):
        yield healthy("rdma_modules", "modules", ", ".join(dict.fromkeys(wanted)))


def _rdma_modules(node: Node) -> Iterator[str]:
    yield from ("ib_core", "ib_uverbs")
    ports = hca.listed_ports(node)
    if any(_is_mlx5(node.source, port) for port in ports):
        yield from ("mlx5_core", "mlx5_ib")


def _is_mlx5(source: Source, port: hca.ListedPort) -> bool:
    """Whether a port's device is mlx5's, by its vendor, or where it is missing by its name."""
    if port.device is not None:
        vendor = source.read(f"{hca.CLASS}/{port.device}/device/vendor").text
        return port.device.startswith("mlx5") if vendor is None else vendor == _MELLANOX
    address, _ = hca.split_name(port.name)
    return source.read(f"/sys/bus/pci/devices/{address}/vendor").text == _MELLANOX


def _builtin(source: Source) -> Reading:
    """Return the names of the modules that are part of the kernel itself, separated by blanks.

    /lib/modules/RELEASE/modules.builtin has a path a line (linux:Documentation/kbuild/kbuild.rst).
    """
    release = source.read(RELEASE)
    if release.text is None:
        return release
    if not re.fullmatch(r"[\w.+~-]+", release.text):
        return Reading(error=errno.EBADMSG)
    listed = source.lines(f"/lib/modules/{release.text}/modules.builtin", ("kernel/",))
    if listed.text is None:
        return listed
    names = (line.rpartition("/")[2].partition(".ko")[0] for line in listed.text.splitlines())
    return Reading(" ".join(name.replace("-", "_") for name in names))


@check(
    "ib_uverbs",
    "for each listed HCA the device node that programs open: /dev/infiniband/uverbs*",
    action=DRAIN,
    gpu=False,
)
def ib_uverbs(node: Node) -> Iterator[Finding]:
    """Judge whether the listed HCAs can be opened by programs."""
    id = "ib_uverbs"
    devices = dict.fromkeys(port.device for port in hca.listed_ports(node) if port.device)
    present = node.source.names(hca.CLASS).names
    wanted = [device for device in devices if device in present]
    if not wanted:
        return  # what isn't there is for the check of ports to say
    listed = node.source.names(VERBS)
    if listed.absent or not (listed.error or listed.names):
        # A tree that shows the HCAs and nothing else of the kernel says nothing of this.
        if not node.source.names(MODULES).error:
            remedy = "modprobe ib_uverbs"
            finding = unhealthy(id, "all HCAs", "no uverbs", f"{len(wanted)} uverbs", remedy)
            yield replace(finding, systemic=True)
        return
    if listed.error:
        if listed.error != NOT_RECORDED:
            yield unknown(id, "all HCAs", f"{VERBS} {listed.why}", f"{len(wanted)} uverbs")
        return
    nodes: dict[str, str] = {}
    unread: Optional[Reading] = None
    for name in listed.names:
        if not re.fullmatch(r"uverbs[0-9]+", name):
            continue  # abi_version
        owner = node.source.read(f"{VERBS}/{name}/ibdev")
        if owner.text is None:
            unread = owner
        else:
            nodes[owner.text] = name
    for device in wanted:
        yield _node(node.source, device, nodes.get(device), unread)


def _node(source: Source, device: str, name: Optional[str], unread: Optional[Reading]) -> Finding:
    id = "ib_uverbs"
    if name is None:
        if unread is not None:
            return unknown(id, device, f"ibdev {unread.why}", "a uverbs device")
        remedy = "reload mlx5_ib and ib_uverbs, and look in dmesg"
        return unhealthy(id, device, "no uverbs device", "one", remedy)
    path = f"/dev/infiniband/{name}"
    kind = source.kind(path)
    if kind.unreadable:
        return unknown(id, device, f"{path} {kind.why}", "a character device")
    if kind.text == "char":
        return healthy(id, device, path)
    remedy = "let udev make it anew: udevadm trigger --subsystem-match=infiniband_verbs"
    observed = f"no {path}" if kind.absent else f"{path} is a {kind.text}"
    return unhealthy(id, device, observed, "a character device", remedy)


@check(
    "versions",
    "driver, kernel, OFED and firmware against the policy",
    contexts=(PROLOG, PERIODIC),
    gpu=False,
)
def versions(node: Node) -> Iterator[Finding]:
    """Judge what the policy states versions of."""
    for what, expected in node.policy.versions.items():
        if what == "firmware":
            for device in dict.fromkeys(port.device for port in hca.listed_ports(node)):
                if device is not None:
                    found = node.source.read(f"{hca.CLASS}/{device}/fw_ver")
                    yield _version(f"firmware of {device}", found, expected, "flash the HCA")
        elif what == "driver":
            yield _version("driver", _driver(node.source), expected, "install that driver")
        elif what == "kernel":
            found = node.source.read(RELEASE)
            yield _version("kernel", found, expected, "boot that kernel")
        elif what == "ofed":
            # The kernel's own mlx5_core has no version.
            found = node.source.read(f"{MODULES}/mlx5_core/version")
            yield _version("ofed", found, expected, "install that OFED and reload its modules")


def _driver(source: Source) -> Reading:
    found = source.read(f"{MODULES}/nvidia/version")
    if found.text is not None:
        return found
    text = source.read("/proc/driver/nvidia/version")
    number = re.search(r"\b[0-9]{3,}\.[0-9.]*[0-9]\b", text.text or "")
    if number:
        return Reading(number[0])
    return text if text.unreadable else found


def _version(what: str, found: Reading, expected: str, remedy: str) -> Finding:
    if found.unreadable:
        return unknown("versions", what, found.why, expected)
    have = (found.text or "").strip()
    prefix = expected[:-1] if expected.endswith("*") else None
    if have and (have == expected if prefix is None else have.startswith(prefix)):
        return healthy("versions", what, have, expected)
    observed = have[:60] if have else "none"
    return unhealthy("versions", what, observed, expected, f"{remedy}, or correct the policy")


@check("mounts", "file systems that the policy says are mounted", gpu=False, action=DRAIN)
def mounts(node: Node) -> Iterator[Finding]:
    """Judge whether each of the policy's places is a mount point.

    A place that mounts itself when it is used (autofs) counts as mounted.
    """
    wanted = node.policy.mounts
    if not wanted:
        return
    # By lines, since one read of this file gives a page of it only.
    listed = node.source.lines(MOUNTS, ("",))
    if listed.text is None:
        yield unknown("mounts", MOUNTS, listed.why, ", ".join(wanted)[:80])
        return
    places = {}
    for line in listed.text.splitlines():
        fields = line.split(" ")
        if len(fields) >= 3:
            places[_unescaped(fields[1])] = fields[2]
    for place in wanted:
        kind = places.get(place.rstrip("/") or "/")
        if kind is None:
            remedy = f"mount {place}, and look in the journal for why it isn't mounted at boot"
            yield unhealthy("mounts", place, "not mounted", "mounted", remedy)
        else:
            yield healthy("mounts", place, kind)


def _unescaped(text: str) -> str:
    """Return a path of /proc/mounts as it is: blanks are written there as ``\\040``."""
    return re.sub(r"\\([0-7]{3})", lambda found: chr(int(found[1], 8)), text)


@check("clock", "whether the clock is synchronised", contexts=(PERIODIC,), gpu=False)
def clock(node: Node) -> Iterator[Finding]:
    """Judge the clock where systemd-timesyncd keeps it; others leave no file that tells.

    It touches ``synchronized`` once it has set the clock (systemd-timesyncd.service(8)).
    """
    found = node.source.names("/run/systemd/timesync")
    if "synchronized" in found.names:
        yield healthy("clock", "systemd-timesyncd", "synchronised")
    elif not found.error:
        yield unhealthy(
            "clock",
            "systemd-timesyncd",
            "not synchronised since boot",
            "synchronised",
            "look at timedatectl timesync-status: no time server has answered",
        )
