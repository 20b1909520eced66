"""How the house is built: who may import whom, what is loaded when, and what is in the wheel."""

from __future__ import annotations

import ast
import os
import re
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[1]
SOURCES = {
    "gpusub": ROOT / "wrapper" / "gpusub",
    "gpuslurm": ROOT / "slurm" / "gpuslurm",
    "gpuhealth": ROOT / "prolog" / "gpuhealth",
}
MAY_IMPORT = {
    "gpusub": {"gpusub", "gpuslurm", "gpuhealth"},
    "gpuslurm": {"gpuslurm", "gpuhealth"},
    "gpuhealth": {"gpuhealth"},
}
# Beside the standard library: what pyproject.toml requires.
REQUIRED = {
    "gpusub": {"click", "jinja2", "msgspec", "yaml"},
    "gpuslurm": set(),
    "gpuhealth": {"pynvml"},
}
# The one module of gpuhealth that never runs on a node before a job.
COMPILER = {"gpuhealth.compiler": {"yaml"}}
MODULES = sorted(
    (package, path) for package, source in SOURCES.items() for path in source.rglob("*.py")
)


def imports_of(path: Path) -> Iterator[str]:
    """Return the top-level names of all that a module imports, anywhere in it."""
    for node in ast.walk(ast.parse(path.read_text())):
        if isinstance(node, ast.Import):
            yield from (alias.name.partition(".")[0] for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert not node.level, f"{path}:{node.lineno}: a relative import"
            assert node.module
            yield node.module.partition(".")[0]


@pytest.mark.parametrize(
    ("package", "path"), MODULES, ids=[f"{package}.{path.stem}" for package, path in MODULES]
)
class TestImports:
    def test_they_run_one_way(self, package: str, path: Path) -> None:
        assert set(imports_of(path)) & set(SOURCES) <= MAY_IMPORT[package]

    def test_everything_else_is_required(self, package: str, path: Path) -> None:
        others = set(imports_of(path)) - set(SOURCES) - sys.stdlib_module_names
        assert others <= REQUIRED[package] | COMPILER.get(f"{package}.{path.stem}", set())

    def test_there_are_tests_of_it(self, package: str, path: Path) -> None:
        folder = SOURCES[package].parent.name
        name = path.stem.strip("_")
        if name != "init":
            assert (ROOT / "tests" / folder / f"test_{name}.py").is_file()


def python(code: str, *options: str, **environ: str) -> str:
    """Run code in a fresh interpreter in the repository's root; return what it printed."""
    done = subprocess.run(
        [sys.executable, *options, "-c", code],
        cwd=ROOT,
        env={**os.environ, **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


FIND = """
import importlib.util, sys
def test_it():
    for folder in ("wrapper", "slurm", "prolog", "templates"):
        assert importlib.util.find_spec(folder) is None, folder
    for package in ("gpusub", "gpuslurm", "gpuhealth"):
        assert importlib.util.find_spec(package), package
    assert %r not in sys.path
"""


def test_no_folder_of_ours_is_a_module() -> None:
    # A "slurm" that can be imported hides another one, and works from one directory only.
    python(FIND % str(ROOT) + "test_it()", "-P")


def test_nor_under_pytest(tmp_path: Path) -> None:
    (tmp_path / "test_it.py").write_text(FIND % str(ROOT))
    settings = [
        "-c",
        str(ROOT / "pyproject.toml"),
        "--rootdir",
        str(ROOT),
        "-p",
        "no:cacheprovider",
    ]
    done = subprocess.run(
        [sys.executable, "-P", "-m", "pytest", "-q", *settings, str(tmp_path / "test_it.py")],
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout


def loaded(*argv: str) -> set[str]:
    """Return what a run of gpusub has imported by its end."""
    code = (
        "import os, sys; from gpusub.__main__ import main\n"
        f"sys.argv = ['gpusub', *{list(argv)!r}]\n"
        "leave = lambda code: None; os._exit = leave\n"
        "try: main()\n"
        "except SystemExit: pass\n"
        "sys.stdout.flush(); sys.stderr.write('\\n'.join(sys.modules))\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return {name.partition(".")[0] for name in done.stderr.splitlines()}


def test_the_version_is_told_at_once() -> None:
    heavy = {"jinja2", "yaml", "msgspec", "submitit", "rich", "click", "tenacity", "subprocess"}
    names = loaded("--version")
    assert "gpusub" in names
    assert not names & heavy


def test_a_submission_loads_no_more_than_it_needs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "train.py").touch()
    names = loaded("--local", "--dry-run", "train.py")
    assert {"gpusub", "jinja2", "click"} <= names
    assert not names & {
        "submitit",
        "rich",
        "tenacity",
        "torch",
        "numpy",
        "asyncio",
        "multiprocessing",
    }


def test_the_script_is_printed_from_the_checkout(tmp_path: Path) -> None:
    assert rendered(tmp_path).startswith("#!/bin/bash\n")


def rendered(directory: Path, **environ: str) -> str:
    done = subprocess.run(
        [sys.executable, "-m", "gpusub", "--local", "--dry-run", "--", "true"],
        cwd=directory,
        env={**os.environ, "HOME": str(directory), **environ},
        capture_output=True,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Build the distribution as a release would, without a network."""
    out = tmp_path_factory.mktemp("wheel")
    pip = [sys.executable, "-m", "pip", "--disable-pip-version-check", "wheel", "--no-deps"]
    build = [*pip, "--no-build-isolation", "--no-index", "--wheel-dir", str(out), str(ROOT)]
    done = subprocess.run(build, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    (built,) = out.iterdir()
    return built


class TestWheel:
    def test_what_is_in_it(self, wheel: Path) -> None:
        names = set(zipfile.ZipFile(wheel).namelist())
        tops = {name.partition("/")[0] for name in names}
        assert {top for top in tops if not top.endswith(".dist-info")} == set(SOURCES)
        for package, source in SOURCES.items():
            for path in source.rglob("*.py"):
                assert f"{package}/{path.relative_to(source)}" in names
            assert f"{package}/py.typed" in names
        for template in (ROOT / "templates").iterdir():
            assert f"gpusub/templates/{template.name}" in names
        assert [name for name in names if name.endswith("licenses/LICENSE")]

    def test_it_finds_its_templates_without_the_checkout(self, wheel: Path, tmp_path: Path) -> None:
        target = tmp_path / "installed"
        zipfile.ZipFile(wheel).extractall(target)
        where = {"PYTHONPATH": str(target)}
        found = python("import gpusub; print(gpusub.__file__)", **where)
        assert found == f"{target}/gpusub/__init__.py\n"
        (tmp_path / "work").mkdir()
        from_checkout = rendered(tmp_path / "work")
        token = re.compile(r"\d{8}-\d{6}-[0-9a-f]{8}")
        assert token.sub("", rendered(tmp_path / "work", **where)) == token.sub("", from_checkout)


def project_files() -> list[Path]:
    listed = subprocess.run(
        ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"],
        cwd=ROOT,
        capture_output=True,
        check=False,
    )
    names = listed.stdout.decode().split("\0") if listed.returncode == 0 else []
    return [ROOT / name for name in names if (ROOT / name).is_file()]


def test_no_file_knows_where_it_was_written() -> None:
    files = project_files()
    if not files:
        pytest.skip("no git checkout")
    own = re.compile(rb"/(?:work/(?:main|shared|[.]library)|farm/in)\b")
    assert not [str(path) for path in files if own.search(path.read_bytes())]
    assert ROOT / "pyproject.toml" in files
