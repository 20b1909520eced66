"""Reasons as squeue prints them, in words; tests/cluster/test_daily.py brings them about."""

from __future__ import annotations

import datetime
from collections.abc import Callable
from typing import Any

import pytest

from gpuslurm.queue import QueueEntry, Unavailable
from gpusub import reasons
from gpusub.reasons import dependency, explain
from gpusub.submission import NEVER_STARTS

Make = Callable[..., QueueEntry]
NOW = datetime.datetime(2026, 11, 30, 20, 31)
OUT = (
    Unavailable("gpu", "drained", "gpu-[5-6]", "gpuhealth: ib_port mlx5_0:1"),
    Unavailable("gpu", "down", "gpu-7", "none"),
    Unavailable("cpu", "down", "cpu-1", "fan"),
)


def why(entry: QueueEntry, *unavailable: Unavailable) -> str:
    return explain(entry, unavailable, NOW)


@pytest.mark.parametrize("state", ["RUNNING", "COMPLETED", "COMPLETING", "CONFIGURING"])
def test_one_that_does_not_wait(entry_of: Make, state: str) -> None:
    assert why(entry_of(state=state, reason="None")) == ""


@pytest.mark.parametrize(
    ("fields", "words"),
    [
        ({"reason": ""}, "Slurm has not looked at it yet"),
        ({"reason": "Resources", "node_count": 1}, "waits for 1 free node (Resources)"),
        (
            {"reason": "Resources", "start": "2026-11-30T23:00:00"},
            "waits for 2 free nodes (Resources); may start at 23:00:00",
        ),
        ({"reason": "Priority", "start": "2026-11-30T20:00:00"},
         "jobs of higher priority come first (Priority)"),
        (
            {"reason": "Resources", "switches": 1, "switches_wait_s": 600},
            "waits for 2 free nodes below 1 leaf switch until 20:40:00, then for any (Resources)",
        ),
        (
            {"reason": "Resources", "switches": 2, "switches_wait_s": 60},
            "waits for 2 free nodes, below any switches now that the 1:00 for 2 leaf switches are "
            "over (Resources)",
        ),
        ({"reason": "JobHeldUser"},
         "held by you; let it go with: scontrol release 42 (JobHeldUser)"),
        (
            {"reason": "launch_failed_requeued_held"},
            "a node failed to start it (its prolog, most likely), and Slurm holds it; let it go "
            "with: scontrol release 42",
        ),
        ({"reason": "BeginTime", "eligible": "2026-12-01T08:00:00"},
         "starts at Dec 01 08:00 at the earliest (BeginTime)"),
        (
            {"reason": "BeginTime", "eligible": "2026-11-30T20:32:00", "restarts": 1},
            "requeued; Slurm starts it again after 20:32:00 (BeginTime)",
        ),
        ({"reason": "PartitionTimeLimit"},
         f"never starts (PartitionTimeLimit): {NEVER_STARTS['PartitionTimeLimit']}"),
        (
            {"reason": "DependencyNeverSatisfied", "dependency": "afterok:7(failed)"},
            "never starts (DependencyNeverSatisfied): it waits until job 7 has ended well "
            "(it did not)",
        ),
        ({"reason": "AssocGrpGRES"},
         "the account's jobs together have as many GPUs and other GRES as they may (AssocGrpGRES)"),
        ({"reason": "AssocGrpMemLimit"},
         "the account's jobs together have as much memory as they may (AssocGrpMemLimit)"),
        ({"reason": "QOSMaxCpuPerUserLimit"},
         "more CPUs than the QOS admits (QOSMaxCpuPerUserLimit)"),
        ({"reason": "QOSMaxJobsPerUserLimit"},
         "more jobs than the QOS admits (QOSMaxJobsPerUserLimit)"),
        ({"reason": "QOSMinGRES"},
         "less GPUs and other GRES than the QOS admits (QOSMinGRES)"),
        ({"reason": "A reason of the future"}, "A reason of the future"),
    ],
)  # fmt: skip
def test_in_words(entry_of: Make, fields: dict[str, Any], words: str) -> None:
    assert why(entry_of(**{"state": "PENDING", **fields})) == words


class TestNodes:
    OURS = "gpu-[5-6] drained (gpuhealth: ib_port mlx5_0:1), gpu-7 down"

    def test_those_of_its_partition_are_named(self, entry_of: Make) -> None:
        entry = entry_of(state="PENDING", reason="Resources")
        assert why(entry, *OUT) == f"waits for 2 free nodes (Resources); not to be had: {self.OURS}"

    @pytest.mark.parametrize(
        "reason",
        [
            "ReqNodeNotAvail, UnavailableNodes:gpu-[5-7]",
            "Nodes required for job are DOWN, DRAINED or reserved for jobs in higher priority "
            "partitions",
        ],
    )
    def test_those_that_it_needs(self, entry_of: Make, reason: str) -> None:
        entry = entry_of(state="PENDING", reason=reason)
        assert reasons.needs_nodes(entry)
        assert why(entry, *OUT) == f"the nodes that it needs are not to be had: {self.OURS}"

    def test_where_sinfo_tells_nothing(self, entry_of: Make) -> None:
        for reason, words in (
            ("ReqNodeNotAvail, UnavailableNodes:gpu-7", "not to be had: gpu-7"),
            ("ReqNodeNotAvail, May be reserved for other job", "reserved for other jobs, or down"),
        ):
            assert words in why(entry_of(state="PENDING", reason=reason))

    def test_many_groups_are_counted(self, entry_of: Make) -> None:
        groups = [Unavailable("gpu", "down", f"gpu-{n}", f"r{n}") for n in range(9)]
        words = why(entry_of(state="PENDING", reason="Resources"), *groups)
        assert words.endswith("gpu-2 down (r2), and 6 more groups")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("", "other jobs have ended"),
        ("afterok:5(unfulfilled)", "job 5 has ended well"),
        ("after:5+10(unfulfilled)", "job 5 has started for 10 min"),
        (
            "afterany:5(unfulfilled),afternotok:6(unfulfilled)",
            "job 5 has ended and job 6 has failed",
        ),
        ("afterok:5(failed)?afterany:6_*", "job 5 has ended well (it did not) or job 6 has ended"),
        ("aftercorr:5_2", "job 5_2 has done its task of the same number"),
        ("singleton(unfulfilled)", "your other jobs of this name have ended"),
        ("expand:9", "expand:9"),
    ],
)
def test_dependencies(text: str, words: str) -> None:
    assert dependency(text) == words
