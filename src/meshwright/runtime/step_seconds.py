"""Seconds of steps on the devices at hand."""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from ..program.trace import abstract
from .executable import Executable


def step_seconds(step: Executable, args: Sequence[Any], steps: int) -> list[float]:
    """Seconds of so many steps, after one that is not counted.

    Args:
      step: on its devices.
      args: its arguments, arrays or shapes; the state is not touched, one of zeros is made in its place.
      steps: how many.
    """
    args = tuple(args)
    with_state = bool(step.program.state_inputs)
    shape = abstract((args[0],))[0] if with_state else None
    rest = [_zeros(abstract((one,))[0]) if _has_shapes(one) else one for one in args[with_state:]]
    state = [step.create(lambda: _zeros(shape))] if with_state else []
    seconds = []
    for _ in range(steps + 1):
        begun = time.perf_counter()
        out = step(*state, *rest)
        jax.block_until_ready(out)
        seconds.append(time.perf_counter() - begun)
        if with_state:
            # The state comes back by itself, or first.
            alone = jax.tree.structure(out) == jax.tree.structure(state[0])
            state = [out if alone else out[0]]
    return seconds[1:]


def _has_shapes(tree: Any) -> bool:
    return any(isinstance(leaf, jax.ShapeDtypeStruct) for leaf in jax.tree.leaves(tree))


def _zeros(tree: Any) -> Any:
    def one(leaf: jax.ShapeDtypeStruct) -> jax.Array:
        if jnp.issubdtype(leaf.dtype, jax.dtypes.prng_key):
            key = jax.random.key(0)
            return jax.random.split(key, leaf.shape) if leaf.shape else key
        return jnp.zeros(leaf.shape, leaf.dtype)

    return jax.tree.map(one, tree)
