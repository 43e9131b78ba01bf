"""Which mixtures are seen not to depend on the order of their rows, and what of them may be split."""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshwright._jax.boundary import Boundaries
from meshwright._jax.jaxpr import evaluate, inline, open_jaxpr
from meshwright.program.graph import GROUPS
from meshwright.program.rules import ReplicationWarning, Rules
from meshwright.program.sorted_rows import with_sorted_rows

TOKENS, K, WIDTH, HIDDEN, EXPERTS = 12, 3, 4, 6, 5

Rows = Callable[[Any, Any, Any], Any]


def arguments() -> tuple[Any, ...]:
    keys = jax.random.split(jax.random.key(0), 5)
    ids = jax.random.randint(keys[0], (TOKENS, K), 0, EXPERTS)
    x, weights = jax.random.normal(keys[1], (TOKENS, WIDTH)), jax.random.uniform(keys[2], (TOKENS, K))
    up, down = (
        jax.random.normal(keys[3 + i], s) for i, s in enumerate([(EXPERTS, WIDTH, HIDDEN), (EXPERTS, HIDDEN, WIDTH)])
    )
    return x, ids, weights, up, down


def mixture(
    *, middle: Callable[..., Any] = jax.nn.silu, last: Callable[..., Any] = lambda y, order: y,
    sizes: Callable[[Any], Any] = lambda ids: jnp.bincount(ids.ravel(), length=EXPERTS),
    index: Callable[[Any], Any] = lambda order: order // K,
) -> Callable[..., Any]:  # fmt: skip
    """A mixture with parts of it replaced."""

    def run(x: Any, ids: Any, weights: Any, up: Any, down: Any) -> Any:
        order = jnp.argsort(ids.ravel())
        counts = sizes(ids)
        hidden = middle(jax.lax.ragged_dot(x[index(order)], up, counts))
        made = last(jax.lax.ragged_dot(hidden, down, counts), order) * weights.ravel()[order][:, None]
        return jnp.zeros_like(x).at[index(order)].add(made)

    return run


def found(run: Callable[..., Any]) -> tuple[Any, Any]:
    """The equation that a mixture became, and its rule."""
    core = inline(jax.make_jaxpr(run)(*arguments()))
    program, _ = with_sorted_rows(core, Boundaries())
    equation = next(one for one in open_jaxpr(program).eqns if one.primitive.name == "sorted_rows")
    assert jnp.allclose(evaluate(program, *arguments())[0], evaluate(core, *arguments())[0])
    rules = Rules()
    rules.prepare([(equation, True)])
    return equation, rules.rule(equation, differentiated=True)


def split_dims(run: Callable[..., Any]) -> tuple[bool, bool, bool]:
    """Whether tokens, experts and hidden dim of a mixture may be split."""
    equation, rule = found(run)
    shapes = {atom.aval.shape: dims for atom, dims in zip(equation.invars, rule.operands, strict=True)}
    hidden = shapes[EXPERTS, WIDTH, HIDDEN][2][0]
    assert rule.operands[[a.aval.shape for a in equation.invars].index((TOKENS, WIDTH))][0] == (0,)
    return 0 in rule.splittable, GROUPS in rule.splittable, hidden in rule.splittable


def by_one_hot(ids: Any) -> Any:
    return jax.nn.one_hot(ids.ravel(), EXPERTS, dtype=jnp.int32).sum(0)


