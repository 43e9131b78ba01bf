"""The one error of the cluster package, and the checks on numbers that raise it.

Every check states what was refused, what was given, what is needed, where, and what to try; the TOML reader adds the
file to *where* with `ClusterError.inside`, so each rule about a number is written once, beside the object it protects.
"""

from __future__ import annotations

import difflib
import math
import sys
from collections.abc import Iterable

# No cluster has as many of anything; a typing slip like 10000000000 would otherwise fill the memory.
_MOST = 10_000_000
_MOST_DIGITS = 20


class ClusterError(ValueError):
    """A cluster description, or a question asked of a cluster, that cannot be accepted.

    Args (all text): `refused` (the thing refused), `got`, `needed`, `where` (object and field, or file and key),
    `try_` (what the user can do). They stay readable as attributes.

    >>> str(ClusterError(refused="a device", got="0", needed="a number > 0", where="memory_bytes", try_="16e9"))
    'refused a device: got 0; needed a number > 0; where: memory_bytes; try: 16e9'
    """

    def __init__(self, *, refused: str, got: str, needed: str, where: str, try_: str) -> None:
        self.refused, self.got, self.needed, self.where, self.try_ = refused, got, needed, where, try_
        super().__init__(f"refused {refused}: got {got}; needed {needed}; where: {where}; try: {try_}")

    def inside(self, outer: str) -> ClusterError:
        """The same error with `outer` (a file, a table of it) put before the place it names."""
        return ClusterError(
            refused=self.refused, got=self.got, needed=self.needed, where=f"{outer}, {self.where}", try_=self.try_
        )


def near_names(name: str, known: Iterable[str]) -> str:
    """Text for *try*: the known names closest to `name`, or that contain it, or all of them when there are none.

    >>> near_names("A100", ["dgx-a100-80", "dgx-h100", "cpu"])
    "did you mean 'dgx-a100-80'?"
    """
    known = sorted(known)
    close = difflib.get_close_matches(name, known, n=3)
    if not close and len(name) > 1:
        close = [one for one in known if name.lower() in one.lower()]
    return ("did you mean " + " or ".join(repr(c) for c in close) + "?") if close else "one of " + ", ".join(known)


def check_number(
    owner: str, field: str, value: object, *, at_least: float = 0.0, at_most: float = math.inf, above: bool = False
) -> None:
    """Refuse a `value` that is no finite number in [at_least, at_most], or (with `above`) in (at_least, at_most]."""
    # Python compares whole numbers of any size, and no finite float is as large as some of them.
    is_number = isinstance(value, (int, float)) and not isinstance(value, bool) and abs(value) <= sys.float_info.max
    if is_number and at_least <= value <= at_most and not (above and value == at_least):
        return
    needed = f"a finite number {'>' if above else '>='} {at_least:g}"
    if at_most < math.inf:
        needed += f" and <= {at_most:g}"
    raise _refusal(owner, field, _shown(value), needed, f"write it as a plain number, {_unit_of(field)}")


def check_count(owner: str, field: str, value: object, *, at_most: int = _MOST) -> None:
    """Refuse a `value` that is not a whole number from 1 to `at_most`."""
    if not isinstance(value, int) or isinstance(value, bool) or not 1 <= value <= at_most:
        many = isinstance(value, int) and value > at_most
        needed = f"a whole number >= 1 and <= {at_most}" if many else "a whole number >= 1"
        raise _refusal(owner, field, _shown(value), needed, "write it as a plain integer")


def _shown(value: object) -> str:
    """A value in an error; a number of very many digits is not written out."""
    if isinstance(value, int) and not isinstance(value, bool) and abs(value) >= 10**_MOST_DIGITS:
        return f"a whole number of more than {_MOST_DIGITS} digits"
    return repr(value)


def check_text(owner: str, field: str, value: object) -> None:
    """Refuse a `value` that is not a non-empty string."""
    if not isinstance(value, str) or not value:
        raise _refusal(owner, field, repr(value), "a non-empty text", 'write it in quotes: "a name"')


def check_type(owner: str, field: str, value: object, kind: type) -> None:
    """Refuse a `value` that is not an instance of `kind`."""
    if not isinstance(value, kind):
        got, name = f"{type(value).__name__} ({value!r})", kind.__name__
        raise _refusal(owner, field, got, f"a {name}", f"build it with meshwright.cluster.{name}(...)")


def _refusal(owner: str, field: str, got: str, needed: str, try_: str) -> ClusterError:
    # "LogicalMesh" is "logical mesh" in a sentence.
    thing = "".join(f" {c.lower()}" if c.isupper() else c for c in owner)
    return ClusterError(refused=f"this{thing}", got=got, needed=needed, where=f"{owner}.{field}", try_=try_)


def _unit_of(field: str) -> str:
    for ending, unit in (
        ("bytes_per_second", "in bytes per second"),
        ("flops", "in FLOP/s"),
        ("seconds", "in seconds"),
        ("bytes", "in bytes"),
    ):
        if ending in field:
            return unit
    return "a ratio"
