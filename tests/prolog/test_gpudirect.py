from __future__ import annotations

import pytest

from gpuhealth.check import REGISTRY, Node, run
from gpuhealth.checks import gpudirect
from gpuhealth.finding import DRAIN, HEALTHY, UNHEALTHY, UNKNOWN, Finding
from gpuhealth.policy import Sku
from gpuhealth.source import Recording
from pcitree import (
    CLASS,
    DEVICES,
    GPUS,
    HCAS,
    RELEASE,
    Entries,
    at_root,
    below_switch,
    config,
    hca,
    judge,
    node,
    ports,
    without,
)
from recorded import h100

CLIENTS = "/sys/kernel/mm/memory_peers"
HOLDER = "/sys/module/ib_core/holders/nvidia_peermem"
CONFIG = f"/boot/config-{RELEASE}"


def one(tree: Entries, want: str | None = "any", **options: object) -> Finding:
    (found,) = judge("gpudirect", tree, ports(gpudirect=want), **options)
    return found


def sick(found: list[Finding]) -> list[Finding]:
    return [one for one in found if one.status != HEALTHY]


class TestWays:
    """gpu-operator#2868, siderolabs/pkgs PR#1356: either way will do, if nobody asks for one."""

    @pytest.mark.parametrize(
        ("driver", "peermem", "want", "status"),
        [
            ("open", True, "any", HEALTHY),
            ("open", False, "any", HEALTHY),
            ("proprietary", True, "any", HEALTHY),
            ("proprietary", False, "any", UNHEALTHY),
            ("open", True, "both", HEALTHY),
            ("open", False, "both", UNHEALTHY),
            ("proprietary", True, "both", UNHEALTHY),
            ("open", False, "dmabuf", HEALTHY),
            ("proprietary", True, "dmabuf", UNHEALTHY),
            ("proprietary", True, "peermem", HEALTHY),
            ("open", False, "peermem", UNHEALTHY),
        ],
    )
    def test_what_the_policy_asks_for(
        self, driver: str, peermem: bool, want: str, status: str
    ) -> None:
        found = one(node(driver, peermem), want)
        assert found.status == status
        assert found.action == DRAIN
        assert bool(found.remedy) == bool(found.expected) == (status == UNHEALTHY)

    def test_the_reason_says_why_neither_is_there(self) -> None:
        found = one(node("proprietary", peermem=False))
        assert found.observed == "no nvidia_peermem; no DMA-BUF: proprietary kernel module"
        assert found.expected == "nvidia_peermem or DMA-BUF"
        assert "open NVIDIA kernel module" in found.remedy

    def test_off_asks_for_nothing(self) -> None:
        assert judge("gpudirect", node("proprietary", False), ports(gpudirect="off")) == []

    def test_a_policy_without_a_word_of_it_drains_nothing(self) -> None:
        assert one(node("proprietary", peermem=False), None).status == HEALTHY

    def test_without_a_policy_it_is_told(self) -> None:
        (found,) = judge("gpudirect", node("proprietary", peermem=False), None)
        assert (found.status, found.systemic) == (UNHEALTHY, True)

    def test_without_a_policy_and_without_infiniband_it_is_not(self) -> None:
        tree = node("proprietary", peermem=False)
        tree |= {f"{CLASS}/{name}/ports/1/link_layer": "Ethernet" for name in HCAS}
        (found,) = judge("gpudirect", tree, None)
        assert found.status == HEALTHY

    @pytest.mark.parametrize("sku", [None, Sku("x"), Sku("x", gpudirect="any")])
    def test_no_hca_and_none_expected(self, sku: Sku | None) -> None:
        (found,) = judge("gpudirect", without(node(peermem=False), CLASS), sku)
        assert (found.status, found.observed) == (HEALTHY, "no HCA")

    def test_no_driver(self) -> None:
        found = one(without(node(), "/sys/module/nvidia", "/proc/driver"))
        assert (found.status, found.observed) == (UNHEALTHY, "nvidia is not loaded")


