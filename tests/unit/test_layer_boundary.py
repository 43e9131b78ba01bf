"""`meshwright.layer_boundary`: what it marks, that the layers are those between, and that elsewhere it does nothing."""

from __future__ import annotations

from collections.abc import Callable
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright._jax.jaxpr import open_jaxpr
from meshwright.errors import PlanError
from meshwright.program.staged import StagedProgram, staged_program
from meshwright.program.trace import trace_program

WIDTH, BATCH, BLOCKS = 16, 8, 4


def block(w: Any, x: Any) -> Any:
    return jnp.tanh(x @ w)


def loss_of(model: Callable[[Any, Any], Any]) -> Callable[..., Any]:
    def step(weights: Any, x: Any) -> Any:
        loss, grads = mw.value_and_grad(lambda p: jnp.mean(model(p, x) * 2))(weights)
        return jax.tree.map(lambda p, g: p - 0.1 * g, weights, grads), loss

    return step


WEIGHTS = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * BLOCKS
STACK = jax.ShapeDtypeStruct((BLOCKS, WIDTH, WIDTH), jnp.float32)
X = jax.ShapeDtypeStruct((BATCH, WIDTH), jnp.float32)


def staged(model: Callable[[Any, Any], Any], weights: Any = WEIGHTS, **options: Any) -> StagedProgram:
    return staged_program(trace_program(loss_of(model), (weights, X), microbatches=2), **options)


def names(program: StagedProgram) -> list[list[str]]:
    """Of the equations of each layer."""
    equations = open_jaxpr(program.core).eqns
    return [[equation.primitive.name for equation in equations[a:b]] for a, b in program.layers]


HEAD = ["mul", "reduce_sum", "div"]


# Which layers


def test_layers_are_exactly_those_between() -> None:
    def model(weights: Any, x: Any) -> Any:
        for number, w in enumerate(weights):
            x = block(w, x)
            if number in (0, 2):
                mw.layer_boundary()
        return x

    one = ["dot_general", "tanh"]
    assert names(staged(model)) == [one, one * 2, one + HEAD]
    # However many layers are allowed.
    assert len(staged(model, layers=2).layers) == 3


def test_the_layers_tile_the_program_and_empty_ones_are_none() -> None:
    def model(weights: Any, x: Any) -> Any:
        mw.layer_boundary()
        for w in weights:
            x = block(w, x)
            mw.layer_boundary()
            jnp.sin(x)  # read by nobody, so nothing lies between
            mw.layer_boundary()
        return x

    layers = staged(model).layers
    assert layers[0][0] == 0
    assert all(a[1] == b[0] for a, b in pairwise(layers))
    assert names(staged(model)) == [["dot_general", "tanh"]] * BLOCKS + [HEAD]


