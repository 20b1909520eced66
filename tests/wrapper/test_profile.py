from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from gpusub import profile as profiles
from gpusub.errors import GpusubError
from gpusub.profile import Profile, load
from gpusub.request import Value


def test_the_three_places_in_their_order(work: Path, tmp_path: Path) -> None:
    home = tmp_path / "home"
    for path, partition in zip(profiles.paths(home, work), ("a", "b", "c"), strict=True):
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(f"default_profile: p\nprofiles: {{p: {{partition: {partition}}}}}\n")
        assert load(home, work, None).settings["partition"].value == partition
        assert str(path) in load(home, work, None).settings["partition"].origin
    assert profiles.paths(home, work)[1:] == (
        home / ".config/gpusub/config.yaml",
        work / "gpusub.yaml",
    )


def test_without_files_there_is_an_empty_profile(work: Path, tmp_path: Path) -> None:
    assert load(tmp_path / "nowhere", work, None) == Profile()
    # A home that is no directory is as good as none.
    (tmp_path / "file").touch()
    assert load(tmp_path / "file", work, None) == Profile()


def test_a_profile_without_files_is_refused_with_where_they_belong(
    work: Path, tmp_path: Path
) -> None:
    with pytest.raises(GpusubError) as refused:
        load(tmp_path / "home", work, Value("p", "--profile"))
    for path in profiles.paths(tmp_path / "home", work):
        assert str(path) in str(refused.value)
    assert str(refused.value).startswith("--profile: no profile 'p': ")


@pytest.fixture
def closed(tmp_path: Path) -> Iterator[Path]:
    """A home whose .config lets nobody in."""
    (tmp_path / "home/.config").mkdir(mode=0)
    yield tmp_path / "home"
    (tmp_path / "home/.config").chmod(0o700)


def test_a_place_that_cannot_be_looked_into_is_refused(
    work: Path, closed: Path, nobody: None
) -> None:
    # Passing over it would submit with other settings than the site's or the user's.
    with pytest.raises(GpusubError, match=r"cannot be read: Permission denied$"):
        load(closed, work, None)


def test_where_there_is_no_file_nothing_is_loaded_to_read_it(work: Path, tmp_path: Path) -> None:
    code = (
        "import sys; from pathlib import Path; from gpusub import profile\n"
        f"profile.SITE_FILE = Path({str(tmp_path / 'none')!r})\n"
        f"profile.load(Path({str(tmp_path)!r}), Path({str(work)!r}), None)\n"
        "print({'yaml', 'msgspec', 'gpusub.config'} & set(sys.modules))"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert done.stdout == "set()\n"
