from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhealth import check, portcounters
from gpuhealth.check import REGISTRY, Node
from gpuhealth.checks import counters
from gpuhealth.compiler import compile_policy
from gpuhealth.finding import DRAIN, HEALTHY, UNHEALTHY, UNKNOWN, WARN, Finding, drains
from gpuhealth.history import History, Stamp, advance
from gpuhealth.policy import Policy, Ports, Sku
from gpuhealth.source import Recording
from recorded import CLASS, PORTS, Entries, h100, port

SKU = Sku("h100", ports=Ports(names=PORTS))
NAME = "mlx5_4:1"
NOW_S = 100_000.0
DRAINING = Policy(checks={counters.COUNTERS: DRAIN, counters.FLAPS: DRAIN})


def with_counts(**values: Any) -> Entries:
    """The H100's files, with other counters of mlx5_4."""
    entries = h100()
    for name, value in values.items():
        folder = "counters" if name in portcounters._PMA else "hw_counters"
        entries[f"{port('mlx5_4')}/{folder}/{name}"] = (
            str(value) if isinstance(value, int) else value
        )
    return entries


def seen(*before: tuple[float, Mapping[str, int]]) -> History:
    """A history of stamps: how many seconds ago, and what mlx5_4 counted then."""
    stamps = []
    for ago_s, values in before:
        ports = portcounters.read_all(Node("gpu-1", Recording(h100()), SKU))
        ports[NAME] = {**ports[NAME], **values}
        stamps.append(Stamp(NOW_S - ago_s, ports))
    return History("boot", tuple(stamps))


def judge(
    id: str,
    entries: Entries,
    history: History,
    policy: Policy | None = DRAINING,
    sku: Sku | None = SKU,
    now_s: float = NOW_S,
) -> list[Finding]:
    node = Node("gpu-1", Recording(entries), sku, history=history, now_s=now_s)
    return check.soften(check.run(REGISTRY[id], node, policy))


def one(findings: list[Finding], name: str = NAME) -> Finding:
    (found,) = [finding for finding in findings if finding.object == name]
    return found


