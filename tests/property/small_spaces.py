"""Small spaces of plans with their optimum, found by looking at every structure and proving its layouts.

`whole` has so few choices that every single one is priced. In those of one stage its step is the objective of its
integer program: the optimum is the least over all structures, each solved by HiGHS alone. The others have several
stages on two devices, in all numbers of microbatches. Of these a stage that is not alone is on one device, where all
layouts take and hold the same: the optimum is the least price of all structures.
"""

from __future__ import annotations

import dataclasses
from functools import cache
from math import inf
from typing import Any

from meshwright import zoo
from meshwright.cluster import Cluster, load_cluster
from meshwright.program.staged import staged_program
from meshwright.program.trace import trace_program
from meshwright.search.intra.parameters import parameter_infos
from meshwright.search.pipelines.request import StageRequest
from meshwright.search.rivals import Budget, Found
from meshwright.search.rivals.exhaustive import Exhaustive
from meshwright.search.space.choice import Choice
from meshwright.search.space.space import Space
from meshwright.solve import Infeasible, Problem, solve_by_milp
from meshwright.zoo import gpt, moe


def devices(count: int, memory_bytes: float | None = None) -> Cluster:
    """So many V100s of one host."""
    cluster = load_cluster("p3.16xlarge:1")
    cluster = dataclasses.replace(cluster, hosts=(dataclasses.replace(cluster.hosts[0], devices=count),))
    return cluster if memory_bytes is None else cluster.with_memory_limit(memory_bytes)


def targets() -> dict[str, Any]:
    """Steps by name."""
    small_gpt = gpt.GPTConfig(name="gpt", hidden=32, layers=1, heads=2, sequence=16, vocabulary=64, global_batch=8)
    return {
        "mlp-1": zoo.mlp(width=64, layers=1, batch=16, bias=False, optimizer="sgd"),
        "mlp-3": zoo.mlp(width=512, layers=3, batch=64),
        "wide": zoo.mlp(width=1024, layers=4, batch=8, bias=False, optimizer="sgd"),
        "long": zoo.mlp(width=256, layers=4, batch=512, bias=False, optimizer="sgd"),
        "gpt-1": gpt.build(small_gpt),
        "moe-2": moe.build(dataclasses.replace(moe.CONFIGS["moe-tiny"], layers=2)),
    }


# A step, devices, their memory in bytes, numbers of microbatches, and what else is asked.
SPACES: dict[str, tuple[str, int, float | None, tuple[int, ...], dict[str, Any]]] = {
    "whole": ("mlp-1", 2, None, (1, 2), {}),
    "mlp": ("mlp-3", 4, None, (1, 2), {"stages": 1}),
    "tight": ("mlp-3", 4, 7.5e6, (1, 2), {"stages": 1}),
    "gpt": ("gpt-1", 2, None, (1,), {"stages": 1}),
    "moe": ("moe-2", 2, None, (2,), {"stages": 1}),
    "two stages": ("wide", 2, None, (1, 2, 4, 8), {"stages": 2}),
    "any stages": ("long", 2, None, (1, 2, 4, 8), {}),
    "any stages, tight": ("long", 2, 3.6e6, (1, 2, 4, 8), {"remat": "none"}),
}

# Spaces of which every structure is priced.
STRUCTURES = ("two stages", "any stages", "any stages, tight")

# The same of a space that is too large for its optimum to be known.
PIPELINES = "pipelines"
_STEPS = {**SPACES, PIPELINES: ("gpt-1", 4, None, (2, 4), {})}


@cache
def _programs(name: str, counts: tuple[int, ...]) -> tuple[Any, Any]:
    target = targets()[name]
    args = target.example_state, target.example_batch
    traced = [trace_program(target.step, args, microbatches=count) for count in counts]
    return [staged_program(one) for one in traced], tuple(parameter_infos(traced[0]))


@cache
def space(name: str, gap: float = 1e-6) -> Space:
    """The space of this name."""
    step, count, memory, counts, wishes = _STEPS[name]
    programs, infos = _programs(step, counts)
    request = StageRequest(programs=programs, parameters=infos, cluster=devices(count, memory), **wishes)
    return Space(request, gap=gap)


@cache
def every_choice_priced() -> tuple[Found, ...]:
    """What looking at every single choice of `whole` finds."""
    return tuple(Exhaustive().run(space("whole"), Budget()))


@cache
def optimum(name: str) -> float:
    """Seconds of the best plan."""
    if name == "whole":
        return every_choice_priced()[-1].seconds
    if name in STRUCTURES:
        return min(price.seconds for price in map(space(name).price, space(name).structures.all()) if price.fits)
    return min(_least_seconds(space(name), structure) for structure in space(name).structures.all())


def _least_seconds(of: Space, structure: Choice) -> float:
    numbers = of.stages.layouts(structure, 0).numbers
    limited = Problem(
        costs=numbers.costs, edges=numbers.edges, memory=numbers.memory, memory_limit=numbers.memory_limit
    )
    try:
        return solve_by_milp(limited).objective
    except Infeasible:
        return inf
