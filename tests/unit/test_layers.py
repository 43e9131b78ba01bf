"""Layers: where a program is cut, its scans before, and the graph of a range."""

from __future__ import annotations

from collections.abc import Callable
from itertools import combinations, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType

from meshwright._jax.jaxpr import eliminate_dead_code, evaluate, inline, open_jaxpr
from meshwright.errors import PlanError
from meshwright.program.build import build_graph
from meshwright.program.cut import Cutter, HeldParameter
from meshwright.program.graph import Graph
from meshwright.program.layers import cluster_layers, crossing_bytes, equation_flops
from meshwright.program.rules import Rules
from meshwright.program.scan_split import split_scans, stacked_rows, trips_for_layers
from meshwright.program.segments import layer_segments
from meshwright.program.stacked import StackedRows
from meshwright.program.staged import staged_program
from meshwright.program.trace import trace_program
from meshwright.zoo import registry


def graph_of(function: Callable[..., Any], *args: Any, parameters: tuple[int, ...] = ()) -> tuple[Graph, int, Any]:
    closed = eliminate_dead_code(inline(jax.make_jaxpr(function)(*args)))
    graph = build_graph(closed, Rules(), parameters=parameters, losses=[0] if parameters else [])
    return graph, len(open_jaxpr(closed).eqns), closed


def chain(x: Any, *weights: Any) -> Any:
    for w in weights:
        x = jnp.tanh(x @ w)
    return jnp.sum(x)


def chain_graph(*widths: int) -> tuple[Graph, int]:
    weights = [jnp.ones(shape) for shape in pairwise(widths)]
    parameters = tuple(range(1, len(widths)))
    graph, count, _ = graph_of(chain, jnp.ones((4, widths[0])), *weights, parameters=parameters)
    return graph, count


# Clustering


def test_equal_blocks_become_equal_layers() -> None:
    graph, count = chain_graph(*[16] * 7)
    layers = cluster_layers(graph, count, at_most=8)
    assert [graph.operators[first].name for first, _ in layers] == ["dot_general"] * 6
    assert layers[0][0] == 0
    assert layers[-1][1] == count
    assert all(a[1] == b[0] for a, b in pairwise(layers))


@pytest.mark.parametrize("blocks", [16, 17, 18, 19, 20, 21])
def test_a_few_more_equal_blocks_than_layers_are_cut_less_evenly(blocks: int) -> None:
    """In at most 16 layers of at most 1.5 times their share 17 products cannot be cut."""
    graph, equations = chain_graph(*[32] * (blocks + 1))
    layers = cluster_layers(graph, equations)
    assert blocks / 2 <= len(layers) <= 16


def test_the_bytes_across_cuts_are_counted_with_their_cotangents() -> None:
    graph, count = chain_graph(8, 16, 4)
    # dot tanh | dot tanh sum: the cut after the first tanh is crossed by [4, 16] floats, twice.
    crossing = crossing_bytes(graph, count)
    assert crossing[0] == 0
    assert crossing[2] == 2 * 4 * 4 * 16
    assert crossing[count] == 0


def test_a_skip_crosses_every_cut_it_spans() -> None:
    def skip(x: Any, w: Any) -> Any:
        return jnp.sum(jnp.tanh(jnp.sin(x @ w)) @ w + x @ w)

    graph, count, _ = graph_of(skip, jnp.ones((4, 4)), jnp.ones((4, 4)), parameters=(1,))
    work, crossing = equation_flops(graph, count), crossing_bytes(graph, count)
    assert len(work) == count
    assert max(crossing) >= 2 * 2 * 4 * 16


@pytest.mark.parametrize("seed", range(20))
def test_cuts_are_the_best_of_their_number(seed: int) -> None:
    """Against all cuts that keep the same bounds on FLOPs."""
    generator = np.random.default_rng(seed)
    widths = generator.choice([4, 8, 16, 32], size=6)
    graph, count = chain_graph(*map(int, widths))
    work, crossing = equation_flops(graph, count), crossing_bytes(graph, count)
    at_most = 4
    layers = cluster_layers(graph, count, at_most=at_most)
    bound = 1.5 * work.sum() / at_most
    counted = np.minimum(work, 0.6 * bound)
    assert 1 <= len(layers) <= at_most

    def allowed(bounds: list[int]) -> bool:
        return all(
            (counted[a:b].sum() <= bound * (1 + 1e-9) or b - a == 1)
            and work[a:b].sum() >= 0.25 * work.sum() / at_most * (1 - 1e-9)
            for a, b in pairwise(bounds)
        )

    def cost(bounds: list[int]) -> tuple[float, float]:
        return sum(crossing[c] for c in bounds[1:-1]), sum(work[a:b].sum() ** 2 for a, b in pairwise(bounds))

    every = [[0, *cuts, count] for cuts in combinations(range(1, count), len(layers) - 1)]
    best = min(cost(bounds) for bounds in every if allowed(bounds))
    found = [0, *(b for _, b in layers)]
    assert allowed(found)
    assert cost(found) == pytest.approx(best)


