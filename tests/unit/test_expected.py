"""Programs as two other numbers of microbatches let expect: the same as those that are traced."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshwright import value_and_grad, zoo
from meshwright.cluster import load_cluster
from meshwright.errors import MemoryExceeded, PlanError
from meshwright.planning.plan_for import plan_for
from meshwright.planning.programs import StepPrograms
from meshwright.program.expected import Expectations, Unexpected
from meshwright.program.staged import StagedProgram
from meshwright.program.traces import Traces

SIZES = {"gpt-tiny": 64, "moe-tiny": 64, "wresnet-tiny": 32, "unet-tiny": 32}


def staged(traces: Traces, args: Any, count: int, *like: StagedProgram) -> StagedProgram:
    return traces.staged(traces.program(args, microbatches=count), like)


def pair(name: str, batch: int, second: int) -> tuple[Callable[[int], StagedProgram], StagedProgram, StagedProgram]:
    """What traces a program of the zoo, and two of its numbers of microbatches."""
    target = zoo.registry.build(name, global_batch=batch)
    traces, args = Traces(target.step), (target.example_state, target.example_batch)
    first = staged(traces, args, 1)
    return lambda count: staged(traces, args, count, first), first, staged(traces, args, second, first)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[pytest.mark.slow] * (name == "unet-tiny")) for name in SIZES]
)
def test_it_is_what_tracing_gives(name: str) -> None:
    traced, first, second = pair(name, SIZES[name], 4)
    for count in (2, 8):
        found = Expectations().of(first, second, count, lambda count=count: traced(count))
        assert found is not None
        assert found == traced(count)
        assert found.fingerprint == traced(count).fingerprint
        assert found.source is traced(count).source
        assert found.core is traced(count).core
        assert found != second


def test_nothing_is_expected_of_one_sample_or_of_other_equations() -> None:
    _, first, second = pair("gpt-tiny", 8, 2)
    expectations = Expectations()
    assert expectations.of(first, second, 4, lambda: first) is not None
    assert expectations.of(first, second, 8, lambda: first) is None
    _, _, other = pair("moe-tiny", 8, 2)
    assert expectations.of(first, other, 4, lambda: first) is None
    assert expectations.of(first, replace(second, layers=second.layers[:-1]), 4, lambda: first) is None
    expectations.give_up()
    assert expectations.of(first, second, 4, lambda: first) is None


def test_what_is_another_program_is_found_out_when_it_is_traced() -> None:
    _, first, second = pair("gpt-tiny", 8, 2)

    def refuse() -> StagedProgram:
        raise PlanError(refused="a", got="b", needed="c", where="d", try_="e")

    for trace in (lambda: second, refuse):
        expectations = Expectations()
        found = expectations.of(first, second, 4, trace)
        assert found is not None
        with pytest.raises(Unexpected):
            _ = found.core
        with pytest.raises(Unexpected):
            expectations.check()


def test_one_is_traced_if_none_has_been() -> None:
    traced, first, second = pair("gpt-tiny", 16, 2)
    for asked in (False, True):
        expectations, counts = Expectations(), []

        def trace(count: int, counts: list[int] = counts) -> StagedProgram:
            counts.append(count)
            return traced(count)

        made = [expectations.of(first, second, count, lambda count=count: trace(count)) for count in (4, 8)]
        if asked:
            assert made[0] is not None
            _ = made[0].source
        expectations.check()
        assert counts == ([4] if asked else [8])


def request(traces: Traces, args: Any) -> Any:
    return SimpleNamespace(
        traces=traces, args=args, batch_axis=0, stages=None, schedule=None, preset=None,
        cluster=load_cluster("p3.16xlarge:1"),
        expectations=Expectations(), tell=lambda text: None,
        program=lambda count: traces.program(args, microbatches=count),
        traced=lambda: traces.traced(args, batch_axis=0, reduction=None),
    )  # fmt: skip


def test_a_number_that_says_nothing_is_followed_by_one_that_does() -> None:
    """A microbatch of one sample has dims of another structure."""
    target = zoo.registry.build("gpt-tiny", global_batch=16)
    traces, args = Traces(target.step), (target.example_state, target.example_batch)
    asked = request(traces, args)
    programs = StepPrograms(asked, [1, 2, 4, 8, 16])
    for count in (16, 2, 8):
        assert programs[count].microbatches == count
    assert asked.traced() == {1, 2, 16}
    assert programs[8].source is traces.program(args, microbatches=8)
    assert programs[1] is programs.any


def test_two_that_are_alike_are_extrapolated_where_the_fewest_microbatches_are_made_of_other_equations() -> None:
    """A masked mean: in several microbatches its count is of the whole batch, found before the loss."""

    def step(weights: Any, batch: Any) -> Any:
        def loss(weights: Any) -> Any:
            x = batch["x"]
            for weight in weights:
                x = jnp.tanh(x @ weight)
            return jnp.sum(jnp.where(batch["mask"], x.sum(-1), 0.0)) / jnp.sum(batch["mask"])

        value, gradients = value_and_grad(loss)(weights)
        return [w - 1e-3 * g for w, g in zip(weights, gradients, strict=True)], value

    weights = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 4
    batch = {"x": jax.ShapeDtypeStruct((64, 32), jnp.float32), "mask": jax.ShapeDtypeStruct((64,), jnp.bool_)}
    traces, args = Traces(step), (weights, batch)
    asked = request(traces, args)
    programs = StepPrograms(asked, [1, 2, 4, 8, 16])
    for count in (4, 8, 16, 2):
        assert programs[count].layers == programs[4].layers
    assert programs[1].layers != programs[4].layers
    assert asked.traced() == {1, 4, 8}
    assert programs[2].source is traces.program(args, microbatches=2)


Loss = Callable[[list[jax.Array], jax.Array], jax.Array]


def plain(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    for weight in weights:
        x = jnp.tanh(x @ weight)
    return jnp.mean(x**2)


def quadratic(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Every sample looks at all others of its microbatch."""
    for weight in weights:
        x = jnp.tanh(x @ weight)
        x = jax.nn.softmax(x @ x.T) @ x
    return jnp.mean(x**2)


