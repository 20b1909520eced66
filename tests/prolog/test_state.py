from __future__ import annotations

import fcntl
import json
import os
import subprocess
import sys
import threading
import time
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhealth import isolation, state
from gpuhealth.history import History, Stamp
from gpuhealth.isolation import Abandoned
from gpuhealth.state import JobStart, Memory, State, memory_as_dict, memory_from

HISTORY = History(
    "boot",
    (
        Stamp(1.5, {"mlx5_0:1": {"link_downed": 1, "symbol_error": 2}, "b:1": {}}),
        Stamp(2.5, {"mlx5_0:1": {"link_downed": 1}}),
    ),
    {"hung nvml": (1.0, 2.0)},
    0.5,
    ("mlx5_0",),
)
NOTHING = Memory(History("boot"))
MEMORY = Memory(HISTORY, "unhealthy", {"nvml": Abandoned(7, "123")})


@pytest.fixture
def place(tmp_path: Path) -> Path:
    return tmp_path / "gpuhealth"


def keep(place: Path, memory: Memory = MEMORY) -> State:
    one = State(str(place), boot="boot")
    assert one.update(lambda _: memory) == (memory, "")
    return one


class TestMemory:
    def test_what_was_kept_is_remembered(self, place: Path) -> None:
        assert keep(place).load() == (MEMORY, "")

    def test_no_counter_of_an_earlier_boot_is_compared(self, place: Path) -> None:
        keep(place)
        found, wrong = State(str(place)).load()
        assert (found, wrong) == (replace(MEMORY, history=History(state.boot_id())), "")

    def test_nor_one_of_the_future(self, place: Path) -> None:
        one = keep(place, replace(MEMORY, history=History("boot", resumed_s=9e9)))
        assert one.load()[0].history == History("boot")

    def test_there_is_none_at_first(self, place: Path) -> None:
        assert State(str(place), boot="boot").load() == (NOTHING, "")
        assert not place.exists()

    @pytest.mark.parametrize(
        "text",
        [
            "",
            "{",
            "null",
            "[]",
            "[" * 100_000,
            '{"schema": 2}',
            '{"schema": 1}',
            "\0" * 100,
            '{"a": 1e999}',
        ],
    )
    def test_nonsense_is_as_if_nothing_were_there(self, place: Path, text: str) -> None:
        one = keep(place)
        (place / "state.json").write_text(text)
        memory, wrong = one.load()
        assert memory == NOTHING
        assert wrong
        # And it is put right by the next run.
        one.update(lambda _: MEMORY)
        assert one.load() == (MEMORY, "")

    @pytest.mark.parametrize("length", [0, 1, 50, 200, -1, -2])
    def test_a_torn_file(self, place: Path, length: int) -> None:
        one = keep(place)
        data = (place / "state.json").read_bytes()[:length]
        (place / "state.json").write_bytes(data)
        memory, wrong = one.load()
        # All but its last newline is all of it.
        assert (memory, bool(wrong)) == ((MEMORY, False) if length == -1 else (NOTHING, True))

    @pytest.mark.parametrize(
        ("key", "value"),
        [
            ("boot_id", 1),
            ("verdict", None),
            ("resumed_s", float("nan")),
            ("resumed_s", float("inf")),
            ("resumed_s", -1),
            ("resumed_s", True),
            ("seen", {"hung nvml": [1]}),
            ("seen", {"hung nvml": ["1", "2"]}),
            ("seen", []),
            ("stuck", {"nvml": ["7", "1"]}),
            ("stuck", {"nvml": [7, 1]}),
            ("stamps", {"a": 1}),
            ("stamps", [[1.0]]),
            ("stamps", [[1.0, {"mlx5_0:1": [1]}]]),
            ("stamps", [[1.0, {"mlx5_0:1": [-1, 0]}]]),
            ("stamps", [[1.0, {"mlx5_0:1": [1.5, 0]}]]),
            ("stamps", [[1.0, {"mlx5_0:1": [True, 0]}]]),
            ("stamps", [[1.0, {"mlx5_0:1": [2**64, 0]}]]),
            ("stamps", [["1", {}]]),
            ("counters", None),
            ("counters", [1, 2]),
            ("full_function", "mlx5_0"),
        ],
    )
    def test_a_value_that_makes_no_sense(self, place: Path, key: str, value: Any) -> None:
        one = keep(place)
        (place / "state.json").write_text(json.dumps({**memory_as_dict(MEMORY), key: value}))
        memory, wrong = one.load()
        assert (memory, wrong.startswith("state.json: ")) == (NOTHING, True)

    @given(
        st.recursive(
            st.none() | st.booleans() | st.integers() | st.floats() | st.text(max_size=3),
            lambda inner: (
                st.lists(inner, max_size=3)
                | st.dictionaries(st.text(max_size=3), inner, max_size=3)
            ),
            max_leaves=8,
        ),
        st.sampled_from([*memory_as_dict(MEMORY), "other"]),
    )
    def test_any_value_is_a_memory_or_an_error(self, value: Any, key: str) -> None:
        for one in (value, {**memory_as_dict(MEMORY), key: value}):
            with suppress(ValueError):
                assert isinstance(memory_from(one), Memory)

    def test_nobody_else_reads_or_writes_it(self, place: Path) -> None:
        keep(place)
        assert {path.name: path.stat().st_mode & 0o777 for path in place.iterdir()} == {
            "state.json": 0o600,
            "state.lock": 0o600,
        }


