from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from gpuhealth.check import REGISTRY, Job, Node, run, selected
from gpuhealth.checks import system
from gpuhealth.finding import DRAIN, HEALTHY, UNHEALTHY, UNKNOWN, Finding
from gpuhealth.policy import Policy, Ports, Sku
from gpuhealth.source import Directory, Recording
from pcitree import CLASS, HCAS, RELEASE, Entries, judge, node, ports, without
from recorded import h100

MODULES = "/sys/module"
BUILTIN = f"/lib/modules/{RELEASE}/modules.builtin"
VERBS = "/sys/class/infiniband_verbs"


def sick(found: list[Finding]) -> list[Finding]:
    return [one for one in found if one.status != HEALTHY]


class TestModules:
    def test_loaded(self) -> None:
        (found,) = judge("rdma_modules", node(), ports())
        assert found.status == HEALTHY
        assert found.observed == "ib_core, ib_uverbs, mlx5_core, mlx5_ib"

    @pytest.mark.parametrize("name", ["ib_core", "ib_uverbs", "mlx5_core", "mlx5_ib"])
    def test_not_loaded(self, name: str) -> None:
        found = sick(judge("rdma_modules", without(node(), f"{MODULES}/{name}"), ports()))
        assert [(one.object, one.status, one.action) for one in found] == [
            (name, UNHEALTHY, "warn")
        ]
        assert f"modprobe {name}" in found[0].remedy

    def test_built_in_is_as_good(self) -> None:
        tree = without(node(), f"{MODULES}/mlx5_core", f"{MODULES}/ib_core")
        tree[BUILTIN] = (
            "kernel/drivers/net/ethernet/mellanox/mlx5/core/mlx5_core.ko\n"
            "kernel/drivers/infiniband/core/ib_core.ko\n"
        )
        assert sick(judge("rdma_modules", tree, ports())) == []

    @pytest.mark.parametrize("entry", [{"errno": "ENOENT"}, {"errno": "EIO"}])
    def test_not_loaded_and_no_list_of_what_is_built_in(self, entry: Any) -> None:
        tree = {**without(node(), f"{MODULES}/mlx5_core", BUILTIN), BUILTIN: entry}
        assert [one.status for one in sick(judge("rdma_modules", tree, ports()))] == [UNKNOWN]

    def test_unreadable(self) -> None:
        tree = {**node(), f"{MODULES}/": {"errno": "EIO"}}
        (found,) = judge("rdma_modules", tree, ports())
        assert found.status == UNKNOWN

    def test_another_vendors_need_no_mlx5(self) -> None:
        tree = without(node(), f"{MODULES}/mlx5_core", f"{MODULES}/mlx5_ib")
        tree[f"{CLASS}/mlx5_0/device/vendor"] = "0x14e4"
        assert sick(judge("rdma_modules", tree, ports("mlx5_0"))) == []

    def test_a_device_that_is_gone_is_known_by_its_name_or_address(self) -> None:
        tree = without(node(), f"{MODULES}/mlx5_ib", CLASS)
        for name in ("mlx5_0:1", "0000:18:00.0:1"):
            sku = Sku("x", ports=Ports(names=(name,)))
            assert [one.object for one in sick(judge("rdma_modules", tree, sku))] == ["mlx5_ib"]

    def test_only_where_something_is_listed(self) -> None:
        tree = without(node(), f"{MODULES}/mlx5_ib")
        assert judge("rdma_modules", tree, None) == []
        assert judge("rdma_modules", tree, Sku("x")) == []

    def test_those_that_the_policy_names(self) -> None:
        found = sick(judge("rdma_modules", node(), Sku("x", modules=("nvidia-uvm", "nvidia"))))
        assert [one.object for one in found] == ["nvidia_uvm"]


