"""Whole nodes, and one thing wrong with them at a time: what does an admin read?"""

from __future__ import annotations

import json
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from gpuhealth.check import PROLOG, Job
from gpuhealth.compiler import compile_policy
from gpuhealth.examination import Request, examine_recording
from gpuhealth.finding import HEALTHY, UNHEALTHY, UNKNOWN, Finding
from gpuhealth.history import History, Stamp
from gpuhealth.nvml import Nvml, to_dict
from gpuhealth.policy import Policy
from nvml_values import h200
from pcitree import CLASS, DEVICES, GPUS, SWITCHES, below_switch, config, node, whole, without
from recorded import Entries

NOW_S = 90_000.0
NAME = "mlx5_0:1"
PORT = f"{CLASS}/mlx5_0/ports/1"
COUNTERS = {"link_downed": 0, "symbol_error": 12, "port_rcv_errors": 14}

TEXT = """
skus:
  h100-ndr:
    match: {nodes: gpu-1}
    gpus: 4
    nvlinks: 18
    gpudirect: any
    distance: PIX
    ports:
      names: ["mlx5_0:1", "mlx5_2:1"]
      rate_gbps: 400
      width: 4
      link_layer: InfiniBand
"""
BOND = """
skus:
  roce:
    match: {nodes: gpu-1}
    ports: {names: ["mlx5_bond_0:1"], link_layer: Ethernet}
"""


def tree(driver: str = "open", peermem: bool = True) -> Entries:
    """A healthy node with four GPUs, open module and nvidia_peermem, and its ports' counters."""
    entries = node(driver, peermem)
    for number in range(4):
        for name, count in COUNTERS.items():
            entries[f"{CLASS}/mlx5_{number}/ports/1/counters/{name}"] = str(count)
    return entries


def history(**changed: int) -> History:
    """What the last run saw, 10 minutes ago."""
    ports = {f"mlx5_{number}:1": {**COUNTERS} for number in (0, 2)}
    ports[NAME].update(changed)
    return History(boot_id="boot", stamps=(Stamp(NOW_S - 600, ports),))


def examine(
    entries: Mapping[str, Any],
    policy: Policy | None = None,
    before: History | None = None,
    gpus: dict[str, Any] | None = None,
    **options: Any,
) -> list[Finding]:
    request = Request(
        "gpu-1", policy or compile_policy(TEXT, "f"), history=before or history(), **options
    )
    recording = {
        "gpuhealth": {"schema": 1},
        "nvml": to_dict(h200(4)) if gpus is None else gpus,
        **whole(entries),
    }
    return [
        one
        for one in examine_recording(request, recording, NOW_S).findings
        if one.status != HEALTHY
    ]


Change = Callable[[Entries], Entries]


def put(**changed: Any) -> Change:
    """Files of mlx5_0's port."""
    return lambda entries: {**entries, **{f"{PORT}/{name}": text for name, text in changed.items()}}


def also(path: str, text: Any) -> Change:
    return lambda entries: {**entries, path: text}


def count(**changed: Any) -> Change:
    return put(**{f"counters/{name}": value for name, value in changed.items()})


def cut(*paths: str) -> Change:
    return lambda entries: without(entries, *paths)


BRIDGE = below_switch(SWITCHES[0], 0)[3]
PEERMEM = ("/sys/module/nvidia_peermem", "/sys/module/ib_core/holders/nvidia_peermem")


@dataclass(frozen=True)
class Case:
    """One thing wrong: what every finding that isn't healthy has to say."""

    name: str
    change: Change
    status: str
    check: str
    object: str
    observed: str
    expected: str
    action: str
    before: History = field(default_factory=history)
    start: Callable[[], Entries] = tree


CASES = [
    Case("port down", put(state="1: DOWN", phys_state="2: Polling"), UNHEALTHY, "ib_port", NAME, "DOWN/Polling", "ACTIVE/LinkUp", "drain"),
    Case("port disabled", put(state="1: DOWN", phys_state="3: Disabled"), UNHEALTHY, "ib_port", NAME, "DOWN/Disabled", "ACTIVE/LinkUp", "drain"),
    Case("no subnet manager for it", put(state="2: INIT"), UNHEALTHY, "ib_port", NAME, "INIT/LinkUp", "ACTIVE/LinkUp", "drain"),
    Case("rate 100", put(rate="100 Gb/sec (4X EDR)"), UNHEALTHY, "ib_port", NAME, "100 Gb/sec", "400 Gb/sec", "drain"),
    Case("width 1X", put(rate="100 Gb/sec (1X NDR)"), UNHEALTHY, "ib_port", NAME, "1X", "4X", "drain"),
    Case("ports/ empty", lambda e: {**without(e, PORT), f"{CLASS}/mlx5_0/ports/": []}, UNKNOWN, "ib_port", NAME, "no ports", "ACTIVE", "drain"),
    Case("file unreadable", put(state={"errno": "EIO"}), UNKNOWN, "ib_port", NAME, "state EIO", "ACTIVE", "drain"),
    Case("link_downed +1", count(link_downed="1"), UNHEALTHY, "ib_counters", NAME, "link_downed", "", "warn"),
    Case("peermem gone, proprietary module", cut(*PEERMEM), UNHEALTHY, "gpudirect", "RDMA", "no nvidia_peermem; no DMA-BUF: proprietary", "", "drain", start=lambda: tree("proprietary")),
    Case("ACS on", also(f"{DEVICES}/{BRIDGE}/config", config(0x1D)), UNHEALTHY, "acs", BRIDGE, "ReqRedir+", "", "warn"),
    Case("PCIe width of the HCA", also(f"{CLASS}/mlx5_0/device/current_link_width", "8"), UNHEALTHY, "hca_pcie", "mlx5_0", "x8", "x16", "warn"),
    Case("no uverbs node", cut("/dev/infiniband/uverbs0"), UNHEALTHY, "ib_uverbs", "mlx5_0", "", "", "drain"),
]  # fmt: skip

