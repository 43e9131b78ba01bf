"""From solved stages and their schedule to the plan."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from ..cluster import Cluster
from ..plan import (
    InputPlan,
    Memory,
    OperatorPlan,
    ParameterPlan,
    Plan,
    Prediction,
    Stage,
    Transfer,
)
from ..plan.check import check_plan
from ..program.staged import StagedProgram
from .account import account
from .gathers import gathered_axes
from .inter_op import PlacedStage
from .stage_costs import StageCosts
from .stage_segments import moved_segments
from .stage_solver import SolvedStage
from .staged_timing import Scheduled, StagedTiming, edge_bytes


def assemble(
    costs: StageCosts, stages: Sequence[PlacedStage], staged: StagedTiming, scheduled: Scheduled, cluster: Cluster
) -> Plan:
    """The plan of solved stages. With one stage it is a plan without a schedule, like those of `hierarchical`.

    Args:
      costs: that solved the stages.
      stages: in program order.
      staged: their timing.
      scheduled: the schedule and its simulation.
      cluster: where it runs.
    """
    program = costs.program
    parts = [
        _stage(costs, stage, scheduled.schedule.in_flight[number], staged.timing.stages[number].synchronise_seconds)
        for number, stage in enumerate(stages)
    ]
    single = len(parts) == 1
    if single:
        parts = [replace(parts[0], layers=(0, 1), equations=None)]
    seconds = scheduled.timeline.step_seconds
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
            # Which stages are best is not proven: ranges are estimated before they are solved.
            optimality_gap=_solved(stages[0]).chosen.solution.gap if single else float("inf"),
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


def _stage(costs: StageCosts, placed: PlacedStage, in_flight: int, synchronise_seconds: float) -> Stage:
    """A stage at its place; the solution may be that of an equal range elsewhere, so names and paths are its own."""
    solved, program = _solved(placed), costs.program
    cut = costs.solver.cut(placed.first, placed.last)
    graph, chosen, sizes = cut.graph, solved.chosen, solved.problem.sizes
    infos = costs.solver.parameters_of(cut)
    totals = account(solved.problem, chosen)
    operators = tuple(
        OperatorPlan(
            path=operator.path,
            name=operator.name,
            axes=choice.algorithm.axes if choice is not None else ((),) * len(operator.rule.factors),
            broadcast=choice.broadcast if choice is not None else frozenset(),
        )
        for operator, choice in zip(graph.operators, chosen.operators, strict=True)
    )
    values = [graph.values[v] for v in graph.inputs]
    parameters = tuple(
        ParameterPlan(
            name=info.name, shape=value.shape, use=choice.use, storage=choice.storage, rows=held.rows, gathered=gathered
        )
        for info, value, choice, held, gathered in zip(
            infos, values, chosen.parameters, cut.parameters, gathered_axes(graph, chosen, sizes), strict=False
        )
    )
    first_other = len(cut.parameters)
    inputs = tuple(
        InputPlan(name=value.name, shape=value.shape, spec=spec)
        for value, spec in zip(values[first_other:], chosen.inputs[first_other:], strict=True)
    )
    seconds = solved.seconds
    count = program.microbatches
    held = [value.bytes / choice.use.shards(sizes) for value, choice in zip(values, chosen.parameters, strict=False)]
    optimizer = sum(
        info.optimizer_bytes / choice.storage.shards(sizes)
        for info, choice in zip(infos, chosen.parameters, strict=True)
    )
    activations = seconds.constant_bytes - 2 * sum(held) - optimizer + in_flight * seconds.in_flight_bytes
    return Stage(
        layers=(placed.first, placed.last),
        devices=tuple(range(placed.submesh.first, placed.submesh.stop)),
        mesh=tuple(sizes.items()),
        operators=operators,
        settled=tuple(sorted((cut.values[value], spec) for value, spec in chosen.settled.items())),
        parameters=parameters,
        inputs=inputs,
        rematerialised=tuple(
            sorted(moved_segments(solved.segments, cut.equations[0] - solved.cut.equations[0]).items())
        ),
        memory=Memory(
            parameters=sum(held),
            gradients=sum(held),
            optimizer=optimizer,
            activations=max(0.0, activations),
            workspace=0.0,
        ),
        memory_limit_bytes=costs.submeshes.cluster.device.usable_memory_bytes,
        communication=totals.collectives,
        compute_seconds=totals.compute_seconds,
        communication_seconds=totals.communication_seconds,
        equations=cut.equations,
        forward_seconds=seconds.forward_seconds,
        backward_seconds=seconds.backward_seconds,
        weight_seconds=seconds.weight_seconds,
        synchronise_seconds=synchronise_seconds,
        update_seconds=seconds.update_seconds,
        in_flight=min(in_flight, count),
    )


def _transfers(program: StagedProgram, staged: StagedTiming) -> tuple[Transfer, ...]:
    """What an edge carries is one transfer; its seconds are shared out by bytes."""
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
