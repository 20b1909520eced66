from __future__ import annotations

import pytest

from gpuhealth import check
from gpuhealth.check import REGISTRY, Node
from gpuhealth.checks import hung
from gpuhealth.finding import DRAIN, UNHEALTHY, UNKNOWN, drains
from gpuhealth.history import History
from gpuhealth.policy import Policy
from gpuhealth.source import Recording

DEVICE = "/sys/class/infiniband/mlx5_3"


@pytest.mark.parametrize(
    ("place", "since_s", "status", "drain"),
    [
        (DEVICE, None, UNKNOWN, False),
        (DEVICE, 59, UNKNOWN, False),
        (DEVICE, 60, UNHEALTHY, True),
        ("nvml", 61, UNHEALTHY, True),
        # Every node mounts it: no reason to drain them one after the other.
        ("/scratch", 600, UNHEALTHY, False),
    ],
)
def test_hung_twice_is_broken(place: str, since_s: float | None, status: str, drain: bool) -> None:
    now_s = 1000.0
    seen = {} if since_s is None else {f"hung {place}": (now_s - since_s, now_s - since_s)}
    node = Node("gpu-1", Recording({}), history=History(seen=seen), now_s=now_s, hung=(place,))
    found = check.soften(check.run(REGISTRY[hung.ID], node, Policy()))
    assert [(one.object, one.status) for one in found] == [(place, status)]
    assert bool(drains(found)) is drain


def test_what_hung_before_and_answers_now_is_healthy() -> None:
    history = History(seen={f"hung {DEVICE}": (0.0, 100.0)})
    assert list(hung.hung(Node("gpu-1", Recording({}), history=history, now_s=200.0))) == []
    assert REGISTRY[hung.ID].action == DRAIN