def least(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """A part of the samples goes on, but 16 at least."""
    x = x[: max(16, x.shape[0] // 8)]
    return plain(weights, x)


def half(weights: list[jax.Array], x: jax.Array) -> jax.Array:
    """Half of the samples goes on, but 96 at least."""
    return plain(weights, x[: max(96, x.shape[0] // 2)])


def step_of(loss: Loss) -> tuple[Callable[..., Any], tuple[Any, Any], set[int]]:
    """A step, its arguments, and the sizes of microbatches that it has been traced in."""
    traced: set[int] = set()

    def watched(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        traced.add(x.shape[0])
        return loss(weights, x)

    def step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        value, gradients = value_and_grad(watched)(weights, x)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

    weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 2
    return step, (weights, jax.ShapeDtypeStruct((1024, 256), jnp.float32)), traced


def planned(loss: Loss, stages: int, **options: Any) -> tuple[Any, set[int]]:
    step, args, traced = step_of(loss)
    return plan_for(step, args, cluster="p3.16xlarge:1", stages=stages, reduction="mean", **options), traced


def test_a_search_traces_two_numbers_and_a_third() -> None:
    found, traced = planned(plain, 2)
    assert {1024, 1024 // found.plan.microbatches} <= traced
    assert len(traced) == 3
    looked_at = {one.what for one in found.considered if one.searched}
    assert len(looked_at) > 3


@pytest.mark.parametrize(
    ("loss", "stages"),
    [
        (quadratic, 2),
        pytest.param(least, 2, marks=pytest.mark.slow),
        pytest.param(quadratic, 1, marks=pytest.mark.slow),
        (half, 1),
    ],
)
def test_a_step_that_is_not_linear_is_traced_in_every_number(
    loss: Loss, stages: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    memory = 0.45e6 if stages == 1 else None  # so little that the plan is in more than four microbatches
    found, traced = planned(loss, stages, memory_per_device=memory)
    monkeypatch.setattr(Expectations, "of", lambda self, first, second, microbatches, trace: None)
    wanted, every = planned(loss, stages, memory_per_device=memory)
    assert found.plan == wanted.plan
    assert [*map(str, found.considered)] == [*map(str, wanted.considered)]
    assert traced == every


@pytest.mark.parametrize("stages", [1, 2])
def test_where_nothing_fits_that_is_said_of_traced_programs(stages: int) -> None:
    with pytest.raises(MemoryExceeded):
        planned(plain, stages, memory_per_device=1e4)
