"""Which jobs are cancelled; real ones are in tests/cluster/test_daily.py."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from gpuslurm.client import SlurmRefusedError
from gpuslurm.commands import CommandClient
from gpuslurm.queue import QueueEntry
from gpusub import cancel as cancelling
from gpusub import cli, targets

Make = Callable[..., Any]
TOKEN = "20261130-191500-4f3a9c81"


class Queue(CommandClient):
    """Jobs that end as they are told to, at once or after some looks."""

    def __init__(self, *entries: QueueEntry, looks: int = 0, refusal: str = "") -> None:
        self.entries, self.looks, self.refusal = entries, looks, refusal
        self.told: list[str] = []

    def queue(self, job_ids: Sequence[int] | None = None) -> tuple[QueueEntry, ...]:
        mine = [e for e in self.entries if job_ids is not None or e.user == "researcher"]
        found = [e for e in mine if job_ids is None or {e.id, e.array_id} & set(job_ids)]
        if not self.told:
            return tuple(found)
        self.looks -= 1
        state = "COMPLETING" if self.looks >= 0 else "CANCELLED"
        return tuple(e if e.ended else replace(e, state=state) for e in found)

    def cancel(self, jobs: Sequence[str]) -> None:
        if self.refusal:
            raise SlurmRefusedError(self.refusal)
        self.told += jobs


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(targets, "me", lambda: "researcher")
    monkeypatch.setattr(cancelling, "POLL_S", 0.001)
    monkeypatch.setattr(cancelling, "WAIT_S", 0.05)


@pytest.fixture
def cluster(monkeypatch: pytest.MonkeyPatch) -> Callable[..., Queue]:
    """Let Slurm have these jobs."""

    def make(*entries: QueueEntry, **options: Any) -> Queue:
        queue = Queue(*entries, **options)
        monkeypatch.setattr("gpuslurm.commands.CommandClient", lambda: queue)
        return queue

    return make


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["42"], ["42"]),
        (["train"], ["42"]),
        (["42", "train", TOKEN], ["42"]),
        (["12"], ["12"]),
        (["12_5"], ["12_5"]),
        (["13"], ["13"]),
        (["sweep"], ["12"]),
        (["42", "12_1"], ["42", "12_1"]),
    ],
)
def test_what_scancel_is_told(
    cluster: Make, entry_of: Make, words: list[str], told: list[str]
) -> None:
    array = {"array_id": 12, "name": "sweep", "command": ""}
    queue = cluster(
        entry_of(),
        entry_of(id=13, tasks="1", shown="12_1", **array),
        entry_of(id=12, tasks="4-9", shown="12_[4-9]", state="PENDING", **array),
    )
    assert cli.run(["cancel", *words]) == 0
    assert queue.told == told


@pytest.mark.parametrize(
    ("fields", "says"),
    [
        ({"user": "bob"}, "42: the job is bob's, not yours"),
        ({"state": "FAILED", "exit_code": 3}, "42: the job has ended: failed (3)"),
    ],
)
def test_a_refusal(
    cluster: Make,
    entry_of: Make,
    fields: dict[str, Any],
    says: str,
    capsys: pytest.CaptureFixture[str],
) -> None:
    queue = cluster(entry_of(id=41, name="mine"), entry_of(**fields))
    assert cli.run(["cancel", "mine", "42"]) == 2
    assert capsys.readouterr().err == f"gpusub: error: {says}\n"
    assert queue.told == []


def test_several_of_one_name(
    cluster: Make, entry_of: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    over = entry_of(id=3, state="COMPLETED")
    queue = cluster(entry_of(id=1), entry_of(id=2), over)
    assert cli.run(["cancel", "train"]) == 2
    assert "several jobs of yours: 1, 2; name them by their ids" in capsys.readouterr().err
    assert queue.told == []
    queue.entries = queue.entries[1:]
    assert cli.run(["cancel", "train"]) == 0
    assert capsys.readouterr().out == "2 (train): cancelled\n"


def test_an_id_that_was_handed_out_twice(
    cluster: Make, entry_of: Make, work: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    lost = "20250101-000000-00000000"
    (work / ".gpusub" / lost).mkdir(parents=True)
    (work / ".gpusub" / "42").symlink_to(lost)
    queue = cluster(entry_of())
    for word in ("42", lost, f".gpusub/{lost}", ".gpusub/42"):
        assert cli.run(["cancel", word]) == 2
    assert "ids start again after a crash" in capsys.readouterr().err
    assert queue.told == []
    assert cli.run(["cancel", TOKEN]) == 0
    assert queue.told == ["42"]


def test_one_that_takes_its_time(
    cluster: Make, entry_of: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster(entry_of(), looks=3)
    assert cli.run(["cancel", "42"]) == 0
    assert capsys.readouterr().out == "42 (train): cancelled\n"
    cluster(entry_of(), looks=10**9)
    assert cli.run(["cancel", "42"]) == 0
    assert capsys.readouterr().out == ("42 (train): cancelled, and still completing on gpu-[5,9]\n")


def test_json_tells_what_became_of_it(
    cluster: Make, entry_of: Make, capsys: pytest.CaptureFixture[str]
) -> None:
    cluster(entry_of(id=42), entry_of(id=43, array_id=42, state="COMPLETED"))
    assert cli.run(["cancel", "--json", "42"]) == 0
    (one,) = json.loads(capsys.readouterr().out)
    assert (one["job_id"], one["state"], one["token"]) == (42, "CANCELLED", TOKEN)


def test_slurm_refuses(cluster: Make, entry_of: Make, capsys: pytest.CaptureFixture[str]) -> None:
    cluster(entry_of(), refusal="Kill job error on job id 42: Access/permission denied")
    assert cli.run(["cancel", "42"]) == 3
    assert "Access/permission denied" in capsys.readouterr().err
