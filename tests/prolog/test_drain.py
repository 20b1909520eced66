"""No more nodes are drained than may be, however their decisions interleave."""

from __future__ import annotations

import random
import threading
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from pathlib import Path

import pytest

from gpuhealth import drain, scontrol
from gpuhealth.drain import Drain, Ledger, Pending, Result, has_room, limit, may_stay
from gpuhealth.policy import Cap
from gpuhealth.scontrol import ANSWERED, Answer
from gpuhealth.slurmnode import SlurmNode, parse_state

OURS = "gpuhealth: ib_port mlx5_0:1 DOWN/Polling expected ACTIVE/LinkUp"
OK = Answer(ANSWERED)


def node(
    name: str, state: str = "IDLE", reason: str = "", second: int = 0, *parts: str
) -> SlurmNode:
    time = f"2026-11-30T12:{second // 60:02}:{second % 60:02}" if reason else ""
    return SlurmNode(name, parse_state(state), reason, "root", time, parts or ("gpu",))


def ours(name: str, second: int = 0, *parts: str) -> SlurmNode:
    return node(name, "IDLE+DRAIN", OURS, second, *parts)


# -- the rule


@pytest.mark.parametrize(
    ("count", "percent", "size", "most"),
    [
        (4, 5.0, 64, 3),
        (4, 5.0, 1000, 4),
        (4, 5.0, 8, 1),  # one node may always go, or a small partition keeps its sick one
        (4, 0.0, 1000, 0),
        (0, 5.0, 1000, 0),
        (2, None, 8, 2),
        (None, 50.0, 8, 4),
        (None, None, 8, None),
        (4, 100.0, 3, 3),
    ],
)
def test_smaller_one_holds(
    count: int | None, percent: float | None, size: int, most: int | None
) -> None:
    assert limit(Cap(count, percent), size) == most


TWO = Cap(2, None)


def test_room_is_counted_in_each_partition() -> None:
    me = node("gpu-1", "IDLE", "", 0, "gpu", "urgent")
    others = [ours("gpu-2", 1, "gpu"), ours("gpu-3", 1, "other"), ours("gpu-4", 1, "other")]
    assert has_room([me, *others], me, TWO)
    assert not has_room([me, *others, ours("gpu-5", 1, "urgent", "gpu")], me, TWO)
    assert has_room([me, *others, node("gpu-5", "IDLE+DRAIN", "ADMIN")], me, TWO)
    # A reason outlives its drain in some versions.
    assert has_room([me, *others, node("gpu-5", "IDLE", OURS)], me, TWO)


def test_nodes_without_a_partition_are_a_group() -> None:
    me = replace(node("gpu-1"), partitions=())
    others = [replace(ours(f"gpu-{number}"), partitions=()) for number in (2, 3)]
    assert not has_room([me, *others], me, TWO)
    assert has_room([me, others[0], ours("gpu-4")], me, TWO)


def test_places_go_by_time_and_then_by_name() -> None:
    nodes = [ours("gpu-9", 1), ours("gpu-10", 2), ours("gpu-2", 2), ours("gpu-1", 3)]
    assert [may_stay(nodes, one, TWO) for one in nodes] == [True, True, False, False]
    foreign = [node(f"gpu-{n}", "IDLE+DRAIN", "ADMIN", 0) for n in range(20, 30)]
    assert may_stay([*foreign, *nodes], nodes[0], TWO)


def test_exactly_the_cap_may_stay() -> None:
    for seed in range(300):
        chance = random.Random(seed)
        nodes = [ours(f"gpu-{n}", chance.randrange(4)) for n in range(8)]
        cap = Cap(chance.randrange(9), None)
        assert sum(may_stay(nodes, one, cap) for one in nodes) == min(8, cap.count or 0)


# -- the flow, against a Slurm that can be told what to do


