from __future__ import annotations

import errno
from typing import Any

import pytest

from gpuhealth import portcounters
from gpuhealth.check import Node
from gpuhealth.history import History, Stamp
from gpuhealth.policy import Ports, Sku
from gpuhealth.portcounters import MISSING, RESET, SATURATED, WIDTHS, delta, parse, rise
from gpuhealth.reading import HUNG, Reading
from gpuhealth.source import Entries, Recorder, Recording
from recorded import CLASS, PORTS, h100, port


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("0", 0),
        ("255", 255),
        (" 12\n", 12),
        ("18446744073709551615", 2**64 - 1),
        ("18446744073709551616", None),
        ("9" * 5000, None),
        ("-1", None),
        ("+1", None),
        ("1_000", None),
        ("1.5", None),
        ("0x10", None),
        ("٣", None),
        ("²", None),
        ("N/A (no PMA)", None),
        ("", None),
        ("\0\0", None),
    ],
)
def test_a_value_or_why_there_is_none(text: str, value: int | None) -> None:
    found, why = parse(Reading(text))
    assert found == value
    assert bool(why) == (value is None)


@pytest.mark.parametrize("error", [errno.EINVAL, errno.ENOENT, errno.EIO, HUNG])
def test_an_unreadable_counter_has_no_value(error: int) -> None:
    assert parse(Reading(error=error)) == (None, Reading(error=error).why)


# gpud's dump of a healthy H100 shows all of these at their greatest value.
@pytest.mark.parametrize(
    ("name", "greatest"),
    [
        ("link_downed", 255),
        ("port_xmit_discards", 65535),
        ("excessive_buffer_overrun_errors", 15),
        ("port_xmit_wait", 4294967295),
    ],
)
class TestGreatestValue:
    def test_nobody_can_tell(self, name: str, greatest: int) -> None:
        assert delta(greatest, greatest, WIDTHS[name]) == SATURATED

    def test_the_way_there_counts(self, name: str, greatest: int) -> None:
        assert delta(greatest - 3, greatest, WIDTHS[name]) == 3

    def test_back_from_there_is_a_reset(self, name: str, greatest: int) -> None:
        assert delta(greatest, 0, WIDTHS[name]) == RESET


@pytest.mark.parametrize(
    ("before", "after", "found"),
    [(3, 3, 0), (3, 5, 2), (5, 3, RESET), (None, 3, MISSING), (3, None, MISSING), (300, 300, 0)],
)
def test_delta(before: int | None, after: int | None, found: int | str) -> None:
    assert delta(before, after, 8) == found


@pytest.mark.parametrize(
    ("series", "since_s", "count", "interval_s", "why"),
    [
        ([(0, 1)], 0, 0, 0, MISSING),
        ([(0, 1), (10, 4)], 0, 3, 10, ""),
        # The step may have been before the window began: nobody looked in between.
        ([(0, 1), (100, 4)], 90, 3, 100, ""),
        ([(0, 1), (50, 4), (100, 4)], 60, 0, 50, ""),
        ([(0, 5), (10, 8), (20, 0), (30, 2)], 0, 5, 30, RESET),
        ([(0, 255), (10, 255)], 0, 0, 10, SATURATED),
        ([(0, 253), (10, 255), (20, 255)], 0, 2, 20, SATURATED),
        ([(0, 255), (10, 255), (20, 0), (30, 1)], 0, 1, 30, RESET),
    ],
)
def test_rise(
    series: list[tuple[float, int]], since_s: float, count: int, interval_s: float, why: str
) -> None:
    found = rise(series, 8, since_s)
    assert (found.count, found.interval_s, found.why) == (count, interval_s, why)


def test_nothing_from_before_a_resume_counts() -> None:
    stamps = tuple(Stamp(at_s, {"mlx5_0:1": {"link_downed": 1}}) for at_s in (10.0, 20.0, 30.0))
    history = History("a", stamps, resumed_s=20.0)
    found = portcounters.series(history, "mlx5_0:1", "link_downed", 40.0, 2)
    assert found == [(20.0, 1), (30.0, 1), (40.0, 2)]


ONE = port("mlx5_4")


