"""A program cut in two computes what the whole does, and keeps no more between its halves than it must."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AbstractMesh

from meshwright._jax.jaxpr import evaluate, open_jaxpr
from meshwright._jax.passes import Halves, size_bytes, split_program, trace_local


def halves_of(function: Callable[..., Any], *args: Any, free: Sequence[int] = ()) -> tuple[Halves, list[Any]]:
    """Forward and backward of `function`: its last argument is the cotangent of its only result."""

    def both(*inputs: Any) -> list[Any]:
        *operands, cotangent = inputs
        out, pull = jax.vjp(function, *operands)
        return [out, *pull(cotangent)]

    out = jax.eval_shape(function, *args)
    inputs = [*args, jnp.ones(out.shape, out.dtype)]
    closed = jax.make_jaxpr(both)(*inputs)
    sizes = [0 if i in free else max(1, size_bytes(jax.typeof(x))) for i, x in enumerate(inputs)]
    halves = split_program(closed, first=[0], late=[len(args)], input_bytes=sizes)
    made = evaluate(halves.first, *(inputs[i] for i in halves.first_inputs))
    kept = made[1:]
    assert len(kept) == halves.residuals
    later = evaluate(halves.second, *kept, *(inputs[i] for i in halves.second_inputs))
    for found, expected in zip([made[0], *later], evaluate(closed, *inputs), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-6, atol=1e-6)
    return halves, kept


def test_elementwise_chains_are_computed_again() -> None:
    x, w = jnp.linspace(0, 1, 12).reshape(3, 4), jnp.linspace(-1, 1, 16).reshape(4, 4)
    halves, kept = halves_of(lambda x, w: jnp.sum(jnp.sin(jnp.exp(jnp.tanh(x @ w))) ** 2), x, w, free=(1,))
    assert [k.shape for k in kept] == [(3, 4)]
    assert "dot_general" not in [e.primitive.name for e in open_jaxpr(halves.second).eqns[:2]]


def test_products_of_squares_run_once() -> None:
    # All operands have the result's shape, as those of arithmetic have.
    x, w = jnp.linspace(0, 1, 16).reshape(4, 4), jnp.linspace(-1, 1, 16).reshape(4, 4)
    halves, kept = halves_of(lambda x, w: jnp.sum(jnp.sin(jnp.sin(x @ w) @ w)), x, w, free=(0, 1))
    assert [k.shape for k in kept] == [(4, 4)] * 2
    names = [e.primitive.name for e in (*open_jaxpr(halves.first).eqns, *open_jaxpr(halves.second).eqns)]
    assert names.count("dot_general") == 2 + 4


def test_convolutions_of_equal_shapes_run_once() -> None:
    x = jnp.linspace(-1, 1, 81).reshape(3, 3, 3, 3)
    _, kept = halves_of(lambda x, w: jnp.sum(jnp.sin(lax.conv(x, w, (1, 1), "SAME"))), x, x, free=(0, 1))
    assert [k.shape for k in kept] == [(3, 3, 3, 3)]


def test_blocks_that_were_joined_are_joined_again() -> None:
    """Neighbours' borders around a block: of the block and the borders nothing is kept twice."""
    x, border, w = jnp.linspace(-1, 1, 32).reshape(8, 4), jnp.ones((1, 4)), jnp.linspace(-1, 1, 16).reshape(4, 4)
    _, kept = halves_of(
        lambda x, b, w: jnp.sum(jnp.tanh(jnp.concatenate([b, jnp.tanh(x @ w)]) @ w)), x, border, w, free=(0, 1, 2)
    )
    assert [k.shape for k in kept] == [(8, 4), (9, 4)], "the results of the two products"


def test_masks_are_kept_as_masks() -> None:
    x, w = jnp.linspace(-1, 1, 12).reshape(3, 4), jnp.linspace(-1, 1, 16).reshape(4, 4)
    _, kept = halves_of(lambda x, w: jnp.sum(jax.nn.relu(x @ w)), x, w, free=(1,))
    assert [k.dtype for k in kept] == [jnp.bool_]


