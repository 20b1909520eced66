"""The NCCL variables that are right on this node, from what the node itself shows."""

from __future__ import annotations

from gpuhealth import hca
from gpuhealth.check import Node


def variables(node: Node) -> list[tuple[str, str, str]]:
    """Return (NCCL variable, value, reason) for this node; none where NCCL finds best by itself.

    The HCAs are those that the policy lists and the node has. Without a policy they are the
    active InfiniBand ports, if the node has other RDMA devices as well: NCCL would take those,
    too (NVIDIA/nccl:src/transport/net_ib/init.cc takes every active port). The list is an
    exact match (``=``), for ``mlx5_1`` alone would take mlx5_10 along.
    """
    listed = [
        f"{port.device}:{port.number}"
        for port in hca.listed_ports(node)
        if port.device is not None and not node.source.names(f"{hca.CLASS}/{port.device}").error
    ]
    if listed:
        return [("NCCL_IB_HCA", "=" + ",".join(listed), "the ports that the health policy lists")]
    active: list[str] = []
    others: list[str] = []
    for device in node.source.names(hca.CLASS).names:
        if hca.is_limited(node, device):
            others.append(device)
            continue
        for number in hca.port_numbers(node.source, device).names:
            if not number.isdecimal():
                continue
            port = hca.read_port(node.source, device, int(number))
            if port.state.text != "ACTIVE":
                continue
            (active if port.link_layer.text == "InfiniBand" else others).append(
                f"{device}:{number}"
            )
    if not active or not others:
        return []
    reason = f"its active InfiniBand ports; not {', '.join(others)}"
    return [("NCCL_IB_HCA", "=" + ",".join(active), reason)]
