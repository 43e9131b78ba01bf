"""Plans of one stage: the best of all numbers of microbatches, whatever memory there is."""

from __future__ import annotations

from typing import Any

import pytest

from meshwright import zoo
from meshwright.cluster import load_cluster
from meshwright.errors import MemoryExceeded, PlanError
from meshwright.planning.plan_for import plan_for
from meshwright.planning.request import Planning

CLUSTER = load_cluster("p3.16xlarge:1")


def planned(target: Any, **options: Any) -> Planning:
    return plan_for(target.step, (target.example_state, target.example_batch), cluster=CLUSTER, **options)


def peak(planning: Planning) -> float:
    return planning.plan.stages[0].memory.total


@pytest.mark.parametrize(
    "target",
    [zoo.mlp(width=512, layers=4, batch=512), pytest.param(zoo.registry.build("gpt-tiny"), marks=pytest.mark.slow)],
    ids=["mlp", "gpt"],
)
@pytest.mark.parametrize("share", [0.9, 0.6, 0.4])
def test_it_is_the_best_of_all_numbers_of_microbatches(target: Any, share: float) -> None:
    """Each number is planned by itself; in a share of the memory that the fastest plan needs some do not fit."""
    memory = share * 1.04 * peak(planned(target))
    found = planned(target, memory_per_device=memory)
    seconds = {}
    for count in (1, 2, 4, 8, 16, 32):
        try:
            seconds[count] = planned(target, memory_per_device=memory, microbatches=count).step_seconds
        except MemoryExceeded:
            continue
        except PlanError:
            break  # it cannot be cut so finely
    best = min(seconds.values())
    assert found.least_seconds <= best * (1 + 1e-9)
    assert found.step_seconds <= best * 1.005
    assert peak(found) * 1.04 <= found.plan.stages[0].memory_limit_bytes * (1 + 1e-9)


def test_pins_that_finer_microbatches_cannot_have_are_no_refusal() -> None:
    """64 examples over eight devices: in 16 microbatches there are four for each to share."""
    target = zoo.mlp(width=512, layers=4, batch=64)
    pins = {"args[1]*": ("x", None)}
    free = planned(target, mesh=(8,), pins=pins)
    memory = 0.97 * 1.04 * peak(free)
    assert planned(target, mesh=(8,), pins=pins, memory_per_device=memory).plan.stages


def test_what_fits_in_no_number_is_refused_by_the_one_that_needs_least() -> None:
    target = zoo.mlp(width=512, layers=4, batch=64)
    with pytest.raises(
        MemoryExceeded, match=r"got 1\.907 MiB usable on a device; needed at least .* with 32 microbatches"
    ):
        planned(target, memory_per_device=2e6)
