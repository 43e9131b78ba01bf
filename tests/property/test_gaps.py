"""The gap of a plan against every plan there is: small programs, all microbatch counts, all numbers of stages."""

from __future__ import annotations

import random
from collections.abc import Callable, Iterable
from functools import cache
from math import isfinite, prod
from typing import Any

import pytest
from every_plan import EveryPlan, cluster_of, perceptron

from meshwright.errors import MemoryExceeded
from meshwright.search.result import plan_words
from meshwright.zoo import gpt

ROUNDING = 1e-6

# What is simpler to run is taken where it is slower by no more than this share (`planning`).
WORTH = 5e-3


def transformer(layers: int, batch: int) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Blocks between an embedding and a head that share their matrix."""
    config = gpt.GPTConfig(
        name="gpt", hidden=64, layers=layers, heads=2, sequence=32, vocabulary=128, global_batch=batch
    )
    target = gpt.build(config)
    return target.step, (target.example_state, target.example_batch)


# Requests: the step with its arguments, the cluster, and what a device may use of memory. Their best plans have a stage
# or several, one microbatch or many, a split backward or a whole one.
REQUESTS: dict[str, Callable[[], EveryPlan]] = {
    "one host": lambda: EveryPlan(*perceptron([64, 512, 512, 64], 64), cluster_of(1, 4)),
    "two hosts": lambda: EveryPlan(*perceptron([64, 512, 512, 64], 64), cluster_of(2, 2, nic=0.1, flops=0.01)),
    "tied": lambda: EveryPlan(
        *perceptron([64, 512, 512, 64], 12, tied=True), cluster_of(1, 2, flops=0.001, link=0.01)
    ),
    "a pipeline is best": lambda: EveryPlan(
        *perceptron([256] * 5, 32), cluster_of(1, 2, flops=0.0036, link=0.034, latency=0.24, kernel=0.015)
    ),
    "transformer": lambda: EveryPlan(
        *transformer(2, 8), cluster_of(1, 2, flops=0.02, link=0.02, latency=0.01, kernel=0.1)
    ),
    "transformer, two hosts": lambda: EveryPlan(
        *transformer(2, 8), cluster_of(2, 1, flops=0.02, link=0.02, nic=0.05, latency=0.01, kernel=0.1)
    ),
    "split backward of one microbatch": lambda: EveryPlan(
        *perceptron([256, 16, 256], 4), cluster_of(1, 2, flops=0.002, link=0.02, latency=0.01)
    ),
    "split backward of two": lambda: EveryPlan(
        *perceptron([1024] * 5, 4), cluster_of(1, 2, flops=0.012, link=0.0033, latency=0.003, kernel=0.012)
    ),
    "wide and narrow": lambda: EveryPlan(
        *perceptron([1024, 256, 64, 64], 16), cluster_of(1, 2, flops=0.027, link=0.024, latency=0.006, kernel=0.24)
    ),
    "bottleneck": lambda: EveryPlan(
        *perceptron([64, 1024, 64, 1024], 32),
        cluster_of(2, 2, flops=0.01, link=0.024, nic=0.093, latency=0.0024, kernel=0.056),
    ),
    "three stages": lambda: EveryPlan(
        *perceptron([64, 64, 64, 64, 16], 16),
        cluster_of(2, 2, flops=0.11, link=0.041, nic=0.65, latency=0.03, kernel=0.07),
    ),
    "products of one row": lambda: EveryPlan(
        *perceptron([1024] * 5, 4), cluster_of(1, 2, link=0.1, latency=0.1, kind="Tesla V100-SXM2-16GB")
    ),
    "little memory": lambda: EveryPlan(
        *perceptron([64, 1024, 1024, 256], 12),
        cluster_of(1, 4, flops=0.0029, link=0.058, latency=0.67, kernel=0.86), memory_bytes=7.2e6,
    ),
    "little memory, two hosts": lambda: EveryPlan(
        *perceptron([64] * 5, 32), cluster_of(2, 1, flops=0.119, link=0.133, nic=0.0138, latency=0.00129, kernel=0.747),
        memory_bytes=98.72e3,
    ),
    "little memory, one host": lambda: EveryPlan(
        *perceptron([64] * 5, 32),
        cluster_of(1, 2, flops=0.119, latency=0.00129, kernel=0.747, kind="Tesla V100-SXM2-16GB"), memory_bytes=100e3,
    ),
    "little memory, microbatches": lambda: EveryPlan(
        *perceptron([64] * 5, 32),
        cluster_of(1, 2, flops=0.119, latency=0.00129, kernel=0.747, kind="Tesla V100-SXM2-16GB"), memory_bytes=104e3,
    ),
    "little memory, a pipeline": lambda: EveryPlan(
        *perceptron([16, 16, 16, 16, 256], 12),
        cluster_of(2, 1, flops=0.01, link=0.0017, nic=0.0035, latency=0.0045, kernel=0.58), memory_bytes=84.6e3,
    ),
    "little memory, a wide end": lambda: EveryPlan(
        *perceptron([16, 256, 256, 1024], 30),
        cluster_of(2, 1, flops=0.59, nic=0.84, latency=0.0011, kernel=0.58), memory_bytes=3.535e6,
    ),
    "little memory, a wide beginning": lambda: EveryPlan(
        *perceptron([64, 256, 64, 16, 16], 8),
        cluster_of(2, 1, flops=0.94, nic=0.0026, latency=0.0033, kernel=0.017), memory_bytes=290e3,
    ),
    "two kinds": lambda: EveryPlan(
        *perceptron([256, 64, 256, 256], 32),
        cluster_of(2, 1, flops=0.008, link=0.13, nic=0.71, latency=0.025, kernel=0.1, last=2.0),
    ),
    "two kinds, four devices": lambda: EveryPlan(
        *perceptron([256, 64, 256, 256], 16),
        cluster_of(2, 2, flops=0.0057, link=0.71, nic=0.49, latency=0.0044, kernel=0.55, last=2.0),
    ),
}  # fmt: skip


@cache
def request(name: str) -> EveryPlan:
    return REQUESTS[name]()


def stage_counts(name: str) -> tuple[int | None, ...]:
    few = name.startswith("transformer")  # whose stages take the longest to be solved
    return (None, 1, 2) if few or request(name).cluster.num_devices == 2 else (None, 1, 2, 3)


def refuted(of: EveryPlan, stages: int | None) -> str:
    """What of a plan and its gap is refuted; "" for nothing."""
    best = of.best(stages)
    if best is None:
        return ""
    try:
        found = of.planned(stages)
    except MemoryExceeded as error:
        return f"{error}; but there is {best}"
    predicted = found.plan.predicted
    assert predicted is not None
    least = found.least_seconds if isfinite(predicted.optimality_gap) else 0.0
    if best.counted_seconds >= (1 - ROUNDING) * least:
        return ""
    less = 1 - best.counted_seconds / least
    words = f"{plan_words(found.plan)}, {found.step_seconds:.6g} s, gap {predicted.optimality_gap:.3%}"
    return f"-{less:.2%} of the bound of {words}: {best}"


# These differ from others in speeds and widths alone; that of little memory on two hosts from that on one, where too
# the best plan comes after hundreds that are traced and do not fit; and transformers, whose stages take the longest to
# be solved.
SLOW = {
    "transformer", "transformer, two hosts", "three stages", "two kinds, four devices", "little memory, a wide end",
    "little memory, a wide beginning", "little memory, two hosts",
}  # fmt: skip


def named(names: Iterable[str]) -> list[Any]:
    return [pytest.param(name, marks=[pytest.mark.slow] * (name in SLOW)) for name in names]


# Of the module: what one test has planned of a request the others have too.
every_request = pytest.mark.parametrize("name", named(REQUESTS), scope="module")


@every_request
def test_no_plan_takes_less_than_the_gap_says(name: str) -> None:
    assert not [words for stages in stage_counts(name) if (words := refuted(request(name), stages))]


@pytest.mark.parametrize(
    "name",
    named(name for name in REQUESTS if request(name).cluster.num_devices == 2 and "memory" not in name),
    scope="module",
)
def test_of_two_devices_every_plan_is_known(name: str) -> None:
    """Else the optimum that gaps are compared with would not be one.

    Where memory binds, the best layouts that fit may be others than the best that are counted to fit.
    """
    of = request(name)
    for stages in stage_counts(name):
        best, found = of.best(stages), of.planned(stages)
        assert best is not None
        assert found.counted_seconds >= (1 - ROUNDING) * best.counted_seconds, stages


@every_request
def test_any_number_of_stages_is_as_good_as_each(name: str) -> None:
    of = request(name)
    any_number, *given = (of.planned(stages).counted_seconds for stages in stage_counts(name))
    assert any_number <= min(given) * (1 + WORTH)


def test_the_best_plans_are_of_all_kinds() -> None:
    """Requests whose best plan is always one stage in one microbatch would test little."""
    best = [request(name).best(None) for name in REQUESTS if name not in SLOW]
    kinds = {(len(one.choice.stages) > 1, one.choice.microbatches > 1, one.schedule) for one in best if one is not None}
    assert {kind[:2] for kind in kinds} == {(False, False), (False, True), (True, False), (True, True)}
    assert {"zero_bubble", "adaptive"} <= {schedule for _, _, schedule in kinds}


def generated(seed: int) -> EveryPlan:
    """A perceptron on a cluster, both of random sizes and speeds; from seed 60 on in little memory."""
    rng = random.Random(seed)
    depth = rng.choice([2, 3, 3, 4])
    widths = [rng.choice([16, 64, 256, 1024]) for _ in range(depth + 1)]
    if rng.random() < 0.5:
        widths = widths[:1] * (depth + 1)
    tied = rng.random() < 0.2
    if tied:
        widths[-1], widths[-2] = widths[0], widths[1]
    batch, (hosts, devices) = rng.choice([4, 8, 12, 30]), rng.choice([(1, 2), (2, 1), (1, 4), (2, 2)])
    speeds = {name: 10 ** rng.uniform(-3, 0) for name in ("flops", "link", "nic", "latency", "kernel")}
    step, args = perceptron(widths, batch, tied=tied)
    held = 2 * sum(4 * prod(one.shape) for one in args[0].values()) / (hosts * devices)
    memory = rng.uniform(1.0, 2.5) * (held + 12 * batch * max(widths)) if seed >= 60 else None
    return EveryPlan(step, args, cluster_of(hosts, devices, **speeds), memory_bytes=memory)


@pytest.mark.slow
@pytest.mark.parametrize("seed", range(100))
def test_no_plan_of_a_generated_request_takes_less_than_the_gap_says(seed: int) -> None:
    of = generated(seed)
    counts = [None, *sorted({len(one.choice.stages) for one in of.plans})]
    assert not [words for stages in counts if (words := refuted(of, stages))]
