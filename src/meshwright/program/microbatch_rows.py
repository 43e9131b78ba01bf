"""Which rows of the batch the microbatch has that is evaluated: what its draws and counts have to know (`places`)."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass
from typing import Any

from ..errors import PlanError


@dataclass(frozen=True, slots=True, kw_only=True)
class MicrobatchRows:
    """Which rows of the batch a microbatch has: of each of `blocks` equal blocks of the batch, which lie on devices of
    their own, one of `count` equal pieces.

    Args:
      number: of the microbatch, a traced integer or a number.
      count: how many microbatches there are.
      blocks: of the batch.
    """

    number: Any
    count: int
    blocks: int = 1


_ROWS: ContextVar[MicrobatchRows | None] = ContextVar("rows of the microbatch", default=None)


@contextmanager
def rows_of_microbatch(rows: MicrobatchRows) -> Iterator[None]:
    """Evaluate the program of a microbatch, inside, as that of these rows."""
    token = _ROWS.set(rows)
    try:
        yield
    finally:
        _ROWS.reset(token)


def rows_in_batch(indices: Any, extent: int, whole: int) -> Any:
    """Where elements of a dim of the microbatch are in that dim of the whole batch.

    >>> import numpy as np
    >>> with rows_of_microbatch(MicrobatchRows(number=1, count=2, blocks=2)):
    ...     rows_in_batch(np.arange(4), 4, 8).tolist()
    [2, 3, 6, 7]

    Args:
      indices: of elements.
      extent: of the dim in a microbatch.
      whole: of the dim in the whole batch.

    Raises:
      PlanError: if the blocks of the batch do not divide the dim.
    """
    rows = _ROWS.get()
    if rows is None:  # whoever asks for shapes alone
        return indices
    if extent % rows.blocks:
        raise PlanError(
            refused=f"microbatches={rows.count}", got=f"a draw of {extent} rows, where the batch lies in {rows.blocks} "
            f"blocks", needed="a number of rows that the blocks divide", where="the loss function",
            try_="microbatches=1, or drawing it before the loss function",
        )  # fmt: skip
    piece = extent // rows.blocks
    # Of the dtype of the indices: a traced number of a microbatch is signed, positions are not.
    number = rows.number if isinstance(rows.number, int) else rows.number.astype(indices.dtype)
    return indices // piece * (whole // rows.blocks) + number * piece + indices % piece