FINE: dict[str, tuple[Change, History, Callable[[], Entries]]] = {
    "as it was": (lambda e: e, history(), tree),
    "first look": (lambda e: e, History(boot_id="boot"), tree),
    "counter reset": (count(symbol_error="0"), history(), tree),
    "counter saturated before and after": (
        count(link_downed="255"),
        history(link_downed=255),
        tree,
    ),
    "boot changed": (count(link_downed="3"), History(boot_id="another boot"), tree),
    "an unlisted port down": (
        also(f"{CLASS}/mlx5_1/ports/1/state", "1: DOWN"),
        history(),
        tree,
    ),
    "peermem gone, open module": (cut(*PEERMEM), history(), tree),
    "proprietary module with peermem": (lambda e: e, history(), lambda: tree("proprietary")),
    "ACS validates sources only": (
        also(f"{DEVICES}/{BRIDGE}/config", config(0x01)),
        history(),
        tree,
    ),
    "no counters (no PMA)": (count(symbol_error="N/A (no PMA)"), history(), tree),
}


@pytest.mark.parametrize("case", CASES, ids=[case.name for case in CASES])
def test_one_thing_wrong(case: Case) -> None:
    found = examine(case.change(case.start()), before=case.before)
    wrong = [one for one in found if one.check == case.check]
    assert len(wrong) == 1, found
    (one,) = wrong
    assert (one.status, one.object, one.action) == (case.status, case.object, case.action)
    assert case.observed in one.observed
    assert case.expected in one.expected
    assert one.expected
    assert one.remedy or one.status == UNKNOWN
    # Nothing else is blamed for it.
    assert not [other for other in found if other.check not in (case.check, "ib_counters")]


def test_the_table(capsys: pytest.CaptureFixture[str]) -> None:
    with capsys.disabled():
        print()
        for case in CASES:
            for one in examine(case.change(case.start()), before=case.before):
                print(
                    f"{case.name:34} {one.status:9} {one.check} {one.object}: {one.observed}, "
                    f"expected {one.expected} ({one.action}); {one.remedy}"
                )
    assert CASES


@pytest.mark.parametrize("name", FINE)
def test_what_is_no_fault(name: str) -> None:
    change, before, start = FINE[name]
    assert examine(change(start()), before=before) == []


def test_a_bonds_leg_down() -> None:
    entries = tree()
    port = f"{CLASS}/mlx5_bond_0/ports/1"
    for path, text in entries.copy().items():
        if path.startswith(f"{CLASS}/mlx5_3/"):
            entries[path.replace("mlx5_3", "mlx5_bond_0")] = text
    entries |= {
        f"{port}/link_layer": "Ethernet",
        f"{port}/gids/3": "0000:0000:0000:0000:0000:ffff:0a01:0203",
        f"{port}/gid_attrs/types/3": "RoCE v2",
        f"{port}/gid_attrs/ndevs/3": "bond0",
        f"{CLASS}/mlx5_bond_0/device/net/bond0/mtu": "9000",
        "/sys/class/net/bond0/bonding/slaves": "eth1 eth2",
        "/sys/class/net/bond0/bonding/mii_status": "up",
        "/sys/class/net/bond0/carrier": "1",
        "/sys/class/net/bond0/operstate": "up",
        "/sys/class/net/bond0/mtu": "9000",
        "/sys/class/net/eth1/carrier": "1",
        "/sys/class/net/eth2/carrier": "0",
    }
    policy = compile_policy(BOND, "f")
    (one,) = [f for f in examine(entries, policy, gpus={}) if f.check == "roce"]
    assert one.status == UNHEALTHY
    assert one.object == "mlx5_bond_0:1"
    assert "eth2" in one.observed
    entries["/sys/class/net/eth2/carrier"] = "1"
    assert not [f for f in examine(entries, policy, gpus={}) if f.check == "roce"]