def test_given_boundaries_are_the_layers() -> None:
    graph, count = chain_graph(8, 8, 8)
    assert cluster_layers(graph, count, cuts=(2,)) == ((0, 2), (2, count))


@pytest.mark.parametrize(
    ("changes", "got"),
    [({"cuts": (0,)}, "boundaries"), ({"cuts": (3, 2)}, "boundaries"), ({"at_most": 0}, "0 layers"),
     ({"cuts": (99,)}, "boundaries")],
)  # fmt: skip
def test_refused_layers(changes: dict[str, Any], got: str) -> None:
    graph, count = chain_graph(8, 8)
    with pytest.raises(PlanError) as caught:
        cluster_layers(graph, count, **changes)
    assert got in caught.value.got


def test_no_equation_makes_no_layer() -> None:
    graph, count = chain_graph(8, 8)
    with pytest.raises(PlanError, match="at least one equation"):
        cluster_layers(graph, 0)
    assert count > 0


# Scans


def scanned(reverse: bool) -> Callable[..., Any]:
    def run(x: Any, w: Any, scale: Any) -> Any:
        def body(h: Any, row: Any) -> Any:
            h = jnp.tanh(h @ row.astype(jnp.float32)) * scale
            return h, jnp.sum(h)

        h, sums = jax.lax.scan(body, x, w.astype(jnp.bfloat16), reverse=reverse)
        return jnp.sum(h) + jnp.sum(sums * jnp.arange(7.0))

    return run


@pytest.mark.parametrize(
    ("reverse", "trips"),
    [
        (False, (3, 4)), (True, (1, 5, 1)),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in ((True, (3, 4)), (False, (1, 5, 1)))),
    ],
)  # fmt: skip
def test_a_scan_in_pieces_is_the_scan(reverse: bool, trips: tuple[int, ...]) -> None:
    keys = jax.random.split(jax.random.key(0), 2)
    args = (jax.random.normal(keys[0], (2, 4)), jax.random.normal(keys[1], (7, 4, 4)), jnp.float32(0.9))
    closed = inline(jax.make_jaxpr(scanned(reverse))(*args))
    (position,) = [i for i, e in enumerate(open_jaxpr(closed).eqns) if e.primitive.name == "scan"]
    pieces = split_scans(closed, {position: trips})
    names = [e.primitive.name for e in open_jaxpr(pieces).eqns]
    assert names.count("scan") == len(trips)
    for run in (
        lambda c: evaluate(c, *args)[0],
        lambda c: jax.grad(lambda w: evaluate(c, args[0], w, args[2])[0])(args[1]),
    ):
        np.testing.assert_allclose(run(pieces), run(closed), rtol=1e-6, atol=1e-7)


def test_pieces_do_not_remember_the_mesh_of_whoever_cut_the_same_before() -> None:
    args = (jnp.ones((3, 4)), jnp.ones((7, 4, 4)), jnp.float32(1))
    closed = inline(jax.make_jaxpr(scanned(False))(*args))
    (position,) = [i for i, e in enumerate(open_jaxpr(closed).eqns) if e.primitive.name == "scan"]
    with jax.sharding.use_abstract_mesh(AbstractMesh((2,), ("x",), axis_types=(AxisType.Explicit,))):
        split_scans(closed, {position: (2, 5)})
    pieces = split_scans(closed, {position: (2, 5)})
    assert {e.ctx.cur_abstract_mesh.empty for e in open_jaxpr(pieces).eqns} == {True}


def of_parameter(first: int, last: int, dim: int = 0) -> StackedRows:
    return StackedRows(input=1, dim=dim, first=first, last=last)


def test_each_piece_reads_its_rows_of_the_parameter_though_it_is_converted() -> None:
    args = (jnp.ones((2, 4)), jnp.ones((7, 4, 4)), jnp.float32(1))
    closed = eliminate_dead_code(inline(jax.make_jaxpr(scanned(False))(*args)))
    (position,) = [i for i, e in enumerate(open_jaxpr(closed).eqns) if e.primitive.name == "scan"]
    rows = stacked_rows(split_scans(closed, {position: (3, 4)}))
    assert [rows[at] for at in sorted(rows)] == [of_parameter(0, 3), of_parameter(3, 7)]
    backwards = inline(jax.make_jaxpr(scanned(True))(*args))
    in_order = [r for _, r in sorted(stacked_rows(split_scans(backwards, {position: (3, 4)})).items())]
    assert in_order == [of_parameter(4, 7), of_parameter(0, 4)]


