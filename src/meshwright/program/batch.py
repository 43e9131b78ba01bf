"""Which dims of a program's inputs hold the batch: those that microbatches would cut."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax

from .origins import input_dims
from .trace import Program, abstract, is_batched
from .traces import Traces


def batch_extents(args: Sequence[Any], batch_axis: int) -> list[int]:
    """The sizes of the batch, as the arguments that hold it have them; usually one.

    Args:
      args: of the step.
      batch_axis: which axis of every array outside the state is the batch.
    """
    shapes = abstract(tuple(args))
    leaves = zip(jax.tree.leaves(shapes), is_batched(shapes, batch_axis), strict=True)
    return sorted({leaf.shape[batch_axis] for leaf, batched in leaves if batched})


def batch_inputs(
    program: Program, traces: Traces, args: Sequence[Any], *, batch_axis: int = 0
) -> frozenset[tuple[str, int]]:
    """The inputs of a core that hold the batch, as (name, dim).

    A core input that the step computes from its batch is told by tracing the step at another size.

    Args:
      program: one of `traces`.
      traces: of the step.
      args: of the step.
      batch_axis: which axis of every array outside the state is the batch.
    """
    dims = program.split_dims
    if program.microbatches == 1:
        shapes = abstract(tuple(args))
        batched = is_batched(shapes, batch_axis)
        if all(source is not None for source in program.core_inputs):
            dims = tuple(
                batch_axis if source is not None and batched[source] else None for source in program.core_inputs
            )
        else:
            extents = batch_extents(args, batch_axis)
            count = next((n for n in range(2, min(extents, default=1) + 1) if all(e % n == 0 for e in extents)), None)
            if count is not None:
                other = traces.program(args, microbatches=count, batch_axis=batch_axis, reduction="mean", warn=False)
                dims = other.split_dims
    graph = program.graph
    return input_dims([graph.values[v] for v in graph.inputs[: program.num_consts]], dims)
