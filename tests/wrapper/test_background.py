from __future__ import annotations

import threading

import pytest

from gpusub.background import in_background


def test_it_works_while_others_do() -> None:
    go = threading.Event()

    def work() -> int:
        assert go.wait(10)
        return 7

    answer = in_background(work)
    go.set()
    assert (answer(), answer()) == (7, 7)


@pytest.mark.parametrize("error", [ValueError("x"), SystemExit(3), KeyboardInterrupt()])
def test_what_goes_wrong_is_raised_where_it_is_waited_for(error: BaseException) -> None:
    def work() -> None:
        raise error

    with pytest.raises(type(error)) as raised:
        in_background(work)()
    assert raised.value is error
