"""A job's log and its end.

The client here plays a list of answers. It stands in for what a real controller shows only after
crashes and state losses, in an order and at a pace that a test can hold on to; what a real one
answers to running, failing and requeued jobs is in tests/cluster.
"""

from __future__ import annotations

import io
import itertools
import threading
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest

from gpuslurm.client import Job, SlurmError, SlurmUnreachableError
from gpuslurm.commands import CommandClient
from gpusub import follow as following
from gpusub.errors import ExitCode, GpusubError
from gpusub.follow import Ending, Tail, exit_code_of, follow
from gpusub.submission import Submission

TOKEN = "20261130-191500-4f3a9c81"
COMMAND = f"/w/.gpusub/{TOKEN}/job.sh"
Answer = Job | None | SlurmError


def job(state: str = "RUNNING", *, reason: str = "None", code: int = 0, signal: int = 0) -> Job:
    nodes = "" if state == "PENDING" else "gpu-[001-002]"
    return Job(42, state, reason, nodes, code, signal, 0, COMMAND, "/w/log.out")


DOWN = SlurmUnreachableError("Unable to contact slurm controller (connect failure)")


class Played(CommandClient):
    """Gives the answers one after the other, and the last one for ever."""

    def __init__(self, *answers: Answer, at_each: Callable[[int], None] = lambda _: None) -> None:
        self.answers, self.asked, self.at_each = answers, 0, at_each

    def jobs(self, job_id: int) -> tuple[Job, ...]:
        assert job_id == 42
        answer = self.answers[min(self.asked, len(self.answers) - 1)]
        self.at_each(self.asked)
        self.asked += 1
        if isinstance(answer, SlurmError):
            raise answer
        return () if answer is None else (answer,)


