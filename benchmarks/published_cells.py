"""Tables of published measurements as they are read, and what their cells may hold (`benchmarks/published.py`)."""

from __future__ import annotations

import csv
import math
from collections.abc import Mapping
from pathlib import Path

Row = Mapping[str, str]

NEEDED = ("row_id", "source", "model")
# Counts with the largest that a cell may hold: far above what anybody has trained, far below what ends a program.
MOST = {
    "n_layers": 10_000, "d_model": 1_000_000, "n_heads": 10_000, "n_kv_heads": 10_000, "d_ff": 10_000_000,
    "vocab": 10_000_000, "n_experts": 100_000, "top_k": 1_000, "seq_len": 100_000_000, "n_devices": 1_000_000,
    "devices_per_node": 10_000, "gbs": 100_000_000, "mbs": 1_000_000, "grad_accum": 1_000_000, "tp": 10_000,
    "pp": 256, "vpp": 256, "dp": 1_000_000, "cp": 10_000, "ep": 10_000,
}  # fmt: skip
COUNTS = tuple(MOST)
AMOUNTS = (
    "params_b", "step_time_s", "samples_per_s", "tokens_per_s", "tokens_per_s_per_dev", "tflops_per_dev", "mfu_pct",
    "hfu_pct", "peak_mem_gb", "value",
)  # fmt: skip
# Whatever the unit: a step of a nanosecond, tokens of all computers there are.
_LEAST_AMOUNT, _MOST_AMOUNT = 1e-9, 1e15
FLAGS = ("sp", "mlp_gated")

# Of what is measured in a table of memory, in bytes; percentages are of what is not computed again.
UNITS = {"GiB": 2.0**30, "GB": 1e9, "percent": 1.0}


class Inexpressible(Exception):
    """A row that no model, plan or cluster of ours describes; says why."""


class Unexpected(Inexpressible):
    """A row at which the programs failed, which is a fault of theirs; says how."""


class RowsError(Exception):
    """A file that is no table of published measurements; says what it is."""


def read_rows(path: Path) -> list[Row]:
    """All rows of a table, cells without the blanks around them.

    Raises:
      RowsError: if there is no such file, a column is missing that says whose a row is, or there are no rows.
    """
    try:
        with path.open(newline="", encoding="utf-8-sig") as file:
            reader = csv.DictReader(file)
            rows = [{k.strip(): (v or "").strip() for k, v in row.items() if k is not None} for row in reader]
            columns = [name.strip() for name in reader.fieldnames or []]
    except (OSError, UnicodeDecodeError, csv.Error) as error:
        raise RowsError(f"refused {path}: {error}; try: a CSV file with a line of column names") from error
    missing = [name for name in NEEDED if name not in columns]
    if missing:
        raise RowsError(
            f"refused {path}: got the columns {', '.join(columns) or 'none'}; needed {', '.join(missing)} too; "
            "try: the columns of published_throughput.csv or published_memory.csv"
        )
    if not rows:
        raise RowsError(f"refused {path}: got column names alone; needed a row; try: one line for each measurement")
    return rows


def check_cells(row: Row) -> None:
    """Refuse numbers that are none, and those of nothing that could exist.

    Raises:
      Inexpressible: saying which cell, and what it holds.
    """
    for name, most in MOST.items():
        text = row.get(name) or ""
        if text and not (_float(text) >= 1 and _float(text).is_integer()):
            raise Inexpressible(f"{name} is {text!r}, no whole number from 1 up")
        if text and _float(text) > most:
            raise Inexpressible(f"{name} is {text!r}, needed {most} at most")
    for name in AMOUNTS:
        text = row.get(name) or ""
        if text and not 0 < _float(text) < math.inf:
            raise Inexpressible(f"{name} is {text!r}, no number above 0")
        if text and not _LEAST_AMOUNT <= _float(text) <= _MOST_AMOUNT:
            raise Inexpressible(f"{name} is {text!r}, needed {_LEAST_AMOUNT:g} to {_MOST_AMOUNT:g}")
    for name in FLAGS:
        if (row.get(name) or "0") not in ("0", "1"):
            raise Inexpressible(f"{name} is {row[name]!r}, neither 0 nor 1")
    if row.get("value") and row.get("unit") not in UNITS:
        raise Inexpressible(f"unit is {row.get('unit')!r}, none of {', '.join(UNITS)}")


def number(row: Row, name: str) -> int | None:
    """A count; None where it is not stated."""
    text = row.get(name) or ""
    return int(float(text)) if text else None


def needed_number(row: Row, name: str) -> int:
    """A count that has to be stated.

    Raises:
      Inexpressible: if it is not.
    """
    found = number(row, name)
    if found is None:
        raise Inexpressible(f"{row['model']}: its {name} is not stated")
    return found


def amount(row: Row, name: str) -> float:
    """A measured number; 0 where it is not stated."""
    return float(row.get(name) or 0)


def _float(text: str) -> float:
    try:
        found = float(text)
    except ValueError:
        return math.nan
    return found if math.isfinite(found) else math.nan
