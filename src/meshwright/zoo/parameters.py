"""Parameters declared before they exist: shapes and initial distributions as data.

A model is first a pytree of `Parameter`; from it follow the count, the abstract arrays (instantly, so that a model of
10**12 parameters can be described on a laptop) and the real arrays (inside `jit`, one key a leaf).
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any, Literal

import jax
import jax.numpy as jnp


@dataclass(frozen=True, slots=True, kw_only=True)
class Parameter:
    """One array to be trained: its shape, always float32, and how it starts.

    Attributes:
        shape: global shape.
        initial: "normal" (zero mean, standard deviation `deviation`), "zeros" or "ones".
        deviation: standard deviation of a "normal" start, ignored otherwise.

    >>> count({"w": Parameter(shape=(3, 4)), "b": zeros(4)})
    16
    """

    shape: tuple[int, ...]
    initial: Literal["normal", "zeros", "ones"] = "normal"
    deviation: float = 0.02

    def materialise(self, key: jax.Array) -> jax.Array:
        """The initial float32 array of shape `shape`; `key` is used only by "normal"."""
        if self.initial == "zeros":
            return jnp.zeros(self.shape, jnp.float32)
        if self.initial == "ones":
            return jnp.ones(self.shape, jnp.float32)
        return self.deviation * jax.random.normal(key, self.shape, jnp.float32)


def normal(*shape: int, deviation: float = 0.02) -> Parameter:
    """A normally distributed parameter of this shape."""
    return Parameter(shape=shape, deviation=deviation)


def zeros(*shape: int) -> Parameter:
    """A parameter of this shape that starts at zero (biases)."""
    return Parameter(shape=shape, initial="zeros")


def ones(*shape: int) -> Parameter:
    """A parameter of this shape that starts at one (scales of normalisations)."""
    return Parameter(shape=shape, initial="ones")


def stacked(tree: Any, layers: int) -> Any:
    """The pytree of `Parameter` with a leading dim of size `layers` on every leaf, for `jax.lax.scan` over layers."""
    return jax.tree.map(
        lambda leaf: Parameter(shape=(layers, *leaf.shape), initial=leaf.initial, deviation=leaf.deviation), tree
    )


def count(tree: Any) -> int:
    """Number of scalars in a pytree of `Parameter`."""
    return sum(math.prod(leaf.shape) for leaf in jax.tree.leaves(tree))


def abstract(tree: Any) -> Any:
    """The pytree with every `Parameter` replaced by a float32 `jax.ShapeDtypeStruct`."""
    return jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, jnp.float32), tree)


def initialise(tree: Any, key: jax.Array) -> Any:
    """The pytree with every `Parameter` replaced by its initial array; may be called inside `jit`."""
    leaves, structure = jax.tree.flatten(tree)
    keys = jax.random.split(key, len(leaves))
    return jax.tree.unflatten(structure, [leaf.materialise(k) for leaf, k in zip(leaves, keys, strict=True)])


def generator(key: jax.Array) -> jax.Array:
    """A key, derived from any other, for the compiler's own bit generator; may be called inside `jit`.

    That generator is one instruction an array where Threefry is a hundred, which thirty arrays take ten times as long
    to compile. Its bits differ between kinds of devices.
    """
    return jax.random.wrap_key_data(jax.random.bits(key, (4,), jnp.uint32), impl="rbg")
