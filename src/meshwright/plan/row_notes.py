"""What a plan says of stacked parameters whose rows its stages hold in unlike parts."""

from __future__ import annotations

from .plan import ParameterPlan, Plan, Stage
from .words import stage_words


def row_notes(plan: Plan) -> tuple[str, ...]:
    """A note on rows that move between stages before and after every step; nothing if none do.

    A state leaf is one array, whose blocks are equal. Rows of a scanned layer lie in such blocks by themselves where
    stages of their own devices hold equal numbers of them, in the same layout.
    """
    held: dict[str, list[tuple[int, Stage, ParameterPlan]]] = {}
    for number, stage in enumerate(plan.stages):
        for parameter in stage.parameters:
            if parameter.rows is not None:
                held.setdefault(parameter.name, []).append((number, stage, parameter))
    unlike = {name: parts for name, parts in held.items() if not _alike(parts)}
    if not unlike:
        return ()
    name, parts = next(iter(unlike.items()))
    by_rows: dict[int, list[int]] = {}
    for number, _, parameter in parts:
        assert parameter.rows is not None  # only such parts are kept above
        by_rows.setdefault(parameter.rows[1] - parameter.rows[0], []).append(number)
    held_words = ", ".join(f"{stage_words(numbers)} {_holds(rows, len(numbers))}" for rows, numbers in by_rows.items())
    more = f" (and {len(unlike) - 1} more)" if len(unlike) > 1 else ""
    return (
        f"{name}{more}: {held_words}, in blocks that are no array together, so some rows of it "
        "and of its optimizer state move between devices before and after each step, which the predicted time leaves "
        "out; equal numbers of layers on equal submeshes, in the same layouts, move nothing",
    )


def _holds(rows: int, stages: int) -> str:
    what = f"{rows} row{'' if rows == 1 else 's'}"
    return f"holds {what}" if stages == 1 else f"hold {what} each"


def _alike(parts: list[tuple[int, Stage, ParameterPlan]]) -> bool:
    """Whether the stages have as many rows each, in the same layout, on devices of their own."""
    layouts = {(p.shape, stage.mesh, p.use.dims, p.storage.dims) for _, stage, p in parts}
    devices = [device for _, stage, _ in parts for device in stage.devices]
    return len(layouts) == 1 and len(set(devices)) == len(devices)
