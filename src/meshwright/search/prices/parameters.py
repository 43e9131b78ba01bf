"""The seconds of each layout of a parameter once a step, for gradient synchronisation and update, and its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from math import prod

import numpy as np

from ...cost.compute import elementwise_seconds
from ...sharding import Spec, Step, convert
from .choices import ParameterChoice
from .exposure import ALL, Exposure
from .of_choices import ParameterPrices
from .operators import Prices


def central_messages(axes: Sequence[str], sizes: Mapping[str, int]) -> int:
    """How many messages the link of a server carries one after the other: one from each other device, one to each."""
    return 2 * (prod(sizes[axis] for axis in axes) - 1)


@dataclass(frozen=True, slots=True, eq=False)
class _Moves:
    """The conversions between the use spec of a parameter and its storage spec.

    Args:
      gradient: of its gradient.
      fetch: of itself.
      plain: whether its gradient is summed by one collective and no more.
    """

    gradient: tuple[Step, ...]
    fetch: tuple[Step, ...]
    plain: bool


# By steps and whether they are plain: many choices have the same.
_MOVES: dict[tuple[tuple[Step, ...], tuple[Step, ...], bool], _Moves] = {}


@lru_cache(maxsize=1 << 14)
def _moves(choice: ParameterChoice) -> _Moves:
    gradient = convert(Spec(choice.use.dims, partial=choice.use.broadcast), choice.storage)
    fetch = convert(choice.storage, Spec(choice.use.dims))
    assert gradient is not None
    assert fetch is not None
    summed, fetched = (tuple(step for step in steps if step.forward is not None) for steps in (gradient, fetch))
    found = summed, fetched, len(gradient) == 1
    return _MOVES.setdefault(found, _Moves(*found))


def _exchange_seconds(
    prices: Prices, moves: _Moves, value_bytes: float, *, parameters: int, central: bool, exposure: Exposure
) -> tuple[float, float]:
    """Seconds of the moves of a parameter, and its share of what the start of the one sum of all gradients costs."""
    # Plain sums of all gradients run as one collective (`run_together`): its fixed cost is shared.
    is_sum = moves.plain and all(step.forward == "all_reduce" for step in moves.gradient)
    share = 1 / max(parameters, 1) if is_sum else exposure.starts

    def taken(step: Step, starts: float) -> float:
        kind, count, saved = str(step.forward), 1, 1 - starts
        if kind == "all_reduce" and central:
            kind, count, saved = "permute", central_messages(step.axes, prices.sizes), saved * is_sum
        size = value_bytes * step.buffer_fraction(prices.sizes)
        seconds = prices.collective(kind, size, step.axes, strided=step.strided)
        return count * (seconds - saved * prices.collective(kind, 1.0, step.axes))

    summed = sum(taken(step, share) for step in moves.gradient)
    fetched = sum(taken(step, exposure.starts) for step in moves.fetch)
    starts = (prices.collective("all_reduce", 1.0, step.axes) for step in moves.gradient if is_sum)
    return exposure.of_sum(summed) + fetched, share * sum(starts)


def parameter_prices(
    prices: Prices, choices: Sequence[ParameterChoice], value_bytes: float, optimizer_bytes: float, *,
    parameters: int, central: bool, exposure: Exposure = ALL,
) -> ParameterPrices:  # fmt: skip
    """The prices of a parameter on one mesh.

    Args:
      prices: of the mesh.
      choices: layouts.
      value_bytes: of the whole parameter.
      optimizer_bytes: of its optimizer state.
      parameters: that share one sum of gradients, this one among them.
      central: whether gradients go to one server and back.
      exposure: of its collectives; fetching it is exposed.
    """
    sizes, device = prices.sizes, prices.device
    used = np.array([choice.use.shards(sizes) for choice in choices], dtype=float)
    stored = np.array([choice.storage.shards(sizes) for choice in choices], dtype=float)
    moves = [_moves(choice) for choice in choices]
    each = {
        one: _exchange_seconds(prices, one, value_bytes, parameters=parameters, central=central, exposure=exposure)
        for one in dict.fromkeys(moves)
    }
    synchronise, shared = np.array([each[one] for one in moves]).reshape(-1, 2).T
    # Each microbatch reads the sum of gradients and its own, and writes the sum; the update reads and writes optimizer
    # state and parameter once and reads the gradient. What is written and read once is a value's two passes.
    moved = elementwise_seconds(1.0, device) * prices.profile.passes / 2
    return ParameterPrices(
        choices=tuple(choices),
        synchronise_seconds=synchronise,
        fixed_seconds=shared,
        update_seconds=moved * (2 * optimizer_bytes + 3 * value_bytes) / stored,
        accumulate_seconds=moved * 3 * value_bytes / used,
        held_bytes=2 * value_bytes / used + optimizer_bytes / stored,
    )
