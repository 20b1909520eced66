from __future__ import annotations

import os
import subprocess
import tempfile
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusub import rundir
from gpusub.errors import GpusubError

TOKEN = "20261130-191500-4f3a9c81"


def tree(root: Path) -> set[str]:
    return {str(path.relative_to(root)) for path in root.rglob("*")}


class TestToken:
    def test_its_form(self) -> None:
        now = time.strptime("2026-11-30 19:15:00", "%Y-%m-%d %H:%M:%S")
        assert rundir.new_token(now, b"\x4f\x3a\x9c\x81") == TOKEN

    @given(times=st.lists(st.integers(0, 4_000_000_000), min_size=2, max_size=2))
    def test_it_sorts_by_time(self, times: list[int]) -> None:
        first, second = sorted(times)
        older, newer = (rundir.new_token(time.gmtime(t), b"\0") for t in (first, second))
        assert older <= newer

    def test_two_of_the_same_second_differ(self) -> None:
        now = time.localtime()
        assert rundir.new_token(now, b"\0\0") != rundir.new_token(now, b"\0\1")


# As /proc/self/mountinfo shows them: proc(5).
MOUNTS = {
    "/": "21 1 253:0 / / rw,relatime shared:1 - ext4 /dev/vda rw",
    "/home": "30 21 0:50 / /home rw,relatime shared:9 master:1 - nfs4 srv:/home rw,vers=4.2",
    "/scratch": "31 21 0:51 / /scratch rw - lustre 10.0.0.1@o2ib:/scratch rw,flock",
    "/shm": "32 21 0:52 / /shm rw,nosuid - tmpfs tmpfs rw",
    "/home/ram": "33 30 0:53 / /home/ram rw - tmpfs tmpfs rw,size=1g",
    "/home/ram/disk": "34 33 253:1 / /home/ram/disk rw - xfs /dev/vdb rw",
    "/a b": r"35 21 0:54 / /a\040b rw - tmpfs tmpfs rw",
    "/t\tn\nb\\": r"36 21 0:55 / /t\011n\012b\134 rw - tmpfs tmpfs rw",
    "bind": "37 21 0:50 /u/data /data rw shared:9 - nfs4 srv:/home rw",
    "/é": "38 21 0:56 / /é rw - ramfs none rw",
    # Mounted twice: the later one is what one sees.
    "over": "39 21 0:57 / /over rw - tmpfs tmpfs rw\n40 39 0:58 / /over rw - nfs4 srv:/o rw",
    "under": "41 21 0:59 / /under rw - nfs4 srv:/u rw\n42 41 0:60 / /under rw - tmpfs tmpfs rw",
    "odd": "43 21 0:61 / /odd rw shared:1 master:2 propagate_from:3 unbindable - ramfs none rw",
}
MOUNTINFO = "\n".join(MOUNTS.values()) + "\n"


class TestNodeLocal:
    @pytest.mark.parametrize(
        "path",
        [
            *("/home/u/.gpusub", "/scratch/u", "/opt/x", "/home", "/", "/data/x", "/over/x"),
            *(
                "/home/ram/disk/x",
                "/home/ramification",
                "/shmem",
                "/temp",
                "/tmpfs/x",
                "/a",
                "/runs/x",
            ),
        ],
    )
    def test_what_other_nodes_may_see_is_taken(self, path: str) -> None:
        rundir.refuse_node_local(Path(path), MOUNTINFO)

    @pytest.mark.parametrize(
        ("path", "why"),
        [
            ("/tmp/x", "every node has its own"),
            ("/tmp", "every node has its own"),
            ("/var/tmp/x", "every node has its own"),
            ("/dev/shm/x", "every node has its own"),
            ("/run/user/0", "every node has its own"),
            ("/home/../tmp/x", "every node has its own"),
            ("/shm/x", "it is on tmpfs, which no other node sees"),
            ("/home/ram/u/x", "it is on tmpfs, which no other node sees"),
            ("/a b/x", "it is on tmpfs, which no other node sees"),
            ("/t\tn\nb\\/x", "it is on tmpfs, which no other node sees"),
            ("/é/x", "it is on ramfs, which no other node sees"),
            ("/under/x", "it is on tmpfs, which no other node sees"),
            ("/odd/x", "it is on ramfs, which no other node sees"),
        ],
    )
    def test_what_they_cannot_see_is_refused(self, path: str, why: str) -> None:
        with pytest.raises(GpusubError) as refused:
            rundir.refuse_node_local(Path(path), MOUNTINFO)
        assert str(refused.value) == (
            f"the run directory would be {path}, and {why}; submit from a shared file "
            "system, or name one with --run-root DIR"
        )

    def test_a_link_is_followed(self, tmp_path: Path) -> None:
        (tmp_path / "link").symlink_to("/scratch")
        rundir.refuse_node_local(tmp_path / "link" / "x", MOUNTINFO)
        (tmp_path / "loop").symlink_to("loop")
        with pytest.raises(GpusubError, match="every node has its own"):
            rundir.refuse_node_local(tmp_path / "loop" / "x", MOUNTINFO)

    def test_this_machines_own_mounts_can_be_read(self) -> None:
        mountinfo = Path("/proc/self/mountinfo").read_text(errors="surrogateescape")
        with pytest.raises(GpusubError, match="it is on proc, "):
            rundir.refuse_node_local(Path("/proc/x"), mountinfo)


