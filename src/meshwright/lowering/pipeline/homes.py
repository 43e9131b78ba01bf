"""Which stages have each value around the core, or can compute it.

The equations are walked once, in order. An equation without sub-programs is computed by the stages that have its
operands (`placement`). An equation with sub-programs is split into one equation for each set of stages:

* calls (custom derivative rules, checkpoints) are written in line: nothing is differentiated here;
* a `cond` becomes one for each set of stages that its results belong to, with the same index and without what the
  others need. What its branches read of several stages (a global norm) is computed in front of it, always, since
  stages exchange values between programs only;
* a `scan` or `while` becomes one for each set of stages in the same way; where its body mixes stages, it stays whole.

Where an equation needs large values of several stages, one of them, the one that has the most bytes of them, is sent
the others and computes it.

Integers and booleans that depend on floating-point arithmetic (a comparison of a norm with a limit) are computed by one
stage and sent to the others: were each stage to compute them, rounding could make the stages disagree.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax.numpy as jnp

from ..._jax.jaxpr import Equation, is_dropped, is_literal, open_jaxpr
from ..._jax.structured import InLine, body_in_line, copy_of, in_line, may_run_on, move_out, pruned
from ...program.rules import Rules
from .placement import Home, Placed, Placement, Stages, can_travel, key_of
from .rows import Rows

_LOOPS = ("scan", "while")
# Operations on floating-point numbers that round in one way, or not at all.
_SUMS = ("add", "add_any", "sub")
_PRODUCTS = ("mul", "integer_pow", "square")
_EXACT = frozenset(
    """abs broadcast_in_dim ceil clamp concatenate convert_element_type copy div floor max min mul neg reshape
    round select_n sign slice sqrt squeeze stop_gradient transpose""".split()  # noqa: SIM905 (a table)
)


class Homes:
    """Shares equations out.

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
        self._placement = Placement(everywhere, rules)
        self._everywhere = everywhere
        self._rules = rules
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
                placed = self._placement.plain(equation, self._operands(equation))
                if placed is None:
                    self._append_whole(equation)
                else:
                    self._append(equation, placed)

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
        placed = self._decided(equation, placed)
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
        self.of.update(dict.fromkeys(made.constants, self._placement.neutral))
        self.add(made.equations)

    # Equations that hold programs

    def _add_cond(self, equation: Equation) -> None:
        self.decide_once(equation.invars[0])
        while True:
            homes, moved, _ = self._placement.branches(equation, self._entered(equation))
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
        placed = self._placement.place(equation, self._entered(equation))
        groups = {key_of(home, var) for home, var in zip(placed.homes, equation.outvars, strict=True)}
        repeats = equation.primitive.name == "while" and len(groups) > 1 and self._tests_floats(equation)
        if placed.exchanges or repeats:
            self._append_whole(equation)
        else:
            self._append_parts(equation, placed.homes)

    def _append_parts(self, equation: Equation, homes: Sequence[Home]) -> None:
        """An equation for each set of stages that results belong to."""
        if not equation.outvars:  # what it is there for, is not a result
            self._append_whole(equation)
        keys = [key_of(home, var) for home, var in zip(homes, equation.outvars, strict=True)]
        rows = {var: home.rows for home, var in zip(homes, equation.outvars, strict=True)}
        for key in dict.fromkeys(keys):
            used = [one == key and not is_dropped(var) for one, var in zip(keys, equation.outvars, strict=True)]
            if any(used):
                part = pruned(equation, used)
                self._rules.prepare([(part, False)])
                placed = self._placement.anywhere(part, self._operands(part), [rows.get(var) for var in part.outvars])
                self._append(part, placed)

    def _append_whole(self, equation: Equation) -> None:
        """An equation that is not taken apart, on one stage, and that reads all rows."""
        equation = equation.replace(invars=[self._gathered(equation, atom) for atom in equation.invars])
        self._append(equation, self._placement.anywhere(equation, self._operands(equation)))

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
        if not any(home.mixed for home in homes) or all(map(_is_float, equation.outvars)) or placed.combine is not None:
            return placed
        if not all(can_travel(var, home) for var, home in zip(equation.outvars, homes, strict=True)):
            return placed
        if self._rounds_one_way(equation) and all(self._is_exact(a) for a in equation.invars if not is_literal(a)):
            return placed
        return replace(placed, homes=[replace(home, at=frozenset({min(home.at)}), mixed=False) for home in homes])

    def _entered(self, equation: Equation) -> list[Home | None]:
        """Operands as a program inside the equation has them: small ones were sent."""
        return [
            None if is_literal(a) else self._placement.neutral if can_travel(a, self.of[a]) else self.of[a]
            for a in equation.invars
        ]

    def _tests_floats(self, equation: Equation) -> bool:
        """Whether how long a `while` runs depends on arithmetic that each stage would do for itself."""
        count = len(equation.params["body_jaxpr"].in_avals) - equation.params["body_nconsts"]
        control = pruned(equation, [False] * count)
        return any(map(_is_float, control.outvars))


def _is_float(var: Any) -> bool:
    return bool(jnp.issubdtype(var.aval.dtype, jnp.inexact))


def _has_floats(equation: Equation) -> bool:
    """Whether an equation computes floating-point numbers, in programs inside it too."""
    params = equation.params
    held = [*params.get("branches", ()), *(params[n] for n in ("jaxpr", "cond_jaxpr", "body_jaxpr") if n in params)]
    if not held:
        return any(map(_is_float, equation.outvars))
    return any(_has_floats(inner) for program in held for inner in open_jaxpr(program).eqns)