@pytest.mark.parametrize("missing", [3, 0])
def test_a_gpu_gone(missing: int) -> None:
    gpus = [replace(gpu, pci=GPUS[gpu.index]) for gpu in h200(4).gpus]
    gone = Nvml(driver="580.82.07", gpus=tuple(g for g in gpus if g.index != missing))
    found = examine(tree(), gpus=to_dict(gone))
    assert [(one.check, one.status, one.action) for one in found if one.check == "gpu_count"] == [
        ("gpu_count", UNHEALTHY, "drain")
    ]
    assert GPUS[missing] in found[0].object + found[0].observed


def test_a_prolog_says_the_same() -> None:
    entries = put(state="1: DOWN")(tree())
    job = Job(id=1, uid=1, gpus=("0",))
    found = examine(entries, context=PROLOG, job=job)
    assert [(one.check, one.object) for one in found] == [("ib_port", NAME)]


WHOLE = whole(tree())
FILES = sorted(path for path, entry in WHOLE.items() if isinstance(entry, str))
TREES = int(os.environ.get("GPUHEALTH_TREES", "200"))
CONTENTS = st.binary(max_size=40) | st.sampled_from(
    [b"1: DOWN", b"4: ACTIVE", b"N/A (no PMA)", b"255", b"-1", b"0x", b"9" * 40, b"\xff", b""]
)
FAILURES = st.sampled_from(["EIO", "EINVAL", "ENODEV", "EACCES", "ENOENT", "ETIMEDOUT"])


@settings(max_examples=TREES, deadline=None, suppress_health_check=list(HealthCheck))
@given(
    st.dictionaries(
        st.sampled_from(FILES),
        CONTENTS.map(lambda data: data.decode("utf-8", "replace"))
        | FAILURES.map(lambda name: {"errno": name}),
        min_size=1,
        max_size=6,
    )
)
def test_any_bytes_in_any_file(changed: dict[str, Any]) -> None:
    """No exception whatever a node shows, and no port is healthy that can't be read."""
    request = Request("gpu-1", compile_policy(TEXT, "f"), history=history())
    recording = {"gpuhealth": {}, "nvml": to_dict(h200(4)), **WHOLE, **changed}
    done = examine_recording(request, recording, NOW_S)
    assert not [one for one in done.findings if one.object == "check"]
    for device in ("mlx5_0", "mlx5_2"):
        state = changed.get(f"{CLASS}/{device}/ports/1/state", "4: ACTIVE")
        if state not in ("4: ACTIVE", "4: ACTIVE\n"):
            (one,) = [
                f for f in done.findings if f.object == f"{device}:1" and f.check == "ib_port"
            ]
            assert one.status != HEALTHY
            assert done.verdict != HEALTHY


class TestH200:
    """Two real H200s with the open kernel module, in a virtual machine without HCAs."""

    RECORDING = Path(__file__).with_name("data") / "h200-x2.json"

    def examine(self, text: str, **changed: Any) -> dict[tuple[str, str], Finding]:
        recording = {**json.loads(self.RECORDING.read_text()), **changed}
        request = Request("node", compile_policy(f"skus: {{h200: {{{text}}}}}", "f"))
        return {(f.check, f.object): f for f in examine_recording(request, recording).findings}

    def test_healthy_where_no_infiniband_is_expected(self) -> None:
        found = self.examine('match: {gpu: "NVIDIA H200"}, gpus: 2, nvlinks: 18, persistence: true')
        assert {one.status for one in found.values()} == {HEALTHY}
        assert {check for check, _ in found} >= {"gpu_count", "gpu_ecc", "nvlink", "gpu_remap"}

    def test_unhealthy_by_name_where_eight_ports_are(self) -> None:
        names = [f"mlx5_{number}:1" for number in range(8)]
        found = self.examine(f'match: {{gpu: "NVIDIA H200"}}, ports: {{names: {names}}}')
        one = found[("ib_port", "all ports")]
        assert (one.status, one.observed) == (UNHEALTHY, "no HCA")
        assert all(name in one.expected for name in names)

    @pytest.mark.parametrize(
        ("lines", "status", "observed"),
        [
            ("CONFIG_PCI=y", UNHEALTHY, "no DMA-BUF: kernel without CONFIG_PCI_P2PDMA"),
            ("CONFIG_PCI=y\nCONFIG_PCI_P2PDMA=y", HEALTHY, "DMA-BUF"),
        ],
        ids=["as recorded", "with P2PDMA"],
    )
    def test_dma_buf_of_the_open_module(self, lines: str, status: str, observed: str) -> None:
        text = 'match: {gpu: "NVIDIA H200"}, gpudirect: any, ports: {names: ["mlx5_0:1"]}'
        one = self.examine(text, **{"/proc/config.gz": lines})[("gpudirect", "RDMA")]
        assert one.status == status
        assert observed in one.observed

    def test_more_gpus_expected(self) -> None:
        found = self.examine("match: {nodes: node}, gpus: 4")
        assert found[("gpu_count", "GPUs")].status == UNHEALTHY

    def test_it_tells_nothing_of_where_it_was_made(self) -> None:
        text = self.RECORDING.read_text()
        assert "00000000-0000-0000-0000-000000000001" in text
        assert '"hostname"' not in text