class TestUverbs:
    def test_a_node_for_each(self) -> None:
        found = judge("ib_uverbs", node(), ports())
        assert [(one.object, one.status) for one in found] == [(name, HEALTHY) for name in HCAS]
        assert found[2].observed == "/dev/infiniband/uverbs2"

    @pytest.mark.parametrize(
        ("change", "observed"),
        [
            ({f"{VERBS}/uverbs1/ibdev": "mlx5_77"}, "no uverbs device"),
            (
                {"/dev/infiniband/uverbs1": {"errno": "ENOENT"}},
                "no /dev/infiniband/uverbs1",
            ),
            (
                {"/dev/infiniband/uverbs1": {"kind": "file"}},
                "/dev/infiniband/uverbs1 is a file",
            ),
        ],
    )
    def test_missing(self, change: Entries, observed: str) -> None:
        found = sick(judge("ib_uverbs", {**node(), **change}, ports()))
        assert [(one.object, one.status, one.observed, one.action) for one in found] == [
            ("mlx5_1", UNHEALTHY, observed, DRAIN)
        ]

    def test_numbers_need_not_agree(self) -> None:
        tree = {**node(), f"{VERBS}/uverbs0/ibdev": "mlx5_1", f"{VERBS}/uverbs1/ibdev": "mlx5_0"}
        assert sick(judge("ib_uverbs", tree, ports())) == []

    @pytest.mark.parametrize(
        "path", [f"{VERBS}/", f"{VERBS}/uverbs1/ibdev", "/dev/infiniband/uverbs1"]
    )
    def test_unreadable(self, path: str) -> None:
        found = sick(judge("ib_uverbs", {**node(), path: {"errno": "EIO"}}, ports("mlx5_1")))
        assert [one.status for one in found] == [UNKNOWN]

    def test_none_at_all_is_one_finding_that_drains_nothing(self) -> None:
        (found,) = judge("ib_uverbs", without(node(), VERBS), ports())
        assert (found.status, found.systemic, found.observed) == (UNHEALTHY, True, "no uverbs")

    def test_a_device_that_is_gone_is_for_the_check_of_ports(self) -> None:
        assert judge("ib_uverbs", without(node(), f"{CLASS}/mlx5_0"), ports("mlx5_0")) == []

    def test_issm_and_umad_are_not_needed(self) -> None:
        """nic-health-monitor: a GB300 makes no issm devices."""
        tree = {**node(), "/sys/class/infiniband_mad/abi_version": "5"}
        assert sick(judge("ib_uverbs", tree, ports())) == []


@pytest.mark.parametrize("id", ["rdma_modules", "ib_uverbs", "versions", "mounts", "clock"])
def test_a_recording_of_the_ports_alone_is_no_reason_to_complain(id: str) -> None:
    looked = Node("gpu-1", Recording(h100()), ports("mlx5_0"))
    assert run(REGISTRY[id], looked, Policy()) == []


@pytest.mark.parametrize("id", ["rdma_modules", "ib_uverbs"])
def test_nor_is_a_directory_that_holds_nothing_else(id: str, tmp_path: Path) -> None:
    (tmp_path / "sys/class/infiniband/mlx5_0").mkdir(parents=True)
    looked = Node("gpu-1", Directory(str(tmp_path)), ports("mlx5_0"))
    assert run(REGISTRY[id], looked, Policy()) == []


VERSIONS = {"driver": "580.82.07", "kernel": "5.14.0-*", "ofed": "24.10-*", "firmware": "28.39.*"}


