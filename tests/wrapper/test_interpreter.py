from __future__ import annotations

from pathlib import Path

import pytest

from gpusub.errors import GpusubError
from gpusub.interpreter import find
from gpusub.request import Value


def program(path: Path, mode: int = 0o755) -> str:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("#!/bin/sh\n")
    path.chmod(mode)
    return str(path)


@pytest.fixture
def path(tmp_path: Path) -> str:
    """A PATH with python and python3 in its second directory."""
    for name in ("python", "python3"):
        program(tmp_path / "usr" / name)
    return f"{tmp_path}/none:{tmp_path}/usr"


@pytest.mark.parametrize("variable", ["VIRTUAL_ENV", "CONDA_PREFIX"])
def test_the_active_environments(tmp_path: Path, path: str, work: Path, variable: str) -> None:
    there = program(tmp_path / "env" / "bin" / "python")
    environ = {"PATH": path, variable: str(tmp_path / "env")}
    assert find(None, environ, work) == Value(there, f"environment {variable}")


def test_a_virtual_environment_within_conda(tmp_path: Path, path: str, work: Path) -> None:
    there = program(tmp_path / "venv" / "bin" / "python")
    program(tmp_path / "conda" / "bin" / "python")
    environ = {"VIRTUAL_ENV": f"{tmp_path}/venv", "CONDA_PREFIX": f"{tmp_path}/conda", "PATH": path}
    assert find(None, environ, work).value == there


def test_its_link_is_kept(tmp_path: Path, work: Path) -> None:
    # The target of the link knows nothing of the packages beside the link.
    real = program(tmp_path / "real")
    link = tmp_path / "venv" / "bin" / "python"
    link.parent.mkdir(parents=True)
    link.symlink_to(real)
    assert find(None, {"VIRTUAL_ENV": f"{tmp_path}/venv"}, work).value == str(link)
    assert find(str(link), {}, work).value == str(link)
    assert find(None, {"PATH": str(link.parent)}, work).value == str(link)


def test_one_that_is_gone_is_passed_over(tmp_path: Path, path: str, work: Path) -> None:
    program(tmp_path / "noexec" / "bin" / "python", 0o644)
    for stale in ("/nowhere", f"{tmp_path}/noexec", ""):
        environ = {"PATH": path, "VIRTUAL_ENV": stale, "CONDA_PREFIX": stale}
        assert find(None, environ, work) == Value(f"{tmp_path}/usr/python", "python on PATH")


def test_the_first_on_path(tmp_path: Path, path: str, work: Path) -> None:
    assert find(None, {"PATH": path}, work) == Value(f"{tmp_path}/usr/python", "python on PATH")
    (tmp_path / "usr" / "python").unlink()
    assert find(None, {"PATH": path}, work) == Value(f"{tmp_path}/usr/python3", "python3 on PATH")


def test_none_at_all_is_refused(tmp_path: Path, work: Path) -> None:
    with pytest.raises(GpusubError) as refused:
        find(None, {"PATH": str(tmp_path)}, work)
    assert str(refused.value) == (
        "no python on PATH; activate an environment, or name one with --python"
    )


class TestAsked:
    def test_by_name(self, tmp_path: Path, path: str, work: Path) -> None:
        there = program(tmp_path / "usr" / "python3.11")
        environ = {"PATH": path, "VIRTUAL_ENV": "/nowhere"}
        assert find("python3.11", environ, work) == Value(there, "option --python")

    @pytest.mark.parametrize(
        "asked", ["venv/bin/python", "./venv/bin/python", "../work/venv/bin/python"]
    )
    def test_by_a_path_from_here(self, work: Path, path: str, asked: str) -> None:
        there = program(work / "venv" / "bin" / "python")
        assert find(asked, {"PATH": path}, work).value == there

    def test_from_home(self, tmp_path: Path, work: Path) -> None:
        there = program(tmp_path / "home" / "venv" / "bin" / "python")
        assert find("~/venv/bin/python", {}, work).value == there

    def test_as_the_user_sees_the_working_directory(self, work: Path, tmp_path: Path) -> None:
        program(work / "python")
        (tmp_path / "link").symlink_to(work)
        assert find("./python", {}, tmp_path / "link").value == f"{tmp_path}/link/python"

    @pytest.mark.parametrize("asked", ["nope", "/nowhere/python", "./python", "", "venv"])
    def test_what_is_no_program_is_refused(self, work: Path, path: str, asked: str) -> None:
        (work / "venv").mkdir()
        program(work / "python", 0o644)
        with pytest.raises(GpusubError) as refused:
            find(asked, {"PATH": path}, work)
        assert str(refused.value) == (
            f"--python {asked}: no such program; name a Python, as in ~/venv/bin/python"
        )
