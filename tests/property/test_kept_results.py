"""What a rematerialised region keeps, against every set of results that it could keep."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import chain, combinations
from typing import Any

import jax
import jax.numpy as jnp
from hypothesis import given, settings, strategies as st

from meshwright._jax.jaxpr import eliminate_dead_code, inline, open_jaxpr
from meshwright.program.build import build_graph
from meshwright.program.graph import Graph, Operator
from meshwright.program.kept_results import kept_results, moved_again
from meshwright.program.residuals import needed_again
from meshwright.program.rules import Rules
from meshwright.program.segments import Segments, rematerialise

SIDE = 8

# Operators of all kinds: products, arithmetic that needs what it reads or nothing, sums, and what is read twice.
STEPS: dict[str, Callable[..., Any]] = {
    "product": lambda x, y: x @ y,
    "times": lambda x, y: x * y,
    "plus": lambda x, y: x + y,
    "sine": lambda x, y: jnp.sin(x) + y,
    "tanh": lambda x, y: jnp.tanh(x),
    "mean": lambda x, y: x - jnp.mean(x, axis=1, keepdims=True),
    "largest": lambda x, y: x + jnp.max(y, axis=0, keepdims=True),
}


def graph_of(program: Sequence[tuple[str, int, int]]) -> Graph:
    """A program of these steps, each on two of the arrays before it."""

    def loss(x: Any, w: Any) -> Any:
        made = [x, w]
        for name, one, other in program:
            made.append(STEPS[name](made[-1 - one % len(made)], made[-1 - other % len(made)]))
        return jnp.sum(made[-1])

    arrays = [jnp.ones((SIDE, SIDE))] * 2
    closed = eliminate_dead_code(inline(jax.make_jaxpr(loss)(*arrays)))
    return build_graph(closed, Rules(), parameters=(0, 1), losses=[0])


def cost(graph: Graph, run: tuple[int, int], kept: frozenset[Any], known: set[int], price: float) -> float:
    """What a run takes with these results kept: its bytes, but of those that others keep, and what runs again."""
    marked = rematerialise(graph, Segments({(): (run,)}, kept))
    again, read = needed_again(marked)
    inside = [op for op in marked.operators if op.path in kept]
    held = sum(graph.values[v].bytes for op in inside for v in op.results if v in read and v not in known)
    return price * held + sum(moved_again(graph, graph.operators[index]) for index in again)


def inside(graph: Graph, run: tuple[int, int]) -> list[Operator]:
    return [op for op in graph.operators if run[0] <= op.path[0] < run[1]]


steps = st.lists(
    st.tuples(st.sampled_from(sorted(STEPS)), st.integers(0, 3), st.integers(0, 3)), min_size=2, max_size=4
)


@settings(max_examples=40)
@given(program=steps, price=st.sampled_from([0.1, 0.7, 1.5, 4.0, 30.0]))
def test_no_other_results_would_take_less(program: list[tuple[str, int, int]], price: float) -> None:
    graph = graph_of(program)
    last = max(op.path[0] for op in graph.operators)
    run = (0, last)  # all but the sum that is the loss
    region = inside(graph, run)
    if len(region) > 11:
        region, run = region[:11], (0, 11)
    numbers = {op.index for op in region}
    later = {
        v for op in region for v in op.results
        if v is not None and any(user not in numbers for user, _ in graph.consumers.get(v, ()))
    }  # fmt: skip
    (found,) = kept_results(graph, region, 1, later, [price])
    # Derivatives that read the operator's own result read it before it is kept.
    able = [op.path for op in region if op.name not in ("exp", "tanh", "reduce_max")]
    subsets = chain.from_iterable(combinations(able, size) for size in range(len(able) + 1))
    least = min(cost(graph, run, frozenset(one), later, price) for one in subsets)
    largest = price * max(graph.values[v].bytes for op in region for v in op.results if v is not None)
    assert cost(graph, run, found, later, price) <= least + 1e-4 * (largest + least)


def test_products_are_kept_and_what_is_between_them_is_not() -> None:
    """At the price of the lower rung, of attention and a perceptron as large as they are."""
    width, positions, heads = 2048, 512, 16

    def layer(x: Any, q: Any, k: Any, v: Any, up: Any, down: Any) -> Any:
        def split(y: Any) -> Any:
            return y.reshape(positions, heads, -1)

        scores = jnp.einsum("qhd,khd->hqk", split(x @ q), split(x @ k))
        mixed = jnp.einsum("hqk,khd->qhd", jax.nn.softmax(scores), split(x @ v)).reshape(positions, width)
        x = x + mixed
        return jnp.sum(x + jax.nn.gelu(x @ up) @ down)

    array = lambda *shape: jax.ShapeDtypeStruct(shape, jnp.bfloat16)  # noqa: E731
    weights = [array(width, width)] * 3 + [array(width, 4 * width), array(4 * width, width)]
    closed = eliminate_dead_code(inline(jax.make_jaxpr(layer)(array(positions, width), *weights)))
    graph = build_graph(closed, Rules(), parameters=range(1, 6), losses=[0])
    region = inside(graph, (0, len(open_jaxpr(closed).eqns) - 1))
    (kept,) = kept_results(graph, region, 1, (), [6.0])
    marked = rematerialise(graph, Segments({(): ((0, len(region)),)}, kept))
    again = [graph.operators[index] for index in needed_again(marked)[0]]
    products = [op for op in again if op.matmul]
    # Scores alone are multiplied again, and no array of their size is kept.
    assert [graph.values[op.results[0]].shape for op in products if op.results[0] is not None] == [
        (heads, positions, positions)
    ]
    assert any(op.name == "exp" for op in again)
    sizes = [graph.values[v].bytes for op in region if op.path in kept for v in op.results if v is not None]
    assert max(sizes) <= positions * 4 * width * 2
