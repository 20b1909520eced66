"""The settings in force, merged from the files that state them.

Apart from the module that reads those files, so that where there are none nothing is loaded to
read them with.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from gpusub.errors import GpusubError
from gpusub.request import Value

SITE_FILE = Path("/etc/gpusub/cluster.yaml")


@dataclass(frozen=True)
class Profile:
    """The settings in force, by key, ``fabric`` and ``env`` key by key; absent is "not set".

    ``fabrics`` is what only nodes of a GPU type or with a feature have, by its name; there it is
    over ``fabric``. ``origin`` is where the profile was asked for.
    """

    name: str | None = None
    settings: Mapping[str, Value[Any]] = field(default_factory=dict)
    fabric: Mapping[str, Value[Any]] = field(default_factory=dict)
    env: Mapping[str, Value[str]] = field(default_factory=dict)
    fabrics: Mapping[str, Mapping[str, Value[Any]]] = field(default_factory=dict)
    origin: str = ""


def paths(home: Path, cwd: Path) -> tuple[Path, ...]:
    """Return the files that may hold settings; later ones win."""
    return SITE_FILE, home / ".config/gpusub/config.yaml", cwd / "gpusub.yaml"


def _absent(path: Path) -> bool:
    """Whether there is certainly no such file; what cannot be looked at is refused when read."""
    try:
        path.stat()
    except (FileNotFoundError, NotADirectoryError):
        return True
    except OSError:
        return False
    return False


def load(home: Path, cwd: Path, asked: Value[str] | None) -> Profile:
    """Return the profile ``asked`` for, or the default one of the files, or an empty one.

    Raises:
        GpusubError: a file is not readable or not valid, or no file holds the profile.
    """
    files = [path for path in paths(home, cwd) if not _absent(path)]
    if not files and asked is not None:
        raise GpusubError(
            f"{asked.origin}: no profile {asked.value!r}: there is none of "
            + ", ".join(map(str, paths(home, cwd)))
        )
    if not files:
        return Profile()
    from gpusub import config

    return config.load(files, asked)