class TestCreate:
    def test_what_lies_in_it_and_who_may_read_it(self, work: Path) -> None:
        root = work / ".gpusub"
        old = os.umask(0)
        try:
            path = rundir.create(root, TOKEN, "a\r\n\udcff", {"b": ("\udcff", Path("c"))})
        finally:
            os.umask(old)
        assert path == root / TOKEN
        assert tree(root) == {
            ".gitignore",
            TOKEN,
            *(f"{TOKEN}/{name}" for name in ("job.sh", "plan.json", "ranks")),
        }
        for name in ("job.sh", "plan.json"):
            assert (path / name).stat().st_mode & 0o777 == 0o600
        assert (path / "job.sh").read_bytes() == b"a\r\n\xff"

    def test_git_sees_nothing_of_it(self, work: Path) -> None:
        subprocess.run(["git", "init", "-q", work], check=True)
        rundir.create(work / ".gpusub", TOKEN, "", {})
        status = ["git", "-C", str(work), "status", "--porcelain", "--untracked-files=all"]
        assert subprocess.run(status, capture_output=True, check=True).stdout == b""

    def test_in_a_directory_of_the_users_nothing_else_is_made(self, work: Path) -> None:
        rundir.create(work, TOKEN, "", {})
        assert tree(work) == {
            TOKEN,
            *(f"{TOKEN}/{name}" for name in ("job.sh", "plan.json", "ranks")),
        }

    def test_below_directories_that_are_not_there(self, work: Path) -> None:
        rundir.create(work / "a" / "b", TOKEN, "", {})
        assert (work / "a" / "b" / TOKEN / "job.sh").is_file()

    def test_many_at_once_where_there_was_none(self, work: Path) -> None:
        for attempt in range(20):
            root = work / f"{attempt}"
            start, errors = threading.Barrier(4), []

            def make(number: int, root: Path = root, start: threading.Barrier = start) -> None:
                start.wait()
                try:
                    rundir.create(root, f"{TOKEN}{number}", "", {})
                except GpusubError as error:
                    errors.append(error)  # noqa: B023 - joined below

            threads = [threading.Thread(target=make, args=(n,)) for n in range(4)]
            for thread in threads:
                thread.start()
            for thread in threads:
                thread.join()
            assert not errors
            assert len(list(root.iterdir())) == 5

    @pytest.mark.parametrize(
        ("root", "reason"),
        [
            ("/proc/1/x", "No such file or directory"),
            ("/proc/self/status", "Not a directory"),
            ("/proc/self/status/x", "Not a directory"),
        ],
    )
    def test_where_it_cannot_be(self, root: str, reason: str) -> None:
        with pytest.raises(GpusubError) as refused:
            rundir.create(Path(root), TOKEN, "", {})
        assert str(refused.value) == (
            f"the run directory {root}/{TOKEN} cannot be made: {reason}; name another place with "
            "--run-root DIR"
        )

    @pytest.mark.parametrize("users", [True, False])
    def test_where_there_is_no_room_nothing_is_left(
        self, work: Path, no_room: Callable[[], AbstractContextManager[None]], users: bool
    ) -> None:
        root = work if users else work / ".gpusub"
        refused = pytest.raises(GpusubError, match=r"cannot be made: File too large; name another")
        with refused, no_room():
            rundir.create(root, TOKEN, "x" * 10_000, {})
        assert tree(work) == set()

    @pytest.fixture
    def closed(self) -> Iterator[Path]:
        """A directory that all can enter and only its owner may write to."""
        with tempfile.TemporaryDirectory() as name:
            Path(name).chmod(0o755)
            yield Path(name)

    def test_where_one_may_not_write(self, closed: Path, nobody: None) -> None:
        if closed.stat().st_uid == os.geteuid():
            pytest.skip("not root: everything here is the user's")
        for root in (closed, closed / ".gpusub"):
            with pytest.raises(
                GpusubError, match="cannot be made: Permission denied; name another"
            ):
                rundir.create(root, TOKEN, "", {})
        assert tree(closed) == set()


