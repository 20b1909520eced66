"""The end of a file, and a file as it grows."""

from __future__ import annotations

import os
from pathlib import Path
from typing import BinaryIO, Protocol

_CHUNK_BYTES = 1 << 20
# How much of what was read last must still stand there for the rest to be its continuation.
_MARK_BYTES = 64


class Sink(Protocol):
    """Where bytes go: a stream, or something that is made of them."""

    def write(self, data: bytes, /) -> object:
        """Take some bytes."""
        ...

    def flush(self) -> object:
        """Pass on what was taken."""
        ...


class Source(Protocol):
    """Something that grows and is shown."""

    def copy(self) -> bool:
        """Show what is new; return whether there was anything."""
        ...


class Tail:
    """A file that is read as it grows.

    It may not be there yet, may be cut off or replaced and start again, and is then read from its
    beginning.
    """

    def __init__(self, path: Path, out: Sink, position: int = 0) -> None:
        self.path, self.out, self.position = path, out, position
        self._mark = b""

    def copy(self) -> bool:
        """Write what is new; return whether there was anything."""
        any_new = False
        while new := self._read():
            any_new = True
            self.out.write(new)
            if len(new) < _CHUNK_BYTES:
                break
        if any_new:
            self.out.flush()
        return any_new

    def _read(self) -> bytes:
        try:
            with self.path.open("rb") as file:
                if not self._goes_on(file):
                    self.position, self._mark = 0, b""
                file.seek(self.position)
                new = file.read(_CHUNK_BYTES)
        except OSError:  # not there yet, or stale on a network file system
            return b""
        self.position += len(new)
        self._mark = (self._mark + new)[-_MARK_BYTES:]
        return new

    def _goes_on(self, file: BinaryIO) -> bool:
        """Whether the file is still the one that was read: one cut off may have grown again."""
        if file.seek(0, os.SEEK_END) < self.position:
            return False
        file.seek(self.position - len(self._mark))
        return file.read(len(self._mark)) == self._mark


def position_of_last(path: Path, lines: int) -> int:
    """Return where the last so many lines of a file begin; 0 where it has no more."""
    try:
        with path.open("rb") as file:
            end = file.seek(0, os.SEEK_END)
            if lines == 0:
                return end
            # The line break at the very end ends the last line and begins none.
            start, missing, skip = end, lines, 1
            while start > 0:
                length = min(_CHUNK_BYTES, start)
                start -= length
                file.seek(start)
                chunk = file.read(length)
                at = len(chunk) - skip
                skip = 0
                while (at := chunk.rfind(b"\n", 0, max(0, at))) >= 0:
                    missing -= 1
                    if missing == 0:
                        return start + at + 1
            return 0
    except OSError:
        return 0


def last_lines(path: Path, lines: int) -> list[str]:
    """Return the last lines of a file, each without its line break; none where there is no file."""
    try:
        with path.open("rb") as file:
            file.seek(max(position_of_last(path, lines), file.seek(0, os.SEEK_END) - _CHUNK_BYTES))
            content = file.read(_CHUNK_BYTES)
    except OSError:
        return []
    # What a progress bar wrote over is not worth a line.
    text = content.decode(errors="replace").removesuffix("\n")
    return [line.rstrip("\r").rpartition("\r")[2] for line in text.split("\n")] if text else []
