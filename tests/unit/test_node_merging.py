"""Which operators have the node of what they read."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshwright import zoo
from meshwright._jax.jaxpr import inline, open_jaxpr
from meshwright.cluster import load_cluster
from meshwright.cost.compute import elementwise_seconds
from meshwright.program.build import build_graph
from meshwright.program.cut import Cutter
from meshwright.program.graph import Graph
from meshwright.program.residuals import kept_values
from meshwright.program.rules import Rules
from meshwright.program.traces import Traces
from meshwright.search.intra import problem as intra_op
from meshwright.search.intra.node_merging import node_merging_of_one_program
from meshwright.search.intra.problem import IntraOpProblem, ParameterInfo
from meshwright.search.restrictions.constraints import Constraints
from meshwright.search.stages.problem import StageProblem


def graph_of(function: Any, *shapes: tuple[int, ...]) -> Graph:
    return build_graph(jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes)), Rules())


def problem_of(graph: Graph, mesh: tuple[int, ...] = (2, 4)) -> IntraOpProblem:
    cluster = load_cluster("cpu")
    return IntraOpProblem(
        graph,
        cluster.logical_mesh(mesh),
        cluster.device,
        parameters=(),
        microbatches=1,
        constraints=Constraints(),
        carried=0,
    )


def nodes(problem: IntraOpProblem) -> dict[str, int]:
    """Of each kind of operator the node of its last."""
    return {operator.name: problem.operator_node[operator.index] for operator in problem.operators}


def test_a_chain_has_the_node_of_what_it_begins_with() -> None:
    problem = problem_of(graph_of(lambda x: jnp.exp(-jnp.sin(x)) * 2.0, (16, 32)))
    (value,) = problem.graph.inputs
    assert set(nodes(problem).values()) == {problem.input_node[value]}
    assert not problem.moves[:-1]  # but for the output, which is in no layout yet


def test_what_makes_more_or_reads_two_does_not_follow() -> None:
    """A product has other layouts, a broadcast makes more than it reads, and a sum of two arrays joins them."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        y = x @ w
        return jnp.tanh(y) + jnp.cos(x) * jnp.broadcast_to(jnp.sin(w[:1]), (16, 16))

    found = nodes(problem_of(graph_of(step, (16, 16), (16, 16))))
    apart = [found[name] for name in ("dot_general", "broadcast_in_dim", "add", "cos", "tanh")]
    assert len(set(apart)) == len(apart)
    assert found["mul"] not in (found["cos"], found["add"])


def test_a_reduction_follows_and_what_reads_it_does_not() -> None:
    """Its result may be left as summands, in which nobody reads it."""
    problem = problem_of(graph_of(lambda x: jnp.sqrt(jnp.sum(jnp.exp(x), axis=1)), (16, 32)))
    found = nodes(problem)
    assert found["reduce_sum"] == found["exp"] == problem.input_node[problem.graph.inputs[0]]
    assert found["sqrt"] != found["reduce_sum"]


def test_what_all_readers_follow_is_not_moved_for_them() -> None:
    """All but one may follow; and a sum of two arrays may be made where both are, and then moved."""

    def step(x: jax.Array, y: jax.Array, w: jax.Array) -> jax.Array:
        once, twice, joined = jnp.exp(x), jnp.tan(x), x + y
        return jnp.sum(once) + jnp.sum(once @ w) + jnp.sum(twice @ w) + jnp.sum(twice @ w.T) + jnp.sum(joined * joined)

    problem = problem_of(graph_of(step, (16, 32), (16, 32), (32, 32)))
    graph = problem.graph
    moved = {graph.operators[graph.producer[value][0]].name for value in problem.shared_node}
    assert moved == {"tan", "add"}
    found = nodes(problem)
    assert found["exp"] == problem.input_node[graph.inputs[0]]


def test_what_is_narrowed_and_read_by_several_is_moved_once_for_them() -> None:
    """Of a cast the result is half as large: it is moved by itself, not what is cast, nor once for each reader."""

    def step(x: jax.Array, *weights: jax.Array) -> list[jax.Array]:
        narrow = x.astype(jnp.bfloat16)
        return [narrow @ w.astype(jnp.bfloat16) for w in weights]

    problem = problem_of(graph_of(step, (64, 64), (64, 512), (64, 512), (64, 512)), (8,))
    graph = problem.graph
    assert {graph.operators[graph.producer[value][0]].name for value in problem.shared_node} == {"convert_element_type"}


def test_what_followers_of_a_received_value_keep_is_kept_for_each_microbatch() -> None:
    """A running sum follows what the stage receives, of which nothing is kept, and what it makes is."""

    def step(x: jax.Array, w: jax.Array) -> jax.Array:
        return jnp.sum(jnp.tanh(jax.lax.cumsum(2.0 * x, 1)) * w)

    closed = inline(jax.make_jaxpr(step)(jnp.zeros((16, 15)), jnp.zeros((16, 15))))
    graph = build_graph(closed, Rules(), parameters=[0, 1], losses=[0])
    cut = Cutter(graph).cut(1, len(open_jaxpr(closed).eqns))
    cluster = load_cluster("cpu")
    problem = StageProblem(
        cut, cut.graph, cluster.logical_mesh((8,)), cluster.device,
        parameters=[ParameterInfo(name="w", optimizer_bytes=0.0)], microbatches=4, constraints=Constraints(),
        split_dims=(),
    )  # fmt: skip
    (received,) = (v for v in cut.graph.inputs if v not in [cut.graph.inputs[p] for p in cut.graph.parameters])
    node = problem.input_node[received]
    following = [operator.name for operator in problem.operators if problem.operator_node[operator.index] == node]
    assert {"cumsum", "tanh"} <= set(following)
    (kept,) = kept_values(cut.graph) & cut.graph.producer.keys()
    assert cut.graph.operators[cut.graph.producer[kept][0]].name == "cumsum"
    for number, spec in enumerate(problem.choices[node]):
        choices = [number if n == node else 0 for n in range(len(problem.choices))]
        problem.in_flight = 1
        one = problem.problem(float("inf")).memory_of(choices)
        problem.in_flight = 2
        assert problem.problem(float("inf")).memory_of(choices) - one >= 4 * 16 * 15 / spec.shards(problem.sizes)
    assert not problem.least_input_bytes[:, 1].any()


