"""Programs as two other numbers of microbatches let expect: the same as those that are traced."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshwright import value_and_grad, zoo
from meshwright.errors import PlanError
from meshwright.planning import plan_for
from meshwright.program.expected import Unexpected, expected
from meshwright.program.staged import StagedProgram
from meshwright.program.traces import Traces
from meshwright.step_programs import StepPrograms

SIZES = {"gpt-tiny": 64, "moe-tiny": 64, "wresnet-tiny": 32, "unet-tiny": 32}


def staged(traces: Traces, args: Any, count: int, like: StagedProgram | None = None) -> StagedProgram:
    return traces.staged(traces.program(args, microbatches=count), like)


@pytest.mark.parametrize("name", SIZES)
def test_it_is_what_tracing_gives(name: str) -> None:
    target = zoo.registry.build(name, global_batch=SIZES[name])
    traces, args = Traces(target.step), (target.example_state, target.example_batch)
    first = staged(traces, args, 1)
    second = staged(traces, args, 4, first)
    for count in (2, 8):
        traced = staged(traces, args, count, first)
        found = expected(first, second, count, lambda traced=traced: traced)
        assert found is not None
        assert found.graph == traced.graph
        assert found.rows == traced.rows
        assert found.layers == traced.layers
        assert found.split_dims == traced.split_dims
        assert (found.microbatches, found.fingerprint) == (count, traced.fingerprint)
        assert found.source is traced.source
        assert found.core is traced.core


def test_nothing_is_expected_of_one_sample_or_of_other_equations() -> None:
    target = zoo.registry.build("gpt-tiny", global_batch=8)
    traces, args = Traces(target.step), (target.example_state, target.example_batch)
    first = staged(traces, args, 1)
    second = staged(traces, args, 2, first)
    assert expected(first, second, 4, lambda: first) is not None
    assert expected(first, second, 8, lambda: first) is None
    other = zoo.registry.build("moe-tiny", global_batch=8)
    others = staged(Traces(other.step), (other.example_state, other.example_batch), 2)
    assert expected(first, others, 4, lambda: first) is None
    assert expected(first, replace(second, layers=second.layers[:-1]), 4, lambda: first) is None


def test_what_is_another_program_is_found_out_when_it_is_traced() -> None:
    target = zoo.registry.build("gpt-tiny", global_batch=8)
    traces, args = Traces(target.step), (target.example_state, target.example_batch)
    first = staged(traces, args, 1)
    second = staged(traces, args, 2, first)

    def refuse() -> StagedProgram:
        raise PlanError(refused="a", got="b", needed="c", where="d", try_="e")

    for trace in (lambda: second, refuse):
        found = expected(first, second, 4, trace)
        assert found is not None
        with pytest.raises(Unexpected):
            _ = found.core


def squares() -> tuple[Any, tuple[Any, Any], set[int]]:
    """A step, its arguments, and the sizes of microbatches that it has been traced in."""
    traced: set[int] = set()

    def loss(weights: list[jax.Array], x: jax.Array) -> jax.Array:
        traced.add(x.shape[0])
        for weight in weights:
            x = jnp.tanh(x @ weight)
        return jnp.mean(x**2)

    def step(weights: list[jax.Array], x: jax.Array) -> tuple[list[jax.Array], jax.Array]:
        value, gradients = value_and_grad(loss)(weights, x)
        return [w - 0.1 * g for w, g in zip(weights, gradients, strict=True)], value

    weights = [jax.ShapeDtypeStruct((256, 256), jnp.float32)] * 8
    return step, (weights, jax.ShapeDtypeStruct((256, 256), jnp.float32)), traced


def test_a_search_traces_two_numbers_and_the_one_it_takes() -> None:
    step, args, traced = squares()
    found = plan_for(step, args, cluster="p3.16xlarge:2", stages=2)
    assert {256, 256 // found.plan.microbatches} <= traced
    assert len(traced) <= 3
    looked_at = {one.split()[0] for one in found.considered if "not searched" not in one}
    assert len(looked_at) > 3


def test_where_a_plan_is_of_another_program_than_expected_the_search_begins_again(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    step, args, traced = squares()
    wanted = plan_for(step, args, cluster="p3.16xlarge:2", stages=2).plan
    few = len(traced)
    asked = []

    def refuse() -> Any:
        raise Unexpected

    def wrong(self: StepPrograms, count: int) -> StagedProgram | None:
        if not self._asked.traces.are_as_expected:
            return None
        asked.append(count)
        return replace(self._cut(count, self.any), trace=refuse)

    monkeypatch.setattr(StepPrograms, "_expected", wrong)
    found = plan_for(step, args, cluster="p3.16xlarge:2", stages=2).plan
    assert asked, "nothing was expected"
    assert found == wanted
    assert len(traced) > few
