"""Plans that no planner would take by itself, found by other search methods, train as one device does."""

from __future__ import annotations

from typing import Any

import jax
import pytest
from one_device import assert_equal_trees, copy
from pipelines import whole

import meshwright as mw
from meshwright import zoo


@pytest.mark.parametrize(
    ("name", "method", "stages"),
    [
        pytest.param("mlp-tiny", "mcmc", 1, marks=pytest.mark.slow),
        ("mlp-tiny", "reinforce", 2),
        pytest.param("gpt-tiny", "mcts", 1, marks=pytest.mark.slow),
        pytest.param("moe-tiny", "dynamic_programming", 2, marks=pytest.mark.slow),
    ],
)
def test_a_plan_of_a_search_method_trains_as_one_device_does(name: str, method: str, stages: int) -> None:
    target = zoo.build(name)
    state, batch = target.init(jax.random.key(0)), target.make_batch(jax.random.key(1))
    alone: Any = jax.jit(target.step)
    step = mw.parallelize(
        target.step, cluster="local", method=method, stages=stages, microbatches=2, time_limit_seconds=1.0
    )
    assert f"found by the search method {method}" in step.plan(state, batch).notes
    expected, found = state, copy(state)
    for _ in range(2):
        expected, metrics = alone(expected, batch)
        found, again = step(found, batch)
    assert_equal_trees(whole((found, again)), whole((expected, metrics)))
