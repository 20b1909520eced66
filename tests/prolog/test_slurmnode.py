"""What Slurm says of a node, in every form in which it says it."""

from __future__ import annotations

import pytest

from gpuhealth.finding import Finding, unhealthy
from gpuhealth.slurmnode import (
    REASON_LIMIT,
    SlurmNode,
    may_drain,
    may_resume,
    ours,
    parse,
    parse_state,
    reason_of,
)

OURS = "gpuhealth: ib_port mlx5_0:1 DOWN/Polling expected ACTIVE/LinkUp"

# What scontrol 22.05 prints, shortened.
LINE = (
    "NodeName={name} Arch=x86_64 CoresPerSocket=8  CPUAlloc=0 CPULoad=0.07 Gres=gpu:h100:4 "
    "NodeAddr=10.217.0.1 Version=22.05.8 OS=Linux 6.18.44 #1 SMP PREEMPT_DYNAMIC @0  "
    "RealMemory=250003 Boards=1 State={state} ThreadsPerCore=1 MCS_label=N/A "
    "Partitions={partitions}  BootTime=2026-11-30T18:57:06 AllocTRES= CapWatts=n/a "
    "ExtSensorsTemp=n/s{end}\n"
)


def line(
    name: str = "gpu-5", state: str = "IDLE", partitions: str = "gpu,urgent", end: str = ""
) -> str:
    return LINE.format(name=name, state=state, partitions=partitions, end=end)


# (as printed, base, flags, may be drained)
STATES = [
    ("IDLE", "IDLE", "", True),
    ("MIXED", "MIXED", "", True),
    ("ALLOCATED", "ALLOCATED", "", True),
    ("ALLOCATED+COMPLETING", "ALLOCATED", "COMPLETING", True),
    ("IDLE+RESERVED", "IDLE", "RESERVED", True),
    ("IDLE+PLANNED", "IDLE", "PLANNED", True),
    ("IDLE+CLOUD", "IDLE", "CLOUD", True),
    ("MIXED+CLOUD+DYNAMIC_NORM", "MIXED", "CLOUD DYNAMIC_NORM", True),
    ("IDLE+DRAIN", "IDLE", "DRAIN", False),
    ("MIXED+DRAIN", "MIXED", "DRAIN", False),
    ("DOWN", "DOWN", "", False),
    ("DOWN+DRAIN", "DOWN", "DRAIN", False),
    ("DOWN*", "DOWN", "NOT_RESPONDING", False),
    ("IDLE+NOT_RESPONDING", "IDLE", "NOT_RESPONDING", False),
    ("IDLE*", "IDLE", "NOT_RESPONDING", False),
    ("IDLE*+DRAIN", "IDLE", "NOT_RESPONDING DRAIN", False),
    ("IDLE+FAIL", "IDLE", "FAIL", False),
    ("IDLE+MAINTENANCE", "IDLE", "MAINTENANCE", False),
    ("IDLE+MAINTENANCE+RESERVED", "IDLE", "MAINTENANCE RESERVED", False),
    ("MIXED+REBOOT_REQUESTED", "MIXED", "REBOOT_REQUESTED", False),
    ("IDLE+DRAIN+REBOOT_ISSUED", "IDLE", "DRAIN REBOOT_ISSUED", False),
    ("DOWN+DRAIN+REBOOT_ISSUED", "DOWN", "DRAIN REBOOT_ISSUED", False),
    ("IDLE+POWERED_DOWN", "IDLE", "POWERED_DOWN", False),
    ("IDLE+CLOUD+POWERING_UP", "IDLE", "CLOUD POWERING_UP", False),
    ("IDLE+POWERING_DOWN", "IDLE", "POWERING_DOWN", False),
    ("ALLOCATED+POWER_UP", "ALLOCATED", "POWER_UP", False),
    ("IDLE+POWER_DOWN", "IDLE", "POWER_DOWN", False),
    ("IDLE+INVALID_REG", "IDLE", "INVALID_REG", False),
    ("FUTURE", "FUTURE", "", False),
    ("UNKNOWN", "UNKNOWN", "", False),
    ("UNKNOWN+DRAIN", "UNKNOWN", "DRAIN", False),
    ("IDLE+SOME_LATER_FLAG", "IDLE", "SOME_LATER_FLAG", False),
    ("ERROR", "ERROR", "", False),
    ("", "", "", False),
    ("IDLE+DOWN", "", "IDLE DOWN", False),
    ("nonsense", "", "NONSENSE", False),
    # sinfo's words and suffixes
    ("idle", "IDLE", "", True),
    ("mix", "MIXED", "", True),
    ("alloc", "ALLOCATED", "", True),
    ("resv", "IDLE", "RESERVED", True),
    ("plnd", "IDLE", "PLANNED", True),
    ("planned", "IDLE", "PLANNED", True),
    ("idle-", "IDLE", "PLANNED", True),
    ("comp", "IDLE", "COMPLETING", True),
    ("maint", "IDLE", "MAINTENANCE", False),
    ("drain", "IDLE", "DRAIN", False),
    ("drained", "IDLE", "DRAIN", False),
    ("drained*", "IDLE", "DRAIN NOT_RESPONDING", False),
    ("drng", "ALLOCATED", "DRAIN", False),
    ("draining", "ALLOCATED", "DRAIN", False),
    ("boot", "IDLE", "REBOOT_ISSUED", False),
    ("reboot^", "IDLE", "REBOOT_ISSUED", False),
    ("down*", "DOWN", "NOT_RESPONDING", False),
    ("idle*", "IDLE", "NOT_RESPONDING", False),
    ("idle~", "IDLE", "POWERED_DOWN", False),
    ("idle#", "IDLE", "POWERING_UP", False),
    ("mix#", "MIXED", "POWERING_UP", False),
    ("idle!", "IDLE", "POWER_DOWN", False),
    ("idle%", "IDLE", "POWERING_DOWN", False),
    ("idle$", "IDLE", "MAINTENANCE", False),
    ("alloc@", "ALLOCATED", "REBOOT_REQUESTED", False),
    ("idle^", "IDLE", "REBOOT_ISSUED", False),
    ("drain$", "IDLE", "DRAIN MAINTENANCE", False),
    ("unk*", "UNKNOWN", "NOT_RESPONDING", False),
    ("futr", "FUTURE", "", False),
    ("failg", "ALLOCATED", "FAIL", False),
    ("npc", "IDLE", "PERFCTRS", True),
    ("inval", "IDLE", "INVALID_REG", False),
    ("block", "IDLE", "BLOCKED", True),
]


