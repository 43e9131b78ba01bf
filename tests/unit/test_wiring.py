"""Which operators have the node of what they read."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshwright.cluster import load_cluster
from meshwright.program.build import build_graph
from meshwright.program.graph import Graph
from meshwright.program.rules import Rules
from meshwright.search.intra_op import IntraOpProblem
from meshwright.search.pins import Pins


def graph_of(function: Any, *shapes: tuple[int, ...]) -> Graph:
    return build_graph(jax.make_jaxpr(function)(*(jnp.zeros(shape) for shape in shapes)), Rules())


def problem_of(graph: Graph, mesh: tuple[int, ...] = (2, 4)) -> IntraOpProblem:
    cluster = load_cluster("cpu")
    return IntraOpProblem(
        graph, cluster.logical_mesh(mesh), cluster.device, parameters=(), microbatches=1, pins=Pins(), carried=0
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


def test_what_is_read_twice_has_the_node_of_what_makes_it_if_that_follows() -> None:
    """Else it may be moved once for all its readers: a sum of two arrays may be made where both are."""

    def step(x: jax.Array, y: jax.Array) -> jax.Array:
        alone, joined = jnp.exp(x), x + y
        return jnp.sum(alone * jnp.max(alone)) + jnp.sum(joined * jnp.max(joined))

    problem = problem_of(graph_of(step, (16, 32), (16, 32)))
    values = {problem.graph.operators[problem.graph.producer[v][0]].name: v for v in problem.shared_node}
    assert set(values) == {"add"}
    assert problem.shared_node[values["add"]] != nodes(problem)["add"]


@pytest.mark.parametrize("mesh", [(8,), (2, 4)])
def test_followers_do_what_their_node_chooses(mesh: tuple[int, ...]) -> None:
    """Every choice of a node gives each of its operators an algorithm that reads what the one before it makes."""
    problem = problem_of(graph_of(lambda x: jnp.sum(jnp.tanh(jnp.exp(x) * 3.0), axis=0), (16, 32)), mesh)
    node = problem.input_node[problem.graph.inputs[0]]
    values = problem.graph.values
    for number, spec in enumerate(problem.choices[node]):
        chosen = problem.operator_choices([number if n == node else 0 for n in range(len(problem.choices))])
        for operator in problem.operators:
            choice = chosen[operator.index]
            assert choice is not None
            if problem.operator_node[operator.index] == node:
                (at,) = (i for i, v in enumerate(operator.operands) if v is not None and not values[v].constant)
                assert choice.algorithm.operands[at] == spec
