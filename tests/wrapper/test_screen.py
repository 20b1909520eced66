from __future__ import annotations

import datetime
import io
import sys
from pathlib import Path

import click
import pytest
from hypothesis import given
from hypothesis import strategies as st

from gpusub import screen
from gpusub.errors import GpusubError

NOW = datetime.datetime(2026, 11, 30, 20, 31)


@pytest.mark.parametrize(
    ("seconds", "words"),
    [
        (0, "0:00"),
        (72, "1:12"),
        (3600, "1:00:00"),
        (86400 * 2 + 61, "2-00:01:01"),
        (None, "no limit"),
        (365 * 86400, "no limit"),
    ],
)
def test_time_spans(seconds: int | None, words: str) -> None:
    assert screen.duration(seconds) == words


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("2026-11-30T08:00:05", "08:00:05"),
        ("2026-11-29T08:00:05", "Nov 29 08:00"),
        ("2027-01-02T08:00:05", "2027-01-02 08:00"),
        ("Unknown", "Unknown"),
    ],
)
def test_moments(text: str, words: str) -> None:
    assert screen.moment(text, NOW) == words


@pytest.mark.parametrize(
    ("number", "words"),
    [(0, "0 B"), (999, "999 B"), (1500, "1.5 kB"), (999_700, "1 MB"), (2_340_000_000, "2.34 GB"),
     (5_000_000_000_000, "5 TB")],
)  # fmt: skip
def test_sizes(number: int, words: str) -> None:
    assert screen.size(number) == words


@given(st.lists(st.tuples(st.text(max_size=60), st.text(max_size=60)), min_size=1))
def test_a_table_keeps_within_its_width(rows: list[tuple[str, str]]) -> None:
    shown = [[screen.plain(cell) for cell in row] for row in rows]
    lines = screen.table(shown, 40, elastic=(0, 1))
    assert len(lines) == len(rows)
    assert all(screen.width(line) <= 40 for line in lines)
    assert all(line.isprintable() for line in lines)


def test_the_widest_column_gives_way() -> None:
    rows = [("1", "a-name-of-some-length", "gpu-[1-2]"), ("22", "日本", "gpu-1")]
    assert screen.table(rows, 27, elastic=(1, 2)) == [
        "1   a-name-of-s…  gpu-[1-2]",
        "22  日本          gpu-1",
    ]


def test_what_moves_the_cursor_is_not_shown() -> None:
    assert screen.plain("a\x1b[31mb\nc\udcff é") == "a?[31mb?c? é"


def test_a_terminal_without_the_characters(monkeypatch: pytest.MonkeyPatch) -> None:
    raw = io.BytesIO()
    monkeypatch.setattr(sys, "stdout", io.TextIOWrapper(raw, encoding="ascii"))
    screen.tell("a…b")
    assert raw.getvalue() == b"a?b\n"


def test_a_path_below_the_working_directory(work: Path) -> None:
    assert screen.short(f"{work}/a/b") == "a/b"
    assert screen.short(f"{work}er/a") == f"{work}er/a"


def test_debug_shows_where_an_error_came_from(capsys: pytest.CaptureFixture[str]) -> None:
    @click.command()
    @screen.common_options
    def command(as_json: bool) -> None:
        raise GpusubError("wrong")

    for words, traced in ((["-v"], True), ([], False)):
        with pytest.raises(GpusubError):
            command.main(words, standalone_mode=False)
        assert ("Traceback" in capsys.readouterr().err) is traced
