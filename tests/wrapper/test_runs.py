from __future__ import annotations

import os
import subprocess
from pathlib import Path

import pytest

from gpusub import runs
from gpusub.runs import Run

ONE, TWO = "20261130-191500-4f3a9c81", "20261130-191501-00000000"


@pytest.fixture
def root(work: Path) -> Path:
    path = work / ".gpusub"
    for token in (ONE, TWO):
        (path / token).mkdir(parents=True)
    (path / "7").symlink_to(ONE)
    (path / "5").symlink_to(ONE)
    (path / "notes").mkdir()
    (path / "20261130-191502-00000000").write_text("a file")
    (path / "20261130-191503-00000000").symlink_to(TWO)
    (path / "8").symlink_to("20261130-191504-00000000")
    return path


def test_those_of_a_directory(root: Path) -> None:
    found = runs.under(root)
    assert [(run.token, sorted(run.job_ids)) for run in found] == [(ONE, [5, 7]), (TWO, [])]
    assert [run.job_id for run in found] == [7, None]
    assert runs.under(root / "nope") == ()


@pytest.mark.parametrize("name", [ONE, "7", "5", f"{ONE}/job.sh", f"{ONE}/"])
def test_one_by_its_path(root: Path, name: str) -> None:
    run = runs.at(root / name)
    assert run is not None
    assert (run.path, run.job_id) == (root / ONE, 7)


@pytest.mark.parametrize("name", ["8", "notes", "", "20261130-191502-00000000"])
def test_what_is_none(root: Path, name: str) -> None:
    assert runs.at(root / name) is None


@pytest.mark.parametrize(
    ("command", "run"),
    [
        (f"/w/.gpusub/{ONE}/job.sh", Run(Path(f"/w/.gpusub/{ONE}"))),
        (f"/w/{ONE}/other.sh", None),
        ("/w/job.sh", None),
        (f"{ONE}/job.sh", None),
        ("", None),
    ],
)
def test_of_a_job(command: str, run: Run | None) -> None:
    assert runs.of_command(command) == run


def test_where_they_are(work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    assert runs.default_root() == work / ".gpusub"
    monkeypatch.setenv("GPUSUB_RUN_ROOT", "~/runs")
    assert runs.default_root() == Path.home() / "runs"


@pytest.mark.parametrize("content", ["", "[1]", "{", '{"a": {"value": 3, "origin": "x"}}'])
def test_a_plan_may_be_anything(root: Path, content: str) -> None:
    run = Run(root / ONE)
    assert run.plan() == {}
    (run.path / "plan.json").write_text(content)
    assert runs.value(run.plan(), "a") in ((None, ""), (3, "x"))
    assert runs.value(run.plan(), "a", "value", "b") == (None, "")
    assert run.exit_code() is None


def test_whether_one_runs_on_this_machine(root: Path) -> None:
    run = Run(root / ONE)
    assert not runs.runs_here(run)
    with subprocess.Popen(["sleep", "60"], env={**os.environ, "GPUSUB_TOKEN": run.token}) as p:
        assert runs.runs_here(run)
        p.kill()
    assert not runs.runs_here(run)
