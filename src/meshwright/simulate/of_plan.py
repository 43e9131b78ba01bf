"""A plan as the simulator takes it: its schedule, and the seconds and bytes that it predicts.

A plan of one stage is a pipeline of one rank. What a stage holds throughout, what it holds for each microbatch in
flight and its workspace follow from the plan's memory of the stage, of which the activations are those of all
microbatches in flight together.
"""

from __future__ import annotations

from math import isfinite

from ..errors import PlanError
from ..plan import Plan, Stage
from ..schedule import Edge, Schedule, make_schedule
from .simulate import simulate
from .timeline import Timeline
from .timing import EdgeTiming, StageTiming, Timing


def plan_schedule(plan: Plan) -> Schedule:
    """The schedule of a plan.

    Raises:
      PlanError: the plan's schedule is unknown, or its options do not suit it.
    """
    name = plan.schedule if len(plan.stages) > 1 else "one_f_one_b"
    edges = [Edge(source, target) for source, target in plan.edges]
    return make_schedule(name, len(plan.stages), plan.microbatches, edges=edges, **dict(plan.schedule_options))


def plan_timing(plan: Plan) -> Timing:
    """The seconds and bytes that a plan predicts.

    Raises:
      PlanError: nobody has priced it.
    """
    if plan.predicted is None or not any(stage.forward_seconds for stage in plan.stages):
        raise PlanError(
            refused="to simulate the plan", got="a plan without predicted seconds", needed="one that has been priced",
            where="plan.stages", try_="a plan that the search or a preset made",
        )  # fmt: skip
    splits = plan_schedule(plan).splits_backward
    sizes = [len(stage.devices) for stage in plan.stages]
    edges = []
    for source, target in plan.edges:
        mine = [t for t in plan.transfers if (t.source, t.target) == (source, target)]
        size = sum(t.bytes for t in mine)
        edges.append(
            EdgeTiming(
                edge=Edge(source, target),
                forward_seconds=sum(t.forward_seconds for t in mine),
                backward_seconds=sum(t.backward_seconds for t in mine),
                source_bytes=size / sizes[source],
                target_bytes=size / sizes[target],
            )
        )
    return Timing(
        stages=tuple(_stage(stage, splits=splits) for stage in plan.stages), edges=tuple(edges),
        # Every replica waits for the gradients of all.
        updates_wait_for_all=bool(plan.shares),
    )  # fmt: skip


def simulate_plan(plan: Plan) -> Timeline:
    """The predicted timeline of a plan.

    Raises:
      PlanError: nobody has priced it, or its schedule is not sound.
    """
    return simulate(plan_schedule(plan), plan_timing(plan))


def _stage(stage: Stage, *, splits: bool) -> StageTiming:
    memory = stage.memory
    return StageTiming(
        forward_seconds=stage.forward_seconds,
        backward_seconds=stage.backward_seconds,
        backward_input_seconds=stage.backward_seconds - stage.weight_seconds if splits else None,
        backward_weight_seconds=stage.weight_seconds if splits else None,
        synchronise_seconds=stage.synchronise_seconds,
        update_seconds=stage.update_seconds,
        constant_bytes=memory.parameters + memory.gradients + memory.optimizer,
        in_flight_bytes=memory.activations / stage.in_flight,
        workspace_bytes=memory.workspace if isfinite(memory.workspace) else 0.0,
    )
