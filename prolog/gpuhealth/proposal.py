"""A first policy for a node, written down from what it shows now, for a person to correct."""

from __future__ import annotations

from collections import Counter
from typing import Optional

from gpuhealth import hca
from gpuhealth.examination import gpu_model
from gpuhealth.nvml import Nvml
from gpuhealth.source import Source


def _ports(source: Source) -> tuple[list[tuple[str, hca.Port]], list[str]]:
    """Return the ports that are up, and a line about each one that is left out."""
    kept, left = [], []
    for device in source.names(hca.CLASS).names:
        vpd = source.read(f"{hca.CLASS}/{device}/device/vpd", binary=True)
        if vpd.text is not None and "SW_MNG" in vpd.text:
            left.append(f"{device}: a switch's own (SW_MNG)")
            continue
        for number in hca.port_numbers(source, device).names:
            if not number.isdecimal():
                continue
            port = hca.read_port(source, device, int(number))
            name = f"{device}:{number}"
            if port.state.text == "ACTIVE" and port.link_layer.text in ("InfiniBand", "Ethernet"):
                kept.append((name, port))
            else:
                layer = port.link_layer.text or port.link_layer.why
                left.append(f"{name}: {port.state.text or port.state.why}, {layer}")
    return kept, left


def propose(source: Source, node: str, gpus: Optional[Nvml]) -> str:
    """Return health.yaml for nodes like this one; its remarks say what was left out, and why.

    Most of a node's ports decide: the fastest link layer and rate that most of them have.
    A node that is sick now would make a policy that calls it healthy, which is why this is
    printed for a person, and never used as it is.
    """
    kept, left = _ports(source)
    kinds = Counter((port.link_layer.text, port.rate_gbps, port.width) for _, port in kept)
    lines = [
        f"# Written from what {node} shows now. Compare it with what such a node should have:",
        "# a port that is down today is missing here, and would never be asked for.",
        "skus:",
        f"  {_name(gpu_model(source))}:",
    ]
    model = gpu_model(source)
    lines.append(f'    match: {{gpu: "{model}"}}' if model else f"    match: {{nodes: {node}}}")
    count = len(gpus.gpus) if gpus and not gpus.error else None
    if count:
        lines.append(f"    gpus: {count}")
    if gpus and not gpus.error:
        links = {sum(map(bool, gpu.nvlinks or ())) for gpu in gpus.gpus}
        if len(links) == 1 and links != {0}:
            lines.append(f"    nvlinks: {links.pop()}")
    if kinds:
        (layer, rate, width), _ = max(kinds.items(), key=lambda item: (item[1], item[0][1] or 0.0))
        names = [
            n for n, p in kept if (p.link_layer.text, p.rate_gbps, p.width) == (layer, rate, width)
        ]
        left += [
            f"{name}: {port.link_layer.text}, {port.rate.text}"
            for name, port in kept
            if name not in names
        ]
        lines += ["    gpudirect: any", "    ports:"]
        quoted = ", ".join(f'"{name}"' for name in names)
        lines.append(f"      names: [{quoted}]")
        if rate:
            lines.append(f"      rate_gbps: {rate:g}")
        if width:
            lines.append(f"      width: {width}")
        lines.append(f"      link_layer: {layer}")
    lines += [f"    # left out: {line}" for line in sorted(left)]
    lines += [
        "# A first week in which everything only warns; then take this line out.",
        "checks: {ib_port: warn, gpudirect: warn, hung: warn}",
    ]
    return "\n".join(lines) + "\n"


def _name(model: Optional[str]) -> str:
    words = [w for w in (model or "node").lower().split() if w not in ("nvidia", "tesla")]
    return "-".join("".join(c for c in w if c.isalnum() or c == ".") for w in words) or "node"
