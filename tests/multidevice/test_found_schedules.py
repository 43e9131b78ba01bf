"""Plans whose schedule the search was told to find, run on eight devices beside the same step on one."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from one_device import assert_equal_trees, copy
from pipelines import whole

from meshwright import zoo
from meshwright.cluster import load_cluster
from meshwright.program.staged import staged_program
from meshwright.program.trace import trace_program
from meshwright.runtime.pipeline.step import PipelinedStep
from meshwright.search.intra.parameters import parameter_infos
from meshwright.search.pipelines.driver import StageRequest, search_stages


@pytest.mark.parametrize(
    ("name", "schedule", "stages"),
    [
        ("mlp-tiny", "interleaved_one_f_one_b", 4),
        pytest.param("gpt-tiny", "interleaved_one_f_one_b", 4, marks=pytest.mark.slow),
        ("mlp-tiny", "zero_bubble", 2),
    ],
)
def test_a_found_schedule_trains_as_one_device_does(name: str, schedule: str, stages: int) -> None:
    target = zoo.build(name)
    state, batch = target.init(jax.random.key(0)), target.make_batch(jax.random.key(1))
    program = trace_program(target.step, (state, batch), microbatches=4)
    plan = search_stages(
        StageRequest(
            programs=[staged_program(program)], parameters=parameter_infos(program), cluster=load_cluster("local"),
            stages=stages, schedules=(schedule,),
        )
    ).plan  # fmt: skip
    assert plan.schedule == schedule
    step = PipelinedStep(program, plan, jax.devices())
    alone: Any = jax.jit(target.step)
    expected, found = state, copy(state)
    for _ in range(2):
        expected, metrics = alone(expected, batch)
        found, again = step(found, batch)
    assert_equal_trees(whole((found, again)), whole((expected, metrics)))
