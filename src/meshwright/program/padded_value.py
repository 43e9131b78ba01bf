"""A value of a program whose dims may be longer than the user's (`padding`), and what is behind their ends."""

from __future__ import annotations

from collections.abc import Callable, Set
from dataclasses import dataclass, field
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from .padded_dims import Extents


@dataclass(slots=True)
class Value:
    """A value of a program, which may have dims longer than the user's.

    Args:
      x: the array.
      shape: of the user's program.
      wanted: of an input, the shape in which those that can are to read it.
      zero: whether there is nothing but zeros behind the ends.
      varies: whether a cotangent comes back to it.
      grow: of a value that is made of no array (a mask, positions, random bits): makes it with dims of given extents,
        or gives None where that cannot be.
      unmasked: the array before it was masked for its cotangent alone, for readers that mask it themselves.
    """

    x: Any
    shape: Extents
    wanted: Extents
    zero: bool = True
    varies: bool = True
    unmasked: Any = None
    grow: Callable[[Extents], Any] | None = None
    _as_read: dict[Extents, Any] = field(default_factory=dict, init=False, repr=False)

    @property
    def extents(self) -> Extents:
        """The shape of the array."""
        return tuple(self.x.shape)

    def at(self, extents: Extents) -> Any:
        """The array with dims of these extents: as it is, shortened to the user's, or padded by zeros."""
        if extents not in self._as_read and self.grow is not None and extents != self.shape:
            grown = self.grow(extents)
            if grown is not None:
                self._as_read[extents] = grown
        if extents not in self._as_read:
            x = self.x
            # A dim of another length is cut back to the user's before it is padded: it is to have zeros behind its end.
            short = tuple(
                n if have != want else have for n, have, want in zip(self.shape, self.extents, extents, strict=True)
            )
            if short != self.extents:
                x = lax.slice(x, [0] * x.ndim, short)
            if extents != short:
                zero = jnp.zeros((), x.dtype)
                x = lax.pad(x, zero, [(0, want - n, 0) for n, want in zip(short, extents, strict=True)])
            self._as_read[extents] = x
        return self._as_read[extents]

    def has_zeros(self, extents: Extents) -> bool:
        """Whether what is behind the ends is zero in the array of these extents."""
        if self.grow is not None:
            return extents == self.shape
        return self.zero or all(
            have != want or want == n for n, have, want in zip(self.shape, self.extents, extents, strict=True)
        )

    def again(self, x: Any) -> Value:
        """The same value in another trace."""
        return Value(x, self.shape, self.wanted, self.zero, self.varies)

    def read_as(self, extents: Extents) -> Value:
        """The value with dims of these extents, as an array."""
        unmasked = self.unmasked if extents == self.extents else None
        return Value(self.at(extents), self.shape, self.wanted, self.has_zeros(extents), self.varies, unmasked)

    def masked(self, dims: Set[int], combine: str) -> Any:
        """What a reduction along these dims reads: behind their ends is what a sum, a maximum or a minimum (`combine`)
        does not see."""
        longer = {d for d in dims if self.x.shape[d] != self.shape[d]}
        if not longer or (self.zero and combine == "sum"):
            return self.x
        fill = 0 if combine == "sum" else _beyond(self.x.dtype, combine)
        return mask(self.before_mask(longer), self.shape, longer, fill)

    def before_mask(self, dims: Set[int]) -> Any:
        """The array without the mask that is there for its cotangent, for a reader that does not need it, since in both
        passes it leaves out what is behind the ends of these dims. With it, where other dims are masked too."""
        longer = {d for d, n in enumerate(self.shape) if self.x.shape[d] != n}
        return self.x if self.unmasked is None or not longer <= dims else self.unmasked

    def is_finite_number(self) -> bool:
        """Whether it is a single number that is known, and finite."""
        return not self.shape and isinstance(self.x, (int, float, np.generic, np.ndarray)) and bool(np.isfinite(self.x))


def constant(x: Any) -> Value:
    """A value that depends on no input."""
    return as_it_is(x if hasattr(x, "shape") else np.asarray(x), varies=False)


def as_it_is(x: Any, varies: bool) -> Value:
    """A value as the user's program has it."""
    shape = tuple(getattr(x, "shape", ()))
    return Value(x, shape, shape, varies=varies)


def mask(x: Any, shape: Extents, dims: Set[int], fill: Any) -> Any:
    """An array with `fill` behind the ends of some dims, which are those of a `shape`."""
    for dim in sorted(dims):
        if x.shape[dim] != shape[dim]:
            inside = lax.broadcasted_iota(jnp.int32, x.shape, dim) < shape[dim]
            x = lax.select(inside, x, lax.full(x.shape, fill, x.dtype))
    return x


def _beyond(dtype: Any, combine: str) -> Any:
    """The number that a maximum or minimum does not see."""
    if jnp.issubdtype(dtype, jnp.bool_):
        return combine == "min"
    if jnp.issubdtype(dtype, jnp.inexact):
        largest = np.inf if np.isinf(np.asarray(np.inf).astype(dtype)) else float(jnp.finfo(dtype).max)
        return -largest if combine == "max" else largest
    return jnp.iinfo(dtype).min if combine == "max" else jnp.iinfo(dtype).max