class TestPeermem:
    def test_loaded_and_not_registered_is_not_there(self) -> None:
        found = one(without(node("proprietary"), HOLDER))
        assert found.status == UNHEALTHY
        assert found.observed.startswith("nvidia_peermem loaded, not registered")

    def test_built_in_ib_core_has_no_holders(self) -> None:
        tree = without(node("proprietary"), "/sys/module/ib_core/holders")
        tree["/sys/module/ib_core/parameters/send_queue_size"] = "128"
        assert one(tree).status == UNKNOWN

    def test_the_older_module(self) -> None:
        tree = node("proprietary", peermem=False)
        tree[f"{CLIENTS}/nv_mem/version"] = "1.3-0"
        assert one(tree).status == HEALTHY

    @pytest.mark.parametrize(
        ("client", "module", "releases"),
        [
            (None, True, "NCCL >= 2.23.4, not <= 2.21.5, 2.22.3"),
            ("nv_mem", True, "any NCCL"),
            ("nv_mem_nc", True, "NCCL 2.22.3, >= 2.23.4, not <= 2.21.5"),
            ("nvidia-peermem", True, "NCCL <= 2.21.5, >= 2.23.4, not 2.22.3"),
            ("nv_mem", False, "any NCCL"),
            ("nv_other", False, "no NCCL sees it"),
        ],
    )
    def test_which_nccl_sees_it(self, client: str | None, module: bool, releases: str) -> None:
        """nccl#1676, #1939: the module is loaded, and an older NCCL looks elsewhere."""
        tree = node("proprietary", peermem=module)
        if client is not None:
            tree[f"{CLIENTS}/{client}/version"] = "580.82.07"
        found = one(tree)
        assert found.status == HEALTHY
        assert f"({releases})" in found.observed


class TestDmabuf:
    @pytest.mark.parametrize(
        ("path", "text", "why"),
        [
            (
                "/proc/sys/kernel/osrelease",
                "4.18.0-553.el8_10.x86_64",
                "kernel 4.18 is before 5.12",
            ),
            ("/proc/sys/kernel/osrelease", "5.4.0-150-generic", "kernel 5.4 is before 5.12"),
            (CONFIG, "CONFIG_PCI=y\n# CONFIG_PCI_P2PDMA is not set\n", "CONFIG_PCI_P2PDMA"),
        ],
    )
    def test_what_it_needs(self, path: str, text: str, why: str) -> None:
        found = one({**node(peermem=False), path: text})
        assert found.status == UNHEALTHY
        assert why in found.observed

    def test_ib_uverbs(self) -> None:
        found = one(without(node(peermem=False), "/sys/class/infiniband_verbs"))
        assert (found.status, "ib_uverbs" in found.observed) == (UNHEALTHY, True)

    @pytest.mark.parametrize("text", ["", "CONFIG_P"])
    def test_a_configuration_that_is_cut_off_says_nothing(self, text: str) -> None:
        assert one({**node(peermem=False), CONFIG: text}).status == HEALTHY

    def test_no_configuration_anywhere(self) -> None:
        assert one(without(node(peermem=False), CONFIG)).status == HEALTHY

    def test_the_configuration_that_the_kernel_has_itself(self) -> None:
        tree = without(node(peermem=False), CONFIG)
        tree["/proc/config.gz"] = "CONFIG_PCI=y\n"
        assert one(tree).status == UNHEALTHY

    @pytest.mark.parametrize(("taint", "status"), [("OE", HEALTHY), ("POE", UNHEALTHY)])
    def test_the_module_by_what_it_did_to_the_kernel(self, taint: str, status: str) -> None:
        tree = without(node(peermem=False), "/proc/driver/nvidia/version")
        assert one({**tree, "/sys/module/nvidia/taint": taint}).status == status

    def test_the_devices_own_word_counts(self) -> None:
        tree = {**node(peermem=False), CONFIG: {"errno": "EIO"}}
        tried = {"mlx5_0": {"dmabuf": "supported"}}
        assert one(tree).status == UNKNOWN
        assert one(tree, verbs=tried).status == HEALTHY
        refused = {**tried, "mlx5_1": {"dmabuf": "unsupported"}}
        found = one(tree, verbs=refused)
        assert (found.status, "not with mlx5_1" in found.observed) == (UNHEALTHY, True)

    @pytest.mark.parametrize("answer", [{"error": "no libibverbs"}, {"mlx5_0": {"error": "x"}}])
    def test_devices_that_could_not_be_asked_change_nothing(self, answer: object) -> None:
        assert one(node(peermem=False), verbs=answer).status == HEALTHY


