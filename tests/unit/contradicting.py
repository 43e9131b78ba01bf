"""A step whose parameters cannot be stored as the first ZeRO stage has it."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshwright import value_and_grad
from meshwright.program.staged import StagedProgram, staged_program
from meshwright.program.trace import trace_program


def contradicting() -> StagedProgram:
    """A `cond` reads its parameters unsplit, and their gradients are no sums over devices inside it."""

    def step(state: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            h = jnp.tanh(x @ w["a"])
            h = jax.lax.cond(h.sum() > 0, lambda h, m: jnp.cumsum(h @ m, 0), lambda h, m: h, h, w["b"])
            return jnp.mean(jnp.tanh(h @ w["c"]))

        value, grads = value_and_grad(loss, reduction="mean")(state)
        return jax.tree.map(lambda p, g: p - g, state, grads), value

    state = {name: jax.ShapeDtypeStruct((64, 64), jnp.float32) for name in "abc"}
    program = trace_program(step, (state, jax.ShapeDtypeStruct((64, 64), jnp.float32)), microbatches=2)
    return staged_program(program, layers=3)
