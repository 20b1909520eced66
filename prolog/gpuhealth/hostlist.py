"""Slurm's hostlist expressions: is a node in ``gpu-[1-64,70],login1``?

Names are compared as Slurm does: ``gpu-[01-10]`` has gpu-01, and not gpu-1
(SchedMD/slurm:src/common/hostlist.c).
"""

from __future__ import annotations

import re

_RANGE = re.compile(r"(\d+)(?:-(\d+))?\Z")


def matches(expression: str, name: str) -> bool:
    """Whether an expression names this node. ValueError if the expression makes no sense."""
    return any(
        re.fullmatch(_pattern(part), name) and _inside(part, name) for part in split(expression)
    )


def split(expression: str) -> list[str]:
    """Return the parts of an expression, which commas outside of brackets separate."""
    parts, depth, start = [], 0, 0
    for index, sign in enumerate(expression):
        if sign == "[":
            depth += 1
        elif sign == "]":
            depth -= 1
        elif sign == "," and depth == 0:
            parts.append(expression[start:index])
            start = index + 1
        if depth not in (0, 1):
            raise ValueError(f"{expression!r}: brackets don't match")
    if depth:
        raise ValueError(f"{expression!r}: a bracket is open")
    parts.append(expression[start:])
    parts = [part.strip() for part in parts]
    if not all(parts):
        raise ValueError(f"{expression!r}: there is a name missing")
    for part in parts:
        _pattern(part)
    return parts


def _brackets(part: str) -> list[str]:
    return re.split(r"\[([^\]]*)\]", part)


def _pattern(part: str) -> str:
    pieces = _brackets(part)
    for ranges in pieces[1::2]:
        for item in ranges.split(","):
            found = _RANGE.match(item)
            if not found:
                raise ValueError(f"{part!r}: {item!r} is no number and no range like 1-8")
            if found[2] is not None and int(found[2]) < int(found[1]):
                raise ValueError(f"{part!r}: {item} runs backwards")
    return "".join(
        r"([0-9]+)" if index % 2 else re.escape(piece) for index, piece in enumerate(pieces)
    )


def _inside(part: str, name: str) -> bool:
    found = re.fullmatch(_pattern(part), name)
    if not found:
        return False
    for number, ranges in zip(found.groups(), _brackets(part)[1::2]):
        if not any(_covers(item, number) for item in ranges.split(",")):
            return False
    return True


def _covers(item: str, number: str) -> bool:
    first, _, last = item.partition("-")
    if not last:
        return number == first
    if not int(first) <= int(number) <= int(last):
        return False
    # The width of the first bound is the least width of all: 01, …, 99, 100.
    return number == str(int(number)).zfill(len(first))