class TestRemove:
    def test_nothing_is_left(self, work: Path) -> None:
        rundir.create(work / ".gpusub", TOKEN, "", {})
        rundir.remove(work / ".gpusub", TOKEN)
        assert tree(work) == set()

    def test_other_runs_stay(self, work: Path) -> None:
        root = work / ".gpusub"
        for token in ("a", "b"):
            rundir.create(root, token, "", {})
        rundir.remove(root, "a")
        assert {path.name for path in root.iterdir()} == {".gitignore", "b"}
        rundir.remove(root, "b")
        assert not root.exists()

    @pytest.mark.parametrize("ignored", [None, "*\n", "", "*.pt\n"])
    def test_a_directory_of_the_users_stays(self, work: Path, ignored: str | None) -> None:
        root = work / "runs"
        root.mkdir()
        if ignored is not None:
            (root / ".gitignore").write_text(ignored)
        before = tree(work)
        rundir.create(root, TOKEN, "", {})
        rundir.remove(root, TOKEN)
        assert tree(work) == before

    def test_what_is_gone_already_does_no_harm(self, work: Path) -> None:
        rundir.remove(work / "nowhere", TOKEN)
        rundir.remove(work, TOKEN)
        assert work.is_dir()


class TestLink:
    def test_the_job_is_found_by_its_id(self, work: Path) -> None:
        root = work / ".gpusub"
        rundir.create(root, TOKEN, "x", {})
        rundir.link(root, TOKEN, 42)
        assert str((root / "42").readlink()) == TOKEN  # relative: the root can be moved
        assert (root / "42" / "job.sh").read_text() == "x"

    def test_the_last_job_of_an_id_has_it(self, work: Path) -> None:
        for token in ("a", "b"):
            rundir.create(work, token, token, {})
            rundir.link(work, token, 42)
        assert (work / "42" / "job.sh").read_text() == "b"
        assert {path.name for path in work.iterdir()} == {"a", "b", "42"}

    def test_a_job_is_not_lost_for_want_of_a_link(self, work: Path) -> None:
        rundir.create(work, TOKEN, "x", {})
        (work / "42").mkdir()
        (work / "42" / "mine").touch()
        rundir.link(work, TOKEN, 42)
        rundir.link(work / "nowhere", TOKEN, 43)
        assert {path.name for path in work.iterdir()} == {TOKEN, "42"}
        assert (work / "42" / "mine").exists()


class TestLogDirectory:
    def test_it_is_made(self, work: Path) -> None:
        rundir.make_log_directory(str(work / "a" / "b" / "%j.out"))
        rundir.make_log_directory(str(work / "a" / "b" / "%j.out"))
        assert tree(work) == {"a", "a/b"}

    def test_or_refused(self, work: Path) -> None:
        (work / "a").touch()
        with pytest.raises(GpusubError) as refused:
            rundir.make_log_directory(str(work / "a" / "x.out"))
        assert str(refused.value) == f"--output: {work}/a cannot be made: File exists"


@pytest.mark.parametrize(
    ("content", "code"),
    [("0\n", 0), ("137\n", 137), ("7", 7), ("", None), ("\n", None), ("x\n", None), ("-1\n", None)],
)
def test_the_exit_code_that_a_job_left(work: Path, content: str, code: int | None) -> None:
    assert rundir.recorded_exit_code(work) is None
    (work / "exit_code").write_text(content)
    assert rundir.recorded_exit_code(work) == code
