"""Where one equation is computed, given where its operands are; and what of a program inside an equation.

Nothing is changed here: `homes` uses it for each equation, and for what programs inside equations would need.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from ..._jax.jaxpr import Equation, is_literal, open_jaxpr, scan_parts
from ..._jax.passes import size_bytes
from ..._jax.structured import body_in_line
from ...program.rules import Rules
from .rows import Rows, follow_rows

# Values up to this size may be sent between stages around the pipeline; larger ones only where an equation cannot be
# computed otherwise. A choice, not a measurement: losses, norms and step counts are smaller, matrices larger.
SMALL_BYTES = 1 << 16

Stages = frozenset[int]


@dataclass(frozen=True, slots=True)
class Home:
    """Where a value is.

    Args:
      at: the stages that have it or compute it from what they have.
      possible: the stages that could compute it if they were sent small values.
      rows: the part of it that each stage has, None if they have it whole.
      mixed: whether it is computed from values that stages have exchanged.
      moved: whether it is computed from large values that were sent.
    """

    at: Stages
    possible: Stages
    rows: Rows | None = None
    mixed: bool = False
    moved: bool = False


@dataclass(frozen=True, slots=True, kw_only=True)
class Placed:
    """How an equation is computed.

    Args:
      homes: of its results.
      late: positions of the operands that are not at hand where it is computed.
      whole: whether it takes more than its late operands: contributions, large operands of others, an exchange inside.
      combine: the word for how contributions combine, or the rows that they are; None if its results are none.
      contributors: the stages that have contributions.
    """

    homes: list[Home]
    late: frozenset[int] = frozenset()
    whole: bool = False
    combine: str | Rows | None = None
    contributors: tuple[int, ...] = ()

    @property
    def exchanges(self) -> bool:
        """Whether stages exchange values for it."""
        return self.whole or bool(self.late)


@dataclass(slots=True)
class Body:
    """What is found in a program inside an equation.

    Args:
      results: homes of its outputs; None for literals.
      placed: for each equation that takes an exchange how it is computed.
    """

    results: list[Home | None]
    placed: dict[int, Placed] = field(default_factory=dict)


class Placement:
    """Places equations.

    Args:
      everywhere: all stages.
      rules: factor rules of the equations.

    Attributes:
      neutral: the home of what all stages have.
    """

    def __init__(self, everywhere: Stages, rules: Rules) -> None:
        self.everywhere = everywhere
        self._rules = rules
        self.neutral = Home(everywhere, everywhere)

    def place(self, equation: Equation, operands: Sequence[Home | None]) -> Placed:
        """How an equation is computed, inside another or not."""
        if (body := body_in_line(equation)) is not None:
            found = self._body(body, operands)
            return Placed(homes=[home or self.neutral for home in found.results], whole=bool(found.placed))
        name = equation.primitive.name
        if name == "cond":
            homes, moved, apart = self.branches(equation, operands)
            return Placed(homes=homes, whole=apart or any(moved))
        if name == "scan":
            return self._scan(equation, operands)
        if name == "while":
            return self._while(equation, operands)
        placed = self.plain(equation, operands)
        if placed is None:
            homes = self.anywhere(equation, operands).homes
            return Placed(homes=homes, whole=True)
        return placed

    def _body(self, closed: Any, inputs: Sequence[Home | None]) -> Body:
        jaxpr = open_jaxpr(closed)
        env: dict[Any, Home] = dict.fromkeys(jaxpr.constvars, self.neutral)
        env.update((var, home or self.neutral) for var, home in zip(jaxpr.invars, inputs, strict=True))
        placed: dict[int, Placed] = {}
        for position, equation in enumerate(jaxpr.eqns):
            found = self.place(equation, [None if is_literal(a) else env[a] for a in equation.invars])
            env.update(zip(equation.outvars, found.homes, strict=True))
            if found.exchanges:
                placed[position] = found
        return Body([None if is_literal(a) else env[a] for a in jaxpr.outvars], placed)

    def branches(
        self, equation: Equation, operands: Sequence[Home | None]
    ) -> tuple[list[Home], list[frozenset[int]], bool]:
        """Homes of a `cond`'s results, the equations of each branch that would have to run in front of it, and whether
        there are results that are one of several values of different stages."""
        index, *rest = operands
        branches = equation.params["branches"]
        bodies = [self._body(branch, rest) for branch in branches]
        homes, split = [], []
        for position, var in enumerate(equation.outvars):
            made = [one for one in (index, *(body.results[position] for body in bodies)) if one is not None]
            home, apart = self._met(made, var)
            homes.append(home)
            if apart:
                split.append(position)
        moved = [_to_move(branch, body, split) for branch, body in zip(branches, bodies, strict=True)]
        return homes, moved, bool(split)

    def _met(self, homes: Sequence[Home], var: Any) -> tuple[Home, bool]:
        """The home of a value that is one of several, and whether they are apart: where it is needed, it takes them
        all, as nobody knows which it is."""
        rows = next((home.rows for home in homes if home.rows is not None), None)
        if rows is not None:
            return self._on_rows(rows), any(not rows.stages <= home.at for home in homes)
        at = self.everywhere.intersection(*(home.at for home in homes))
        possible = self.everywhere.intersection(*(home.possible for home in homes))
        if at or (possible and not is_small(var)):
            return Home(at or possible, possible or at), not at
        return self.neutral, True

    def _on_rows(self, rows: Rows) -> Home:
        """The home of a value of which each stage has some rows."""
        return Home(rows.stages, rows.stages, rows)

    def _scan(self, equation: Equation, operands: Sequence[Home | None]) -> Placed:
        parts = scan_parts(equation)
        first_xs = parts.num_consts + parts.num_carry
        consts, carry, xs = operands[: parts.num_consts], operands[parts.num_consts : first_xs], operands[first_xs:]
        if any(x is not None and x.rows is not None and x.rows.dim == 0 for x in xs):
            return Placed(homes=self.anywhere(equation, operands).homes, whole=True)
        xs = [_shifted(x, -1) for x in xs]
        found, carry, apart = self._fixed(parts.body, carry, lambda carry: [*consts, *carry, *xs])
        homes = [*carry, *(_shifted(home, 1) or self.neutral for home in found.results[parts.num_carry :])]
        return Placed(homes=homes, whole=bool(found.placed) or apart)

    def _while(self, equation: Equation, operands: Sequence[Home | None]) -> Placed:
        params = equation.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        tested, consts = operands[:num_cond], operands[num_cond : num_cond + num_body]
        carry = operands[num_cond + num_body :]
        found, carry, apart = self._fixed(params["body_jaxpr"], carry, lambda carry: [*consts, *carry])
        test = self._body(params["cond_jaxpr"], [*tested, *carry])
        (go_on,) = test.results
        tested_at = self.everywhere if go_on is None else go_on.at
        far = any(
            not (home.at if can_travel(v, home) else home.possible) <= tested_at
            for v, home in zip(equation.outvars, carry, strict=True)
        )
        return Placed(homes=carry, whole=bool(found.placed) or bool(test.placed) or apart or far)

    def _fixed(
        self, body: Any, carry: Sequence[Home | None], inputs: Callable[[Sequence[Home]], Any]
    ) -> tuple[Body, list[Home], bool]:
        """A loop's body, carries that stay as they are from one trip to the next, and whether they are apart."""
        now = [home or self.neutral for home in carry]
        while True:
            found = self._body(body, inputs(now))
            made = [home or self.neutral for home in found.results[: len(now)]]
            met = [self._met([a, b], v) for a, b, v in zip(now, made, open_jaxpr(body).outvars, strict=False)]
            then = [home for home, _ in met]
            apart = any(one for _, one in met) and then == now
            if then == now or found.placed:
                return found, then, apart
            now = then

    # Plain equations

    def plain(self, equation: Equation, operands: Sequence[Home | None]) -> Placed | None:
        """How an equation without programs inside is computed; None if it reads across rows."""
        rows = [None if home is None else home.rows for home in operands]
        following = follow_rows(equation, self._rules, rows)
        if following is None:
            return None
        if following.combine is not None:
            stages = tuple(sorted(next(r for r in following.operands if r is not None).stages))
            homes = [Home(self.everywhere, self.everywhere, mixed=True) for _ in equation.outvars]
            return Placed(homes=homes, whole=True, combine=following.combine, contributors=stages)
        return self.anywhere(equation, operands, following.results)

    def anywhere(
        self, equation: Equation, operands: Sequence[Home | None], rows: Sequence[Rows | None] | None = None
    ) -> Placed:
        """How an equation is computed whose operands may be sent; `rows` are those of its results."""
        if (lying := next((h.rows for h in operands if h is not None and h.rows is not None), None)) is not None:
            # Each stage for its own rows.
            late = frozenset(i for i, h in enumerate(operands) if h is not None and not lying.stages <= h.at)
            home = self._on_rows(lying)
            results = rows if rows is not None else [None] * len(equation.outvars)
            return Placed(homes=[replace(home, rows=r) for r in results], late=late)
        pairs = [(i, a, h) for i, (a, h) in enumerate(zip(equation.invars, operands, strict=True)) if h is not None]
        large = [(a, h) for _, a, h in pairs if not can_travel(a, h)]
        possible = self.everywhere.intersection(*(h.possible for _, h in large))
        moves = not possible
        if moves:
            possible = frozenset({_owner(large)})
        home = self.everywhere.intersection(*(h.at for _, _, h in pairs))
        exchanged = max((size_bytes(a.aval) for _, a, h in pairs if h.mixed), default=0)
        # What already mixes stages goes on everywhere while it takes no larger values: a sum over all parameters takes
        # one exchange, not one for each change of stage in the order of the terms.
        joins = exchanged and all(size_bytes(a.aval) <= exchanged for _, a, h in pairs if h.at != self.everywhere)
        if not home or joins:
            home = possible
        mixed = home == self.everywhere and (bool(exchanged) or any(not home <= h.at for _, _, h in pairs))
        late = frozenset(i for i, _, h in pairs if not home <= h.at)
        moved = moves or any(h.moved for _, h in large)
        homes = [Home(home, possible, None, mixed, moved) for _ in equation.outvars]
        return Placed(homes=homes, late=late, whole=moves)


