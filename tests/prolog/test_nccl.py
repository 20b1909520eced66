from __future__ import annotations

from dataclasses import fields

from gpuhealth.nccl import Fabric, stated_variables

FULL = Fabric(
    type="infiniband",
    hcas=("=mlx5_0:1", "mlx5_3:1"),
    service_level=5,
    traffic_class=136,
    gdr_level="PHB",
    gid_index=3,
    pkey=1,
    qps_per_connection=2,
    socket_ifname="=eth0",
)


def test_everything_that_is_stated_is_rendered_as_written() -> None:
    assert stated_variables(FULL) == [
        ("NCCL_IB_HCA", "=mlx5_0:1,mlx5_3:1", "hcas"),
        ("NCCL_IB_SL", "5", "service_level"),
        ("NCCL_IB_TC", "136", "traffic_class"),
        ("NCCL_NET_GDR_LEVEL", "PHB", "gdr_level"),
        ("NCCL_IB_GID_INDEX", "3", "gid_index"),
        ("NCCL_IB_PKEY", "1", "pkey"),
        ("NCCL_IB_QPS_PER_CONNECTION", "2", "qps_per_connection"),
        ("NCCL_SOCKET_IFNAME", "=eth0", "socket_ifname"),
    ]


def test_every_key_but_the_type_becomes_one_variable() -> None:
    keys = [field.name for field in fields(Fabric) if field.name != "type"]
    assert [key for _, _, key in stated_variables(FULL)] == keys


def test_what_is_not_stated_is_left_to_nccl() -> None:
    assert stated_variables(Fabric()) == []
    assert stated_variables(Fabric(type="roce", hcas=())) == []


def test_zero_is_stated() -> None:
    zero = Fabric(service_level=0, traffic_class=0, gid_index=0, pkey=0)
    assert [(value, key) for _, value, key in stated_variables(zero)] == [
        ("0", "service_level"),
        ("0", "traffic_class"),
        ("0", "gid_index"),
        ("0", "pkey"),
    ]
