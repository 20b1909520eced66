from __future__ import annotations

import struct
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhealth import pci
from gpuhealth.pci import Device
from gpuhealth.source import Directory, Recording
from pcitree import (
    CLASS,
    DEVICES,
    GPUS,
    HCAS,
    at_root,
    below_switch,
    config,
    node,
    real,
    whole,
    without,
)

ROOT = ("pci0000:15", "0000:15:01.0")
UPSTREAM = (*ROOT, "0000:16:00.0")


def dev(*chain: str, numa: int | None = 0) -> Device:
    return Device(chain[-1], chain, numa)


GPU = dev(*UPSTREAM, "0000:17:01.0", "0000:19:00.0")


class TestChain:
    @pytest.mark.parametrize(
        ("path", "chain"),
        [
            (real(below_switch(0x15, 0)), below_switch(0x15, 0)),
            ("/sys/devices/pci0000:00/0000:00:02.0", ("pci0000:00", "0000:00:02.0")),
            # a subfunction of mlx5, and a class directory, belong to the function above them
            (
                "/sys/devices/pci0000:15/0000:15:01.0/0000:18:00.0/mlx5_core.sf.4/infiniband/mlx5_2",
                ("pci0000:15", "0000:15:01.0", "0000:18:00.0"),
            ),
            # behind a volume management device there is a host bridge of its own
            (
                "/sys/devices/pci0000:64/0000:64:05.5/pci10000:00/10000:00:01.0/10000:01:00.0",
                ("pci0000:64", "0000:64:05.5", "10000:00:01.0", "10000:01:00.0"),
            ),
            ("/sys/devices/virtual/infiniband/siw0", ()),
            ("/sys/devices/pci0000:00", ()),
            ("", ()),
        ],
    )
    def test_what_is_on_the_way(self, path: str, chain: tuple[str, ...]) -> None:
        assert pci.chain_of(path) == chain

    def test_through_the_links_of_a_real_tree(self, tmp_path: Path) -> None:
        place = tmp_path / real(below_switch(0x15, 0)).lstrip("/")
        (place / "infiniband" / "mlx5_0").mkdir(parents=True)
        (place / "numa_node").write_text("1\n")
        (place / "infiniband" / "mlx5_0" / "device").symlink_to("../..")
        classes = tmp_path / "sys/class/infiniband"
        classes.mkdir(parents=True)
        up = "../../devices" + str(place).split("/sys/devices")[1]
        (classes / "mlx5_0").symlink_to(f"{up}/infiniband/mlx5_0")
        devices = tmp_path / "sys/bus/pci/devices"
        devices.mkdir(parents=True)
        (devices / "0000:18:00.0").symlink_to("../" + up)
        (found,) = pci.hcas(Directory(str(tmp_path)), ["mlx5_0"])
        assert found == Device("mlx5_0", below_switch(0x15, 0), 1)
        assert found.address == "0000:18:00.0"


class TestDistance:
    @pytest.mark.parametrize(
        ("other", "expected"),
        [
            (dev(*UPSTREAM, "0000:17:00.0", "0000:18:00.0"), "PIX"),
            (dev(*UPSTREAM, "0000:17:01.0", "0000:19:00.1"), "PIX"),  # another function of it
            (
                dev(*UPSTREAM, "0000:17:02.0", "0000:1a:00.0", "0000:1b:00.0", "0000:1c:00.0"),
                "PXB",
            ),
            (dev(*ROOT, "0000:1e:00.0"), "PXB"),
            (dev("pci0000:15", "0000:15:02.0", "0000:1e:00.0"), "PHB"),
            (dev("pci0000:26", "0000:26:01.0", "0000:27:00.0"), "NODE"),
            (dev("pci0000:85", "0000:85:01.0", "0000:86:00.0", numa=1), "SYS"),
            (dev("pci0000:26", "0000:26:01.0", "0000:27:00.0", numa=None), None),
            # the host bridge is the same, whatever is known of NUMA
            (dev("pci0000:15", "0000:15:02.0", "0000:1e:00.0", numa=None), "PHB"),
            (Device("mlx5_9", error=5), None),
        ],
    )
    def test_as_nvidia_smi_names_it(self, other: Device, expected: str | None) -> None:
        assert pci.distance(GPU, other) == expected
        assert pci.distance(other, GPU) == expected

    def test_no_numa_nodes_are_one(self) -> None:
        one = dev("pci0000:00", "0000:00:02.0", numa=-1)
        other = dev("pci0000:40", "0000:40:02.0", numa=-1)
        assert pci.distance(one, other) == "NODE"

    def test_two_gpus_at_root_ports(self) -> None:
        one, other = dev("pci0000:00", "0000:00:02.0"), dev("pci0000:00", "0000:00:03.0")
        assert pci.distance(one, other) == "PHB"

    def test_the_nearest(self) -> None:
        near = dev(*UPSTREAM, "0000:17:00.0", "0000:18:00.0")
        far = dev("pci0000:85", "0000:85:01.0", "0000:86:00.0", numa=1)
        assert pci.nearest(GPU, [far, near, Device("mlx5_9", error=5)]) == ("PIX", (near,))
        assert pci.nearest(GPU, [Device("mlx5_9", error=5)]) is None

    @pytest.mark.parametrize(
        ("other", "bridges"),
        [
            (dev(*below_switch(0x15, 0)), ("0000:17:01.0", "0000:17:00.0")),
            (dev(*at_root(0x15)), (*below_switch(0x15, 1)[1:-1], "0000:15:02.0")),
            (dev(*at_root(0x85)), ()),
        ],
    )
    def test_bridges_up_to_the_common_one(self, other: Device, bridges: tuple[str, ...]) -> None:
        assert pci.bridges_between(dev(*below_switch(0x15, 1)), other) == bridges


