from __future__ import annotations

import errno
import gzip
import json
import re
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhealth.reading import NOT_RECORDED, Listing, Reading
from gpuhealth.source import Directory, Entries, Recorder, Recording, Source, load


@pytest.fixture
def tree(tmp_path: Path) -> Path:
    (tmp_path / "sys/class/net/eth0").mkdir(parents=True)
    (tmp_path / "sys/devices/pci0000:15/0000:15:01.0").mkdir(parents=True)
    (tmp_path / "sys/class/net/eth0/mtu").write_text("9000\n")
    (tmp_path / "sys/class/net/eth0/empty").write_text("")
    (tmp_path / "sys/class/net/eth0/device").symlink_to("../../../devices/pci0000:15/0000:15:01.0")
    (tmp_path / "sys/devices/pci0000:15/0000:15:01.0/vendor").write_text("0x15b3\n")
    (tmp_path / "absolute").symlink_to("/sys/class/net")
    (tmp_path / "loop").symlink_to("loop")
    return tmp_path


class TestDirectory:
    def test_text_comes_without_its_newline(self, tree: Path) -> None:
        assert Directory(str(tree)).read("/sys/class/net/eth0/mtu") == Reading("9000")

    def test_an_empty_file_is_there(self, tree: Path) -> None:
        assert Directory(str(tree)).read("/sys/class/net/eth0/empty") == Reading("")

    def test_no_more_than_the_limit_is_read(self, tree: Path) -> None:
        assert Directory(str(tree)).read("/sys/class/net/eth0/mtu", limit=2) == Reading("90")

    @pytest.mark.parametrize(
        ("path", "error"),
        [
            ("/sys/class/net/eth1/mtu", errno.ENOENT),
            ("/sys/class/net/eth0/mtu/x", errno.ENOTDIR),
            ("/sys/class/net/eth0", errno.EISDIR),
            ("/loop", errno.ELOOP),
            ("/nul\0", errno.ENOENT),
            ("/" + "x" * 300, errno.ENAMETOOLONG),
        ],
    )
    def test_what_cannot_be_read_says_why(self, tree: Path, path: str, error: int) -> None:
        assert Directory(str(tree)).read(path) == Reading(error=error)

    def test_what_may_not_be_read_is_unreadable(self, tree: Path) -> None:
        # An interface that refuses everybody: root may read any other file.
        found = Directory().read("/proc/self/mem")
        assert found.unreadable

    def test_bytes_are_one_character_each(self, tree: Path) -> None:
        (tree / "config").write_bytes(bytes(range(256)))
        found = Directory(str(tree)).read("/config", binary=True)
        assert found.text is not None
        assert found.text.encode("latin-1") == bytes(range(256))

    def test_names(self, tree: Path) -> None:
        source = Directory(str(tree))
        assert source.names("/sys/class/net/eth0") == Listing(("device", "empty", "mtu"))
        assert source.names("/sys/class/none") == Listing(error=errno.ENOENT)
        assert source.names("/sys/class/net/eth0/mtu") == Listing(error=errno.ENOTDIR)

    def test_where_links_lead(self, tree: Path) -> None:
        source = Directory(str(tree))
        real = Reading("/sys/devices/pci0000:15/0000:15:01.0")
        assert source.target("/sys/class/net/eth0/device") == real
        assert source.target("/sys/class/none").absent

    def test_absolute_links_stay_inside(self, tree: Path) -> None:
        source = Directory(str(tree))
        assert source.read("/absolute/eth0/mtu") == Reading("9000")
        assert source.read("/absolute/../../../../etc/passwd").absent
        (tree / "out").symlink_to("../../../../../../../../etc")
        assert source.read("/out/passwd").absent

    def test_kinds(self, tree: Path) -> None:
        source = Directory(str(tree))
        assert source.kind("/sys/class/net").text == "dir"
        assert source.kind("/sys/class/net/eth0/mtu").text == "file"
        assert source.kind("/none").absent
        assert Directory().kind("/dev/null").text == "char"

    @pytest.mark.parametrize("pack", [lambda data: data, gzip.compress], ids=["plain", "gzip"])
    def test_lines(self, tree: Path, pack: Any) -> None:
        (tree / "config.gz").write_bytes(pack(b"# no\nCONFIG_A=y\nCONFIG_AB=m\nCONFIG_C=n\n"))
        found = Directory(str(tree)).lines("/config.gz", ("CONFIG_A=", "CONFIG_C="))
        assert found == Reading("CONFIG_A=y\nCONFIG_C=n")

    @pytest.mark.parametrize(
        "data", [b"\x1f\x8b", b"\x1f\x8b broken", gzip.compress(b"x" * 999)[:-30]]
    )
    def test_a_broken_archive_raises_nothing(self, tree: Path, data: bytes) -> None:
        (tree / "config.gz").write_bytes(data)
        assert Directory(str(tree)).lines("/config.gz", ("CONFIG_A=",)).text in ("", None)


