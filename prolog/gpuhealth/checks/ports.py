"""Ports of InfiniBand and RoCE: is each one up, and as fast as it should be?"""

from __future__ import annotations

import errno
from collections.abc import Iterator
from dataclasses import replace

from gpuhealth import hca
from gpuhealth.check import Node, check
from gpuhealth.finding import DRAIN, UNHEALTHY, Finding, healthy, unhealthy, unknown
from gpuhealth.history import persists
from gpuhealth.policy import Ports
from gpuhealth.reading import Reading

ID = "ib_port"

# While the firmware of a device is reset, its files answer so, and its directories are empty.
_GONE = (errno.EINVAL, errno.ENODEV, errno.ENXIO)

_REMEDIES = {
    "Polling": "check the cable and the switch's port at its other end, then reseat or replace",
    "Disabled": "the port is switched off: enable it (ibportstate, mlxlink) or look for who did",
    "Sleep": "the port is switched off: enable it (ibportstate, mlxlink) or look for who did",
}
_CABLE = "check the cable, its modules and the switch's port"
_MANAGER = "the link is up and no subnet manager has configured it: look at opensm or UFM"


@check(
    ID,
    "ports that the policy lists: state, physical state, rate, width, link layer, LID, P_Keys",
    action=DRAIN,
    gpu=False,
)
def ib_port(node: Node) -> Iterator[Finding]:
    """Judge every listed port; what all of them show alike has its cause elsewhere."""
    listed = node.policy.ports
    if listed is None or not listed.names:
        return
    devices = node.source.names(hca.CLASS)
    if devices.absent or (not devices.error and not devices.names):
        observed = "no HCA" if devices.error == 0 else f"no {hca.CLASS}"
        yield replace(
            unhealthy(
                ID,
                "all ports",
                observed,
                f"{len(listed.names)} ports: {' '.join(listed.names)}"[:160],
                "load mlx5_core and mlx5_ib, and look at lspci and dmesg",
            ),
            systemic=True,
        )
        return
    findings = [_judge(node, port, listed) for port in hca.listed_ports(node)]
    systemic = len(findings) > 1 and _same_cause(findings)
    for finding in findings:
        yield replace(finding, systemic=systemic or finding.systemic)


def _same_cause(findings: list[Finding]) -> bool:
    """Whether every port waits for the subnet manager, or every device is gone."""
    if any(finding.status != UNHEALTHY for finding in findings):
        return False
    return all(finding.observed.startswith(("INIT", "ARMED")) for finding in findings) or all(
        finding.observed == "no such device" for finding in findings
    )


def _judge(node: Node, listed: hca.ListedPort, want: Ports) -> Finding:
    name = listed.name
    if listed.device is None:
        if listed.error:
            return unknown(ID, name, Reading(error=listed.error).why, "a device at this address")
        return _missing(name)
    # Listed, so that what is missing there is known from what is there.
    devices = node.source.names(hca.CLASS)
    if not devices.error and listed.device not in devices.names:
        return _missing(name)
    if hca.is_limited(node, listed.device):
        return unhealthy(
            ID,
            name,
            "a switch's own device (SW_MNG)",
            "an HCA",
            "take the port out of the policy: it is not for jobs",
        )
    port = hca.read_port(node.source, listed.device, listed.number)
    if port.state.text is None:
        return _stateless(node, listed, port.state)
    return _state(name, port) or _link(name, port, want) or _network(node, listed, port, want)


def _missing(name: str) -> Finding:
    return unhealthy(
        ID,
        name,
        "no such device",
        "present",
        "look for the device in lspci and dmesg; power-cycle the node if it has fallen off the bus",
    )


def _stateless(node: Node, listed: hca.ListedPort, state: Reading) -> Finding:
    """Judge a port whose state can't be read."""
    assert listed.device is not None
    numbers = hca.port_numbers(node.source, listed.device)
    if not numbers.error and numbers.names and str(listed.number) not in numbers.names:
        return unhealthy(
            ID,
            listed.name,
            f"no such port (there: {', '.join(numbers.names)[:40]})",
            "present",
            "correct the port's number in the policy",
        )
    if is_gone(state):
        observed = f"state {state.why}" if numbers.names else "no ports"
        if persists(node.history, gone_key(listed.name), node.now_s):
            return unhealthy(
                ID,
                listed.name,
                f"{observed} for {_duration(node, listed)}",
                "ACTIVE",
                "the device doesn't come back from a reset: reload its driver or reboot the node",
            )
        return unknown(ID, listed.name, observed, "ACTIVE", "the device may be in a reset")
    return unknown(ID, listed.name, f"state {state.why}", "ACTIVE")


def is_gone(state: Reading) -> bool:
    """Whether a port that is there has no state, as while its device is reset."""
    return state.absent or state.error in _GONE


def gone_key(name: str) -> str:
    """Return what a history remembers a listed port by that has no state."""
    return f"{ID} {name} gone"


def _duration(node: Node, listed: hca.ListedPort) -> str:
    first, _ = node.history.seen[gone_key(listed.name)]
    return f"{node.now_s - first:.0f} s"


