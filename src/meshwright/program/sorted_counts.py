"""What counts sorted rows, counting them as they were before: a count does not depend on their order.

A mixture may count the rows of its groups behind the sort (`jnp.bincount(ids[order])`). Counted before it they are seen
to count the ids (`sorted_rows`).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

from .._jax.jaxpr import Equation, Jaxpr, Var, is_literal
from .local import ON_ELEMENTS
from .order import followed

_SAME_ELEMENTS = frozenset((*ON_ELEMENTS, "broadcast_in_dim", "reshape", "squeeze", "expand_dims"))
_ADDS = ("scatter-add", "scatter_add")

Maker = Callable[[Any], Equation | None]


def counting_before(jaxpr: Jaxpr, sort: int, maker: Maker) -> list[tuple[int, Equation]] | None:
    """A program's equations whose counts of sorted rows are of rows as they were, each with the number that it had (new
    ones with that of the count they are made for); None where there are none.

    Args:
      jaxpr: the program.
      sort: position of an argsort.
      maker: the equation that makes a variable, None of inputs and literals.
    """
    walk, equations = followed(jaxpr, sort, maker), jaxpr.eqns
    keys, _ = equations[sort].outvars
    extent = keys.aval.shape
    rows = _Rows(
        before={keys: equations[sort].invars[0]}, ordered=set(equations[sort].outvars), maker=maker
    )  # fmt: skip
    changed: dict[int, Equation] = {}
    for position in walk.inside:
        equation = equations[position]
        rows.ordered.update(equation.outvars)
        name, (first, *others) = equation.primitive.name, equation.invars
        if name == "gather" and position in walk.own and first.aval.shape == extent == equation.outvars[0].aval.shape:
            rows.before[equation.outvars[0]] = first
        elif name in _ADDS and others[0] in rows.ordered and rows.is_one_number(others[1]):
            into = first
            if (is_literal(into) or into not in rows.ordered) and (at := rows.unsorted(others[0])) is not None:
                changed[position] = equation.replace(invars=[into, at, others[1]])
    if not changed:
        return None
    found: list[tuple[int, Equation]] = []
    for position, equation in enumerate(equations):
        if position in changed:
            found += [(position, one) for one in rows.take()]
        found.append((position, changed.get(position, equation)))
    read = {a for a in jaxpr.outvars if not is_literal(a)}
    inside, kept = {*walk.inside}, list[tuple[int, Equation]]()
    for position, equation in reversed(found):
        if position in inside and read.isdisjoint(equation.outvars):
            continue  # what the counts have read so far
        read.update(a for a in equation.invars if not is_literal(a))
        kept.append((position, equation))
    return kept[::-1]


@dataclass(slots=True)
class _Rows:
    """Values that depend on the order of rows.

    Args:
      before: of some that are rows, what they were before sorting.
      ordered: all of them.
      maker: as above.
      made: equations that compute with rows as they were.
    """

    before: dict[Any, Any]
    ordered: set[Any]
    maker: Maker
    made: list[Equation] = field(default_factory=list)

    def take(self) -> Sequence[Equation]:
        """What has been made since the last time."""
        made, self.made = self.made, []
        return made

    def is_one_number(self, atom: Any) -> bool:
        """Whether all elements are one number that does not depend on the order."""
        if is_literal(atom) or not atom.aval.shape:
            return is_literal(atom) or atom not in self.ordered
        equation = self.maker(atom)
        return (
            equation is not None
            and equation.primitive.name == "broadcast_in_dim"
            and self.is_one_number(equation.invars[0])
        )

    def unsorted(self, atom: Any) -> Any:
        """The same of rows as they were; None where that is not seen."""
        if is_literal(atom) or atom in self.before:
            return atom if is_literal(atom) else self.before[atom]
        if atom not in self.ordered:
            return atom if self.is_one_number(atom) else None
        equation = self.maker(atom)
        if equation is None or equation.primitive.name not in _SAME_ELEMENTS:
            return None
        operands = [self.unsorted(one) for one in equation.invars]
        if any(one is None for one in operands):
            return None
        self.before[atom] = Var(atom.aval)
        self.made.append(equation.replace(invars=operands, outvars=[self.before[atom]]))
        return self.before[atom]
