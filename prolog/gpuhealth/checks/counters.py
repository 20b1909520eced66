"""Errors that ports count, and links that go down and come back."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Union

from gpuhealth import portcounters
from gpuhealth.check import CONTEXTS, PERIODIC, PROLOG, Node, check
from gpuhealth.finding import UNHEALTHY, Finding, healthy, unhealthy, unknown
from gpuhealth.portcounters import RESET, SATURATED, CountedPort, Counts

COUNTERS = "ib_counters"
FLAPS = "ib_flaps"

# For so long an event stays a finding, so that whoever looks next still sees it.
DELTA_WINDOW_S = 600.0
FLAP_WINDOW_S = 3 * 3600.0
_UNITS = {"per_second": 1.0, "per_minute": 60.0, "per_hour": 3600.0}

# Published figures: NVIDIA/NVSentinel:docs/configuration/nic-health-monitor.md (any link_downed,
# local_link_integrity_errors, excessive_buffer_overrun_errors, rnr_nak_retry_err; 120 symbol
# errors an hour, which is IBTA's bit error rate of 1e-12; 5 recoveries a minute; 10 slow restarts
# a second). What has no limit here is for a policy to set one.
LIMITS: Mapping[str, Mapping[str, float]] = {
    "link_downed": {"delta": 0},
    "local_link_integrity_errors": {"delta": 0},
    "excessive_buffer_overrun_errors": {"delta": 0},
    "rnr_nak_retry_err": {"delta": 0},
    "symbol_error": {"per_hour": 120},
    "link_error_recovery": {"per_minute": 5},
    "roce_slow_restart": {"per_second": 10},
    "port_rcv_errors": {},
    "port_rcv_remote_physical_errors": {},
    "port_xmit_discards": {},
    "VL15_dropped": {},
    "local_ack_timeout_err": {},
    "out_of_sequence": {},
    "packet_seq_err": {},
}
# Azure/cyclecloud-healthagent: three downs in three hours; Azure's own nodes: five losses of the
# carrier in a day.
FLAP_LIMITS: Mapping[str, Mapping[str, float]] = {
    "link_downed": {"count": 3, "window_s": FLAP_WINDOW_S},
    "carrier_down_count": {"count": 5, "window_s": 24 * 3600.0},
}

_CABLE = "reseat or replace the cable and its modules, and look at the switch's port"
_REMEDIES = {
    "rnr_nak_retry_err": "a receiver was not ready: look for a job that died, or a slow host",
    "port_xmit_discards": "look for congestion, or for a port that is down, on the way",
    "port_rcv_errors": _CABLE,
    "roce_slow_restart": "look at PFC and ECN of the port and of the switch",
    "out_of_sequence": "look at PFC and ECN of the port and of the switch",
    "packet_seq_err": "look for packets lost on the way",
    "local_ack_timeout_err": "look for packets lost on the way, or for a peer that is gone",
    "VL15_dropped": "the subnet manager's packets are dropped: look at its sweeps",
}
_CLEAR = "clear the port's counters once (perfquery -R), so that they count again"

# What came of one limit: a finding, or in words what could not be told, or "" if all is well.
_Result = Union[Finding, str]


# In the epilog, too: so that errors are found right behind the job that met them, and that the
# job's own share of every counter is known.
@check(
    COUNTERS,
    "errors that ports counted since earlier runs, against the limits",
    contexts=CONTEXTS,
    thresholds=LIMITS,
    gpu=False,
)
def ib_counters(node: Node) -> Iterator[Finding]:
    """Compare every port's counters with those of earlier runs of this boot."""
    found = []
    for port in portcounters.counted_ports(node):
        counts = portcounters.read(node.source, port.device, port.number)
        found.append((port, _judge_counters(node, port, counts)))
    common = _common([findings for _, findings in found])
    for port, findings in found:
        for counter, finding in findings:
            # Nobody said that jobs use a port that isn't listed: nothing is drained for it.
            systemic = finding.status == UNHEALTHY and (counter in common or not port.listed)
            yield replace(finding, systemic=systemic)


def _judge_counters(node: Node, port: CountedPort, counts: Counts) -> list[tuple[str, Finding]]:
    sick, untold, compared, fresh = [], [], 0, 0
    limited = [name for name, limits in node.thresholds.items() if limits]
    for name in limited:
        now = counts.values.get(name)
        if now is None:
            continue
        series = portcounters.series(node.history, port.key, name, node.now_s, now)
        if len(series) < 2:
            fresh += 1
            continue
        result = _judge(port, name, series, node.thresholds[name], node.now_s)
        if isinstance(result, Finding):
            sick.append((name, result))
        elif result == SATURATED:
            untold.append(f"{name} saturated at {now}")
        else:
            compared += 1
            if result == RESET:
                untold.append(f"{name} reset")
    if sick:
        return sick
    lost = [f"{name} {counts.missing[name]}" for name in counts.unreadable(limited)]
    said = "".join(f"; can't tell: {text}" for text in [*untold, *lost])[:150]
    if compared or fresh:
        kind = f"{compared} counters within limits" if compared else "first look"
        return [("", healthy(COUNTERS, port.name, kind + said))]
    if untold or lost:
        return [("", unknown(COUNTERS, port.name, said[2:], "counters that count", _CLEAR))]
    return [("", healthy(COUNTERS, port.name, "no counters"))]


