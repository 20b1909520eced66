"""The command line's words, split where the user's program begins.

From there on everything is the program's, byte for byte, so no option parser may see it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from gpusub.errors import GpusubError
from gpusub.request import Program


def split(argv: Sequence[str], takes_value: Mapping[str, bool]) -> tuple[list[str], Program | None]:
    """Return the options and the program of ``SCRIPT ARGS…``, ``-m MOD ARGS…``, ``-- CMD ARGS…``.

    ``takes_value`` tells of each option (``-N``, ``--nodes``) whether a value follows it. An
    unknown option counts as one without a value; the parser refuses it afterwards.

    Raises:
        GpusubError: ``-m`` or ``--`` stands there with nothing behind it.
    """
    position = 0
    while position < len(argv):
        word = argv[position]
        if word == "--":
            if position + 1 == len(argv):
                raise GpusubError("--: no command behind it; write -- COMMAND ARGS…")
            target, *args = argv[position + 1 :]
            return list(argv[:position]), Program("command", target, tuple(args))
        if word.startswith("--"):
            position += 2 if takes_value.get(word) else 1
        elif word.startswith("-") and len(word) > 1:
            module = _module(argv, position, takes_value)
            if module is not None:
                return module
            position += _short_length(word, takes_value)
        else:
            return list(argv[:position]), Program("script", word, tuple(argv[position + 1 :]))
    return list(argv), None


def _short_length(word: str, takes_value: Mapping[str, bool]) -> int:
    """Return how many words a cluster of short options takes (``-N2``, ``-N 2``, ``-vN 2``)."""
    for index, letter in enumerate(word[1:], start=1):
        if takes_value.get(f"-{letter}"):
            return 1 if index + 1 < len(word) else 2
    return 1


def _module(
    argv: Sequence[str], position: int, takes_value: Mapping[str, bool]
) -> tuple[list[str], Program] | None:
    """Return the split at a ``-m``, also within a cluster (``-vm MOD``, ``-mMOD``)."""
    word = argv[position]
    for index, letter in enumerate(word[1:], start=1):
        if letter == "m":
            before = [*argv[:position], *([word[:index]] if index > 1 else [])]
            rest = [*([word[index + 1 :]] if word[index + 1 :] else []), *argv[position + 1 :]]
            if not rest:
                raise GpusubError("-m: no module behind it; write -m MODULE ARGS…")
            return before, Program("module", rest[0], tuple(rest[1:]))
        if takes_value.get(f"-{letter}"):
            return None
    return None
