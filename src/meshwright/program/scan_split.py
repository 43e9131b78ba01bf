"""One scan of a program as several shorter ones in a row, so that stages may run a share of its trips each.

A scan of n trips over stacked rows is, for any n = a + b, a scan over the first a rows whose carry starts a scan over
the other b. Nothing is unrolled: the body stays one jaxpr, called with fewer trips. Stacked operands are sliced,
stacked results concatenated after the last piece. A scan that runs in reverse begins with its last rows, so its first
piece takes those. A stacked operand that was converted as a whole to another dtype or order of dims (layers stacked on
dim 1) is sliced first and converted piece by piece.

Each piece reads its rows of a stacked parameter and no other: `stacked_rows` says which, and `program.cut` makes them
the stage's own parameter, so that no stage holds the rows of another.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from .._jax.jaxpr import ClosedJaxpr, open_jaxpr, scan_parts, source_line
from .._jax.scan import input_rows, split_scans_at
from ..errors import PlanError
from .graph import Graph
from .stacked import StackedRows


def split_scans(closed: ClosedJaxpr, trips: Mapping[int, Sequence[int]]) -> ClosedJaxpr:
    """The same program with some of its top-level scans cut into several.

    >>> import jax, jax.numpy as jnp
    >>> closed = jax.make_jaxpr(lambda x, w: jax.lax.scan(lambda h, row: (h * row, h), x, w))(1.0, jnp.ones(5))
    >>> [equation.primitive.name for equation in split_scans(closed, {0: (2, 3)}).eqns]
    ['slice', 'scan', 'slice', 'scan', 'concatenate']

    Args:
      closed: the program.
      trips: for each scan to be cut, by position of its top-level equation, the trips of the pieces in running order.

    Raises:
      PlanError: an equation that is no scan, or trips that are not positive or do not add up to the scan's.
    """
    return split_with_starts(closed, trips)[0]


def split_with_starts(
    closed: ClosedJaxpr, trips: Mapping[int, Sequence[int]]
) -> tuple[ClosedJaxpr, dict[tuple[int, int], int]]:
    """What `split_scans` returns, and where each piece begins: by position of the scan before it was cut and number of
    the piece, the position of the piece's first equation (that of a slice, where it has stacked operands)."""
    equations = list(open_jaxpr(closed).eqns)
    for position, counts in trips.items():
        name = equations[position].primitive.name if 0 <= position < len(equations) else "no equation"
        if name != "scan":
            raise _refusal(f"the equation {position}: {name}", "the position of a scan", f"equation {position}")
        length = scan_parts(equations[position]).length
        if not counts or min(counts) < 1 or sum(counts) != length:
            where = f"equation {position}, {source_line(equations[position])}"
            raise _refusal(f"the trips {list(counts)}", f"positive trips that add up to {length}", where)
    return split_scans_at(closed, trips)


def stacked_rows(closed: ClosedJaxpr) -> dict[int, StackedRows]:
    """The equations that take rows out of an input for scans alone, by position of the top-level equation."""
    found = input_rows(closed).items()
    return {at: StackedRows(input=i, dim=d, first=first, last=last) for at, (i, d, first, last) in found}


def trips_for_layers(graph: Graph, layers: int) -> dict[int, tuple[int, ...]]:
    """How to cut the scans of a program that is to have about `layers` layers of equal work.

    A scan with a share of the program's FLOPs becomes that share of the layers, of whole trips, as even as they divide.

    Args:
      graph: the program, its scans whole.
      layers: how many layers the program is to have.

    Returns:
      For each top-level scan that is worth cutting, the trips of its pieces: what `split_scans` takes.
    """
    total = sum(op.flops * op.repeats for op in graph.operators)
    work: dict[int, float] = {}
    length: dict[int, int] = {}
    for op in graph.operators:
        work[op.path[0]] = work.get(op.path[0], 0.0) + op.flops * op.repeats
        if op.is_link and len(op.path) == 3:
            # A link of a top-level scan repeats as often as the scan has trips, or (a constant's) as often as it runs.
            length[op.path[0]] = max(length.get(op.path[0], 1), op.repeats)
    found = {}
    for position, trips in sorted(length.items()):
        pieces = min(trips, round(layers * work[position] / total)) if total > 0 else 1
        if pieces > 1:
            share, left = divmod(trips, pieces)
            found[position] = tuple(share + (1 if i < left else 0) for i in range(pieces))
    return found


def _refusal(got: str, needed: str, where: str) -> PlanError:
    return PlanError(
        refused="to split a scan", got=got, needed=needed, where=where, try_="`trips_for_layers` of its graph"
    )
