from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpuhealth import portcounters
from gpuhealth.history import (
    MAX_SEEN,
    MAX_STAMPS,
    WINDOW_S,
    History,
    Stamp,
    advance,
    of_boot,
    persists,
    resumed,
    thinned,
)

PORT = "mlx5_0:1"
KEY = "hung nvml"


def stamps(*values: tuple[float, int], name: str = "link_downed") -> tuple[Stamp, ...]:
    return tuple(Stamp(at_s, {PORT: {name: value}}) for at_s, value in values)


class TestBoots:
    def test_a_reboot_forgets_everything(self) -> None:
        old = History("a", stamps((10, 1)), {KEY: (1, 2)}, 5.0, ("mlx5_0",))
        assert advance(old, boot_id="b", now_s=20) == History("b")

    @pytest.mark.parametrize(
        "history",
        [
            History("a", stamps((99, 1))),
            History("a", seen={KEY: (1, 99)}),
            History("a", resumed_s=99),
            History("", stamps((1, 1))),
        ],
        ids=["stamp of the future", "seen in the future", "resumed in the future", "no boot"],
    )
    def test_what_is_of_no_boot_is_forgotten(self, history: History) -> None:
        assert of_boot(history, history.boot_id, 50) == History(history.boot_id)

    def test_the_rest_stays(self) -> None:
        history = History("a", stamps((10, 1)), {KEY: (1, 2)})
        assert of_boot(history, "a", 50) is history


class TestUnknownForLong:
    def test_twice_at_least_a_minute_apart(self) -> None:
        history = advance(History(), boot_id="a", now_s=100, seen=[KEY])
        assert not persists(history, KEY, 159)
        history = advance(history, boot_id="a", now_s=159, seen=[KEY])
        assert persists(history, KEY, 160)
        assert not persists(history, "hung /sys", 160)

    def test_an_answer_ends_it(self) -> None:
        history = advance(History(), boot_id="a", now_s=100, seen=[KEY])
        history = advance(history, boot_id="a", now_s=130, answered=[KEY])
        history = advance(history, boot_id="a", now_s=161, seen=[KEY])
        assert not persists(history, KEY, 162)

    def test_a_run_that_does_not_look_there_is_no_answer(self) -> None:
        history = advance(History(), boot_id="a", now_s=100, seen=[KEY])
        history = advance(history, boot_id="a", now_s=130)
        assert persists(history, KEY, 160)

    def test_a_reboot_ends_it(self) -> None:
        history = advance(History(), boot_id="a", now_s=100, seen=[KEY])
        history = advance(history, boot_id="b", now_s=200, seen=[KEY])
        assert not persists(history, KEY, 201)

    def test_there_is_an_end_to_what_is_kept(self) -> None:
        history = History()
        for now_s in range(20):
            keys = [f"hung /{now_s}/{number}" for number in range(100)]
            history = advance(history, boot_id="a", now_s=now_s, seen=keys)
        assert len(history.seen) == MAX_SEEN
        assert "hung /19/0" in history.seen


class TestStamps:
    def test_the_newest_one_alone_keeps_the_traffic(self) -> None:
        counts = {PORT: {"link_downed": 0, "port_xmit_data": 7}}
        history = advance(History(), boot_id="a", now_s=10, ports=counts)
        history = advance(history, boot_id="a", now_s=40, ports=counts)
        assert [dict(stamp.ports[PORT]) for stamp in history.stamps] == [
            {"link_downed": 0},
            {"link_downed": 0, "port_xmit_data": 7},
        ]

    def test_a_run_without_counters_leaves_no_stamp(self) -> None:
        assert advance(History(), boot_id="a", now_s=10, ports={}).stamps == ()

    @pytest.mark.parametrize("every_s", [1, 7, 20, 60, 300, 3600])
    def test_however_often_it_runs(self, every_s: int) -> None:
        history = History()
        end_s = 30 * 3600 if every_s >= 60 else 4000 * every_s
        for now_s in range(0, end_s, every_s):
            history = advance(history, boot_id="a", now_s=now_s, ports={PORT: {"link_downed": 0}})
        times = [stamp.at_s for stamp in history.stamps]
        last_s = (end_s - 1) // every_s * every_s
        assert len(times) <= MAX_STAMPS
        assert times[-1] == last_s
        # For every window there is a stamp not much older than it.
        for window_s in (60, 600, 3600, 3 * 3600):
            if window_s < last_s:
                ages = [last_s - at_s for at_s in times if last_s - at_s >= window_s]
                assert min(ages) <= window_s * 1.5 + 2 * every_s
        assert last_s - times[0] <= WINDOW_S

    @given(
        st.lists(st.tuples(st.integers(1, 900), st.sampled_from([0] * 8 + [1, 2, -1])), max_size=60)
    )
    def test_thinning_changes_no_sum(self, steps: list[tuple[int, int]]) -> None:
        now_s, value = 0, 0
        full: list[tuple[float, int]] = [(0.0, 0)]
        history = advance(History(), boot_id="a", now_s=0, ports={PORT: {"link_downed": 0}})
        for wait_s, step in steps:
            now_s += wait_s
            value = max(0, value + step) if step >= 0 else 0
            full.append((float(now_s), value))
            history = advance(
                history, boot_id="a", now_s=now_s, ports={PORT: {"link_downed": value}}
            )
        kept = [(stamp.at_s, stamp.ports[PORT]["link_downed"]) for stamp in history.stamps]
        for window_s in (600, 3 * 3600):
            # Only so far as both sides were watched.
            since_s = max(now_s - window_s, -1)
            assert (
                portcounters.rise(kept, 8, since_s).count
                == portcounters.rise(full, 8, since_s).count
            )

    def test_a_counter_that_is_always_set_back_fills_nothing_up(self) -> None:
        many = tuple(
            Stamp(at_s, {PORT: {"symbol_error": number % 2}})
            for number, at_s in enumerate(range(0, 86_000, 60))
        )
        kept = thinned(many, 86_000)
        assert len(kept) <= MAX_STAMPS
        assert kept[-1] == many[-1]


def test_a_resume_is_noted_in_this_boot() -> None:
    assert resumed(History("a", stamps((10, 1))), "a", 50).resumed_s == 50
    assert resumed(History("a", stamps((10, 1))), "b", 50).stamps == ()
