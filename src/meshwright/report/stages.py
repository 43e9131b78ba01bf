"""The stages of a plan as tables: what each is and takes, and what they send each other; equal stages share a row."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

from ..plan import Plan, Stage
from ..plan.words import mesh_words, number_runs, number_words, range_words
from .groups import grouped
from .memory import memory_words
from .table import format_bytes, format_seconds, format_table

# Of transfers, these many rows are shown, the slowest first.
_MOST_EDGES = 12

# Of layers and devices, so many runs of neighbours are shown; the saved plan has all.
_MOST_RUNS = 3


def stage_table(plan: Plan, *, width: int | None = None) -> str:
    """A row for stages that are alike: where they lie, what a device holds at most, how many of their segments are
    rematerialised, their seconds.

    Stages are alike where all that is shown of each is equal, but for what a row gives a range or a maximum of: their
    layers and devices, the microbatches in flight, the memory. They have equal numbers of layers.

    Args:
      plan: of several stages or replicas.
      width: of the page, characters.
    """
    mixed = len({stage.device_kind for stage in plan.stages}) > 1
    noun = "replica" if plan.shares else "stage"
    heads = (
        f"{noun}s", "microbatches" if plan.shares else "layers", "devices", *(["of kind"] if mixed else []), "mesh",
        "in flight", "memory, at most", "remat", "forward", "backward", "synchronise", "update",
    )  # fmt: skip
    alike = [
        (stage.layers[1] - stage.layers[0], stage.memory_limit_bytes, plan.microbatches_of(number), *_cells(stage))
        for number, stage in enumerate(plan.stages)
    ]
    rows = []
    for members, (_, limit, share, kind, mesh, remat, *seconds) in grouped(alike):
        stages = [plan.stages[number] for number in members]
        part = _runs(layer for stage in stages for layer in range(*stage.layers))
        if plan.shares:
            part = f"{share} of {plan.microbatches}" + (" each" if len(members) > 1 else "")
        rows.append((
            number_words(members), part, _runs(device for stage in stages for device in stage.devices),
            *([kind] if mixed else []), mesh, _in_flight(stages),
            memory_words(max(stage.memory.total for stage in stages), limit), remat, *seconds,
        ))  # fmt: skip
    return format_table(heads, rows, left=heads.index("in flight"), width=width)


def _cells(stage: Stage) -> tuple[str, ...]:
    """What is printed of one stage and has to be equal in a row."""
    return (
        stage.device_kind, mesh_words(stage.mesh), str(stage.rematerialised_segments or "none"),
        format_seconds(stage.forward_seconds), format_seconds(stage.backward_seconds),
        format_seconds(stage.synchronise_seconds), format_seconds(stage.update_seconds),
    )  # fmt: skip


def transfer_table(plan: Plan, *, width: int | None = None) -> str:
    """A row for edges that are alike: what each carries for one microbatch and how long that takes.

    Args:
      plan: of several stages.
      width: of the page, characters.
    """
    seconds: list[float] = []
    cells: list[tuple[str, ...]] = []
    for source, target in plan.edges:
        mine = [t for t in plan.transfers if (t.source, t.target) == (source, target)]
        forward, backward = sum(t.forward_seconds for t in mine), sum(t.backward_seconds for t in mine)
        seconds.append(forward + backward)
        cells.append((
            "the next" if target == source + 1 else str(target + 1), _names([t.name for t in mine]),
            format_bytes(sum(t.bytes for t in mine)), format_seconds(forward), format_seconds(backward),
        ))  # fmt: skip
    slowest = sorted(grouped(cells), key=lambda group: -max(seconds[edge] for edge in group[0]))[:_MOST_EDGES]
    rows = [(number_words(plan.edges[edge][0] for edge in edges), *shown) for edges, shown in sorted(slowest)]
    table = format_table(("from stage", "to", "values", "size", "forward", "backward"), rows, left=3, width=width)
    more = len(cells) - sum(len(edges) for edges, _ in slowest)
    return table if not more else f"{table}\nand {more} more, none of them slower"


def _runs(numbers: Iterable[int]) -> str:
    """Neighbours together; the devices of stages on hosts of several kinds need not be one run."""
    runs = [range_words(run) for run in number_runs(numbers)]
    left_out = len(runs) - _MOST_RUNS
    return ", ".join(runs) if left_out <= 1 else f"{', '.join(runs[:_MOST_RUNS])} and {left_out} more"


def _in_flight(stages: Sequence[Stage]) -> str:
    counts = [stage.in_flight for stage in stages]
    return range_words((min(counts), max(counts) + 1))


def _names(names: Sequence[str]) -> str:
    return names[0] if len(names) == 1 else f"{names[0]} and {len(names) - 1} more"
