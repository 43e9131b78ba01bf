"""What hinders a finished plan from splitting work: notes that say where, why, and what another size would gain.

Of an uneven dim (`uneven_dims`) that the search has not tried to pad, for want of time or since no input has it, the
note gives a bound, on the compute alone.

Work that all devices along an axis do alike for other reasons is noted too: an operator without a dim that may be split
(a factorisation, a loop, a kernel without a rule), with a `ReplicationWarning` as such operators get elsewhere; and
where it is most of the compute, work that layouts could split which are no faster, as far as the search knows.
"""

from __future__ import annotations

import warnings
from collections.abc import Collection

from ..cluster import Cluster
from ..plan import Plan, Prediction
from ..program.padded_dims import PaddedDim
from ..program.rules import ReplicationWarning
from ..program.trace import Program
from ..report.table import format_seconds
from ..search.restrictions.constraints import Constraints
from .uneven_dims import SHARE, TILE, PlannedWork, UnevenDims, Work, dim_of_input, padded_extents

# Work that devices do alike though splitting it gains nothing is noted where it is most of the compute: then more
# devices are of no use.
_MOST = 0.5


def replicated_work(
    program: Program, plan: Plan, cluster: Cluster, constraints: Constraints, *, tried: Collection[PaddedDim] = ()
) -> tuple[str, ...]:
    """Notes on what hinders a plan from splitting work.

    Args:
      program: as it was planned.
      plan: of it, priced.
      cluster: it is for.
      constraints: that it satisfies, with the roles of mesh axes where a preset gives them some.
      tried: dims of which the search knows that the plan is no faster with them padded.

    Warns:
      ReplicationWarning: for operators without a dim that could be split.
    """
    if plan.predicted is None or plan.num_devices == 1:
        return ()
    planned = PlannedWork(program, plan, cluster, constraints.roles)
    notes, noted = _uneven_notes(program, plan.predicted, planned.uneven_dims(), tried)
    every = [(n, work) for n, works in enumerate(planned.works) for work in works]
    rest = [(n, work) for n, work in every if work.alike > 1 and (n, work.operator.index) not in noted]
    compute = sum(work.seconds for _, work in every)
    for whole in (True, False):
        notes += _other_notes(plan.predicted, [work for _, work in rest if work.whole is whole], compute, whole=whole)
    return tuple(notes)


def _uneven_notes(
    program: Program, predicted: Prediction, uneven: list[UnevenDims], tried: Collection[PaddedDim]
) -> tuple[list[str], set[tuple[int, int]]]:
    """Notes on uneven dims, and the operators that they are about."""
    notes: dict[int, str] = {}
    noted: set[tuple[int, int]] = set()
    step = predicted.step_seconds
    for dims in uneven:
        alike = {(dims.stage, place): one for place, one in dims.works.items() if one[1].parts > 1}
        worst, dim = dims.worst
        saved = sum(dims.saved(*one) for place, one in alike.items() if place not in noted)
        padded = dims.padded(program)
        if (padded and set(padded) <= set(tried)) or dim.index in notes:  # of another stage
            noted |= alike.keys()
            continue
        if saved < SHARE * step:
            continue
        where, extent = dim_of_input(program, dims.graph, dim.index), dims.extent
        name, times = f"a dim of {dim.size}", 1
        if where is not None:
            name, times = str(where), where.microbatches if where.extent == extent else 1
        blocks = f" in {extent} blocks" if (where.extent if where is not None else dim.size) != extent else ""
        more = f" (and {len(dims.indices) - 1} more)" if len(dims.indices) > 1 else ""
        split = "not split over" if dim.split == 1 else f"split over {dim.split} of"
        part = f", its part in each of {times} microbatches" if times > 1 else ""
        least, tiled = padded_extents(extent, dim.unit)
        tiles = f", or {times * tiled} for whole tiles of {TILE}," if tiled > least else ""
        notes[dim.index] = (
            f"{name}{blocks}{more} is {split} {dim.unit} devices ({worst.operator.source}): {dim.unit} does not "
            f"divide {extent}{part}; {times * least}{tiles} would save at most {format_seconds(saved)} of "
            f"{format_seconds(step)} a step, of compute"
        )
        noted |= alike.keys()
    return list(notes.values()), noted


def _other_notes(predicted: Prediction, works: list[Work], compute: float, *, whole: bool) -> list[str]:
    """A note on the work that devices do alike though no uneven dim is why, if it is worth one."""
    seconds, saved = sum(work.seconds for work in works), sum(work.saved for work in works)
    if not works or (saved < SHARE * predicted.step_seconds if whole else seconds < _MOST * compute):
        return []
    worst = max(works, key=lambda work: work.saved)
    less = f"it would take at most {format_seconds(saved)} of {format_seconds(predicted.step_seconds)} a step less"
    if whole:
        text = f"{worst.operator.name} at {worst.operator.source} runs whole on"
        warnings.warn(f"{text} every device: no dim of it can be split", ReplicationWarning, stacklevel=5)
        return [f"{text} {worst.alike} devices: no dim of it can be split; split, {less}"]
    gap = predicted.optimality_gap
    known = "the search did not find out whether a layout that splits it is faster"
    if gap < SHARE:
        known = (
            f"the search proved that no layout that was asked for is faster by more than {100 * max(gap, 1e-3):.1f} %"
        )
    return [
        f"{worst.alike} devices do the same work: {100 * seconds / compute:.0f} % of the compute, most of it at "
        f"{worst.line}; {known} by the cost model, with what moving data takes; without that, {less}"
    ]