@pytest.mark.parametrize(("text", "base", "flags", "free"), STATES, ids=[x[0] for x in STATES])
def test_states(text: str, base: str, flags: str, free: bool) -> None:
    state = parse_state(text)
    assert (state.base, state.flags) == (base, frozenset(flags.split()))
    assert may_drain(state) is free


@pytest.mark.parametrize(("text", "base", "flags", "free"), STATES, ids=[x[0] for x in STATES])
def test_only_a_drain_of_ours_on_a_node_in_service_is_lifted(
    text: str, base: str, flags: str, free: bool
) -> None:
    state = parse_state(text)
    drained = parse_state(f"{state.text}+DRAIN") if base else state
    harmless = may_drain(parse_state("+".join([base, *(set(flags.split()) - {"DRAIN"})])))
    assert may_resume(SlurmNode("gpu-5", drained, OURS), OURS) is (bool(base) and harmless)
    assert not may_resume(SlurmNode("gpu-5", drained, "ADMIN SHUTDOWN"), OURS)


@pytest.mark.parametrize(
    "reason",
    [
        "",
        "Prolog error",
        "Epilog error",
        "ADMIN SHUTDOWN",
        "NHC: gpuhealth: x",
        " gpuhealth: ib_port",
        "gpuhealth:ib_port",
        "gpuhealth",
        "Gpuhealth: ib_port",
        "Not responding",
    ],
)
def test_foreign_reasons(reason: str) -> None:
    assert not ours(reason)
    node = SlurmNode("gpu-5", parse_state("IDLE+DRAIN"), reason)
    assert not node.drained_by_us
    assert not may_resume(node, reason)
    assert not may_resume(node, OURS)


