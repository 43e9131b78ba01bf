"""Plans that a search priced and did not take, with their predicted steps: how much the choice matters."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, groupby

from ..plan.words import mesh_words, microbatches_words

# What is faster by less than this share may have been passed over for what is simpler.
TOO_LITTLE = 0.05

# So many are told.
_MOST = 6


@dataclass(frozen=True, slots=True, kw_only=True)
class Alternative:
    """A plan that was not taken, in a few words, and its predicted step."""

    what: str
    step_seconds: float


def nearest(seconds: Mapping[str, float], *, but: str = "") -> tuple[Alternative, ...]:
    """The fastest few plans, but for the one that was taken; one of those with equal seconds, which are one layout
    under several schedules.

    >>> [one.what for one in nearest({"gpipe": 2.0, "adaptive": 2.0, "taken": 1.0, "eager": 3.0}, but="taken")]
    ['adaptive', 'eager']
    """
    found = sorted((taken, what) for what, taken in seconds.items() if what != but)
    first = {f"{taken:.9g}": (taken, what) for taken, what in reversed(found)}
    return tuple(Alternative(what=what, step_seconds=taken) for taken, what in sorted(first.values())[:_MOST])


def merged(*groups: Iterable[Alternative]) -> tuple[Alternative, ...]:
    """The fastest few plans of several searches; of those with the same words the faster one.

    >>> merged([Alternative(what="a", step_seconds=1.0)], [Alternative(what="a", step_seconds=2.0)])
    (Alternative(what='a', step_seconds=1.0),)
    """
    found: dict[str, float] = {}
    for one in chain.from_iterable(groups):
        found[one.what] = min(one.step_seconds, found.get(one.what, one.step_seconds))
    return nearest(found)


def one_stage_words(microbatches: int, mesh: Sequence[tuple[str, int]], *, rematerialised: bool) -> str:
    """A plan of one stage.

    >>> one_stage_words(4, [("x", 8)], rematerialised=True)
    '4 microbatches, one stage of mesh x=8, rematerialised'
    """
    again = ", rematerialised" if rematerialised else ""
    return f"{microbatches_words(microbatches)}, one stage of mesh {mesh_words(mesh)}{again}"


def stages_words(microbatches: int, schedule: str, sizes: Sequence[tuple[int, int]]) -> str:
    """A plan of several stages by their layers and devices, equal neighbours together.

    >>> stages_words(8, "gpipe", [(1, 4), (1, 4), (2, 8)])
    '8 microbatches, gpipe, layers x devices 2 of 1x4, 2x8'
    """
    runs = [(size, len(list(run))) for size, run in groupby(sizes)]
    stages = ", ".join(
        f"{count} of {layers}x{devices}" if count > 1 else f"{layers}x{devices}" for (layers, devices), count in runs
    )
    return f"{microbatches_words(microbatches)}, {schedule}, layers x devices {stages}"
