from __future__ import annotations

import pytest

from gpuhealth.checks import pcie
from gpuhealth.finding import HEALTHY, UNHEALTHY, UNKNOWN, Finding
from gpuhealth.policy import Ports, Sku
from pcitree import CLASS, DEVICES, HCAS, Entries, below_switch, judge, node, ports, without
from recorded import h100

LINK = f"{CLASS}/mlx5_0/device"
STATED = ports(pcie={"hca": {"width": 16, "speed_gts": 32}})
ABOVE = below_switch(0x15, 0)[3]


def sick(tree: Entries, sku: Sku) -> list[Finding]:
    return [one for one in judge(pcie.ID, tree, sku) if one.status != HEALTHY]


@pytest.mark.parametrize("sku", [STATED, ports()])
class TestLink:
    def test_at_its_best(self, sku: Sku) -> None:
        found = judge(pcie.ID, node(), sku)
        assert [(one.object, one.status) for one in found] == [(name, HEALTHY) for name in HCAS]
        assert found[0].observed == "x16 32 GT/s"

    @pytest.mark.parametrize(
        ("file", "text", "observed"),
        [
            ("current_link_width", "8", "x8 32 GT/s"),
            ("current_link_width", "1", "x1 32 GT/s"),
            ("current_link_speed", "2.5 GT/s PCIe", "x16 2.5 GT/s"),
            ("current_link_speed", "16.0 GT/s PCIe", "x16 16 GT/s"),
            ("current_link_speed", "8 GT/s", "x16 8 GT/s"),  # as kernels before 5.9 write it
        ],
    )
    def test_narrower_or_slower(self, sku: Sku, file: str, text: str, observed: str) -> None:
        (found,) = sick({**node(), f"{LINK}/{file}": text}, sku)
        assert (found.object, found.status, found.action) == ("mlx5_0", UNHEALTHY, "warn")
        assert (found.observed, found.expected) == (observed, "x16 32 GT/s")

    def test_unreadable(self, sku: Sku) -> None:
        (found,) = sick({**node(), f"{LINK}/current_link_width": {"errno": "EIO"}}, sku)
        assert (found.status, found.observed) == (UNKNOWN, "current_link_width EIO")

    def test_one_unreadable_value_hides_no_other(self, sku: Sku) -> None:
        tree = {
            **node(),
            f"{LINK}/current_link_width": {"errno": "EIO"},
            f"{LINK}/current_link_speed": "2.5 GT/s PCIe",
        }
        (found,) = sick(tree, sku)
        assert found.status == UNHEALTHY


class TestBestOfBothEnds:
    def test_a_slot_that_can_do_no_more_is_not_at_fault(self) -> None:
        tree = {
            **node(),
            f"{LINK}/current_link_width": "8",
            f"{DEVICES}/{ABOVE}/max_link_width": "8",
        }
        assert sick(tree, ports()) == []

    def test_but_the_policy_counts(self) -> None:
        tree = {
            **node(),
            f"{LINK}/current_link_width": "8",
            f"{DEVICES}/{ABOVE}/max_link_width": "8",
        }
        assert [one.status for one in sick(tree, STATED)] == [UNHEALTHY]

    def test_more_than_the_policy_asks_for_is_fine(self) -> None:
        sku = ports(pcie={"hca": {"width": 8, "speed_gts": 16}})
        assert sick(node(), sku) == []


@pytest.mark.parametrize("text", ["Unknown", "0", "63", "255", "", "x16", "١٦"])
def test_a_virtual_link(text: str) -> None:
    tree = {**node(), f"{LINK}/current_link_width": text, f"{LINK}/max_link_width": text}
    assert sick(tree, ports()) == []
    assert [one.status for one in sick(tree, STATED)] == [UNKNOWN]


def test_no_link_at_all() -> None:
    tree = without(
        node(), *(f"{LINK}/{w}_link_{x}" for w in ("current", "max") for x in ("width", "speed"))
    )
    assert [one.object for one in judge(pcie.ID, tree, ports())] == list(HCAS[1:])


def test_only_listed_hcas() -> None:
    tree = {**node(), f"{LINK}/current_link_width": "1"}
    assert sick(tree, ports("mlx5_1", "mlx5_2")) == []
    assert judge(pcie.ID, tree, None) == []


def test_two_ports_are_one_link() -> None:
    sku = Sku("x", ports=Ports(names=("mlx5_0:1", "mlx5_0:2")))
    assert [one.object for one in judge(pcie.ID, node(), sku)] == ["mlx5_0"]


def test_by_address() -> None:
    sku = Sku("x", ports=Ports(names=("0000:18:00.0:1",)))
    assert [one.object for one in judge(pcie.ID, node(), sku)] == ["mlx5_0"]


def test_a_recording_without_it() -> None:
    assert judge(pcie.ID, h100(), ports("mlx5_0")) == []