@pytest.mark.parametrize("order", [(0, 1, 2), (1, 0, 2), (2, 1, 0)])
def test_each_piece_reads_its_rows_of_a_parameter_that_is_stacked_on_any_dim(order: tuple[int, ...]) -> None:
    """Layers stacked on dim 1, as `nn.scan` with `in_axes=1` has them: moved to the front before the scan."""
    args = (jnp.ones((2, 4)), jnp.arange(112.0).reshape(7, 4, 4).transpose(order), jnp.float32(1))
    back = tuple(int(d) for d in np.argsort(order))
    run = scanned(False)
    closed = eliminate_dead_code(inline(jax.make_jaxpr(lambda x, w, s: run(x, w.transpose(back), s))(*args)))
    (position,) = [i for i, e in enumerate(open_jaxpr(closed).eqns) if e.primitive.name == "scan"]
    pieces = split_scans(closed, {position: (3, 4)})
    rows = stacked_rows(pieces)
    dim = order.index(0)
    assert [rows[at] for at in sorted(rows)] == [of_parameter(0, 3, dim), of_parameter(3, 7, dim)]
    np.testing.assert_allclose(evaluate(pieces, *args)[0], evaluate(closed, *args)[0], rtol=1e-6)


@pytest.mark.parametrize(
    ("trips", "got"), [({0: (1, 1)}, "equation 0"), ({3: (3, 3)}, "trips"), ({99: (1,)}, "no equation")]
)
def test_refused_splits(trips: dict[int, tuple[int, ...]], got: str) -> None:
    args = (jnp.ones((2, 4)), jnp.ones((7, 4, 4)), jnp.float32(1))
    closed = inline(jax.make_jaxpr(scanned(False))(*args))
    position = next(i for i, e in enumerate(open_jaxpr(closed).eqns) if e.primitive.name == "scan")
    with pytest.raises(PlanError) as caught:
        split_scans(closed, {position if key == 3 else key: value for key, value in trips.items()})
    assert got in caught.value.got


def test_trips_follow_the_work() -> None:
    program = small_program("llama-tiny")
    (trips,) = trips_for_layers(program.graph, 16).values()
    assert trips == (1, 1)
    assert trips_for_layers(program.graph, 1) == {}


# Cuts


def small_program(name: str) -> Any:
    target = registry.build(name)
    return trace_program(target.step, (target.example_state, target.example_batch))


@pytest.mark.parametrize("name", ["gpt-tiny", "unet-tiny", "moe-tiny", "llama-tiny"])
def test_cuts_of_a_program_fit_together(name: str) -> None:
    program = small_program(name)
    core, graph = program.core, program.graph
    trips = trips_for_layers(graph, 8)
    if trips:
        core = split_scans(core, trips)
        graph = build_graph(core, Rules(), parameters=graph.parameters, losses=[0])
    count = len(open_jaxpr(core).eqns)
    rows = stacked_rows(core)
    cutter = Cutter(graph, rows)
    layers = cluster_layers(graph, count, at_most=8)
    assert len(layers) > 1
    cuts = [cutter.cut(*layer) for layer in layers]
    operators = [i for cut in cuts for i in cut.operators]
    left_out = {op.index for op in graph.operators} - set(operators)
    # Every operator is in a cut, but for slices of parameters and constants that nobody reads.
    assert all(
        graph.operators[i].path[0] in rows or graph.values[graph.operators[i].results[0]].constant for i in left_out
    )
    again = {e for cut in cuts for e in cut.repeated}
    once = [i for i in operators if graph.operators[i].path[0] not in again]
    assert len(once) == len(set(once))
    sent: set[int] = set()
    for cut in cuts:
        assert set(cut.received) <= sent
        sent |= set(cut.sent)
        small = cut.graph
        known = set(small.inputs) | {v.index for v in small.values if v.constant}
        for op in small.operators:
            if not op.is_link and len(op.path) == 1:
                assert all(v is None or v in known for v in op.operands)
            known.update(v for v in op.results if v is not None)
    assert {i for cut in cuts for i in cut.program_outputs} == {0}
    held = [h for cut in cuts for h in cut.parameters]
    assert {h.parameter for h in held} == set(range(len(graph.parameters)))
    flops = sum(cut.graph.flops for cut in cuts)
    assert flops == pytest.approx(graph.flops)


