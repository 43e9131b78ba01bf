"""Lower bounds on the seconds of stages that share the memory of a device, by Lagrangian duality.

At a price of memory every stage has the layouts that cost the least, seconds and bytes, whatever the others have. What
a rank spends then, without the price of the memory that there is, no choice of layouts within that memory is below. The
largest over all prices is the bound.

Known limits: what is said to fit nowhere may fit: the least bytes are those of the cheapest layouts at some prices. A
stage that holds a part of a layer counts with the workspace of all of it.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from math import inf

import numpy as np

# In place of the cost of a stage that has no layout: the cost of no other one is as much.
_NONE = 1e300


@dataclass(frozen=True, slots=True, kw_only=True, eq=False)
class PricedStages:
    """One way to run each stage, a logical mesh with or without rematerialisation, at ascending prices of memory.

    Args:
      prices: seconds a byte, `[price]`; the first is 0.
      seconds: `[price, stage]`, infinite where there is no layout.
      held: bytes on a device, workspace left out, `[price, stage]`.
    """

    prices: np.ndarray
    seconds: np.ndarray
    held: np.ndarray


def between(sums: np.ndarray, cuts: np.ndarray) -> np.ndarray:
    """Of sums over the layers up to each those between cuts, which may lie inside of layers; infinite from the first
    layer on that has an infinite one.

    >>> between(np.array([1.0, 3.0]), np.array([0.0, 0.5, 2.0]))
    array([0.5, 2.5])

    Args:
      sums: `[..., layer]`.
      cuts: ascending, in layers.
    """
    up_to = np.concatenate([np.zeros((*sums.shape[:-1], 1)), sums], axis=-1)
    whole = np.minimum(cuts.astype(int), sums.shape[-1] - 1)
    share = cuts - whole
    with np.errstate(invalid="ignore"):
        inside = np.where(share > 0, share * (up_to[..., whole + 1] - up_to[..., whole]), 0.0)
        found = np.diff(up_to[..., whole] + inside)
    return np.where(np.isnan(found), inf, found)


def least_seconds(ways: Sequence[PricedStages], limits: np.ndarray) -> np.ndarray:
    """Lower bounds on the seconds of ranks to which stages are dealt in turn: `[rank]`, infinite where even at the
    highest price the stages are too large.

    >>> fast = PricedStages(prices=np.array([0.0, 1.0]), seconds=np.array([[1.0, 1.0]] * 2), held=np.full((2, 2), 4.0))
    >>> small = PricedStages(prices=np.array([0.0, 1.0]), seconds=np.array([[3.0, 3.0]] * 2), held=np.full((2, 2), 2.0))
    >>> least_seconds([fast, small], np.array([8.0])), least_seconds([fast, small], np.array([6.0]))
    (array([2.]), array([4.]))

    Args:
      ways: to run all stages.
      limits: bytes that the stages of each rank may hold, `[rank]`.
    """
    ranks, stages = len(limits), ways[0].held.shape[1]
    mine = np.arange(stages) % ranks == np.arange(ranks)[:, None]
    grid = np.unique(np.concatenate([way.prices for way in ways]))
    cost, least_held = np.full((len(grid), stages), _NONE), np.full(stages, inf)
    for way in ways:
        # The least cost is concave in the price: between two prices it is no less than in proportion, nor beyond.
        each = np.where(np.isfinite(way.seconds), way.seconds + way.prices[:, None] * way.held, _NONE)
        below = np.clip(np.searchsorted(way.prices, grid, side="right") - 1, 0, len(way.prices) - 2)
        step = way.prices[below + 1] - way.prices[below]
        share = np.clip((grid - way.prices[below]) / step, 0.0, 1.0)[:, None]
        np.minimum(cost, (1 - share) * each[below] + share * each[below + 1], out=cost)
        np.minimum(least_held, np.where(np.isfinite(way.seconds), way.held, inf).min(axis=0), out=least_held)
    bounds = (np.where(mine[:, None], cost, 0.0).sum(axis=2) - grid * limits[:, None]).max(axis=1)
    fits = np.where(mine, least_held, 0.0).sum(axis=1) <= limits
    return np.where(fits & (bounds < _NONE), bounds, inf)
