"""What counts sorted rows, counting them as they were before: a count does not depend on their order.

A mixture may count the rows of its groups behind the sort (`jnp.bincount(ids[order])`). Counted before it they are seen
to count the ids (`sorted_rows`).

Only what is computed element by element of rows, one element for each, is a count in any order: what brings elements of
several rows together (pairs within a block of sorted rows) is not, and is left as it is.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from .._jax.jaxpr import Equation, Jaxpr, Var, is_literal
from .local import ON_ELEMENTS
from .order import followed

# These compute each element of those at its place, as long as there are no more of them.
_EACH = frozenset((*ON_ELEMENTS, "broadcast_in_dim", "reshape", "squeeze", "expand_dims"))
_ADDS = ("scatter-add", "scatter_add")

Maker = Callable[[Any], Equation | None]


def counting_before(jaxpr: Jaxpr, sort: int, maker: Maker) -> list[tuple[int, Equation]] | None:
    """The equations of a program with a mixture, its counts of sorted rows made of rows as they were, each with the
    number that it had (new ones with that of the count they are made for); None where there are none.

    Args:
      jaxpr: the program.
      sort: position of an argsort.
      maker: the equation that makes a variable, None of inputs and literals.
    """
    walk, equations = followed(jaxpr, sort, maker), jaxpr.eqns
    if not walk.products:
        return None
    keys, order = equations[sort].outvars
    rows = _Rows(before={keys: equations[sort].invars[0]}, ordered={keys, order}, maker=maker)
    counts: dict[int, list[Equation]] = {}
    for position in walk.inside:
        equation = equations[position]
        if position in walk.own and rows.is_taken(equation, keys.aval.shape):
            rows.before[equation.outvars[0]] = equation.invars[0]
        elif rows.is_count(equation) and (at := rows.unsorted(equation.invars[1])) is not None:
            into, _, number = equation.invars
            # Sorted rows may have been promised to be sorted.
            params = {**equation.params, "indices_are_sorted": False}
            counts[position] = [*rows.take(), equation.replace(invars=[into, at, number], params=params)]
        rows.ordered.update(equation.outvars)
    if not counts:
        return None
    found = [(n, one) for n, equation in enumerate(equations) for one in counts.get(n, [equation])]
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
      before: of some that have one element for each row, what they were before sorting.
      ordered: all of them.
      maker: as above.
      made: equations that compute with rows as they were, since they were last taken.
    """

    before: dict[Any, Any]
    ordered: set[Any]
    maker: Maker
    made: list[Equation] = field(default_factory=list)

    def take(self) -> list[Equation]:
        """What has been made since the last time."""
        made, self.made = self.made, []
        return made

    def is_taken(self, equation: Equation, shape: tuple[int, ...]) -> bool:
        """Whether a gather at the order takes an element for each row of what is not sorted."""
        source = equation.invars[0]
        alike = source.aval.shape == shape == equation.outvars[0].aval.shape
        return equation.primitive.name == "gather" and alike and not self._is_ordered(source)

    def is_count(self, equation: Equation) -> bool:
        """Whether an equation adds one number at places that depend on the order, one place for each row."""
        if equation.primitive.name not in _ADDS:
            return False
        into, at, number = equation.invars
        one_each = at.aval.shape[-1:] == (1,) and not equation.params["dimension_numbers"].operand_batching_dims
        return one_each and self._is_ordered(at) and not self._is_ordered(into) and self._is_one_number(number)

    def _is_ordered(self, atom: Any) -> bool:
        return not is_literal(atom) and atom in self.ordered

    def _is_one_number(self, atom: Any) -> bool:
        """Whether all elements are one number that does not depend on the order."""
        if is_literal(atom) or not atom.aval.shape:
            return not self._is_ordered(atom)
        equation = self.maker(atom)
        is_wide = equation is not None and equation.primitive.name == "broadcast_in_dim"
        return is_wide and equation is not None and self._is_one_number(equation.invars[0])

    def unsorted(self, atom: Any) -> Any:
        """The same of rows as they were; None where that is not seen."""
        if not self._is_ordered(atom):
            return atom if self._is_one_number(atom) else None
        if atom in self.before:
            return self.before[atom]
        equation = self.maker(atom)
        if equation is None or equation.primitive.name not in _EACH:
            return None
        if any(one.aval.size != atom.aval.size for one in equation.invars if self._is_ordered(one)):
            return None  # an element is repeated, and meets those of other rows
        operands = [self.unsorted(one) for one in equation.invars]
        if any(one is None for one in operands):
            return None
        self.before[atom] = Var(atom.aval)
        self.made.append(equation.replace(invars=operands, outvars=[self.before[atom]]))
        return self.before[atom]
