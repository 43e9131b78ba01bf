"""The seconds of each layout of a parameter once a step, for gradient synchronisation and update, and its bytes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
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


@dataclass(frozen=True, slots=True, kw_only=True)
class Scattering:
    """How a backward pass scatters the gradient of a parameter.

    Args:
      rows: in so many equal parts.
      exposure: of each.
    """

    rows: int = 1
    exposure: Exposure = ALL

    def seconds(self, prices: Prices, moves: _Moves, value_bytes: float) -> float:
        """Exposed seconds of scattering it once."""
        size, unpaid = value_bytes / self.rows, 1 - self.exposure.starts
        taken = 0.0
        for step in moves.gradient:
            kind = str(step.forward)
            taken += prices.collective(
                kind, size * step.buffer_fraction(prices.sizes), step.axes, strided=step.strided
            ) - unpaid * prices.collective(kind, 1.0, step.axes)
        return self.rows * self.exposure.of_sum(taken)


def parameter_prices(
    prices: Prices, choices: Sequence[ParameterChoice], value_bytes: float, optimizer_bytes: float, *,
    parameters: int, central: bool, exposure: Exposure = ALL, scattering: Scattering = Scattering(),
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
      scattering: of the gradients of microbatches, where a choice scatters them.
    """
    sizes, device = prices.sizes, prices.device
    used = np.array([choice.use.shards(sizes) for choice in choices], dtype=float)
    stored = np.array([choice.storage.shards(sizes) for choice in choices], dtype=float)
    scattered = np.array([choice.scattered for choice in choices])
    moves = [(_moves(choice), choice.scattered) for choice in choices]
    each = {
        (one, late): (
            _exchange_seconds(
                prices, replace(one, gradient=()) if late else one, value_bytes, parameters=parameters,
                central=central, exposure=exposure,
            ),
            scattering.seconds(prices, one, value_bytes) if late else 0.0,
        )
        for one, late in dict.fromkeys(moves)
    }  # fmt: skip
    synchronise, shared = np.array([each[one][0] for one in moves]).reshape(-1, 2).T
    summed = np.where(scattered, stored, used)
    # Of what waits for no sum at the end of the step, parts may have been scattered where it was used.
    scattered_rows = np.array([choice.scattered or not choice.use.broadcast for choice in choices])
    # Each microbatch reads the sum of gradients and its own, and writes the sum; the update reads and writes optimizer
    # state and parameter once and reads the gradient. What is written and read once is a value's two passes.
    moved = elementwise_seconds(1.0, device) * prices.profile.passes / 2
    return ParameterPrices(
        choices=tuple(choices),
        synchronise_seconds=synchronise,
        fixed_seconds=shared,
        update_seconds=moved * (2 * optimizer_bytes + 3 * value_bytes) / stored,
        scatter_seconds=np.array([each[one][1] for one in moves]),
        accumulate_seconds=moved * 3 * value_bytes / summed,
        held_bytes=value_bytes / used + value_bytes / summed + optimizer_bytes / stored,
        stacked_bytes=scattered_rows * value_bytes / summed,
    )
