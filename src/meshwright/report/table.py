"""Quantities and tables as plain text, for the command line and for messages.

Inside Meshwright everything is in bytes, seconds, FLOP and FLOP/s; this is where they become GiB, ms and TFLOP/s.
Memory and traffic sizes take binary prefixes (1 KiB = 1,024 bytes), as the vendors' memory sizes do; rates and counts
take decimal ones (1 GB/s = 1e9 bytes/s), as the vendors' bandwidths and peak rates do.

A quantity keeps about two or three significant digits, enough to compare two plans and no more than a prediction is
worth. A number that is not known is `nan` and shows as a dash; an infinite one (something forbidden) as `inf`.
"""

import math
from collections.abc import Sequence

UNKNOWN = "-"

_BINARY = ((1.0, ""), (2.0**10, "Ki"), (2.0**20, "Mi"), (2.0**30, "Gi"), (2.0**40, "Ti"), (2.0**50, "Pi"))
_DECIMAL = ((1.0, ""), (1e3, "k"), (1e6, "M"), (1e9, "G"), (1e12, "T"), (1e15, "P"), (1e18, "E"))
_COUNT = ((1.0, ""), (1e3, "k"), (1e6, "M"), (1e9, "B"), (1e12, "T"))
_TIME = ((1e-9, "ns"), (1e-6, "us"), (1e-3, "ms"), (1.0, "s"))


def format_bytes(size_bytes: float) -> str:
    """A size: `1.4 GiB`, `512 B`.

    Args:
        size_bytes: bytes; negative for a saving.

    >>> format_bytes(1.5e9)
    '1.4 GiB'
    """
    return _scaled(size_bytes, _BINARY, "B")


def format_seconds(seconds: float) -> str:
    """A duration: `1.5 ms`, `12.0 s`, and from two minutes on `2 min 5 s`, `3 h 20 min`.

    Args:
        seconds: seconds; negative for a saving.

    >>> format_seconds(0.0123)
    '12.3 ms'
    >>> format_seconds(12_000)
    '3 h 20 min'
    """
    if not math.isfinite(seconds):
        return _scaled(seconds, _TIME, "")
    whole = round(abs(seconds))
    if whole < 120:
        return _scaled(seconds, _TIME, "") if seconds else "0 s"
    sign = "-" if seconds < 0 else ""
    if whole < 3600:
        return f"{sign}{whole // 60} min {whole % 60} s"
    minutes = round(abs(seconds) / 60)
    return f"{sign}{minutes // 60:,} h {minutes % 60} min"


def format_flops(flops: float) -> str:
    """An amount of arithmetic: `1.5 TFLOP`.

    Args:
        flops: floating-point operations, a multiplication and an addition counting as two.

    >>> format_flops(1.5e12)
    '1.5 TFLOP'
    """
    return _scaled(flops, _DECIMAL, "FLOP")


def format_flops_rate(flops_per_second: float) -> str:
    """A rate of arithmetic: `125.0 TFLOP/s`.

    Args:
        flops_per_second: FLOP/s.

    >>> format_flops_rate(1.25e14)
    '125.0 TFLOP/s'
    """
    return _scaled(flops_per_second, _DECIMAL, "FLOP/s")


def format_bytes_rate(bytes_per_second: float) -> str:
    """A bandwidth: `25.0 GB/s`.

    Args:
        bytes_per_second: bytes/s.

    >>> format_bytes_rate(25e9)
    '25.0 GB/s'
    """
    return _scaled(bytes_per_second, _DECIMAL, "B/s")


def format_count(count: float) -> str:
    """A number of things, exact below ten thousand and rounded above: `9,999`, `1.3 B` parameters.

    Args:
        count: how many.

    >>> format_count(1024), format_count(1.3e9)
    ('1,024', '1.3 B')
    """
    if abs(count) < 10_000 and count == int(count):
        return f"{int(count):,}"
    return _scaled(count, _COUNT, "")


def counted(count: float, noun: str) -> str:
    """So many things of a kind.

    Args:
        count: how many.
        noun: of one; its plural takes an s.

    >>> counted(1, "stage"), counted(1024, "stage")
    ('1 stage', '1,024 stages')
    """
    return f"{format_count(count)} {noun}{'' if count == 1 else 's'}"