def space(*capabilities: tuple[int, int, int]) -> str:
    """A config space with extended capabilities: offset, id, next."""
    found = bytearray(4096)
    struct.pack_into("<HH", found, 0, 0x1000, 0xC030)
    for offset, id, after in capabilities:
        struct.pack_into("<I", found, offset, id | 1 << 16 | after << 20)
    return found.decode("latin-1")


class TestAcs:
    @pytest.mark.parametrize("control", [0, 0x01, 0x1D, 0x5F, 0x7F])
    @pytest.mark.parametrize("offset", [0x100, 0x148, 0xF24])
    def test_the_control_word_wherever_it_is(self, control: int, offset: int) -> None:
        assert pci.acs_control(config(control, offset)) == control

    def test_a_bridge_without_it_redirects_nothing(self) -> None:
        assert pci.acs_control(config(None)) == 0
        assert pci.acs_control(config(0x1D)[:256]) == 0
        assert pci.acs_control(space((0x100, 1, 0x200), (0x200, 3, 0))) == 0

    @pytest.mark.parametrize(
        "text",
        [
            "",
            config(0x1D)[:64],  # what others than root are given
            "\xff" * 4096,  # off the bus
            config(0x1D, 0x300)[:0x200],
            config(0x1D)[:0x104],
            space((0x100, 1, 0x200), (0x200, 3, 0x100)),  # a loop
            space((0x100, 1, 0x100)),
            space((0x100, 1, 0x040)),  # back into the header
            space((0x100, 1, 0x200))[:0x200] + "\xff" * (4096 - 0x200),
        ],
        ids=[
            "empty",
            "header",
            "ones",
            "cut",
            "cut-inside",
            "loop",
            "itself",
            "header-again",
            "ones-later",
        ],
    )
    def test_what_cannot_be_told(self, text: str) -> None:
        assert pci.acs_control(text) is None

    @given(st.binary(max_size=4096))
    def test_any_bytes_end(self, data: bytes) -> None:
        found = pci.acs_control(data.decode("latin-1"))
        assert found is None or 0 <= found <= 0xFFFF

    @given(st.binary(min_size=3840, max_size=3840))
    def test_any_capabilities_end(self, data: bytes) -> None:
        found = pci.acs_control(config()[:256] + data.decode("latin-1"))
        assert found is None or 0 <= found <= 0xFFFF

    def test_bits_as_lspci_writes_them(self) -> None:
        assert pci.acs_text(0x1D) == "SrcValid+ ReqRedir+ CmpltRedir+ UpstreamFwd+"
        assert pci.acs_text(0) == "all off"


class TestGpus:
    def test_those_of_the_driver_in_order(self) -> None:
        found, error = pci.gpus(Recording(whole(node())))
        assert [gpu.name for gpu in found] == list(GPUS)
        assert error == 0

    def test_without_a_driver_the_display_controllers_of_nvidia(self) -> None:
        tree = without(node(), "/proc/driver")
        # an NVSwitch is NVIDIA's, and the board's own graphics are a display controller
        for bus, vendor, kind in (("05", "0x10de", "0x068000"), ("06", "0x1a03", "0x030000")):
            path = f"{DEVICES}/0000:{bus}:00.0"
            tree |= {f"{path}/vendor": vendor, f"{path}/class": kind}
        found, error = pci.gpus(Recording(whole(tree)))
        assert [gpu.name for gpu in found] == list(GPUS)
        assert error == 0

    def test_unreadable_is_not_none(self) -> None:
        tree = without(node(), "/proc/driver", DEVICES)
        found, error = pci.gpus(Recording({**whole(tree), f"{DEVICES}/": {"errno": "EIO"}}))
        assert (found, error) == ((), 5)


class TestMatrix:
    def test_as_people_read_it(self) -> None:
        lines = pci.matrix(Recording(whole(node()))).splitlines()
        assert lines[0].split() == ["NIC0", "NIC1", "NIC2", "NIC3", "NUMA", "PCI", "address"]
        rows = [line.split() for line in lines[1:9]]
        assert rows[0] == ["GPU0", "PIX", "PHB", "SYS", "SYS", "0", GPUS[0]]
        assert rows[3] == ["GPU3", "SYS", "SYS", "PIX", "PHB", "1", GPUS[3]]
        assert rows[4] == ["NIC0", "X", "PHB", "SYS", "SYS", "0", "0000:18:00.0"]
        assert [f"NIC{index} is {name}" for index, name in enumerate(HCAS)] == lines[10:14]

    def test_what_is_not_known_is_no_distance(self) -> None:
        tree = node()
        tree[f"{CLASS}/mlx5_0/device"] = {"errno": "EIO"}
        assert pci.matrix(Recording(whole(tree))).splitlines()[1].split()[1] == "?"

    def test_a_node_with_nothing(self) -> None:
        assert pci.matrix(Recording(whole({}))) == "no GPU and no HCA\n"
