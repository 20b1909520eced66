from __future__ import annotations

from typing import Any

import pytest

from gpuhealth import environment
from gpuhealth.check import Node
from gpuhealth.policy import Ports, Sku
from gpuhealth.source import Recording
from recorded import CLASS, PORTS, h100, port, without


def values(entries: dict[str, Any], *names: str) -> dict[str, str]:
    sku = Sku("h100", ports=Ports(names=names)) if names else None
    found = environment.variables(Node("gpu-1", Recording(entries), sku))
    assert all(reason for _, _, reason in found)
    return {name: value for name, value, _ in found}


def test_the_ports_that_the_policy_lists() -> None:
    assert values(h100(), "mlx5_1:1", "mlx5_0") == {"NCCL_IB_HCA": "=mlx5_1:1,mlx5_0:1"}


def test_a_device_that_the_node_lacks_is_not_named() -> None:
    assert values(without(h100(), f"{CLASS}/mlx5_1"), "mlx5_0:1", "mlx5_1:1") == {
        "NCCL_IB_HCA": "=mlx5_0:1"
    }


def test_without_a_policy_the_active_infiniband_ports() -> None:
    assert values(h100()) == {"NCCL_IB_HCA": "=" + ",".join(PORTS)}


def test_a_port_that_is_down_is_left_out() -> None:
    entries = {**h100(), f"{port('mlx5_5')}/state": "1: DOWN"}
    assert "mlx5_5" not in values(entries)["NCCL_IB_HCA"]


@pytest.mark.parametrize(
    "entries",
    [
        {},
        {f"{CLASS}/": []},
        {f"{CLASS}/": {"errno": "EIO"}},
        {f"{port('mlx5_0')}/state": "4: ACTIVE", f"{port('mlx5_0')}/link_layer": "InfiniBand"},
        {f"{port('mlx5_0')}/state": "4: ACTIVE", f"{port('mlx5_0')}/link_layer": "Ethernet"},
    ],
    ids=["not recorded", "no HCA", "unreadable", "InfiniBand alone", "Ethernet alone"],
)
def test_what_nccl_finds_best_itself_is_not_set(entries: dict[str, Any]) -> None:
    assert values(entries) == {}


def test_a_switchs_own_port_is_never_named() -> None:
    entries = {**h100(), f"{CLASS}/mlx5_9/device/vpd": "V2 SW_MNG"}
    assert "mlx5_9" not in values(entries)["NCCL_IB_HCA"]
