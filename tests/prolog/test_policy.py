from __future__ import annotations

import contextlib
import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhealth import policy
from gpuhealth.policy import Cap, Policy, Ports, Sku

FULL = Policy(
    skus=(
        Sku(
            name="h100",
            nodes="gpu-[1-64]",
            gpu="NVIDIA H100 80GB HBM3",
            gpus=8,
            ports=Ports(names=("mlx5_0:1",), rate_gbps=400.0, width=4, pkeys=(0x8001,)),
            versions={"driver": "580.*"},
            pcie={"gpu": {"width": 16.0}},
            mounts=("/scratch",),
        ),
        Sku(name="a100", gpu="NVIDIA A100-SXM4-80GB"),
    ),
    checks={"xid": "off"},
    thresholds={"ib_counters": {"symbol_error": {"per_hour": 60.0}}},
    max_drained=Cap(count=2, percent=None),
    report_dir="/shared/health",
)


def test_what_is_written_is_read_again() -> None:
    assert policy.load(policy.dump(FULL)) == FULL
    assert policy.load(policy.dump(Policy())) == Policy()


@pytest.mark.parametrize(
    ("node", "gpu", "sku"),
    [
        ("gpu-1", "NVIDIA H100 80GB HBM3", "h100"),
        ("gpu-1", "NVIDIA H200", None),
        ("gpu-1", None, None),
        ("gpu-65", "NVIDIA H100 80GB HBM3", None),
        ("gpu-65", "NVIDIA A100-SXM4-80GB", "a100"),
    ],
)
def test_a_node_is_of_the_first_sku_that_it_matches(
    node: str, gpu: str | None, sku: str | None
) -> None:
    found = FULL.sku_of(node, gpu)
    assert (found.name if found else None) == sku


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{}",
        "[]",
        "null",
        '{"schema": 99}',
        '{"schema": 1}',
        '{"schema": 1, "skus": 3, "max_drained": {}}',
        '{"schema": 1, "skus": [{"name": "x"}], "max_drained": {}}',
        '{"schema": 1, "skus": [], "max_drained": {"many": 1}}',
        policy.dump(FULL)[:-20],
    ],
)
def test_what_is_no_policy_is_a_value_error(text: str) -> None:
    with pytest.raises(ValueError, match="gpuhealth compile"):
        policy.load(text)


@given(
    st.recursive(
        st.none() | st.booleans() | st.integers() | st.text(max_size=3),
        lambda inner: (
            st.lists(inner, max_size=3)
            | st.dictionaries(
                st.sampled_from(["schema", "skus", "max_drained", "ports", "name", "checks"]),
                inner,
                max_size=4,
            )
        ),
        max_leaves=8,
    )
)
def test_no_json_raises_anything_else(value: object) -> None:
    if isinstance(value, dict):
        value["schema"] = policy.SCHEMA
    with contextlib.suppress(ValueError):
        policy.load(json.dumps(value))
