"""What is written for people and for scripts.

A stream may be closed, full, or read by somebody who has seen enough. That must not hide a job
that Slurm has accepted: a script that takes it for a failure would submit a second one.
"""

from __future__ import annotations

import sys
from typing import TextIO


def write(stream: TextIO | None, text: str, errors: str = "backslashreplace") -> bool:
    """Write ``text`` and return whether it got there.

    ``errors`` says what becomes of characters that the stream lacks (codecs).
    """
    if stream is None:
        return False
    try:
        encoding = stream.encoding or "utf-8"
        stream.write(text.encode(encoding, errors=errors).decode(encoding))
        stream.flush()
    except (OSError, ValueError):
        return False
    return True


def note(line: str) -> None:
    """Say something to the person, on stderr."""
    write(sys.stderr, f"{line}\n")
