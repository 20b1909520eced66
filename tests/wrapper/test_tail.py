"""The end of a file and its growth; tests/wrapper/test_follow.py has more of the latter."""

from __future__ import annotations

import io
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusub import tail as tails
from gpusub.tail import Tail, last_lines, position_of_last


@given(st.text("ab\n", max_size=40), st.integers(0, 8), st.integers(1, 7))
def test_the_last_lines_begin_where_they_do(content: str, lines: int, chunk: int) -> None:
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tails, "_CHUNK_BYTES", chunk)
        path = Path("log")
        path.write_text(content)
        start = position_of_last(path, lines)
    expected = content.splitlines(keepends=True)
    assert content[start:] == "".join(expected[max(0, len(expected) - lines) :] if lines else [])


def test_of_no_file(work: Path) -> None:
    assert position_of_last(work / "nope", 3) == 0
    assert last_lines(work / "nope", 3) == []
    (work / "empty").touch()
    assert last_lines(work / "empty", 3) == []


def test_what_a_progress_bar_wrote_over_is_left_out(work: Path) -> None:
    (work / "log").write_bytes(b"0\n10%\r20%\r100%\nlast \xff\r\n")
    assert last_lines(work / "log", 2) == ["100%", "last �"]


class TestTail:
    def test_it_begins_where_it_is_told(self, work: Path) -> None:
        out = io.BytesIO()
        (work / "log").write_bytes(b"one\ntwo\n")
        Tail(work / "log", out, 4).copy()
        assert out.getvalue() == b"two\n"

    def test_one_cut_off_that_has_grown_again(self, work: Path) -> None:
        out = io.BytesIO()
        tail = Tail(work / "log", out)
        for content in (b"step 1\n", b"another run\nstep 1\nstep 2\n"):
            (work / "log").write_bytes(content)
            tail.copy()
        assert out.getvalue() == b"step 1\nanother run\nstep 1\nstep 2\n"

    def test_a_long_one_in_pieces(self, work: Path, monkeypatch: pytest.MonkeyPatch) -> None:
        monkeypatch.setattr(tails, "_CHUNK_BYTES", 10)
        out = io.BytesIO()
        (work / "log").write_bytes(b"0123456789" * 3 + b"x")
        tail = Tail(work / "log", out)
        assert tail.copy() is True
        assert tail.copy() is False
        assert out.getvalue() == (work / "log").read_bytes()

    def test_a_reader_that_has_gone(self, work: Path) -> None:
        class Gone(io.BytesIO):
            def write(self, data: object, /) -> int:
                raise BrokenPipeError

        (work / "log").write_text("x")
        with pytest.raises(BrokenPipeError):
            Tail(work / "log", Gone()).copy()
