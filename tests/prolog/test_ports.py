from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from gpuhealth import check
from gpuhealth.check import REGISTRY, Node
from gpuhealth.checks import ports
from gpuhealth.finding import DRAIN, HEALTHY, UNHEALTHY, UNKNOWN, Finding
from gpuhealth.history import History
from gpuhealth.policy import Policy, Ports, Sku
from gpuhealth.source import Recorder, Recording
from recorded import CLASS, HCAS, PORTS, Entries, h100, port, without

SKU = Sku("h100", ports=Ports(names=PORTS, rate_gbps=400, width=4, link_layer="InfiniBand"))
ONE = port("mlx5_4")


def judge(entries: Entries, sku: Sku = SKU, **options: Any) -> list[Finding]:
    node = Node("gpu-1", Recording(entries), sku, **options)
    return check.soften(check.run(REGISTRY[ports.ID], node, Policy()))


def sick(entries: Entries, sku: Sku = SKU, **options: Any) -> list[Finding]:
    return [one for one in judge(entries, sku, **options) if one.status != HEALTHY]


def files(**changed: Any) -> Callable[[Entries], Entries]:
    """A change of files of mlx5_4's port; None takes one away."""

    def mutate(entries: Entries) -> Entries:
        for name, text in changed.items():
            if text is None:
                del entries[f"{ONE}/{name}"]
            else:
                entries[f"{ONE}/{name}"] = text
        return entries

    return mutate


def everywhere(**changed: str) -> Callable[[Entries], Entries]:
    def mutate(entries: Entries) -> Entries:
        return {
            **entries,
            **{
                f"{port(f'mlx5_{number}')}/{name}": text
                for number in HCAS
                for name, text in changed.items()
            },
        }

    return mutate


@dataclass(frozen=True)
class Case:
    name: str
    mutate: Callable[[Entries], Entries]
    status: str
    object: str
    observed: str
    expected: str
    drains: bool = False
    sku: Sku = field(default=SKU)


def _ports(**options: Any) -> Sku:
    wanted = {"names": PORTS, "rate_gbps": 400, "width": 4, "link_layer": "InfiniBand", **options}
    return Sku("h100", ports=Ports(**wanted))


