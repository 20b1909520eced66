from __future__ import annotations

import errno
import os
import stat
from pathlib import Path

import pytest

from gpuhealth.folder import Folder, why

OWN = os.geteuid()


def mode(path: Path) -> int:
    return stat.S_IMODE(path.stat().st_mode)


class TestWhoOwnsIt:
    @pytest.mark.parametrize("wrong", [0o775, 0o757, 0o777, 0o1777])
    def test_no_directory_that_others_can_write(self, tmp_path: Path, wrong: int) -> None:
        tmp_path.chmod(wrong)
        with pytest.raises(PermissionError, match="others can write it"):
            Folder(str(tmp_path), OWN)

    def test_no_directory_of_somebody_else_s(self, tmp_path: Path) -> None:
        with pytest.raises(PermissionError, match=f"belongs to uid {OWN}"):
            Folder(str(tmp_path), OWN + 1)
        Folder(str(tmp_path)).close()

    def test_no_link_to_a_directory(self, tmp_path: Path) -> None:
        (tmp_path / "real").mkdir()
        (tmp_path / "link").symlink_to("real")
        with pytest.raises(OSError, match="irectory"):
            Folder(str(tmp_path / "link"), OWN)

    def test_a_refused_one_leaves_nothing_open(self, tmp_path: Path) -> None:
        tmp_path.chmod(0o777)
        before = len(list(Path("/proc/self/fd").iterdir()))
        for _ in range(3):
            with pytest.raises(PermissionError):
                Folder(str(tmp_path), OWN)
        assert len(list(Path("/proc/self/fd").iterdir())) == before

    def test_it_is_made_if_it_may_be(self, tmp_path: Path) -> None:
        with Folder(str(tmp_path / "a" / "b"), OWN) as folder, Folder("c", OWN, above=folder):
            pass
        assert (tmp_path / "a" / "b" / "c").is_dir()
        with pytest.raises(FileNotFoundError):
            Folder(str(tmp_path / "x"), OWN, create=False)


def plant(kind: str, path: Path, secret: Path) -> None:
    """Put at a path what a job's user would, had they a way to."""
    secret.write_text("secret")
    if kind == "link":
        path.symlink_to(secret)
    elif kind == "dangling link":
        path.symlink_to(secret.with_name("nowhere"))
    elif kind == "second name":
        os.link(secret, path)  # Path.hardlink_to came with Python 3.10
    elif kind == "fifo":
        os.mkfifo(path)
    elif kind == "directory":
        path.mkdir()
    else:
        path.write_text("planted")
        path.chmod(0o666)


KINDS = ["link", "dangling link", "second name", "fifo", "directory", "writable"]


@pytest.mark.parametrize("kind", KINDS)
class TestPlanted:
    def test_is_not_read(self, tmp_path: Path, kind: str) -> None:
        plant(kind, tmp_path / "f", tmp_path / "secret")
        with Folder(str(tmp_path), OWN) as folder, pytest.raises(OSError, match="f"):
            folder.read("f")

    def test_is_not_appended_to(self, tmp_path: Path, kind: str) -> None:
        plant(kind, tmp_path / "f", tmp_path / "secret")
        with Folder(str(tmp_path), OWN) as folder, pytest.raises(OSError, match="f"):
            folder.append("f", b"line\n", 100)
        assert (tmp_path / "secret").read_text() == "secret"
        assert not (tmp_path / "nowhere").exists()

    def test_is_replaced_itself(self, tmp_path: Path, kind: str) -> None:
        plant(kind, tmp_path / "f", tmp_path / "secret")
        with Folder(str(tmp_path), OWN) as folder:
            if kind == "directory":
                with pytest.raises(IsADirectoryError):
                    folder.replace("f", b"new")
            else:
                folder.replace("f", b"new")
                assert folder.read("f") == b"new"
                assert not (tmp_path / "f").is_symlink()
        assert (tmp_path / "secret").read_text() == "secret"
        assert not list(tmp_path.glob(".f*"))


@pytest.mark.parametrize("kind", [kind for kind in KINDS if kind != "directory"])
def test_what_is_planted_where_the_new_one_is_written(tmp_path: Path, kind: str) -> None:
    plant(kind, tmp_path / f".f.{os.getpid()}", tmp_path / "secret")
    with Folder(str(tmp_path), OWN) as folder:
        folder.replace("f", b"new")
    assert (tmp_path / "f").read_bytes() == b"new"
    assert (tmp_path / "secret").read_text() == "secret"


def test_the_mode_is_as_said_whatever_the_umask_is(tmp_path: Path) -> None:
    before = os.umask(0o077)
    try:
        with Folder(str(tmp_path), OWN) as folder:
            folder.replace("report", b"", 0o644)
            folder.append("lines", b"x\n", 10, 0o644)
            folder.replace("own", b"")
    finally:
        os.umask(before)
    assert (mode(tmp_path / "report"), mode(tmp_path / "lines")) == (0o644, 0o644)
    assert mode(tmp_path / "own") == 0o600


def test_what_is_too_long_is_not_read(tmp_path: Path) -> None:
    with Folder(str(tmp_path), OWN) as folder:
        folder.replace("f", b"x" * 100)
        assert folder.read("f", 100) == b"x" * 100
        with pytest.raises(OSError, match="more than 99") as caught:
            folder.read("f", 99)
    assert caught.value.errno == errno.EFBIG


def test_a_log_has_an_end(tmp_path: Path) -> None:
    with Folder(str(tmp_path), OWN) as folder:
        for number in range(100):
            folder.append("log", b"%04d\n" % number, 52)
        with pytest.raises(OSError, match="no more than 52"):
            folder.append("log", b"x" * 53, 52)
    assert (tmp_path / "log").stat().st_size <= 52
    assert (tmp_path / "log.1").stat().st_size <= 52
    lines = (tmp_path / "log.1").read_text() + (tmp_path / "log").read_text()
    kept = [int(line) for line in lines.split()]
    assert kept == list(range(100 - len(kept), 100))
    assert sorted(path.name for path in tmp_path.iterdir()) == ["log", "log.1"]


def test_a_failed_write_leaves_the_old_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(handle: int, data: bytes) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    with Folder(str(tmp_path), OWN) as folder:
        folder.replace("f", b"old")
        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            with pytest.raises(OSError, match="No space") as caught:
                folder.replace("f", b"new")
        assert folder.read("f") == b"old"
    assert why(caught.value) == "No space left on device"
    assert [path.name for path in tmp_path.iterdir()] == ["f"]


def test_what_is_not_there_is_removed_already(tmp_path: Path) -> None:
    with Folder(str(tmp_path), OWN) as folder:
        folder.touch("f")
        folder.remove("f")
        folder.remove("f")
        assert folder.names() == []