CALM = {"link_downed": 0}
TREE: Entries = {
    f"{port('mlx5_0')}/state": "4: ACTIVE",
    f"{port('mlx5_0')}/link_layer": "InfiniBand",
    f"{port('mlx5_0')}/counters/link_downed": "0",
}
CASES: list[
    tuple[str, Mapping[str, Any], tuple[tuple[float, Mapping[str, int]], ...], str, str]
] = [
    ("first look", {"link_downed": 7}, (), HEALTHY, "first look"),
    ("first look, at its greatest", {"link_downed": 255}, (), HEALTHY, "first look"),
    ("nothing new", {"link_downed": 7}, ((300, {"link_downed": 7}),), HEALTHY, "within limits"),
    ("one down", {"link_downed": 1}, ((300, CALM),), UNHEALTHY, "link_downed +1 in 300 s"),
    ("reset", {"link_downed": 0}, ((300, {"link_downed": 9}),), HEALTHY, "link_downed reset"),
    (
        "reset, then one down",
        {"link_downed": 1},
        ((400, {"link_downed": 9}), (300, CALM)),
        UNHEALTHY,
        "link_downed +1",
    ),
    (
        "saturated",
        {"link_downed": 255},
        ((300, {"link_downed": 255}),),
        HEALTHY,
        "can't tell: link_downed saturated at 255",
    ),
    (
        "on its way to saturation",
        {"link_downed": 255},
        ((300, {"link_downed": 254}),),
        UNHEALTHY,
        "link_downed +1",
    ),
    (
        "still seen 10 min on",
        {"link_downed": 1},
        ((900, CALM), (500, {"link_downed": 1})),
        UNHEALTHY,
        "+1",
    ),
    (
        "and then gone",
        {"link_downed": 1},
        ((900, CALM), (601, {"link_downed": 1})),
        HEALTHY,
        "within",
    ),
    ("missing before", {"link_downed": 1}, ((300, {}),), UNHEALTHY, "link_downed +1"),
    ("120 in an hour", {"symbol_error": 120}, ((3600, {"symbol_error": 0}),), HEALTHY, "within"),
    (
        "121 in an hour",
        {"symbol_error": 121},
        ((3600, {"symbol_error": 0}),),
        UNHEALTHY,
        "+121 in 3600",
    ),
    # Not 3600 an hour.
    ("2 in 2 s", {"symbol_error": 2}, ((2, {"symbol_error": 0}),), HEALTHY, "within"),
    ("121 in 2 s", {"symbol_error": 121}, ((2, {"symbol_error": 0}),), UNHEALTHY, "+121 in 2 s"),
    ("240 in two hours", {"symbol_error": 240}, ((7200, {"symbol_error": 0}),), HEALTHY, "within"),
    (
        "slowly, over many runs",
        {"symbol_error": 130},
        tuple((60.0 * ago, {"symbol_error": 130 - 2 * ago}) for ago in range(65, 0, -1)),
        HEALTHY,
        "within",
    ),
    (
        "faster, over many runs",
        {"symbol_error": 195},
        tuple((60.0 * ago, {"symbol_error": 195 - 3 * ago}) for ago in range(65, 0, -1)),
        UNHEALTHY,
        "symbol_error +180 in 3600 s",
    ),
    (
        "one counter can't be read",
        {"symbol_error": {"errno": "EINVAL"}},
        ((300, {}),),
        HEALTHY,
        "can't tell: symbol_error EINVAL",
    ),
    ("not there", {"symbol_error": {"errno": "ENOENT"}}, ((300, {}),), HEALTHY, "within"),
    ("no PMA", {"symbol_error": "N/A (no PMA)"}, ((300, {}),), HEALTHY, "within"),
    (
        "6 in a minute",
        {"link_error_recovery": 6},
        ((60, {"link_error_recovery": 0}),),
        UNHEALTHY,
        "+6",
    ),
    ("5 in a minute", {"link_error_recovery": 5}, ((60, {"link_error_recovery": 0}),), HEALTHY, ""),
    # On a healthy port these count as well: no limit unless the policy sets one.
    ("discards", {"port_xmit_discards": 900}, ((60, {"port_xmit_discards": 0}),), HEALTHY, ""),
    ("a receiver", {"rnr_nak_retry_err": 1}, ((60, {}),), UNHEALTHY, "rnr_nak_retry_err +1"),
]


@pytest.mark.parametrize(
    ("values", "before", "status", "observed"),
    [case[1:] for case in CASES],
    ids=[c[0] for c in CASES],
)
def test_counters(
    values: Mapping[str, Any],
    before: tuple[tuple[float, Mapping[str, int]], ...],
    status: str,
    observed: str,
) -> None:
    findings = judge(counters.COUNTERS, with_counts(**values), seen(*before))
    found = one(findings)
    print(f"{found.status:9} {found.object} {found.observed} | {found.expected} | {found.remedy}")
    assert (found.status, observed in found.observed) == (status, True)
    assert (found in drains(findings)) == (status == UNHEALTHY)
    assert all(other.status == HEALTHY for other in findings if other.object != NAME)
    assert len(findings) == len(PORTS)
    assert status == HEALTHY or (found.remedy and found.expected)


def test_by_default_nothing_is_drained() -> None:
    found = judge(counters.COUNTERS, with_counts(link_downed=1), seen((300, CALM)), Policy())
    assert one(found).action == WARN


@pytest.mark.parametrize(
    ("limits", "status"),
    [
        ({}, HEALTHY),
        ({"delta": 1}, HEALTHY),
        ({"delta": 0}, UNHEALTHY),
        ({"per_hour": 60}, HEALTHY),
    ],
)
def test_the_policy_s_limits_go_first(limits: dict[str, float], status: str) -> None:
    policy = Policy(thresholds={counters.COUNTERS: {"link_downed": limits}})
    found = judge(counters.COUNTERS, with_counts(link_downed=1), seen((300, CALM)), policy)
    assert one(found).status == status


def test_a_limit_where_there_is_none_by_default() -> None:
    policy = Policy(thresholds={counters.COUNTERS: {"port_xmit_discards": {"per_minute": 100}}})
    before = seen((60, {"port_xmit_discards": 0}))
    found = judge(counters.COUNTERS, with_counts(port_xmit_discards=900), before, policy)
    assert one(found).observed == "port_xmit_discards +900 in 60 s"
    assert one(found).expected == "at most 100 per minute"