def test_rows_are_the_stage_s_own_parameter() -> None:
    program = small_program("llama-tiny")
    core = split_scans(program.core, trips_for_layers(program.graph, 16))
    graph = build_graph(core, Rules(), parameters=program.graph.parameters, losses=[0])
    cutter = Cutter(graph, stacked_rows(core))
    layers = cluster_layers(graph, len(open_jaxpr(core).eqns))
    first, second = (cutter.cut(*layer) for layer in layers[:2])
    stacked = [h for h in second.parameters if h.rows is not None]
    assert {(h.rows.first, h.rows.last) for h in stacked if h.rows is not None} == {(1, 2)}
    assert {(h.rows.first, h.rows.last) for h in first.parameters if h.rows is not None} == {(0, 1)}
    assert {h.parameter for h in stacked} == {h.parameter for h in first.parameters if h.rows is not None}
    assert not any(op.name == "slice" and len(op.path) == 1 for op in second.graph.operators)


def test_equal_blocks_have_equal_fingerprints() -> None:
    graph, count = chain_graph(*[16] * 7)
    cutter = Cutter(graph)
    cuts = [cutter.cut(*layer) for layer in cluster_layers(graph, count, at_most=8)]
    assert len({cut.fingerprint for cut in cuts[1:-1]}) == 1
    assert len({cut.fingerprint for cut in cuts}) == 3
    # The first block's input is not differentiated.
    assert cuts[0].fingerprint != cuts[1].fingerprint


def test_constants_are_made_again_and_skips_are_received_from_their_producer() -> None:
    def loss(x: Any, w: Any) -> Any:
        mask = jnp.tril(jnp.ones((4, 4)))
        a = (x @ w) * mask
        b = jnp.tanh(a @ w)
        c = jnp.sin(b @ w)
        return jnp.sum((c @ w) * mask + a)

    graph, count, _ = graph_of(loss, jnp.ones((4, 4)), jnp.ones((4, 4)), parameters=(1,))
    products = [op.path[0] for op in graph.operators if op.name == "dot_general"]
    cutter = Cutter(graph)
    bounds = [0, products[1], products[3], count]
    first, middle, last = (cutter.cut(*pair) for pair in pairwise(bounds))
    (skip,) = set(first.sent) & set(last.received)
    assert skip in middle.received
    assert graph.values[skip].name == "mul"
    assert last.repeated
    assert all(h == HeldParameter(parameter=0) for cut in (first, middle, last) for h in cut.parameters)
    assert not middle.repeated
    assert [graph.values[v].constant for v in last.received] == [False] * len(last.received)


def test_inputs_that_nothing_reads_belong_to_the_first_range() -> None:
    graph, count, _ = graph_of(lambda x, w, idle: jnp.sum(jnp.tanh(x @ w)), *[jnp.ones((4, 4))] * 3, parameters=(1, 2))
    cutter = Cutter(graph)
    assert [h.parameter for h in cutter.cut(0, 1).parameters] == [0, 1]
    assert cutter.cut(1, count).parameters == ()
    assert len(cutter.cut(0, count).graph.inputs) == 3


def test_segments_of_a_range_are_those_of_the_same_range_at_the_beginning() -> None:
    """Where a range begins says nothing about where it is best cut for rematerialisation."""

    def deep(x: Any, *weights: Any) -> Any:
        for w in weights:
            x = x + jnp.tanh(jnp.exp(jnp.sin(x @ w)) @ w.T)
        return jnp.mean(x)

    weights = [jnp.ones((8, 32))] * 64
    graph, count, _ = graph_of(deep, jnp.ones((64, 8)), *weights, parameters=tuple(range(1, 65)))
    layers = cluster_layers(graph, count, at_most=64)
    start, end = layers[-7][0], layers[-1][0]
    assert start > 200
    found = layer_segments(Cutter(graph, {}).cut(start, end).graph)
    assert found
    assert all(start <= a < b <= end for a, b in found[()])
    assert len(found[()]) >= 3


@pytest.mark.parametrize("name", ["gpt-tiny", "llama-tiny", "moe-tiny"])
def test_a_step_is_cut_alike_in_any_number_of_microbatches(name: str) -> None:
    def traced(microbatches: int) -> Any:
        target = registry.build(name, global_batch=8)
        return trace_program(target.step, (target.example_state, target.example_batch), microbatches=microbatches)

    few = staged_program(traced(2), layers=5)
    alike = staged_program(traced(4), like=[few])
    assert (alike.microbatches, alike.layers, alike.scan_splits) == (4, few.layers, few.scan_splits)
    assert alike.rows == few.rows
    assert alike.piece_starts == few.piece_starts
    # What is made of other equations is cut as itself.
    other = registry.build("mlp-tiny", global_batch=8)
    program = trace_program(other.step, (other.example_state, other.example_batch), microbatches=2)
    assert staged_program(program, like=[few]).layers == staged_program(program).layers
