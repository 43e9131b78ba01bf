"""What crosses from stage to stage is priced in the layouts in which it is moved."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest
from pipelines import Pipeline, pipelined, staged_plan

import meshwright as mw
from meshwright import zoo
from meshwright.program.staged import staged_program
from meshwright.program.trace import trace_program
from meshwright.runtime.pipeline.transport import PlannedTransport
from meshwright.runtime.resharding.layouts import block_boxes
from meshwright.search.pipelines import timing as staged_timing

BOXES = frozenset[tuple[Any, Any]]


def boxes_of(sharding: Any, shape: tuple[int, ...]) -> BOXES:
    return frozenset((device.id, box) for device, box in block_boxes(sharding, shape).items())


def stacked_step(state: Any, batch: Any) -> Any:
    """Five equal layers, scanned."""

    def loss(state: Any) -> Any:
        return jnp.mean(jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w), None), batch, state)[0] ** 2)

    value, grads = mw.value_and_grad(loss)(state)
    return state - 0.1 * grads, value


def stacked() -> tuple[Any, tuple[Any, Any]]:
    return stacked_step, (0.1 * jax.random.normal(jax.random.key(0), (5, 32, 32)), jnp.ones((16, 32)))


def sliced_step(state: Any, batch: Any) -> Any:
    """Both layers use the same rows of one parameter: the first stage sends them."""

    def loss(state: Any) -> Any:
        rows = state[:32]
        h = jnp.tanh(batch @ rows)
        mw.layer_boundary()
        return jnp.mean(jnp.tanh(h @ rows) ** 2)

    value, grads = mw.value_and_grad(loss)(state)
    return state - 0.1 * grads, value


def of_zoo(name: str) -> tuple[Any, tuple[Any, Any]]:
    target = zoo.build(name)
    return target.step, (target.init(jax.random.key(0)), target.make_batch(jax.random.key(1)))


@pytest.mark.parametrize(
    ("model", "pipeline"),
    [
        (lambda: of_zoo("mlp-tiny"), Pipeline(submeshes=(2, 2, 4), microbatches=2)),
        pytest.param(lambda: of_zoo("gpt-tiny"), Pipeline(submeshes=(2, 2, 4), microbatches=2), marks=pytest.mark.slow),
        pytest.param(lambda: of_zoo("unet-tiny"), Pipeline(submeshes=(4, 4), microbatches=2), marks=pytest.mark.slow),
        (stacked, Pipeline(submeshes=(4, 2), layers=(1, 1), microbatches=2, scan_splits={0: (3, 2)})),
    ],
    ids=["mlp", "gpt", "unet", "scanned"],
)
def test_moved_values_have_the_layouts_they_were_priced_in(
    model: Any, pipeline: Pipeline, monkeypatch: pytest.MonkeyPatch
) -> None:
    priced: set[tuple[tuple[int, ...], BOXES, BOXES]] = set()
    moved: set[tuple[tuple[int, ...], BOXES, BOXES]] = set()
    price, move = staged_timing.edge_seconds, PlannedTransport.move

    def note_price(solver: Any, sent: Any, edge: Any, layouts: Any) -> Any:
        for one in sent:
            if (one.source, one.target) == edge:
                shape = solver.program.graph.values[one.value].shape
                ends = (layouts[edge[0]].sent[one.value], layouts[edge[1]].received[one.value])
                there = tuple(frozenset(end.boxes(shape).items()) for end in ends)
                priced.add((shape, *there))
                if one.differentiated:
                    priced.add((shape, *reversed(there)))
        return price(solver, sent, edge, layouts)

    def note_move(self: Any, values: Any, targets: Any, *rest: Any) -> Any:
        moved.update(
            (value.shape, boxes_of(value.sharding, value.shape), boxes_of(target, value.shape))
            for value, target in zip(values, targets, strict=True)
        )
        return move(self, values, targets, *rest)

    monkeypatch.setattr(staged_timing, "edge_seconds", note_price)
    monkeypatch.setattr(PlannedTransport, "move", note_move)
    function, args = model()
    step = pipelined(function, args, pipeline)
    step(*args)
    assert len(priced) > 1
    assert priced <= moved
    # Nothing else moves but the gradients that stages with the same parameter exchange, and rows that stages have in
    # unlike parts, once a step.
    whole = {leaf.shape for leaf in jax.tree.leaves(args[0])}
    rows = {held.shape for stage in step.plan.stages for held in stage.parameters if held.rows is not None}
    assert {shape for shape, *_ in moved - priced} <= whole | rows


def test_rows_of_a_parameter_that_a_stage_slices_and_sends_are_priced() -> None:
    """They are an input of the stage, not a result; such a plan is refused only when it is to run."""
    program = trace_program(sliced_step, (jnp.ones((40, 32)), jnp.ones((16, 32))), microbatches=2)
    plan = staged_plan(program, staged_program(program), Pipeline(submeshes=(4, 2), microbatches=2))
    assert {one.bytes for one in plan.transfers} == {32 * 32 * 4, 8 * 32 * 4}
    assert all(one.forward_seconds > 0 for one in plan.transfers)