UP = "ACTIVE/LinkUp"
NAME = "mlx5_4:1"
CASES = [
    Case(
        "down",
        files(state="1: DOWN", phys_state="2: Polling"),
        UNHEALTHY,
        NAME,
        "DOWN/Polling",
        UP,
        True,
    ),
    Case(
        "disabled",
        files(state="1: DOWN", phys_state="3: Disabled"),
        UNHEALTHY,
        NAME,
        "DOWN/Disabled",
        UP,
        True,
    ),
    Case(
        "asleep",
        files(state="1: DOWN", phys_state="1: Sleep"),
        UNHEALTHY,
        NAME,
        "DOWN/Sleep",
        UP,
        True,
    ),
    Case("init", files(state="2: INIT"), UNHEALTHY, NAME, "INIT/LinkUp", UP, True),
    Case("armed", files(state="3: ARMED"), UNHEALTHY, NAME, "ARMED/LinkUp", UP, True),
    Case(
        "recovers",
        files(state="1: DOWN", phys_state="6: LinkErrorRecovery"),
        UNKNOWN,
        NAME,
        "DOWN/LinkErrorRecovery",
        UP,
    ),
    Case(
        "trains",
        files(state="1: DOWN", phys_state="4: PortConfigurationTraining"),
        UNKNOWN,
        NAME,
        "DOWN/PortConfigurationTraining",
        UP,
    ),
    Case(
        "active and recovers",
        files(phys_state="6: LinkErrorRecovery"),
        UNKNOWN,
        NAME,
        "ACTIVE/LinkErrorRecovery",
        UP,
    ),
    Case("deferred", files(state="5: ACTIVE_DEFER"), UNKNOWN, NAME, "ACTIVE_DEFER/LinkUp", UP),
    Case("state of nonsense", files(state="9: <unknown>"), UNKNOWN, NAME, "state '<unknown>'", UP),
    Case("state is empty", files(state=""), UNKNOWN, NAME, "state ''", UP),
    Case(
        "state can't be read",
        files(state={"errno": "EACCES"}),
        UNKNOWN,
        NAME,
        "state EACCES",
        "ACTIVE",
    ),
    Case("state hangs", files(state={"errno": "ETIMEDOUT"}), UNKNOWN, NAME, "state hung", "ACTIVE"),
    Case(
        "firmware is reset",
        files(state={"errno": "EINVAL"}),
        UNKNOWN,
        NAME,
        "state EINVAL",
        "ACTIVE",
    ),
    Case(
        "device has no driver",
        files(state={"errno": "ENODEV"}),
        UNKNOWN,
        NAME,
        "state ENODEV",
        "ACTIVE",
    ),
    Case(
        "phys_state can't be read",
        files(phys_state={"errno": "EIO"}),
        UNKNOWN,
        NAME,
        "phys_state EIO",
        "LinkUp",
    ),
    Case(
        "rate is that of HDR/2",
        files(rate="100 Gb/sec (2X HDR)"),
        UNHEALTHY,
        NAME,
        "2X",
        "4X",
        True,
    ),
    Case(
        "rate 100",
        files(rate="100 Gb/sec (4X EDR)"),
        UNHEALTHY,
        NAME,
        "100 Gb/sec",
        "400 Gb/sec",
        True,
    ),
    Case("width 1X", files(rate="100 Gb/sec (1X NDR)"), UNHEALTHY, NAME, "1X", "4X", True),
    Case("rate can't be read", files(rate={"errno": "EINVAL"}), UNKNOWN, NAME, "rate EINVAL", "4X"),
    Case("empty cage", files(rate="0 GB/sec"), UNKNOWN, NAME, "rate '0 GB/sec'", "4X"),
    Case("no link layer", files(link_layer=""), UNKNOWN, NAME, "link_layer empty", "InfiniBand"),
    Case(
        "other link layer",
        files(link_layer="Ethernet"),
        UNHEALTHY,
        NAME,
        "Ethernet",
        "InfiniBand",
        True,
    ),
    Case(
        "device missing",
        lambda e: without(e, f"{CLASS}/mlx5_4"),
        UNHEALTHY,
        NAME,
        "no such device",
        "present",
        True,
    ),
    Case(
        "ports/ is empty",
        lambda e: {**without(e, ONE), f"{CLASS}/mlx5_4/ports/": []},
        UNKNOWN,
        NAME,
        "no ports",
        "ACTIVE",
    ),
    Case(
        "ports/ can't be listed",
        lambda e: {
            **without(e, ONE),
            f"{ONE}/state": {"errno": "ENOENT"},
            f"{CLASS}/mlx5_4/ports/": {"errno": "EINVAL"},
        },
        UNKNOWN,
        NAME,
        "no ports",
        "ACTIVE",
    ),
    Case(
        "no subnet manager for one",
        files(sm_lid="0x0"),
        UNHEALTHY,
        NAME,
        "sm_lid 0x0",
        "one of the subnet's",
    ),
    Case("no LID", files(lid="0x0"), UNHEALTHY, NAME, "lid 0x0", "one of the subnet's"),
    Case(
        "permissive LID", files(lid="0xffff"), UNHEALTHY, NAME, "lid 0xffff", "one of the subnet's"
    ),
    Case(
        "P_Key missing",
        files(**{"pkeys/0": "0xffff", "pkeys/1": "0x0000"}),
        UNHEALTHY,
        NAME,
        "no P_Key 0x8001",
        "0x8001",
        True,
        _ports(names=(NAME,), pkeys=(0x8001,)),
    ),
    Case(
        "P_Keys can't be read",
        files(**{"pkeys/0": {"errno": "EIO"}}),
        UNKNOWN,
        NAME,
        "pkeys EIO",
        "0x8001",
        False,
        _ports(names=(NAME,), pkeys=(0x8001,)),
    ),
    Case(
        "another port number",
        lambda e: e,
        UNHEALTHY,
        "mlx5_4:2",
        "no such port (there: 1)",
        "present",
        True,
        _ports(names=("mlx5_4:2",)),
    ),
    Case(
        "a switch's own",
        lambda e: {**e, f"{CLASS}/mlx5_4/device/vpd": "V2 SW_MNG"},
        UNHEALTHY,
        NAME,
        "a switch's own device (SW_MNG)",
        "an HCA",
        True,
    ),
]


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_one_thing_wrong(case: Case) -> None:
    found = sick(case.mutate(h100()), case.sku)
    assert [
        (one.status, one.object, one.observed, one.expected, one.action == DRAIN) for one in found
    ] == [
        (case.status, case.object, case.observed, case.expected, one.action == DRAIN)
        for one in found[:1]
    ]
    (one,) = found
    assert (one.action == DRAIN and one.status == UNHEALTHY and not one.systemic) is case.drains
    assert one.remedy or one.status == UNKNOWN


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    rows = [("what is wrong", "status", "object", "observed", "expected", "remedy")]
    for case in CASES:
        (one,) = sick(case.mutate(h100()), case.sku)
        rows.append((case.name, one.status, one.object, one.observed, one.expected, one.remedy))
    with capsys.disabled():
        print()
        for row in rows:
            print("{:24} {:9} {:9} {:32} {:20} {}".format(*row))
    assert len({row[0] for row in rows}) == len(CASES) + 1


