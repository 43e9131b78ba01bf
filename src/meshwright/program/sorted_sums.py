"""Which sums over groups and inside products of sorted rows may be left to whoever reads the result.

A device that has some of the groups has zeros for the rows of all others. What operators on elements make of them does
not matter as long as only products of the same groups read it. Behind the last product they have to stay zero: all up
to the result has to be linear. The same holds for sums over a dim of a product, everywhere behind it.
"""

from __future__ import annotations

from collections.abc import Sequence, Set
from typing import Any, NamedTuple

from .._jax.jaxpr import Equation, is_literal
from .ragged import is_ragged

# Linear in their only operand.
_LINEAR = frozenset(
    """broadcast_in_dim convert_element_type copy expand_dims neg reduce_sum reshape slice squeeze transpose split
    stop_gradient""".split()  # noqa: SIM905 (a table)
)

_ADDITIONS = ("add", "sub", "add_any")


class Sums(NamedTuple):
    """What was found.

    Args:
      equations: positions of those whose sums may be left.
      once: of additions behind the last product the operands that no product is behind (a bias), which one device adds:
        positions of equation and operand.
      groups: whether the groups may be split.
    """

    equations: frozenset[int]
    once: frozenset[tuple[int, int]]
    groups: bool


def linear_equations(
    equations: Sequence[Equation], results: Sequence[Any], rows: Set[Any]
) -> Sums:  # fmt: skip
    """Which sums may be left, as far as all that follows is linear.

    Args:
      equations: of sorted rows, in order.
      results: of them, that others read.
      rows: values that have rows.
    """
    users: dict[Any, list[int]] = {}
    for position, equation in enumerate(equations):
        for atom in equation.invars:
            if not is_literal(atom):
                users.setdefault(atom, []).append(position)
    made_by = {var: n for n, equation in enumerate(equations) for var in equation.outvars}
    if len(results) != 1:  # a result that is no sum would be one
        return Sums(frozenset(), frozenset(), groups=False)
    products = [e for e in equations if is_ragged(e)]
    behind = {var for e in products for var in _behind(equations, users, e.outvars[0])}
    feeding = {n for n, e in enumerate(equations) if any(_feeds_product(equations, users, var) for var in e.outvars)}
    once = {
        n for n, e in enumerate(equations)
        if n not in feeding and e.primitive.name in _ADDITIONS and len({_is_in(a, behind) for a in e.invars}) == 2
    }  # fmt: skip

    def made_of(var: Any, *, in_groups: bool) -> set[Any] | None:
        """What is made of a value, if all of it is linear in it and it is the result alone that leaves; with
        `in_groups`, up to the next product of the same groups."""
        follow, stack = {var}, [var]
        while stack:
            for position in users.get(stack.pop(), ()):
                equation = equations[position]
                if is_ragged(equation) and in_groups:
                    if equation.invars[1] in follow or equation.invars[2] in follow:
                        return None
                    continue
                fresh = [one for one in equation.outvars if one not in follow]
                follow.update(fresh)
                stack += fresh
        seen = {n for one in follow for n in users.get(one, ())}
        if in_groups and results[0] not in follow:
            return follow if follow <= rows else None
        alike = (n for n in seen if not (in_groups and is_ragged(equations[n])))
        linear = all(n in once or _is_linear(equations, made_by, equations[n], follow, behind) for n in alike)
        return follow if linear else None

    # What no product is behind is the same on all devices.
    after = [n for n, e in enumerate(equations) if is_ragged(e) or any(_is_in(a, behind) for a in e.invars)]
    # Nor is what one device adds there yet when a later equation sums over what it has a block of.
    biased = {var for n in once for var in _behind(equations, users, equations[n].outvars[0])}
    after = [n for n in after if not any(_is_in(a, biased) for a in equations[n].invars)]
    paths = {n: [made_of(var, in_groups=False) for var in equations[n].outvars] for n in after}
    sums = {n for n, those in paths.items() if None not in those}
    of_groups = [made_of(e.outvars[0], in_groups=True) for e in products]
    groups = None not in of_groups and results[0] in behind
    reached = {var for n in sums for path in paths[n] for var in path or ()}
    if groups:
        reached |= {var for path in of_groups for var in path or ()}
    added = {
        (n, i) for n in once if any(_is_in(a, reached) for a in equations[n].invars)
        for i, a in enumerate(equations[n].invars) if not _is_in(a, behind)
    }  # fmt: skip
    return Sums(frozenset(sums), frozenset(added), groups=groups)


def _is_in(atom: Any, among: Set[Any]) -> bool:
    return not is_literal(atom) and atom in among


def _behind(equations: Sequence[Equation], users: dict[Any, list[int]], var: Any) -> set[Any]:
    found, stack = {var}, [var]
    while stack:
        for position in users.get(stack.pop(), ()):
            fresh = [one for one in equations[position].outvars if one not in found]
            found.update(fresh)
            stack += fresh
    return found


def _feeds_product(equations: Sequence[Equation], users: dict[Any, list[int]], var: Any) -> bool:
    return any(is_ragged(equations[n]) for one in _behind(equations, users, var) for n in users.get(one, ()))


def _is_linear(
    equations: Sequence[Equation], made_by: dict[Any, int], equation: Equation, follow: set[Any], behind: set[Any]
) -> bool:
    """Whether an equation is linear in those of its operands that are followed, together, and has no other that
    products are behind: that would be a part of a sum itself."""
    name = equation.primitive.name
    moving = [_is_in(a, follow) for a in equation.invars]
    if any(_is_in(a, behind) and not m for a, m in zip(equation.invars, moving, strict=True)):
        return False
    if name in _LINEAR:
        return name != "convert_element_type" or (_is_float(equation.invars[0]) and _is_float(equation.outvars[0]))
    if name in ("mul", "dot_general"):
        return sum(moving) == 1
    if name == "div":
        return moving == [True, False]
    if name in (*_ADDITIONS, "concatenate"):
        return all(moving)
    if name == "gather":
        return moving == [True, False]
    if name == "scatter-add":
        return moving == [False, False, True] and _is_zero(equations, made_by, equation.invars[0])
    if name == "select_n":
        cases = zip(equation.invars[1:], moving[1:], strict=True)
        return not moving[0] and all(m or _is_zero(equations, made_by, a) for a, m in cases)
    return is_ragged(equation) and moving == [True, False, False]


def _is_float(atom: Any) -> bool:
    return atom.aval.dtype.kind in "fV"


def _is_zero(equations: Sequence[Equation], made_by: dict[Any, int], atom: Any) -> bool:
    """Whether a value is zero everywhere."""
    if is_literal(atom):
        return not atom.aval.shape and float(atom.val) == 0
    n = made_by.get(atom)
    if n is None or equations[n].primitive.name not in ("broadcast_in_dim", "convert_element_type"):
        return False
    return _is_zero(equations, made_by, equations[n].invars[0])