class TestRecording:
    def test_a_map_of_files_is_enough(self) -> None:
        source = Recording({"/sys/class/infiniband/mlx5_0/fw_ver": "28.41.1000"})
        assert source.names("/sys/class/infiniband") == Listing(("mlx5_0",))
        assert source.names("/sys/class/infiniband/mlx5_0") == Listing(("fw_ver",))
        assert source.read("/sys/class/infiniband/mlx5_0/fw_ver") == Reading("28.41.1000")

    def test_what_it_does_not_hold_is_absent_where_it_looked(self) -> None:
        source = Recording({"/sys/class/infiniband/mlx5_0/fw_ver": "28.41.1000"})
        assert source.read("/sys/class/infiniband/mlx5_0/ports/1/state").absent
        assert source.names("/sys/class/infiniband/mlx5_1").absent

    @pytest.mark.parametrize("path", ["/sys/module/nvidia/version", "/proc/uptime", "/sys/class"])
    def test_and_not_recorded_where_it_did_not(self, path: str) -> None:
        source = Recording({"/sys/class/infiniband/mlx5_0/fw_ver": "28.41.1000"})
        assert source.read(path).error == NOT_RECORDED
        assert source.target(path).error == NOT_RECORDED

    def test_a_listing_says_what_is_absent(self) -> None:
        source = Recording({"/sys/class/infiniband/": ["mlx5_0"]})
        assert source.read("/sys/class/infiniband/mlx5_1/fw_ver").absent
        assert source.read("/sys/class/infiniband/mlx5_0/fw_ver").error == NOT_RECORDED

    def test_nothing_is_known_below_what_could_not_be_listed(self) -> None:
        source = Recording({"/sys/class/infiniband/": {"errno": "EIO"}})
        assert source.names("/sys/class/infiniband") == Listing(error=errno.EIO)
        assert source.read("/sys/class/infiniband/mlx5_0/fw_ver") == Reading(error=errno.EIO)

    def test_what_was_read_before_time_ran_out_proves_nothing_absent(self) -> None:
        source = Recording({"/sys/class/infiniband/mlx5_0/fw_ver": "28.41.1000"}, partial=True)
        assert source.read("/sys/class/infiniband/mlx5_0/ports/1/state").error == NOT_RECORDED
        assert source.names("/sys/class/infiniband").error == NOT_RECORDED

    def test_failures_are_kept(self) -> None:
        source = Recording({"/x/y/z": {"errno": "EINVAL"}, "/x/y/w": {"errno": "no such name"}})
        assert source.read("/x/y/z") == Reading(error=errno.EINVAL)
        assert source.read("/x/y/w") == Reading(error=errno.EIO)


def look_everywhere(source: Source) -> list[object]:
    seen: list[object] = []
    for path in (
        "/sys/class/net/eth0/mtu",
        "/sys/class/net/eth0/empty",
        "/sys/class/net/eth1/mtu",
        "/sys/class/net/eth0/mtu/x",
        "/loop",
    ):
        seen += [source.read(path), source.names(path)]
    seen += [source.names("/sys/class/net"), source.target("/sys/class/net/eth0/device")]
    seen += [source.target("/sys/class/net/eth9"), source.kind("/absolute"), source.kind("/none")]
    seen += [source.lines("/sys/devices/pci0000:15/0000:15:01.0/vendor", ("0x",))]
    return seen


class TestRecorder:
    def test_what_was_recorded_looks_the_same(self, tree: Path) -> None:
        recorder = Recorder(Directory(str(tree)))
        seen = look_everywhere(recorder)
        assert seen == look_everywhere(Directory(str(tree)))
        kept = json.loads(json.dumps(recorder.entries))
        assert look_everywhere(Recording(kept)) == seen

    def test_it_looks_once(self, tree: Path) -> None:
        looked: list[str] = []
        recorder = Recorder(Directory(str(tree)), before=looked.append)
        look_everywhere(recorder)
        assert len(looked) == len(set(looked))
        before = list(looked)
        look_everywhere(recorder)
        assert looked == before

    def test_what_is_known_is_not_looked_at(self, tree: Path) -> None:
        known: Entries = {"/sys/class/net/eth0/mtu": {"errno": "ETIMEDOUT"}}
        looked: list[str] = []
        recorder = Recorder(Directory(str(tree)), known, looked.append)
        assert recorder.read("/sys/class/net/eth0/mtu").why == "hung"
        assert not looked


class TestLoad:
    @pytest.mark.parametrize(
        ("text", "message"),
        [
            ("", "not JSON"),
            ("[]", "not an object"),
            ('{"/a": 1}', "/a: a file's text"),
            ('{"/a": [1]}', "/a: a file's text"),
            ('{"/a": {"errno": 5}}', "/a: a file's text"),
            ('{"/a": null}', "/a: a file's text"),
        ],
    )
    def test_what_is_none_is_refused(self, text: str, message: str) -> None:
        with pytest.raises(ValueError, match=re.escape(message)):
            load(text)

    def test_other_keys_are_left_alone(self) -> None:
        text = '{"gpuhealth": {"schema": 1}, "nvml": {"gpus": []}, "/a": "b"}'
        assert load(text) == json.loads(text)


PATHS = st.from_regex(r"(/[a-c]{1,2}){1,4}/?", fullmatch=True)
ENTRIES = st.one_of(
    st.text(max_size=5),
    st.lists(st.sampled_from("abc"), max_size=3),
    st.dictionaries(
        st.sampled_from(["errno", "link", "kind"]), st.sampled_from(["EIO", "/a", ""]), max_size=2
    ),
)


@given(st.dictionaries(PATHS, ENTRIES, max_size=6), PATHS)
def test_no_recording_raises(entries: dict[str, Any], path: str) -> None:
    source = Recording(entries)
    source.read(path)
    source.read(path, binary=True)
    source.names(path)
    source.target(path)
    source.kind(path)
    source.lines(path, ("a",))


def test_a_file_that_is_replaced_while_it_is_read(tmp_path: Path) -> None:
    # sysfs attributes change under the reader; one read sees one state.
    file = tmp_path / "state"
    file.write_text("4: ACTIVE\n")
    source = Directory(str(tmp_path))
    assert source.read("/state").text == "4: ACTIVE"
    file.rename(tmp_path / "gone")
    assert source.read("/state").absent
