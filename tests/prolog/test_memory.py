from __future__ import annotations

import os
from pathlib import Path
from typing import Any

import pytest

from gpuhealth import examination, memory
from gpuhealth.checks import counters, ports
from gpuhealth.examination import Examination, Request
from gpuhealth.finding import HEALTHY, UNHEALTHY, UNKNOWN
from gpuhealth.history import History, persists
from gpuhealth.policy import Policy, Ports, Sku
from gpuhealth.source import Directory
from recorded import CLASS, PORTS, Entries, h100, port, write

POLICY = Policy(skus=(Sku("h100", nodes="gpu-[1-64]", ports=Ports(names=PORTS)),))
ONLY = (ports.ID, counters.COUNTERS, counters.FLAPS)
BOOT = examination.BOOT_ID


def look(entries: Entries, history: History, now_s: float, boot: str = "a") -> Examination:
    """Examine a recorded node, at a time, with what is remembered."""
    request = Request("gpu-1", POLICY, only=ONLY, history=history)
    return examination.examine_recording(request, {BOOT: boot, **entries}, now_s)


def after(entries: Entries, history: History, now_s: float, boot: str = "a") -> History:
    done = look(entries, history, now_s, boot)
    return memory.remember(Request("gpu-1", POLICY, only=ONLY, history=history), done)


def sick(done: Examination) -> list[tuple[str, str, str]]:
    return [(f.check, f.object, f.status) for f in done.findings if f.status != HEALTHY]


class TestCounters:
    def test_from_one_run_to_the_next(self) -> None:
        history = after(h100(), History(), 10.0)
        assert [sorted(stamp.ports) for stamp in history.stamps] == [sorted(PORTS)]
        entries = h100()
        entries[f"{port('mlx5_4')}/counters/link_downed"] = "1"
        found = look(entries, history, 100.0)
        assert sick(found) == [(counters.COUNTERS, "mlx5_4:1", UNHEALTHY)]
        # As long as an event is young, also the next run finds it.
        assert sick(look(entries, after(entries, history, 100.0), 400.0)) == sick(found)
        assert sick(look(entries, after(entries, history, 100.0), 701.0)) == []

    def test_not_over_a_reboot(self) -> None:
        history = after(h100(), History(), 1000.0)
        entries = h100()
        entries[f"{port('mlx5_4')}/counters/link_downed"] = "9"
        history = after(entries, history, 50.0, boot="b")
        assert (history.boot_id, len(history.stamps)) == ("b", 1)
        assert sick(look(entries, history, 60.0, boot="b")) == []

    def test_a_run_that_was_overtaken_puts_no_stamp_before_the_newest(self) -> None:
        request = Request("gpu-1", POLICY, only=ONLY)
        slow = look(h100(), History(), 10.0)
        newer = after(h100(), History(), 40.0)
        history = memory.remember(request, slow, newer)
        assert [stamp.at_s for stamp in history.stamps] == [40.0]

    def test_nor_is_what_only_can_be_somebody_else_s_believed(self) -> None:
        request = Request("gpu-1", POLICY, only=ONLY)
        history = memory.remember(
            request, look(h100(), History(), 10.0), after(h100(), History(), 9e4)
        )
        assert [stamp.at_s for stamp in history.stamps] == [10.0]

    def test_a_run_that_looks_at_no_counters_leaves_no_stamp(self) -> None:
        history = after(h100(), History(), 10.0)
        entries = {path: text for path, text in h100().items() if "counters/" not in path}
        assert after(entries, history, 100.0).stamps == history.stamps

    def test_a_job_s_are_those_of_the_listed_ports(self) -> None:
        found = memory.counters_of(Request("gpu-1", POLICY), look(h100(), History(), 1.0))
        assert sorted(found) == sorted(PORTS)
        assert found["mlx5_0:1"]["port_xmit_data"] == 230442669431839


RESETS = {
    "ports/ is empty": {f"{CLASS}/mlx5_4/ports/": []},
    "state is EINVAL": {f"{port('mlx5_4')}/state": {"errno": "EINVAL"}},
    "state is ENODEV": {f"{port('mlx5_4')}/state": {"errno": "ENODEV"}},
}