@pytest.mark.parametrize("id", [counters.COUNTERS, counters.FLAPS])
def test_a_port_of_which_nothing_can_be_read(id: str) -> None:
    entries = h100()
    for path in entries:
        if path.startswith(port("mlx5_4") + "/") and "counters/" in path:
            entries[path] = {"errno": "EIO"}
    found = judge(id, entries, seen((300, {})))
    assert one(found).status == UNKNOWN
    assert drains(found) == []
    assert all(other.status == HEALTHY for other in found if other.object != NAME)


@pytest.mark.parametrize("id", [counters.COUNTERS, counters.FLAPS])
def test_a_port_that_has_no_counters(id: str) -> None:
    entries = {
        path: "N/A (no PMA)" if "/counters/" in path else text
        for path, text in h100().items()
        if "/hw_counters/" not in path
    }
    assert {finding.status for finding in judge(id, entries, History())} == {HEALTHY}


@pytest.mark.parametrize("id", [counters.COUNTERS, counters.FLAPS])
def test_what_rises_on_every_port_is_not_this_node_s(id: str) -> None:
    entries = h100()
    for name in PORTS:
        entries[f"{port(name.partition(':')[0])}/counters/link_downed"] = "3"
    before = History("boot", (Stamp(NOW_S - 300, dict.fromkeys(PORTS, CALM)),))
    found = judge(id, entries, before)
    assert {finding.status for finding in found} == {UNHEALTHY}
    assert drains(found) == []


def test_a_port_that_nobody_listed_drains_nothing() -> None:
    found = judge(
        counters.COUNTERS, with_counts(link_downed=1), seen((300, CALM)), DRAINING, Sku("other")
    )
    assert one(found).status == UNHEALTHY
    assert drains(found) == []


def test_the_recorded_node_is_healthy_at_every_look() -> None:
    history = History()
    for now_s in (10.0, 60.0, 700.0):
        for id in (counters.COUNTERS, counters.FLAPS):
            found = judge(id, h100(), history, now_s=now_s)
            assert [finding for finding in found if finding.status != HEALTHY] == []
        ports = portcounters.read_all(Node("gpu-1", Recording(h100()), SKU))
        history = advance(history, boot_id="a", now_s=now_s, ports=ports)


