"""The search methods of the literature side by side: one problem, the same costs, the same time for each.

Every method has a space of its own, so that none finds what another has worked out; the step's programs are traced
before, once for all. What methods share all the same are tables of prices that are kept for the process, which the
first one to run fills.
"""

from __future__ import annotations

import gc
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from math import inf, isfinite
from time import perf_counter
from typing import Any

from ._jax.context import no_mesh
from .cluster import Cluster
from .errors import PlanError
from .planning.checks import as_traced_for, request_of
from .planning.method import choice_words, space_of
from .planning.request import PlanOptions
from .program.traces import traces_of
from .report.curves import Curve, curves_svg
from .report.table import format_percent, format_seconds, format_table
from .search.rivals import SEARCH_NAMES, Budget, Search, search_named
from .search.space.space import Space


@dataclass(frozen=True, slots=True, kw_only=True)
class Point:
    """What a method knew at a time.

    Args:
      after_seconds: since it began.
      step_seconds: of its best plan.
      lower_bound: no plan takes less; 0 where nothing is known. Seconds.
    """

    after_seconds: float
    step_seconds: float
    lower_bound: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Searched:
    """A method's run.

    Args:
      name: of the method.
      paper: that it is from.
      points: in order of time; empty where it found nothing.
      plan: its best plan in a few words; "" for none.
      evaluations: choices that it priced.
      seconds: that it ran.
      reason: why it does not apply or found nothing, "" where it found something.
    """

    name: str
    paper: str
    points: tuple[Point, ...]
    plan: str
    evaluations: int
    seconds: float
    reason: str = ""

    @property
    def step_seconds(self) -> float:
        """Of its best plan; infinite where there is none."""
        return self.points[-1].step_seconds if self.points else inf

    @property
    def lower_bound(self) -> float:
        """Of all plans, as it proved; seconds."""
        return self.points[-1].lower_bound if self.points else 0.0

    @property
    def best_after_seconds(self) -> float:
        """When it had its best plan."""
        return next((one.after_seconds for one in self.points if one.step_seconds <= self.step_seconds), inf)


@no_mesh()
def run_searches(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    cluster: Cluster | str = "local",
    methods: Sequence[str] | None = None,
    time_limit_seconds: float = 60.0,
    seed: int = 0,
    tell: Callable[[str], None] = lambda text: None,
    **options: Any,
) -> tuple[Searched, ...]:
    """Run search methods on one problem, one after the other.

    Args:
      step: as of `plan_for`.
      args: as of `plan_for`.
      cluster: as of `plan_for`.
      methods: names; None for all.
      time_limit_seconds: for each method.
      seed: of random numbers.
      tell: called with a few words at each part of the work.
      options: of `plan_for`: microbatches, memory_per_device, stages, mesh, zero, remat and the like. Any number of
        stages where nothing is said.

    Returns:
      The runs: the fastest plan first, then those without a plan.

    Raises:
      PlanError: for a wrong request, or a method that does not exist.
    """
    searches = [search_named(name) for name in (SEARCH_NAMES if methods is None else methods)]
    wanted: dict[str, Any] = {"stages": None, **options}
    asked_for = PlanOptions(cluster=cluster, time_limit_seconds=time_limit_seconds, **wanted)
    with as_traced_for(asked_for):
        asked = request_of(traces_of(step), args, asked_for, started=perf_counter(), tell=tell)
        asked.expectations.give_up()  # every number of microbatches is traced: nothing has to be searched again
        tell("tracing")
        space = space_of(asked)
        found = []
        for search in searches:
            found.append(_searched(search, Space(space.request), time_limit_seconds, seed, tell))
            gc.collect()  # a space holds up to a gigabyte, in cycles, and the next method begins another one
    return tuple(sorted(found, key=lambda one: one.step_seconds))


def _searched(search: Search, space: Space, seconds: float, seed: int, tell: Callable[[str], None]) -> Searched:
    tell(f"searching by {search.name}")
    budget, points, plan = Budget(seconds=seconds, seed=seed), [], ""
    run = Searched(name=search.name, paper=search.paper, points=(), plan="", evaluations=0, seconds=0.0)
    try:
        for found in search.run(space, budget):
            points.append(
                Point(
                    after_seconds=budget.spent_seconds, step_seconds=found.seconds, lower_bound=found.lower_bound
                )
            )  # fmt: skip
            plan = choice_words(space, found.choice)
        reason = "" if points else f"no plan that fits in {format_seconds(seconds)}"
    except PlanError as error:
        reason = str(error) if not points else ""
    return replace(
        run, points=tuple(points), plan=plan, evaluations=budget.evaluations, seconds=budget.spent_seconds,
        reason=reason,
    )  # fmt: skip


def least_proven(searched: Sequence[Searched]) -> float:
    """The highest lower bound that any method proved; seconds."""
    return max((one.lower_bound for one in searched), default=0.0)


def searches_text(searched: Sequence[Searched]) -> str:
    """A table of the methods that found a plan, the fastest first, and the reasons of the others."""
    best = searched[0].step_seconds if searched else inf
    rows = [
        (
            one.name, one.plan, format_seconds(one.step_seconds), f"{one.step_seconds / best:.3f}",
            format_percent(max(1 - one.lower_bound / one.step_seconds, 0.0)), format_seconds(one.best_after_seconds),
            format_seconds(one.seconds), str(one.evaluations),
        )
        for one in searched if one.points
    ]  # fmt: skip
    heads = ("method", "plan", "step", "of the best", "gap", "best after", "ran", "evaluations")
    lines = [format_table(heads, rows, left=2)] if rows else []
    if rows:
        bound = least_proven(searched)
        lines.append(f"\nNo plan takes less than {format_seconds(bound)}, {bound / best:.3f} of the best")
    if missing := [f"  {one.name}: {one.reason}" for one in searched if not one.points]:
        lines += ["\nWithout a plan:", *missing]
    return "\n".join(lines)


def searches_document(target: str, searched: Sequence[Searched]) -> dict[str, Any]:
    """What `meshwright searches --json` prints.

    Args:
      target: as the user named it.
      searched: from `run_searches`.
    """
    return {"schema": 1, "target": target, "methods": [_document(one) for one in searched]}


def _document(one: Searched) -> dict[str, Any]:
    return {
        "name": one.name,
        "paper": one.paper,
        "reason": one.reason or None,
        "plan": one.plan or None,
        "step_seconds": one.step_seconds if isfinite(one.step_seconds) else None,
        "lower_bound_seconds": one.lower_bound,
        "best_after_seconds": one.best_after_seconds if one.points else None,
        "seconds": one.seconds,
        "evaluations": one.evaluations,
        "points": [[point.after_seconds, point.step_seconds, point.lower_bound] for point in one.points],
    }


def searches_svg(title: str, searched: Sequence[Searched]) -> str:
    """The best step of each method over time, and the highest lower bound, as an SVG.

    Args:
      title: of the plot.
      searched: from `run_searches`.
    """
    curves = [
        Curve(name=one.name, points=tuple((p.after_seconds, p.step_seconds) for p in one.points), ends=one.seconds)
        for one in searched if one.points
    ]  # fmt: skip
    return curves_svg(
        title, curves, x_title="seconds of search", y_title="seconds of a step", floor=least_proven(searched)
    )
