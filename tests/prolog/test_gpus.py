from __future__ import annotations

from dataclasses import fields, replace
from typing import Any

import pytest

from gpuhealth import check, nvml
from gpuhealth.check import EPILOG, PERIODIC, PROLOG, REGISTRY, Job, Node
from gpuhealth.checks import gpus
from gpuhealth.finding import DRAIN, HEALTHY, UNHEALTHY, UNKNOWN, WARN, Finding
from gpuhealth.nvml import Gpu, Nvml
from gpuhealth.policy import Policy, Sku
from gpuhealth.source import Entry, Recording
from nvml_values import ADDRESSES, GIB, PROC, h200

SKU = Sku(
    "h200",
    gpus=8,
    nvlinks=18,
    persistence=True,
    fabric_manager=True,
    pcie={"gpu": {"width": 16, "speed_gts": 32}},
)
GPU_3 = f"nvidia3/{ADDRESSES[3]}"
IDS = [one.id for one in REGISTRY.values() if one.look.__module__ == gpus.__name__]
LOST = "NVML_ERROR_GPU_IS_LOST"


def files(*addresses: str, **more: Entry) -> dict[str, Entry]:
    return {f"{PROC}/": list(addresses or ADDRESSES), **more}


NO_DRIVER: dict[str, Entry] = {"/proc/driver/": []}


def judge(
    id: str,
    known: Nvml | None,
    sku: Sku | None = SKU,
    entries: dict[str, Entry] | None = None,
    **options: Any,
) -> list[Finding]:
    source = Recording(files() if entries is None else entries)
    node = Node("gpu-1", source, sku, known, **options)
    return check.run(REGISTRY[id], node, Policy() if sku else None)


def sick(*args: Any, **options: Any) -> list[Finding]:
    return [one for one in judge(*args, **options) if one.status != HEALTHY]


def job(*of: str) -> dict[str, Any]:
    return {"job": Job(7, 1000, tuple(of)), "context": PROLOG}


class TestHealthy:
    @pytest.mark.parametrize("id", IDS)
    @pytest.mark.parametrize("sku", [SKU, Sku("none"), None], ids=["policy", "silent", "none"])
    def test_eight_gpus(self, id: str, sku: Sku | None) -> None:
        assert sick(id, h200(8), sku, **job("0-7")) == []
        assert sick(id, h200(8), sku) == []

    @pytest.mark.parametrize("id", IDS)
    def test_two_h200_of_a_virtual_machine(self, id: str) -> None:
        assert sick(id, h200(2), replace(SKU, gpus=2), files(*ADDRESSES[:2]), **job("0")) == []

    def test_what_was_looked_at_is_shown(self) -> None:
        assert [one.object for one in judge("gpu_ecc", h200(8))][3] == GPU_3
        (found,) = judge("gpu_count", h200(8))
        assert (found.status, found.observed, found.expected) == (HEALTHY, "8 GPUs", "8 GPUs")

    @pytest.mark.parametrize("id", IDS)
    def test_a_machine_without_gpus(self, id: str) -> None:
        for known in (None, Nvml(error=nvml.NOT_INSTALLED), Nvml(error=nvml.DRIVER_NOT_LOADED)):
            assert judge(id, known, None, NO_DRIVER, **job()) == []