class TestUnreadable:
    @pytest.mark.parametrize(
        ("tree", "path"),
        [
            (node("proprietary"), "/sys/module/nvidia_peermem/version"),
            (node("proprietary"), "/sys/module/ib_core/holders/"),
            (node("proprietary", peermem=False), f"{CLIENTS}/"),
            (node("open", peermem=False), "/proc/sys/kernel/osrelease"),
            (node("open", peermem=False), "/sys/class/infiniband_verbs/"),
            (node("open", peermem=False), CONFIG),
        ],
    )
    def test_is_unknown_unless_the_other_way_is_proven(self, tree: Entries, path: str) -> None:
        assert one({**tree, path: {"errno": "EIO"}}).status == UNKNOWN

    def test_the_other_way_is_proven(self) -> None:
        path = "/sys/module/nvidia_peermem/version"
        assert one({**node("open"), path: {"errno": "EIO"}}).status == HEALTHY

    def test_what_was_not_recorded_is_no_finding_unless_asked_for(self) -> None:
        for want, expected in ((None, []), ("any", [UNKNOWN])):
            looked = Node("gpu-1", Recording(h100()), ports("mlx5_0", gpudirect=want))
            found = run(REGISTRY[gpudirect.ID], looked)
            assert [finding.status for finding in found] == expected


class TestDistance:
    @pytest.mark.parametrize("want", ["PIX", "PXB", "PHB", "NODE", "SYS"])
    def test_near_enough(self, want: str) -> None:
        found = judge("gpu_nic", node(), ports(distance=want))
        assert [(one.object, one.status) for one in found] == [(gpu, HEALTHY) for gpu in GPUS]

    def test_the_hca_that_is_nearest_is_not_listed(self) -> None:
        found = judge("gpu_nic", node(), ports("mlx5_1", "mlx5_2", distance="PXB"))
        assert [one.status for one in found] == [UNHEALTHY, UNHEALTHY, HEALTHY, HEALTHY]
        assert (found[0].observed, found[0].expected) == ("mlx5_1 PHB", "PXB or nearer")

    def test_without_a_wish_it_is_told(self) -> None:
        for sku in (None, ports()):
            found = judge("gpu_nic", node(), sku)
            assert [one.observed for one in found][:1] == ["mlx5_0 PIX"]
            assert {one.status for one in found} == {HEALTHY}

    @pytest.mark.parametrize("distance", [None, "PIX"])
    def test_unreadable(self, distance: str | None) -> None:
        tree = {**node(), f"{DEVICES}/{GPUS[0]}": {"errno": "EIO"}}
        found = judge("gpu_nic", tree, ports(distance=distance))
        unknown = [one.object for one in found if one.status == UNKNOWN]
        assert unknown == ([GPUS[0]] if distance else [])

    def test_no_hca(self) -> None:
        assert judge("gpu_nic", without(node(), CLASS), None) == []


# The downstream ports above the first GPU, and above the HCA of its switch.
ABOVE_GPU, ABOVE_HCA = below_switch(0x15, 1)[3], below_switch(0x15, 0)[3]


def acs_on(bridge: str, control: int = 0x1D) -> Entries:
    return {**node(), f"{DEVICES}/{bridge}/config": config(control)}


