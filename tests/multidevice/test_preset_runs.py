"""Presets run: the numbers of one device, and the communication each is known for in the compiled program."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from one_device import assert_equal_trees, copy, drawn
from pipelines import whole
from test_found_plans import assert_as_predicted, compiled_collectives

import meshwright as mw
from meshwright import presets, zoo
from meshwright._jax.hlo import CompiledCollective, read_compiled
from meshwright.planning.plan_for import Planning, plan_for
from meshwright.runtime.pipeline.step import PipelinedStep
from meshwright.runtime.step import PlannedStep

SLOW = pytest.mark.slow

BERT = {"layers": 2, "hidden": 64, "heads": 8, "sequence": 32, "batch": 16}


def planned(target: Any, preset: Any, **options: Any) -> Planning:
    args = (target.example_state, target.example_batch)
    return plan_for(target.step, args, preset=preset, cluster="local", **options)


def assert_as_on_one_device(target: Any, planning: Planning, steps: int = 2) -> None:
    state, batch = drawn(target)
    many = len(planning.plan.stages) > 1
    parallel = (PipelinedStep if many else PlannedStep)(planning.program, planning.plan, jax.devices())
    alone = jax.jit(target.step)
    expected, found = state, copy(state)
    metrics = expected_metrics = None
    for _ in range(steps):
        expected, expected_metrics = alone(expected, batch)
        found, metrics = parallel(found, batch)
    assert_equal_trees(whole((found, metrics)), whole((expected, expected_metrics)))


@cache
def perceptron_planned(preset: presets.Preset, layers: int) -> tuple[Any, Planning]:
    target = zoo.mlp(width=32, layers=layers, batch=16)
    return target, planned(target, preset, microbatches=4)


def kinds(planning: Planning, found: list[CompiledCollective] | None = None) -> Counter[str]:
    """Arrays moved, by kind of collective, as predicted; the compiled program moves the same bytes."""
    assert_as_predicted(planning, compiled_collectives(planning) if found is None else found)
    return Counter({kind: c.count for kind, c in planning.plan.collectives().items()})


def parameter_bytes(target: Any) -> int:
    return sum(leaf.size * leaf.dtype.itemsize for leaf in jax.tree.leaves(target.example_state["params"]))


def test_data_parallelism_sums_all_gradients_and_nothing_else() -> None:
    # The search alone would split products here: the batch is small and the matrices are large.
    target = zoo.mlp(width=256, layers=4, batch=32)
    planning = planned(target, presets.data_parallel())
    assert set(kinds(planning)) == {"all_reduce"}
    assert planning.plan.collectives()["all_reduce"].bytes == parameter_bytes(target)
    assert_as_on_one_device(target, planning)


@pytest.mark.parametrize("stage", [pytest.param(1, marks=SLOW), 2, 3])
def test_zero_scatters_gradients_and_gathers_parameters(stage: int) -> None:
    target = zoo.mlp(width=64, layers=3, batch=32)
    planning = planned(target, presets.zero(stage=stage))
    traffic = planning.plan.collectives()
    assert {kind: c.bytes for kind, c in traffic.items()} == {
        "reduce_scatter": parameter_bytes(target), "all_gather": parameter_bytes(target)
    }  # fmt: skip
    kinds(planning)
    parameters = planning.plan.stages[0].parameters
    assert all((p.gathered == ("data",)) == (stage == 3) for p in parameters)
    assert all((p.stored_axes == ("data",)) == (stage < 3) for p in parameters)
    assert_as_on_one_device(target, planning)


@pytest.mark.parametrize("tp", [2, pytest.param(8, marks=SLOW)])
def test_megatron_sums_four_activations_a_layer_but_for_the_input(tp: int) -> None:
    target, layers = zoo.bert_layers(**BERT), BERT["layers"]
    planning = planned(target, presets.megatron(tp=tp))
    data = 8 // tp
    activation = 4 * target.example_batch["x"].size // data
    found = compiled_collectives(planning)
    assert {c.kind for c in found} == {"all_reduce"}
    assert_as_predicted(planning, found)
    sums = sum(c.count for c in found if c.operands == 1 and c.bytes == activation)
    assert sums == 4 * layers - 1
    for p in planning.plan.stages[0].parameters:
        split = {"['qkv']": 2, "['qkv_bias']": 1, "['attention']['out']": 0, "['feed_forward']['in']": 1,
                 "['feed_forward']['in_bias']": 0, "['feed_forward']['out']": 0}  # fmt: skip
        wanted = next((dim for end, dim in split.items() if p.name.endswith(end)), None)
        assert p.use.dim_of("model") == wanted, p.name


def test_sequence_parallelism_scatters_and_gathers_in_place_of_sums() -> None:
    layers = BERT["layers"]
    target = zoo.bert_layers(**BERT)
    planning = planned(target, presets.megatron(tp=8, sequence_parallel=True))
    found = compiled_collectives(planning)
    assert_as_predicted(planning, found)
    activation = 4 * target.example_batch["x"].size
    count = Counter((c.kind, c.bytes // c.operands) for c in found for _ in range(c.count * c.operands))
    assert count["all_reduce", activation] == 0
    assert count["reduce_scatter", activation] == count["all_gather", activation] == 4 * layers - 1


def test_megatron_splits_the_vocabulary_and_its_loss() -> None:
    """4 L in the layers, one where embeddings are looked up, one behind the head; and three small ones for the loss."""
    target = zoo.build("gpt-tiny")
    planning = planned(target, presets.megatron(tp=8))
    assert kinds(planning) == {"all_reduce": 4 * 2 + 2 + 3}
    use = {p.name: p.use for p in planning.plan.stages[0].parameters}
    assert use["args[0]['params']['embedding']['tokens']"].dims == (("model",), ())
    assert use["args[0]['params']['embedding']['positions']"].dims == ((), ())


def test_scanned_layers_are_split_like_unrolled_ones() -> None:
    planning = planned(zoo.build("llama-tiny"), presets.megatron(tp=8))
    assert kinds(planning) == {"all_reduce": 4 * 2 + 2 + 3}


def test_fsdp_outside_tensor_parallelism() -> None:
    target = zoo.bert_layers(**BERT)
    planning = planned(target, presets.fsdp_tp(tp=2))
    compiled = compiled_collectives(planning)
    found = kinds(planning, compiled)
    parameters = planning.plan.stages[0].parameters
    assert all("data" in p.gathered for p in parameters)
    # What is gathered whole in every tensor group has its gradient summed there. Of each layer that may be one bias and
    # two matrices, whose rows Megatron splits: split so, they could be gathered along their columns alone.
    may_be = ("['feed_forward']['in_bias']", "['feed_forward']['out']", "['attention']['out']")
    whole = [p for p in parameters if p.use.broadcast]
    assert all(p.name.endswith(may_be) for p in whole)
    # The gradients of two biases of each layer are summed whole and cut: that meets as often, and a scatter of one that
    # lies along its last dim takes a pass more.
    cut = 2 * BERT["layers"]
    wanted = {
        "all_reduce": 4 * 2 - 1 + len(whole) + cut, "all_gather": len(parameters),
        "reduce_scatter": len(parameters) - cut,
    }  # fmt: skip
    assert found == wanted
    small = [c for c in compiled if (c.kind, c.group_size) == ("all_reduce", 4)]
    assert sum(c.operands for c in small) == cut + 1  # and the loss
    biases = BERT["layers"] * (3 + 4) * BERT["hidden"]
    assert sum(c.bytes for c in small) == 4 * (biases // 2 + 1)
    activation = 4 * target.example_batch["x"].size // 4
    sums = [c for c in compiled if c.kind == "all_reduce"]
    assert sum(c.count for c in sums if c.bytes == activation) == 4 * 2 - 1


def test_tokens_are_exchanged_between_experts() -> None:
    target = zoo.build("moe-tiny")
    planning = planned(target, presets.expert_parallel())
    # To the experts and back, forward and backward, for the one layer of two that has them.
    assert kinds(planning)["all_to_all"] == 4
    use = {p.name: p.use.dims for p in planning.plan.stages[0].parameters}
    for side in ("in", "out"):
        assert use[f"args[0]['params']['layers'][1]['experts']['{side}']"] == (("expert",), (), ())
    assert sum(bool(p.use.sharded_axes) for p in planning.plan.stages[0].parameters) == 2


@pytest.mark.slow
@pytest.mark.parametrize("preset", ["expert_parallel()", "expert_parallel(ep=4, dp=2)"])
def test_experts_compute_what_one_device_does(preset: str) -> None:
    target = zoo.build("moe-tiny")
    assert_as_on_one_device(target, planned(target, preset))


@pytest.mark.parametrize(
    "preset",
    [
        pytest.param("megatron(tp=2, sequence_parallel=True)", marks=SLOW),
        "fsdp_tp(tp=4)",
        pytest.param("megatron(tp=4)", marks=SLOW),
        pytest.param("deepspeed_3d(tp=2, zero=2)", marks=SLOW),
    ],
)
def test_tensor_parallel_layers_compute_what_one_device_does(preset: str) -> None:
    target = zoo.bert_layers(layers=1, hidden=16, heads=4, sequence=8, batch=8)
    assert_as_on_one_device(target, planned(target, preset))


def test_a_parameter_server_takes_all_gradients_and_sends_their_sums() -> None:
    target = zoo.mlp(width=64, layers=3, batch=32)
    planning = planned(target, presets.parameter_server())
    found = compiled_collectives(planning)
    assert_as_predicted(planning, found)
    # A message from each of seven devices to the first, and one back, each with all gradients.
    assert [(c.kind, c.bytes) for c in found] == [("permute", parameter_bytes(target))] * 14
    assert_as_on_one_device(target, planning)


@pytest.mark.parametrize(
    ("preset", "schedule", "mesh"),
    [
        (presets.megatron(tp=2, pp=2), "one_f_one_b", {"data": 2, "model": 2}),
        (presets.gpipe(4), "gpipe", {"data": 2}),
        pytest.param(
            presets.megatron(tp=2, pp=2, chunks=2), "interleaved_one_f_one_b", {"data": 2, "model": 2}, marks=SLOW
        ),
        pytest.param(presets.deepspeed_3d(tp=2, pp=2, dp=2), "one_f_one_b", {"data": 2, "model": 2}, marks=SLOW),
        pytest.param(presets.megatron(pp=8), "one_f_one_b", {"data": 1}, marks=SLOW),
    ],
    ids=str,
)
def test_pipelines(preset: presets.Preset, schedule: str, mesh: dict[str, int]) -> None:
    target, planning = perceptron_planned(preset, max(preset.stages, 4))
    stages = planning.plan.stages
    assert planning.plan.schedule == schedule
    assert [stage.sizes for stage in stages] == [mesh] * preset.stages * preset.chunks
    assert len({stage.devices for stage in stages}) == preset.stages
    assert all(bool(stage.rematerialised) == (preset.family == "gpipe") for stage in stages)
    stored = {axis for stage in stages for p in stage.parameters for axis in p.stored_axes}
    assert stored == ({"data"} if preset.family == "deepspeed_3d" else set())
    assert_as_on_one_device(target, planning)


@pytest.mark.parametrize(
    ("preset", "in_layers", "in_update"),
    [
        # Microbatches cross the cut between neighbours, and each stage sums its gradients once a step.
        (presets.gpipe(4), [[[], []]] * 4, ["all_reduce"]),
        (presets.pipedream(2), [[[], []]] * 2, ["all_reduce"]),
        # Two products a sum, forward, and backward but where nobody wants the gradient of the input.
        (presets.megatron(tp=2, pp=2), [[[256], []], [[256], [256]]], ["all_reduce"]),
        (
            presets.deepspeed_3d(tp=2, pp=2, dp=2),
            [[[256], []], [[256], [256]]],
            ["all_gather", "reduce_scatter"],
        ),
    ],
    ids=str,
)
def test_what_pipelines_send(preset: presets.Preset, in_layers: list[list[list[int]]], in_update: list[str]) -> None:
    _, planning = perceptron_planned(preset, 4)
    activation = 4 * 32 * 4  # of a microbatch of four examples
    sent = [(transfer.source, transfer.target, transfer.bytes) for transfer in planning.plan.transfers]
    assert sent == [(number, number + 1, activation) for number in range(preset.stages - 1)]
    step = PipelinedStep(planning.program, planning.plan, jax.devices())
    for stage, expected in zip(step.stages, in_layers, strict=True):
        found = [read_compiled(stage.lower(p).compile()).collectives for p in (stage.forward, stage.backward)]
        # The loss is a number of four bytes.
        assert [[c.bytes for c in half if c.bytes > 4] for half in found] == expected
        assert {c.kind for half in found for c in half} <= {"all_reduce"}
        (update,) = stage.rounds
        synchronised = read_compiled(stage.lower(update).compile()).collectives
        assert sorted({c.kind for c in synchronised}) == in_update
        held = sum(4 * p.size for p in map(stage.stage.local_shape, stage.stage.parameters))
        for kind in in_update:
            assert sum(c.bytes for c in synchronised if c.kind == kind) == held


def test_pipedream_runs_and_learns() -> None:
    """Its numbers are of delayed gradients (test_asynchronous.py); here that its plans are executed at all."""
    target = zoo.mlp(width=16, layers=4, batch=16, optimizer="sgd")
    planning = planned(target, presets.pipedream(2), microbatches=4)
    step = PipelinedStep(planning.program, planning.plan, jax.devices())
    state, batch = jax.jit(target.init)(jax.random.key(0)), jax.jit(target.make_batch)(jax.random.key(1))
    losses = []
    for _ in range(10):
        state, metrics = step(state, batch)
        losses.append(float(whole(metrics)["loss"]))
    assert all(b < a for a, b in pairwise(losses))


def test_a_pin_beside_a_preset_wins() -> None:
    target = zoo.mlp(width=64, layers=3, batch=32)
    pins = {"*[1]['w']": (None, "data")}
    planning = planned(target, presets.data_parallel(), pins=pins)
    (pinned,) = [p for p in planning.plan.stages[0].parameters if p.name.endswith("[1]['w']")]
    assert pinned.use.dims == ((), ("data",))


def test_a_batch_that_the_step_computes() -> None:
    """What the loss reads is no argument of the step but made of one."""

    def step(w: jax.Array, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
        x = jax.nn.one_hot(tokens[:, :-1], 16)
        value, grad = mw.value_and_grad(lambda w, x: jnp.mean((x @ w) ** 2))(w, x)
        return w - 0.1 * grad, value

    args = (jax.ShapeDtypeStruct((16, 64), jnp.float32), jax.ShapeDtypeStruct((32, 9), jnp.int32))
    planning = plan_for(step, args, preset="data_parallel", cluster="local")
    assert planning.plan.stages[0].inputs[0].spec.dims[0] == ("data",)
    assert set(planning.plan.collectives()) == {"all_reduce"}


def test_parallelize_takes_a_preset() -> None:
    target = zoo.mlp(width=64, layers=3, batch=32)
    step = mw.parallelize(target.step, preset="zero(stage=3)", cluster="local")
    plan = step.plan(target.example_state, target.example_batch)
    assert plan.notes == ("held to the preset zero(stage=3)",)
    assert plan == replace(plan, schedule="none")
