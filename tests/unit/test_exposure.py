"""Collectives of parameters that run beside compute: what is hidden, where, and how much."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright import zoo
from meshwright.cluster import load_cluster
from meshwright.cost.efficiency import profile_of
from meshwright.planning.plan_for import plan_for
from meshwright.program.graph import Graph
from meshwright.program.traces import Traces
from meshwright.report.why import why
from meshwright.search.prices.exposure import reading_products
from meshwright.search.prices.operators import prices_of
from meshwright.search.prices.spec_row import SpecRow
from meshwright.sharding import Spec

HOPPER, AMPERE, VOLTA, TPU = (load_cluster(name) for name in ("dgx-h100", "dgx-a100-80", "p3.16xlarge:1", "tpu-v5e"))
WIDTH, ROWS = 64, 256
FLOPS = 2 * ROWS * WIDTH * WIDTH


def graph_of(loss: Callable[..., Any], *shapes: tuple[int, ...]) -> Graph:
    def step(params: Any, x: Any) -> Any:
        value, grads = mw.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    arrays = [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in shapes]
    return Traces(step).program((tuple(arrays), jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32))).graph


def test_products_that_read_a_cast_of_a_parameter_read_the_parameter() -> None:
    def loss(params: Any, x: Any) -> Any:
        first, second, scale = params
        x = jnp.tanh(x.astype(jnp.bfloat16) @ first.astype(jnp.bfloat16)).astype(jnp.float32)
        return jnp.sum((x @ second + x @ second.T) * scale)

    graph = graph_of(loss, (WIDTH, WIDTH), (WIDTH, WIDTH), (WIDTH,))
    first, second, scale = (graph.inputs[position] for position in graph.parameters)
    products = reading_products(graph)
    (cast,) = (op.results[0] for op in graph.operators if op.operands[:1] == (first,))
    # In the type that the product has; of two that read one parameter the longer.
    assert products[first] == products[cast] == (FLOPS, "bfloat16")
    assert products[second] == (FLOPS, "float32")
    assert scale not in products


def test_no_product_counts_for_more_than_its_own_flops() -> None:
    def loss(params: Any, x: Any) -> Any:
        left, right, free, scaled = params
        x = x @ jnp.concatenate([left, right], axis=1)
        x = x @ ((free - jnp.mean(free)) / jnp.std(free))
        return jnp.sum(jnp.tanh(x) @ (scaled / jnp.linalg.norm(scaled)))

    graph = graph_of(loss, (WIDTH, WIDTH // 4), (WIDTH, 3 * WIDTH // 4), (WIDTH, WIDTH), (WIDTH, WIDTH))
    products = reading_products(graph)
    left, right, *whole = (products[graph.inputs[position]].flops for position in graph.parameters)
    assert (left, right) == (FLOPS / 4, 3 * FLOPS / 4)
    assert all(0.99 * FLOPS < flops <= FLOPS for flops in whole)


def test_what_is_gathered_before_a_loop_does_not_run_beside_its_body() -> None:
    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda x, w: (jnp.tanh(x @ w), None), x, params[0])[0])

    graph = graph_of(loss, (4, WIDTH, WIDTH))
    products = reading_products(graph)
    (row,) = (op.results[0] for op in graph.operators if op.name == "scan_slice")
    assert products == {row: (FLOPS, "float32")}
    prices = prices_of(HOPPER.logical_mesh((8,), ("x",)), HOPPER.device)
    alone = prices.exposure(graph, row)
    assert alone.sums > 0.0 == alone.whole_sums  # beside the next trip, if they are scattered
    assert alone.of_sum(1.0, is_scattered=False) == 1.0
    assert alone.starts == 1.0  # there is nothing else to join it with in a trip


@pytest.mark.parametrize(("width", "hidden"), [(2**11, False), (2**12, True)])
def test_gathers_of_a_trip_that_are_joined_into_one_run_before_it(width: int, hidden: bool) -> None:
    """XLA joins gathers up to 30 MiB: here two of 8 or 32 MiB each."""

    def loss(params: Any, x: Any) -> Any:
        def layer(x: Any, each: Any) -> Any:
            return jnp.tanh(x @ each[0].astype(jnp.bfloat16) @ each[1].astype(jnp.bfloat16)), None

        return jnp.sum(jax.lax.scan(layer, (x @ params[2]).astype(jnp.bfloat16), params[:2])[0].astype(jnp.float32))

    graph = graph_of(loss, (4, width, width), (4, width, width), (WIDTH, width))
    casts = [
        op.results[0] for op in graph.operators
        if op.name == "convert_element_type" and op.results[0] is not None
        and graph.values[op.results[0]].shape == (width, width)
    ]  # fmt: skip
    prices = prices_of(HOPPER.logical_mesh((8,), ("x",)), HOPPER.device)
    assert casts
    assert [prices.exposure(graph, cast).gathers > 0 for cast in casts] == [hidden] * len(casts)


def test_what_a_loop_reads_in_all_trips_is_in_it_too() -> None:
    def loss(params: Any, x: Any) -> Any:
        return jnp.sum(jax.lax.scan(lambda x, _: (jnp.tanh(x @ params[0]), None), x, None, length=4)[0])

    graph = graph_of(loss, (WIDTH, WIDTH))
    (inside,) = (op.results[0] for op in graph.operators if op.name == "scan_const" and op.operands[0] != 0)
    exposure = prices_of(HOPPER.logical_mesh((8,), ("x",)), HOPPER.device).exposure(graph, inside)
    assert (exposure.gathers, exposure.sums, exposure.starts) == (0.0, 0.0, 1.0)  # trips add its gradients up


def test_small_collectives_share_starts() -> None:
    def loss(params: Any, x: Any) -> Any:
        weight, large, rows, biases = params
        x = jax.lax.scan(lambda x, one: (x @ one[0] + one[1], None), x, (rows, biases))[0]
        return jnp.sum(jnp.tanh(x @ weight) @ large)

    shapes = ((WIDTH, WIDTH), (WIDTH, 2**17), (4, WIDTH, WIDTH), (4, WIDTH))
    graph = graph_of(loss, *shapes)
    weight, large, *_ = (graph.inputs[position] for position in graph.parameters)
    rows = [op.results[0] for op in graph.operators if op.name == "scan_slice"]
    for cluster, few in ((HOPPER, 1 / 8), (AMPERE, 1 / 8), (TPU, 1.0)):
        prices = prices_of(cluster.logical_mesh((8,), ("x",)), cluster.device)
        starts = [prices.exposure(graph, value).starts for value in (weight, large, *rows)]
        assert starts == [few, 1.0, *[0.5 if few < 1 else 1.0] * 2]
    assert prices_of(HOPPER.logical_mesh((8,), ("x",)), HOPPER.device).exposure(graph, graph.outputs[0]).starts == 1.0


@pytest.mark.parametrize("cluster", [HOPPER, AMPERE, VOLTA, TPU])
def test_a_gather_and_a_sum_cost_what_they_are_longer_than_products(cluster: Any) -> None:
    graph = graph_of(lambda params, x: jnp.sum(jnp.tanh(x @ params[0])), (WIDTH, WIDTH))
    weight = graph.inputs[graph.parameters[0]]
    prices, profile = prices_of(cluster.logical_mesh((8,), ("x",)), cluster.device), profile_of(cluster.device)
    product = FLOPS / 8 / cluster.device.achievable_flops("float32")
    rows, whole = SpecRow([Spec((("x",), ()))]), SpecRow([Spec(((), ()), broadcast=frozenset({"x"}))])
    for size in (1.0, 2.0**14, 2.0**30):

        def seconds(size: float = size, **options: Any) -> float:
            exposure = prices.exposure(graph, weight)
            return prices.conversion_table(rows, whole, size, differentiated=True, exposure=exposure, **options).item()

        saved = 1 - prices.exposure(graph, weight).starts
        gather, scatter = (
            prices.collective(kind, size, ("x",)) - saved * prices.collective(kind, 1e-9, ("x",))
            for kind in ("all_gather", "reduce_scatter")
        )
        waited = gather - profile.hidden_weights * min(gather, product)
        assert seconds(forward_runs=1, backward=False) == pytest.approx(waited)
        for runs in (1, 2):  # gathered again, the two share the products of the backward pass
            summed = scatter - profile.hidden_gradients * min(scatter, 2 * product / runs)
            assert seconds(forward_runs=runs) == pytest.approx(runs * waited + summed)
    assert (profile.hidden_weights > 0, profile.hidden_gradients > 0) == (
        cluster is not VOLTA,
        cluster in (HOPPER, AMPERE),
    )


@pytest.mark.parametrize(
    ("preset", "microbatches", "cluster", "hides"),
    [
        ("zero(stage=3)", 2, HOPPER, True), ("zero(stage=3)", 1, TPU, True), ("zero(stage=3)", 1, AMPERE, True),
        ("zero(stage=3)", 1, VOLTA, False),
        ("data_parallel", 1, HOPPER, True),
        # Behind a loop over microbatches nothing runs beside sums.
        ("data_parallel", 2, HOPPER, False), ("data_parallel", 1, TPU, False),
    ],
)  # fmt: skip
def test_plans_say_what_runs_beside_compute(preset: str, microbatches: int, cluster: Any, hides: bool) -> None:
    target = zoo.mlp(width=2048, layers=2, batch=2**14)
    found = plan_for(
        target.step, (target.example_state, target.example_batch), cluster=cluster, preset=preset,
        microbatches=microbatches,
    )  # fmt: skip
    told = why(found.plan)
    assert told is not None
    (rank,) = told.ranks
    assert (rank.hidden > 0.05 * rank.compute) == hides
    assert (rank.hidden > 0) == hides
    assert rank.hidden <= rank.compute


# Each preset on one cluster, each cluster with one preset.
@pytest.mark.parametrize(
    ("cluster", "preset"),
    [
        pytest.param(cluster, preset, marks=[pytest.mark.slow] * (preset != own and cluster is not HOPPER))
        for cluster, own in (
            (HOPPER, "data_parallel"), (AMPERE, "zero(stage=1)"), (VOLTA, "zero(stage=3)"), (TPU, "zero(stage=3)")
        )
        for preset in ("data_parallel", "zero(stage=1)", "zero(stage=3)")
    ],
)  # fmt: skip
def test_what_is_counted_is_what_is_priced(preset: str, cluster: Any) -> None:
    """Of many small parameters: collectives that the plan counts take what the step waits for and what is hidden."""

    def loss(params: Any, x: Any) -> Any:
        for weight, bias in zip(params["w"], params["b"], strict=True):
            x = jnp.tanh(x @ weight + bias)
        return jnp.sum(x**2)

    def step(params: Any, x: Any) -> Any:
        value, grads = mw.value_and_grad(loss)(params, x)
        return jax.tree.map(lambda p, g: p - g, params, grads), value

    shapes = {"w": (512, 512), "b": (512,)}
    params = {name: [jax.ShapeDtypeStruct(shape, jnp.float32)] * 20 for name, shape in shapes.items()}
    x = jax.ShapeDtypeStruct((2**13, 512), jnp.float32)
    stage = plan_for(step, (params, x), cluster=cluster, preset=preset, microbatches=1).plan.stages[0]
    told = why(plan_for(step, (params, x), cluster=cluster, preset=preset, microbatches=1).plan)
    assert told is not None
    (rank,) = told.ranks
    assert stage.communication_seconds == pytest.approx(rank.collectives + rank.hidden)
    hides = cluster in (HOPPER, AMPERE) or (cluster is TPU and preset == "zero(stage=3)")
    assert (rank.hidden > 1e-3 * rank.collectives) == hides
    assert rank.hidden <= rank.compute