HEALTHY_CASES: dict[str, Callable[[Entries], Entries]] = {
    "as recorded": lambda e: e,
    # imbue-ai/cluster-health#4: IPoIB isn't configured; the net devices say "down" or aren't there.
    "net device down": files(**{"gid_attrs/ndevs/0": ""}),
    # The bond and a port that nobody listed are not asked for.
    "an unlisted port down": lambda e: {**e, f"{port('mlx5_bond_0')}/state": "1: DOWN"},
    "an unlisted device gone": lambda e: without(e, f"{CLASS}/mlx5_bond_0"),
    "an unlisted device without ports": lambda e: {
        **without(e, port("mlx5_bond_0")),
        f"{CLASS}/mlx5_bond_0/ports/": [],
    },
    "an unlisted port that can't be read": lambda e: {
        **e,
        f"{port('mlx5_bond_0')}/state": {"errno": "EIO"},
    },
    # NVIDIA/NVSentinel#1361: a frontend port that nothing is plugged into.
    "an unused Ethernet port": lambda e: {
        **e,
        f"{port('mlx5_12')}/state": "1: DOWN",
        f"{port('mlx5_12')}/phys_state": "3: Disabled",
        f"{port('mlx5_12')}/link_layer": "Ethernet",
    },
    # Azure/azhpc-diagnostics#59: a device that tools choke on.
    "a device with nothing in it": lambda e: {**e, f"{CLASS}/mlx5_an0/fw_ver": ""},
    "faster than it must be": files(rate="800 Gb/sec (4X XDR)"),
    "a subnet manager": files(lid="0x12", sm_lid="0x1"),
    "no counters at all": lambda e: {p: t for p, t in e.items() if "counters/" not in p},
    "counters that can't be read": lambda e: {
        p: {"errno": "EINVAL"} if "counters/" in p else t for p, t in e.items()
    },
}


@pytest.mark.parametrize("name", HEALTHY_CASES)
def test_what_is_no_fault(name: str) -> None:
    found = judge(HEALTHY_CASES[name](h100()))
    assert [one.object for one in found] == list(PORTS)
    assert {one.status for one in found} == {HEALTHY}


SYSTEMIC: dict[str, Callable[[Entries], Entries]] = {
    "the subnet manager is away": everywhere(state="2: INIT"),
    "every device is gone": lambda e: {p: t for p, t in e.items() if "bond" in p},
    "no device at all": lambda e: {f"{CLASS}/": []},
    "no driver": lambda e: {"/sys/class/": ["net"]},
}


