"""Other plans worth timing beside the one that is predicted to be the fastest: what it was free to choose, changed.

A cost model errs where it compares unlike things, so the alternatives differ in kind: each other logical mesh of up to
two axes, twice the microbatches, data parallelism, ZeRO-3, tensor parallelism. Whatever the user asked for stays as it
is. Of plans that compute and move the same one is kept, and of the rest the fastest by prediction.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any

from ..cluster import Cluster
from ..errors import PlanError
from ..plan import Plan
from .request import Planning, PlanOptions

# So many plans are timed at most.
MOST = 4

# What every search is given at least.
_LEAST_SECONDS = 1.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Candidate:
    """A plan to be timed.

    Args:
      name: in what it differs from the plan that was asked for.
      planning: the plan and how it was found.
    """

    name: str
    planning: Planning


def candidates(
    plan: Callable[[PlanOptions], Planning], options: PlanOptions, cluster: Cluster, *, tell: Callable[[str], None]
) -> list[Candidate]:
    """The plan that is asked for, then the best of the alternatives, the fastest by prediction first.

    Args:
      plan: finds a plan of one step.
      options: what was asked for.
      cluster: it is for.
      tell: called with a few words before each search.

    Raises:
      PlanError: if there is no plan for what was asked. An alternative that does not exist is none.
    """
    limit = options.time_limit_seconds
    asked = Candidate(name="as planned", planning=plan(options))
    ways = alternatives(options, cluster, asked.planning.plan)
    share = max(limit / max(len(ways), 1), min(limit, _LEAST_SECONDS))
    found = []
    for way in ways:
        name = ", ".join(f"{key}={value}" for key, value in way.items())
        tell(f"an alternative, {name}")
        # A preset decides the number of stages.
        free = replace(options, stages=None) if "preset" in way else options
        try:
            found.append(Candidate(name=name, planning=plan(replace(free, **way, time_limit_seconds=share))))
        except PlanError:
            continue
    kept, seen = [asked], {_essence(asked.planning.plan)}
    for one in sorted(found, key=lambda one: one.planning.step_seconds):
        if len(kept) < MOST and _essence(one.planning.plan) not in seen:
            seen.add(_essence(one.planning.plan))
            kept.append(one)
    return kept


def alternatives(options: PlanOptions, cluster: Cluster, asked: Plan) -> Sequence[dict[str, Any]]:
    """Options that differ from what was asked for only in what was left open.

    >>> from types import SimpleNamespace
    >>> from meshwright.cluster import load_cluster
    >>> asked = SimpleNamespace(microbatches=2, stages=(SimpleNamespace(mesh=(("x", 4),)),))
    >>> [*alternatives(PlanOptions(mesh=(4,)), load_cluster("rtx4090-4"), asked)]
    [{'microbatches': 4}]
    """
    ways: list[dict[str, Any]] = []
    free = options.mesh is None and options.preset is None and options.submeshes is None
    if free and options.stages in (1, None):
        mine = tuple(size for _, size in asked.stages[0].mesh) if len(asked.stages) == 1 else ()
        ways += [{"mesh": shape} for shape in cluster.logical_shapes(max_axes=2) if shape != mine]
        if options.zero is None and options.pins is None and options.schedule is None:
            tensor = [f"megatron(tp={n})" for n in _powers(min(host.devices for host in cluster.hosts))]
            ways += [{"preset": name} for name in ("data_parallel()", "zero(stage=3)", *tensor)]
    if options.microbatches is None:
        ways.append({"microbatches": 2 * asked.microbatches})
    return ways


def _powers(most: int) -> list[int]:
    return [2**power for power in range(1, most.bit_length())]


def _essence(plan: Plan) -> tuple[Any, ...]:
    """What a plan does: two that move and compute the same are one, whatever they call their axes."""
    parts = tuple((len(s.devices), s.communication, f"{s.compute_seconds:.6g}") for s in plan.stages)
    return (plan.microbatches, plan.schedule, parts)
