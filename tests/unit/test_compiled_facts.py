"""What a compiler of a machine that is not here refuses: want of memory is a finding, anything else a refusal."""

from __future__ import annotations

from typing import Any

import jax
import pytest

from meshwright.cluster import load_cluster
from meshwright.compilers.facts import facts_of
from meshwright.errors import PlanError
from meshwright.planning.plan_for import plan_for
from meshwright.runtime.step import PlannedStep
from meshwright.targets import load_target


class Refusing(PlannedStep):
    """A step whose program the compiler refuses."""

    words = ""

    def lower(self) -> Any:
        return self

    def compile(self, **options: Any) -> Any:
        raise jax.errors.JaxRuntimeError(self.words)


@pytest.fixture
def step() -> Refusing:
    target = load_target("mlp-tiny")
    found = plan_for(target.step, target.example_args, cluster="local", stages=1)
    return Refusing(found.program, found.plan, jax.devices()[: found.plan.num_devices])


def test_want_of_memory_is_a_finding(step: Refusing) -> None:
    step.words = "RESOURCE_EXHAUSTED: Ran out of memory on HBM"
    (facts,) = facts_of(step, step.plan, cluster=load_cluster("cpu"))
    assert facts.refusals == ("Ran out of memory on HBM",)
    assert facts.peak_bytes[1] == float("inf")


def test_another_error_of_the_compiler_is_a_refusal(step: Refusing) -> None:
    step.words = "INTERNAL: unexpected device in a replica group"
    with pytest.raises(PlanError, match="unexpected device in a replica group"):
        facts_of(step, step.plan, cluster=load_cluster("cpu"))
    with pytest.raises(jax.errors.JaxRuntimeError):  # where it is run, JAX's own words stand
        facts_of(step, step.plan)
