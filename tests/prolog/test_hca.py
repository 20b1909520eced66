from __future__ import annotations

from typing import Any, ClassVar

import pytest

from gpuhealth import hca
from gpuhealth.check import Node
from gpuhealth.history import History
from gpuhealth.policy import Ports, Sku
from gpuhealth.source import Recorder, Recording

CLASS = "/sys/class/infiniband"


def node(entries: dict[str, Any], *names: str, **options: Any) -> Node:
    return Node("gpu-1", Recording(entries), Sku("x", ports=Ports(names=names)), **options)


@pytest.mark.parametrize(
    ("name", "found"),
    [
        ("mlx5_0:1", ("mlx5_0", 1)),
        ("mlx5_0", ("mlx5_0", 1)),
        ("mlx5_bond_0:2", ("mlx5_bond_0", 2)),
        ("ibp12s0:1", ("ibp12s0", 1)),
        ("rocep24s0f1", ("rocep24s0f1", 1)),
        ("0000:18:00.0:1", ("0000:18:00.0", 1)),
        ("0000:18:00.0", ("0000:18:00.0", 1)),
        ("0000:9A:00.1:2", ("0000:9a:00.1", 2)),
    ],
)
def test_names_of_ports(name: str, found: tuple[str, int]) -> None:
    assert hca.split_name(name) == found


@pytest.mark.parametrize(
    "name",
    [
        "",
        ":1",
        "mlx5_0:",
        "mlx5_0:0",
        "mlx5_0:256",
        "mlx5_0:x",
        "../x:1",
        "a/b:1",
        "..:1",
        "mlx5_0:²",
    ],
)
def test_what_is_no_port(name: str) -> None:
    with pytest.raises(ValueError, match="is no port like"):
        hca.split_name(name)


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("400 Gb/sec (4X NDR)", (400.0, 4)),
        ("2.5 Gb/sec (1X SDR)", (2.5, 1)),
        ("10 Gb/sec (4X)", (10.0, 4)),
        ("800 Gb/sec (4X XDR)", (800.0, 4)),
        ("0 GB/sec", (None, None)),
        ("100 Gb/sec", (100.0, None)),
        ("", (None, None)),
        ("<unknown>", (None, None)),
        ("400 Gb/sec (4X NDR) and more", (None, None)),
    ],
)
def test_rates(text: str, found: tuple[float | None, int | None]) -> None:
    assert hca.parse_rate(text) == found


class TestAddresses:
    ENTRIES: ClassVar[dict[str, Any]] = {
        f"{CLASS}/": ["ibp12s0", "mlx5_1"],
        f"{CLASS}/ibp12s0/device": {"link": "/sys/devices/pci0000:15/0000:18:00.0"},
        f"{CLASS}/mlx5_1/device": {"link": "/sys/devices/pci0000:15/0000:9A:00.0"},
    }

    def test_a_port_by_its_address(self) -> None:
        ports = hca.listed_ports(node(self.ENTRIES, "0000:9a:00.0:1", "0000:18:00.0"))
        assert [(port.device, port.number) for port in ports] == [("mlx5_1", 1), ("ibp12s0", 1)]

    def test_an_address_that_nothing_has(self) -> None:
        (port,) = hca.listed_ports(node(self.ENTRIES, "0000:3b:00.0:1"))
        assert port.device is None
        assert not port.error

    def test_an_address_that_may_be_one_of_what_cannot_be_read(self) -> None:
        entries = {**self.ENTRIES, f"{CLASS}/mlx5_1/device": {"errno": "EIO"}}
        (port,) = hca.listed_ports(node(entries, "0000:9a:00.0:1"))
        assert port.device is None
        assert port.error


class TestLimited:
    VPD = f"{CLASS}/mlx5_8/device/vpd"

    @pytest.mark.parametrize(
        ("vpd", "limited"),
        [
            ("\x82\x1eNVIDIA\x90V2\x06SW_MNG\x00", True),
            ("\x82\x1eNVIDIA ConnectX-7", False),
            ("", False),
            ({"errno": "EIO"}, False),
            ({"errno": "ENOENT"}, False),
        ],
    )
    def test_a_switchs_own_device_says_so_in_its_vpd(self, vpd: Any, limited: bool) -> None:
        assert hca.is_limited(node({self.VPD: vpd}), "mlx5_8") is limited

    def test_it_is_read_once_a_boot(self) -> None:
        looked: list[str] = []
        source = Recorder(Recording({}), before=looked.append)
        known = History(full_function=("mlx5_0",))
        looker = Node("gpu-1", source, history=known)
        assert not hca.is_limited(looker, "mlx5_0")
        assert not looked
        hca.is_limited(looker, "mlx5_8")
        assert looked == [self.VPD]
