"""What several searches of one request say that they have considered, told together."""

from __future__ import annotations

from collections.abc import Iterable

_UNSEARCHED = "microbatches: not searched"


def said_once(*searches: Iterable[str]) -> tuple[str, ...]:
    """The lines of all searches, each once; that a number of microbatches was not searched only where no search says
    more of it, and only what the last says.

    >>> said_once(["4 microbatches, gpipe: 2 s", "8 microbatches: not searched, out of time"],
    ...           ["4 microbatches: not searched, out of time", "8 microbatches: not searched, 3 s at the very least"])
    ('4 microbatches, gpipe: 2 s', '8 microbatches: not searched, 3 s at the very least')

    Args:
      searches: of each the lines, in the order in which they were made.
    """
    lines = dict.fromkeys(line for search in searches for line in search)
    last = {_number(line): line for line in lines if _UNSEARCHED in line}
    looked_at = {_number(line) for line in lines if _UNSEARCHED not in line}
    return tuple(
        line
        for line in lines
        if _UNSEARCHED not in line or (last[_number(line)] == line and _number(line) not in looked_at)
    )


def _number(line: str) -> str:
    """The number of microbatches that a line is about, if it is about one."""
    return line.split(" ", 1)[0]