@dataclass
class FakeSlurm:
    """A slurmctld with one clock; answers can be taken from a queue by the call's name."""

    nodes_by_name: dict[str, SlurmNode]
    now_s: float = 0.0
    failing: dict[str, list[Answer]] = field(default_factory=dict)
    calls: list[str] = field(default_factory=list)
    lands: bool = False
    before: Callable[[str], None] = lambda call: None

    def _answer(self, call: str) -> Answer:
        self.before(call)
        self.calls.append(call)
        queue = self.failing.get(call)
        return queue.pop(0) if queue else OK

    def nodes(
        self, deadline_s: float, names: tuple[str, ...] = ()
    ) -> tuple[Answer, list[SlurmNode]]:
        answer = self._answer("nodes")
        return answer, list(self.nodes_by_name.values()) if answer.answered else []

    def drain(self, name: str, reason: str, deadline_s: float) -> Answer:
        answer = self._answer("drain")
        if answer.answered or self.lands:
            self.set(name, "IDLE+DRAIN", reason)
        return answer

    def undrain(self, name: str, deadline_s: float) -> Answer:
        answer = self._answer("undrain")
        if answer.answered or self.lands:
            self.set(name, "IDLE+NOT_RESPONDING", "")
        return answer

    def set(self, name: str, state: str, reason: str) -> None:
        old = self.nodes_by_name[name]
        self.nodes_by_name[name] = node(name, state, reason, int(self.now_s), *old.partitions)

    def sleep(self, seconds: float) -> None:
        self.now_s += seconds


def fleet(*nodes: SlurmNode, **options: list[Answer]) -> FakeSlurm:
    known = {one.name: one for one in nodes or [node(f"gpu-{n}") for n in range(8)]}
    return FakeSlurm(known, now_s=100.0, failing=options)


def flow(slurm: FakeSlurm, place: Path, name: str = "gpu-0", cap: Cap = TWO) -> Drain:
    clock = lambda: slurm.now_s  # noqa: E731
    ledger = Ledger(str(place / name / "drain.json"))
    return Drain(name, slurm, ledger, cap, 1e9, clock, clock, slurm.sleep)


def pending(place: Path, name: str = "gpu-0") -> Pending | None:
    return Ledger(str(place / name / "drain.json")).read()


def test_drained_with_the_reason(tmp_path: Path) -> None:
    slurm = fleet()
    result = flow(slurm, tmp_path).begin(OURS)
    assert result == Result(drain.DRAINED, OURS)
    assert result.out_of_service
    assert slurm.calls == ["nodes", "drain", "nodes"]
    assert slurm.nodes_by_name["gpu-0"].reason == OURS
    assert pending(tmp_path) is None


def test_past_the_cap_nothing_is_touched(tmp_path: Path) -> None:
    slurm = fleet(node("gpu-0"), ours("gpu-1"), ours("gpu-2"))
    result = flow(slurm, tmp_path).begin(OURS)
    assert result == Result(drain.CAPPED, "2 of at most 2 in gpu")
    assert not result.out_of_service
    assert slurm.calls == ["nodes"]


@pytest.mark.parametrize(("name", "stays"), [("gpu-1", True), ("gpu-5", False)])
def test_who_comes_too_late_lifts_its_own_drain(tmp_path: Path, name: str, stays: bool) -> None:
    slurm = fleet()

    def others(call: str) -> None:
        if call == "drain":
            slurm.now_s -= 1
            slurm.set("gpu-7", "IDLE+DRAIN", OURS)  # in front by its time
            slurm.now_s += 1
            slurm.set("gpu-3", "IDLE+DRAIN", OURS)  # in the same second: its name decides

    slurm.before = others
    result = flow(slurm, tmp_path, name).begin(OURS)
    assert result.outcome == (drain.DRAINED if stays else drain.CAPPED)
    assert result.out_of_service is stays
    assert slurm.nodes_by_name[name].drained_by_us is stays
    assert pending(tmp_path, name) is None


STATES = [
    "IDLE+MAINTENANCE",
    "MIXED+REBOOT_REQUESTED",
    "IDLE+NOT_RESPONDING",
    "IDLE+POWERING_UP",
    "DOWN",
    "FUTURE",
    "IDLE+SOME_LATER_FLAG",
    "",
]


@pytest.mark.parametrize("state", STATES)
def test_nodes_in_other_hands_are_not_touched(tmp_path: Path, state: str) -> None:
    slurm = fleet(node("gpu-0", state))
    result = flow(slurm, tmp_path).begin(OURS)
    assert result.outcome == drain.UNTOUCHED
    # Slurm would drain a node that is not drained, if its prolog failed.
    assert not result.out_of_service
    assert slurm.calls == ["nodes"]


