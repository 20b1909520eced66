"""NCCL variables from what a site states about its fabric.

Names, defaults and accepted values: NVIDIA/nccl:src/misc/param.cc,
src/transport/net_ib/init.cc, src/graph/paths.cc (2.30), and the documentation's env page.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Optional

FABRIC_TYPES = ("infiniband", "roce", "ethernet", "none")

# ncclTopoPathToStr and the legacy integers; any other text is ignored by NCCL without a word.
GDR_LEVELS = ("LOC", "NVL", "NVB", "C2C", "PIX", "PXB", "P2C", "PXN", "PHB", "SYS")


@dataclass(frozen=True)
class Fabric:
    """What a site states about the network between its nodes; None is "not stated".

    ``hcas`` is NCCL_IB_HCA's list, item by item (``mlx5_0:1``; a leading ``=`` or ``^``
    belongs to the first item). ``traffic_class`` is the 8-bit value (DSCP << 2 | ECN).
    """

    type: Optional[str] = None
    hcas: Optional[tuple[str, ...]] = None
    service_level: Optional[int] = None
    traffic_class: Optional[int] = None
    gdr_level: Optional[str] = None
    gid_index: Optional[int] = None
    pkey: Optional[int] = None
    qps_per_connection: Optional[int] = None
    socket_ifname: Optional[str] = None


def stated_variables(fabric: Fabric) -> list[tuple[str, str, str]]:
    """Return what ``fabric`` states as (NCCL variable, value, key of the fabric), as written."""
    stated = [
        ("NCCL_IB_HCA", ",".join(fabric.hcas) if fabric.hcas else None, "hcas"),
        ("NCCL_IB_SL", fabric.service_level, "service_level"),
        ("NCCL_IB_TC", fabric.traffic_class, "traffic_class"),
        ("NCCL_NET_GDR_LEVEL", fabric.gdr_level, "gdr_level"),
        ("NCCL_IB_GID_INDEX", fabric.gid_index, "gid_index"),
        ("NCCL_IB_PKEY", fabric.pkey, "pkey"),
        ("NCCL_IB_QPS_PER_CONNECTION", fabric.qps_per_connection, "qps_per_connection"),
        ("NCCL_SOCKET_IFNAME", fabric.socket_ifname, "socket_ifname"),
    ]
    return [(name, str(value), key) for name, value, key in stated if value is not None]
