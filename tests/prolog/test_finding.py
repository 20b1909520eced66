from __future__ import annotations

from dataclasses import replace

import pytest

from gpuhealth import finding
from gpuhealth.finding import DRAIN, HEALTHY, UNHEALTHY, UNKNOWN, Finding

GOOD = finding.healthy("ib_port", "mlx5_0:1", "ACTIVE")
BAD = finding.unhealthy("ib_port", "mlx5_0:1", "DOWN", "ACTIVE", "look at the cable")
UNSEEN = finding.unknown("ib_port", "mlx5_0:1", "hung")


@pytest.mark.parametrize(
    ("findings", "verdict"),
    [
        ([], HEALTHY),
        ([GOOD], HEALTHY),
        ([GOOD, UNSEEN], UNKNOWN),
        ([UNSEEN, BAD, GOOD], UNHEALTHY),
    ],
)
def test_the_worst_is_the_verdict(findings: list[Finding], verdict: str) -> None:
    assert finding.verdict(findings) == verdict


@pytest.mark.parametrize(
    ("one", "drains"),
    [
        (replace(BAD, action=DRAIN), True),
        (BAD, False),
        (replace(BAD, action=DRAIN, systemic=True), False),
        (replace(UNSEEN, action=DRAIN), False),
        (replace(GOOD, action=DRAIN), False),
    ],
)
def test_only_what_is_known_to_be_this_nodes_fault_drains(one: Finding, drains: bool) -> None:
    assert bool(finding.drains([one])) is drains
