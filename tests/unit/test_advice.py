"""What a refusal tells to try works when it is done."""

from __future__ import annotations

import ast
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import optax
import pytest

import meshwright as mw
from meshwright import presets
from meshwright.cluster import Cluster
from meshwright.search.inter.submeshes import Submeshes
from meshwright.zoo import gpt

ADAM = optax.adam(1e-3)


def shape(*dims: int) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(dims, jnp.float32)


@pytest.fixture
def cluster_of() -> Callable[[int], Cluster]:
    """One host of so many devices."""
    one = mw.load_cluster("p4d.24xlarge:1")
    return lambda devices: replace(one, hosts=(replace(one.hosts[0], devices=devices),))


def network(width: int = 1024, layers: int = 8, batch: int = 96) -> tuple[Any, Any]:
    """A step of Adam on a stack of square layers, and its arguments."""

    def step(state: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            h, _ = jax.lax.scan(lambda h, w: (h + jnp.tanh(h @ w["in"]) @ w["out"], None), x, p)
            return jnp.mean(h**2)

        value, grads = mw.value_and_grad(loss)(state["p"])
        updates, moments = ADAM.update(grads, state["o"], state["p"])
        return {"p": optax.apply_updates(state["p"], updates), "o": moments}, value

    parameters = {"in": shape(layers, width, 2 * width), "out": shape(layers, 2 * width, width)}
    return step, ({"p": parameters, "o": jax.eval_shape(ADAM.init, parameters)}, shape(batch, width))


def followed(advice: str, options: dict[str, Any]) -> dict[str, Any]:
    """The options as the first advice changes them."""
    changed = dict(options)
    words, *instead = advice.split(", which fits")[0].split(" in place of ")
    for dropped in [*instead, *words.split("leaving out ")[1:]]:
        changed.pop(dropped.removesuffix("="))
    if "=" in words and not words.startswith("leaving out"):
        words, *without = words.split(" without ")
        for dropped in " ".join(without).split(" and "):
            changed.pop(dropped.removesuffix("="), None)
        name, value = words.split("=", 1)
        changed[name] = ast.literal_eval(value)
    return changed


@pytest.mark.parametrize(
    ("options", "mebibytes"),
    [
        ({"preset": "megatron(tp=2, pp=2)"}, 130),
        ({"preset": "data_parallel()"}, 400),
        pytest.param({"preset": "gpipe(2)"}, 150, marks=pytest.mark.slow),
        pytest.param({"microbatches": 1, "preset": "zero(stage=3)"}, 80, marks=pytest.mark.slow),
        pytest.param({"preset": "deepspeed_3d(tp=1, pp=2)"}, 110, marks=pytest.mark.slow),
    ],
    ids=str,
)
def test_a_plan_that_is_too_large_is_refused_with_one_that_fits(options: dict[str, Any], mebibytes: int) -> None:
    step, args = network()
    where = {"cluster": "p4d.24xlarge:1", "memory_per_device": mebibytes * 2**20}
    with pytest.raises(mw.PlanError, match="which fits") as refused:
        mw.plan_for(step, args, **where, **options)
    plan = mw.plan_for(step, args, **where, **followed(refused.value.try_, options)).plan
    assert all(stage.memory.total <= mebibytes * 2**20 for stage in plan.stages)


@pytest.mark.parametrize(("batch", "microbatches"), [(12, None), (96, 48), (96, 32)])
def test_a_batch_that_does_not_divide_is_refused_with_one_that_does(batch: int, microbatches: int | None) -> None:
    options = {"cluster": "p4d.24xlarge:1", "preset": "data_parallel()"}
    step, args = network(batch=batch)
    with pytest.raises(mw.PlanError, match="batch that 8 divides") as refused:
        mw.plan_for(step, args, microbatches=microbatches, **options)
    tried = {name: int(value) for name, value in re.findall(r"(microbatches|batch)(?:=| of )(\d+)", refused.value.try_)}
    assert tried
    for name, value in tried.items():
        step, args = network(batch=value if name == "batch" else batch)
        assert mw.plan_for(step, args, microbatches=value if name == "microbatches" else microbatches, **options)


@pytest.mark.parametrize(
    ("devices", "stages", "layers"),
    [
        (7, 2, 3),  # four stages would need four layers
        *(pytest.param(devices, 2, 4, marks=pytest.mark.slow) for devices in (7, 11, 14)),
    ],
)
def test_stages_that_no_submeshes_make_are_refused_with_numbers_that_do(
    devices: int, stages: int, layers: int, cluster_of: Callable[[int], Cluster]
) -> None:
    step, args = network(width=64, layers=layers, batch=2 * devices)
    cluster = cluster_of(devices)
    with pytest.raises(mw.PlanError, match=f"{stages} stages") as refused:
        mw.plan_for(step, args, cluster=cluster, stages=stages)
    tried = [int(n) for n in re.findall(r"stages=(\d+)", refused.value.try_)]
    assert tried
    for count in tried:
        assert len(mw.plan_for(step, args, cluster=cluster, stages=count).plan.stages) == count
    fewer = re.search(r"(\d+) devices", refused.value.try_)
    if fewer is not None:
        found = mw.plan_for(step, args, cluster=cluster_of(int(fewer[1])), stages=stages)
        assert len(found.plan.stages) == stages


def test_every_number_of_stages_that_can_be_is_known(cluster_of: Callable[[int], Cluster]) -> None:
    """Against the sums of powers of two."""
    for devices in range(1, 14):
        parts = {part for part in (1, 2, 4, 8) if part < devices} | {devices}
        sums: set[tuple[int, int]] = {(0, 0)}
        for _ in range(devices):
            sums |= {(total + part, n + 1) for total, n in sums for part in parts if total + part <= devices}
        assert Submeshes(cluster_of(devices)).stage_counts == {n for total, n in sums if total == devices}


@pytest.mark.parametrize(
    "preset",
    ["zero(stage=3)", "zero(stage=1)", "deepspeed_3d(tp=1, zero=2)", "megatron(tp=1, zero=1)", "fsdp_tp(tp=1)"],
)
def test_zero_that_splits_nothing_is_refused(preset: str, cluster_of: Callable[[int], Cluster]) -> None:
    """Six devices divide no width: the advice is a plan that stores parts on fewer, or the same plan without ZeRO."""
    step, args = network(layers=2)
    where = {"cluster": cluster_of(6)}
    with pytest.raises(mw.PlanError, match="without a dim that 6 divides") as refused:
        mw.plan_for(step, args, preset=preset, **where)
    zero = re.search(r"zero=(\d), mesh=(.*) in place of preset=, which splits over (\d) of 6", refused.value.try_)
    assert zero is not None
    stage = mw.plan_for(step, args, zero=int(zero[1]), mesh=ast.literal_eval(zero[2]), **where).plan.stages[0]
    split = [p.use if zero[1] == "3" else p.storage for p in stage.parameters]
    assert all(spec.shards(stage.sizes) == int(zero[3]) for spec in split)
    other = re.search(r"(\w+\([^)]*\)), the same without ZeRO", refused.value.try_)
    assert other is not None
    assert mw.plan_for(step, args, preset=other[1], **where)


def test_zero_that_splits_a_part_says_which(cluster_of: Callable[[int], Cluster]) -> None:
    def with_bias(state: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            return jnp.mean((x @ p["in"][0] @ p["out"][0]) ** 2) + jnp.mean(p["bias"] ** 2)

        value, grads = mw.value_and_grad(loss)(state)
        return jax.tree.map(lambda a, b: a - b, state, grads), value

    uneven = {"in": shape(6, 96, 96), "out": shape(6, 96, 96), "bias": shape(35, 1021)}
    plan = mw.plan_for(with_bias, (uneven, shape(96, 96)), preset="zero(stage=1)", cluster=cluster_of(6)).plan
    assert plan.notes[0] == "held to the preset zero(stage=1)"
    assert "leaves 1 of 3 parameters whole (24 % of all elements), the largest args[0]['bias']" in plan.notes[1]


def test_an_option_that_splits_nothing_says_so(cluster_of: Callable[[int], Cluster]) -> None:
    step, args = network(width=64, layers=2, batch=28)
    notes = mw.plan_for(step, args, zero=1, cluster=cluster_of(7)).plan.notes
    assert any("zero=1 splits nothing" in note for note in notes)


def test_a_sequence_that_does_not_divide_is_no_sequence_parallelism() -> None:
    def step(p: Any, x: Any) -> Any:
        def loss(p: Any) -> Any:
            return jnp.mean((x + jax.nn.gelu(x @ p["in"]) @ p["out"]) ** 2)

        value, grads = mw.value_and_grad(loss)(p)
        return jax.tree.map(lambda a, b: a - b, p, grads), value

    p = {"in": shape(64, 256), "out": shape(256, 64)}
    preset = "megatron(tp=8, sequence_parallel=True)"
    with pytest.raises(mw.PlanError, match="without a sequence that 8 divides"):
        mw.plan_for(step, (p, shape(8, 33, 64)), preset=preset, cluster="p4d.24xlarge:1")
    plan = mw.plan_for(step, (p, shape(8, 40, 64)), preset=preset, cluster="p4d.24xlarge:1").plan
    assert {c.kind for c in plan.stages[0].communication} >= {"all_gather", "reduce_scatter"}


SIZES = (
    "megatron(tp=3)", "megatron(tp=2, pp=2, dp=4)", "megatron(tp=3, dp=3)", "megatron(pp=16)",
    "megatron(pp=3, chunks=2)", "deepspeed_3d(tp=5, pp=2)", "fsdp_tp(tp=16)", "gpipe(3)", "gpipe(3, dp=2)",
    "gpipe(dp=5)", "pipedream(dp=8)", "expert_parallel(ep=3)", "expert_parallel(ep=3, dp=3)",
)  # fmt: skip


@pytest.mark.parametrize("text", SIZES)
def test_sizes_that_do_not_fit_the_devices_are_refused_with_some_that_do(text: str) -> None:
    refused = 0
    for devices in range(1, 17):
        try:
            presets.parse_preset(text).on(devices)
        except mw.PlanError as error:
            refused += 1
            for tried in re.findall(r"\w+\([^)]*\)", error.try_):
                presets.parse_preset(tried).on(devices)
    assert refused


@pytest.mark.parametrize(
    ("preset", "width", "batch"),
    [
        ("megatron(tp=8)", 20, 16), ("megatron(tp=8)", 7, 16), ("megatron(tp=8)", 6, 15),
        ("fsdp_tp(tp=4)", 7, 16), ("expert_parallel(ep=4)", 8, 16),
        # A batch that eight devices do not share evenly has a case above.
        pytest.param("expert_parallel(ep=4)", 8, 20, marks=pytest.mark.slow),
    ],
)  # fmt: skip
def test_an_axis_that_finds_nothing_to_split_is_refused_with_one_that_does(preset: str, width: int, batch: int) -> None:
    def step(p: Any, x: Any) -> Any:
        value, grads = mw.value_and_grad(lambda p: jnp.mean((jax.nn.gelu(x @ p["a"]) @ p["b"]) ** 2))(p)
        return jax.tree.map(lambda a, b: a - b, p, grads), value

    args = ({"a": shape(width, width), "b": shape(width, width)}, shape(batch, width))
    with pytest.raises(mw.PlanError, match="for its axis to split") as refused:
        mw.plan_for(step, args, preset=preset, cluster="p4d.24xlarge:1")
    tried = None if refused.value.try_ == "leaving out preset=" else refused.value.try_
    assert mw.plan_for(step, args, preset=tried, cluster="p4d.24xlarge:1")


@pytest.mark.parametrize(
    ("batch", "microbatches"),
    [(24, 3), (12, None), (36, None), pytest.param(24, None, marks=pytest.mark.slow), (12, 1)],
)
def test_interleaved_stages_take_microbatches_that_the_batch_can_be_cut_into(
    batch: int, microbatches: int | None
) -> None:
    """By themselves where there are any, else they are refused with a number and a batch that do."""
    options = {"preset": "megatron(pp=2, chunks=2)", "cluster": "p4d.24xlarge:1"}
    step, args = network(width=64, batch=batch)
    try:
        count = mw.plan_for(step, args, microbatches=microbatches, **options).plan.microbatches
    except mw.PlanError as error:
        found = re.search(r"microbatches=(\d+)(?: and a batch of (\d+))?", error.try_)
        assert found is not None
        step, args = network(width=64, batch=int(found[2] or batch))
        count = mw.plan_for(step, args, microbatches=int(found[1]), **options).plan.microbatches
        assert batch % 8 or microbatches == 3
    assert count % 2 == 0


@pytest.mark.parametrize("microbatches", [None, 8])
def test_a_microbatch_of_one_example_is_a_batch(microbatches: int | None) -> None:
    step, args = network(width=64, batch=8)
    plan = mw.plan_for(step, args, preset="gpipe(8)", microbatches=microbatches, cluster="p4d.24xlarge:1").plan
    assert (plan.microbatches, len(plan.stages)) == (8, 8)


@pytest.mark.slow
def test_as_many_stages_as_there_is_room_for_are_no_matter_of_how_layers_are_joined() -> None:
    """Thirty blocks and a head are fifteen equal layers of at most sixteen, which is no reason to refuse sixteen."""
    config = gpt.GPTConfig(
        name="gpt", hidden=64, layers=30, heads=2, sequence=32, vocabulary=128, global_batch=16, scan=True
    )
    target = gpt.build(config)
    args = (target.example_state, target.example_batch)
    plan = mw.plan_for(target.step, args, cluster="p3.16xlarge:2", stages=16, microbatches=16, remat="none").plan
    assert len(plan.stages) == 16


@pytest.mark.slow
def test_a_schedule_that_keeps_too_much_is_refused_with_leaving_it_out() -> None:
    """GPipe keeps all microbatches where 1F1B keeps as many as there are stages."""
    step, args = network(batch=24576)
    where = {"cluster": "p4d.24xlarge:1", "memory_per_device": 150 * 2**20}
    options = {"stages": 2, "schedule": "gpipe", "remat": "none"}
    with pytest.raises(mw.PlanError, match="leaving out schedule=, which fits") as refused:
        mw.plan_for(step, args, **where, **options)
    assert mw.plan_for(step, args, **where, **followed(refused.value.try_, options)).plan.stages
