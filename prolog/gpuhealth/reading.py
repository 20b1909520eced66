"""One value of a node's: there, or absent, or not readable, which are three different things."""

from __future__ import annotations

import errno
from dataclasses import dataclass
from typing import Optional

# What stands for a read that didn't come back, for one that there was no time left for, and for
# one that a recording has nothing of.
HUNG = errno.ETIMEDOUT
OUT_OF_TIME = errno.ECANCELED
NOT_RECORDED = errno.ENODATA

# ENOTDIR: a component of the path is a file, so there can be nothing below it.
_ABSENT = (errno.ENOENT, errno.ENOTDIR)


@dataclass(frozen=True)
class Reading:
    """What a file holds (or a link leads to), without the newline at its end.

    Exactly one of the two is set: ``text``, or ``error``, an errno. A file that is there and
    empty has the text "".
    """

    text: Optional[str] = None
    error: int = 0

    @property
    def absent(self) -> bool:
        """Whether it is known that there is no such thing."""
        return self.error in _ABSENT

    @property
    def unreadable(self) -> bool:
        """Whether nothing is known: it may be there or not, and hold anything."""
        return bool(self.error) and not self.absent

    @property
    def why(self) -> str:
        """Why there is no text, in words for a message."""
        return describe(self.error)


@dataclass(frozen=True)
class Listing:
    """The names in a directory, sorted, or an errno."""

    names: tuple[str, ...] = ()
    error: int = 0

    @property
    def absent(self) -> bool:
        """Whether it is known that there is no such directory."""
        return self.error in _ABSENT

    @property
    def unreadable(self) -> bool:
        """Whether nothing is known of it."""
        return bool(self.error) and not self.absent

    @property
    def why(self) -> str:
        """Why there are no names, in words for a message."""
        return describe(self.error)


def describe(error: int) -> str:
    """An errno in words: ``EIO``, ``hung``, ``absent``; "" for 0."""
    if not error:
        return ""
    if error in _ABSENT:
        return "absent"
    if error == HUNG:
        return "hung"
    if error == OUT_OF_TIME:
        return "not looked at (out of time)"
    if error == NOT_RECORDED:
        return "not recorded"
    return errno.errorcode.get(error, f"errno {error}")
