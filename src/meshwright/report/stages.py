"""The stages of a plan as tables: what each is and takes, and what they send each other."""

from __future__ import annotations

from collections.abc import Sequence
from math import isfinite

from ..plan import Plan, Stage
from ..plan.words import mesh_words
from .table import format_bytes, format_percent, format_seconds, format_table

# Of transfers, these many edges are shown, the slowest first.
_MOST_EDGES = 12


def stage_table(plan: Plan) -> str:
    """A row for each stage: where it lies, its seconds, what it holds."""
    rows = [
        (
            str(number), _range(stage.layers), _positions(stage.devices),
            mesh_words(stage.mesh), format_seconds(stage.forward_seconds), format_seconds(stage.backward_seconds),
            format_seconds(stage.synchronise_seconds), format_seconds(stage.update_seconds), str(stage.in_flight),
            _memory(stage), "layer" if stage.rematerialised else "none",
        )
        for number, stage in enumerate(plan.stages, start=1)
    ]  # fmt: skip
    heads = (
        "stage", "layers", "devices", "mesh", "forward", "backward", "synchronise", "update", "in flight",
        "memory (of the limit)", "remat",
    )  # fmt: skip
    if plan.shares:  # what replicas differ in
        heads = ("replica", "microbatches", *heads[2:])
        rows = [(row[0], f"{n} of {plan.microbatches}", *row[2:]) for row, n in zip(rows, plan.shares, strict=True)]
    kinds = [stage.device_kind for stage in plan.stages]
    if len(set(kinds)) > 1:
        heads = (*heads[:3], "of kind", *heads[3:])
        rows = [(*row[:3], kind, *row[3:]) for row, kind in zip(rows, kinds, strict=True)]
    return format_table(heads, rows, left=heads.index("forward"))


def transfer_table(plan: Plan) -> str:
    """A row for each edge: what it carries for one microbatch and how long that takes."""
    found: list[tuple[float, tuple[str, ...]]] = []
    for source, target in plan.edges:
        mine = [t for t in plan.transfers if (t.source, t.target) == (source, target)]
        forward, backward = sum(t.forward_seconds for t in mine), sum(t.backward_seconds for t in mine)
        found.append((
            forward + backward,
            (
                f"{source + 1} to {target + 1}", _names([t.name for t in mine]),
                format_bytes(sum(t.bytes for t in mine)), format_seconds(forward), format_seconds(backward),
            ),
        ))  # fmt: skip
    shown = sorted(range(len(found)), key=lambda i: (-found[i][0], i))[:_MOST_EDGES]
    rows = [found[i][1] for i in sorted(shown)]
    table = format_table(("stages", "values", "size", "forward", "backward"), rows, left=2)
    left_out = len(found) - len(rows)
    return table if not left_out else f"{table}\nand {left_out} faster edges"


def _positions(devices: Sequence[int]) -> str:
    """Neighbours together; of a stage over hosts of several kinds they need not be one run."""
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][1]:
            runs[-1][1] += 1
        else:
            runs.append([device, device + 1])
    return ", ".join(_range((first, stop)) for first, stop in runs)


def _range(bounds: tuple[int, int]) -> str:
    first, stop = bounds
    return str(first) if stop == first + 1 else f"{first} to {stop - 1}"


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"


def _memory(stage: Stage) -> str:
    total, limit = stage.memory.total, stage.memory_limit_bytes
    share = f" ({format_percent(total / limit)})" if limit > 0 and isfinite(limit) else ""
    return f"{format_bytes(total)}{share}"