TABLE: list[tuple[str, dict[str, Any], str, str]] = [
    ("gpu_ecc", {"ecc_volatile": 2}, "2 uncorrected", "at most 0"),
    ("gpu_remap", {"remap_failed": True}, "remapping failed", "no failure"),
    ("gpu_remap_pending", {"remap_pending": True}, "remapping pending", "none"),
    ("gpu_remap_pending", {"retired_pending": True}, "retirement pending", "none"),
    ("gpu_recovery", {"recovery_action": 1}, "GPU reset", "none"),
    ("gpu_recovery", {"recovery_action": 2}, "node reboot", "none"),
    ("gpu_recovery", {"recovery_action": 99}, "action 99", "none"),
    ("gpu_pcie", {"pcie_width": 8}, "x8", "x16"),
    ("gpu_pcie", {"pcie_gen_max": 4, "pcie_gen": 4}, "x16 up to 16 GT/s", "32 GT/s"),
    ("gpu_throttle", {"clock_reasons": 0x48}, "hardware thermal slowdown at 39 °C", "none"),
    ("gpu_throttle", {"clock_reasons": 0x88}, "power brake at 39 °C", "none"),
    ("gpu_throttle", {"clock_reasons": 0x08}, "hardware slowdown at 39 °C", "none"),
    ("nvlink", {"nvlinks": (True,) * 17 + (False,)}, "17 active, down: 17", "18 active"),
    ("nvlink", {"nvlinks": (False,) * 18}, "0 active, down: 0,1,2,3,…", "18 active"),
    ("nvlink", {"missing": {"nvlinks": nvml.NOT_SUPPORTED}}, "no NVLink", "18 active"),
    ("fabric_manager", {"fabric_state": 1}, "not started", "completed"),
    ("fabric_manager", {"fabric_state": 2}, "in progress", "completed"),
    ("fabric_manager", {"fabric_status": 999}, "completed, status 999", "status 0"),
    ("fabric_manager", {"fabric_health": 0x1}, "degraded bandwidth", "healthy"),
    ("persistence", {"persistence": False}, "off", "on"),
    (
        "gpu_processes",
        {"processes": ((4242, 40 * GIB, None, None),)},
        "pid 4242 python 40960 MiB",
        "no process",
    ),
    (
        "gpu_processes",
        {"memory_used_bytes": 40 * GIB},
        "40960 MiB without a process",
        "at most 2048 MiB",
    ),
]


