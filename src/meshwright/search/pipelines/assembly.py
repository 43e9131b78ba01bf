"""From solved stages and their schedule to the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from math import inf

from ...cluster import Cluster
from ...plan import Plan, Prediction, Stage, Transfer
from ...plan.check import check_plan
from ...program.staged import StagedProgram
from ...simulate import StageTiming
from ..inter.problem import PlacedStage
from ..intra.account import account
from ..intra.solved_plan import counted_memory, input_plans, operator_plans, parameter_plans
from ..stages.costs import StageCosts
from ..stages.crossings import edge_bytes
from ..stages.segments import moved_segments
from ..stages.solved import SolvedStage
from ..stages.solver import StageSolver
from .timing import Scheduled, ScheduleOptions, StagedTiming, stage_timing


def assemble(costs: StageCosts, stages: Sequence[PlacedStage], scheduled: Scheduled, *, gap: float = inf) -> Plan:
    """The plan of solved stages.

    Args:
      costs: that solved the stages.
      stages: in program order.
      scheduled: their schedule and its simulation.
      gap: how much less any other stages can take, relative; infinite where nobody has looked for any.
    """
    if len(stages) == 1:
        return plan_of_one(costs.solver, stages[0], scheduled.step_seconds, gap=gap)
    schedule, timings = scheduled.schedule, scheduled.staged.timing.stages
    ranks = schedule.stage_ranks
    # Stages of a rank share the largest.
    workspaces = [
        max(one.workspace_bytes for one, at in zip(timings, ranks, strict=True) if at == rank) / ranks.count(rank)
        for rank in ranks
    ]
    parts = [
        planned_stage(costs.solver, *one)
        for one in zip(stages, schedule.in_flight, schedule.delayed, timings, workspaces, strict=True)
    ]
    return plan_of(
        costs.program, costs.submeshes.cluster, parts, [_solved(stage) for stage in stages],
        schedule=scheduled.name, options=scheduled.options, step_seconds=scheduled.step_seconds,
        transfers=_transfers(costs.program, scheduled.staged), gap=gap,
        bubble_fraction=scheduled.timeline.bubble_fraction,
    )  # fmt: skip


def plan_of_one(solver: StageSolver, placed: PlacedStage, step_seconds: float, *, gap: float = 0.0) -> Plan:
    """The plan of one stage, which has no schedule; arguments as of `assemble`."""
    timing = stage_timing(_solved(placed))
    stage = planned_stage(solver, placed, 1, 0, timing, timing.workspace_bytes)
    return plan_of(
        solver.program, solver.submeshes.cluster, [replace(stage, layers=(0, 1), equations=None)], [_solved(placed)],
        schedule="none", step_seconds=step_seconds, gap=gap,
    )  # fmt: skip


def plan_of(
    program: StagedProgram, cluster: Cluster, parts: Sequence[Stage], solved: Sequence[SolvedStage], *,
    schedule: str, step_seconds: float, options: ScheduleOptions = (), bubble_fraction: float = 0.0, gap: float = 0.0,
    transfers: tuple[Transfer, ...] = (),
) -> Plan:  # fmt: skip
    """The plan of these parts of a program, each with its solution; the largest gap of a solution adds to `gap`."""
    devices = len({device for part in parts for device in part.devices})
    executed = sum(
        account(one.problem, one.chosen).flops * len(part.devices) for part, one in zip(parts, solved, strict=True)
    )
    # Forward, and for what is differentiated the gradients of both operands.
    own = program.source.unpadded_flops
    model_flops = (
        (program.graph.flops if own is None else own) * program.microbatches * (3 if program.graph.parameters else 1)
    )
    plan = Plan(
        program=program.fingerprint,
        cluster=cluster.name,
        cluster_fingerprint=cluster.fingerprint(),
        microbatches=program.microbatches,
        schedule=schedule,
        stages=tuple(parts),
        predicted=Prediction(
            step_seconds=step_seconds,
            tflops_per_device=model_flops / max(step_seconds, 1e-30) / devices / 1e12,
            flops_per_device=executed / devices,
            optimality_gap=1 - (1 - gap) * (1 - max(one.chosen.solution.gap for one in solved)),
            bubble_fraction=bubble_fraction,
        ),
        schedule_options=options,
        scan_splits=tuple(sorted(program.scan_splits.items())),
        transfers=transfers,
        padded=program.source.padded,
    )
    check_plan(plan, source="the plan found")
    return plan


def _solved(stage: PlacedStage) -> SolvedStage:
    return stage.option.tag


def planned_stage(
    solver: StageSolver, placed: PlacedStage, in_flight: int, delayed: int, timing: StageTiming, workspace_bytes: float
) -> Stage:
    """A stage of the plan; the solution may be that of an equal range elsewhere, so names and paths are the stage's
    own.

    Args:
      solver: that solved it.
      placed: the solved stage.
      in_flight: the most microbatches that it holds.
      delayed: the most of them that wait for their weight gradient.
      timing: of the stage.
      workspace_bytes: its share of its devices' workspace.
    """
    solved, program = _solved(placed), solver.program
    cut = solver.cut(placed.first, placed.last)
    graph, chosen, sizes = cut.graph, solved.chosen, solved.problem.sizes
    infos = solver.parameters_of(cut)
    totals = account(solved.problem, chosen)
    rows = [held.rows for held in cut.parameters]
    part = solver.submeshes.part(placed.submesh)
    segments = moved_segments(solved.segments, cut.equations[0] - solved.cut.equations[0])
    return Stage(
        layers=(placed.first, placed.last),
        devices=tuple(range(placed.submesh.first, placed.submesh.stop)),
        mesh=tuple(sizes.items()),
        operators=operator_plans(graph, chosen),
        settled=tuple(sorted((cut.values[value], spec) for value, spec in chosen.resharded_once.items())),
        parameters=parameter_plans(graph, chosen, infos, rows, solved.problem),
        inputs=input_plans(graph, chosen),
        rematerialised=tuple(sorted((level, tuple(runs)) for level, runs in segments.runs.items())),
        kept_inside=tuple(sorted(segments.kept)),
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
        forward_seconds=timing.forward_seconds,
        backward_seconds=timing.backward_seconds,
        weight_seconds=solved.seconds.weight_seconds,
        synchronise_seconds=timing.synchronise_seconds,
        update_seconds=timing.update_seconds,
        in_flight=min(in_flight, program.microbatches),
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
