"""What a plan says of stacked parameters whose rows its stages hold in unlike parts."""

from __future__ import annotations

from .plan import ParameterPlan, Plan, Stage


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
    numbers = ", ".join(str(number + 1) for number, *_ in parts)
    counts = ", ".join(str(p.rows[1] - p.rows[0]) for *_, p in parts if p.rows is not None)
    more = f" (and {len(unlike) - 1} more)" if len(unlike) > 1 else ""
    return (
        f"{name}{more}: stages {numbers} hold {counts} rows, in blocks that are no array together, so some rows of it "
        "and of its optimizer state move between devices before and after each step, which the predicted time leaves "
        "out; equal numbers of layers on equal submeshes, in the same layouts, move nothing",
    )


def _alike(parts: list[tuple[int, Stage, ParameterPlan]]) -> bool:
    """Whether the stages have as many rows each, in the same layout, on devices of their own."""
    layouts = {(p.shape, stage.mesh, p.use.dims, p.storage.dims) for _, stage, p in parts}
    devices = [device for _, stage, _ in parts for device in stage.devices]
    return len(layouts) == 1 and len(set(devices)) == len(devices)