@pytest.mark.parametrize("reason", ["ADMIN SHUTDOWN", "Prolog error", "", "NHC: gpuhealth: x"])
@pytest.mark.parametrize("state", ["IDLE+DRAIN", "MIXED+DRAIN", "DOWN+DRAIN+REBOOT_ISSUED"])
def test_foreign_drain_is_not_touched(tmp_path: Path, state: str, reason: str) -> None:
    slurm = fleet(node("gpu-0", state, reason))
    before = dict(slurm.nodes_by_name)
    result = flow(slurm, tmp_path).begin(OURS)
    assert result == Result(drain.FOREIGN, reason)
    assert result.out_of_service
    assert slurm.nodes_by_name == before
    assert slurm.calls == ["nodes"]


def test_own_drain_is_left_as_it_is(tmp_path: Path) -> None:
    old = "gpuhealth: xid GPU 3 Xid 79"
    slurm = fleet(node("gpu-0", "MIXED+DRAIN", old))
    assert flow(slurm, tmp_path).begin(OURS) == Result(drain.ALREADY, old)
    assert slurm.nodes_by_name["gpu-0"].reason == old


def test_slurm_knows_no_such_node(tmp_path: Path) -> None:
    result = flow(fleet(node("gpu-9")), tmp_path).begin(OURS)
    assert result.outcome == drain.UNTOUCHED
    assert not result.out_of_service


FAILURES = [
    Answer(scontrol.UNREACHABLE, "no"),
    Answer(scontrol.TIMED_OUT, "no"),
    Answer(scontrol.REFUSED, "no"),
]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda answer: answer.outcome)
def test_without_a_first_answer_nothing_is_drained(tmp_path: Path, failure: Answer) -> None:
    # Nobody knows how many are drained: for all this node can tell, the whole fleet is.
    slurm = fleet(nodes=[failure])
    result = flow(slurm, tmp_path).begin(OURS)
    assert result == Result(drain.UNREACHED, "no")
    assert not result.out_of_service
    assert slurm.calls == ["nodes"]


@pytest.mark.parametrize("failure", FAILURES, ids=lambda answer: answer.outcome)
@pytest.mark.parametrize("lands", [False, True])
def test_drain_without_an_answer_may_land_later(
    tmp_path: Path, failure: Answer, lands: bool
) -> None:
    slurm = fleet(drain=[failure])
    slurm.lands = lands and failure.outcome == scontrol.TIMED_OUT
    result = flow(slurm, tmp_path).begin(OURS)
    assert not result.out_of_service
    # Only what may still land is kept in mind.
    assert (pending(tmp_path) is not None) is (failure.outcome == scontrol.TIMED_OUT)
    if failure.outcome != scontrol.TIMED_OUT:
        return
    slurm.now_s += 30
    settled = flow(slurm, tmp_path).settle()
    assert settled is not None
    assert settled.outcome == (drain.DRAINED if lands else drain.RESUMED)
    assert (pending(tmp_path) is None) is lands
    slurm.now_s += drain.LATE_S
    flow(slurm, tmp_path).settle()
    assert pending(tmp_path) is None


def test_second_look_without_an_answer_is_settled_later(tmp_path: Path) -> None:
    slurm = fleet(nodes=[OK, FAILURES[1]])
    result = flow(slurm, tmp_path).begin(OURS)
    assert result == Result(drain.UNSETTLED, "no")
    assert result.out_of_service
    assert pending(tmp_path) == Pending(OURS, 100.0)
    # Meanwhile two more came, and both before this one.
    slurm.now_s = 0
    slurm.set("gpu-1", "IDLE+DRAIN", OURS)
    slurm.set("gpu-2", "IDLE+DRAIN", OURS)
    slurm.now_s = 500
    settled = flow(slurm, tmp_path).settle()
    assert settled is not None
    assert settled.outcome == drain.CAPPED
    assert not slurm.nodes_by_name["gpu-0"].state.drain
    assert pending(tmp_path) is None


def test_prolog_settles_what_an_ended_one_began(tmp_path: Path) -> None:
    slurm = fleet(ours("gpu-0", 5), ours("gpu-1", 1), ours("gpu-2", 2))
    Ledger(str(tmp_path / "gpu-0" / "drain.json")).write(Pending(OURS, 5.0))
    result = flow(slurm, tmp_path).begin(OURS)
    assert result.outcome == drain.CAPPED
    assert not slurm.nodes_by_name["gpu-0"].state.drain


