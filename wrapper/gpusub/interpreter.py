"""Which Python runs the program: the one that the user's shell would."""

from __future__ import annotations

import os
import shutil
from collections.abc import Mapping
from pathlib import Path

from gpusub.errors import GpusubError
from gpusub.request import Value


def doubts(chosen: Value[str] | None, environ: Mapping[str, str]) -> list[str]:
    """Return what to say where the environment's variables and PATH name different Pythons."""
    if chosen is None or not chosen.origin.startswith("environment "):
        return []
    first = shutil.which("python", path=environ.get("PATH"))
    if first is None or os.path.realpath(first) == os.path.realpath(chosen.value):
        return []
    if Path(first).parent == Path(chosen.value).parent:
        return []
    variable = chosen.origin.removeprefix("environment ")
    return [f"running {chosen.value}, by {variable}; PATH has {first} (--python chooses)"]


def find(asked: str | None, environ: Mapping[str, str], cwd: Path) -> Value[str]:
    """Return the interpreter's absolute path and how it was chosen.

    Links are kept: a virtual environment's ``python`` is one, and its target knows nothing of
    the packages beside it.

    Raises:
        GpusubError: ``asked`` is no program, or no Python is on PATH.
    """
    if asked is not None:
        found = shutil.which(os.path.expanduser(asked), path=environ.get("PATH"))
        if found is None:
            raise GpusubError(
                f"--python {asked}: no such program; name a Python, as in ~/venv/bin/python"
            )
        return Value(os.path.abspath(cwd / found), "option --python")
    for variable in ("VIRTUAL_ENV", "CONDA_PREFIX"):
        prefix = environ.get(variable)
        if prefix and os.access(Path(prefix, "bin/python"), os.X_OK):
            return Value(str(Path(prefix, "bin/python")), f"environment {variable}")
    for name in ("python", "python3"):
        found = shutil.which(name, path=environ.get("PATH"))
        if found is not None:
            return Value(os.path.abspath(found), f"{name} on PATH")
    raise GpusubError("no python on PATH; activate an environment, or name one with --python")
