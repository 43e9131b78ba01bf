"""What the command line prints of a plan and of a verification; `docs/cli.md` documents every field of the JSON.

Bytes, seconds and FLOPs, per device and step unless the name says otherwise. JSON has no infinity and no NaN: a number
that is not finite is null.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import asdict
from math import isfinite, nan
from typing import Any

from ._jax.hlo_schedule import Schedule
from .cluster import Cluster
from .compilers.facts import StageFacts
from .plan import Plan, Stage
from .planning.plan_for import Planning
from .report.table import format_bytes, format_flops, format_percent, format_ratio, format_seconds, format_table
from .report.why import why
from .simulate import Event, Timeline, TransferEvent
from .verify import Check, Planned, Traffic, Verification

# Raised when a field changes its meaning or goes away; new fields leave it.
SCHEMA = 1

# Results that cannot be judged are named up to so many.
_MOST_NAMES = 8


def plan_document(target: str, planning: Planning) -> dict[str, Any]:
    """What `meshwright plan --json` prints.

    Args:
      target: as the user named it.
      planning: the plan, priced, and how it was found.
    """
    plan = planning.plan
    predicted = plan.predicted
    assert predicted is not None  # plan_for prices what it finds
    return _finite({
        "schema": SCHEMA,
        "target": target,
        "program": plan.program,
        "cluster": plan.cluster,
        "devices": plan.num_devices,
        "planning": {**_seconds(planning), "optimality_gap": predicted.optimality_gap},
        "predicted": {
            "step_seconds": predicted.step_seconds,
            "tflops_per_device": predicted.tflops_per_device,
            "flops_per_device": predicted.flops_per_device,
            "bubble_fraction": predicted.bubble_fraction,
        },
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "schedule_options": dict(plan.schedule_options),
        "stages": [
            _stage(stage, planning.cluster, plan.microbatches_of(number)) for number, stage in enumerate(plan.stages)
        ],
        "transfers": [
            {
                "source": one.source, "target": one.target, "name": one.name, "bytes": one.bytes,
                "differentiated": one.differentiated, "forward_seconds": one.forward_seconds,
                "backward_seconds": one.backward_seconds,
            }
            for one in plan.transfers
        ],
        "why": _why(plan),
        "alternatives": [
            {"what": one.what, "step_seconds": one.step_seconds, "ratio": one.step_seconds / predicted.step_seconds}
            for one in planning.alternatives
        ],
        "considered": [str(one) for one in planning.considered],
        "padded": [asdict(one) for one in plan.padded],
        "notes": list(plan.notes),
    })  # fmt: skip


def _why(plan: Plan) -> dict[str, Any] | None:
    """Where the time goes; None for a plan that does nothing."""
    found = why(plan)
    if found is None:
        return None
    return {
        "ranks": [
            {
                "stages": list(rank.stages), "compute_seconds": rank.compute, "collective_seconds": rank.collectives,
                "other_seconds": rank.other, "transfer_seconds": rank.transfers, "bubble_seconds": rank.bubble,
                "hidden_collective_seconds": rank.hidden,
            }
            for rank in found.ranks
        ],
        "balance": found.balance,
        "binds": list(found.binds),
    }  # fmt: skip


def timeline_document(timeline: Timeline) -> dict[str, Any]:
    """What `meshwright simulate --json` prints."""
    ranks = zip(timeline.busy_seconds, timeline.peak_bytes, strict=True)
    stages_of = timeline.schedule.stage_ranks
    return _finite({
        "schema": SCHEMA,
        "schedule": timeline.schedule.name,
        "microbatches": timeline.schedule.microbatches,
        "predicted": {
            "step_seconds": timeline.step_seconds,
            "bubble_fraction": timeline.bubble_fraction,
            "exposed_communication_seconds": timeline.exposed_communication_seconds,
        },
        "ranks": [
            {
                "stages": [stage for stage, held_by in enumerate(stages_of) if held_by == rank],
                "busy_seconds": busy, "peak_bytes": peak,
            }
            for rank, (busy, peak) in enumerate(ranks)
        ],
        "critical_path": [
            {"what": _what(one), "microbatch": one.microbatch, "start_seconds": one.start_seconds,
             "end_seconds": one.end_seconds}
            for one in timeline.critical_path
        ],
    })  # fmt: skip


def _what(one: Event | TransferEvent) -> str:
    return f"{one.kind} of stage {one.stage}" if isinstance(one, Event) else f"transfer {one.edge} {one.direction}"


def verification_document(verification: Verification) -> dict[str, Any]:
    """What `meshwright verify --json` prints."""
    plan, planning = verification.plan, verification.planning
    predicted = plan.predicted
    assert predicted is not None  # a plan that is not priced has no timeline, which verifying it needs
    return _finite({
        "schema": SCHEMA,
        "target": verification.target,
        "program": plan.program,
        "devices": plan.num_devices,
        "mesh": [dict(stage.mesh) for stage in plan.stages],
        "microbatches": plan.microbatches,
        "schedule": plan.schedule,
        "planning": _seconds(planning),
        "compile_seconds": verification.compile_seconds,
        "stages": [
            {
                "collectives": {"predicted": _traffic(one.predicted), "compiled": _traffic(one.compiled)},
                "flops": {"predicted": one.flops[0], "compiled": one.flops[1]},
                "memory_bytes": {"predicted": one.peak_bytes[0], "compiled": one.peak_bytes[1]},
                "memory_limit_bytes": one.limit_bytes,
                **_ahead(one),
            }
            for one in verification.stages
        ],
        "sent": [
            {"source": one.source, "target": one.target, "bytes": {"predicted": one.predicted, "moved": one.moved}}
            for one in verification.sent
        ],
        "reference": verification.reference,
        "starts": len(verification.starts),
        "results": [
            {
                "name": one.name, "deviation": one.deviation, "allowed": one.allowed, "noise": one.noise,
                "scale": one.scale, "judged": one.is_judged, "agrees": one.agrees,
            }
            for one in verification.errors
        ],
        "step_seconds": {"predicted": predicted.step_seconds, "measured": verification.step_seconds},
        "checks": [
            {
                "name": check.name, "predicted": check.predicted, "compiled": check.compiled, "ratio": check.ratio,
                "tolerance": check.tolerance, "passed": check.passed,
            }
            for check in verification.checks
        ],
        "passed": verification.passed,
    })  # fmt: skip


def _ahead(one: StageFacts) -> dict[str, Any]:
    """What the compiler of a machine that is not here says beside."""
    if one.schedule is None:
        return {"refusals": list(one.refusals)} if one.refusals else {}
    return {
        "rematerialised_by_compiler": one.rematerialised,
        "compute_seconds": {"predicted": one.compute_seconds[0], "compiled": one.compute_seconds[1]},
        "kernels": {
            name: {"count": kernels.count, "cycles": kernels.cycles, "flops": kernels.flops}
            for name, kernels in sorted(one.schedule.kernels.items())
        },
        "beside_compute": {
            kind: {
                "bytes": asynchronous, "of_bytes": moved, "kernels": kernels, "cycles": cycles,
            } for kind, (moved, asynchronous, kernels, cycles) in sorted(_beside(one.schedule).items())
        },
    }  # fmt: skip


def _beside(schedule: Schedule) -> dict[str, tuple[float, float, int, float]]:
    """By kind of collective: bytes, bytes of those that run beside compute, and the kernels and cycles of that."""
    found: dict[str, tuple[float, float, int, float]] = {}
    for one in schedule.collectives:
        moved, asynchronous, kernels, cycles = found.get(one.kind, (0.0, 0.0, 0, 0.0))
        size = one.count * one.bytes
        found[one.kind] = (
            moved + size,
            asynchronous + size * (one.kernels > 0),
            kernels + one.count * one.kernels,
            cycles + one.count * one.cycles,
        )
    return found


def verification_text(verification: Verification) -> str:
    """What `meshwright verify` prints for people: a line for each check with its verdict."""
    plan = verification.plan
    rows = []
    for check in verification.checks:
        allowed = "at most the predicted" if check.tolerance is None else f"within {format_percent(check.tolerance)}"
        verdict = "ok" if check.passed else "FAILED"
        values = (_quantity(check, check.predicted), _quantity(check, check.compiled))
        rows.append((check.name, *values, format_ratio(check.ratio), allowed, verdict))
    table = format_table(("on a device, in a step", "predicted", "compiled", "ratio", "allowed", "verdict"), rows)
    predicted = plan.predicted.step_seconds if plan.predicted is not None else nan
    measured = f"measured {format_seconds(verification.step_seconds)}, " if verification.steps else ""
    return "\n".join((
        f"{verification.target}: {plan}", "", table, "", *_counts(verification), *_schedules(verification),
        *_results(verification), f"step time: {measured}predicted {format_seconds(predicted)}",
        f"compiled in {format_seconds(verification.compile_seconds)}",
        "passed" if verification.passed else "FAILED",
    ))  # fmt: skip


def _schedules(verification: Verification) -> Iterator[str]:
    """Kernels by class and collectives beside compute, of programs for a machine that is not here."""
    for number, one in enumerate(verification.stages):
        stage = f"stage {number + 1}, " if len(verification.stages) > 1 else ""
        yield from (f"{stage}refused by the compiler: {words}" for words in one.refusals)
        if one.rematerialised:
            yield f"{stage}values that XLA computes again by itself, so that programs fit: {one.rematerialised}"
        if one.schedule is None:
            continue
        total = one.schedule.cycles
        for name, kernels in sorted(one.schedule.kernels.items(), key=lambda item: (-item[1].cycles, item[0])):
            share = f", {format_percent(kernels.cycles / total)} of the cycles" if total else ""
            yield f"{stage}kernels, {name}: {kernels.count}{share}"
        for kind, (moved, beside, _, _) in sorted(_beside(one.schedule).items()):
            if moved:
                share = format_percent(beside / moved)
                yield f"{stage}{kind}: {share} of {format_bytes(moved)} run beside compute"


def _counts(verification: Verification) -> Iterator[str]:
    for number, one in enumerate(verification.stages):
        stage = f"stage {number + 1}, " if len(verification.stages) > 1 else ""
        for kind, compiled in sorted(one.compiled.items()):
            predicted = one.predicted[kind].count if kind in one.predicted else 0
            yield (
                f"{stage}{kind}: arrays compiled {compiled.count} (in {compiled.operations} operations), "
                f"predicted {predicted}"
            )
        if one.unknown_loops:
            yield f"{stage}loops whose length depends on data, counted once: {one.unknown_loops}"


def _results(verification: Verification) -> Iterator[str]:
    errors, starts = verification.errors, len(verification.starts)
    judged = (
        f"; {len(verification.judged)} of {len(errors)} can be judged, {len(verification.wrong)} are off"
        if errors
        else ""
    )
    tried = f", from {starts} starts" if starts > 1 else ""
    if not verification.steps:
        yield verification.reference
        return
    yield f"results compared with: {verification.reference}{tried}{judged}"
    unseen = verification.not_judged
    if unseen:
        names = ", ".join(one.name for one in unseen[:_MOST_NAMES])
        more = f" and {len(unseen) - _MOST_NAMES} more" if len(unseen) > _MOST_NAMES else ""
        yield f"not judged, since rounding alone changes them as much as an error would: {names}{more}"


def _quantity(check: Check, value: float) -> str:
    return {"bytes": format_bytes, "flops": format_flops, "seconds": format_seconds}.get(check.unit, "{:.2g}".format)(
        value
    )


def _seconds(planning: Planning | Planned) -> dict[str, float]:
    return {
        "seconds": planning.seconds,
        "trace_seconds": planning.trace_seconds,
        "solve_seconds": planning.solve_seconds,
    }


def _stage(stage: Stage, cluster: Cluster, microbatches: int) -> dict[str, Any]:
    memory = stage.memory
    return {
        "layers": list(stage.layers),
        "microbatches": microbatches,
        "devices": list(stage.devices),
        "hosts": list(cluster.hosts_of(stage.devices)),
        "device_kind": stage.device_kind,
        "mesh": dict(stage.mesh),
        "memory_bytes": {
            "parameters": memory.parameters,
            "gradients": memory.gradients,
            "optimizer": memory.optimizer,
            "activations": memory.activations,
            "workspace": memory.workspace,
            "total": memory.total,
        },
        "memory_limit_bytes": stage.memory_limit_bytes,
        "communication_bytes": {one.kind: one.bytes for one in stage.communication},
        "communication_counts": {one.kind: one.count for one in stage.communication},
        "compute_seconds": stage.compute_seconds,
        "communication_seconds": stage.communication_seconds,
        "seconds_forward": stage.forward_seconds,
        "seconds_backward": stage.backward_seconds,
        "seconds_synchronise": stage.synchronise_seconds,
        "seconds_update": stage.update_seconds,
        "in_flight": stage.in_flight,
        "gradient_exchange": stage.gradient_exchange,
        "remat": stage.remat,
        "rematerialised": bool(stage.rematerialised),
        "rematerialised_segments": stage.rematerialised_segments,
    }


def _traffic(by_kind: Mapping[str, Traffic]) -> dict[str, Any]:
    return {
        kind: {"count": one.count, "bytes": one.bytes, "operations": one.operations}
        for kind, one in sorted(by_kind.items())
    }


def _finite(value: Any) -> Any:
    if isinstance(value, dict):
        return {key: _finite(one) for key, one in value.items()}
    if isinstance(value, list):
        return [_finite(one) for one in value]
    return None if isinstance(value, float) and not isfinite(value) else value