class TestOneThingWrong:
    """One mutation of GPU 3 each: that check says so, of that GPU, and no other one does."""

    @pytest.mark.parametrize(("id", "changed", "observed", "expected"), TABLE)
    def test_it_is_said(
        self, id: str, changed: dict[str, Any], observed: str, expected: str
    ) -> None:
        entries = files(**{"/proc/4242/comm": "python\n"})
        for other in IDS:
            found = sick(other, h200(8, **changed), SKU, entries, **job("0-7"))
            if other != id:
                assert found == [], other
                continue
            (one,) = found
            assert (one.status, one.object) == (UNHEALTHY, GPU_3)
            assert (one.observed, one.expected) == (observed, expected)
            assert one.remedy
            assert not one.systemic

    @pytest.mark.parametrize(
        ("id", "changed"),
        [
            ("gpu_pcie", {"pcie_gen": 1}),  # at rest
            ("gpu_throttle", {"clock_reasons": 0x1 | 0x2 | 0x4 | 0x10 | 0x20}),
            ("gpu_ecc", {"ecc_aggregate": 9}),
            ("gpu_ecc", {"ecc": False, "missing": {"ecc_volatile": nvml.NOT_SUPPORTED}}),
            ("gpu_remap", {"remapped_correctable": 3, "remapped_uncorrectable": 1}),
            ("nvlink", {"nvlinks": (True,) * 20}),
            ("gpu_processes", {"memory_used_bytes": GIB // 2}),
        ],
    )
    def test_what_is_normal(self, id: str, changed: dict[str, Any]) -> None:
        assert sick(id, h200(8, **changed), **job("0-7")) == []


VALUES = [
    ("gpu_ecc", "ecc_volatile"),
    ("gpu_remap", "remap_failed"),
    ("gpu_remap_pending", "remap_pending"),
    ("gpu_recovery", "recovery_action"),
    ("gpu_pcie", "pcie_width"),
    ("gpu_pcie", "pcie_gen_max"),
    ("gpu_throttle", "clock_reasons"),
    ("nvlink", "nvlinks"),
    ("fabric_manager", "fabric_state"),
    ("fabric_manager", "fabric_status"),
    ("persistence", "persistence"),
    ("gpu_processes", "processes"),
    ("gpu_processes", "memory_used_bytes"),
]


class TestUnknown:
    @pytest.mark.parametrize(("id", "name"), VALUES)
    @pytest.mark.parametrize("why", ["NVML_ERROR_UNKNOWN", "NVML_ERROR_TIMEOUT", "unreadable"])
    def test_an_unread_value_is_unknown(self, id: str, name: str, why: str) -> None:
        known = h200(8, missing={name: why})
        (found,) = sick(id, known, **job("0-7"))
        assert (found.status, found.object) == (UNKNOWN, GPU_3)
        assert why in found.observed

    @pytest.mark.parametrize("id", [id for id, _ in VALUES])
    def test_a_gpu_that_says_nothing_is_never_healthy(self, id: str) -> None:
        known = h200(8)
        mute = Nvml(gpus=(*known.gpus[:7], Gpu(7, missing={"handle": "NVML_ERROR_UNKNOWN"})))
        found = sick(id, mute, **job("0-6"))
        if id in ("gpu_throttle", "gpu_processes"):
            assert found == []  # not one of the job's
            assert statuses(sick(id, mute, **job("7"))) == [UNKNOWN]
        else:
            assert statuses(found) == [UNKNOWN]

    @pytest.mark.parametrize("id", IDS)
    @pytest.mark.parametrize("error", ["hung", "died", "unreadable", "NVML_ERROR_UNKNOWN"])
    def test_nvml_says_nothing(self, id: str, error: str) -> None:
        for sku in (SKU, None):
            found = judge(id, Nvml(error=error), sku, **job("0"))
            if id == "persistence" and sku is None:
                assert found == []
            else:
                assert statuses(found) == [UNKNOWN]
                assert error in found[0].observed

    @pytest.mark.parametrize(
        "name", ["remap_failed", "remap_pending", "recovery_action", "clock_reasons", "nvlinks"]
    )
    def test_what_a_kind_of_gpu_does_not_have_is_no_fault(self, name: str) -> None:
        known = h200(8, missing={name: nvml.NOT_SUPPORTED})
        for id in IDS:
            assert sick(id, known, replace(SKU, nvlinks=None), **job("0-7")) == []

    def test_links_that_are_unread_may_be_up(self) -> None:
        (found,) = sick("nvlink", h200(8, nvlinks=(True,) * 17 + (None,)))
        assert found.status == UNKNOWN
        (found,) = sick("nvlink", h200(8, nvlinks=(True,) * 16 + (False, None)))
        assert found.status == UNHEALTHY

    def test_a_fabric_that_is_starting(self) -> None:
        starting = h200(8, fabric_state=2)
        assert statuses(sick("fabric_manager", starting, now_s=60)) == [UNKNOWN]
        assert statuses(sick("fabric_manager", starting, now_s=600)) == [UNHEALTHY]

    def test_a_fabric_of_which_the_driver_does_not_tell(self) -> None:
        known = h200(1, missing={"fabric_state": nvml.NOT_SUPPORTED})
        assert statuses(judge("fabric_manager", known)) == [UNKNOWN]
        assert statuses(judge("fabric_manager", known, Sku("x"))) == [HEALTHY]

    def test_every_value_that_is_judged_is_in_the_table(self) -> None:
        """A GPU of which nothing could be read leaves no check of values content."""
        everything = {one.name: "NVML_ERROR_UNKNOWN" for one in fields(Gpu) if one.default is None}
        blank = Nvml(gpus=(Gpu(0, minor=0, missing={**everything}),))
        for id in {id for id, _ in VALUES}:
            assert statuses(judge(id, blank, **job("0"))) == [UNKNOWN], id


def statuses(found: list[Finding]) -> list[str]:
    return [one.status for one in found]


class TestCount:
    def lost(self) -> Nvml:
        known = h200(8).gpus
        return Nvml(gpus=(*known[:3], Gpu(3, missing={"handle": LOST}), *known[4:]))

    def test_one_off_the_bus_is_named_by_its_address(self) -> None:
        for sku in (SKU, None):
            (found,) = sick("gpu_count", self.lost(), sku)
            assert (found.status, found.object) == (UNHEALTHY, ADDRESSES[3])
            assert found.observed == "off the bus"
            assert found.action == (DRAIN if sku else WARN)

    def test_one_off_the_bus_of_which_the_kernel_says_nothing(self) -> None:
        (found,) = sick("gpu_count", self.lost(), SKU, NO_DRIVER)
        assert (found.status, found.object) == (UNHEALTHY, "NVML index 3")

    def test_one_lost_in_the_middle_of_the_questions(self) -> None:
        known = h200(8, missing={"ecc_volatile": LOST})
        (found,) = sick("gpu_count", known)
        assert (found.object, found.observed) == (GPU_3, "off the bus")

    def test_one_that_the_kernel_has_and_nvml_has_not(self) -> None:
        known = h200(8)
        seven = replace(known, gpus=known.gpus[:7])
        (found,) = sick("gpu_count", seven)
        assert (found.object, found.observed) == (ADDRESSES[7], "missing")
        info = "Model: \t\t NVIDIA H200\nGPU Excluded:\t Yes\n"
        excluded = files(**{f"{PROC}/{ADDRESSES[7]}/information": info})
        (found,) = sick("gpu_count", seven, SKU, excluded)
        assert (found.status, found.observed) == (UNHEALTHY, "excluded")
        # Without a policy it may be a container that is given seven of them.
        assert sick("gpu_count", seven, None) == []

    def test_a_gap_in_the_numbers(self) -> None:
        known = h200(8)
        six = replace(known, gpus=tuple(one for one in known.gpus if one.index not in (2, 5)))
        there = files(*(one.pci for one in six.gpus if one.pci))
        found = sick("gpu_count", six, SKU, there)
        assert [one.object for one in found] == ["/dev/nvidia2", "/dev/nvidia5"]

    def test_no_gap_is_no_name(self) -> None:
        known = h200(8)
        seven = replace(known, gpus=known.gpus[:7])
        (found,) = sick("gpu_count", seven, SKU, files(*ADDRESSES[:7]))
        assert (found.object, found.observed, found.expected) == ("GPUs", "7 GPUs", "8 GPUs")

    def test_one_that_does_not_answer_is_unknown(self) -> None:
        known = h200(8)
        mute = Gpu(7, missing={"handle": "NVML_ERROR_UNKNOWN"})
        found = sick("gpu_count", replace(known, gpus=(*known.gpus[:7], mute)))
        assert UNKNOWN in statuses(found)
        assert [one.object for one in found if one.status == UNKNOWN] == ["NVML index 7"]

    @pytest.mark.parametrize(
        ("known", "entries", "observed"),
        [
            (Nvml(error=nvml.DRIVER_NOT_LOADED), NO_DRIVER, "driver not loaded"),
            (Nvml(error=nvml.NOT_INSTALLED), NO_DRIVER, "driver not loaded"),
            (None, NO_DRIVER, "driver not loaded"),
            (Nvml(), {f"{PROC}/": []}, "none"),
        ],
    )
    def test_all_gone_is_no_fault_of_single_gpus(
        self, known: Nvml | None, entries: dict[str, Entry], observed: str
    ) -> None:
        (found,) = judge("gpu_count", known, SKU, entries)
        assert (found.status, found.observed, found.systemic) == (UNHEALTHY, observed, True)

    def test_more_than_the_policy_says_is_the_policys_fault(self) -> None:
        (found,) = sick("gpu_count", h200(8), replace(SKU, gpus=4))
        assert (found.status, found.systemic) == (UNHEALTHY, True)

    @pytest.mark.parametrize("known", [None, Nvml(error=nvml.NOT_INSTALLED)])
    def test_without_nvml_the_kernel_counts(self, known: Nvml | None) -> None:
        assert statuses(judge("gpu_count", known)) == [HEALTHY]
        (found,) = judge("gpu_count", known, SKU, files(*ADDRESSES[:7]))
        assert (found.status, found.observed) == (UNHEALTHY, "7 GPUs")
        hung: dict[str, Entry] = {f"{PROC}/": {"errno": "ETIMEDOUT"}}
        (found,) = judge("gpu_count", known, SKU, hung)
        assert (found.status, found.observed) == (UNKNOWN, "hung")

    def test_a_driver_that_was_updated_while_loaded(self) -> None:
        for sku in (SKU, None):
            (found,) = judge("gpu_count", Nvml(error=nvml.VERSION_MISMATCH), sku)
            assert (found.status, found.object) == (UNHEALTHY, "driver")


CUT = (("MIG-a", 1, 0), ("MIG-b", 2, 0))
BUSY = h200(8, processes=((4242, GIB, None, None),), clock_reasons=0x48)


class TestSharedNodes:
    """Kind: what belongs to another job on the node is charged to this one."""

    @pytest.mark.parametrize("id", ["gpu_processes", "gpu_throttle"])
    def test_gpus_of_others_are_not_looked_at(self, id: str) -> None:
        assert sick(id, BUSY, **job("0", "4-7")) == []
        assert statuses(sick(id, BUSY, **job("3"))) == [UNHEALTHY]
        assert judge(id, BUSY, **job()) == []

    @pytest.mark.parametrize("id", ["gpu_processes", "gpu_throttle"])
    @pytest.mark.parametrize("of", ["8", "nonsense", "GPU-x", "MIG-x"])
    def test_not_knowing_which_gpus_is_unknown(self, id: str, of: str) -> None:
        (found,) = judge(id, BUSY, **job(of))
        assert (found.status, found.observed) == (UNKNOWN, of)

    def test_a_node_that_runs_jobs_is_not_searched_for_leftovers(self) -> None:
        assert judge("gpu_processes", BUSY, context=PERIODIC) == []
        assert REGISTRY["gpu_processes"].contexts == (PROLOG, EPILOG)

    def test_mig_devices_of_others(self) -> None:
        known = h200(1, mig=True, mig_devices=CUT, processes=((7, GIB, 2, 0),))
        assert sick("gpu_processes", known, **job("MIG-a")) == []
        (found,) = sick("gpu_processes", known, **job("MIG-b"))
        assert found.observed == "pid 7 1024 MiB"

    def test_memory_of_a_cut_gpu_is_nobodys(self) -> None:
        known = h200(1, mig=True, mig_devices=CUT, memory_used_bytes=40 * GIB)
        assert sick("gpu_processes", known, **job("MIG-a")) == []

    def test_mig_mode_has_no_nvlinks(self) -> None:
        known = h200(8, mig=True, fabric_state=1, missing={"nvlinks": "MIG"})
        assert sick("nvlink", known) == []
        assert sick("fabric_manager", known) == []

    @pytest.mark.parametrize("name", gpus.DAEMONS)
    def test_daemons_are_at_home(self, name: str) -> None:
        known = h200(8, processes=((50, 300 << 20, None, None),), memory_used_bytes=300 << 20)
        entries = files(**{"/proc/50/comm": f"{name}\n"})
        assert sick("gpu_processes", known, SKU, entries, **job("3")) == []

    def test_a_name_is_a_jobs_own_and_may_hold_anything(self) -> None:
        known = h200(8, processes=((50, None, None, None),))
        entries = files(**{"/proc/50/comm": "a\nexport X=1\x1b[31m\n"})
        (found,) = sick("gpu_processes", known, SKU, entries, **job("3"))
        assert found.observed == "pid 50"


class TestPolicy:
    def test_thresholds(self) -> None:
        node = Node("gpu-1", Recording(files()), SKU, h200(8, ecc_volatile=2))
        limited = Policy(thresholds={"gpu_ecc": {"uncorrected": {"count": 2}}})
        off = Policy(thresholds={"gpu_ecc": {"uncorrected": {}}})
        for policy in (limited, off):
            found = check.run(REGISTRY["gpu_ecc"], node, policy)
            assert {one.status for one in found} == {HEALTHY}

    def test_nothing_drains_without_one(self) -> None:
        for id in IDS:
            for one in sick(id, h200(8, ecc_volatile=1, remap_failed=True), None, **job("3")):
                assert one.action == WARN

    def test_a_link_that_is_narrower_than_it_could_be(self) -> None:
        known = h200(8, pcie_width=8)
        assert statuses(sick("gpu_pcie", known, None)) == [UNHEALTHY]
        narrow = replace(SKU, pcie={"gpu": {"width": 8}})
        assert sick("gpu_pcie", known, narrow) == []

    def test_a_virtual_machine_that_shows_no_link(self) -> None:
        known = h200(1, pcie_width=0, pcie_width_max=0)
        assert sick("gpu_pcie", known, None) == []
        assert statuses(sick("gpu_pcie", known, SKU)) == [UNKNOWN]

    def test_no_fabric_manager_wanted(self) -> None:
        known = h200(8, fabric_state=2)
        assert judge("fabric_manager", known, Sku("x", fabric_manager=False)) == []
        assert statuses(sick("fabric_manager", known, None)) == [UNHEALTHY]

    def test_a_drain_reason_is_short(self) -> None:
        for id, changed, _, _ in TABLE:
            for one in sick(id, h200(8, **changed), **job("0-7")):
                reason = f"gpuhealth: {one.check} {one.object} {one.observed}"
                assert len(f"{reason} expected {one.expected}") <= 200
                assert one.observed.isprintable()