def test_undrain_without_an_answer_is_tried_again(tmp_path: Path) -> None:
    slurm = fleet(ours("gpu-0", 5), ours("gpu-1", 1), ours("gpu-2", 2), undrain=[FAILURES[1]])
    Ledger(str(tmp_path / "gpu-0" / "drain.json")).write(Pending(OURS, 5.0))
    result = flow(slurm, tmp_path).begin(OURS)
    # It may be in service by now, and then a failing prolog would drain it anew.
    assert not result.out_of_service
    assert pending(tmp_path) is not None
    flow(slurm, tmp_path).settle()
    assert not slurm.nodes_by_name["gpu-0"].state.drain
    assert pending(tmp_path) is None


@pytest.mark.parametrize(
    ("state", "reason", "outcome"),
    [
        ("IDLE", "", drain.RESUMED),
        ("IDLE", OURS, drain.RESUMED),
        ("IDLE+DRAIN", "an admin's", drain.FOREIGN),
        ("IDLE+DRAIN", OURS + "!", drain.FOREIGN),
    ],
)
def test_admin_was_faster(tmp_path: Path, state: str, reason: str, outcome: str) -> None:
    slurm = fleet(node("gpu-0"), ours("gpu-1", 1), node("gpu-2"))

    def admin(call: str) -> None:
        if slurm.calls.count("nodes") == 1 and call == "nodes":
            slurm.set("gpu-0", state, reason)

    slurm.before = admin
    result = flow(slurm, tmp_path, cap=TWO).begin(OURS)
    assert result.outcome == outcome
    assert slurm.nodes_by_name["gpu-0"].reason == reason
    assert "undrain" not in slurm.calls


def test_reboot_that_began_meanwhile_is_not_interrupted(tmp_path: Path) -> None:
    slurm = fleet(
        node("gpu-0", "DOWN+DRAIN+REBOOT_ISSUED", OURS, 9), ours("gpu-1", 1), ours("gpu-2")
    )
    Ledger(str(tmp_path / "gpu-0" / "drain.json")).write(Pending(OURS, 5.0))
    settled = flow(slurm, tmp_path).settle()
    assert settled is not None
    assert settled.outcome == drain.UNSETTLED
    assert "undrain" not in slurm.calls


def test_nothing_open_asks_nothing(tmp_path: Path) -> None:
    slurm = fleet()
    assert flow(slurm, tmp_path).settle() is None
    assert slurm.calls == []


def test_a_drain_within_the_cap_is_never_lifted(tmp_path: Path) -> None:
    slurm = fleet(ours("gpu-0", 5))
    assert flow(slurm, tmp_path).settle() is None
    Ledger(str(tmp_path / "gpu-0" / "drain.json")).write(Pending(OURS, 5.0))
    settled = flow(slurm, tmp_path).settle()
    assert settled == Result(drain.DRAINED, OURS)
    assert slurm.nodes_by_name["gpu-0"].drained_by_us


# -- what is written down


