"""Plans of one stage: the best layouts for the fewest microbatches that fit, checked against the traced program.

The solver's memory row is linear: what is kept, by the spec it is kept in. The peak of the step it would run is known
only once the step is written out; so the found plan is traced (nothing is compiled) and its predicted peak compared
with what a device has. A plan that exceeds it is refused and the search repeated under a tighter row.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace

from .errors import MemoryExceeded, PlanError, size_words
from .plan import Memory, Plan
from .plan_request import Planning, PlanRequest
from .program.batch import batch_extents, batch_inputs
from .program.trace import Program
from .runtime.local_step import LocalStep
from .search.hierarchical import HierarchicalSearch, SearchRequest, SearchResult
from .search.parameters import parameter_infos

# How often a plan whose traced peak is too high is searched again with less memory.
_ATTEMPTS = 6

# How many numbers of microbatches are tried to spare computing activations again.
_MOST_FINER = 3

# The predicted peak is a few percent off at times: this much of a device stays free.
MARGIN = 1.04


def plan_one_stage(asked: PlanRequest) -> Planning:
    """The fastest plan of one stage: in the fewest microbatches that fit, or, where these fit only because activations
    are computed again, in the fewest in which they need not be, whichever is faster.

    Raises:
      PlanError: if the request makes no sense, or nothing fits.
    """
    count = asked.microbatches if asked.microbatches is not None else 1
    short: MemoryExceeded | None = None
    while True:
        try:
            program = _traced(asked, count)
        except PlanError as error:
            if short is None:
                raise
            # More microbatches were our idea: the user asked for a plan that fits.
            raise short.but(f"more microbatches are out of the question: {error}") from error
        try:
            found = _in_microbatches(asked, program, count, asked.remat)
        except MemoryExceeded as error:
            short = error
            more = _more_microbatches(asked, program, max(2 * count, error.fewest_microbatches))
            if asked.microbatches is not None or more is None:
                raise
            count = more
            continue
        if asked.microbatches is None and asked.remat is None and found.plan.stages[0].rematerialised:
            found = _not_again(asked, program, count, found)
        return found


def _not_again(asked: PlanRequest, program: Program, count: int, found: Planning) -> Planning:
    """The faster of a plan that computes activations again and one in more microbatches that does not."""
    for _ in range(_MOST_FINER):
        more = _more_microbatches(asked, program, count + 1)
        if more is None:
            break
        count, skipped = more, f"{more} microbatches, nothing rematerialised: not searched, out of time"
        if asked.left_seconds < 0:
            return found.unfinished(skipped, asked.least_work_seconds)
        try:
            program = _traced(asked, count)
            finer = _in_microbatches(asked, program, count, "none", late=lambda: asked.left_seconds < 0)
        except _OutOfTime:
            return found.unfinished(skipped, asked.least_work_seconds)
        except MemoryExceeded as error:
            # The next number is where this one's least would fit.
            count = max(2 * count, error.fewest_microbatches) - 1
            continue
        except PlanError:
            break  # it was our idea
        taken, other = (finer, found) if finer.step_seconds < found.step_seconds else (found, finer)
        return taken.preferred_to(other)
    return found


def _traced(asked: PlanRequest, count: int) -> Program:
    """The step in so many microbatches."""
    asked.tell("tracing" + _with(count))
    return asked.program(count)


def _with(count: int) -> str:
    return "" if count == 1 else f" with {count} microbatches"


class _OutOfTime(Exception):
    """The time was over before a plan had turned out to fit, and another one is known."""


def _in_microbatches(
    asked: PlanRequest, program: Program, count: int, remat: str | None, late: Callable[[], bool] = lambda: False
) -> Planning:  # fmt: skip
    """The fastest plan in so many microbatches.

    Raises:
      MemoryExceeded: if none fits.
      _OutOfTime: if it is late before one is known to fit.
    """
    preset, pinned = asked.preset, asked.pins
    if preset is not None:
        batch = batch_inputs(program, asked.traces, asked.args, batch_axis=asked.batch_axis)
        roles = preset.roles_in(program, batch, where=asked.traces.name)
        pinned = replace(pinned, roles=roles, gradient_exchange=preset.gradient_exchange)
    request = SearchRequest(
        graph=program.graph, fingerprint=program.fingerprint, parameters=parameter_infos(program),
        cluster=asked.cluster, microbatches=count, mesh=asked.mesh, pins=pinned, remat=remat,
        carried=0 if program.marked else program.state_inputs,
        split_dims=program.split_dims,
        time_limit_seconds=max(asked.left_seconds, 0.0),
    )  # fmt: skip
    pinned.check(program.input_names, [program.graph.values[v].name for v in program.graph.inputs])
    result = _search_within_memory(program, request, lambda text: asked.tell(text + _with(count)), late)
    return Planning(
        program=program, plan=result.plan, cluster=asked.cluster, considered=result.considered,
        alternatives=result.alternatives,
    )  # fmt: skip


def _search_within_memory(
    program: Program, request: SearchRequest, tell: Callable[[str], None], late: Callable[[], bool]
) -> SearchResult:
    """The best plan whose traced peak fits; arguments and what is raised as of `_in_microbatches`."""
    usable = request.cluster.device.usable_memory_bytes
    search = HierarchicalSearch(request, tell)
    row = usable
    peak = 0.0
    leanest: Plan | None = None
    for _ in range(_ATTEMPTS):
        try:
            result = search.plan(row)
        except MemoryExceeded as error:
            if leanest is not None:
                raise _over(request, usable, leanest, peak) from error
            raise
        if late():
            raise _OutOfTime
        tell("predicting memory")
        predicted = LocalStep(program, result.plan).predicted_memory(request.cluster.device.platform)
        leanest, peak = result.plan, float(predicted.peak_bytes)
        if peak * MARGIN <= usable:
            return replace(result, plan=_with_memory(result.plan, peak))
        counted = result.plan.stages[0].memory.total
        # What the row does not see stays about the same: leave room for it.
        row = min(0.98 * counted, usable / MARGIN - max(peak - counted, 0.0))
        if row <= 0:
            break
    assert leanest is not None  # there is an attempt
    raise _over(request, usable, leanest, peak)


def _over(request: SearchRequest, usable: float, leanest: Plan, peak: float) -> MemoryExceeded:
    error = MemoryExceeded(
        refused=f"a plan for {request.cluster.num_devices} x {request.cluster.device.kind}",
        got=f"{size_words(usable)} usable on a device",
        needed=f"about {size_words(MARGIN * peak)} on a device, the predicted peak of the leanest plan found with "
        f"{request.microbatches} microbatches",
        where="stage 1 of 1",
        try_="more devices, a smaller batch" + (', or remat="layer"' if request.remat == "none" else ""),
    )
    memory = leanest.stages[0].memory
    known = memory.parameters + memory.gradients + memory.optimizer
    if known < usable / MARGIN:
        # At best all the rest shrinks with the microbatch.
        error.fewest_microbatches = math.floor(request.microbatches * (peak - known) / (usable / MARGIN - known))
    return error


def _with_memory(plan: Plan, peak: float) -> Plan:
    """The plan with its activations and workspace as traced."""
    (stage,) = plan.stages
    known = stage.memory.parameters + stage.memory.gradients + stage.memory.optimizer
    held = max(peak - known, 0.0)
    activations = min(stage.memory.activations, held)
    memory = Memory(
        parameters=stage.memory.parameters,
        gradients=min(stage.memory.gradients, max(peak - stage.memory.parameters - stage.memory.optimizer, 0.0)),
        optimizer=stage.memory.optimizer,
        activations=activations,
        workspace=held - activations,
    )
    return replace(plan, stages=(replace(stage, memory=memory),))


def _more_microbatches(asked: PlanRequest, program: Program, least: int) -> int | None:
    """The next number of microbatches, at least so many, of which each can be cut into a preset's blocks, or None."""
    blocks = asked.preset.blocks if asked.preset is not None else 1
    extents = batch_extents(asked.args, asked.batch_axis) if program.marked else []
    if not extents:
        return None
    return next((m for m in range(least, min(extents) + 1) if all(e % (m * blocks) == 0 for e in extents)), None)
