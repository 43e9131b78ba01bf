"""Stages that rematerialise their activations, and those that have none to rematerialise."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp

from meshwright import plan_for, value_and_grad


def test_a_stage_with_nothing_to_rematerialise_is_no_reason_to_refuse() -> None:
    """A stage of one product keeps its operands either way."""

    def step(state: Any, x: Any) -> Any:
        loss = lambda p: jnp.mean((jax.nn.gelu(x @ p["in"]) @ p["out"]) ** 2)  # noqa: E731
        value, grads = value_and_grad(loss)(state)
        return jax.tree.map(lambda p, g: p - g, state, grads), value

    state = {"in": jax.ShapeDtypeStruct((64, 256), jnp.float32), "out": jax.ShapeDtypeStruct((256, 256), jnp.float32)}
    wishes: dict[str, Any] = {"stages": 2, "microbatches": 2, "remat": "layer", "schedule": "gpipe"}
    example = (state, jax.ShapeDtypeStruct((32, 64), jnp.float32))
    plan = plan_for(step, example, cluster="p4d.24xlarge:1", **wishes).plan
    assert [bool(stage.rematerialised) for stage in plan.stages] == [False, True]