def _judge(
    port: CountedPort,
    name: str,
    series: list[tuple[float, int]],
    limits: Mapping[str, float],
    now_s: float,
) -> _Result:
    bits, why = portcounters.WIDTHS[name], ""
    window_s = limits.get("window_s", DELTA_WINDOW_S)
    remedy = _REMEDIES.get(name, _CABLE)
    for kind, limit in limits.items():
        unit_s = _UNITS.get(kind)
        if unit_s is None and kind not in ("delta", "count"):
            continue
        found = portcounters.rise(series, bits, now_s - (unit_s or window_s))
        why = why or found.why
        observed = f"{name} +{found.count} in {found.interval_s:.0f} s"
        if unit_s is None:
            # count is how many there may not be, delta how many there may.
            if found.count > limit or (kind == "count" and found.count >= limit > 0):
                expected = f"at most +{limit:g}" if kind == "delta" else f"fewer than +{limit:g}"
                return unhealthy(COUNTERS, port.name, observed, expected, remedy)
            continue
        # Two errors in a second are no 7200 an hour: what was not watched is taken as clean.
        rate = found.count * unit_s / max(found.interval_s, unit_s)
        if rate > limit:
            expected = f"at most {limit:g} {kind.replace('_', ' ')}"
            return unhealthy(COUNTERS, port.name, observed, expected, remedy)
    return why


def _common(findings: list[list[tuple[str, Finding]]]) -> frozenset[str]:
    """Return the counters that rose on every port: their cause is a switch, or the fabric."""
    if len(findings) < 2:
        return frozenset()
    sick = [{name for name, finding in one if finding.status == UNHEALTHY} for one in findings]
    return frozenset(set.intersection(*sick))


@check(
    FLAPS,
    "links that went down and came back several times within hours",
    contexts=(PROLOG, PERIODIC),
    thresholds=FLAP_LIMITS,
    gpu=False,
)
def ib_flaps(node: Node) -> Iterator[Finding]:
    """Count how often each link went down in the window; it clears itself as that passes."""
    limits = {
        name: limit for name, limit in node.thresholds.items() if limit.get("count") is not None
    }
    if not limits:
        return
    found = []
    for port in portcounters.counted_ports(node):
        counts = portcounters.read(node.source, port.device, port.number, tuple(limits))
        found.append((port, _judge_flaps(node, port, counts, limits)))
    everywhere = len(found) > 1 and all(one.status == UNHEALTHY for _, one in found)
    for port, finding in found:
        systemic = finding.status == UNHEALTHY and (everywhere or not port.listed)
        yield replace(finding, systemic=systemic)


def _judge_flaps(
    node: Node, port: CountedPort, counts: Counts, limits: Mapping[str, Mapping[str, float]]
) -> Finding:
    told: list[str] = []
    for name, limit in limits.items():
        now = counts.values.get(name)
        if now is None:
            continue
        series = portcounters.series(node.history, port.key, name, node.now_s, now)
        window_s = limit.get("window_s", FLAP_WINDOW_S)
        found = portcounters.rise(series, portcounters.WIDTHS[name], node.now_s - window_s)
        if found.count >= limit["count"] > 0:
            observed = f"{name} +{found.count} in {min(found.interval_s, window_s) / 3600:.1f} h"
            expected = f"fewer than {limit['count']:g} in {window_s / 3600:g} h"
            return unhealthy(FLAPS, port.name, observed, expected, _CABLE)
        if found.why == SATURATED:
            # Healthy nodes that have been up for long are like this: it is no doubt about the
            # link as it is now, and would be one for ever.
            told.append(f"{name} saturated at {now}, can't tell; perfquery -R clears it")
        elif len(series) < 2:
            told.append(f"{name} first look")
        else:
            told.append(f"{name} +{found.count}" + (" since its reset" if found.why else ""))
    lost = [f"{name} {counts.missing[name]}" for name in counts.unreadable(tuple(limits))]
    if not told and lost:
        return unknown(FLAPS, port.name, ", ".join(lost)[:150], "a counter that can be read")
    return healthy(FLAPS, port.name, ", ".join(told) or "no counter of it")
