"""What every command shows alike: lines that fit the terminal, sizes, times, and --json."""

from __future__ import annotations

import datetime
import json
import os
import shutil
import sys
import textwrap
import unicodedata
from collections.abc import Callable, Sequence
from typing import Any, TypeVar

import click

from gpusub.errors import GpusubError
from gpusub.output import note as note  # a part of this module for the commands
from gpusub.output import write

F = TypeVar("F", bound=Callable[..., Any])

CONTEXT = {"help_option_names": ["-h", "--help"], "max_content_width": 80}
# Slurm's notion of no limit once a job runs.
YEAR_S = 365 * 86400


def common_options(command: F) -> F:
    """Add the options that every command has."""
    return json_option(debug_option(command))


def json_option(command: F) -> F:
    """Add --json."""
    option = click.option(
        "--json", "as_json", is_flag=True, envvar="GPUSUB_JSON", help="Print JSON."
    )
    return option(command)


def debug_option(command: F) -> F:
    """Add --debug: on an error, the trace too."""

    def trace(context: click.Context, _parameter: click.Parameter, value: bool) -> None:
        if value:
            context.call_on_close(_print_trace)

    option = click.option(
        "-v",
        "--debug",
        is_flag=True,
        expose_value=False,
        callback=trace,
        help="Show where an error came from.",
    )
    return option(command)


def _print_trace() -> None:
    if isinstance(sys.exc_info()[1], GpusubError):
        import traceback

        traceback.print_exc()


def tell(*lines: str) -> None:
    """Print lines of the answer; what the terminal's encoding lacks becomes a question mark."""
    write(sys.stdout, "".join(f"{line}\n" for line in lines), errors="replace")


def tell_json(value: Any) -> None:
    """Print the answer as JSON."""
    write(sys.stdout, json.dumps(value, indent=1, default=str) + "\n")


def columns() -> int:
    """Return how wide a line may be."""
    return max(40, shutil.get_terminal_size((80, 24)).columns)


def plain(text: str) -> str:
    """Return ``text`` without what would move the cursor: a job's name may hold anything."""
    if text.isascii() and text.isprintable():
        return text
    return "".join(c if c.isprintable() else "?" for c in text)


def width(text: str) -> int:
    """Return how many columns a terminal gives to ``text``."""
    if text.isascii():
        return len(text)
    return sum(
        0 if unicodedata.combining(c) else 2 if unicodedata.east_asian_width(c) in "WF" else 1
        for c in text
    )


def cut(text: str, most: int) -> str:
    """Return ``text`` in at most ``most`` columns; an ellipsis says that there is more."""
    if width(text) <= most:
        return text
    kept = ""
    for character in text:
        if width(kept + character) > most - 1:
            break
        kept += character
    return kept + "…"


def table(
    rows: Sequence[Sequence[str]], most: int, elastic: Sequence[int], least: int = 8
) -> list[str]:
    """Return the rows as aligned lines of at most ``most`` columns.

    Where they are too wide, the widest of the ``elastic`` columns gives way, down to ``least``.
    """
    widths = [max(width(cell) for cell in column) for column in zip(*rows, strict=True)]
    while sum(widths) + 2 * (len(widths) - 1) > most:
        widest = max(elastic, key=lambda index: widths[index])
        if widths[widest] <= least:
            break
        widths[widest] -= 1
    lines = []
    for row in rows:
        cells = [cut(cell, wide) for cell, wide in zip(row, widths, strict=True)]
        padded = (c + " " * (w - width(c)) for c, w in zip(cells, widths, strict=True))
        lines.append("  ".join(padded).rstrip())
    return lines


def wrapped(text: str, indent: str, most: int) -> list[str]:
    """Return a sentence as indented lines."""
    return textwrap.wrap(
        text,
        most,
        initial_indent=indent,
        subsequent_indent=indent,
        break_on_hyphens=False,
    )


def duration(seconds: int | None) -> str:
    """Return a time span as Slurm writes it: ``1-02:00:00``, ``4:00:00``, ``0:12``."""
    if seconds is None or seconds >= YEAR_S:
        return "no limit"
    minutes, secs = divmod(seconds, 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    if days:
        return f"{days}-{hours:02}:{minutes:02}:{secs:02}"
    return f"{hours}:{minutes:02}:{secs:02}" if hours else f"{minutes}:{secs:02}"


def moment(text: str, now: datetime.datetime) -> str:
    """Return one of Slurm's times for people: ``20:31:05`` today, ``Nov 30 20:31`` otherwise."""
    try:
        when = datetime.datetime.fromisoformat(text)
    except ValueError:
        return text
    if when.date() == now.date():
        return f"{when:%H:%M:%S}"
    return f"{when:%b %d %H:%M}" if when.year == now.year else f"{when:%Y-%m-%d %H:%M}"


def size(number: int) -> str:
    """Return a number of bytes for people."""
    if number < 1000:
        return f"{number} B"
    amount = number / 1000
    for unit in ("kB", "MB", "GB"):
        if amount < 999.5:
            return f"{amount:.3g} {unit}"
        amount /= 1000
    return f"{amount:,.3g} TB"


def short(path: str) -> str:
    """Return a path relative to the working directory where that is shorter to read."""
    here = os.environ.get("PWD") or os.getcwd()
    return path[len(here) + 1 :] if path.startswith(f"{here.rstrip('/')}/") else path