def _state(name: str, port: hca.Port) -> Finding | None:
    """Judge state and physical state; None if the port is up."""
    state, phys = port.state.text or "", port.phys_state.text
    if port.phys_state.unreadable:
        return unknown(ID, name, f"phys_state {port.phys_state.why}", "LinkUp")
    observed = f"{state}/{phys}" if phys else state
    if state == "ACTIVE" and phys in ("LinkUp", None):
        return None
    if state in ("INIT", "ARMED") and phys in ("LinkUp", None):
        return unhealthy(ID, name, observed, "ACTIVE/LinkUp", _MANAGER)
    if state == "ACTIVE_DEFER" or (state == "ACTIVE" and phys == "LinkErrorRecovery"):
        return unknown(ID, name, observed, "ACTIVE/LinkUp", "the link recovers: look again")
    if state not in ("DOWN", "INIT", "ARMED", "ACTIVE", "NOP"):
        return unknown(ID, name, f"state {state[:40]!r}", "ACTIVE/LinkUp")
    if phys in ("LinkErrorRecovery", "PortConfigurationTraining"):
        return unknown(ID, name, observed, "ACTIVE/LinkUp", "the link comes up: look again")
    return unhealthy(ID, name, observed, "ACTIVE/LinkUp", _REMEDIES.get(phys or "", _CABLE))


def _link(name: str, port: hca.Port, want: Ports) -> Finding | None:
    """Judge rate, width and link layer; None if all of them are as they should be."""
    layer = port.link_layer.text
    if want.link_layer is not None:
        if layer is None or layer == "":
            return unknown(
                ID, name, f"link_layer {port.link_layer.why or 'empty'}", want.link_layer
            )
        if layer != want.link_layer:
            remedy = "set the port's protocol (mlxconfig LINK_TYPE), or correct the policy"
            return unhealthy(ID, name, layer[:40], want.link_layer, remedy)
    if want.width is not None:
        if port.width is None:
            return unknown(ID, name, _rate(port), f"{want.width}X")
        if port.width < want.width:
            return unhealthy(ID, name, f"{port.width}X", f"{want.width}X", _CABLE)
    if want.rate_gbps is not None:
        if port.rate_gbps is None:
            return unknown(ID, name, _rate(port), f"{want.rate_gbps:g} Gb/sec")
        if port.rate_gbps < want.rate_gbps:
            return unhealthy(
                ID, name, f"{port.rate_gbps:g} Gb/sec", f"{want.rate_gbps:g} Gb/sec", _CABLE
            )
    return None


def _rate(port: hca.Port) -> str:
    return f"rate {port.rate.why}" if port.rate.text is None else f"rate {port.rate.text[:40]!r}"


def _network(node: Node, listed: hca.ListedPort, port: hca.Port, want: Ports) -> Finding:
    """Judge what the subnet manager gives a port that is up."""
    name = listed.name
    if port.link_layer.text == "InfiniBand":
        for file, bad in (("lid", (0, 0xFFFF)), ("sm_lid", (0,))):
            value = _hex(node.source.read(f"{listed.path}/{file}"))
            if value in bad:
                # Seen on ports that work while the manager moves: nothing to drain for.
                return replace(
                    unhealthy(ID, name, f"{file} {value:#x}", "one of the subnet's", _MANAGER),
                    systemic=True,
                )
        mtu = _active_mtu(node, listed)
        if want.mtu_bytes is not None and mtu is not None and mtu < want.mtu_bytes:
            remedy = "set the MTU of the partition in the subnet manager's partitions.conf"
            return unhealthy(ID, name, f"active MTU {mtu}", str(want.mtu_bytes), remedy)
    missing = _missing_pkeys(node, listed, want)
    if isinstance(missing, Reading):
        return unknown(ID, name, f"pkeys {missing.why}", ", ".join(map(hex, want.pkeys)))
    if missing:
        return unhealthy(
            ID,
            name,
            "no P_Key " + ", ".join(map(hex, missing)),
            ", ".join(map(hex, want.pkeys)),
            "add the port to the partition in the subnet manager's partitions.conf",
        )
    rate = f", {port.rate_gbps:g} Gb/sec" if port.rate_gbps is not None else ""
    width = f" {port.width}X" if port.width is not None else ""
    return healthy(ID, name, f"{port.state.text}/{port.phys_state.text or '?'}{rate}{width}")


def _active_mtu(node: Node, listed: hca.ListedPort) -> int | None:
    """Return the MTU that libibverbs says the port uses; sysfs has it nowhere."""
    answer = node.verbs.get(listed.device or "")
    mtu = answer.get("active_mtu") if isinstance(answer, dict) else None
    return mtu if isinstance(mtu, int) else None


def _missing_pkeys(node: Node, listed: hca.ListedPort, want: Ports) -> tuple[int, ...] | Reading:
    if not want.pkeys:
        return ()
    entries = node.source.names(f"{listed.path}/pkeys")
    if entries.error:
        return Reading(error=entries.error)
    have = set()
    for entry in entries.names:
        found = node.source.read(f"{listed.path}/pkeys/{entry}")
        value = _hex(found)
        if value is None:
            return found if found.error else Reading(error=errno.EINVAL)
        have.add(value & 0x7FFF)
        if have.issuperset(key & 0x7FFF for key in want.pkeys):
            break
    return tuple(key for key in want.pkeys if key & 0x7FFF not in have)


def _hex(found: Reading) -> int | None:
    try:
        return int(found.text or "", 16)
    except ValueError:
        return None
