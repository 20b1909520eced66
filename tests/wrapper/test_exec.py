"""The words of gpusub exec; what runs is in tests/cluster/test_daily.py."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

import pytest

from gpuslurm.client import SlurmUnreachableError
from gpuslurm.commands import CommandClient
from gpuslurm.queue import QueueEntry
from gpusub import cli, targets

Make = Callable[..., Any]


@pytest.fixture
def started(monkeypatch: pytest.MonkeyPatch, entry_of: Make) -> list[Any]:
    """What would be run in job 42 (on two nodes); job 43 waits."""
    monkeypatch.setattr(targets, "me", lambda: "researcher")
    entries = (entry_of(), entry_of(id=43, name="next", state="PENDING"))
    seen: list[Any] = []

    class Queue(CommandClient):
        def queue(self, job_ids: Sequence[int] | None = None) -> tuple[QueueEntry, ...]:
            return entries if job_ids is None else ()

    def become(
        job_id: int, node: str, terminal: bool, words: Sequence[str], env: Mapping[str, str]
    ) -> None:
        seen.extend([job_id, node, terminal, list(words), env])

    monkeypatch.setattr("gpuslurm.commands.CommandClient", Queue)
    monkeypatch.setattr("gpuslurm.commands.become_step", become)
    return seen


@pytest.mark.parametrize(
    ("words", "node", "command"),
    [
        (["42", "hostname"], "gpu-5", ["hostname"]),
        (["train", "-w", "gpu-9", "sh", "-c", "x"], "gpu-9", ["sh", "-c", "x"]),
        (["-w", "gpu-9", "42", "x"], "gpu-9", ["x"]),
        (["-wgpu-9", "42", "--", "x"], "gpu-9", ["x"]),
        (["--nodelist=gpu-9", "42", "x"], "gpu-9", ["x"]),
        (["42", "x", "-w", "gpu-9"], "gpu-5", ["x", "-w", "gpu-9"]),
        (["42", "x", "--", "-h", "--help"], "gpu-5", ["x", "--", "-h", "--help"]),
        (["42", "--", "--", "x"], "gpu-5", ["--", "x"]),
        (["--", "42", "x"], "gpu-5", ["x"]),
        (["42", "--", "-x", ""], "gpu-5", ["-x", ""]),
    ],
)
def test_from_cmd_on_every_word_is_cmds(
    started: list[Any], words: list[str], node: str, command: list[str]
) -> None:
    assert cli.run(["exec", *words]) == 0
    assert started[:4] == [42, node, False, command]


def test_somebody_elses_job_is_refused(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(targets, "me", lambda: "colleague")
    assert cli.run(["exec", "42", "hostname"]) == 2
    assert "the job is researcher's, not yours" in capsys.readouterr().err
    assert started == []


@pytest.mark.parametrize(
    ("words", "says"),
    [
        ([], "write a job and a command"),
        (["42"], "write a job and a command"),
        (["42", "-w", "gpu-9"], "write a job and a command"),
        (["42", "--"], "write a job and a command"),
        (["42", "-w"], "requires an argument"),
        (["42", "--nope", "x"], "No such option"),
        (["43", "x"], "job 43 does not run; its state: pending"),
        (["42", "-w", "gpu-7", "x"], "-w gpu-7: job 42 runs on gpu-[5,9]; name one of these"),
        (["44", "x"], "no job '44'; did you mean"),
    ],
)
def test_a_refusal(
    started: list[Any], words: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert cli.run(["exec", *words]) == 2
    assert says in capsys.readouterr().err
    assert started == []


def test_what_a_surrounding_job_planted_is_left_out(
    started: list[Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    for name in ("SLURM_NTASKS", "SRUN_CPUS_PER_TASK", "RANK", "MINE"):
        monkeypatch.setenv(name, "1")
    cli.run(["exec", "42", "x"])
    assert "MINE" in started[4]
    assert not {"SLURM_NTASKS", "SRUN_CPUS_PER_TASK", "RANK"} & set(started[4])


def test_without_srun(
    started: list[Any], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def fail(*_: object) -> None:
        raise SlurmUnreachableError("srun does not start: No such file or directory")

    monkeypatch.setattr("gpuslurm.commands.become_step", fail)
    assert cli.run(["exec", "42", "x"]) == 4
    assert "srun does not start" in capsys.readouterr().err
