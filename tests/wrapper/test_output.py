"""A stream that takes no more must not hide what happened."""

from __future__ import annotations

import io
import sys
from pathlib import Path
from typing import TextIO

import pytest

from gpusub.output import note, write


def test_what_is_written_is_there_at_once(tmp_path: Path) -> None:
    with (tmp_path / "out").open("w") as stream:
        assert write(stream, "job 7\n")
        assert (tmp_path / "out").read_text() == "job 7\n"


@pytest.mark.parametrize("encoding", ["ascii", "latin-1", "utf-8"])
def test_what_the_stream_lacks_is_spelt_out(encoding: str) -> None:
    raw = io.BytesIO()
    stream = io.TextIOWrapper(raw, encoding=encoding)
    assert write(stream, "日 \udcff\n")
    assert raw.getvalue().decode(encoding).endswith("\\udcff\n")


def closed() -> TextIO:
    stream = io.StringIO()
    stream.close()
    return stream


@pytest.mark.parametrize("stream", [None, closed()])
def test_a_closed_stream_is_told_of(stream: TextIO | None) -> None:
    assert not write(stream, "job 7\n")


def test_a_full_device_is_told_of() -> None:
    stream = open("/dev/full", "w")  # noqa: SIM115 - closing it raises what is tested here
    assert not write(stream, "job 7\n")
    with pytest.raises(OSError, match="No space left"):
        stream.close()


def test_a_note_that_nobody_hears_is_no_error(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "stderr", None)
    note("job 7")


def test_a_note_goes_to_stderr(capsys: pytest.CaptureFixture[str]) -> None:
    note("job 7")
    assert capsys.readouterr() == ("", "job 7\n")