def test_a_reason_must_be_the_same_byte_for_byte() -> None:
    node = SlurmNode("gpu-5", parse_state("IDLE+DRAIN"), OURS)
    assert may_resume(node, OURS)
    assert not may_resume(node, OURS + " ")
    assert not may_resume(node, OURS.replace("mlx5_0", "mlx5_1"))


def test_a_reason_that_outlives_its_drain_is_none() -> None:
    # Slurm 24.11 keeps it on the node that is back in service.
    node = SlurmNode("gpu-5", parse_state("IDLE"), OURS)
    assert not node.drained_by_us
    assert not may_resume(node, OURS)


def test_nodes_as_scontrol_prints_them() -> None:
    stamp = f" Reason={OURS} [root@2026-11-30T22:28:44] Comment=hello there"
    first, second = parse(line(state="IDLE+DRAIN", end=stamp) + line("gpu-6", partitions=""))
    assert first == SlurmNode(
        "gpu-5", parse_state("IDLE+DRAIN"), OURS, "root", "2026-11-30T22:28:44", ("gpu", "urgent")
    )
    assert first.drained_by_us
    assert second == SlurmNode("gpu-6", parse_state("IDLE"))


@pytest.mark.parametrize(
    ("end", "reason"),
    [
        (" Reason=x [admin@2026-11-30T22:28:44]", "x"),
        (
            " Reason=a=b State=IDLE Partitions=no [a@2026-11-30T22:28:44]",
            "a=b State=IDLE Partitions=no",
        ),
        (" Reason=[x] (y) [root@2026-11-30T22:28:44]", "[x] (y)"),
        (" Reason=two [root@2026-11-30T22:28:44]         lines Comment=5", "two"),
        (" Reason=two\nlines [root@2026-11-30T22:28:44]", "two\nlines"),
        (
            " Reason=with Reason=gpuhealth: in it [a@2026-11-30T22:28:44]",
            "with Reason=gpuhealth: in it",
        ),
        (" Reason=no stamp", "no stamp"),
        (" Reason=", ""),
    ],
)
def test_reasons_that_people_write(end: str, reason: str) -> None:
    (node,) = parse(line(state="IDLE+DRAIN", end=end))
    assert node.reason == reason
    assert node.state == parse_state("IDLE+DRAIN")
    assert node.partitions == ("gpu", "urgent")
    assert not node.drained_by_us


@pytest.mark.parametrize(
    "printed",
    ["", "\n", "Node nope not found\n", "NodeName=gpu-5\n", "NodeName= State=IDLE\n", "\0\xff" * 9],
)
def test_what_is_no_node_is_left_out(printed: str) -> None:
    assert [node for node in parse(printed) if node.state.base] == []


@pytest.mark.parametrize(
    ("found", "reason"),
    [
        (
            unhealthy("ib_port", "mlx5_0:1", "DOWN/Polling", "ACTIVE/LinkUp", ""),
            "gpuhealth: ib_port mlx5_0:1 DOWN/Polling expected ACTIVE/LinkUp",
        ),
        (unhealthy("xid", "GPU 3", "Xid 79", "", ""), "gpuhealth: xid GPU 3 Xid 79"),
        (
            unhealthy("mount", "/a b", "line\none\ttwo\r\0", '"it\'s" [x] `id` $HOME | \\n', ""),
            "gpuhealth: mount /a b line one two expected its (x) id HOME / /n",
        ),
        (unhealthy("gpu", "0", "größe", "ok", ""), "gpuhealth: gpu 0 gr??e expected ok"),
    ],
)
def test_reason(found: Finding, reason: str) -> None:
    assert reason_of(found) == reason
    assert ours(reason)


def test_reason_is_one_short_line() -> None:
    found = unhealthy("ib_port", "mlx5_0:1", "x y " * 200, "z\n" * 200, "")
    reason = reason_of(found)
    assert len(reason) <= REASON_LIMIT
    assert reason.startswith("gpuhealth: ib_port mlx5_0:1 x y x y")
    assert " expected z z" in reason
    assert "\n" not in reason
    assert reason_of(unhealthy("a", "b" * 500, "", "", "")).endswith("...")
    (node,) = parse(line(state="IDLE+DRAIN", end=f" Reason={reason} [root@2026-11-30T22:28:44]"))
    assert node.reason == reason
