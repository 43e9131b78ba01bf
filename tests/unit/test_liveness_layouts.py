"""What XLA's GPU compiler lays out so that nothing has to be moved, and what it copies."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshwright._jax.dataflow import Kind, Program
from meshwright._jax.liveness_adapter import dataflow_of
from meshwright.memory.fusion import Fusion
from meshwright.memory.liveness import predict

Function = Callable[..., Any]
B, K, G, Q, S, D = 2, 3, 4, 32, 64, 8


def array(*shape: int, dtype: Any = jnp.float32) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)


def moves(program: Program) -> list[str]:
    """Every operation that would move elements of an array with all dims of the scores."""
    large = B * K * G * Q * S
    return [
        one.name
        for one in program.operations
        if one.kind is Kind.PERMUTE and program.values[one.writes[0]].elements == large
    ]


def dataflow(function: Function, *shapes: Any) -> Program:
    return dataflow_of(jax.jit(function), *shapes, platform="gpu")


QUERY, KEY = array(B, Q, K, G, D), array(B, S, K, D)


def scores(query: jax.Array, key: jax.Array) -> jax.Array:
    """Their product has its dims as b, k, s, q, g; written are b, k, g, q, s."""
    return jnp.einsum("bqkgd,bskd->bkgqs", query, key)


def test_a_transposition_between_arithmetic_and_products_moves_nothing() -> None:
    def gradient(query: jax.Array, key: jax.Array) -> jax.Array:
        return jax.grad(lambda q: jnp.sum(scores(q, key) ** 2))(query)

    assert moves(dataflow(gradient, QUERY, KEY)) == []


def test_an_operand_is_copied_where_its_layout_has_dims_that_the_product_takes_together_in_another_order() -> None:
    def weighted(query: jax.Array, key: jax.Array) -> jax.Array:
        return jnp.einsum("bkgqs,bskd->bqkgd", jnp.exp(scores(query, key)), key)  # g, q of what lies as q, g

    program = dataflow(weighted, QUERY, KEY)
    assert moves(program) == ["regroup"]
    # It takes in the arithmetic before it, and the product does not take it in.
    large = [one for one in Fusion(program).run() if program.values[one.writes[0]].elements == B * K * G * Q * S]
    assert [kernel.operation.name for kernel in large] == ["dot_general", "regroup"]


def test_what_leaves_the_program_lies_row_by_row() -> None:
    assert moves(dataflow(scores, QUERY, KEY)) == ["copy"]
    # Rows and columns may be written either way round.
    shapes = array(B * K, G * Q, D), array(B * K, S, D)
    flat = dataflow(lambda x, y: jnp.einsum("bqd,bsd->bqs", x, y), *shapes)
    turned = dataflow(lambda x, y: jnp.einsum("bqd,bsd->bsq", x, y), *shapes)
    assert moves(flat) == moves(turned) == []


def test_results_that_meet_arithmetic_of_another_layout_are_copied_once_and_after_being_widened() -> None:
    def meet(query: jax.Array, key: jax.Array, weights: jax.Array, value: jax.Array) -> jax.Array:
        first = scores(query, key)
        later = jnp.einsum("bkgqd,bskd->bkgqs", weights, value).astype(jnp.float32)
        return jnp.sum(first * later), jnp.sum(first - jnp.tanh(later))

    narrow = array(B, K, G, Q, D, dtype=jnp.bfloat16), array(B, S, K, D, dtype=jnp.bfloat16)
    program = dataflow(meet, QUERY, KEY, *narrow)
    assert moves(program) == ["copy"]
    (copy,) = (one for one in program.operations if one.name == "copy")
    assert program.values[copy.reads[0]].size_bytes == 4 * B * K * G * Q * S
    assert any(kernel.operation is copy for kernel in Fusion(program).run())  # two read it: it is stored


def test_masks_and_numbers_tie_nothing_together() -> None:
    """One mask is read by scores of two layouts: neither is copied for it."""

    def masked(query: jax.Array, key: jax.Array, weights: jax.Array) -> jax.Array:
        mask = jnp.arange(Q)[:, None] >= jnp.arange(S)
        one = jnp.where(mask, scores(query, key), 0.0)
        two = jnp.where(mask, jnp.einsum("bkgqd,bskd->bkgqs", weights, key), 0.0)
        return jnp.sum(one), jnp.sum(two)

    assert moves(dataflow(masked, QUERY, KEY, array(B, K, G, Q, D))) == []


@pytest.mark.parametrize("platform", ["cpu", "tpu"])
def test_other_compilers_are_told_of_every_transposition(platform: str) -> None:
    program = dataflow_of(jax.jit(lambda q, k: jnp.exp(scores(q, k))), QUERY, KEY, platform=platform)
    assert moves(program) == ["transpose"]


def test_the_gradient_of_grouped_attention_stores_no_transposed_scores() -> None:
    """XLA for A100 and H100: the scores, their cotangent, and half as much where that is copied."""

    def loss(query: jax.Array, key: jax.Array, value: jax.Array) -> jax.Array:
        weights = jax.nn.softmax(scores(query, key), axis=-1).astype(jnp.bfloat16)
        return jnp.sum(jnp.einsum("bkgqs,bskd->bqkgd", weights, value).astype(jnp.float32) ** 2)

    shapes = QUERY, KEY, array(B, S, K, D, dtype=jnp.bfloat16)
    found = predict(dataflow(jax.grad(loss, argnums=(0, 1, 2)), *shapes))
    large = 4 * B * K * G * Q * S
    stored = sum(one.size_bytes for one in found.largest if one.size_bytes >= large // 2)
    assert stored <= 2.5 * large


def test_products_that_take_the_same_dims_together_read_one_copy() -> None:
    """As the gradients of queries and keys do: rows of groups and queries are free in one and summed over in the other.
    (XLA for H100, llama3-405b's backward pass: one of 4 GiB.)"""

    def both(query: jax.Array, key: jax.Array, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        weights = jnp.exp(scores(query, key))
        return jnp.einsum("bkgqs,bskd->bkgqd", weights, key), jnp.einsum("bkgqs,bkgqd->bksd", weights, rows)

    program = dataflow(both, QUERY, KEY, array(B, K, G, Q, D))
    sizes = [program.values[one.writes[0]].elements for one in program.operations if one.name == "regroup"]
    assert sizes.count(B * K * G * Q * S) == 1
