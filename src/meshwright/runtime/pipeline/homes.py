"""Which stages have each value around the core, or can compute it.

The equations are walked once, in order. A plain equation is computed where its operands are (`Homes.plain`). What holds
programs is taken apart, so that each stage computes its own part of it:

* calls (custom derivative rules, checkpoints) are written in line: nothing is differentiated here;
* a `cond` becomes one for each set of stages that its results belong to, with the same index and without what the
  others need. What its branches read of several stages (a global norm) is computed in front of it, always, since
  stages exchange values between programs only;
* a `scan` or `while` becomes one for each set of stages in the same way; where its body mixes stages, it stays whole.

Where an equation needs large values of several stages, one of them, the one that has the most bytes of them, is sent
the others and computes it.

A decision is made once: what is no floating-point number, and depends on arithmetic that several stages would repeat
and might round otherwise, is computed by one of them and sent to the others.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax.numpy as jnp

from ..._jax.jaxpr import Equation, is_dropped, is_literal, open_jaxpr, scan_parts
from ..._jax.passes import size_bytes
from ..._jax.structured import InLine, body_in_line, copy_of, in_line, may_run_on, move_out, pruned
from ...program.rules import Rules
from .rows import Rows, follow_rows

# Values up to this size travel between stages outside the pipeline without a second thought.
SMALL_BYTES = 1 << 16
_LOOPS = ("scan", "while")
# Operations on floating-point numbers that round in one way, or not at all.
_SUMS = ("add", "add_any", "sub")
_PRODUCTS = ("mul", "integer_pow", "square")
_EXACT = frozenset(
    """abs broadcast_in_dim ceil clamp concatenate convert_element_type copy div floor max min mul neg reshape
    round select_n sign slice sqrt squeeze stop_gradient transpose""".split()  # noqa: SIM905 (a table)
)

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
      whole: whether it takes an exchange that operands alone do not make: of contributions, of large operands, or inside.
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


class Homes:
    """Places equations.

    Args:
      everywhere: all stages.
      rules: factor rules of the equations.
      known: homes of the variables that no equation makes.

    Attributes:
      of: the home of each variable.
      contributions: for each variable that is combined of what stages have: the word for it, and these stages.
      equations: those that were added, as they are computed.
      constants: new constants, by variable.
    """

    def __init__(self, everywhere: Stages, rules: Rules, known: Mapping[Any, Home]) -> None:
        self._everywhere = everywhere
        self._rules = rules
        self._neutral = Home(everywhere, everywhere)
        self.of: dict[Any, Home] = dict(known)
        self.contributions: dict[Any, tuple[str | Rows, tuple[int, ...]]] = {}
        self.equations: list[Equation] = []
        self.constants: dict[Any, Any] = {}
        self.names: dict[Any, Any] = {}
        self._maker: dict[Any, Equation] = {}
        self._whole_of: dict[Any, Any] = {}

    def add(self, equations: Iterable[Equation]) -> None:
        """Place equations, in program order."""
        for equation in equations:
            if any(not is_literal(a) and a in self.names for a in equation.invars):
                equation = equation.replace(invars=[self.read(a) for a in equation.invars])
            name = equation.primitive.name
            if (body := body_in_line(equation)) is not None:
                made = in_line(body, equation.invars)
                self._add_all(made)
                results = [made.read(atom) for atom in open_jaxpr(body).outvars]
                self.names.update(zip(equation.outvars, map(self.read, results), strict=True))
            elif name == "cond":
                self._add_cond(equation)
            elif name in _LOOPS:
                self._add_loop(equation)
            else:
                placed = self.plain(equation, self._operands(equation))
                self._append(equation, placed) if placed is not None else self._append_whole(equation)

    def read(self, atom: Any) -> Any:
        """An operand as it is now: a result of a call that was written in line has another name."""
        return atom if is_literal(atom) else self.names.get(atom, atom)

    def gather(self, atom: Any, where: Equation) -> Any:
        """A value with all its rows, on the stage that has most of them; `where` says the line that reads it."""
        return self._gathered(where, self.read(atom))

    def decide_once(self, atom: Any) -> None:
        """Have one stage compute a value that decides something, where several would not get the same bits."""
        if is_literal(atom) or atom not in self._maker or self._is_exact(atom):
            return
        home = self.of[atom]
        if len(home.at) > 1 and can_travel(atom, home):
            self.of[atom] = replace(home, at=frozenset({min(home.at)}), mixed=False)

    def _is_exact(self, var: Any) -> bool:
        """Whether all stages that compute a value get the same bits."""
        seen, stack = set(), [var]
        while stack:
            one = stack.pop()
            equation = self._maker.get(one)
            if equation is None or one in seen or one in self.contributions or len(self.of[one].at) == 1:
                continue  # given, or sent by one stage
            seen.add(one)
            if not self._rounds_one_way(equation):
                return False
            stack += [a for a in equation.invars if not is_literal(a)]
        return True

    def _rounds_one_way(self, equation: Equation) -> bool:
        """Whether an equation gives the same bits in every program, if its operands are the same."""
        if equation.primitive.name in ("cond", *_LOOPS):
            return not _has_floats(equation)
        if equation.primitive.name in _SUMS:  # of a product, it may be one operation with it
            makers = [self._maker.get(a) for a in equation.invars if not is_literal(a)]
            return not any(maker is not None and maker.primitive.name in _PRODUCTS for maker in makers)
        return not any(map(_is_float, equation.outvars)) or equation.primitive.name in _EXACT

    def _operands(self, equation: Equation) -> list[Home | None]:
        return [None if is_literal(a) else self.of[a] for a in equation.invars]

    def _append(self, equation: Equation, placed: Placed) -> None:
        self.equations.append(equation)
        if any(home.mixed for home in placed.homes):
            # Of what several stages have and others are sent, all read the one that is sent.
            for atom in equation.invars:
                if not is_literal(atom) and 1 < len(self.of[atom].at) < len(self._everywhere):
                    self.decide_once(atom)
        for var, home in zip(equation.outvars, placed.homes, strict=True):
            self.of[var] = home
            self._maker[var] = equation
            if placed.combine is not None:
                self.contributions[var] = placed.combine, placed.contributors

    def _add_all(self, made: InLine) -> None:
        self.constants.update(made.constants)
        self.of.update(dict.fromkeys(made.constants, self._neutral))
        self.add(made.equations)

    # Equations that hold programs

    def _add_cond(self, equation: Equation) -> None:
        self.decide_once(equation.invars[0])
        while True:
            homes, moved, _ = self._branches(equation, self._entered(equation))
            programs = [open_jaxpr(branch).eqns for branch in equation.params["branches"]]
            going = [program[place] for program, places in zip(programs, moved, strict=True) for place in places]
            if not going:
                self._append_parts(equation, homes)
                return
            if any(map(may_run_on, going)):
                self._append_whole(equation)
                return
            front, equation = move_out(equation, moved)
            self._add_all(front)
            equation = equation.replace(invars=[self.read(a) for a in equation.invars])

    def _add_loop(self, equation: Equation) -> None:
        placed = self.place(equation, self._entered(equation))
        groups = {_key(home, var) for home, var in zip(placed.homes, equation.outvars, strict=True)}
        repeats = equation.primitive.name == "while" and len(groups) > 1 and self._tests_floats(equation)
        if placed.exchanges or repeats:
            self._append_whole(equation)
        else:
            self._append_parts(equation, placed.homes)

    def _append_parts(self, equation: Equation, homes: Sequence[Home]) -> None:
        """An equation for each set of stages that results belong to."""
        keys = [_key(home, var) for home, var in zip(homes, equation.outvars, strict=True)]
        rows = {var: home.rows for home, var in zip(homes, equation.outvars, strict=True)}
        for key in dict.fromkeys(keys):
            used = [one == key and not is_dropped(var) for one, var in zip(keys, equation.outvars, strict=True)]
            if any(used):
                part = pruned(equation, used)
                self._rules.prepare([(part, False)])
                placed = self._anywhere(part, self._operands(part), [rows.get(var) for var in part.outvars])
                self._append(part, self._decided(part, placed))

    def _append_whole(self, equation: Equation) -> None:
        """An equation that is not taken apart, on one stage, and that reads all rows."""
        equation = equation.replace(invars=[self._gathered(equation, atom) for atom in equation.invars])
        self._append(equation, self._decided(equation, self._anywhere(equation, self._operands(equation))))

    def _gathered(self, equation: Equation, atom: Any) -> Any:
        """An operand whose rows are on several stages, with all its rows on the one that has most of them."""
        if is_literal(atom) or (rows := self.of[atom].rows) is None:
            return atom
        if atom not in self._whole_of:
            copy = copy_of(atom, equation)
            self._rules.prepare([(copy, False)])
            owner = frozenset({max(rows.parts, key=lambda part: (part[2] - part[1], -part[0]))[0]})
            home = Home(owner, owner, moved=True)
            self._append(copy, Placed(homes=[home], combine=rows, contributors=tuple(sorted(rows.stages))))
            (self._whole_of[atom],) = copy.outvars
        return self._whole_of[atom]

    def _decided(self, equation: Equation, placed: Placed) -> Placed:
        """Results that decide something and are mixed, on one stage."""
        homes = placed.homes
        travel = all(can_travel(var, home) for var, home in zip(equation.outvars, homes, strict=True))
        exact = self._rounds_one_way(equation) and all(self._is_exact(a) for a in equation.invars if not is_literal(a))
        if homes and homes[0].mixed and travel and not exact and not all(map(_is_float, equation.outvars)):
            homes = [replace(home, at=frozenset({min(home.at)}), mixed=False) for home in homes]
        return replace(placed, homes=homes)

    def _entered(self, equation: Equation) -> list[Home | None]:
        """Operands as a program inside the equation has them: small ones were sent."""
        return [
            None if is_literal(a) else self._neutral if can_travel(a, self.of[a]) else self.of[a]
            for a in equation.invars
        ]

    def place(self, equation: Equation, operands: Sequence[Home | None]) -> Placed:
        """How an equation is computed, inside another or not."""
        if (body := body_in_line(equation)) is not None:
            found = self._body(body, operands)
            return Placed(homes=[home or self._neutral for home in found.results], whole=bool(found.placed))
        name = equation.primitive.name
        if name == "cond":
            homes, moved, apart = self._branches(equation, operands)
            return Placed(homes=homes, whole=apart or any(moved))
        if name == "scan":
            return self._scan(equation, operands)
        if name == "while":
            return self._while(equation, operands)
        placed = self.plain(equation, operands)
        if placed is None:
            homes = self._anywhere(equation, operands).homes
            return Placed(homes=homes, whole=True)
        return placed

    def _body(self, closed: Any, inputs: Sequence[Home | None]) -> Body:
        jaxpr = open_jaxpr(closed)
        env: dict[Any, Home] = dict.fromkeys(jaxpr.constvars, self._neutral)
        env.update((var, home or self._neutral) for var, home in zip(jaxpr.invars, inputs, strict=True))
        placed: dict[int, Placed] = {}
        for position, equation in enumerate(jaxpr.eqns):
            found = self.place(equation, [None if is_literal(a) else env[a] for a in equation.invars])
            env.update(zip(equation.outvars, found.homes, strict=True))
            if found.exchanges:
                placed[position] = found
        return Body([None if is_literal(a) else env[a] for a in jaxpr.outvars], placed)

    def _branches(
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
        at = self._everywhere.intersection(*(home.at for home in homes))
        possible = self._everywhere.intersection(*(home.possible for home in homes))
        if at or (possible and not is_small(var)):
            return Home(at or possible, possible or at), not at
        return self._neutral, True

    def _on_rows(self, rows: Rows) -> Home:
        """The home of a value of which each stage has some rows."""
        return Home(rows.stages, rows.stages, rows)

    def _scan(self, equation: Equation, operands: Sequence[Home | None]) -> Placed:
        parts = scan_parts(equation)
        first_xs = parts.num_consts + parts.num_carry
        consts, carry, xs = operands[: parts.num_consts], operands[parts.num_consts : first_xs], operands[first_xs:]
        if any(x is not None and x.rows is not None and x.rows.dim == 0 for x in xs):
            return Placed(homes=self._anywhere(equation, operands).homes, whole=True)
        xs = [_shifted(x, -1) for x in xs]
        found, carry, apart = self._fixed(parts.body, carry, lambda carry: [*consts, *carry, *xs])
        homes = [*carry, *(_shifted(home, 1) or self._neutral for home in found.results[parts.num_carry :])]
        return Placed(homes=homes, whole=bool(found.placed) or apart)

    def _while(self, equation: Equation, operands: Sequence[Home | None]) -> Placed:
        params = equation.params
        num_cond, num_body = params["cond_nconsts"], params["body_nconsts"]
        tested, consts = operands[:num_cond], operands[num_cond : num_cond + num_body]
        carry = operands[num_cond + num_body :]
        found, carry, apart = self._fixed(params["body_jaxpr"], carry, lambda carry: [*consts, *carry])
        test = self._body(params["cond_jaxpr"], [*tested, *carry])
        (go_on,) = test.results
        tested_at = self._everywhere if go_on is None else go_on.at
        far = any(
            not (home.at if can_travel(v, home) else home.possible) <= tested_at
            for v, home in zip(equation.outvars, carry, strict=True)
        )
        return Placed(homes=carry, whole=bool(found.placed) or bool(test.placed) or apart or far)

    def _fixed(
        self, body: Any, carry: Sequence[Home | None], inputs: Callable[[Sequence[Home]], Any]
    ) -> tuple[Body, list[Home], bool]:
        """A loop's body, carries that stay as they are from one trip to the next, and whether they are apart."""
        now = [home or self._neutral for home in carry]
        while True:
            found = self._body(body, inputs(now))
            made = [home or self._neutral for home in found.results[: len(now)]]
            met = [self._met([a, b], v) for a, b, v in zip(now, made, open_jaxpr(body).outvars, strict=False)]
            then = [home for home, _ in met]
            apart = any(one for _, one in met) and then == now
            if then == now or found.placed:
                return found, then, apart
            now = then

    def _tests_floats(self, equation: Equation) -> bool:
        """Whether how long a `while` runs depends on arithmetic that each stage would do for itself."""
        count = len(equation.params["body_jaxpr"].in_avals) - equation.params["body_nconsts"]
        control = pruned(equation, [False] * count)
        return any(map(_is_float, control.outvars))

    # Plain equations

    def plain(self, equation: Equation, operands: Sequence[Home | None]) -> Placed | None:
        """How an equation without programs inside is computed; None if it reads across rows."""
        rows = [None if home is None else home.rows for home in operands]
        following = follow_rows(equation, self._rules, rows)
        if following is None:
            return None
        if following.combine is not None:
            stages = tuple(sorted(next(r for r in following.operands if r is not None).stages))
            homes = [Home(self._everywhere, self._everywhere, mixed=True) for _ in equation.outvars]
            return Placed(homes=homes, whole=True, combine=following.combine, contributors=stages)
        return self._decided(equation, self._anywhere(equation, operands, following.results))

    def _anywhere(
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
        possible = self._everywhere.intersection(*(h.possible for _, h in large))
        moves = not possible
        if moves:
            possible = frozenset({_owner(large)})
        home = self._everywhere.intersection(*(h.at for _, _, h in pairs))
        exchanged = max((size_bytes(a.aval) for _, a, h in pairs if h.mixed), default=0)
        # What already mixes stages goes on everywhere while it takes no larger values: a sum over all parameters takes
        # one exchange, not one for each change of stage in the order of the terms.
        joins = exchanged and all(size_bytes(a.aval) <= exchanged for _, a, h in pairs if h.at != self._everywhere)
        if not home or joins:
            home = possible
        mixed = home == self._everywhere and (bool(exchanged) or any(not home <= h.at for _, _, h in pairs))
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


def _is_float(var: Any) -> bool:
    return bool(jnp.issubdtype(var.aval.dtype, jnp.inexact))


def _has_floats(equation: Equation) -> bool:
    """Whether an equation computes floating-point numbers, in programs inside it too."""
    params = equation.params
    held = [*params.get("branches", ()), *(params[n] for n in ("jaxpr", "cond_jaxpr", "body_jaxpr") if n in params)]
    if not held:
        return any(map(_is_float, equation.outvars))
    return any(_has_floats(inner) for program in held for inner in open_jaxpr(program).eqns)


def _key(home: Home, var: Any) -> Stages:
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
    """The equations of a branch that run in front of the `cond`: those that take an exchange, or make what one takes."""
    jaxpr = open_jaxpr(branch)
    maker = {var: place for place, equation in enumerate(jaxpr.eqns) for var in equation.outvars}
    stack = [maker[jaxpr.outvars[i]] for i in split if not is_literal(jaxpr.outvars[i]) and jaxpr.outvars[i] in maker]
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
