from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhealth import hca
from gpuhealth.check import PROLOG
from gpuhealth.checks import roce
from gpuhealth.checks.roce import Gid
from gpuhealth.finding import DRAIN, HEALTHY, UNHEALTHY, UNKNOWN, Finding
from gpuhealth.policy import Ports, Sku
from gpuhealth.reading import Reading
from gpuhealth.source import Recording
from pcitree import CLASS, Entries, judge, node, whole, without
from recorded import h100

PORT = f"{CLASS}/mlx5_0/ports/1"
NET = "/sys/class/net"
LOCAL = "fe80:0000:0000:0000:ba3f:d2ff:fe00:0001"
GLOBAL = "2001:0db8:0000:0000:ba3f:d2ff:fe00:0001"
IPV4 = "0000:0000:0000:0000:0000:ffff:0a00:0105"
NONE = "0000:0000:0000:0000:0000:0000:0000:0000"
EINVAL = {"errno": "EINVAL"}
V1, V2 = "IB/RoCE v1", "RoCE v2"
BYTES = st.binary(max_size=40).map(lambda data: data.decode("latin-1"))
# As an interface with a link-local and an IPv4 address fills the table.
TABLE = [(LOCAL, V1), (LOCAL, V2), (IPV4, V1), (IPV4, V2), (NONE, EINVAL), (NONE, EINVAL)]


def gids(*entries: tuple[Any, Any]) -> Entries:
    tree: Entries = {}
    for index, (gid, kind) in enumerate(entries):
        tree[f"{PORT}/gids/{index}"] = gid
        tree[f"{PORT}/gid_attrs/types/{index}"] = kind
    return tree


def interface(name: str, **changed: Any) -> Entries:
    files = {"carrier": "1", "operstate": "up", "mtu": "9000", **changed}
    return {f"{NET}/{name}/{file}": entry for file, entry in files.items()}


def ethernet() -> Entries:
    return {
        **without(node(), f"{CLASS}/mlx5_0/ports"),
        f"{PORT}/state": "4: ACTIVE",
        f"{PORT}/link_layer": "Ethernet",
        f"{PORT}/gid_attrs/ndevs/0": "ens1",
        f"{CLASS}/mlx5_0/device/net/ens1/address": "b8:3f:d2:00:00:01",
        **gids(*TABLE),
        **interface("ens1"),
    }


def bond(**second: Any) -> Entries:
    return {
        **ethernet(),
        f"{PORT}/gid_attrs/ndevs/0": "bond0",
        **interface("bond0"),
        **interface("ens1"),
        **interface("ens2", **second),
        f"{NET}/bond0/bonding/slaves": "ens1 ens2",
        f"{NET}/bond0/bonding/mii_status": "up",
        f"{NET}/ens1/master": {"link": "/sys/devices/virtual/net/bond0"},
        f"{NET}/ens2/master": {"link": "/sys/devices/virtual/net/bond0"},
    }


def one(tree: Entries, **wanted: Any) -> Finding:
    options = {key: wanted.pop(key) for key in ("context",) if key in wanted}
    sku = Sku("roce", ports=Ports(names=("mlx5_0:1",), link_layer="Ethernet", **wanted))
    (found,) = judge(roce.ID, tree, sku, **options)
    return found


class TestHealthy:
    def test_a_port_as_it_should_be(self) -> None:
        found = one(ethernet())
        assert (found.object, found.status, found.action) == ("mlx5_0:1", HEALTHY, DRAIN)
        assert found.observed == "ens1, mtu 9000, GID 3 10.0.1.5"

    def test_infiniband_needs_no_net_device(self) -> None:
        """cluster-health#4: no IPoIB is configured, and nothing is wrong with that."""
        sku = Sku("ib", ports=Ports(names=("mlx5_0:1",)))
        assert judge(roce.ID, node(), sku) == []
        assert judge(roce.ID, h100(), sku) == []

    def test_an_unlisted_bond_does_not_matter(self) -> None:
        tree = {**bond(carrier="0")}
        sku = Sku("ib", ports=Ports(names=("mlx5_1:1",)))
        assert judge(roce.ID, tree, sku) == []
        assert judge(roce.ID, tree, None) == []

    def test_a_switchs_own_device_is_not_touched(self) -> None:
        tree = {**ethernet(), f"{CLASS}/mlx5_0/device/vpd": "SW_MNG", **interface("ens1", mtu="1")}
        assert judge(roce.ID, tree, Sku("x", ports=Ports(names=("mlx5_0:1",)))) == []

    def test_ecn_is_told_and_not_judged(self) -> None:
        tree = ethernet()
        tree |= {f"{NET}/ens1/ecn/roce_np/enable/{x}": "1" if x == 3 else "0" for x in range(8)}
        tree[f"{CLASS}/mlx5_0/tc/1/traffic_class"] = "Global tclass=106"
        found = one(tree)
        assert (found.status, "ECN marked on priority 3" in found.observed) == (HEALTHY, True)
        assert "tclass=106" in found.observed
        assert "ECN" not in one(tree, context=PROLOG).observed