class TestVersions:
    def test_as_stated(self) -> None:
        found = judge("versions", node(), ports(versions=VERSIONS))
        assert [one.status for one in found] == [HEALTHY] * 7
        assert found[-1].object == "firmware of mlx5_3"

    def test_nothing_stated(self) -> None:
        assert judge("versions", node(), ports()) == []

    @pytest.mark.parametrize(
        ("path", "text", "what", "observed"),
        [
            (f"{MODULES}/nvidia/version", "580.82.08", "driver", "580.82.08"),
            (f"{MODULES}/nvidia/version", "580.82.071", "driver", "580.82.071"),
            (system.RELEASE, "5.15.0-100-generic", "kernel", "5.15.0-100-generic"),
            (f"{MODULES}/mlx5_core/version", {"errno": "ENOENT"}, "ofed", "none"),
            (f"{CLASS}/mlx5_1/fw_ver", "28.38.1900", "firmware of mlx5_1", "28.38.1900"),
        ],
    )
    def test_another_one(self, path: str, text: Any, what: str, observed: str) -> None:
        found = sick(judge("versions", {**node(), path: text}, ports(versions=VERSIONS)))
        assert [(one.object, one.status, one.observed) for one in found] == [
            (what, UNHEALTHY, observed)
        ]

    def test_the_driver_by_proc(self) -> None:
        tree = without(node(), f"{MODULES}/nvidia/version")
        assert sick(judge("versions", tree, Sku("x", versions={"driver": "580.82.07"}))) == []

    def test_a_driver_without_a_version(self) -> None:
        tree = without(node(), f"{MODULES}/nvidia/version")
        tree["/proc/driver/nvidia/version"] = "NVRM version: none"
        (found,) = judge("versions", tree, Sku("x", versions={"driver": "NVRM*"}))
        assert (found.status, found.observed) == (UNHEALTHY, "none")

    @pytest.mark.parametrize("what", list(VERSIONS))
    def test_unreadable(self, what: str) -> None:
        paths = {
            "driver": f"{MODULES}/nvidia/version",
            "kernel": system.RELEASE,
            "ofed": f"{MODULES}/mlx5_core/version",
            "firmware": f"{CLASS}/mlx5_0/fw_ver",
        }
        tree = {**node(), paths[what]: {"errno": "EIO"}}
        if what == "driver":
            tree["/proc/driver/nvidia/version"] = {"errno": "EIO"}
        (found,) = judge("versions", tree, ports("mlx5_0", versions={what: VERSIONS[what]}))
        assert found.status == UNKNOWN


TABLE = """/dev/sda1 / ext4 rw 0 0
lustre@o2ib:/fs /scratch lustre rw 0 0
srv:/h /mnt/with\\040blank nfs4 rw 0 0
auto.home /home autofs rw 0 0
"""


class TestMounts:
    @pytest.mark.parametrize("place", ["/", "/scratch", "/scratch/", "/mnt/with blank", "/home"])
    def test_mounted(self, place: str) -> None:
        (found,) = judge("mounts", {system.MOUNTS: TABLE}, Sku("x", mounts=(place,)))
        assert (found.object, found.status, found.action) == (place, HEALTHY, DRAIN)

    @pytest.mark.parametrize("place", ["/scratch/sub", "/scratch2", "/data", "/fs"])
    def test_not_mounted(self, place: str) -> None:
        (found,) = judge("mounts", {system.MOUNTS: TABLE}, Sku("x", mounts=(place,)))
        assert (found.status, found.observed) == (UNHEALTHY, "not mounted")

    def test_unreadable(self) -> None:
        tree = {system.MOUNTS: {"errno": "EIO"}}
        (found,) = judge("mounts", tree, Sku("x", mounts=("/scratch", "/home")))
        assert found.status == UNKNOWN

    def test_a_long_table_is_read_to_its_end(self, tmp_path: Path) -> None:
        place = tmp_path / "proc/self/mounts"
        place.parent.mkdir(parents=True)
        place.write_text("".join(f"x /mnt/{n} tmpfs rw 0 0\n" for n in range(5000)))
        looked = Node("gpu-1", Directory(str(tmp_path)), Sku("x", mounts=("/mnt/4999",)))
        assert [one.status for one in run(REGISTRY["mounts"], looked)] == [HEALTHY]

    def test_of_this_machine(self) -> None:
        looked = Node("here", Directory(), Sku("x", mounts=("/", "/proc", "/no such place")))
        found = run(REGISTRY["mounts"], looked)
        assert [one.status for one in found] == [HEALTHY, HEALTHY, UNHEALTHY]

    def test_jobs_without_gpus_need_them_too(self) -> None:
        job = Job(7, 1000, None)
        assert "mounts" in [one.id for one in selected(Policy(), "prolog", job)]


class TestClock:
    @pytest.mark.parametrize(
        ("tree", "status"),
        [
            ({"/run/systemd/timesync/synchronized": ""}, [HEALTHY]),
            ({"/run/systemd/timesync/": []}, [UNHEALTHY]),
            # chrony, ntpd or PTP leave nothing to read: nothing is known, and nothing said
            ({"/run/chrony/chronyd.pid": "77"}, []),
            ({"/run/systemd/timesync/": {"errno": "EACCES"}}, []),
        ],
    )
    def test_what_can_be_told(self, tree: Entries, status: list[str]) -> None:
        found = judge("clock", tree, None)
        assert [one.status for one in found] == status
        assert {one.action for one in found} <= {"warn"}