class TestWhoElseCouldHaveWrittenIt:
    def test_a_directory_that_others_can_write(self, place: Path) -> None:
        one = keep(place)
        place.chmod(0o777)
        memory, wrong = one.load()
        assert (memory, "others can write it" in wrong) == (NOTHING, True)
        memory, wrong = one.update(lambda old: replace(old, verdict="healthy"))
        assert (memory.verdict, "others can write it" in wrong) == ("healthy", True)
        assert one.begin_job(JobStart(1, "boot", 1, "t"))
        assert one.end_job(1, "boot", 2)[0] is None
        assert one.log({"a": 1})

    @pytest.mark.parametrize("planted", ["link", "writable"])
    def test_a_file_that_others_can_write(self, place: Path, tmp_path: Path, planted: str) -> None:
        one = keep(place)
        file = place / "state.json"
        if planted == "link":
            file.rename(tmp_path / "elsewhere")
            file.symlink_to(tmp_path / "elsewhere")
        else:
            file.chmod(0o666)
        memory, wrong = one.load()
        assert memory == NOTHING
        assert wrong

    def test_somebody_else_s(self, place: Path) -> None:
        keep(place)
        memory, wrong = State(str(place), os.geteuid() + 1, "boot").load()
        assert (memory, "belongs to uid" in wrong) == (NOTHING, True)

    def test_a_link_in_the_place_of_a_job_s_file(self, place: Path, tmp_path: Path) -> None:
        one = State(str(place))
        one.begin_job(JobStart(1, "boot", 1, "t"))
        (place / "jobs" / "1.json").rename(tmp_path / "elsewhere")
        (place / "jobs" / "1.json").symlink_to(tmp_path / "elsewhere")
        assert one.end_job(1, "boot", 2)[0] is None