def brought_back(x: Any, ids: Any, weights: Any, up: Any, down: Any) -> Any:
    _, ids = jax.lax.top_k(x[:, :1] * jnp.arange(EXPERTS) + ids[:, :1], K)
    order = jnp.argsort(ids.ravel())
    counts = jax.nn.one_hot(ids, EXPERTS, dtype=jnp.int32).sum((0, 1))
    hidden = jax.nn.relu(jax.lax.ragged_dot(jnp.take(x, order // K, axis=0), up, counts))
    made = jnp.take(jax.lax.ragged_dot(hidden, down, counts), jnp.argsort(order), axis=0)
    return jnp.sum(made.reshape(TOKENS, K, WIDTH) * weights[..., None], axis=1)


def set_back(x: Any, ids: Any, weights: Any, up: Any, down: Any) -> Any:
    order = jnp.argsort(ids.ravel())
    counts = jnp.bincount(ids.ravel(), length=EXPERTS)
    hidden = jax.nn.relu(jax.lax.ragged_dot(jnp.repeat(x, K, axis=0)[order], up, counts))
    made = jnp.zeros((TOKENS * K, WIDTH)).at[order].set(jax.lax.ragged_dot(hidden, down, counts))
    return jnp.einsum("tkd,tk->td", made.reshape(TOKENS, K, WIDTH), weights)


def counted_behind(x: Any, ids: Any, weights: Any, up: Any, down: Any) -> Any:
    """A count of sorted ids, and keys of which those of other devices' experts would be the largest."""
    return masked(x, ids, weights, up, down, below=EXPERTS)


def masked(x: Any, ids: Any, weights: Any, up: Any, down: Any, *, below: int) -> Any:
    _, ids = jax.lax.top_k(x[:, :1] * jnp.arange(EXPERTS) + ids[:, :1], K)
    keys = jnp.where((ids.ravel() >= 0) & (ids.ravel() < below), ids.ravel() - 0, 2**30)
    order = jnp.argsort(keys)
    counts = jnp.bincount(ids.ravel()[order], length=EXPERTS)
    hidden = jax.nn.relu(jax.lax.ragged_dot(x[order // K], up, counts))
    made = jnp.where((keys[order] < 2**30)[:, None], jax.lax.ragged_dot(hidden, down, counts), 0)
    made = jnp.take(made, jnp.argsort(order), axis=0)
    return jnp.sum(made.reshape(TOKENS, K, WIDTH) * weights[..., None], axis=1)


def weighed(x: Any, ids: Any, weights: Any, up: Any, down: Any) -> Any:
    """What is added up behind the sort is no count."""
    order = jnp.argsort(ids.ravel())
    counts = jnp.bincount(ids.ravel()[order], jnp.arange(TOKENS * K) // TOKENS, length=EXPERTS)
    made = jax.lax.ragged_dot(jax.lax.ragged_dot(x[order // K], up, counts), down, counts)
    return jnp.zeros_like(x).at[order // K].add(made)


WHOLE = {
    "added": mixture(), "brought back": brought_back, "not zero": mixture(middle=lambda h: jnp.tanh(h) + 1),
    "counted behind the sort": counted_behind,
}  # fmt: skip


@pytest.mark.parametrize("run", WHOLE.values(), ids=WHOLE)
def test_all_of_a_mixture_may_be_split(run: Callable[..., Any]) -> None:
    assert split_dims(run) == (True, True, True)


def test_the_sum_over_a_tokens_experts_is_part_of_it() -> None:
    equation, _ = found(brought_back)
    assert equation.outvars[0].aval.shape == (TOKENS, WIDTH)


def test_rows_may_be_set_at_their_places() -> None:
    equation, rule = found(set_back)
    tokens, *_ = rule.results[0][0]
    assert tokens == 0
    assert 0 in rule.splittable
    assert equation.outvars[0].aval.shape[-1] == WIDTH


def test_a_bias_behind_the_last_product_is_added_once() -> None:
    run = mixture(last=lambda y, order: y + 1.0)
    assert split_dims(run) == (True, True, True)
    equation, _ = found(run)
    ((position, operand),) = equation.params["rows"].once
    assert open_jaxpr(equation.params["rows"].program).eqns[position].primitive.name == "add"
    assert operand == 1


def test_what_is_not_linear_behind_the_last_product_keeps_sums_on_one_device() -> None:
    assert split_dims(mixture(last=lambda y, order: jnp.tanh(y))) == (True, False, False)


def multiplied(x: Any, ids: Any, weights: Any, up: Any, down: Any, *, bias: float | None = None) -> Any:
    """Two products of which each device has a part are multiplied."""
    order = jnp.argsort(ids.ravel())
    counts = jnp.bincount(ids.ravel(), length=EXPERTS)
    hidden = jax.nn.silu(jax.lax.ragged_dot(x[order // K], up, counts))
    made = jax.lax.ragged_dot(hidden, down, counts)
    gate = jax.lax.ragged_dot(x[order // K], jnp.swapaxes(down, 1, 2) @ down, counts)
    if bias is not None:
        gate += bias
    return jnp.zeros_like(x).at[order // K].add(made * gate)


def test_products_of_partial_sums_keep_sums_on_one_device() -> None:
    assert split_dims(multiplied) == (True, False, False)


def test_a_bias_of_what_is_no_partial_sum_is_added_by_all() -> None:
    run = partial(multiplied, bias=1.0)
    assert split_dims(run) == (True, False, False)
    equation, _ = found(run)
    assert not equation.params["rows"].once


def test_a_sum_over_what_a_bias_was_added_to_stays_on_one_device() -> None:
    """Each device that has some of its columns would have to add those of the bias."""
    equation, rule = found(mixture(last=lambda y, order: (y + jnp.arange(WIDTH)) @ jnp.ones((WIDTH, WIDTH))))
    (bias,) = (equation.invars.index(a) for a in equation.invars if a.aval.shape == (EXPERTS, HIDDEN, WIDTH))
    assert rule.operands[bias][2][0] not in rule.splittable


def with_its_order(x: Any, ids: Any, weights: Any, up: Any, down: Any) -> Any:
    order = jnp.argsort(ids.ravel())
    counts = jnp.bincount(ids.ravel(), length=EXPERTS)
    made = jax.lax.ragged_dot(jax.lax.ragged_dot(x[order // K], up, counts), down, counts)
    return jnp.zeros_like(x).at[order // K].add(made), order


def of_other_sizes(x: Any, ids: Any, weights: Any, up: Any, down: Any) -> Any:
    order = jnp.argsort(ids.ravel())
    counts = jnp.sum(weights > 0.5) + jnp.arange(EXPERTS)
    made = jax.lax.ragged_dot(jax.lax.ragged_dot(x[order // K], up, counts), down, counts)
    return jnp.zeros_like(x).at[order // K].add(made)


def with_sizes_as_values(x: Any, ids: Any, weights: Any, up: Any, down: Any) -> Any:
    order = jnp.argsort(ids.ravel())
    counts = jnp.bincount(ids.ravel(), length=EXPERTS)
    made = jax.lax.ragged_dot(jax.lax.ragged_dot(x[order // K], up, counts), down, counts)
    made /= 1.0 + counts[ids.ravel()[order]][:, None]
    return jnp.zeros_like(x).at[order // K].add(made)


def of_other_numbers(x: Any, ids: Any, weights: Any, up: Any, down: Any) -> Any:
    order = jnp.argsort(ids.ravel())
    counts, more = (jnp.bincount(ids.ravel(), length=n) for n in (EXPERTS, 2 * EXPERTS))
    made = jax.lax.ragged_dot(jax.lax.ragged_dot(x[order // K], up, counts), jnp.concatenate([down, down]), more)
    return jnp.zeros_like(x).at[order // K].add(made)


def but_for_one_group(ids: Any) -> Any:
    """Counts, unless all ids are of one group."""
    counts = jnp.bincount(ids.ravel(), length=EXPERTS)
    return counts - counts // (TOKENS * K) * (jnp.arange(EXPERTS) == 1)


def with_places_as_values(y: Any, order: Any) -> Any:
    places = jnp.argsort(order)
    return y * jnp.sum(places[:, None] @ jnp.ones((1, 1), places.dtype))


REFUSED = {
    "meets sorted rows with what is not sorted": mixture(last=lambda y, order: y * jnp.arange(TOKENS * K)[:, None]),
    "leave the function": with_its_order,
    "do not count": mixture(sizes=lambda ids: jnp.bincount(ids.ravel() // 2, length=EXPERTS)),
    "sizes of its groups do not count": mixture(sizes=but_for_one_group),
    "may be negative": mixture(sizes=by_one_hot),
    "different numbers of groups": of_other_numbers,
    "something else": of_other_sizes,
    "at other places than rows came from": mixture(index=lambda order: order % TOKENS),
    "takes some of the sorted rows": mixture(last=lambda y, order: y.at[:3].get().sum() + y),
    "cumsum": mixture(last=lambda y, order: jnp.cumsum(y, axis=0)),
    "takes the sizes of groups": with_sizes_as_values,
    "brings rows together with places, or with their order": mixture(
        middle=lambda h: h, last=lambda y, order: jnp.where(order[:, None] > 7, y, 0)
    ),
    "mul at": mixture(last=lambda y, order: y + jnp.outer(order, jnp.arange(WIDTH))),
    "computes with the order of rows something else": mixture(index=lambda order: (order / K).astype(jnp.int32)),
    "reads what is not sorted at other places": mixture(last=lambda y, order: y + jnp.eye(7, WIDTH)[order % 7]),
    "takes the order of rows for values": mixture(last=with_places_as_values),
    "made of something else than what": partial(masked, below=EXPERTS - 1),
    "writes sorted rows to places of its own": weighed,
}


@pytest.mark.parametrize("why", REFUSED)
def test_what_depends_on_the_order_is_refused(why: str) -> None:
    core = inline(jax.make_jaxpr(REFUSED[why])(*arguments()))
    with pytest.warns(ReplicationWarning, match=f"the mixture at .*test_sorted_rows.*{re.escape(why)}"):
        program, _ = with_sorted_rows(core, Boundaries())
    assert [e.primitive.name for e in open_jaxpr(program).eqns].count("sorted_rows") == 0


def with_another_count(of: Callable[[Any, Any], Any], length: int) -> Callable[..., Any]:
    """A mixture beside which rows are counted behind the sort."""

    def run(x: Any, ids: Any, weights: Any, up: Any, down: Any) -> Any:
        order = jnp.argsort(ids.ravel())
        counted = jnp.bincount(of(ids.ravel()[order], order), length=length).astype(x.dtype)
        counts = jnp.bincount(ids.ravel(), length=EXPERTS)
        made = jax.lax.ragged_dot(jax.lax.ragged_dot(x[order // K], up, counts), down, counts)
        return jnp.zeros_like(x).at[order // K].add(made) * (counted @ jnp.arange(float(length)) ** 2)

    return run


def in_pairs(rows: Any, order: Any) -> Any:
    blocks = rows.reshape(TOKENS, K)
    return (blocks[:, :, None] + blocks[:, None, :]).ravel()


BESIDE = {
    "of two things of each row": with_another_count(lambda rows, order: 2 * rows + rows // 2, 4 * EXPERTS),
    "of pairs within blocks of sorted rows": with_another_count(in_pairs, 2 * EXPERTS),
    "of rows and what was brought back": with_another_count(
        lambda rows, order: rows * EXPERTS + rows[jnp.argsort(order)], EXPERTS**2
    ),
}  # fmt: skip


@pytest.mark.parametrize("run", BESIDE.values(), ids=BESIDE)
@pytest.mark.filterwarnings("ignore::meshwright.program.rules.ReplicationWarning")
def test_counts_of_sorted_rows_are_what_they_were(run: Callable[..., Any]) -> None:
    core = inline(jax.make_jaxpr(run)(*arguments()))
    program, _ = with_sorted_rows(core, Boundaries())
    assert jnp.allclose(evaluate(program, *arguments())[0], evaluate(core, *arguments())[0])


@pytest.mark.filterwarnings("ignore::meshwright.program.rules.ReplicationWarning")
def test_rows_as_they_were_are_not_promised_to_be_sorted() -> None:
    def run(x: Any, ids: Any, weights: Any, up: Any, down: Any) -> Any:
        order = jnp.argsort(ids.ravel())
        ones = jnp.ones(TOKENS * K, jnp.int32)
        counts = jax.ops.segment_sum(ones, ids.ravel()[order], EXPERTS, indices_are_sorted=True)
        made = jax.lax.ragged_dot(jax.lax.ragged_dot(x[order // K], up, counts), down, counts)
        return jnp.zeros_like(x).at[order // K].add(made)

    core = inline(jax.make_jaxpr(run)(*arguments()))
    program, _ = with_sorted_rows(core, Boundaries())
    before, after = (
        [e.params["indices_are_sorted"] for e in open_jaxpr(one).eqns if e.primitive.name == "scatter-add"]
        for one in (core, program)
    )
    assert True in before
    assert True not in after


def test_sorts_that_are_no_mixtures_are_left_alone() -> None:
    def run(x: Any) -> Any:
        order = jnp.argsort(x)
        return x[order] * jnp.arange(x.size) + jnp.bincount(x.astype(jnp.int32)[order], length=8)

    core = inline(jax.make_jaxpr(run)(jnp.arange(8.0)))
    with warnings.catch_warnings():
        warnings.simplefilter("error", ReplicationWarning)
        assert with_sorted_rows(core, Boundaries())[0] is core


def test_mixtures_in_loops_and_checkpoints_are_found() -> None:
    def run(x: Any, *rest: Any) -> Any:
        layer = jax.checkpoint(lambda x, _: (x + mixture()(x, *rest), None))
        return jax.lax.scan(layer, x, None, length=2)[0]

    program, _ = with_sorted_rows(inline(jax.make_jaxpr(run)(*arguments())), Boundaries())
    assert "sorted_rows" in str(program)
    assert " sort[" in str(program)  # inside of it
    assert jnp.allclose(evaluate(program, *arguments())[0], run(*arguments()), atol=1e-4)
