"""What the compiled programs of a plan do, stage by stage, beside what the plan says of them.

Collectives, FLOPs and memory are read from the compiled text and from XLA's own analysis (`_jax.hlo`). XLA combines
several collectives into one operation with several operands, so arrays are counted, not operations. Collectives whose
operands hold at most 8 bytes each (a loss, a norm) are left out on both sides.

Where the compiler of a machine that is not here compiles, its schedule is read as well, and a program that it refuses
for want of memory is a finding.

A plan of one stage is one program. A stage of several is a few programs that each run so often in a step; what a device
holds between them is known from their operands and results, so that of its peak the temporaries are what is measured.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from math import inf, nan
from typing import Any

import jax

from .._jax.ahead import compile_ahead
from .._jax.hlo import CompiledCollective, CompiledFacts, read_compiled
from .._jax.hlo_schedule import Schedule, in_turn, read_schedule
from ..cluster import Cluster
from ..errors import PlanError
from ..plan import Plan, Stage
from ..program.graph import GROUPED
from ..runtime.executable import Executable
from ..runtime.pipeline.compiled_stages import memory_of, moved_bytes, programs_of
from ..runtime.pipeline.step import PipelinedStep
from ..runtime.step import PlannedStep

# A collective of operands this small is a scalar's, which carries no traffic worth predicting.
_SCALAR_BYTES = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Traffic:
    """Collectives of one kind on one device in one step: `count` arrays of `bytes` in all, in `operations`.

    `operations` is what the arrays were combined into; equal to `count` where nothing was.
    """

    count: int
    bytes: float
    operations: int


NO_TRAFFIC = Traffic(count=0, bytes=0.0, operations=0)


@dataclass(frozen=True, slots=True, kw_only=True)
class StageFacts:
    """A stage on one device in one step, as predicted and as compiled.

    Args:
      predicted: collectives by kind, as the plan counts them.
      compiled: collectives by kind in the compiled programs.
      flops: predicted and compiled; the predicted ones are None in a plan that does not say them, or where compilers
        count others (products of groups of rows).
      peak_bytes: predicted and compiled, of a device with all its stages.
      limit_bytes: what a device may use.
      unknown_loops: how many loops the compiled programs have whose length depends on data; they count once.
      rematerialised: instructions that the compiler computes again by itself, so that the programs fit.
      schedule: of the compiled programs, in a step; None where they are run.
      compute_seconds: predicted, the update included; and by the compiler's cycles, NaN where it says none.
      refusals: of programs that the compiler says do not fit, its words; nothing else is known of them, and the peak
        is infinite.
    """

    predicted: Mapping[str, Traffic]
    compiled: Mapping[str, Traffic]
    flops: tuple[float | None, float]
    peak_bytes: tuple[float, float]
    limit_bytes: float
    unknown_loops: int
    rematerialised: int = 0
    schedule: Schedule | None = None
    compute_seconds: tuple[float, float] = (nan, nan)
    refusals: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Sent:
    """What one stage sends another in one step, bytes of whole values.

    Args:
      source: the stage that has the values.
      target: the stage that they go to; cotangents go the other way, and are an edge of their own.
      predicted: by the plan.
      moved: by the run.
    """

    source: int
    target: int
    predicted: float
    moved: float


@dataclass(frozen=True, slots=True, kw_only=True)
class _Compiled:
    """A compiled program; of one that the compiler refuses `facts` and `schedule` are None."""

    facts: CompiledFacts | None
    schedule: Schedule | None = None
    refusal: str | None = None


def facts_of(step: Executable, plan: Plan, *, cluster: Cluster | None = None) -> tuple[StageFacts, ...]:
    """Compile a step's programs and read them.

    Args:
      step: as it runs.
      plan: that it runs by, priced.
      cluster: for which programs are compiled to see whether they fit: its memory is the limit, schedules are read
        too, and a program that is refused for want of memory is a finding. None where they are run.
    """
    if isinstance(step, PlannedStep):
        return (_one_stage(step, plan, cluster),)
    return _stages(step, plan, cluster)


def _compiled(lowered: Any, *, ahead: bool) -> _Compiled:
    try:
        compiled = compile_ahead(lowered) if ahead else lowered.compile()
    except jax.errors.JaxRuntimeError as error:
        words = str(error).partition("\n")[0]
        if not ahead:
            raise
        if "RESOURCE_EXHAUSTED" not in words:
            raise PlanError(
                refused="to compile the plan", got=f"an error of the compiler: {words:.300}",
                needed="programs that it can compile", where="a stage's program",
                try_="another plan (--stages, --microbatches, --mesh), and reporting this one",
            ) from error  # fmt: skip
        return _Compiled(facts=None, refusal=words.removeprefix("RESOURCE_EXHAUSTED: "))
    return _Compiled(
        facts=read_compiled(compiled, lowered.as_text() if ahead else ""),
        schedule=read_schedule(compiled.as_text()) if ahead else None,
    )


def _of_schedule(
    stage: Stage, programs: Sequence[tuple[_Compiled, int]], cluster: Cluster | None
) -> dict[str, Any]:  # fmt: skip
    """The schedule of a stage's programs, each with how often a step runs it, their seconds and refusals: arguments of
    `StageFacts`."""
    refusals = tuple(one.refusal for one, _ in programs if one.refusal is not None)
    if cluster is None or refusals:
        return {"refusals": refusals}
    schedule = in_turn((one.schedule, runs) for one, runs in programs if one.schedule is not None)
    clock = cluster.device.clock_hertz
    seconds = schedule.cycles / clock if clock and schedule.cycles else nan
    return {"schedule": schedule, "compute_seconds": (stage.compute_seconds + stage.update_seconds, seconds)}


def sent_of(step: Executable, plan: Plan) -> tuple[Sent, ...]:
    """What stages send each other.

    Args:
      step: as it runs.
      plan: that it runs by.
    """
    if isinstance(step, PlannedStep):
        return ()
    predicted: dict[tuple[int, int], float] = {}
    for one in plan.transfers:
        ends = [(one.source, one.target), *([(one.target, one.source)] if one.differentiated else [])]
        for source, target in ends:
            predicted[source, target] = predicted.get((source, target), 0.0) + one.bytes * plan.microbatches
    moved = moved_bytes(step)
    return tuple(
        Sent(source=s, target=t, predicted=predicted.get((s, t), 0.0), moved=moved.get((s, t), 0.0))
        for s, t in sorted({*predicted, *moved})
    )


def compiled_traffic(programs: Iterable[tuple[CompiledFacts, int]]) -> dict[str, Traffic]:
    """Collectives of compiled programs by kind, those of scalars left out.

    Args:
      programs: what each does, and how often it runs in a step.
    """
    total: dict[str, Traffic] = {}
    for facts, runs in programs:
        for one in facts.collectives:
            arrays = [size for size in _arrays(one) if size > _SCALAR_BYTES]
            if not arrays:
                continue
            have = total.get(one.kind, NO_TRAFFIC)
            total[one.kind] = Traffic(
                count=have.count + runs * one.count * len(arrays),
                bytes=have.bytes + float(runs * one.count * sum(arrays)),
                operations=have.operations + runs * one.count,
            )
    return total


def _arrays(one: CompiledCollective) -> Sequence[float]:
    """Bytes of each array that a collective moves, in the type that the program sends it in."""
    pieces = one.group_size
    if one.kind == "all_to_all" and one.operands % pieces == 0:
        # The CPU backend gives an all-to-all one operand for each device of its group.
        return [sum(one.sent_bytes) / (one.operands // pieces)] * (one.operands // pieces)
    return one.sent_bytes


def _predicted_traffic(plan: Plan, number: int) -> dict[str, Traffic]:
    return {
        one.kind: Traffic(count=one.count, bytes=one.bytes, operations=one.count)
        for one in plan.stages[number].communication
    }


def _one_stage(step: PlannedStep, plan: Plan, cluster: Cluster | None) -> StageFacts:
    found = _compiled(step.lower(), ahead=cluster is not None)
    facts, (stage,) = found.facts, plan.stages
    return StageFacts(
        predicted=_predicted_traffic(plan, 0), compiled=compiled_traffic([(facts, 1)] if facts else []),
        flops=(_comparable_flops(stage), facts.flops if facts else nan),
        peak_bytes=(stage.memory.total, float(facts.peak_bytes) if facts else inf),
        limit_bytes=_limit_bytes(stage, cluster),
        unknown_loops=facts.unknown_loops if facts else 0,
        rematerialised=facts.rematerialised if facts else 0,
        **_of_schedule(stage, [(found, 1)], cluster),
    )  # fmt: skip


def _stages(step: PipelinedStep, plan: Plan, cluster: Cluster | None) -> tuple[StageFacts, ...]:
    """Programs that stages share are compiled once, by JAX."""
    programs = [
        [(one, _compiled(one.lower(), ahead=cluster is not None)) for one in programs_of(step, number)]
        for number in range(len(plan.stages))
    ]
    known = [[(one, found.facts) for one, found in stage if found.facts is not None] for stage in programs]
    whole = [len(some) == len(every) for some, every in zip(known, programs, strict=True)]
    local, elsewhere = step.local, step.local.elsewhere()
    peaks = [inf] * len(programs)
    if all(whole):
        compiled = memory_of(step, [{one.name: facts for one, facts in stage} for stage in known])
        peaks = _held(local.plan_with_memory(compiled))
    # What moving values between processes takes is in every plan; here it depends on where they go.
    moving = [a - b for a, b in zip(_held(elsewhere.plan_with_memory()), _held(local.plan_with_memory()), strict=True)]
    predicted = [held - taken for held, taken in zip(_held(plan), moving, strict=True)]
    return tuple(
        StageFacts(
            predicted=_predicted_traffic(plan, number),
            compiled=compiled_traffic((facts, one.runs) for one, facts in known[number]),
            flops=(
                _comparable_flops(stage),
                sum(one.runs * facts.flops for one, facts in known[number]) if whole[number] else nan,
            ),
            peak_bytes=(predicted[number], peaks[number]),
            limit_bytes=_limit_bytes(stage, cluster),
            unknown_loops=sum(facts.unknown_loops for _, facts in known[number]),
            rematerialised=sum(facts.rematerialised for _, facts in known[number]),
            **_of_schedule(stage, [(found, one.runs) for one, found in programs[number]], cluster),
        )
        for number, stage in enumerate(plan.stages)
    )


def _comparable_flops(stage: Stage) -> float | None:
    """The FLOPs of a stage; None of one with products of groups of rows: where a compiler has no kernel for these, all
    rows are multiplied by the matrices of all groups, and counted so."""
    return None if any(one.name in GROUPED for one in stage.operators) else stage.flops


def _limit_bytes(stage: Stage, cluster: Cluster | None) -> float:
    limit = stage.memory_limit_bytes
    return limit if cluster is None else min(limit, cluster.device.usable_memory_bytes)


def _held(plan: Plan) -> list[float]:
    """For each stage what its device holds, with all stages that are on it."""
    return [sum(one.memory.total for one in plan.stages if one.devices == stage.devices) for stage in plan.stages]
