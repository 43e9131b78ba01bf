"""A leaf of the state that several stages hold: a tied parameter, a step count that every optimizer reads, or a stacked
parameter of which each has some rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import jax
import numpy as np
from numpy.lib.mixins import NDArrayOperatorsMixin

from ...errors import PlanError
from .rows import Rows


class StagedArray(NDArrayOperatorsMixin):
    """One array, on the meshes of several stages.

    It comes out of a step run by a plan of several stages and goes into the next one. `numpy.asarray` reads it, and
    arithmetic gives arrays of NumPy. It is a leaf of a pytree.

    >>> import jax.numpy as jnp
    >>> array = StagedArray({0: jnp.ones(2), 3: jnp.ones(2)})
    >>> array
    StagedArray(float32[2] on stages 1, 4)
    >>> float(np.asarray(array).sum())
    2.0
    >>> array + 1
    array([2., 2.], dtype=float32)

    Args:
      parts: for each stage the array on its mesh.
      rows: which rows each part has; None if all hold the same numbers.
    """

    __slots__ = ("parts", "rows")

    def __init__(self, parts: Mapping[int, jax.Array], rows: Rows | None = None) -> None:
        self.parts: dict[int, jax.Array] = dict(sorted(parts.items()))
        self.rows = rows

    @property
    def _any(self) -> jax.Array:
        """A part that this process can read, if there is one."""
        parts = list(self.parts.values())
        return next((part for part in parts if _is_readable(part)), parts[0])

    @property
    def shape(self) -> tuple[int, ...]:
        """Of the whole array."""
        if self.rows is None:
            return self._any.shape
        total = sum(part.shape[self.rows.dim] for part in self.parts.values())
        return tuple(total if d == self.rows.dim else n for d, n in enumerate(self._any.shape))

    @property
    def dtype(self) -> Any:
        """Of its elements."""
        return self._any.dtype

    @property
    def ndim(self) -> int:
        """How many dims it has."""
        return self._any.ndim

    @property
    def size(self) -> int:
        """How many elements it has."""
        return int(np.prod(self.shape, dtype=np.int64))

    @property
    def nbytes(self) -> int:
        """Of the whole array, once."""
        return self.size * self.dtype.itemsize

    @property
    def shardings(self) -> dict[int, jax.sharding.Sharding]:
        """For each stage, how the array lies on its mesh."""
        return {stage: part.sharding for stage, part in self.parts.items()}

    def block_until_ready(self) -> StagedArray:
        """Wait until all parts are computed."""
        for part in self.parts.values():
            part.block_until_ready()
        return self

    def __jax_array__(self) -> jax.Array:
        return self._any if self.rows is None else jax.numpy.asarray(np.asarray(self))

    def __int__(self) -> int:
        return int(np.asarray(self))

    def __float__(self) -> float:
        return float(np.asarray(self))

    def __bool__(self) -> bool:
        return bool(np.asarray(self))

    def __getitem__(self, index: Any) -> Any:
        return np.asarray(self)[index]

    def __len__(self) -> int:
        return len(np.asarray(self))

    def __array_ufunc__(self, function: np.ufunc, method: str, *inputs: Any, **options: Any) -> Any:
        """NumPy's functions and operators, on the whole array."""
        taken = [np.asarray(x) if isinstance(x, StagedArray) else x for x in inputs]
        return getattr(function, method)(*taken, **options)

    def __array__(self, dtype: Any = None, copy: bool | None = None) -> np.ndarray:
        if not all(map(_is_readable, [self._any] if self.rows is None else self.parts.values())):
            raise PlanError(
                refused="to read an array of the state", got=f"{self!r}, of which other processes hold parts",
                needed="an array that this process holds whole", where=f"process {jax.process_index()}",
                try_="reading it from the metrics that the step returns",
            )  # fmt: skip
        if self.rows is not None:
            parts = [np.asarray(self.parts[stage]) for stage, _, _ in sorted(self.rows.parts, key=lambda part: part[1])]
            return np.concatenate(parts, axis=self.rows.dim).astype(dtype or self.dtype, copy=False)
        return np.array(self._any, dtype=dtype) if copy else np.asarray(self._any, dtype=dtype)

    def __repr__(self) -> str:
        stages = ", ".join(str(stage + 1) for stage in self.parts)
        return f"StagedArray({self.dtype}{list(self.shape)} on stages {stages})"


def _is_readable(part: jax.Array) -> bool:
    """Whether this process can read an array: it has all of it."""
    return part.is_fully_addressable or (part.is_fully_replicated and bool(part.addressable_shards))