class TestLink:
    @pytest.mark.parametrize(
        ("changed", "observed"),
        [
            ({"carrier": "0", "operstate": "down"}, "ens1 no carrier"),
            ({"carrier": EINVAL, "operstate": "down"}, "ens1 is switched off"),
            ({"operstate": "lowerlayerdown"}, "ens1 lowerlayerdown"),
        ],
    )
    def test_down(self, changed: dict[str, Any], observed: str) -> None:
        found = one({**ethernet(), **interface("ens1", **changed)})
        assert (found.status, found.observed, found.systemic) == (UNHEALTHY, observed, False)

    def test_unreadable(self) -> None:
        found = one({**ethernet(), **interface("ens1", carrier={"errno": "EIO"})})
        assert (found.status, found.observed) == (UNKNOWN, "ens1 carrier EIO")

    def test_no_net_device(self) -> None:
        tree = without(ethernet(), f"{PORT}/gid_attrs/ndevs", f"{CLASS}/mlx5_0/device/net")
        assert (one(tree).status, one(tree).observed) == (UNHEALTHY, "no net device")

    def test_a_net_device_that_cannot_be_found_out(self) -> None:
        tree = without(ethernet(), f"{PORT}/gid_attrs/ndevs", f"{CLASS}/mlx5_0/device/net")
        assert one({**tree, f"{CLASS}/mlx5_0/device/net/": {"errno": "EIO"}}).status == UNKNOWN

    def test_among_several_the_ports_own(self) -> None:
        tree = without(ethernet(), f"{PORT}/gid_attrs/ndevs")
        tree |= {f"{CLASS}/mlx5_0/device/net/aaa_rep0/address": "02:00:00:00:00:01"}
        tree |= {f"{NET}/ens1/dev_port": "0", f"{NET}/aaa_rep0/dev_port": "1"}
        assert one(tree).observed.startswith("ens1,")


class TestBond:
    """One RDMA device for two net devices: its port stays ACTIVE while one of them is down."""

    def test_both_legs_up(self) -> None:
        assert one(bond()).status == HEALTHY

    @pytest.mark.parametrize("by_leg", [False, True])
    @pytest.mark.parametrize(
        "second", [{"carrier": "0"}, {"carrier": EINVAL}, {"operstate": "down"}]
    )
    def test_a_leg_down(self, second: dict[str, Any], by_leg: bool) -> None:
        tree = bond(**second)
        if by_leg:  # a driver that names the leg whose PCI function the device is on
            tree[f"{PORT}/gid_attrs/ndevs/0"] = "ens1"
        found = one(tree)
        assert found.status == UNHEALTHY
        assert found.observed.startswith("bond0's leg ens2 ")

    def test_a_bond_that_is_down(self) -> None:
        found = one({**bond(), f"{NET}/bond0/bonding/mii_status": "down"})
        assert (found.status, found.observed) == (UNHEALTHY, "bond0 down")

    def test_a_bond_without_legs(self) -> None:
        assert one({**bond(), f"{NET}/bond0/bonding/slaves": ""}).observed == "bond0 has no leg"

    def test_legs_that_cannot_be_read(self) -> None:
        tree = {**bond(), f"{NET}/bond0/bonding/slaves": {"errno": "EIO"}}
        assert one(tree).status == UNKNOWN

    def test_a_bridge_is_no_bond(self) -> None:
        tree = {**ethernet(), f"{NET}/ens1/master": {"link": "/sys/devices/virtual/net/br0"}}
        assert one(tree).status == HEALTHY


class TestMtu:
    @pytest.mark.parametrize(
        ("mtu", "wanted", "status", "systemic"),
        [
            ("9000", None, HEALTHY, False),
            ("4200", None, HEALTHY, False),
            # nobody has said what it should be: told, and no reason to drain
            ("1500", None, UNHEALTHY, True),
            ("1500", 1500, HEALTHY, False),
            ("1500", 9000, UNHEALTHY, False),
            ("9216", 9000, HEALTHY, False),
            ({"errno": "EIO"}, 9000, UNKNOWN, False),
            ("", 9000, UNKNOWN, False),
            ({"errno": "EIO"}, None, HEALTHY, False),
        ],
    )
    def test_against_the_policy(
        self, mtu: Any, wanted: int | None, status: str, systemic: bool
    ) -> None:
        found = one({**ethernet(), **interface("ens1", mtu=mtu)}, mtu_bytes=wanted)
        assert (found.status, found.systemic) == (status, systemic)

    def test_what_drains_comes_before_what_only_warns(self) -> None:
        found = one({**ethernet(), **interface("ens1", mtu="1500", carrier="0")})
        assert found.observed == "ens1 no carrier"

    def test_what_is_known_comes_before_what_is_not(self) -> None:
        changed = interface("ens1", mtu="1500", carrier={"errno": "EIO"})
        found = one({**ethernet(), **changed}, mtu_bytes=9000)
        assert (found.status, found.observed) == (UNHEALTHY, "ens1 mtu 1500")