def format_ratio(ratio: float) -> str:
    """How many times as much: `1.85x`.

    Args:
        ratio: a quotient of two quantities of one unit.

    >>> format_ratio(1.853)
    '1.85x'
    """
    if math.isnan(ratio):
        return UNKNOWN
    return f"{ratio:,.2f}x"


def format_percent(fraction: float) -> str:
    """A share: `42.0 %`.

    Args:
        fraction: 1.0 is the whole.

    >>> format_percent(0.42)
    '42.0 %'
    """
    if math.isnan(fraction):
        return UNKNOWN
    return f"{fraction * 100:,.1f} %"


def format_table(
    header: Sequence[str], rows: Sequence[Sequence[str]], *, left: int = 1, width: int | None = None
) -> str:
    """Cells in aligned columns under a ruled header, without trailing blanks or a final newline.

    A table wider than `width` is continued below itself: each part has the first column and some of the others.

    Args:
        header: one title per column.
        rows: cells already formatted, one per column; a cell holds no newline.
        left: how many leading columns are aligned left (names); the others are aligned right (quantities).
        width: of the page in characters; None for no limit. A part holds one column beside the first however wide.

    Raises:
        ValueError: when a row has another number of cells than the header.

    >>> print(format_table(["stage", "memory"], [["0", "1.4 GiB"], ["1", "512 B"]]))
    stage   memory
    -----  -------
    0      1.4 GiB
    1        512 B
    """
    for number, row in enumerate(rows):
        if len(row) != len(header):
            raise ValueError(
                f"refused a table: got {len(row)} cells in row {number} {list(row)!r}; needed {len(header)}, one per"
                f" column of {list(header)!r}; try {UNKNOWN!r} for a cell that is not known"
            )
    widths = [max(map(len, column)) for column in zip(header, *rows, strict=True)]

    def line(cells: Sequence[str], columns: Sequence[int]) -> str:
        aligned = (
            cells[column].ljust(widths[column]) if column < left else cells[column].rjust(widths[column])
            for column in columns
        )
        return "  ".join(aligned).rstrip()

    rule = ["-" * one for one in widths]
    return "\n".join(line(cells, part) for part in _parts(widths, width) for cells in (header, rule, *rows))


def _parts(widths: Sequence[int], width: int | None) -> list[list[int]]:
    """The columns of each part of a table: as few parts as the width allows, and those about equally wide."""
    total = sum(widths) + 2 * (len(widths) - 1)
    if width is None or total <= width:
        return [list(range(len(widths)))]
    parts = _filled(widths, width)
    narrowest = max(widths[0] + 2 + one for one in widths[1:])
    for narrower in range(width - 1, narrowest - 1, -1):
        tried = _filled(widths, narrower)
        if len(tried) > len(parts):
            break
        parts = tried
    return parts


def _filled(widths: Sequence[int], width: int) -> list[list[int]]:
    """Every part as full as its width allows."""
    parts = [[0]]
    for column in range(1, len(widths)):
        if len(parts[-1]) > 1 and sum(widths[one] + 2 for one in parts[-1]) + widths[column] > width:
            parts.append([0])
        parts[-1].append(column)
    return parts


def _scaled(value: float, units: Sequence[tuple[float, str]], suffix: str) -> str:
    """`value` in the largest of `units` (ascending) that leaves at least 1, with one decimal where it is not whole."""
    if math.isnan(value):
        return UNKNOWN
    if math.isinf(value):
        return "inf" if value > 0 else "-inf"
    # A value that would be printed as a thousand of one unit is printed as one of the next: 1.0 MiB, not 1024.0 KiB.
    chosen = units[0]
    for chosen, following in zip(units, [*units[1:], None], strict=True):
        if following is None or round(abs(value) / chosen[0], 1) * chosen[0] < following[0]:
            break
    scale, prefix = chosen
    unit = f" {prefix}{suffix}".rstrip()
    # The smallest unit of a size or a count cannot be split: no decimals for whole numbers of it.
    digits = 0 if scale == 1.0 and chosen is units[0] and value == int(value) else 1
    return f"{value / scale:,.{digits}f}{unit}"
