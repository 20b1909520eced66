"""What a site expects of its nodes, as ``gpuhealth compile`` has written it.

People write YAML (`gpuhealth.compiler` reads and checks it); what root reads before every job is
the JSON made of that, whose shape is this module's.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Any, Optional, Union

from gpuhealth import hostlist

SCHEMA = 1


@dataclass(frozen=True)
class Ports:
    """The ports that jobs use, and what each of them has to show.

    ``names`` are ``mlx5_0:1``, or ``0000:18:00.0:1`` by PCI address, which survives renaming.
    ``pkeys`` are 15-bit partition keys. ``mtu_bytes`` is the active MTU of the port, or of the
    net device for RoCE. ``gid_index`` is NCCL_IB_GID_INDEX, where the site sets it.
    """

    names: tuple[str, ...] = ()
    rate_gbps: Optional[float] = None
    width: Optional[int] = None
    link_layer: Optional[str] = None
    pkeys: tuple[int, ...] = ()
    mtu_bytes: Optional[int] = None
    gid_index: Optional[int] = None


@dataclass(frozen=True)
class Sku:
    """One kind of node. None, or nothing, is "the site says nothing of it".

    ``nodes`` (Slurm's hostlist expression) and ``gpu`` (NVML's product name) say which nodes
    are of this kind. ``gpudirect`` is any, dmabuf, peermem, both or off. ``distance`` is the
    farthest allowed way from a GPU to its nearest listed HCA: PIX, PXB, PHB, NODE or SYS.
    ``versions`` maps driver, kernel, ofed and firmware to what is expected, as a prefix ending
    in ``*`` or exactly. ``pcie`` maps gpu and hca to width and speed_gts. ``modules`` are kernel
    modules beside those that the listed ports need; ``mounts`` are mount points.
    """

    name: str
    nodes: Optional[str] = None
    gpu: Optional[str] = None
    gpus: Optional[int] = None
    nvlinks: Optional[int] = None
    gpudirect: Optional[str] = None
    ports: Optional[Ports] = None
    distance: Optional[str] = None
    persistence: Optional[bool] = None
    fabric_manager: Optional[bool] = None
    versions: Mapping[str, str] = field(default_factory=dict)
    pcie: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    modules: tuple[str, ...] = ()
    mounts: tuple[str, ...] = ()


@dataclass(frozen=True)
class Cap:
    """How many nodes of a partition may be drained by us at once; the smaller one holds."""

    count: Optional[int] = 4
    percent: Optional[float] = 5.0


@dataclass(frozen=True)
class Policy:
    """A whole health.yaml.

    ``checks`` maps a check's id to drain, warn or off; ``thresholds`` a check's id, then what is
    measured, then the kind of limit (``per_hour``, ``delta``) to a number.
    """

    skus: tuple[Sku, ...] = ()
    checks: Mapping[str, str] = field(default_factory=dict)
    thresholds: Mapping[str, Mapping[str, Mapping[str, float]]] = field(default_factory=dict)
    max_drained: Cap = field(default_factory=Cap)
    report_dir: Optional[str] = None

    def sku_of(self, node: str, gpu: Optional[str]) -> Optional[Sku]:
        """Return the first SKU that a node with this name and this GPU is of.

        ``gpu`` is None where the GPU's name could not be found out: then names alone decide, and
        a SKU that is told by its GPU is none of this node's.
        """
        for sku in self.skus:
            if sku.nodes is not None and not hostlist.matches(sku.nodes, node):
                continue
            if sku.gpu is not None and sku.gpu != gpu:
                continue
            return sku
        return None


def dump(policy: Policy) -> str:
    """Return the JSON that `load` reads."""
    return json.dumps({"schema": SCHEMA, **asdict(policy)}, indent=1, sort_keys=True) + "\n"


def load(text: Union[str, bytes]) -> Policy:
    """Return a policy from its JSON; ValueError says what is wrong with it."""
    try:
        value = json.loads(text)
    except ValueError as error:
        raise ValueError(f"not JSON ({error}); write it with: gpuhealth compile") from None
    if not isinstance(value, dict) or value.get("schema") != SCHEMA:
        raise ValueError("not a policy of this version; write it anew with: gpuhealth compile")
    try:
        return _policy({key: item for key, item in value.items() if key != "schema"})
    except (TypeError, AttributeError, KeyError) as error:
        raise ValueError(f"not a policy ({error}); write it with: gpuhealth compile") from None


def _policy(value: dict[str, Any]) -> Policy:
    skus = tuple(_sku(dict(item)) for item in value.pop("skus"))
    cap = Cap(**value.pop("max_drained"))
    return Policy(skus=skus, max_drained=cap, **value)


def _sku(value: dict[str, Any]) -> Sku:
    ports = value.pop("ports")
    if ports is not None:
        ports = {key: tuple(x) if isinstance(x, list) else x for key, x in ports.items()}
        value["ports"] = Ports(**ports)
    value = {key: tuple(x) if isinstance(x, list) else x for key, x in value.items()}
    return Sku(**value)