def test_read_only_disk(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    broken, whole = str(tmp_path / "file" / "x"), str(tmp_path / "run" / "x")
    ledger = Ledger(broken, whole)
    assert ledger.write(Pending(OURS, 5.0))
    assert ledger.read() == Pending(OURS, 5.0)
    ledger.clear()
    assert ledger.read() is None
    assert not Ledger(broken).write(Pending(OURS, 5.0))
    slurm = fleet()
    result = replace(flow(slurm, tmp_path), ledger=Ledger(broken)).begin(OURS)
    assert result.outcome == drain.UNTOUCHED
    assert slurm.calls == ["nodes"]


@pytest.mark.parametrize(
    "text",
    [
        "",
        "{",
        "[]",
        "null",
        "{}",
        '{"reason": 5, "at_s": 1}',
        '{"reason": "x", "at_s": 1}',
        '{"reason": "gpuhealth: x", "at_s": "y"}',
        "\udcff",
    ],
)
def test_what_makes_no_sense_is_nothing(tmp_path: Path, text: str) -> None:
    (tmp_path / "x").write_bytes(text.encode("utf-8", "surrogateescape"))
    assert Ledger(str(tmp_path / "x")).read() is None


# -- all at once


class Simulation:
    """Threads that take turns by a common clock, so that a seed gives one interleaving."""

    def __init__(self, seed: int) -> None:
        self.chance = random.Random(seed)
        self.now_s = 100.0
        self._turn = threading.Condition()
        self._waiting: dict[int, float] = {}
        self._running = 0
        self._ids = 0

    def sleep(self, seconds: float) -> None:
        with self._turn:
            self._ids += 1
            me = self._ids
            self._waiting[me] = self.now_s + seconds
            self._running -= 1
            self._wake()
            while self._waiting.get(me) is not None:
                self._turn.wait()

    def _wake(self) -> None:
        if self._running == 0 and self._waiting:
            first = min(self._waiting, key=lambda one: (self._waiting[one], one))
            self.now_s = max(self.now_s, self._waiting.pop(first))
            self._running = 1
            self._turn.notify_all()

    def run(self, works: list[Callable[[], None]]) -> None:
        self._running = len(works)

        def one(work: Callable[[], None]) -> None:
            try:
                work()
            finally:
                with self._turn:
                    self._running -= 1
                    self._wake()

        threads = [threading.Thread(target=one, args=(work,)) for work in works]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()


class SlowSlurm(FakeSlurm):
    """Every call takes its time, and takes effect somewhere in the middle of it."""

    simulation: Simulation
    lossy = False

    def _answer(self, call: str) -> Answer:
        self.simulation.sleep(self.simulation.chance.random() * 0.4)
        self.now_s = self.simulation.now_s
        if self.lossy and self.simulation.chance.random() < 0.2:
            self.lands = self.simulation.chance.random() < 0.5
            return FAILURES[1]
        self.lands = False
        return OK

    def drain(self, name: str, reason: str, deadline_s: float) -> Answer:
        answer = super().drain(name, reason, deadline_s)
        self.simulation.sleep(self.simulation.chance.random() * 0.4)
        return answer


def one_round(seed: int, place: Path, jitter_s: float, lossy: bool) -> tuple[list[str], list[str]]:
    """Let eight sick nodes act; return who is drained, and who fails its prolog."""
    simulation = Simulation(seed)
    slurm = SlowSlurm({f"gpu-{n}": node(f"gpu-{n}") for n in range(8)}, 100.0)
    slurm.simulation, slurm.lossy = simulation, lossy
    results: dict[str, Result] = {}

    def clock() -> float:
        return simulation.now_s

    def work_of(name: str) -> Drain:
        ledger = Ledger(str(place / name / "drain.json"))
        return Drain(name, slurm, ledger, TWO, 1e9, clock, clock, simulation.sleep)

    def sick(name: str) -> Callable[[], None]:
        after_s = simulation.chance.random() * jitter_s

        def work() -> None:
            simulation.sleep(after_s)
            results[name] = work_of(name).begin(OURS)

        return work

    def settling(name: str) -> Callable[[], None]:
        def work() -> None:
            work_of(name).settle()

        return work

    simulation.run([sick(name) for name in slurm.nodes_by_name])
    # Whatever was lost on the way: two periodic runs, and it is settled.
    slurm.lossy = False
    for name in [*slurm.nodes_by_name] * 2 if lossy else []:
        simulation.run([settling(name)])
    held = [one.name for one in slurm.nodes_by_name.values() if one.drained_by_us]
    return held, sorted(name for name, result in results.items() if result.out_of_service)


@pytest.mark.parametrize("jitter_s", [0.0, 1.0, 3.0])
def test_eight_at_once(tmp_path: Path, jitter_s: float) -> None:
    for seed in range(25):
        held, failed = one_round(seed, tmp_path / str(seed), jitter_s, lossy=False)
        assert len(held) == 2, seed
        assert held == failed, seed


@pytest.mark.parametrize("jitter_s", [0.0, 1.0, 3.0])
def test_eight_at_once_with_every_fifth_answer_lost(tmp_path: Path, jitter_s: float) -> None:
    for seed in range(25):
        held, _ = one_round(seed, tmp_path / str(seed), jitter_s, lossy=True)
        assert len(held) <= 2, seed
