from __future__ import annotations

from gpuhealth import proposal
from gpuhealth.compiler import compile_policy
from gpuhealth.examination import Request, examine_recording
from gpuhealth.policy import Ports
from gpuhealth.source import Recording
from recorded import CLASS, PORTS, h100, port

MODEL = "/proc/driver/nvidia/gpus/0000:18:00.0/information"


def test_a_healthy_nodes_proposal_calls_it_healthy() -> None:
    entries = {**h100(), MODEL: "Model: \t\t NVIDIA H100 80GB HBM3\nIRQ: 1"}
    text = proposal.propose(Recording(entries), "gpu-1", None)
    (sku,) = compile_policy(text, "f").skus
    assert sku.name == "h100-80gb-hbm3"
    assert sku.gpu == "NVIDIA H100 80GB HBM3"
    assert sku.ports == Ports(PORTS, 400.0, 4, "InfiniBand")
    policy = compile_policy(text, "f")
    done = examine_recording(Request("gpu-1", policy, only=("ib_port",)), entries)
    assert done.verdict == "healthy"


def test_what_is_left_out_is_said() -> None:
    entries = {
        **h100(),
        f"{port('mlx5_5')}/state": "1: DOWN",
        f"{CLASS}/mlx5_9/device/vpd": "V2 SW_MNG",
    }
    text = proposal.propose(Recording(entries), "gpu-1", None)
    assert "# left out: mlx5_5:1: DOWN, InfiniBand" in text
    assert "# left out: mlx5_9: a switch's own (SW_MNG)" in text
    assert "# left out: mlx5_bond_0:1: Ethernet, 200 Gb/sec (2X NDR)" in text


def test_a_node_with_nothing_in_it() -> None:
    text = proposal.propose(Recording({f"{CLASS}/": []}), "cpu-1", None)
    (sku,) = compile_policy(text, "f").skus
    assert sku.nodes == "cpu-1"
    assert sku.ports is None


def test_the_first_week_only_warns() -> None:
    policy = compile_policy(proposal.propose(Recording(h100()), "gpu-1", None), "f")
    assert set(policy.checks.values()) == {"warn"}
