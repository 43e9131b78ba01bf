"""The first trip of a scan, which XLA's GPU compiler runs before the loop to send gradients beside the next trip."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

from meshwright._jax.dataflow import Kind, Operation, Program
from meshwright._jax.liveness_adapter import dataflow_of
from meshwright.memory.liveness import predict

WIDTH, ROWS, LAYERS = 512, 64, 6
MESH = AbstractMesh((8,), ("x",), axis_types=(AxisType.Auto,))


def gathered(row: jax.Array) -> jax.Array:
    return lax.all_gather(row, "x", axis=0, tiled=True)


def mapped(local: Any) -> Any:
    return jax.shard_map(
        local, mesh=MESH, in_specs=(PartitionSpec(None, "x"), PartitionSpec("x")), out_specs=PartitionSpec(None, "x"),
        check_vma=False,
    )  # fmt: skip


def gradient(layer: Any, *, inside: bool = True) -> Any:
    """Of a scan over layers whose weights are gathered in each trip; or whose gradients are scattered behind it."""

    def local(weights: jax.Array, x: jax.Array) -> jax.Array:
        def loss(weights: jax.Array) -> jax.Array:
            if not inside:
                weights = lax.all_gather(weights, "x", axis=1, tiled=True)
            body = lambda x, row: (layer(x, gathered(row) if inside else row), None)  # noqa: E731
            return jnp.sum(lax.scan(body, x, weights)[0] ** 2)

        return jax.grad(loss)(weights)

    return mapped(local)


def program_of(function: Any, platform: str = "gpu", layers: int = LAYERS) -> Program:
    weights = jax.ShapeDtypeStruct((layers, WIDTH, WIDTH), jnp.float32)
    return dataflow_of(function, weights, jax.ShapeDtypeStruct((ROWS, WIDTH), jnp.float32), platform=platform)


def loops(program: Program) -> list[Operation]:
    return [operation for operation in program.operations if operation.kind is Kind.LOOP]


def plain(x: jax.Array, weight: jax.Array) -> jax.Array:
    return jnp.tanh(x @ weight)


def test_a_layers_whole_gradient_is_carried_to_the_next_trip() -> None:
    function = gradient(plain)
    of_gpus, of_tpus = (loops(program_of(function, platform))[-1] for platform in ("gpu", "tpu"))
    assert len(of_gpus.writes) == len(of_tpus.writes) + 1
    (body,) = of_gpus.bodies
    assert len(body.outputs) == len(of_gpus.writes)
    assert body.values[body.outputs[-1]].size_bytes == 4 * WIDTH * WIDTH


@pytest.mark.parametrize(
    ("function", "layers"), [(gradient(plain, inside=False), LAYERS), (gradient(plain), 1)], ids=["behind", "one trip"]
)
def test_loops_that_send_nothing_beside_the_next_trip_stay_as_they_are(function: Any, layers: int) -> None:
    of_gpus, of_tpus = (loops(program_of(function, platform, layers))[-1] for platform in ("gpu", "tpu"))
    assert len(of_gpus.writes) == len(of_tpus.writes)


def test_the_first_trip_runs_before_the_loop() -> None:
    """The loop is left with all trips but one; what they and the first one multiply is all there is."""
    program = program_of(gradient(plain))
    outside = [one for one in program.operations if one.kind is Kind.CONTRACT]
    inside = [one for loop in loops(program) for one in loop.bodies[0].operations if one.kind is Kind.CONTRACT]
    assert len(inside) == 3  # forward, and two of a layer backward
    assert len(outside) == 2  # backward, of the last layer
    assert sum(one.name == "reduce_scatter" for one in program.operations) == 1  # of what the last trip made


def test_constants_that_loops_make_again_are_there_in_the_first_trip() -> None:
    def local(weights: jax.Array, x: jax.Array) -> jax.Array:
        def loss(weights: jax.Array) -> jax.Array:
            half = jnp.full((WIDTH, WIDTH), 0.5)
            body = lambda x, row: (jnp.tanh(x @ gathered(row) @ half), None)  # noqa: E731
            return jnp.sum(lax.scan(body, x, weights)[0] ** 2)

        return jax.grad(loss)(weights)

    program = program_of(mapped(local))
    assert sum(one.kind is Kind.CONTRACT for one in program.operations) == 3  # cotangents of two products, a gradient
    assert predict(program).temp_bytes > 0


def test_calls_of_one_body_have_gradients_of_their_own() -> None:
    """Layers of a pattern are calls of one body, whose equations are the same objects."""
    shared = jax.jit(lambda x, row: jnp.tanh(x @ gathered(row)))

    def local(weights: jax.Array, x: jax.Array) -> jax.Array:
        def loss(weights: jax.Array) -> jax.Array:
            def body(x: jax.Array, rows: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
                return shared(shared(x, rows[0]), rows[1]), None

            pairs = weights.reshape(LAYERS // 2, 2, WIDTH // 8, WIDTH)
            return jnp.sum(lax.scan(body, x, (pairs[:, 0], pairs[:, 1]))[0] ** 2)

        return jax.grad(loss)(weights)

    loop = loops(program_of(mapped(local)))[-1]
    (body,) = loop.bodies
    assert len(body.outputs) == len(loop.writes)
    assert sum(body.values[v].size_bytes == 4 * WIDTH * WIDTH for v in body.outputs) == 2
