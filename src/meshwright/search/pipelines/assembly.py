"""From solved stages and their schedule to the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from ...cluster import Cluster
from ...plan import (
    Plan,
    Prediction,
    Stage,
    Transfer,
)
from ...plan.check import check_plan
from ...program.staged import StagedProgram
from ..inter.problem import PlacedStage
from ..intra.account import account
from ..intra.solved_plan import counted_memory, input_plans, operator_plans, parameter_plans
from ..stages.costs import StageCosts
from ..stages.crossings import edge_bytes
from ..stages.segments import moved_segments
from ..stages.solved import SolvedStage
from .timing import Scheduled, StagedTiming


def assemble(
    costs: StageCosts,
    stages: Sequence[PlacedStage],
    staged: StagedTiming,
    scheduled: Scheduled,
    cluster: Cluster,
    *,
    gap: float = inf,
) -> Plan:
    """The plan of solved stages. With one stage it is a plan without a schedule, like those of `one_stage`.

    Args:
      costs: that solved the stages.
      stages: in program order.
      staged: their timing.
      scheduled: the schedule and its simulation.
      cluster: where it runs.
      gap: how much less any other stages can take, relative; infinite where nobody has looked for any.
    """
    program = costs.program
    ranks = scheduled.schedule.stage_ranks
    # Stages of a rank share the largest.
    workspaces = [
        max(_solved(other).seconds.workspace_bytes for other, at in zip(stages, ranks, strict=True) if at == rank)
        / ranks.count(rank)
        for rank in ranks
    ]
    parts = [
        planned_stage(
            costs, stage, scheduled.schedule.in_flight[number], scheduled.schedule.delayed[number],
            staged.timing.stages[number].synchronise_seconds, workspaces[number],
        )
        for number, stage in enumerate(stages)
    ]  # fmt: skip
    single = len(parts) == 1
    if single:
        parts = [replace(parts[0], layers=(0, 1), equations=None)]
    seconds = scheduled.step_seconds
    devices = len({device for stage in parts for device in stage.devices})
    executed = sum(
        account(solved.problem, solved.chosen).flops * len(part.devices)
        for part, solved in zip(parts, map(_solved, stages), strict=True)
    )
    # Forward, and for what is differentiated the gradients of both operands.
    model_flops = program.graph.flops * program.microbatches * (3 if program.graph.parameters else 1)
    plan = Plan(
        program=program.fingerprint,
        cluster=cluster.name,
        cluster_fingerprint=cluster.fingerprint(),
        microbatches=program.microbatches,
        schedule="none" if single else scheduled.name,
        stages=tuple(parts),
        predicted=Prediction(
            step_seconds=seconds,
            tflops_per_device=model_flops / max(seconds, 1e-30) / devices / 1e12,
            flops_per_device=executed / devices,
            optimality_gap=1 - (1 - gap) * (1 - max(_solved(stage).chosen.solution.gap for stage in stages)),
            bubble_fraction=0.0 if single else scheduled.timeline.bubble_fraction,
        ),
        schedule_options=() if single else scheduled.options,
        scan_splits=tuple(sorted(program.scan_splits.items())),
        transfers=_transfers(program, staged),
    )
    check_plan(plan, source="the plan found")
    return plan


def _solved(stage: PlacedStage) -> SolvedStage:
    return stage.option.tag


def planned_stage(
    costs: StageCosts, placed: PlacedStage, in_flight: int, delayed: int, synchronise_seconds: float,
    workspace_bytes: float,
) -> Stage:  # fmt: skip
    """A stage of the plan; the solution may be that of an equal range elsewhere, so names and paths are the stage's
    own.

    Args:
      costs: that solved it.
      placed: the solved stage.
      in_flight: the most microbatches that it holds.
      delayed: the most of them that wait for their weight gradient.
      synchronise_seconds: of its gradients, once a step.
      workspace_bytes: its share of its devices' workspace.
    """
    solved, program = _solved(placed), costs.program
    cut = costs.solver.cut(placed.first, placed.last)
    graph, chosen, sizes = cut.graph, solved.chosen, solved.problem.sizes
    infos = costs.solver.parameters_of(cut)
    totals = account(solved.problem, chosen)
    seconds, count = solved.seconds, program.microbatches
    rows = [held.rows for held in cut.parameters]
    part = costs.submeshes.part(placed.submesh)
    return Stage(
        layers=(placed.first, placed.last),
        devices=tuple(range(placed.submesh.first, placed.submesh.stop)),
        mesh=tuple(sizes.items()),
        operators=operator_plans(graph, chosen),
        settled=tuple(sorted((cut.values[value], spec) for value, spec in chosen.resharded_once.items())),
        parameters=parameter_plans(graph, chosen, infos, rows, solved.problem),
        inputs=input_plans(graph, chosen),
        rematerialised=tuple(
            sorted(moved_segments(solved.segments, cut.equations[0] - solved.cut.equations[0]).items())
        ),
        memory=counted_memory(
            graph, chosen, infos, solved.problem, solved.own_bytes(in_flight, delayed), workspace_bytes
        ),
        memory_limit_bytes=part.device.usable_memory_bytes,
        device_kind=part.device_kinds,
        communication=totals.collectives,
        flops=totals.flops,
        compute_seconds=totals.compute_seconds,
        communication_seconds=totals.communication_seconds,
        equations=cut.equations,
        forward_seconds=seconds.forward_seconds,
        backward_seconds=seconds.backward_seconds,
        weight_seconds=seconds.weight_seconds,
        synchronise_seconds=synchronise_seconds,
        update_seconds=seconds.update_seconds,
        in_flight=min(in_flight, count),
        gradient_exchange=solved.problem.gradient_exchange,
    )


def _transfers(program: StagedProgram, staged: StagedTiming) -> tuple[Transfer, ...]:
    """The transfers of a plan: an edge is one transfer, whose seconds are divided among its values by bytes."""
    seconds = {(e.edge.source, e.edge.target): e for e in staged.timing.edges}
    found = []
    for one in staged.sent:
        edge = seconds[one.source, one.target]
        forward, backward = edge_bytes(staged.sent, one.source, one.target)
        back = one.bytes / backward if one.differentiated and backward > 0 else 0.0
        found.append(
            Transfer(
                source=one.source,
                target=one.target,
                name=program.graph.values[one.value].name,
                value=one.value,
                bytes=one.bytes,
                differentiated=one.differentiated,
                forward_seconds=edge.forward_seconds * (one.bytes / forward if forward > 0 else 0.0),
                backward_seconds=edge.backward_seconds * back,
            )
        )
    return tuple(found)