def test_a_boundary_at_the_end_is_none() -> None:
    def step(weights: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            value = jnp.sum(block(p[0], x))
            mw.layer_boundary()
            return value

        value, grads = mw.value_and_grad(loss)(weights)
        return grads, value

    program = trace_program(step, (WEIGHTS, X))
    assert program.boundaries.before == []
    assert len(staged_program(program, layers=1).layers) == 1


@pytest.mark.parametrize("wrap", [jax.jit, lambda f: jax.jit(jax.jit(f)), lambda f: f])
def test_boundaries_in_jitted_blocks(wrap: Callable[..., Any]) -> None:
    @wrap
    def ending_block(w: Any, x: Any) -> Any:
        x = block(w, x)
        mw.layer_boundary()
        return x

    def model(weights: Any, x: Any) -> Any:
        for w in weights:
            x = ending_block(w, x)
        return x

    assert names(staged(model)) == [["dot_general", "tanh"]] * BLOCKS + [HEAD]


def test_a_jitted_block_traced_before_meshwright_saw_it() -> None:
    """JAX keeps what it has traced; the mark is in it all the same."""

    @jax.jit
    def ending_block(w: Any, x: Any) -> Any:
        x = block(w, x)
        mw.layer_boundary()
        return x

    ending_block(jnp.ones((WIDTH, WIDTH)), jnp.ones((BATCH // 2, WIDTH)))
    assert len(staged(lambda weights, x: ending_block(weights[1], ending_block(weights[0], x))).layers) == 3


def test_boundaries_under_vmap() -> None:
    def model(weights: Any, x: Any) -> Any:
        def one(row: Any) -> Any:
            for w in weights:
                row = block(w, row)
                mw.layer_boundary()
            return row

        return jax.vmap(jax.jit(one))(x)

    assert [part.count("dot_general") for part in names(staged(model))] == [1] * BLOCKS + [0]


@pytest.mark.parametrize("place", ["first", "last", "middle"])
def test_a_region_that_is_not_cut(place: str) -> None:
    """A boundary inside `jax.checkpoint` stands before the region if it comes first, else after it."""

    @jax.checkpoint
    def region(w: Any, x: Any) -> Any:
        if place == "first":
            mw.layer_boundary()
        x = x @ w
        if place == "middle":
            mw.layer_boundary()
        x = jnp.tanh(x)
        if place == "last":
            mw.layer_boundary()
        return x

    def model(weights: Any, x: Any) -> Any:
        return region(weights[1], region(weights[0], x))

    found = names(staged(model))
    if place == "first":
        assert [len(layer) for layer in found] == [1, 1 + len(HEAD)]
    else:
        assert [len(layer) for layer in found] == [1, 1, len(HEAD)]


def test_functions_with_derivatives_of_their_own() -> None:
    @jax.custom_vjp
    def doubled(x: Any) -> Any:
        mw.layer_boundary()
        return x * 2

    doubled.defvjp(lambda x: (doubled(x), None), lambda _, g: (g * 2,))

    @jax.custom_jvp
    def tripled(x: Any) -> Any:
        x = x * 3
        mw.layer_boundary()
        return x

    tripled.defjvp(lambda x, t: (tripled(*x), t[0] * 3))

    def model(weights: Any, x: Any) -> Any:
        return tripled(doubled(block(weights[0], x)))

    assert names(staged(model)) == [["dot_general", "tanh"], ["custom_vjp_call", "custom_jvp_call"], HEAD]


def test_boundaries_in_branches_and_loops() -> None:
    def branch(x: Any) -> Any:
        x = x + 1
        mw.layer_boundary()
        return x

    def model(weights: Any, x: Any) -> Any:
        x = jax.lax.cond(weights[1][0, 0] > 0, branch, jnp.tanh, block(weights[0], x))
        return block(weights[2], x)

    found = names(staged(model))
    assert len(found) == 2
    assert found[0][-1] == "cond"


# Scans


@pytest.mark.parametrize("place", ["first", "last"])
@pytest.mark.parametrize("wrap", [jax.checkpoint, lambda f: f])
def test_each_trip_of_a_scan_is_a_layer(place: str, wrap: Callable[..., Any]) -> None:
    @wrap
    def trip(x: Any, w: Any) -> Any:
        if place == "first":
            mw.layer_boundary()
        x = block(w, x)
        if place == "last":
            mw.layer_boundary()
        return x, None

    def model(stack: Any, x: Any) -> Any:
        return jax.lax.scan(trip, x * 2, stack)[0]

    program = staged(model, STACK)
    assert program.scan_splits == {1: (1,) * BLOCKS}
    found = names(program)
    assert found[0] == ["mul"]
    assert [layer[-1] for layer in found[1:-1]] == ["scan"] * BLOCKS
    assert found[-1] == HEAD


def test_only_the_scans_that_hold_boundaries_are_cut() -> None:
    def model(stack: Any, x: Any) -> Any:
        def plain(x: Any, w: Any) -> Any:
            return block(w, x), jnp.sin(x)

        def marked(x: Any, w: Any) -> Any:
            mw.layer_boundary()
            return plain(x, w)

        x, rows = jax.lax.scan(plain, x, stack)
        mw.layer_boundary()
        x, more = jax.lax.scan(marked, x, stack, reverse=True)
        return x + jnp.sum(rows * more, axis=0)

    found = names(staged(model, STACK))
    assert len(found) == 1 + BLOCKS + 1
    assert "scan" in found[0]
    assert found[BLOCKS][-1] == "concatenate"


def test_given_splits_and_cuts_go_before_the_boundaries() -> None:
    def model(stack: Any, x: Any) -> Any:
        def trip(x: Any, w: Any) -> Any:
            mw.layer_boundary()
            return block(w, x), None

        return jax.lax.scan(trip, x, stack)[0]

    assert len(staged(model, STACK, scan_splits={0: (2, 2)}).layers) == 3
    assert len(staged(model, STACK, scan_splits={}).layers) == 2
    assert staged(model, STACK, scan_splits={}, cuts=(2,)).layers[0] == (0, 2)


# What it must not change


def test_the_program_is_the_same_with_and_without() -> None:
    def model(boundary: Callable[[], None]) -> Callable[..., Any]:
        def run(weights: Any, x: Any) -> Any:
            for w in weights:
                x = block(w, x)
                boundary()
            return x

        return run

    marked = trace_program(loss_of(model(mw.layer_boundary)), (WEIGHTS, X), microbatches=2)
    plain = trace_program(loss_of(model(lambda: None)), (WEIGHTS, X), microbatches=2)
    assert marked.fingerprint == plain.fingerprint
    assert str(marked.core) == str(plain.core)
    assert marked.boundaries.before
    assert not plain.boundaries.before


@pytest.mark.parametrize(
    "transform",
    [
        lambda f: f,
        jax.jit,
        lambda f: jax.jit(jax.grad(lambda x: jnp.sum(f(x)))),
        lambda f: jax.grad(lambda x: jnp.sum(jax.jit(f)(x))),
        lambda f: jax.grad(lambda x: jnp.sum(jax.checkpoint(f)(x))),
        lambda f: jax.vmap(jax.jit(f)),
        lambda f: lambda x: jax.jvp(f, (x,), (x,)),
        lambda f: jax.jacfwd(jax.jacrev(f)),
        lambda f: lambda x: jax.lax.scan(lambda c, _: (f(c), f(c)), x, length=3),
        lambda f: lambda x: jax.grad(lambda x: jnp.sum(jax.lax.scan(lambda c, _: (f(c), f(c)), x, length=3)[1]))(x),
        lambda f: lambda x: jax.lax.fori_loop(0, 3, lambda _, c: f(c), x),
        lambda f: lambda x: jax.linearize(f, x)[1](x),
        lambda f: lambda x: mw.value_and_grad(lambda x: jnp.sum(jax.checkpoint(f)(x)))(x),
    ],
)
def test_outside_meshwright_it_does_nothing(transform: Callable[..., Any]) -> None:
    def function(boundary: Callable[[], None]) -> Callable[..., Any]:
        def run(x: Any) -> Any:
            boundary()
            x = jnp.sin(x) * 2
            boundary()
            return jnp.cos(x)

        return transform(run)

    x = jnp.linspace(0.1, 1.0, 4)
    found, expected = function(mw.layer_boundary)(x), function(lambda: None)(x)
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(np.asarray(a), np.asarray(b)), found, expected)


def test_nothing_of_it_reaches_the_compiler() -> None:
    def text(boundary: Callable[[], None]) -> str:
        def function(x: Any) -> Any:
            boundary()
            return jnp.sin(x)

        return jax.jit(function).lower(1.0).as_text()

    assert text(mw.layer_boundary) == text(lambda: None)


# Planning


def test_more_stages_than_layers_are_refused() -> None:
    def model(weights: Any, x: Any) -> Any:
        x = block(weights[0], x)
        mw.layer_boundary()
        for w in weights[1:]:
            x = block(w, x)
        return x

    with pytest.raises(PlanError, match="refused 3 stages: got 2 layers"):
        mw.plan_for(loss_of(model), (WEIGHTS, X), cluster="p3.16xlarge", stages=3, microbatches=2)


def test_stages_begin_at_boundaries() -> None:
    """The one boundary is far from where two stages would be cut otherwise."""

    def model(weights: Any, x: Any) -> Any:
        for number, w in enumerate(weights):
            x = block(w, x)
            if number == 0:
                mw.layer_boundary()
        return x

    planning = mw.plan_for(loss_of(model), (WEIGHTS, X), cluster="p3.16xlarge", stages=2, microbatches=2)
    assert [stage.equations for stage in planning.plan.stages] == [(0, 2), (2, 2 * BLOCKS + len(HEAD))]
