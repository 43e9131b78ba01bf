"""Values of options of the command line: sizes, meshes, stages."""

from __future__ import annotations

import re

from .errors import PlanError

_UNITS = {"": 1.0, "k": 1e3, "m": 1e6, "g": 1e9, "t": 1e12, "ki": 2.0**10, "mi": 2.0**20, "gi": 2.0**30, "ti": 2.0**40}


def parse_stages(text: str) -> int | None:
    """A number of stages, or None for `auto`.

    Raises:
      PlanError: for anything else.

    >>> parse_stages("4"), parse_stages("auto")
    (4, None)
    """
    if text == "auto":
        return None
    if not text.isdecimal():
        raise PlanError(
            refused="the number of stages", got=repr(text), needed="a whole number, or auto", where="--stages",
            try_="--stages 2",
        )  # fmt: skip
    return int(text)


def parse_submeshes(text: str) -> tuple[int, ...]:
    """For each stage how many devices it has, from `2,2,4`.

    Raises:
      PlanError: for anything else.

    >>> parse_submeshes("2,2,4")
    (2, 2, 4)
    """
    parts = [part.strip() for part in text.split(",")]
    if not all(re.fullmatch(r"[1-9]\d*", part) for part in parts):
        raise PlanError(
            refused="the submeshes", got=repr(text), needed="for each stage how many devices it has",
            where="--submeshes", try_="--submeshes 2,2,4",
        )  # fmt: skip
    return tuple(int(part) for part in parts)


def parse_bytes(text: str) -> float:
    """A size in bytes from `16e9`, `16GB` (powers of 1000), `15GiB` or `15Gi` (of 1024).

    Raises:
      PlanError: for anything else, and for sizes that are not positive.

    >>> parse_bytes("16GB"), parse_bytes("1.5 GiB")
    (16000000000.0, 1610612736.0)
    """
    match = re.fullmatch(r"\s*(\d+\.?\d*(?:e[+-]?\d+)?|\.\d+)\s*([kmgt]?i?)b?\s*", text.lower())
    size = float(match[1]) * _UNITS.get(match[2], 0.0) if match else 0.0
    if not 0 < size < float("inf"):
        raise PlanError(
            refused="the memory of a device", got=repr(text), needed="a positive number of bytes, unit or none",
            where="--memory-per-device", try_="16e9, 16GB or 15GiB",
        )  # fmt: skip
    return size


def parse_mesh(text: str) -> tuple[int, ...] | dict[str, int]:
    """A logical mesh of one to three axes from `2,4` or `data=2,model=4`.

    Raises:
      PlanError: for anything else.

    >>> parse_mesh("2,4"), parse_mesh("data=2,model=4")
    ((2, 4), {'data': 2, 'model': 4})
    """
    parts = [part.strip() for part in text.split(",")]
    named = [re.fullmatch(r"([A-Za-z_]\w*)\s*=\s*([1-9]\d*)", part) for part in parts]
    if len(parts) <= 3 and all(named):
        sizes = {match[1]: int(match[2]) for match in named if match}
        if len(sizes) == len(parts):
            return sizes
    if len(parts) <= 3 and all(re.fullmatch(r"[1-9]\d*", part) for part in parts):
        return tuple(int(part) for part in parts)
    raise PlanError(
        refused="the logical mesh", got=repr(text), needed="one to three sizes, all with names of their own or none",
        where="--mesh", try_="2,4 or data=2,model=4",
    )  # fmt: skip
