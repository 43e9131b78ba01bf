"""Weights that are gathered again for the backward pass, and stages of which some segments are computed again."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P
from one_device import assert_equal_trees, copy, drawn

from meshwright import plan_for, zoo
from meshwright._jax.gathered_again import gather_again
from meshwright._jax.jaxpr import inline, open_jaxpr
from meshwright._jax.rewrite import rewriting
from meshwright.runtime.step import PlannedStep
from meshwright.zoo import gpt

WIDTH = 16


def gathered(weight: Any) -> Any:
    """A weight that lies over both axes, one after the other; cast between them, as plans do."""
    over_rows = jax.lax.all_gather(weight, "x", axis=0, tiled=True)
    return jax.lax.all_gather(over_rows.astype(jnp.float16), "y", axis=1, tiled=True).astype(jnp.float32)


def microbatch(data: Any, weights: Any) -> Any:
    def loss(weights: Any) -> Any:
        x = data
        # As a run of layers that stands in the program several times.
        layer = jax.jit(lambda x, w: jnp.tanh(x @ w))
        for weight in weights:
            x = layer(x, gathered(weight))
        return jnp.mean(x**2)

    return jax.value_and_grad(loss)(weights)


def on_devices(function: Any) -> Any:
    mesh = jax.make_mesh((2, 4), ("x", "y"), axis_types=(jax.sharding.AxisType.Auto,) * 2)
    return jax.shard_map(
        function, mesh=mesh, in_specs=(P(), P("x", "y")), out_specs=(P(), P("x", "y")), check_vma=False
    )


def test_numbers_are_the_same_and_weights_come_twice() -> None:
    rng = np.random.default_rng(0)
    data = jnp.array(rng.normal(size=(8, WIDTH)), jnp.float32)
    weights = [jnp.array(rng.normal(size=(WIDTH, WIDTH)) / 4, jnp.float32) for _ in range(5)]
    plain, again = on_devices(microbatch), on_devices(rewriting(microbatch, [gather_again]))
    assert_equal_trees(jax.jit(again)(data, weights), jax.jit(plain)(data, weights))

    def gathers(function: Any) -> list[Any]:
        return [e for e in equations(function, data, weights) if e.primitive.name == "all_gather"]

    # Over both axes, but for the last weight, which the backward pass reads first, and the first, which nobody reads.
    assert len(gathers(plain)) == 2 * 5
    assert len(gathers(again)) == 2 * (5 + 3)


def equations(function: Any, *args: Any) -> list[Any]:
    (region,) = open_jaxpr(jax.make_jaxpr(function)(*args)).eqns
    inner = jax.extend.core.ClosedJaxpr(open_jaxpr(region.params["jaxpr"]), ())
    return list(open_jaxpr(inline(inner)).eqns)


def test_a_second_gather_waits_until_the_backward_pass_comes_near() -> None:
    """At most the weight that is read and the next one are there: what a gather reads depends on what was read last."""
    data = jax.ShapeDtypeStruct((8, WIDTH), jnp.float32)
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32) for _ in range(6)]
    program = equations(on_devices(rewriting(microbatch, [gather_again])), data, weights)
    barriers = [at for at, e in enumerate(program) if e.primitive.name == "optimization_barrier"]
    made = {var: at for at, e in enumerate(program) for var in e.outvars}
    seconds = [
        at for at, e in enumerate(program) if e.primitive.name == "all_gather" and made.get(e.invars[0]) in barriers
    ]
    assert len(seconds) == 4
    products = [at for at, e in enumerate(program) if e.primitive.name == "dot_general"]
    for later, second in enumerate(seconds, start=1):
        barrier = made[program[second].invars[0]]
        # After it come those of the weight that is read then, of its own and of those before it: for the gradient, and
        # for the cotangent of what all but the first have read.
        assert sum(at > barrier for at in products) in (2 * (6 - later) - 1, 2 * (6 - later))


@pytest.mark.parametrize("scan", [False, True], ids=["unrolled", "scanned"])
def test_what_loops_and_layers_gather_is_counted_twice(scan: bool) -> None:
    """A plan of ZeRO-3 counts what its program gathers, as FSDP does: in both passes."""
    target = zoo.build("llama-tiny") if scan else zoo.build("gpt-tiny")
    args = target.example_state, target.example_batch
    planning = plan_for(target.step, args, cluster="p3.16xlarge:1", preset="zero(stage=3)", microbatches=1)
    counted = planning.plan.collectives()
    assert counted["all_gather"].bytes > 1.5 * counted["reduce_scatter"].bytes


def test_some_segments_are_computed_again_where_that_is_enough() -> None:
    """Between the memory of nothing computed again and that of everything, a plan computes some of it, takes less time
    than all of it, and has the numbers of one device."""
    target = gpt.build(replace(gpt.CONFIGS["gpt-tiny"], layers=4))
    plan = partial(
        plan_for, target.step, (target.example_state, target.example_batch), cluster="p3.16xlarge:1",
        microbatches=1, preset="data_parallel()",
    )  # fmt: skip
    nothing, everything = (plan(remat=remat) for remat in ("none", "layer"))
    least, most = (one.plan.stages[0].memory.total for one in (everything, nothing))
    some = plan(memory_per_device=1.04 * (least + most) / 2)
    counts = [sum(len(runs) for _, runs in one.plan.stages[0].rematerialised) for one in (nothing, some, everything)]
    assert counts == sorted(set(counts))
    assert nothing.step_seconds < some.step_seconds < everything.step_seconds
    state, batch = drawn(target)
    expected = jax.jit(target.step)(copy(state), batch)
    step = PlannedStep(some.program, some.plan, jax.devices())
    assert_equal_trees(step(state, batch), expected, atol=1e-5)
