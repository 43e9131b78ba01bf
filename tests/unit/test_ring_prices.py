"""What attention over split positions costs: steps of the ring hide what they send, where there is enough to do."""

from __future__ import annotations

from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import pytest

import meshwright as mw
from meshwright.cluster import load_cluster
from meshwright.program.traces import Traces
from meshwright.search.prices.choices import operator_choices
from meshwright.search.prices.operators import prices_of

DEVICES = 8


class Priced(NamedTuple):
    """Seconds of kernels forward and backward, of collectives that these do not hide, and of bringing positions into
    zigzag order forward; the same of kernels of one device alone."""

    forward: float
    backward: float
    inside: float
    mirrored: float
    turning: float
    alone: tuple[float, float]


def ring(positions: int, *, window: int | None = None) -> Priced:
    """Four query heads that share a key head, on eight H100s of one host."""

    def step(p: Any, x: Any) -> Any:
        def loss(p: Any, x: Any) -> Any:
            query = jnp.sin(x * p)
            mixed = mw.attention(query, query[:, :, :1], query[:, :, :1], causal=True, window=window)
            return jnp.sum(mixed.astype(jnp.float32))

        value, grad = mw.value_and_grad(loss)(p, x)
        return p - grad, value

    args = (jax.ShapeDtypeStruct((128,), jnp.bfloat16), jax.ShapeDtypeStruct((1, positions, 4, 128), jnp.bfloat16))
    graph = Traces(step).program(args).graph
    (operator,) = (one for one in graph.operators if one.name == "attention")
    cluster = load_cluster("dgx-h100:1")
    mesh = cluster.logical_mesh((DEVICES,))
    (axis,) = (one.name for one in mesh.axes)
    choices = operator_choices(graph, operator, {axis: DEVICES}, of_parameters=False)
    by_axes = {one.algorithm.axes: one.algorithm for one in choices}
    whole, split = by_axes[((),) * 7], by_axes[(), (axis,), (), (), (), (axis,), ()]
    prices = prices_of(mesh, cluster.device)
    (alone, found) = prices.operator_parts(graph, operator, [whole, split])
    turning = sum(
        one.forward * prices.collective("permute", one.size_bytes, one.axes)
        for one in prices.inner_collectives(graph, operator, split)
        if one.forward == 2
    )
    return Priced(*found[:4], turning, alone[:2])


def test_long_sequences_hide_all_but_the_zigzag_order() -> None:
    found = ring(1 << 20)
    assert found.forward == pytest.approx(found.alone[0] / DEVICES, rel=0.05)
    assert found.backward == pytest.approx(found.alone[1] / DEVICES, rel=0.05)
    assert found.inside == pytest.approx(found.turning)


def test_of_short_sequences_the_steps_are_what_counts() -> None:
    found = ring(1 << 10)
    assert found.inside > found.turning + 2 * found.forward
    assert found.mirrored > found.inside  # gradients travel too


def test_with_a_window_positions_stay_in_order_and_neighbours_send_what_it_reaches() -> None:
    found = ring(1 << 16, window=1 << 10)
    assert found.turning == 0
    assert found.forward == pytest.approx(found.alone[0] / DEVICES, rel=0.3)  # and a start for each kernel
    assert found.inside < 0.1 * ring(1 << 16).turning