@pytest.mark.parametrize(
    ("content", "why"),
    [
        # node_exporter#966, procfs#704, a file that is not there, a device that hangs.
        ("N/A (no PMA)", "N/A"),
        ({"errno": "EINVAL"}, "EINVAL"),
        ({"errno": "ENOENT"}, "absent"),
        ({"errno": "ETIMEDOUT"}, "hung"),
        ("-1", "'-1'"),
    ],
)
@pytest.mark.parametrize("name", ["VL15_dropped", "link_downed", "rnr_nak_retry_err"])
def test_one_bad_counter_hides_no_other(name: str, content: Any, why: str) -> None:
    entries = h100()
    whole = portcounters.read(Recording(entries), "mlx5_4", 1)
    folder = "hw_counters" if name == "rnr_nak_retry_err" else "counters"
    entries[f"{ONE}/{folder}/{name}"] = content
    found = portcounters.read(Recording(entries), "mlx5_4", 1)
    assert found.missing == {name: why}
    assert found.values == {key: n for key, n in whole.values.items() if key != name}


def test_a_port_with_the_driver_s_counters_alone() -> None:
    """As of procfs PR#605: irdma has no counters/ at all."""
    path = port("irdma0")
    entries: Entries = {f"{path}/hw_counters/rnr_nak_retry_err": "4", f"{path}/state": "4: ACTIVE"}
    assert portcounters.read(Recording(entries), "irdma0", 1).values == {"rnr_nak_retry_err": 4}


def roce(interfaces: tuple[str, ...]) -> Entries:
    path = port("mlx5_9")
    entries: Entries = {
        f"{path}/link_layer": "Ethernet",
        f"{path}/state": "4: ACTIVE",
        f"{path}/counters/link_downed": "1",
    }
    for name in interfaces:
        entries[f"{CLASS}/mlx5_9/device/net/{name}/carrier_down_count"] = "6"
    return entries


@pytest.mark.parametrize(
    ("interfaces", "found"), [(("ens1",), 6), ((), None), (("ens1", "rep0"), None)]
)
def test_the_carrier_of_roce(interfaces: tuple[str, ...], found: int | None) -> None:
    counts = portcounters.read(Recording(roce(interfaces)), "mlx5_9", 1)
    assert counts.values.get("carrier_down_count") == found
    assert counts.values["link_downed"] == 1


def keys(entries: Entries, sku: Sku | None = None) -> list[str]:
    return [one.key for one in portcounters.counted_ports(Node("gpu-1", Recording(entries), sku))]


class TestWhichPorts:
    def test_those_that_the_policy_lists(self) -> None:
        sku = Sku("h100", ports=Ports(names=("mlx5_0:1", "mlx5_5:1", "mlx5_77:1")))
        assert keys(h100(), sku) == ["mlx5_0:1", "mlx5_5:1"]

    def test_without_a_policy_all_that_are_up(self) -> None:
        entries = h100()
        entries[f"{ONE}/state"] = "1: DOWN"
        assert keys(entries) == sorted(
            [name for name in PORTS if name != "mlx5_4:1"] + ["mlx5_bond_0:1"]
        )

    def test_no_file_of_a_switch_s_own_device_is_opened(self) -> None:
        """node_exporter#3434: reading these fills the kernel's log with errors."""
        entries = h100()
        entries[f"{CLASS}/mlx5_4/device/vpd"] = "SW_MNG"
        for sku in (None, Sku("h100", ports=Ports(names=PORTS))):
            recorder = Recorder(Recording(entries))
            node = Node("gpu-1", recorder, sku)
            read = portcounters.read_all(node)
            assert "mlx5_4:1" not in read
            assert read
            assert not [path for path in recorder.entries if "mlx5_4/ports" in path]

    def test_virtual_functions_have_no_counters(self) -> None:
        entries = h100()
        entries[f"{CLASS}/mlx5_4/device/physfn"] = {"kind": "dir"}
        assert "mlx5_4:1" not in keys(entries)
        assert "mlx5_4:1" not in keys(entries, Sku("h100", ports=Ports(names=PORTS)))


def test_what_a_job_counted() -> None:
    before = {"mlx5_0:1": {"link_downed": 255, "port_xmit_data": 10, "symbol_error": 9}}
    after = {"mlx5_0:1": {"link_downed": 255, "port_xmit_data": 30, "symbol_error": 1}, "b:1": {}}
    assert portcounters.differences(before, after) == {
        "mlx5_0:1": {"link_downed": SATURATED, "port_xmit_data": 20, "symbol_error": RESET},
        "b:1": {},
    }
    assert portcounters.differences(before, {})["mlx5_0:1"]["port_xmit_data"] == MISSING
