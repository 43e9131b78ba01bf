"""Whether two runs of a step agree: every leaf of its results is judged against what rounding alone does to it.

A leaf may deviate by three things together, in the Euclidean norm over its elements:

* `TOLERANCE` of its change over the steps compared (of the leaf itself, where it is no state);
* a unit in the last place of its own type, since a small change of a large number is rounded to it;
* where it deviates by more than these two, `NOISE_FACTOR` times its noise, the largest distance between runs of the
  reference with sums in other orders (`_jax.reordered`).

Where that is as much as an error would be, the leaf is not judged, and said not to be: the key biases of an attention,
whose gradient is zero but for rounding, which Adam brings to full size. Whole numbers and keys have no tolerance, only
noise. A NaN or an infinity has to stand where the reference has one.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

TOLERANCE = 1e-4
NOISE_FACTOR = 4.0

# Rounded once, an array is off by about a quarter of the last place of its norm; here it is rounded in every step.
_LAST_PLACES = 1.0

# A leaf that may deviate by this part of its change would hide the loss of one microbatch of ten.
_JUDGED_BELOW = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class LeafError:
    """A leaf of the step's results against the reference.

    Args:
      name: its path.
      deviation: from the reference; infinite where a NaN or an infinity stands on one side alone.
      allowed: how far it may be off.
      noise: the largest distance between runs of the reference that round otherwise; 0 where it was not needed.
      scale: how much the reference changed it; for what is no state, how large it is. All in the Euclidean norm.
      has_numbers: whether the reference has anything in it but NaNs and infinities.
    """

    name: str
    deviation: float
    allowed: float
    noise: float
    scale: float
    has_numbers: bool = True

    @property
    def is_judged(self) -> bool:
        """Whether an error that matters would be seen; one of what stays as it is always would."""
        is_constant = self.scale == 0.0 == self.noise
        return self.has_numbers and (self.allowed <= _JUDGED_BELOW * self.scale or self.allowed == 0.0 or is_constant)

    @property
    def agrees(self) -> bool:
        """Whether it is within what is allowed."""
        return self.deviation <= self.allowed

    @property
    def excess(self) -> float:
        """The deviation over what is allowed."""
        return self.deviation / self.allowed if self.allowed else (math.inf if self.deviation else 0.0)


def leaf_error(
    name: str, got: np.ndarray, wanted: np.ndarray, start: np.ndarray | None, reordered: Sequence[np.ndarray], *,
    last_place: float,
) -> LeafError:  # fmt: skip
    """A leaf of a run against the reference; arrays as `numbers_of` gives them.

    Args:
      name: its path.
      got: of the run.
      wanted: of the reference.
      start: what it was before the first step; None for what is no state.
      reordered: of runs of the reference with sums in other orders; none to judge without noise.
      last_place: the relative spacing of its type; 0 for whole numbers.

    >>> a, b, c = np.array([1.0, 2.0]), np.array([1.0, 2.1]), np.zeros(2)
    >>> error = leaf_error("w", a, b, c, [b, b], last_place=1e-7)
    >>> error.agrees, error.is_judged, round(error.deviation, 3)
    (False, True, 0.1)
    """
    exact, odd = last_place == 0.0, ~np.isfinite(wanted)
    base = np.zeros_like(wanted) if start is None else start
    scale = _distance(wanted, base)
    noise = max((_distance(a, b) for n, a in enumerate(reordered) for b in reordered[:n]), default=0.0)
    rounding = 0.0 if exact else _LAST_PLACES * last_place * max(_norm(wanted), _norm(base))
    tolerance = 0.0 if exact or not math.isfinite(scale) else TOLERANCE * scale
    return LeafError(
        name=name, deviation=_distance(got, wanted), allowed=tolerance + rounding + NOISE_FACTOR * noise, noise=noise,
        scale=scale if math.isfinite(scale) else _norm(wanted), has_numbers=not odd.size or not odd.all(),
    )  # fmt: skip


def numbers_of(leaf: Any) -> np.ndarray:
    """A leaf as float64 (complex128), in which differences of any narrower type are exact; of keys their words."""
    if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
        leaf = jax.random.key_data(leaf)
    array = np.asarray(leaf)
    return array.astype(np.complex128 if np.iscomplexobj(array) else np.float64)


def last_place_of(dtype: Any) -> float:
    """The relative spacing of a type's numbers; 0 for types that are exact."""
    return float(jnp.finfo(dtype).eps) if jnp.issubdtype(dtype, jnp.inexact) else 0.0


def _norm(x: np.ndarray) -> float:
    """Over the elements that are numbers."""
    return float(np.linalg.norm(x[np.isfinite(x)]))


def _distance(a: np.ndarray, b: np.ndarray) -> float:
    """Between two arrays, over the elements that are numbers; infinite where the others are not the same."""
    odd_a, odd_b = ~np.isfinite(a), ~np.isfinite(b)
    if not np.array_equal(odd_a, odd_b) or not np.array_equal(a[odd_a], b[odd_b], equal_nan=True):
        return math.inf
    return float(np.linalg.norm((a - b)[~odd_a])) if odd_a.any() else float(np.linalg.norm(a - b))
