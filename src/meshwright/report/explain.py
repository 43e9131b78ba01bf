"""A plan as a page that a person reads: what it is, what it is predicted to take, where everything lies, and why.

Everything follows from the plan; nothing is measured or priced here. What the plan does not say (`report.strategy`
tells when) is left out.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite, prod

from ..plan import ParameterPlan, Plan, Stage
from ..plan.words import common_name, mesh_words, name_pattern, optimizer_words
from ..schedule import WORTH_SPLITTING
from ..search.alternative import TOO_LITTLE, Alternative
from ..sharding import Spec
from .stages import stage_table, transfer_table
from .strategy import AxisRole, axis_roles, side
from .table import (
    format_bytes,
    format_count,
    format_flops,
    format_flops_rate,
    format_percent,
    format_seconds,
    format_table,
)
from .why import BINDS, memory_share, why, why_table


def explain_plan(plan: Plan, *, considered: Sequence[str] = (), alternatives: Sequence[Alternative] = ()) -> str:
    """The plan as text, without a final newline.

    Args:
      plan: to be explained.
      considered: the candidates that the search compared, a line each.
      alternatives: plans that were not taken.
    """
    parts = ["\n".join(_header(plan))]
    if len(plan.stages) == 1:
        parts += [*_time(plan), *_stage(plan, plan.stages[0])]
    else:
        parts.append(
            _section(
                "Stages: seconds of one microbatch and once a step, memory of a device", stage_table(plan).split("\n")
            )
        )
        if plan.transfers:
            parts.append(_section("Between stages, for one microbatch", transfer_table(plan).split("\n")))
        parts += _time(plan)
        for number in range(len(plan.stages)):
            name = f"{'REPLICA' if plan.shares else 'STAGE'} {number + 1} of {len(plan.stages)}"
            parts.append(_section(name, [*_staged(plan, number)]))
    if alternatives and plan.predicted is not None:
        parts.append(_section("Nearest alternatives", _alternatives(alternatives, plan.predicted.step_seconds)))
    if considered:
        parts.append(_section("Considered by the search", considered))
    if plan.notes:
        parts.append(_section("Notes", plan.notes))
    return "\n\n".join(parts)


def _time(plan: Plan) -> list[str]:
    """Where it goes, and what binds; nothing of a plan that nobody has priced or that does nothing."""
    found = why(plan) if plan.predicted is not None else None
    if found is None:
        return []
    where = _section("Where a step of each device goes", why_table(found).split("\n"))
    return [where, _section("What binds", found.binds)]


def _section(title: str, lines: Sequence[str]) -> str:
    return "\n".join([title, *(f"  {line}" for line in lines)])


def _alternatives(alternatives: Sequence[Alternative], step_seconds: float) -> list[str]:
    rows = [
        (one.what, format_seconds(one.step_seconds), f"{one.step_seconds / step_seconds - 1:+.1%}")
        for one in alternatives
    ]
    lines = format_table(("instead", "step", "than this plan"), rows, left=1).split("\n")
    if any((1 - TOO_LITTLE) * step_seconds < one.step_seconds < step_seconds * (1 - 1e-3) for one in alternatives):
        lines.append(
            "what seems faster is less simple (a split backward, a further axis) and by too little to be trusted"
        )
    return lines


# What it is


def _header(plan: Plan) -> Iterator[str]:
    yield f"Plan of program {plan.program} for cluster {plan.cluster}, {_count(plan.num_devices, 'device')}"
    if len(plan.stages) == 1:
        yield f"mesh: {mesh_words(plan.stages[0].mesh)}"
    cut = "1 (the whole batch at once)"
    if plan.microbatches > 1:
        cut = f"{plan.microbatches}" + (", one after the other" if len(plan.stages) == 1 else "")
    yield f"microbatches: {cut}"
    if plan.shares:
        yield f"replicas: {len(plan.stages)} of the whole program, which share the microbatches out"
    else:
        yield f"stages: {len(plan.stages)}" + (f", schedule {plan.schedule}" if len(plan.stages) > 1 else "")
    predicted = plan.predicted
    if predicted is None:
        yield "predicted step time: none, the plan has not been priced"
        return
    yield f"predicted step time: {format_seconds(predicted.step_seconds)}"
    rate = format_flops_rate(predicted.tflops_per_device * 1e12)
    yield f"predicted rate: {rate} of the model a device, {format_flops(predicted.flops_per_device)} executed a device"
    gap = predicted.optimality_gap
    if isfinite(gap):
        more = f"a split backward counts {format_percent(WORTH_SPLITTING)} more"
        of = f"among plans whose stages share no devices, by estimates ({more})"
        if len(plan.stages) == 1 or plan.shares:
            of = "under the cost model"
        yield f"optimality gap: {f'at most {format_percent(gap)}' if gap else 'none'} {of}"


def _staged(plan: Plan, number: int) -> Iterator[str]:
    """One stage of several: what its axes are for, and why; parameter by parameter is in the saved plan."""
    stage = plan.stages[number]
    roles = axis_roles(stage)
    yield from (f"{role.axis}: {', '.join(role.names)}" for role in roles if role.names)
    yield from _reasons(plan.microbatches_of(number), stage, roles)


def _stage(plan: Plan, stage: Stage) -> Iterator[str]:
    roles = axis_roles(stage)
    named = [f"{role.axis}: {', '.join(role.names)}" for role in roles if role.names]
    if named:
        yield _section("Strategy", named)
    yield _section("Predicted memory of a device", _memory(stage).split("\n"))
    if stage.communication:
        rows = [(c.kind, format_count(c.count), format_bytes(c.bytes)) for c in stage.communication]
        table = format_table(("collective", "count", "buffers"), rows)
        yield _section("Predicted collectives of a step, on a device", table.split("\n"))
    else:
        yield _section("Predicted collectives of a step, on a device", ["none"])
    if stage.parameters:
        yield _section("Parameters", _parameters(stage).split("\n"))
    if stage.inputs:
        rows = [(given.name, _shape(given.shape), _layout(given.shape, given.spec)) for given in stage.inputs]
        yield _section("Inputs", format_table(("input", "shape", "layout"), rows, left=3).split("\n"))
    yield _section("Why", [*_reasons(plan.microbatches, stage, roles)])


def _memory(stage: Stage) -> str:
    memory, limit = stage.memory, stage.memory_limit_bytes
    items = [
        ("parameters", memory.parameters), ("gradients", memory.gradients), ("optimizer", memory.optimizer),
        ("activations", memory.activations), ("workspace", memory.workspace), ("total", memory.total), ("limit", limit),
    ]  # fmt: skip
    rows = [
        (name, format_bytes(n), format_percent(n / limit) if limit > 0 and isfinite(limit) else "-")
        for name, n in items
    ]
    return format_table(("memory", "size", "of the limit"), rows)


# Where everything lies


def _parameters(stage: Stage) -> str:
    """A row for all parameters that differ in the numbers of their names only."""
    groups: dict[tuple[str, tuple[int, ...], Spec, Spec], list[str]] = {}
    of: dict[tuple[str, tuple[int, ...], Spec, Spec], ParameterPlan] = {}
    for p in stage.parameters:
        key = (name_pattern(p.name), p.shape, p.use, p.storage)
        groups.setdefault(key, []).append(p.name)
        of.setdefault(key, p)
    rows = [
        (
            common_name(names), str(len(names)), _shape(p.shape), _layout(p.shape, p.use),
            optimizer_words(p) or "as the parameter", " ".join(sorted(p.use.broadcast)) or "-",
        )
        for names, p in ((names, of[key]) for key, names in groups.items())
    ]  # fmt: skip
    return format_table(
        ("parameter", "count", "shape", "layout", "optimizer state", "gradient summed once over"), rows, left=6
    )


def _layout(shape: tuple[int, ...], spec: Spec) -> str:
    parts = []
    for dim, axes in enumerate(spec.dims):
        if axes:
            way = side(shape, dim)
            parts.append(f"split dim {dim} over {' '.join(axes)}" + (f" ({way})" if way else ""))
    return ", ".join(parts) or "whole"


def _shape(shape: tuple[int, ...]) -> str:
    return "x".join(map(str, shape)) or "scalar"


# Why


def _reasons(microbatches: int, stage: Stage, roles: Sequence[AxisRole]) -> Iterator[str]:
    for role in roles:
        if role.summed:
            by = " by one device, a parameter server" if role.central else ""
            yield f"gradients of {_parameters_of(role.summed)} summed over {role.axis}{by}: {_cause(role)}"
    if microbatches > 1 and any(role.summed for role in roles):
        yield f"gradients of the {microbatches} microbatches are added up first: one sum over devices a step"
    yield from _storage(stage, [role.axis for role in roles if role.stored])
    for role in roles:
        if role.gathered:
            yield f"{_parameters_of(role.gathered)} split over {role.axis}: stored split, gathered at use (ZeRO-3)"
        if role.used_split:
            yield f"{_parameters_of(role.used_split)} split over {role.axis}: each device computes with its part only"
    yield from _unsummed(stage)
    links = sum(bool(operator.broadcast) for operator in stage.operators)
    if links:
        yield f"{_count(links, 'operator')} on the way of a gradient leave its sum over devices to be taken once, later"
    if stage.settled:
        yield f"{_count(len(stage.settled), 'value')} with several readers moved once for all of them"
    yield from _memory_reason(stage)


def _unsummed(stage: Stage) -> Iterator[str]:
    """Gradients of which nothing is left to be summed at the end of a step: of what every axis splits there never was,
    else it may have been done where they are made."""
    axes = {axis for axis, size in stage.mesh if size > 1}
    unsummed = [p for p in stage.parameters if not p.use.broadcast]
    whole = [p for p in unsummed if axes - {axis for dim in p.use.dims for axis in dim}]
    split = len(unsummed) - len(whole)
    if split:
        yield f"no reduction needed for the gradients of {_count(split, 'parameter')}: each device has all of its part"
    if whole:
        yield (
            f"gradients of {_parameters_of(whole)} that are not split over every axis: complete where the backward "
            f"pass makes them, by its own sums or because devices compute the same"
        )


def _cause(role: AxisRole) -> str:
    if role.over_batch:
        return f"the batch is split over {role.axis}"
    if role.input_dims:
        return f"inputs are split over {role.axis} on dim {', '.join(map(str, role.input_dims))}"
    return f"the operators that read them are split over {role.axis} along a dim they lack"


def _storage(stage: Stage, axes: Sequence[str]) -> Iterator[str]:
    """ZeRO-1 and 2, with the memory they save: the plan gives the optimizer state of all parameters together."""
    stored = [p for p in stage.parameters if p.stored_axes]
    if not stored:
        return
    sizes = stage.sizes
    factors = {p.storage.shards(sizes) / p.use.shards(sizes) for p in stage.parameters}
    held = sum(prod(p.shape) / p.storage.shards(sizes) for p in stage.parameters)
    would = sum(prod(p.shape) / p.use.shards(sizes) for p in stage.parameters)
    saved = stage.memory.optimizer * (would / held - 1) if held else 0.0
    # Exact where every parameter is split further by the same factor, whatever the optimizer keeps of each.
    about = "" if len(factors) == 1 else "about "
    saying = f": saves {about}{format_bytes(saved)} a device" if saved > 0 else ""
    yield f"optimizer state of {_parameters_of(stored)} split over {' '.join(axes)} (ZeRO-1/2){saying}"


def _memory_reason(stage: Stage) -> Iterator[str]:
    share = memory_share(stage)
    ranges = sum(len(runs) for _, runs in stage.rematerialised)
    again = (
        f"activations of {_count(ranges, 'range')} of equations computed again in the backward pass" if ranges else ""
    )
    if share >= BINDS:
        yield f"memory binds ({format_percent(share)} of the limit)" + (f": rematerialised, {again}" if again else "")
    elif again:
        yield f"rematerialised: {again}"


def _parameters_of(parameters: Sequence[ParameterPlan]) -> str:
    return _count(len(parameters), "parameter")


def _count(count: int, noun: str) -> str:
    return f"{format_count(count)} {noun}{'' if count == 1 else 's'}"