def test_casts_of_parameters_are_made_again() -> None:
    x, w = jnp.ones((3, 4), jnp.bfloat16), jnp.linspace(-1, 1, 16).reshape(4, 4)
    _, kept = halves_of(lambda x, w: jnp.sum(jnp.tanh(x @ w.astype(jnp.bfloat16))), x, w, free=(1,))
    assert [k.shape for k in kept] == [(3, 4)]


def test_loops_run_once() -> None:
    def loop(x: Any, w: Any) -> Any:
        return jnp.sum(lax.scan(lambda h, row: (jnp.tanh(h * row), None), x, w)[0])

    halves, _ = halves_of(loop, jnp.ones(4), jnp.linspace(0, 1, 12).reshape(3, 4), free=(1,))
    count = [e.primitive.name for e in (*open_jaxpr(halves.first).eqns, *open_jaxpr(halves.second).eqns)]
    assert count.count("scan") == 2


def test_what_only_the_second_half_wants_is_computed_there_or_kept() -> None:
    x, w = jnp.linspace(0, 1, 12).reshape(3, 4), jnp.linspace(-1, 1, 16).reshape(4, 4)
    halves_of(lambda x, w: jnp.sum(lax.stop_gradient(jnp.cumsum(x @ w, axis=0)) * x @ w), x, w, free=(1,))


_STEPS = (
    lambda a, b: a @ b,
    lambda a, b: jnp.sin(a),
    lambda a, b: a * b,
    lambda a, b: a + jnp.sum(b),
    lambda a, b: a.T,
    lambda a, b: jnp.tanh(a) - b,
)


@pytest.mark.parametrize("seed", range(20))
def test_random_programs(seed: int) -> None:
    generator = np.random.default_rng(seed)

    def program(*inputs: Any) -> Any:
        local = np.random.default_rng(seed)
        values = list(inputs)
        for _ in range(12):
            a, b = (values[local.integers(len(values))] for _ in range(2))
            kind = local.integers(len(_STEPS))
            values.append(_STEPS[kind](a, b))
        return jnp.mean(values[-1] * values[-2])

    arrays = [jnp.asarray(generator.standard_normal((3, 3)) * 0.3) for _ in range(3)]
    halves_of(program, *arrays, free=(0,))


def test_a_first_half_that_needs_the_second_is_refused() -> None:
    closed = jax.make_jaxpr(lambda a, b: [a + b, a])(1.0, 2.0)
    with pytest.raises(ValueError, match="the first part needs"):
        split_program(closed, first=[0], late=[1], input_bytes=[4, 4])


@pytest.mark.parametrize(("gathered", "kept"), [("the weight", []), ("data", [(8, 8)])])
def test_a_weight_is_gathered_again_and_data_is_not(gathered: str, kept: list[tuple[int, ...]]) -> None:
    """Kept for every microbatch in flight, gathered weights would take what splitting them saves."""
    mesh = AbstractMesh((2,), ("x",))

    def both(block: jax.Array, whole: jax.Array, cotangent: jax.Array) -> list[jax.Array]:
        def run(x: jax.Array) -> jax.Array:
            return x @ lax.all_gather(block, "x", tiled=True)

        out, pull = jax.vjp(run, whole)
        return [out, *pull(cotangent)]

    closed = trace_local(both, [jax.ShapeDtypeStruct(s, jnp.float32) for s in ((4, 8), (8, 8), (8, 8))], mesh)
    at_hand = [0, 256, 256] if gathered == "the weight" else [128, 256, 256]
    halves = split_program(closed, first=[0], late=[2], input_bytes=at_hand)
    residuals = open_jaxpr(halves.first).outvars[1:]
    assert [var.aval.shape for var in residuals] == kept
    names = [e.primitive.name for half in (halves.first, halves.second) for e in open_jaxpr(half).eqns]
    assert names.count("all_gather") == (2 if gathered == "the weight" else 1)