class TestFlaps:
    def flaps(self, value: Any, *before: tuple[float, int], **options: Any) -> Finding:
        history = seen(*[(ago_s, {"link_downed": count}) for ago_s, count in before])
        return one(judge(counters.FLAPS, with_counts(link_downed=value), history, **options))

    @pytest.mark.parametrize(
        ("value", "before", "status"),
        [
            (3, ((10_000, 0), (7000, 1), (4000, 2)), UNHEALTHY),
            (2, ((10_000, 0), (7000, 1), (4000, 2)), HEALTHY),
            # gpud PR#1247: the window passes, and so does the finding.
            (3, ((20_000, 0), (15_000, 1), (10_801, 2), (4000, 3)), HEALTHY),
            (3, ((20_000, 0), (15_000, 0), (10_799, 1), (4000, 3)), UNHEALTHY),
            # soperator#481: what has been counted since boot says nothing.
            (200, (), HEALTHY),
            (200, ((4000, 200),), HEALTHY),
            (3, ((5000, 9), (4000, 0), (2000, 1)), UNHEALTHY),
            (1, ((5000, 9), (4000, 0), (2000, 1)), HEALTHY),
            (255, ((4000, 255),), HEALTHY),
            (255, ((4000, 252),), UNHEALTHY),
            ({"errno": "EIO"}, ((4000, 0),), UNKNOWN),
            ({"errno": "ENOENT"}, ((4000, 0),), HEALTHY),
            ("N/A (no PMA)", ((4000, 0),), HEALTHY),
        ],
    )
    def test_three_in_three_hours(
        self, value: Any, before: tuple[tuple[float, int], ...], status: str
    ) -> None:
        found = self.flaps(value, *before)
        print(f"{found.status:9} {found.object} {found.observed} | {found.expected}")
        assert found.status == status

    def test_a_counter_that_has_stopped_says_so(self) -> None:
        assert "saturated at 255, can't tell" in self.flaps(255, (4000, 255)).observed

    def test_a_reboot_forgets_them(self) -> None:
        history = seen((7000, {"link_downed": 0}), (4000, {"link_downed": 2}))
        after = advance(history, boot_id="another", now_s=50.0)
        findings = judge(counters.FLAPS, with_counts(link_downed=3), after, now_s=60.0)
        assert one(findings).status == HEALTHY

    def test_a_resume_forgets_them(self) -> None:
        history = seen((7000, {"link_downed": 0}), (1000, {"link_downed": 3}))
        history = History("boot", history.stamps, resumed_s=NOW_S - 500)
        assert one(judge(counters.FLAPS, with_counts(link_downed=3), history)).status == HEALTHY

    def test_what_drains_says_when_and_how_often(self) -> None:
        found = self.flaps(4, (7200, 0))
        assert (found.observed, found.expected) == (
            "link_downed +4 in 2.0 h",
            "fewer than 3 in 3 h",
        )

    def test_the_policy_may_switch_it_off(self) -> None:
        off: dict[str, dict[str, float]] = {"link_downed": {}, "carrier_down_count": {}}
        history = seen((4000, {"link_downed": 0}))
        policy = Policy(thresholds={counters.FLAPS: off})
        assert judge(counters.FLAPS, with_counts(link_downed=9), history, policy) == []

    def test_the_carrier_of_roce_counts(self) -> None:
        path, sku = port("mlx5_9"), Sku("roce", ports=Ports(names=("mlx5_9:1",)))
        entries: Entries = {
            f"{path}/link_layer": "Ethernet",
            f"{path}/counters/link_downed": "0",
            f"{CLASS}/mlx5_9/device/net/ens1/carrier_down_count": "5",
        }
        old = {"mlx5_9:1": {"link_downed": 0, "carrier_down_count": 0}}
        history = History("boot", (Stamp(NOW_S - 40_000, old),))
        found = judge(counters.FLAPS, entries, history, sku=sku)
        assert [(f.status, f.observed) for f in found] == [
            (UNHEALTHY, "carrier_down_count +5 in 11.1 h")
        ]


@pytest.mark.parametrize("id", [counters.COUNTERS, counters.FLAPS])
@given(
    name=st.sampled_from(list(portcounters._PMA)),
    content=st.text(max_size=30) | st.integers(-1, 2**65).map(str),
    before=st.integers(0, 2**64 - 1),
)
def test_whatever_a_counter_says(id: str, name: str, content: str, before: int) -> None:
    entries = {**TREE, f"{port('mlx5_0')}/counters/{name}": content}
    history = History("a", (Stamp(NOW_S - 60, {"mlx5_0:1": {"link_downed": 0, name: before}}),))
    (found,) = judge(id, entries, history, sku=Sku("one", ports=Ports(names=("mlx5_0:1",))))
    assert found.object == "mlx5_0:1"
    assert found.status in (HEALTHY, UNHEALTHY, UNKNOWN)
    if found.status == UNHEALTHY:
        # Only a number that has grown is an error.
        assert int(content) > before
        assert (
            len(f"gpuhealth: {id} {found.object} {found.observed} expected {found.expected}") < 200
        )


@pytest.mark.parametrize(
    ("text", "limits"),
    [
        ("{per_hour: 50}", {"per_hour": 50}),
        ("null", {}),
        ("{delta: 3, window_s: 60}", {"delta": 3, "window_s": 60}),
    ],
)
def test_limits_as_people_write_them(text: str, limits: dict[str, float]) -> None:
    policy = compile_policy(f"thresholds: {{ib_counters.symbol_error: {text}}}", "f")
    found = check.thresholds_of(REGISTRY[counters.COUNTERS], policy)
    assert found == {**counters.LIMITS, "symbol_error": limits}


def test_every_limit_is_of_a_counter_that_is_read() -> None:
    assert {*counters.LIMITS, *counters.FLAP_LIMITS} <= set(portcounters.WIDTHS)