def test_what_a_node_makes_and_reads_in_another_layout_is_paid_for() -> None:
    """A sum of what is split is left as summands, and read as a number by what follows the same array."""
    problem = problem_of(graph_of(lambda x: jax.lax.clamp(jnp.sum(x), x, 9.0), (16, 32)), (8,))
    (value,) = problem.graph.inputs
    node, found = problem.input_node[value], nodes(problem)
    assert found["reduce_sum"] == found["clamp"] == node
    inside = [one for one in problem.moves if one.source == one.target == node]
    (move,) = (one for one in inside if one.value not in problem.graph.outputs)
    numbers = problem.problem(float("inf"))
    for number, spec in enumerate(problem.choices[node]):
        summed = problem.prices.collective("all_reduce", 4.0, ["x"]) if spec.sharded_axes else 0.0
        table = problem.prices.conversion_table(
            move.sources, move.targets, 4.0, forward_runs=1, differentiated=False
        )  # fmt: skip
        assert table[number, number] == pytest.approx(summed)
        others = sum(problem.operator_prices[one.index].seconds(1, 1)[number] for one in problem.operators)
        written = elementwise_seconds(4 * 16 * 32 / spec.shards(problem.sizes), problem.prices.device)
        assert numbers.objective([number]) == pytest.approx(written + others + summed)


@pytest.mark.parametrize("mesh", [(8,), (2, 4)])
def test_followers_do_what_their_node_chooses(mesh: tuple[int, ...]) -> None:
    """Every choice of a node gives each of its operators an algorithm that reads what the one before it makes."""
    problem = problem_of(graph_of(lambda x: jnp.sum(jnp.tanh(jnp.exp(x) * 3.0), axis=0), (16, 32)), mesh)
    node = problem.input_node[problem.graph.inputs[0]]
    values = problem.graph.values
    assert set(problem.operator_node.values()) == {node}
    for number, spec in enumerate(problem.choices[node]):
        chosen = problem.operator_choices([number if n == node else 0 for n in range(len(problem.choices))])
        for operator in problem.operators:
            choice = chosen[operator.index]
            assert choice is not None
            (at,) = (i for i, v in enumerate(operator.operands) if v is not None and not values[v].constant)
            assert choice.algorithm.operands[at] == spec


@pytest.mark.parametrize(("name", "most"), [("wresnet-tiny", 0.6), ("gpt-tiny", 0.75)])
def test_models_have_fewer_nodes_by_their_followers(name: str, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    target = zoo.build(name, global_batch=8)
    graph = Traces(target.step).program((target.example_state, target.example_batch)).graph
    infos = [ParameterInfo(name=graph.values[graph.inputs[p]].name, optimizer_bytes=0.0) for p in graph.parameters]
    cluster = load_cluster("cpu")

    def count() -> int:
        return len(
            IntraOpProblem(
                graph, cluster.logical_mesh((2, 4)), cluster.device, parameters=infos, microbatches=1,
                constraints=Constraints(),
                carried=0,
            ).choices
        )  # fmt: skip

    with_followers = count()
    monkeypatch.setattr(
        intra_op,
        "node_merging_of_one_program",
        lambda *args, **options: replace(node_merging_of_one_program(*args, **options), merged_into={}),
    )
    assert with_followers <= most * count()


def test_rows_of_a_loop_are_gathered_in_the_loop() -> None:
    """Gathered before it, the parameters of all trips would be there, which no node counts."""
    target = zoo.build("llama-tiny", global_batch=64)
    graph = Traces(target.step).program((target.example_state, target.example_batch)).graph
    infos = [ParameterInfo(name=graph.values[graph.inputs[p]].name, optimizer_bytes=8.0) for p in graph.parameters]
    cluster = load_cluster("p4d.24xlarge:1")
    problem = IntraOpProblem(
        graph, cluster.logical_mesh((8,)), cluster.device, parameters=infos, microbatches=1,
        constraints=Constraints(zero=3), carried=0,
    )  # fmt: skip
    found = problem.solve(cluster.device.memory_bytes)
    stored = {graph.inputs[p]: one.use for p, one in zip(graph.parameters, found.parameters, strict=True)}
    rows = [op for op in graph.operators if op.name == "scan_slice" and op.operands[0] in stored]
    assert any(stored[op.operands[0]].sharded_axes for op in rows)
    for operator in rows:
        choice = found.operators[operator.index]
        assert choice is not None
        assert set(stored[operator.operands[0]].sharded_axes) <= set(choice.algorithm.operands[0].sharded_axes)