def is_small(var: Any) -> bool:
    """Whether a value travels between stages outside the pipeline without a second thought."""
    return size_bytes(var.aval) <= SMALL_BYTES


def can_travel(var: Any, home: Home) -> bool:
    """Whether a value is sent wherever it is read."""
    return is_small(var) and home.rows is None


def _shifted(home: Home | None, by: int) -> Home | None:
    """Of a row or a stack of values: its rows are in another dim."""
    rows = None if home is None else home.rows
    return home if home is None or rows is None else replace(home, rows=replace(rows, dim=rows.dim + by))


def key_of(home: Home, var: Any) -> Stages:
    """What results of one equation have in common that are computed together."""
    return home.at if can_travel(var, home) else home.possible


def _owner(large: Sequence[tuple[Any, Home]]) -> int:
    """The stage that computes an equation of large operands of several: that with the most bytes of what was not sent
    itself."""
    stages = sorted({stage for _, home in large for stage in home.at})

    def weight(stage: int) -> tuple[int, int, int]:
        here = [(size_bytes(var.aval), home.moved) for var, home in large if stage in home.at]
        return sum(size for size, moved in here if not moved), sum(size for size, _ in here), -stage

    return max(stages, key=weight)


def _to_move(branch: Any, body: Body, split: Iterable[int]) -> frozenset[int]:
    """The equations of a branch that run in front of the `cond`: what takes an exchange, or makes what one takes."""
    jaxpr = open_jaxpr(branch)
    maker = {var: place for place, equation in enumerate(jaxpr.eqns) for var in equation.outvars}
    results: list[Any] = [jaxpr.outvars[i] for i in split]
    stack = [maker[atom] for atom in results if not is_literal(atom) and atom in maker]
    for place, placed in body.placed.items():
        if placed.whole:
            stack.append(place)
        atoms = [jaxpr.eqns[place].invars[i] for i in placed.late]
        stack += [maker[a] for a in atoms if not is_literal(a) and a in maker]
    found: set[int] = set()
    while stack:
        place = stack.pop()
        if place not in found:
            found.add(place)
            stack += [maker[a] for a in jaxpr.eqns[place].invars if not is_literal(a) and a in maker]
    return frozenset(found)