@pytest.mark.parametrize("files", RESETS.values(), ids=RESETS)
class TestNoStateForLong:
    def entries(self, files: dict[str, Any]) -> Entries:
        found = {**h100(), **files}
        return {
            path: text
            for path, text in found.items()
            if not path.startswith(f"{CLASS}/mlx5_4/ports/1/") or path in files
        }

    def test_at_first_nobody_knows(self, files: dict[str, Any]) -> None:
        entries = self.entries(files)
        history = after(h100(), History(), 10.0)
        assert (ports.ID, "mlx5_4:1", UNKNOWN) in sick(look(entries, history, 100.0))
        history = after(entries, history, 100.0)
        assert (ports.ID, "mlx5_4:1", UNKNOWN) in sick(look(entries, history, 159.0))

    def test_a_minute_later_it_is_broken(self, files: dict[str, Any]) -> None:
        entries = self.entries(files)
        history = after(entries, after(h100(), History(), 10.0), 100.0)
        assert (ports.ID, "mlx5_4:1", UNHEALTHY) in sick(look(entries, history, 160.0))

    def test_a_device_that_came_back_was_reset_only(self, files: dict[str, Any]) -> None:
        entries = self.entries(files)
        history = after(entries, History(), 100.0)
        history = after(h100(), history, 130.0)
        assert (ports.ID, "mlx5_4:1", UNKNOWN) in sick(look(entries, history, 170.0))

    def test_a_reboot_starts_again(self, files: dict[str, Any]) -> None:
        entries = self.entries(files)
        history = after(entries, History(), 100.0)
        history = after(entries, history, 5.0, boot="b")
        assert (ports.ID, "mlx5_4:1", UNKNOWN) in sick(look(entries, history, 30.0, boot="b"))


class TestHung:
    DEVICE = f"{CLASS}/mlx5_4"

    def done(self, at_s: float, hung: tuple[str, ...] = (), **options: Any) -> Examination:
        return Examination(
            "gpu-1", UNKNOWN, (), 1.0, boot_id="a", at_s=at_s, hung=dict.fromkeys(hung), **options
        )

    def remember(self, history: History, done: Examination) -> History:
        return memory.remember(Request("gpu-1"), done, history)

    @pytest.mark.parametrize("place", [DEVICE, "nvml"])
    def test_in_two_runs_a_minute_apart(self, place: str) -> None:
        history = self.remember(History(), self.done(100.0, (place,)))
        assert not persists(history, f"hung {place}", 159.0)
        assert persists(history, f"hung {place}", 160.0)

    @pytest.mark.parametrize(
        ("place", "options", "still"),
        [
            (DEVICE, {"entries": {f"{DEVICE}/ports/1/state": "4: ACTIVE"}}, False),
            (DEVICE, {"entries": {f"{DEVICE}/ports/": ["1"]}}, False),
            # It answered, if only that there is nothing.
            (DEVICE, {"entries": {f"{DEVICE}/ports/1/state": {"errno": "ENODEV"}}}, False),
            (DEVICE, {"entries": {f"{DEVICE}/ports/1/state": {"errno": "ECANCELED"}}}, True),
            (DEVICE, {"entries": {f"{CLASS}/mlx5_44/ports/1/state": "4: ACTIVE"}}, True),
            (DEVICE, {}, True),
            ("nvml", {"nvml": {"gpus": []}}, False),
            ("nvml", {"nvml": {"error": "NVML_ERROR_DRIVER_NOT_LOADED"}}, False),
            ("nvml", {"nvml": {"error": "died"}}, True),
            # A job without GPUs: nobody asked.
            ("nvml", {}, True),
            ("/scratch", {"entries": {"/scratch": {"kind": "dir"}}}, False),
        ],
    )
    def test_an_answer_ends_it(self, place: str, options: dict[str, Any], still: bool) -> None:
        history = self.remember(History(), self.done(100.0, (place,)))
        history = self.remember(history, self.done(130.0, **options))
        assert persists(history, f"hung {place}", 170.0) is still

    def test_a_place_that_answered_before_it_hung_has_not_answered(self) -> None:
        history = self.remember(History(), self.done(100.0, (self.DEVICE,)))
        entries = {
            f"{self.DEVICE}/node_type": "1: CA",
            f"{self.DEVICE}/ports/1/state": {"errno": "ETIMEDOUT"},
        }
        history = self.remember(history, self.done(130.0, (self.DEVICE,), entries=entries))
        assert persists(history, f"hung {self.DEVICE}", 160.0)


def test_devices_whose_vpd_was_read_need_not_show_it_again() -> None:
    entries = h100()
    entries[f"{CLASS}/mlx5_0/device/vpd"] = "ConnectX-7"
    entries[f"{CLASS}/mlx5_1/device/vpd"] = "SW_MNG"
    history = after(entries, History(), 10.0)
    assert history.full_function == ("mlx5_0",)


def test_over_a_real_tree(tmp_path: Path) -> None:
    """The engine's own way: in a child, over files, with what the first run left."""
    if not hasattr(os, "fork"):
        pytest.skip("there are no child processes here")
    write({BOOT: "a", **h100()}, tmp_path)
    request = Request("gpu-1", POLICY, only=ONLY)
    source = Directory(str(tmp_path))
    first = examination.examine(request, source, with_nvml=False)
    assert first.verdict == HEALTHY
    history = memory.remember(request, first)
    file = tmp_path / f"{port('mlx5_4')}/counters/link_downed".lstrip("/")
    file.write_text("2\n")
    again = Request("gpu-1", POLICY, only=ONLY, history=history)
    assert sick(examination.examine(again, source, with_nvml=False)) == [
        (counters.COUNTERS, "mlx5_4:1", UNHEALTHY)
    ]
