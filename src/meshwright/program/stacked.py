"""Rows of a stacked array: the share of a scan's trips that one piece of the scan reads."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True, kw_only=True)
class StackedRows:
    """Some trips' part of an input of the program whose trips are stacked on one dim.

    Args:
      input: its position among the program's inputs.
      dim: on which the trips are stacked.
      first: row that is read.
      last: one past the last.
    """

    input: int
    dim: int
    first: int
    last: int