class TestAcs:
    """nccl#304, #489, #523, #606: requests are redirected above GPUs and HCAs."""

    @pytest.mark.parametrize("bridge", [ABOVE_GPU, ABOVE_HCA])
    @pytest.mark.parametrize("control", [0x04, 0x08, 0x10, 0x1D])
    def test_a_redirect_between_a_gpu_and_its_hca(self, bridge: str, control: int) -> None:
        found = sick(judge("acs", acs_on(bridge, control), ports()))
        assert [(one.object, one.status, one.action) for one in found] == [
            (bridge, UNHEALTHY, "warn")
        ]
        assert "Redir+" in found[0].observed or "UpstreamFwd+" in found[0].observed

    @pytest.mark.parametrize("control", [0, 0x01, 0x41])
    def test_source_validation_alone_is_fine(self, control: int) -> None:
        found = judge("acs", acs_on(ABOVE_GPU, control), ports())
        assert {one.status for one in found} == {HEALTHY}

    @pytest.mark.parametrize(
        "bridge",
        [
            below_switch(0x15, 1)[1],  # root port and upstream port: above what both share
            below_switch(0x15, 1)[2],
            at_root(0x15)[1],  # above an HCA that no GPU is near to
        ],
    )
    def test_bridges_elsewhere_do_not_matter(self, bridge: str) -> None:
        found = judge("acs", acs_on(bridge), ports())
        assert {one.status for one in found} == {HEALTHY}
        assert bridge not in [one.object for one in found]

    @pytest.mark.parametrize(
        "sign",
        [
            {"/proc/cpuinfo": "processor : 0\nflags\t\t: fpu hypervisor lm"},
            {"/proc/cpuinfo": "processor : 0", "/sys/hypervisor/type": "xen"},
            {"/proc/cpuinfo": "processor : 0", "/sys/class/dmi/id/sys_vendor": "QEMU"},
            {
                "/proc/cpuinfo": "processor : 0",
                "/sys/class/dmi/id/sys_vendor": "Microsoft Corporation",
                "/sys/class/dmi/id/product_name": "Virtual Machine",
            },
        ],
    )
    def test_never_in_a_virtual_machine(self, sign: dict[str, str]) -> None:
        found = judge("acs", {**acs_on(ABOVE_GPU), **sign}, ports())
        assert [one.status for one in found] == [HEALTHY]

    def test_where_nothing_tells_what_machine_it_is(self) -> None:
        found = judge("acs", without(acs_on(ABOVE_GPU), "/proc/cpuinfo"), ports())
        assert [one.status for one in found if one.object == ABOVE_GPU] == [UNKNOWN]

    def test_bare_metal_by_its_vendor(self) -> None:
        tree = {**acs_on(ABOVE_GPU), "/proc/cpuinfo": "processor : 0"}
        tree |= {"/sys/class/dmi/id/sys_vendor": "Dell Inc."}
        found = judge("acs", tree, ports())
        assert [one.status for one in found if one.object == ABOVE_GPU] == [UNHEALTHY]

    @pytest.mark.parametrize("entry", [config(0x1D)[:64], {"errno": "EACCES"}, ""])
    def test_not_root(self, entry: object) -> None:
        found = judge("acs", {**node(), f"{DEVICES}/{ABOVE_GPU}/config": entry}, ports())
        assert [one.status for one in found if one.status != HEALTHY] == [UNKNOWN]
        assert ABOVE_GPU in found[-1].observed

    def test_no_gpu_or_no_hca(self) -> None:
        assert judge("acs", without(node(), CLASS), None) == []
        assert judge("acs", without(node(), "/proc/driver", DEVICES), None) == []

    def test_a_tree_that_cannot_be_read(self) -> None:
        tree = {**node(), **{f"{DEVICES}/{gpu}": {"errno": "EIO"} for gpu in GPUS}}
        assert [one.status for one in judge("acs", tree, ports())] == [UNKNOWN]


def groups(kind: object) -> Entries:
    tree = node()
    tree["/sys/class/iommu/dmar0"] = {"link": "/sys/devices/virtual/iommu/dmar0"}
    for index, address in enumerate((*GPUS, "0000:18:00.0")):
        group = f"/sys/kernel/iommu_groups/{index}"
        tree[f"{DEVICES}/{address}/iommu_group"] = {"link": group}
        tree[f"{group}/type"] = kind
    return tree


class TestIommu:
    @pytest.mark.parametrize(
        ("kind", "status"),
        [
            ("identity", HEALTHY),
            ("DMA", UNHEALTHY),
            ("DMA-FQ", UNHEALTHY),
            ({"errno": "EIO"}, UNKNOWN),
        ],
    )
    def test_by_the_types_of_groups(self, kind: object, status: str) -> None:
        (found,) = judge("iommu", groups(kind), ports())
        assert (found.status, found.action) == (status, "warn")

    def test_off(self) -> None:
        (found,) = judge("iommu", node(), ports())
        assert (found.status, found.observed) == (HEALTHY, "off")

    def test_a_virtual_machine_is_not_judged(self) -> None:
        tree = {**groups("DMA-FQ"), "/proc/cpuinfo": "flags : hypervisor"}
        (found,) = judge("iommu", tree, ports())
        assert found.status == HEALTHY

    def test_other_devices_do_not_matter(self) -> None:
        tree = groups("identity")
        tree[f"{DEVICES}/0000:00:1f.0/iommu_group"] = {"link": "/sys/kernel/iommu_groups/99"}
        tree["/sys/kernel/iommu_groups/99/type"] = "DMA-FQ"
        (found,) = judge("iommu", tree, ports())
        assert found.status == HEALTHY


def test_an_hca_more_than_there_are_gpus_near_is_no_matter() -> None:
    tree = {**node(), **hca("mlx5_9", ("pci0000:c0", "0000:c0:01.0", "0000:c1:00.0"), 1)}
    assert {one.status for one in judge("gpu_nic", tree, ports(distance="PIX"))} == {HEALTHY}