class TestChosenGid:
    @pytest.mark.parametrize(
        ("table", "index", "kind"),
        [
            (TABLE, 3, V2),
            ([(LOCAL, V1), (LOCAL, V2), (NONE, EINVAL), (EINVAL, EINVAL), (IPV4, V2)], 4, V2),
            ([(IPV4, V2), (IPV4, V1)], 0, V2),
            ([(LOCAL, V1), (GLOBAL, V2), (IPV4, V2)], 2, V2),
            ([(LOCAL, V1), (IPV4, V1), (GLOBAL, V2)], 1, V1),
            ([(LOCAL, V1), (LOCAL, V2)], 0, V1),
            ([(LOCAL, V2), (GLOBAL, V2)], 0, V2),
        ],
    )
    def test_as_nccl_chooses(self, table: list[Any], index: int, kind: str) -> None:
        found = roce.chosen_gid(Recording(whole(gids(*table))), PORT)
        assert isinstance(found, Gid)
        assert (found.index, found.kind) == (index, kind)

    def test_by_number_and_not_by_name(self) -> None:
        table = [(LOCAL, V1)] * 2 + [(IPV4, V2)] + [(LOCAL, V1)] * 7 + [(IPV4, V2)]
        found = roce.chosen_gid(Recording(whole(gids(*table))), PORT)
        assert isinstance(found, Gid)
        assert found.index == 2

    def test_it_reads_no_further_than_it_has_to(self) -> None:
        tree = {**ethernet(), **gids(*TABLE, *[({"errno": "EIO"}, V2)] * 200)}
        assert one(tree).status == HEALTHY

    @pytest.mark.parametrize("table", [[], [(NONE, EINVAL)], [(EINVAL, EINVAL)]])
    def test_none(self, table: list[Any]) -> None:
        tree = {**gids(*table), f"{PORT}/state": "4: ACTIVE", f"{PORT}/gids/255": EINVAL}
        found = roce.chosen_gid(Recording(whole(tree)), PORT)
        assert isinstance(found, Reading)
        assert found.absent

    @given(st.dictionaries(st.integers(0, 9), BYTES | st.just(IPV4), max_size=9))
    def test_any_text(self, table: dict[int, str]) -> None:
        tree = {f"{PORT}/gids/{index}": text for index, text in table.items()}
        tree |= {f"{PORT}/gid_attrs/types/{index}": V2 for index in table}
        found = roce.chosen_gid(Recording(whole(tree)), PORT)
        assert isinstance(found, (Gid, Reading))


class TestGid:
    @pytest.mark.parametrize(
        ("table", "observed"),
        [
            ([(LOCAL, V1), (LOCAL, V2)], f"GID 0 {V1} {LOCAL}"),
            ([(LOCAL, V1), (IPV4, V1)], f"GID 1 {V1} 10.0.1.5"),
            ([(NONE, EINVAL)], "no GID"),
        ],
    )
    def test_none_that_nccl_can_use(self, table: list[Any], observed: str) -> None:
        found = one({**without(ethernet(), f"{PORT}/gids"), **gids(*table)})
        assert (found.status, found.observed) == (UNHEALTHY, observed)
        assert found.expected == "a RoCE v2 GID of an IPv4 address"

    @pytest.mark.parametrize(
        ("index", "status"),
        # nccl#718, #769, #1131: the index differs from node to node, and 1 is link-local
        [
            (3, HEALTHY),
            (2, UNHEALTHY),
            (1, UNHEALTHY),
            (0, UNHEALTHY),
            (4, UNHEALTHY),
            (9, UNHEALTHY),
        ],
    )
    def test_at_the_index_that_the_site_sets(self, index: int, status: str) -> None:
        found = one(ethernet(), gid_index=index)
        assert found.status == status
        if status == UNHEALTHY:
            assert found.expected == f"a RoCE v2 GID of an IPv4 address at {index}"

    def test_ipv6_where_the_site_sets_its_index(self) -> None:
        tree = {**ethernet(), **gids((LOCAL, V1), (GLOBAL, V2))}
        assert one(tree, gid_index=1).status == HEALTHY

    @pytest.mark.parametrize("entry", [{"errno": "EIO"}, "garbage"])
    def test_unreadable(self, entry: Any) -> None:
        tree = {**ethernet(), **gids(*[(entry, V2)] * 6)}
        assert one(tree).status == UNKNOWN
        assert one(tree, gid_index=3).status == UNKNOWN

    def test_a_type_that_cannot_be_read(self) -> None:
        tree = {**ethernet(), f"{PORT}/gid_attrs/types/3": {"errno": "EIO"}}
        assert one(tree).status == UNKNOWN


def test_a_port_that_is_gone_is_for_the_check_of_ports() -> None:
    sku = Sku("x", ports=Ports(names=("mlx5_7:1", "0000:ff:00.0:1")))
    assert judge(roce.ID, ethernet(), sku) == []


def test_the_name_of_a_net_device_is_no_path() -> None:
    tree = {**ethernet(), f"{PORT}/gid_attrs/ndevs/0": "../../etc"}
    listed = hca.ListedPort("mlx5_0:1", 1, "mlx5_0")
    assert roce.net_device(Recording(whole(tree)), listed).text == "ens1"
