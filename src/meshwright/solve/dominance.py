"""Which choices of a node another choice of the same node makes useless.

Two tests: the quick one compares choices that look the same to all neighbours; the full one all pairs ("dead-end
elimination", Goldstein 1994), at the cost of choices squared times choices of each neighbour.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

# All pairs of choices are compared against all of a neighbour's at once, up to this many entries.
_PIECE = 1 << 20


def among_equals(cost: np.ndarray, memory: np.ndarray, tables: Sequence[np.ndarray]) -> np.ndarray:
    """Which choices stay when of those with equal rows in all tables only the best in cost or memory do.

    Args:
        cost: seconds of each choice, shape (k,).
        memory: bytes of each choice, of one kind or of several, shape (k,) or (k, kinds).
        tables: of each edge, shape (k, choices of the neighbour).

    Returns:
        Whether each choice stays, shape (k,).
    """
    memory = memory.reshape(cost.size, -1)
    rows = np.hstack([np.zeros((cost.size, 0)), *tables]) + 0.0  # -0.0 becomes 0.0: rows are compared by their bytes
    kept: dict[bytes, list[int]] = {}
    keep = np.zeros(cost.size, dtype=bool)
    for a in np.lexsort((*memory.T[::-1], cost)).tolist():  # the cheapest first: each next one must take less memory
        cheaper = kept.setdefault(rows[a].tobytes(), [])
        # Of one kind the last one kept takes the least.
        against = cheaper if memory.shape[1] > 1 else cheaper[-1:]
        keep[a] = not against or not (memory[against] <= memory[a]).all(axis=1).any()
        if keep[a]:
            cheaper.append(a)
    return keep


def undominated(cost: np.ndarray, memory: np.ndarray, tables: Sequence[np.ndarray]) -> np.ndarray:
    """Which choices stay when each is dropped that another is no worse than, whatever the neighbours choose.

    Args:
        cost: seconds of each choice, shape (k,).
        memory: bytes of each choice, of one kind or of several, shape (k,) or (k, kinds).
        tables: of each edge, shape (k, choices of the neighbour).

    Returns:
        Whether each choice stays, shape (k,); of equal choices the lowest does.
    """
    memory = memory.reshape(cost.size, -1)
    worse = cost[:, None] - cost[None, :]  # [b, a]: at most this much is lost by choosing b instead of a
    with np.errstate(invalid="ignore"):
        for table in tables:
            worse = worse + _greatest_loss(table)
    covers = (worse <= 0) & (memory[:, None] <= memory[None, :]).all(axis=2)
    np.fill_diagonal(covers, False)
    keep = np.ones(cost.size, dtype=bool)
    for a in range(cost.size - 1, -1, -1):
        keep[a] = not (covers[:, a] & keep).any()
    return keep


def _greatest_loss(table: np.ndarray) -> np.ndarray:
    """[b, a]: the most that choosing b instead of a adds on one edge, whatever the other end x chooses.

    Where (a, x) is forbidden, nothing is lost; where only (b, x) is, everything.
    """
    if table.shape[0] ** 2 * table.shape[1] <= _PIECE:
        loss = table[:, None, :] - table[None, :, :]
        loss[np.broadcast_to(np.isinf(table)[None], loss.shape)] = -np.inf
        return loss.max(axis=2)
    rows = []
    forbidden = np.isinf(table)
    for row in table:
        loss = row[None, :] - table
        loss[forbidden] = -np.inf
        rows.append(loss.max(axis=1))
    return np.stack(rows)
