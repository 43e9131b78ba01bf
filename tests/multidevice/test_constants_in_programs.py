"""Values that depend on no input: each reader computes the block that it needs."""

from __future__ import annotations

from typing import Any

import jax
import jax.extend
import jax.numpy as jnp
import numpy as np
from one_device import assert_as_on_one_device

import meshwright as mw
from meshwright._jax.jaxpr import inline, open_jaxpr
from meshwright.lowering.local_step import LocalStep

POSITIONS = 32


def test_a_prefix_sum_of_constants_is_made_once_for_each_reader() -> None:
    """Its terms are reached in many ways: written out as a tree, the 145 operators were 23,099 equations, and four
    times as many for twice the positions."""

    def step(weights: Any, x: Any) -> Any:
        def loss(w: Any) -> Any:
            ones = jnp.ones(x.shape[:2], jnp.int32)
            after = jax.lax.associative_scan(
                lambda p, q: ((p[0] + 1) * (p[1] == q[1]) + q[0], q[1]), (jnp.zeros_like(ones), ones), axis=-1
            )[0]
            return jnp.mean((x @ w * jnp.sin(after[..., None].astype(jnp.float32))) ** 2)

        value, gradient = mw.value_and_grad(loss)(weights)
        return weights - 0.1 * gradient, value

    rng = np.random.default_rng(0)
    weights, x = (jnp.asarray(rng.normal(size=shape), jnp.float32) for shape in ((8, 8), (16, POSITIONS, 8)))
    options: dict[str, Any] = {"mesh": {"x": 8}, "microbatches": 1}
    assert_as_on_one_device(step, weights, x, **options)
    found = mw.plan_for(step, (weights, x), cluster="local", stages=1, **options)
    local = LocalStep(found.program, found.plan)
    closed = jax.make_jaxpr(local.on(local.abstract_mesh(), "cpu"))(*local.avals())
    (region,) = open_jaxpr(closed).eqns
    program = inline(jax.extend.core.ClosedJaxpr(open_jaxpr(region.params["jaxpr"]), ()))
    assert len(open_jaxpr(program).eqns) < 2 * len(found.program.graph.operators)