@pytest.fixture(autouse=True)
def fast(monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in (
        ("LOG_INTERVAL_S", 0.001),
        ("FIRST_POLL_S", 0.001),
        ("LAST_POLL_S", 0.005),
        ("UNKNOWN_S", 0.05),
        ("LAST_LOOK_S", 0.02),
    ):
        monkeypatch.setattr(following, name, value)


@pytest.fixture
def submission(work: Path) -> Submission:
    run_dir = work / TOKEN
    run_dir.mkdir()
    return Submission(42, None, TOKEN, run_dir, str(run_dir / "log.out"))


@pytest.fixture
def said() -> list[str]:
    return []


REAL = {
    name: getattr(following, name)
    for name in ("LOG_INTERVAL_S", "FIRST_POLL_S", "LAST_POLL_S", "UNKNOWN_S", "LAST_LOOK_S")
}


class TestExitCode:
    @pytest.mark.parametrize(
        ("ended", "code"),
        [
            (job("COMPLETED"), 0),
            (job("FAILED", code=1), 1),
            (job("FAILED", code=137), 137),
            (job("FAILED", signal=9), 137),
            (job("FAILED", signal=53), 181),
            (job("CANCELLED", signal=15), 143),
            (job("OUT_OF_MEMORY", signal=125), 253),
            # A failure is never 0.
            (job("CANCELLED"), 1),
            (job("TIMEOUT"), 1),
            (job("NODE_FAIL"), 1),
            (job("OUT_OF_MEMORY"), 1),
            (job("FAILED"), 1),
            (job("PREEMPTED"), 1),
            (job("DEADLINE"), 1),
            (job("BOOT_FAIL"), 1),
        ],
    )
    def test_of_a_job_that_ended(
        self, ended: Job, code: int, submission: Submission, said: list[str]
    ) -> None:
        assert exit_code_of(ended) == code
        assert follow(Played(ended), submission, None, said.append) == (
            Ending(code, "slurm", ended.state)
        )


class TestStates:
    def test_each_change_is_said_once(self, submission: Submission, said: list[str]) -> None:
        played = Played(
            job("PENDING"),
            job("PENDING", reason="Priority"),
            job("PENDING", reason="Priority"),
            job("CONFIGURING"),
            job("RUNNING"),
            job("RUNNING"),
            job("COMPLETING"),
            job("FAILED", code=3),
        )
        assert follow(played, submission, None, said.append) == Ending(3, "slurm", "FAILED")
        assert said == [
            "job 42 is pending",
            "job 42 is pending: Priority",
            "job 42 is configuring on gpu-[001-002]",
            "job 42 is running on gpu-[001-002]",
            "job 42 is completing on gpu-[001-002]",
            "job 42 failed, exit code 3",
        ]

    def test_a_requeued_job_is_followed_to_its_real_end(
        self, submission: Submission, said: list[str]
    ) -> None:
        played = Played(
            job("RUNNING"),
            job("COMPLETING", code=1),
            job("REQUEUED", code=1),
            job("PENDING", reason="BeginTime"),
            job("RUNNING"),
            job("COMPLETED"),
        )
        assert follow(played, submission, None, said.append).exit_code == 0
        assert said[2:] == [
            "job 42 is requeued",
            "job 42 is pending: BeginTime",
            "job 42 is running on gpu-[001-002]",
            "job 42 completed",
        ]

    def test_a_job_that_will_not_start_says_why(
        self, submission: Submission, said: list[str]
    ) -> None:
        played = Played(job("PENDING", reason="BadConstraints"), job("CANCELLED", signal=15))
        follow(played, submission, None, said.append)
        assert said == [
            "job 42 is pending: BadConstraints (no node has what is asked for)",
            "job 42 cancelled, signal 15",
        ]

    @pytest.mark.parametrize("state", ["SUSPENDED", "RESIZING", "REQUEUE_HOLD", "SIGNALING", "NEW"])
    def test_a_state_that_is_no_end_is_none(
        self, submission: Submission, said: list[str], state: str
    ) -> None:
        assert follow(Played(job(state), job("COMPLETED")), submission, None, said.append)
        assert said[0] == f"job 42 is {state.lower()}"


class TestLost:
    def test_a_controller_that_comes_back(self, submission: Submission, said: list[str]) -> None:
        played = Played(job("RUNNING"), DOWN, DOWN, DOWN, job("RUNNING"), job("COMPLETED"))
        assert follow(played, submission, None, said.append).exit_code == 0
        assert said == [
            "job 42 is running on gpu-[001-002]",
            f"Slurm does not answer ({DOWN}); asking again",
            "job 42 is running on gpu-[001-002]",
            "job 42 completed",
        ]

    def test_a_controller_that_is_away_for_longer_than_a_job_may_be_unknown(
        self, submission: Submission, said: list[str]
    ) -> None:
        played = Played(*[DOWN] * 40, job("COMPLETED"))
        assert follow(played, submission, None, said.append).exit_code == 0

    def test_a_job_unknown_for_a_moment(self, submission: Submission, said: list[str]) -> None:
        played = Played(job("RUNNING"), None, None, job("RUNNING"), None, job("FAILED", code=2))
        assert follow(played, submission, None, said.append).exit_code == 2
        assert said[1] == "Slurm does not know job 42; asking again"

    @pytest.mark.parametrize("answer", [None, DOWN])
    @pytest.mark.parametrize(("recorded", "code"), [("0\n", 0), ("7\n", 7)])
    def test_what_the_job_wrote_down_is_its_end(
        self,
        submission: Submission,
        said: list[str],
        answer: Answer,
        recorded: str,
        code: int,
    ) -> None:
        def at_each(number: int) -> None:
            if number == 3:
                (submission.run_dir / "exit_code").write_text(recorded)

        played = Played(job("RUNNING"), answer, at_each=at_each)
        ending = follow(played, submission, None, said.append)
        assert (ending.exit_code, ending.exit_source) == (code, "run directory")

    def test_a_forgotten_job_without_a_word_is_uncertain(
        self, submission: Submission, said: list[str]
    ) -> None:
        with pytest.raises(GpusubError) as lost:
            follow(Played(job("RUNNING"), None), submission, None, said.append)
        assert lost.value.code == ExitCode.UNCERTAIN
        assert str(lost.value) == (
            "Slurm does not know job 42 any more and it left no exit code; its log is "
            f"{submission.log}"
        )

    def test_an_id_that_is_somebody_elses_by_now_is_not_this_job(
        self, submission: Submission, said: list[str]
    ) -> None:
        other = replace(job("COMPLETED"), command="/home/x/.gpusub/20261130-191501-0a0a0a0a/job.sh")
        with pytest.raises(GpusubError, match="Slurm does not know job 42 any more"):
            follow(Played(job("RUNNING"), other), submission, None, said.append)
        assert "job 42 completed" not in said
        (submission.run_dir / "exit_code").write_text("5\n")
        assert follow(Played(other), submission, None, said.append).exit_code == 5


class Clock:
    """Time that passes by sleeping alone."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now

    def sleep(self, time_s: float) -> None:
        self.now += time_s


class TestPace:
    """At the pace of real use, on a clock that costs no time."""

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> Clock:
        clock = Clock()
        monkeypatch.setattr(following, "time", clock)
        for name, value in REAL.items():
            monkeypatch.setattr(following, name, value)
        return clock

    def asked_at(self, clock: Clock, submission: Submission, *answers: Answer) -> list[float]:
        times: list[float] = []
        played = Played(*answers, at_each=lambda _: times.append(clock.now - 1000))
        follow(played, submission, None, lambda _: None)
        return times

    def test_a_long_job_is_no_load_on_the_controller(
        self, clock: Clock, submission: Submission
    ) -> None:
        times = self.asked_at(clock, submission, *[job("RUNNING")] * 400, job("COMPLETED"))
        assert times[0] == 0
        assert times[1] < 1
        gaps = [after - before for before, after in itertools.pairwise(times)]
        assert max(gaps) < 10.3
        assert times[-1] > 3600
        assert min(gaps[20:]) > 9

    def test_a_change_is_followed_closely(self, clock: Clock, submission: Submission) -> None:
        times = self.asked_at(
            clock,
            submission,
            *[job("PENDING")] * 50,
            job("RUNNING"),
            *[job("RUNNING")] * 2,
            job("FAILED"),
        )
        assert times[50] - times[49] > 9
        assert times[52] - times[51] < 2

    def test_how_long_a_job_may_be_unknown(self, clock: Clock, submission: Submission) -> None:
        with pytest.raises(GpusubError, match="does not know job 42 any more"):
            follow(Played(job("RUNNING"), None), submission, None, lambda _: None)
        assert 30 < clock.now - 1000 < 60

    def test_an_end_is_told_soon_after_the_last_of_the_log(
        self, clock: Clock, submission: Submission
    ) -> None:
        out = io.BytesIO()
        tail = Tail(Path(submission.log), out)
        follow(Played(job("COMPLETED")), submission, tail, lambda _: None)
        assert 0.9 < clock.now - 1000 < 1.3


class TestTail:
    def test_a_file_that_is_not_there_yet(self, work: Path) -> None:
        out = io.BytesIO()
        tail = Tail(work / "log", out)
        assert tail.copy() is False
        (work / "log").write_bytes(b"a\xff\r\n\0")
        assert tail.copy() is True
        assert tail.copy() is False
        assert out.getvalue() == b"a\xff\r\n\0"

    def test_it_grows(self, work: Path) -> None:
        out = io.BytesIO()
        tail = Tail(work / "log", out)
        with (work / "log").open("ab", buffering=0) as file:
            for piece in (b"one", b" two\n", b"", b"x" * 200_000):
                file.write(piece)
                assert tail.copy() is bool(piece)
        assert out.getvalue() == (work / "log").read_bytes()

    def test_it_begins_anew(self, work: Path) -> None:
        out = io.BytesIO()
        tail = Tail(work / "log", out)
        for content in (b"the first run\n", b"again\n"):
            (work / "log").write_bytes(content)
            tail.copy()
        assert out.getvalue() == b"the first run\nagain\n"

    def test_a_place_that_cannot_be_read_shows_nothing(self, work: Path) -> None:
        assert Tail(work, io.BytesIO()).copy() is False
        assert Tail(work / "log" / "below", io.BytesIO()).copy() is False

    def test_it_is_taken_away_and_comes_back(self, work: Path) -> None:
        out = io.BytesIO()
        tail = Tail(work / "log", out)
        (work / "log").write_bytes(b"one\n")
        tail.copy()
        (work / "log").unlink()
        assert tail.copy() is False
        (work / "log").write_bytes(b"one\ntwo\n")
        tail.copy()
        assert out.getvalue() == b"one\ntwo\n"

    def test_what_arrives_late_is_shown_too(
        self, submission: Submission, said: list[str], monkeypatch: pytest.MonkeyPatch
    ) -> None:
        monkeypatch.setattr(following, "LAST_LOOK_S", 0.5)
        late = threading.Timer(0.1, Path(submission.log).write_text, ["late\n"])
        out = io.BytesIO()
        late.start()
        follow(Played(job("COMPLETED")), submission, Tail(Path(submission.log), out), said.append)
        late.join()
        assert out.getvalue() == b"late\n"

    def test_every_byte_is_shown_before_the_end(
        self, submission: Submission, said: list[str]
    ) -> None:
        log = Path(submission.log)

        def at_each(number: int) -> None:
            with log.open("ab") as file:
                file.write(b"line %d\n" % number)

        out = io.BytesIO()
        played = Played(job("PENDING"), job("RUNNING"), job("COMPLETED"), at_each=at_each)
        follow(played, submission, Tail(log, out), said.append)
        assert out.getvalue() == b"line 0\nline 1\nline 2\n"


def test_the_log_goes_on_while_slurm_lets_itself_be_waited_for(
    submission: Submission, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(following, "ANSWER_S", 0.001)
    shown = 0

    class Log:
        def copy(self) -> bool:
            nonlocal shown
            shown += 1
            return True

    def hang(_asked: int) -> None:
        before = shown
        deadline = time.monotonic() + 10
        while shown < before + 5:
            assert time.monotonic() < deadline
            time.sleep(0.001)

    client = Played(job(), job("COMPLETED"), at_each=hang)
    assert follow(client, submission, Log(), lambda _: None).exit_code == 0