class TestNoPlace:
    def test_a_file_where_the_directory_should_be(self, place: Path) -> None:
        place.write_text("")
        one = State(str(place), boot="boot")
        assert one.load()[0] == NOTHING
        memory, wrong = one.update(lambda _: MEMORY)
        assert (memory, bool(wrong)) == (MEMORY, True)
        assert one.begin_job(JobStart(1, "boot", 1, "t"))
        assert one.log({})

    def test_a_full_disk_loses_only_what_is_new(
        self, place: Path, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        one = keep(place)

        def full(handle: int, data: bytes) -> int:
            raise OSError(28, "No space left on device")

        with monkeypatch.context() as patch:
            patch.setattr(os, "write", full)
            memory, wrong = one.update(lambda old: replace(old, verdict="healthy"))
            # This run goes on with what it knows.
            assert memory == replace(MEMORY, verdict="healthy")
            assert wrong == "No space left on device"
            assert one.begin_job(JobStart(1, "boot", 1, "t")) == wrong
            assert one.log({"a": 1}) == wrong
        assert one.load() == (MEMORY, "")


class TestAtTheSameTime:
    def test_no_change_gets_lost(self, place: Path) -> None:
        code = (
            "import sys; from dataclasses import replace; from gpuhealth.state import State\n"
            "for n in range(20):\n"
            "    State(sys.argv[1]).update(lambda m: replace(m, verdict=m.verdict + 'x'), 30)\n"
        )
        source = str(Path(state.__file__).parents[1])
        environ = {**os.environ, "PYTHONPATH": source}
        command = [sys.executable, "-c", code, str(place)]
        started = [subprocess.Popen(command, env=environ) for _ in range(4)]
        assert [process.wait(60) for process in started] == [0] * 4
        assert State(str(place)).load()[0].verdict == "x" * 80

    def test_a_lock_that_is_never_let_go_holds_nobody_up(self, place: Path) -> None:
        one = keep(place)
        with (place / "state.lock").open("r+") as held:
            fcntl.flock(held, fcntl.LOCK_EX)
            began_s = time.monotonic()
            memory, wrong = one.update(lambda old: replace(old, verdict="healthy"), 0.2)
            assert time.monotonic() - began_s < 2
        assert (memory.verdict, wrong) == ("healthy", "")
        assert one.load()[0].verdict == "healthy"

    def test_whoever_reads_sees_one_or_the_other(self, place: Path) -> None:
        one = keep(place)
        other = Memory(replace(HISTORY, resumed_s=0.75), "healthy")
        done = threading.Event()

        def write() -> None:
            for number in range(200):
                one.update(lambda _, n=number: other if n % 2 else MEMORY)  # type: ignore[misc]
            done.set()

        writer = threading.Thread(target=write)
        writer.start()
        seen = []
        while not done.is_set():
            seen.append(one.load())
        writer.join()
        assert {wrong for _, wrong in seen} == {""}
        assert all(memory in (MEMORY, other) for memory, _ in seen)


def begin(one: State, job: int, at_s: float, boot: str = "boot") -> None:
    ports = {"mlx5_0:1": {"link_downed": job}}
    assert one.begin_job(JobStart(job, boot, at_s, f"2026-01-01T00:00:{job:02}Z", ports)) == ""


def shared(one: State, job: int, at_s: float) -> bool:
    start, wrong = one.end_job(job, "boot", at_s)
    assert start is not None, wrong
    return start.shared


class TestJobs:
    def test_a_start_is_there_once(self, place: Path) -> None:
        one = State(str(place))
        begin(one, 7, 10)
        start, _ = one.end_job(7, "boot", 20)
        assert start == JobStart(
            7, "boot", 10, "2026-01-01T00:00:07Z", {"mlx5_0:1": {"link_downed": 7}}
        )
        assert one.end_job(7, "boot", 20) == (None, "nothing is known of the start of job 7")
        assert list((place / "jobs").iterdir()) == []

    @pytest.mark.parametrize(
        ("events", "found"),
        [
            ("+1 -1 +2 -2", {1: False, 2: False}),
            ("+1 +2 -2 -1", {1: True, 2: True}),
            ("+1 +2 -1 -2", {1: True, 2: True}),
            # The other one has ended already, and one that is new shares with nobody.
            ("+1 +2 -2 +3 -1 -3", {1: True, 2: True, 3: True}),
            ("+1 +2 -2 -1 +3 -3", {1: True, 2: True, 3: False}),
            # Requeued: the same number, another run.
            ("+1 +2 -2 -1 +1 -1", {1: False, 2: True}),
            # It was requeued, and its first epilog never ran.
            ("+1 +2 -2 +1 -1", {1: False, 2: True}),
        ],
    )
    def test_who_shares_the_node(self, place: Path, events: str, found: dict[int, bool]) -> None:
        one, seen = State(str(place)), {}
        for at_s, event in enumerate(events.split()):
            job = int(event[1:])
            if event[0] == "+":
                begin(one, job, at_s)
            else:
                seen[job] = shared(one, job, at_s)
        assert seen == found
        assert list((place / "jobs").iterdir()) == []

    def test_many_that_start_at_once(self, place: Path) -> None:
        one = State(str(place))
        threads = [threading.Thread(target=begin, args=(one, job, 1.0)) for job in range(1, 17)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
        assert [shared(one, job, 2.0) for job in range(1, 17)] == [True] * 16

    @pytest.mark.parametrize(
        "leave",
        [
            lambda one: begin(one, 1, 10, boot="earlier boot"),
            lambda one: begin(one, 1, 1e9),
        ],
        ids=["of an earlier boot", "of the future"],
    )
    def test_what_a_dead_job_left_shares_nothing(self, place: Path, leave: Any) -> None:
        one = State(str(place))
        leave(one)
        begin(one, 2, 20)
        assert shared(one, 2, 30) is False
        assert list((place / "jobs").iterdir()) == []

    def test_it_expires(self, place: Path) -> None:
        one = State(str(place))
        begin(one, 1, 10)
        begin(one, 2, 10 + state.JOB_EXPIRES_S + 1)
        assert shared(one, 2, 10 + state.JOB_EXPIRES_S + 2) is False

    def test_nonsense_is_cleared_away(self, place: Path) -> None:
        one = State(str(place))
        begin(one, 9, 1)
        (place / "jobs" / "1.json").write_text("{")
        (place / "jobs" / "1.shared").write_text("")
        (place / "jobs" / "8.shared").write_text("")
        begin(one, 2, 2)
        assert sorted(path.name for path in (place / "jobs").iterdir()) == [
            "2.json",
            "2.shared",
            "9.json",
            "9.shared",
        ]

    def test_there_is_an_end_to_them(self, place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(state, "MAX_JOBS", 10)
        one = State(str(place))
        for job in range(1, 40):
            begin(one, job, job)
        names = [path.name for path in (place / "jobs").iterdir()]
        assert len(names) <= 22
        assert "39.json" in names

    @pytest.mark.parametrize("at_s", [20, 2000])
    def test_a_reboot_in_between(self, place: Path, at_s: float) -> None:
        one = State(str(place))
        begin(one, 1, 1000)
        assert one.end_job(1, "another boot", at_s)[0] is None

    def test_without_a_boot_id_nothing_is_known(self, place: Path) -> None:
        one = State(str(place))
        begin(one, 1, 10, boot="")
        assert one.end_job(1, "", 20)[0] is None


def test_the_log_has_an_end(place: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "LOG_BYTES", 1000)
    one = State(str(place))
    for number in range(200):
        assert one.log({"number": number, "verdict": "healthy"}) == ""
    sizes = {path.name: path.stat().st_size for path in place.glob("history*")}
    assert set(sizes) == {"history.jsonl", "history.jsonl.1"}
    assert all(size <= 1000 for size in sizes.values())
    assert json.loads((place / "history.jsonl").read_text().splitlines()[-1])["number"] == 199


def test_what_to_keep_away_from() -> None:
    child = isolation.start(lambda _: time.sleep(60))
    stuck = {
        "nvml": Abandoned(child.pid, isolation.start_of(child.pid)),
        "/sys/a": Abandoned(child.pid, "1"),
        "/sys/b": Abandoned(2**22 + 1, "1"),
    }
    assert Memory(stuck=stuck).avoid() == ("nvml",)
    isolation.end(child)
    assert Memory(stuck=stuck).avoid() == ()


def test_this_boot_has_an_id() -> None:
    assert state.boot_id() == Path("/proc/sys/kernel/random/boot_id").read_text().strip()
