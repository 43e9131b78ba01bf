"""Ways to rematerialise a program: their numbers, and what they are."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from itertools import combinations, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshwright._jax.jaxpr import eliminate_dead_code, inline
from meshwright.planning.plan_for import plan_for
from meshwright.program.build import build_graph
from meshwright.program.graph import Graph
from meshwright.program.ladder import ALL, MIDDLE, MOST_KEPT, NONE, SELECTIVE, SELECTIVE_PRICE, Ladder, ladder_of
from meshwright.program.residuals import kept_values, needed_again
from meshwright.program.rules import Rules
from meshwright.program.segments import Segments, layer_segments, rematerialise
from meshwright.zoo import build, mlp

WIDTH = 256


def graph_of(layers: int, body: Any, *, checkpointed: bool = False) -> Graph:
    """A program of equal layers, each with a product and something cheap between."""

    def loss(x: Any, *weights: Any) -> Any:
        layer = jax.checkpoint(body) if checkpointed else body
        for w in weights:
            x = x + layer(x, w)
        return jnp.sum(x)

    data, weight = (jax.ShapeDtypeStruct((rows, WIDTH), jnp.float32) for rows in (512, WIDTH))
    closed = eliminate_dead_code(inline(jax.make_jaxpr(loss)(data, *[weight] * layers)))
    return build_graph(closed, Rules(), parameters=range(1, layers + 1), losses=[0])


def cheap_around(x: Any, w: Any) -> Any:
    return jnp.sin(jnp.cumsum(jnp.tanh(jnp.cumsum(x @ w, axis=1)), axis=1))


def kept_bytes(graph: Graph, segments: Segments) -> float:
    return sum(graph.values[v].bytes for v in kept_values(rematerialise(graph, segments)))


@pytest.fixture(scope="module")
def climbed() -> Ladder:
    graph = graph_of(8, cheap_around)
    found = ladder_of(graph, layer_segments(graph))
    assert len(found.rungs) >= 2
    assert found.segments >= 2
    return found


def towers(rows: tuple[int, ...], layers: int) -> Graph:
    """Towers of layers, each with so many rows, one after the other in the program, and what they all end in."""

    def loss(xs: Any, *weights: Any) -> Any:
        ends = []
        for x in xs:
            for w in weights:
                x = x + cheap_around(x, w)
            ends.append(jnp.mean(x, axis=0))
        return jnp.sum(jnp.stack(ends))

    shapes = [[jax.ShapeDtypeStruct((count, WIDTH), jnp.float32) for count in rows]]
    weights = [jax.ShapeDtypeStruct((WIDTH, WIDTH), jnp.float32)] * layers
    closed = eliminate_dead_code(inline(jax.make_jaxpr(loss)(*shapes, *weights)))
    first = len(rows)
    return build_graph(closed, Rules(), parameters=range(first, first + layers), losses=[0])


def test_a_wide_tower_is_cut_behind_a_narrow_one() -> None:
    """Between 192 equations of a narrow tower fewer bytes cross than anywhere in the wide one."""
    graph = towers((64, 4096), layers=32)
    tower = (1 + max(operator.path[0] for operator in graph.operators)) / 2
    lengths = [stop - start for start, stop in layer_segments(graph)[()] if start > tower]
    assert len(lengths) >= 4
    assert max(lengths) <= tower / 4


def held_bytes(graph: Graph, runs: Sequence[tuple[int, int]]) -> float:
    """What segments hold: values that cross a border, each once, and the inside that an average byte inside is in; and
    a little for every border that a value crosses."""
    born, dies = dict[int, int](), dict[int, int]()
    for op in graph.operators:
        born |= {v: op.path[0] for v in op.results if v is not None and graph.values[v].differentiated}
        dies |= {v: op.path[0] for v in op.operands if v in born}
    borders = [start for start, _ in runs[1:]]
    crossed = {v: sum(at < border <= dies.get(v, at) for border in borders) for v, at in born.items()}
    inside = [sum(graph.values[v].bytes for v in kept_values(graph) if a <= born.get(v, -1) < b) for a, b in runs]
    kept = sum(graph.values[v].bytes * ((count > 0) + 0.03 * count) for v, count in crossed.items())
    return kept + sum(size**2 for size in inside) / sum(inside)


@pytest.mark.parametrize("body", [lambda x, w: jnp.sin(x @ w), lambda x, w: jnp.sin(x) * (x @ w)])
def test_no_other_segments_hold_less(body: Any) -> None:
    graph = graph_of(4, body)
    equations = 1 + max(operator.path[0] for operator in graph.operators)
    every = [
        list(pairwise([0, *borders, equations]))
        for count in range(1, equations)
        for borders in combinations(range(1, equations), count)
    ]
    best = min(held_bytes(graph, runs) for runs in every)
    found = layer_segments(graph)[()]
    # A segment of one equation is none.
    whole = [0, *(start for start, _ in found[1:]), equations]
    assert held_bytes(graph, list(pairwise(whole))) == pytest.approx(best)


def test_every_number_is_another_way_and_keeps_no_more_than_the_one_before(climbed: Ladder) -> None:
    graph = graph_of(8, cheap_around)
    ways = [climbed.at(number) for number in range(climbed.top + 1)]
    assert ways[0] == Segments()
    assert len({(tuple(sorted(one.runs.items())), one.kept) for one in ways}) == len(ways)
    kept = [kept_bytes(graph, one) for one in ways]
    assert kept == sorted(kept, reverse=True)
    assert kept[climbed.top] < kept[climbed.number(SELECTIVE)] < kept[0]


def test_shares_and_numbers_are_the_same_places(climbed: Ladder) -> None:
    assert [climbed.number_at(share) for share in (0.0, MIDDLE, 1.0)] == [
        climbed.number(one) for one in (NONE, SELECTIVE, ALL)
    ]
    for number in range(climbed.top + 1):
        assert climbed.number_at(climbed.share_of(number)) == number
    # What is computed may be nearly nothing, and is never less.
    assert climbed.number_at(1e-9) == 1
    assert climbed.number_at(MIDDLE + 1e-9) == climbed.number(SELECTIVE) + 1


def test_equal_shares_are_equal_bytes(climbed: Ladder) -> None:
    graph = graph_of(8, cheap_around)
    nothing, middle, least = (kept_bytes(graph, climbed.at(number)) for number in (NONE, SELECTIVE, ALL))
    for number in range(climbed.top + 1):
        kept = kept_bytes(graph, climbed.at(number))
        lower = MIDDLE * (nothing - kept) / (nothing - middle)
        upper = MIDDLE + (1 - MIDDLE) * (middle - kept) / (middle - least)
        expected = lower if number <= climbed.number(SELECTIVE) else upper
        assert climbed.share_of(number) == pytest.approx(expected, abs=0.02)


def test_the_middle_is_the_rung_of_its_price_where_there_is_no_higher_one() -> None:
    graph = graph_of(8, cheap_around)
    one = ladder_of(graph, layer_segments(graph), prices=[SELECTIVE_PRICE])
    assert len(one.rungs) == 2
    assert one.number(SELECTIVE) == one.segments < one.top


def test_the_first_segments_are_a_rung_higher(climbed: Ladder) -> None:
    count = climbed.segments
    for number in (1, count, count + 1, climbed.top):
        above, below, first = climbed.levels(number)
        assert below * count + first == number
        assert above == below + (first > 0)
        ways = [climbed.at(rung * count) for rung in (above, below)]
        assert climbed.at(number).kept <= ways[0].kept | ways[1].kept


def test_what_goes_at_one_price_goes_one_after_the_other_where_there_are_few_segments() -> None:
    """A loop is one segment: eight equal products in its body are not all made again where one would do."""

    def loss(x: Any, weights: Any) -> Any:
        def layer(x: Any, rows: Any) -> tuple[Any, None]:
            return x + sum(jnp.sin(x @ w) for w in rows), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    # Sums so long that they are dear: with 256 terms products are cheap at any price of a ladder.
    shapes = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((64, 4096), (4, 8, 4096, 4096))]
    closed = eliminate_dead_code(inline(jax.make_jaxpr(loss)(*shapes)))
    graph = build_graph(closed, Rules(), parameters=(1,), losses=[0])
    ladder = ladder_of(graph, layer_segments(graph))

    def products(number: int) -> int:
        marked = rematerialise(graph, ladder.at(number))
        return sum(marked.operators[index].matmul for index in needed_again(marked)[0])

    assert [products(number) for number in range(1, ladder.top + 1)] == list(range(9))


def test_what_saves_nothing_is_no_rung() -> None:
    """What is kept of layers that are products is the product of each."""
    graph = graph_of(8, lambda x, w: x @ w)
    one = ladder_of(graph, layer_segments(graph))
    kept = [kept_bytes(graph, one.at(rung * one.segments)) for rung in range(len(one.rungs) + 1)]
    assert all(above <= MOST_KEPT * below for below, above in pairwise(kept))
    products = ladder_of(graph, {(): ((0, 2), (2, 4))}, prices=[SELECTIVE_PRICE])
    assert len(products.rungs) == 1
    assert products.number(SELECTIVE) == products.top
    assert Ladder(()).at(ALL) == Segments()
    assert [Ladder(()).number_at(share) for share in (0.0, 0.5, 1.0)] == [0, 0, 0]


def test_arrays_without_elements_are_on_a_ladder_too() -> None:
    def loss(x: Any, weights: Any) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            nothing = jnp.sin(x[:0] @ w) * jnp.sin(x[:0])
            return cheap_around(x, w) + jnp.sum(nothing), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, WIDTH), (4, WIDTH, WIDTH))]
    closed = eliminate_dead_code(inline(jax.make_jaxpr(loss)(*shapes)))
    graph = build_graph(closed, Rules(), parameters=(1,), losses=[0])
    ladder = ladder_of(graph, layer_segments(graph))
    kept = [kept_bytes(graph, ladder.at(number)) for number in range(ladder.top + 1)]
    assert kept == sorted(kept, reverse=True)
    assert kept[-1] < kept[0]


def test_of_the_users_own_checkpoints_nothing_is_kept() -> None:
    """They make what enters them again in any case, so that keeping it would save nothing."""
    graph = graph_of(8, cheap_around, checkpointed=True)
    assert len(ladder_of(graph, layer_segments(graph)).rungs) < 2


def test_calls_that_read_weights_in_loops_have_no_lower_rung() -> None:
    """Outside of what is rematerialised, the weights that they gather would be kept for all trips."""

    @jax.custom_vjp
    def product(x: Any, w: Any) -> Any:
        return x @ w

    product.defvjp(lambda x, w: (x @ w, (x, w)), lambda kept, g: (g @ kept[1].T, kept[0].T @ g))

    def loss(x: Any, weights: Any, *, reads_weights: bool) -> Any:
        def layer(x: Any, w: Any) -> tuple[Any, None]:
            y = cheap_around(x, w)
            return x + (product(y, w) if reads_weights else product(y, jnp.cumsum(jnp.sin(y[:WIDTH]), axis=0))), None

        return jnp.sum(jax.lax.scan(layer, x, weights)[0])

    shapes = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((512, WIDTH), (4, WIDTH, WIDTH))]
    rungs = []
    for reads_weights in (True, False):
        closed = eliminate_dead_code(inline(jax.make_jaxpr(partial(loss, reads_weights=reads_weights))(*shapes)))
        graph = build_graph(closed, Rules(), parameters=(1,), losses=[0])
        ladder = ladder_of(graph, layer_segments(graph), prices=[SELECTIVE_PRICE], most_kept=10.0)
        rungs.append(len(ladder.rungs))
    assert rungs == [1, 2]


def test_products_do_not_run_again_on_the_lower_rung(climbed: Ladder) -> None:
    graph = graph_of(8, cheap_around)

    def products(number: int) -> int:
        marked = rematerialise(graph, climbed.at(number))
        return sum(marked.operators[index].matmul for index in needed_again(marked)[0])

    assert products(climbed.number(SELECTIVE)) == 0 < products(climbed.top)


@pytest.mark.parametrize(
    ("name", "stages"),
    # Stages of convolutions have no other segments than the whole.
    [("wresnet-tiny", 1), ("mlp", 1), ("mlp", 2), pytest.param("wresnet-tiny", 2, marks=pytest.mark.slow)],
)
def test_selective_is_planned_where_there_is_no_lower_rung(name: str, stages: int) -> None:
    """As everything is, for stages in which no segment has one."""
    target = mlp(layers=4, width=32, batch=64) if name == "mlp" else build(name)
    plan = partial(
        plan_for, target.step, (target.example_state, target.example_batch), cluster="p3.16xlarge:1", stages=stages,
        microbatches=2,
    )  # fmt: skip
    assert plan(remat="selective").step_seconds < 1.2 * plan(remat="layer").step_seconds
