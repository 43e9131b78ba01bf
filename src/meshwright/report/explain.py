"""A plan as a page that a person reads: what it is, what it is predicted to take, where everything lies, and why.

Everything follows from the plan; nothing is measured or priced here. What the plan does not say (`report.strategy`
tells when) is left out. What is equal of several stages is printed once: a plan of many stages fits two screens.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from math import isfinite
from textwrap import wrap

from ..plan import ParameterPlan, Plan, Stage
from ..plan.words import common_name, mesh_words, name_pattern, number_words, optimizer_words, stage_words
from ..schedule import WORTH_SPLITTING
from ..search.alternative import TOO_LITTLE, Alternative
from ..search.considered import Considered
from ..sharding import Spec
from .considered import considered_lines
from .groups import grouped
from .memory import memory_words, rank_memory
from .reasons import details, reasons
from .stages import stage_table, transfer_table
from .strategy import AxisRole, axis_roles, side
from .table import (
    counted,
    format_bytes,
    format_count,
    format_flops,
    format_flops_rate,
    format_percent,
    format_seconds,
    format_table,
)
from .why import why, why_table

# Columns of the page where nobody says how wide it is.
_WIDTH = 120
_INDENT = "  "


def explain_plan(
    plan: Plan, *, considered: Sequence[Considered] = (), alternatives: Sequence[Alternative] = (), width: int = _WIDTH
) -> str:
    """The plan as text, without a final newline.

    Args:
      plan: to be explained.
      considered: the candidates that the search compared.
      alternatives: plans that were not taken.
      width: of the page, characters; a single cell or word that is wider stays whole.
    """
    inner = width - len(_INDENT)
    sections: list[tuple[str, Sequence[str]]] = []
    if len(plan.stages) > 1:
        title = f"{_noun(plan).capitalize()}s: memory of each on a device, seconds of one microbatch and once a step"
        sections.append((title, stage_table(plan, width=inner).split("\n")))
        if plan.transfers:
            sections.append(("Between stages, for one microbatch", transfer_table(plan, width=inner).split("\n")))
    sections += _time(plan, inner)
    sections += _stage(plan, plan.stages[0], inner) if len(plan.stages) == 1 else _strategies(plan)
    if alternatives and plan.predicted is not None:
        sections.append(("Nearest alternatives", _alternatives(alternatives, plan.predicted.step_seconds)))
    if considered:
        sections.append(("Considered by the search", [*considered_lines(considered)]))
    if plan.notes:
        sections.append(("Notes", plan.notes))
    header = [part for line in _header(plan) for part in _wrapped(line, width, "")]
    return "\n\n".join(["\n".join(header), *(_section(title, lines, width) for title, lines in sections)])


def _section(title: str, lines: Sequence[str], width: int) -> str:
    return "\n".join([title, *(part for line in lines for part in _wrapped(line, width, _INDENT))])


def _wrapped(line: str, width: int, indent: str) -> list[str]:
    """A line in as many as it needs; what follows the first is indented further."""
    if len(indent + line) <= width:
        return [indent + line]
    return wrap(
        line, width, initial_indent=indent, subsequent_indent=indent + 2 * _INDENT, break_long_words=False,
        break_on_hyphens=False,
    )  # fmt: skip


def _time(plan: Plan, width: int) -> Iterator[tuple[str, Sequence[str]]]:
    """Where it goes, and what binds; nothing of a plan that nobody has priced or that does nothing."""
    found = why(plan) if plan.predicted is not None else None
    if found is not None:
        yield "Where a step of each device goes", why_table(found, noun=_noun(plan), width=width).split("\n")
        yield "What binds", found.binds


def _alternatives(alternatives: Sequence[Alternative], step_seconds: float) -> list[str]:
    rows = [
        (format_seconds(one.step_seconds), f"{one.step_seconds / step_seconds - 1:+.1%}", one.what)
        for one in alternatives
    ]
    wide = [max(len(row[column]) for row in rows) for column in (0, 1)]
    lines = [f"{step:>{wide[0]}}  {more:>{wide[1]}}  {what}" for step, more, what in rows]
    if any((1 - TOO_LITTLE) * step_seconds < one.step_seconds < step_seconds * (1 - 1e-3) for one in alternatives):
        lines.append(
            "what seems faster is less simple (a split backward, a further axis) and by too little to be trusted"
        )
    return lines


# What it is


def _header(plan: Plan) -> Iterator[str]:
    yield f"Plan of program {plan.program} for cluster {plan.cluster}, {counted(plan.num_devices, 'device')}"
    if len(plan.stages) == 1:
        yield f"mesh: {mesh_words(plan.stages[0].mesh)}"
    cut = "1 (the whole batch at once)"
    if plan.microbatches > 1:
        cut = f"{plan.microbatches}" + (", one after the other" if len(plan.stages) == 1 else "")
    yield f"microbatches: {cut}"
    if plan.shares:
        yield f"replicas: {len(plan.stages)} of the whole program, which share the microbatches out"
    else:
        yield f"stages: {len(plan.stages)}{_ranks(plan)}" + (
            f", schedule {plan.schedule}" if len(plan.stages) > 1 else ""
        )
    ranks = rank_memory(plan)
    fullest = max(ranks, key=lambda rank: (rank.share, rank.held_bytes))
    held = memory_words(fullest.held_bytes, fullest.limit_bytes, " of the limit")
    where = stage_words(fullest.stages, _noun(plan))
    if len(ranks) < len(plan.stages):
        where = stage_words([ranks.index(fullest)], "rank")
    of = f", of {where}" if len(plan.stages) > 1 else ""
    yield f"predicted memory: {held} on the fullest devices{of}"
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
        of = (
            f"among plans whose stages share no devices, by estimates ({more}; interleaved ones are tried, not bounded)"
        )
        if len(plan.stages) == 1 or plan.shares:
            of = "among plans whose stages share no devices, under the cost model"
        yield f"optimality gap: {f'at most {format_percent(gap)}' if gap else 'none'} {of}"


def _noun(plan: Plan) -> str:
    return "replica" if plan.shares else "stage"


def _ranks(plan: Plan) -> str:
    """Of interleaved stages, on how many sets of devices they lie."""
    ranks = len({stage.devices for stage in plan.stages})
    return f" on {counted(ranks, 'rank')}, in turn" if 1 < ranks < len(plan.stages) else ""


def _strategies(plan: Plan) -> Iterator[tuple[str, Sequence[str]]]:
    """What the axes of stages are for, and why, stages of which the same is said together; what is said of all of them
    stands first. Parameter by parameter it is in the saved plan."""
    said: list[tuple[tuple[str, ...], tuple[str, ...]]] = []
    for number, stage in enumerate(plan.stages):
        roles = axis_roles(stage)
        said.append((tuple(_named(roles)), tuple(reasons(plan.microbatches_of(number), stage, roles))))
    groups = grouped(said)
    shared = set.intersection(*(set(why_so) for _, why_so in said)) if len(groups) > 1 else set()
    noun = _noun(plan).upper()
    if shared:
        yield f"EVERY {noun}", [line for line in said[0][1] if line in shared]
    for members, (named, why_so) in groups:
        title = f"{noun}{'' if len(members) == 1 else 'S'} {number_words(members)} of {len(plan.stages)}"
        yield title, [*named, *(line for line in why_so if line not in shared)]


def _named(roles: Sequence[AxisRole]) -> list[str]:
    return [f"{role.axis}: {', '.join(role.names)}" for role in roles if role.names]


def _stage(plan: Plan, stage: Stage, width: int) -> Iterator[tuple[str, Sequence[str]]]:
    """The only stage of a plan, in full."""
    roles = axis_roles(stage)
    if named := _named(roles):
        yield "Strategy", named
    yield "Predicted memory of a device", _memory(stage).split("\n")
    table = "none"
    if stage.communication:
        rows = [(c.kind, format_count(c.count), format_bytes(c.bytes)) for c in stage.communication]
        table = format_table(("collective", "count", "buffers"), rows)
    yield "Predicted collectives of a step, on a device", table.split("\n")
    if stage.parameters:
        yield "Parameters", _parameters(stage, width).split("\n")
    if stage.inputs:
        rows = [(given.name, _shape(given.shape), _layout(given.shape, given.spec)) for given in stage.inputs]
        yield "Inputs", format_table(("input", "shape", "layout"), rows, left=3, width=width).split("\n")
    if why_so := [*reasons(plan.microbatches, stage, roles), *details(stage)]:
        yield "Why", why_so


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


def _parameters(stage: Stage, width: int) -> str:
    """A row for all parameters that differ in the numbers of their names only."""
    groups: dict[tuple[str, tuple[int, ...], Spec, Spec, bool], list[str]] = {}
    of: dict[tuple[str, tuple[int, ...], Spec, Spec, bool], ParameterPlan] = {}
    for p in stage.parameters:
        key = (name_pattern(p.name), p.shape, p.use, p.storage, p.scattered)
        groups.setdefault(key, []).append(p.name)
        of.setdefault(key, p)
    rows = [
        (
            common_name(names), str(len(names)), _shape(p.shape), _layout(p.shape, p.use),
            optimizer_words(p) or "as the parameter",
            (" ".join(sorted(p.use.broadcast)) or "-") + ", in each microbatch" * p.scattered,
        )
        for names, p in ((names, of[key]) for key, names in groups.items())
    ]  # fmt: skip
    return format_table(
        ("parameter", "count", "shape", "layout", "optimizer state", "gradient summed over"),
        rows,
        left=6,
        width=width,
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
