"""Constraints on a search: layouts of inputs and parameters by path (`pins=`), the ZeRO stage, roles of mesh axes."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from difflib import get_close_matches
from fnmatch import fnmatchcase
from typing import TypeVar

from ...errors import PlanError
from ...sharding import Spec
from ..prices.choices import ParameterChoice
from .roles import Roles

Layout = tuple[tuple[str, ...], ...]

_Choice = TypeVar("_Choice")


def _matches(name: str, pattern: str) -> bool:
    return fnmatchcase(name, pattern.replace("[", "[[]"))


@dataclass(frozen=True, kw_only=True)
class Constraints:
    """Decisions that the user or a preset has taken.

    Args:
      layouts: for a path pattern (`*` matches within and across levels, `?` one character; brackets are those of the
        path), the axes that split each dim.
      zero: None to choose per parameter; 0 nothing split that operators do not need split; 1 optimizer state split over
        every axis it divides; 2 sums of gradients split likewise; 3 parameters too.
      strict: whether ZeRO 1 and 2 also ask for parameters used whole with gradients summed over all axes, the
        data-parallel form that they divide; not every program allows it (a `cond` reads its parameters unsplit).
      roles: what each mesh axis is for (a preset); None for anything. ZeRO then splits over the axes that may store.
      gradient_exchange: as in `plan.Stage`.
    """

    layouts: Mapping[str, Layout] = field(default_factory=dict)
    zero: int | None = None
    strict: bool = True
    roles: Roles | None = None
    gradient_exchange: str = "collective"

    def __post_init__(self) -> None:
        if self.zero not in (None, 0, 1, 2, 3) or isinstance(self.zero, bool):
            raise PlanError(
                refused="the ZeRO stage", got=repr(self.zero), needed="0, 1, 2, 3 or None", where="zero=",
                try_="zero=None",
            )  # fmt: skip

    def check(self, names: Sequence[str], planned: Sequence[str]) -> None:
        """Refuse patterns that match none of the inputs called `names`, or none of those that are `planned`."""
        for pattern in self.layouts:
            matching = [name for name in names if _matches(name, pattern)]
            if matching and not any(_matches(name, pattern) for name in planned):
                raise _refusal(
                    repr(pattern), f"a pattern of {matching[0]}, which has no layout of its own",
                    "a parameter, or an input that the loss function reads; optimizer state follows its parameter",
                    "pinning the parameter, or zero= to split its optimizer state",
                )  # fmt: skip
            if not matching:
                near = get_close_matches(pattern, planned, n=3, cutoff=0.0)
                raise _refusal(
                    repr(pattern), "a pattern that matches no input of the step",
                    "the path of a parameter or an argument, with * for any part of it",
                    " or ".join(near) or "pins=None",
                )  # fmt: skip

    def layout(self, name: str, rank: int, sizes: Mapping[str, int]) -> Layout | None:
        """The pinned layout of the array called `name`, checked against the mesh."""
        matching = {pattern: layout for pattern, layout in self.layouts.items() if _matches(name, pattern)}
        found = set(matching.values())
        if len(found) > 1:
            got = f"{len(found)} different layouts from the patterns {sorted(matching)}"
            raise PlanError(
                refused=f"the pins of {name}", got=got, needed="one layout for each array", where="pins=",
                try_="patterns that do not overlap",
            )  # fmt: skip
        if not found:
            return None
        (layout,) = found
        unknown = sorted({axis for dim in layout for axis in dim} - set(sizes))
        if unknown:
            raise _refusal(
                f"of {name}", f"axis {unknown[0]!r}", f"axes of the mesh: {', '.join(sizes)}",
                "mesh= with the axis names you want",
            )  # fmt: skip
        used = [axis for dim in layout for axis in dim]
        if len(layout) != rank or len(set(used)) != len(used):
            raise _refusal(
                f"of {name}", f"{layout} for an array of {rank} dims",
                "one tuple of axes for each dim, no axis twice", "() for a dim that is not split",
            )  # fmt: skip
        return layout

    def input(self, name: str, choices: Sequence[Spec], sizes: Mapping[str, int]) -> tuple[Spec, ...]:
        """The specs of an input that satisfy the constraints."""
        layout = self.layout(name, len(choices[0].dims), sizes)
        return _kept(name, layout, choices, [spec.dims for spec in choices])

    def parameter(
        self, name: str, choices: Sequence[ParameterChoice], sizes: Mapping[str, int]
    ) -> tuple[ParameterChoice, ...]:
        """The choices of a parameter that satisfy the constraints."""
        layout = self.layout(name, len(choices[0].use.dims), sizes)
        kept = _kept(name, layout, choices, [choice.use.dims for choice in choices])
        if self.zero is None or layout is not None:
            return kept
        storing = summing = frozenset(sizes)
        if self.roles is not None:
            storing, summing = storing & self.roles.storing, summing & self.roles.summing
        if self.gradient_exchange == "central":
            # A gradient that is summed inside the backward pass does not pass the server.
            kept = tuple(c for c in kept if c.use.broadcast >= summing)
        if self.zero == 0:
            return tuple(c for c in kept if c.storage.dims == c.use.dims)
        if self.zero != 2:
            kept = tuple(c for c in kept if not c.scattered)
        if self.zero in (1, 2) and self.strict:
            kept = tuple(c for c in kept if c.use.broadcast >= summing) or kept

        def stored(choice: ParameterChoice) -> int:
            spec = choice.use if self.zero == 3 else choice.storage
            return len(storing.intersection(spec.sharded_axes))

        most = max(map(stored, kept), default=0)
        kept = tuple(c for c in kept if stored(c) == most)
        if self.zero == 2:
            kept = tuple(c for c in kept if c.scattered) or kept
        return kept


def _kept(
    name: str, layout: Layout | None, choices: Sequence[_Choice], layouts: Sequence[Layout]
) -> tuple[_Choice, ...]:
    """The choices with a pinned layout."""
    kept = tuple(one for one, its in zip(choices, layouts, strict=True) if layout is None or its == layout)
    if not kept:
        raise _refusal(
            f"of {name}", f"the layout {layout}", "axes whose sizes divide the dims they split",
            "another dim, or a mesh of another shape",
        )  # fmt: skip
    return kept


def _refusal(pin: str, got: str, needed: str, try_: str) -> PlanError:
    return PlanError(refused=f"the pin {pin}", got=got, needed=needed, where="pins=", try_=try_)
