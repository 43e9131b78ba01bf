"""What a reference model's step traces to, and numbers to run it on (`test_zoo`, `test_zoo_of_today`)."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from meshwright import zoo


def drawn(seed: int, *shape: int) -> jax.Array:
    """Normal numbers from NumPy, which compiles nothing."""
    return jnp.asarray(np.random.default_rng(seed).normal(size=shape), jnp.float32)


def equations(jaxpr: Any, repeats: int = 1):
    """Every equation with the number of times it runs, inner programs included."""
    for eqn in jaxpr.eqns:
        yield eqn, repeats
        inner = repeats * eqn.params["length"] if eqn.primitive.name == "scan" else repeats
        for param in jax.tree.leaves(eqn.params, is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")):
            body = getattr(param, "jaxpr", param)
            if hasattr(body, "eqns"):
                yield from equations(body, inner)


def traced(target: zoo.Target) -> list[tuple[Any, int]]:
    """The step's equations; the gradient is one primitive that holds the forward program alone."""
    return list(equations(jax.make_jaxpr(target.step)(target.example_state, target.example_batch).jaxpr))


def forward_flops(target: zoo.Target) -> int:
    """FLOPs of the matrix products and convolutions of the forward program, for the whole batch."""
    total = 0
    for eqn, repeats in traced(target):
        if eqn.primitive.name == "dot_general":
            (contracted, _), _ = eqn.params["dimension_numbers"]
            depth = np.prod([eqn.invars[0].aval.shape[dim] for dim in contracted], dtype=int)
            if contracted:  # an outer product only copies
                total += 2 * int(depth) * eqn.outvars[0].aval.size * repeats
        if eqn.primitive.name == "conv_general_dilated":
            *window, _ = eqn.invars[1].aval.shape  # height, width, inputs
            total += 2 * int(np.prod(window)) * eqn.outvars[0].aval.size * repeats
    return total