@pytest.mark.parametrize("name", SYSTEMIC)
def test_what_befalls_every_port_at_once_only_warns(name: str) -> None:
    found = sick(SYSTEMIC[name](h100()))
    assert found
    assert {one.status for one in found} == {UNHEALTHY}
    assert not [one for one in found if one.action == DRAIN]


@pytest.mark.parametrize("state", ["1: DOWN", "2: INIT"])
def test_seven_of_eight_is_no_fault_of_the_subnets(state: str) -> None:
    entries = everywhere(state=state, phys_state="5: LinkUp")(h100())
    entries[f"{ONE}/state"] = "4: ACTIVE"
    found = sick(entries)
    assert len(found) == 7
    assert {one.action for one in found} == {DRAIN}


def test_every_port_down_is_this_nodes_fault() -> None:
    # A rail may be down for a whole fabric: that is what the cap is for.
    found = sick(everywhere(state="1: DOWN", phys_state="2: Polling")(h100()))
    assert {one.action for one in found} == {DRAIN}


@pytest.mark.parametrize(
    ("seen", "status"),
    [
        ({}, UNKNOWN),
        ({f"ib_port {NAME} gone": (1000.0, 1000.0)}, UNKNOWN),
        ({f"ib_port {NAME} gone": (900.0, 960.0)}, UNHEALTHY),
        ({"ib_port mlx5_5:1 gone": (900.0, 960.0)}, UNKNOWN),
    ],
    ids=["first", "just now", "for a while", "another one"],
)
@pytest.mark.parametrize("error", ["EINVAL", "ENODEV", "ENOENT"])
def test_a_device_that_does_not_come_back(
    seen: dict[str, tuple[float, float]], status: str, error: str
) -> None:
    entries = files(state={"errno": error})(h100())
    (one,) = sick(entries, history=History(seen=seen), now_s=1010.0)
    assert one.status == status


def test_without_a_list_of_ports_none_is_judged() -> None:
    assert judge(h100(), Sku("h100")) == []


@pytest.mark.parametrize(
    ("answer", "status"),
    [
        ({"active_mtu": 2048}, UNHEALTHY),
        ({"active_mtu": 4096}, HEALTHY),
        ({"active_mtu": "x"}, HEALTHY),
        ({"error": "no such device"}, HEALTHY),
        (None, HEALTHY),
    ],
)
def test_the_active_mtu_where_libibverbs_was_asked(answer: Any, status: str) -> None:
    found = judge(h100(), _ports(names=(NAME,), mtu_bytes=4096), verbs={"mlx5_4": answer})
    assert [one.status for one in found] == [status]


def test_a_limited_device_is_not_touched() -> None:
    entries = {**h100(), f"{CLASS}/mlx5_4/device/vpd": "V2 SW_MNG"}
    looked: list[str] = []
    source = Recorder(Recording(entries), before=looked.append)
    list(ports.ib_port(Node("gpu-1", source, SKU)))
    assert f"{port('mlx5_5')}/state" in looked
    assert not [key for key in looked if key.startswith(f"{CLASS}/mlx5_4/ports")]


STATES = st.sampled_from(
    ["4: ACTIVE", "1: DOWN", "2: INIT", "", "4:ACTIVE", "4: ACTIVE "]
) | st.text(max_size=6)


@settings(max_examples=300, deadline=None)
@given(
    st.dictionaries(
        st.sampled_from(["state", "phys_state", "rate", "link_layer", "lid", "sm_lid"]),
        STATES
        | st.sampled_from(["EIO", "EINVAL", "ENODEV", "ENOENT", "ETIMEDOUT"]).map(
            lambda name: {"errno": name}
        ),
        min_size=1,
    )
)
def test_whatever_a_port_shows(changed: dict[str, Any]) -> None:
    found = judge(files(**changed)(h100()))
    (one,) = [item for item in found if item.object == NAME]
    state = changed.get("state", "4: ACTIVE")
    if state != "4: ACTIVE":
        # "4: ACTIVE" and nothing else is what the kernel writes of a port that works.
        assert one.status != HEALTHY
    assert not [item for item in found if item.check == ports.ID and item.object == "check"]
