"""How the values of a loss function depend on the batch: the power of its size, sums over it, examples that meet.

The program is known at two batch sizes; an abstract interpretation walks both together. The *degree* of a value is the
power of the batch size it grows with when the batch is repeated: an element has degree 0, a sum over the batch one
more, a quotient the difference. Counts written into the program as literals show their degree by differing between the
two sizes. The batch dims of a value are those whose extents differ.

Examples meet where a value would need those of other microbatches: a statistic that goes back into the examples (batch
normalisation), two batch dims (contrastive losses), a batch that is shifted, sorted, summed up along itself or read at
indices of other examples. Nothing is known of whatever comes of it.

Where the elements of a batch dim stand, and whether an operator keeps them there, is told by `alignment`. A function
with a derivative of its own is walked backward as well.

Known limit: examples that are put in another order and back have met, but for mixtures that `sorted_rows` knows.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from fractions import Fraction
from typing import Any

import jax.numpy as jnp

from .._jax.jaxpr import ClosedJaxpr, Equation, Jaxpr, inline, is_literal, is_remat, open_jaxpr, scan_parts, source_line
from .alignment import NO_BATCH, Lie, Side, aligned, shape_of
from .positions import Positions, positions_of
from .rules import Rules

# Of a result of the operand's degree, that is linear in it.
_MOVED = frozenset(
    """add add_any broadcast_in_dim concatenate convert_element_type copy cumsum expand_dims imag neg
    optimization_barrier pad real reduce_precision reshape rev slice squeeze stop_gradient sub transpose""".split()  # noqa: SIM905 (a table, not a column)
)
# Of a result of the operands' degree.
_SAME = _MOVED | frozenset(
    """abs clamp cummax dynamic_slice gather max min reduce_max reduce_min reduce_window_max reduce_window_sum
    select_n""".split()  # noqa: SIM905 (a table, not a column)
)
# Of a result that is linear in the operands.
_LINEAR = _MOVED | {"reduce_sum"}
_COMPARISONS = frozenset(["lt", "le", "gt", "ge", "eq", "ne", "is_finite", "sign"])
# A constant beside a count does not change what it counts: a guard against zero.
_GUARDS = ("max", "min", "add", "add_any", "sub", "select_n")
_PRODUCTS = ("mul", "dot_general", "conv_general_dilated")


@dataclass(frozen=True, slots=True)
class Growth:
    """How a value depends on the batch.

    Args:
      degree: the power of the batch size it grows with; None if unknown, or not a power.
      varies: whether it depends on the examples.
      sums: for a value without a batch dim: 0 if it holds no sum over the examples, 1 if it is linear in such sums,
        2 if it depends on the examples in another way.
      zero: whether it is 0 or infinite, which any degree may be added to or compared with.
      meet: where examples meet each other, if that is why nothing is known.
      lie: how the batch lies in it.
      positions: the examples' own positions in the batch, if it holds these.
    """

    degree: Fraction | None = Fraction(0)
    varies: bool = False
    sums: int = 0
    zero: bool = False
    meet: str | None = None
    lie: Lie = NO_BATCH
    positions: Positions | None = None


_UNKNOWN = Growth(degree=None, varies=True, sums=2)


@dataclass(frozen=True, slots=True)
class Walk:
    """A walk through a loss function at two batch sizes.

    Args:
      ratio: how many microbatches make the batch.
      rules: the factor rules of the program.
      lengths: of the runs of examples that were seen.
      in_derivative: whether it is inside a function with a derivative of its own, where others are not differentiated.
    """

    ratio: int
    rules: Rules
    lengths: set[int] = field(default_factory=set)
    in_derivative: bool = False

    def see(self, side: Side) -> None:
        """A value whose batch dim is cut into microbatches, run by run."""
        if side.batch is not None:
            blocks = math.prod(side.full[d] for d in side.lie.majors)
            self.lengths.add(side.full[side.batch] * blocks // max(side.runs, 1))

    @property
    def piece(self) -> int:
        """What the number of microbatches, times that of the blocks that the batch lies in, has to divide."""
        return math.gcd(*self.lengths)


def growths_of(
    full: ClosedJaxpr, small: ClosedJaxpr, walk: Walk, split_dims: Sequence[int | None],
    degrees: Sequence[int] = (), env: dict[Any, Growth] | None = None,
) -> list[Growth]:  # fmt: skip
    """The growth of each result of a loss function.

    Args:
      full: the loss function at the full batch.
      small: the same at the size of a microbatch.
      walk: what is known of both, and written down.
      split_dims: for each leading input, the dim that is the batch.
      degrees: of each input behind these, which are statistics of the whole batch.
      env: that of each value at the top level is written into it, by its variable in `full`.
    """
    a, b = open_jaxpr(full), open_jaxpr(small)
    given = [Growth(varies=d is not None, lie=Lie(int(d is not None))) for d in split_dims]
    given += [Growth(degree=Fraction(d)) for d in degrees]
    given += [Growth()] * (len(a.invars) - len(given))
    for x, y, growth in zip(a.invars, b.invars, given, strict=True):
        walk.see(Side(shape_of(x), shape_of(y), growth.lie))
    return _growths(a, b, walk, given, env)


def degrees_of(
    full: ClosedJaxpr, small: ClosedJaxpr, walk: Walk, split_dims: Sequence[int | None]
) -> dict[Any, Fraction]:
    """The degree of each value at the top level of a loss function of which one is known, by its variable in `full`; a
    guard (`maximum(count, 1)`, `where(count > 0, count, 1)`) has that of what it guards.

    Args: as of `growths_of`.
    """
    env: dict[Any, Growth] = {}
    growths_of(full, small, walk, split_dims, env=env)
    found = {var: growth.degree for var, growth in env.items() if growth.degree is not None}
    for equation in open_jaxpr(full).eqns:
        (var, *_), atoms = equation.outvars, equation.invars
        if equation.primitive.name == "select_n":
            atoms = atoms[1:]
        if var not in found and all(is_literal(atom) or atom in found for atom in atoms):
            varying = [atom for atom in atoms if not is_literal(atom) and (env[atom].varies or env[atom].sums)]
            if equation.primitive.name in _GUARDS and len(varying) == 1:
                found[var] = found[varying[0]]
            elif equation.primitive.name in _SAME and len(atoms) == 1 and not is_literal(atoms[0]):
                found[var] = found[atoms[0]]
    return found


def _names(jaxpr: Jaxpr) -> list[str]:
    return [equation.primitive.name for equation in jaxpr.eqns]


def _growths(
    full: Jaxpr, small: Jaxpr, walk: Walk, operands: Sequence[Growth], env: dict[Any, Growth] | None = None
) -> list[Growth]:
    """Growth of each output; the batch dims of a value are those whose extent differs between the programs. That of
    each value is written into `env`, if it is given."""
    if _names(full) != _names(small):
        return [_UNKNOWN] * len(full.outvars)
    env = {} if env is None else env
    env.update(zip(full.invars, operands, strict=True))
    env.update({var: Growth() for var in full.constvars})

    def read(x: Any, y: Any) -> Growth:
        return (_literal(x, y, walk) if is_literal(y) else _UNKNOWN) if is_literal(x) else env[x]

    for a, b in zip(full.eqns, small.eqns, strict=True):
        given = [read(x, y) for x, y in zip(a.invars, b.invars, strict=True)]
        env.update(zip(a.outvars, _equation(a, b, given, walk), strict=True))
    return [read(x, y) for x, y in zip(full.outvars, small.outvars, strict=True)]


def _literal(full: Any, small: Any, walk: Walk) -> Growth:
    try:
        x, y = float(full.val), float(small.val)
    except (TypeError, ValueError):
        return Growth()
    if x == y or math.isnan(x):
        return Growth(zero=x == 0 or math.isinf(x))
    if x * y <= 0 or math.isinf(x * y) or math.isnan(y):
        return _UNKNOWN
    power = math.log(x / y, walk.ratio)
    return Growth(degree=Fraction(round(power)) if abs(power - round(power)) < 1e-4 else None)


def _equation(full: Equation, small: Equation, given: list[Growth], walk: Walk) -> list[Growth]:
    name = full.primitive.name
    ours, theirs = _bodies(full), _bodies(small)
    if ours is not None and theirs is not None:
        inner = given[1:] if name == "cond" else given
        own = replace(walk, in_derivative=True) if name.startswith("custom_") else walk
        found = [_growths(x, y, own, inner) for x, y in zip(ours, theirs, strict=True)]
        outs = [_join(*branches) for branches in zip(*found, strict=True)]
        if name == "cond" and given[0].varies:
            return [_chosen(*of, full) for of in zip(outs, full.outvars, small.outvars, strict=True)]
        if own is not walk and not walk.in_derivative and not _is_local_backward(full, small, given, outs, own):
            return [replace(_UNKNOWN, meet=source_line(full) or "")] * len(outs)
        return outs
    if name == "scan":
        return _scan(full, small, given, walk)
    if name == "while":
        return _while(full, small, given, walk)
    sides = [
        Side(shape_of(x), shape_of(y), g.lie, g.positions)
        for x, y, g in zip(full.invars, small.invars, given, strict=True)
    ]
    met = next((g.meet for g in given if g.meet is not None), None)
    positions = positions_of(full, small, [g.positions for g in given])
    is_index = positions is not None and positions.kind != "past"
    degree = Fraction(0) if is_index else _degree(full, small, given)
    zero = name in _SAME and all(g.zero for g in given) and bool(given)
    made = zip(full.outvars, small.outvars, aligned(full, small, sides, walk.ratio, walk.rules), strict=True)
    found = []
    for x, y, lie in made:
        batched = is_batched(x, y)
        varies, sums = _sums(full, small, given, batched)
        meets = lie is None or (varies and batched and any(g.sums for g in given))
        meet = met if met is not None or not meets else source_line(full) or ""
        if lie is None or meet is not None:
            found.append(replace(_UNKNOWN, meet=meet))
            continue
        walk.see(Side(shape_of(x), shape_of(y), lie))
        found.append(Growth(degree, varies, sums, zero, lie=lie, positions=positions))
    return found


def _chosen(growth: Growth, full: Any, small: Any, equation: Equation) -> Growth:
    """What a branch makes that is chosen by a number that depends on the examples."""
    if is_batched(full, small):
        return replace(_UNKNOWN, meet=source_line(equation) or "")
    return replace(growth, varies=True, sums=2)


def is_batched(full: Any, small: Any) -> bool:
    """Whether a value has a batch dim: its shape differs between the two batch sizes."""
    return getattr(full.aval, "shape", ()) != getattr(small.aval, "shape", ())


def _sums(full: Equation, small: Equation, given: list[Growth], batched: bool) -> tuple[bool, int]:
    """Whether a result depends on the examples, and how it holds sums over them."""
    name = full.primitive.name
    if batched:
        return any(g.varies for g in given) or name in ("random_bits", "random_split"), 0
    if not any(g.varies for g in given):
        return False, 0
    examples = [g.varies and is_batched(x, y) for g, x, y in zip(given, full.invars, small.invars, strict=True)]
    pooled = [g.sums for g in given]
    if 2 in pooled:
        return True, 2
    if any(examples):
        return True, 1 if name in ("reduce_sum", "dot_general") and not any(pooled) else 2
    linear = (
        (name in _LINEAR and not _rounds(full))
        or (name in _PRODUCTS and sum(1 for p in pooled if p) == 1)
        or (name == "div" and not pooled[1])
        or (name == "select_n" and not pooled[0])
    )
    return True, 1 if linear else 2


def _rounds(equation: Equation) -> bool:
    """Whether a number becomes a whole one, or a truth."""
    if equation.primitive.name != "convert_element_type":
        return False
    before, after = equation.invars[0].aval.dtype, equation.outvars[0].aval.dtype
    return jnp.issubdtype(after, jnp.bool_) or (
        jnp.issubdtype(before, jnp.inexact) and not jnp.issubdtype(after, jnp.inexact)
    )


def _degree(full: Equation, small: Equation, given: list[Growth]) -> Fraction | None:
    name = full.primitive.name
    known = [g.degree for g in given if g.degree is not None]
    if name in _COMPARISONS:
        return Fraction(0)
    if len(known) < len(given):
        return None
    if name in _PRODUCTS:
        return known[0] + known[1] + _summed(full, small)
    if name == "div":
        return known[0] - known[1]
    if name == "reduce_sum":
        return known[0] + _summed(full, small)
    if name == "integer_pow":
        return known[0] * full.params["y"]
    if name == "square":
        return known[0] * 2
    if name in ("sqrt", "rsqrt"):
        return known[0] * Fraction(1, 2) * (1 if name == "sqrt" else -1)
    if name in _SAME:
        if name == "select_n":
            given = given[1:]
        elif name in ("gather", "dynamic_slice"):
            given = given[:1]
        tall = {g.degree for g in given if not g.zero}
        return tall.pop() if len(tall) == 1 else Fraction(0) if not tall else None
    # Elementwise on elements, or nothing known of a sum.
    return Fraction(0) if all(d == 0 for d in known) else None


def _summed(full: Equation, small: Equation) -> int:
    """Over how many batch dims the equation sums."""
    name = full.primitive.name
    if name == "reduce_sum":
        axes = full.params["axes"]
    elif name == "dot_general":
        axes = full.params["dimension_numbers"][0][0]
    else:
        return 0
    x, y = full.invars[0].aval.shape, small.invars[0].aval.shape
    return sum(1 for axis in axes if x[axis] != y[axis])


def _scan(full: Equation, small: Equation, given: list[Growth], walk: Walk) -> list[Growth]:
    """A loop of the same length in both programs: what it carries has one growth."""
    parts, other = scan_parts(full), scan_parts(small)
    first, last = parts.num_consts, parts.num_consts + parts.num_carry
    if parts.length != other.length:
        return _loop_over_examples(full, small, given, walk)
    carry = given[first:last]
    if any(0 in g.lie.majors for g in given[last:]):  # a trip for each block of the batch
        return [replace(_UNKNOWN, meet=source_line(full) or "")] * len(full.outvars)
    rows = [replace(g, lie=_moved(g.lie, -1)) for g in given[last:]]
    while True:  # ends: growths only go up, towards unknown
        outs = _growths(open_jaxpr(parts.body), open_jaxpr(other.body), walk, [*given[:first], *carry, *rows])
        joined = [_join(a, b) for a, b in zip(carry, outs, strict=False)]
        if joined == carry:
            return [*carry, *(replace(g, lie=_moved(g.lie, 1)) for g in outs[parts.num_carry :])]
        carry = joined


def _moved(lie: Lie, by: int) -> Lie:
    """Of a value that has a dim more in front, or one less."""
    return Lie(lie.runs, tuple(d + by for d in lie.majors), frozenset(d + by for d in lie.along if d + by >= 0))


def _loop_over_examples(full: Equation, small: Equation, given: list[Growth], walk: Walk) -> list[Growth]:
    """A loop with a trip for each example, which is as good as a `vmap` where no trip hears of another."""
    parts, other = scan_parts(full), scan_parts(small)
    consts = list(zip(given, full.invars, small.invars, strict=True))[: parts.num_consts]
    rows = given[parts.num_consts + parts.num_carry :]
    runs = {g.lie.runs for g in rows if g.lie.runs}
    cut = any(g.lie.majors for g in given)
    if cut or parts.num_carry or len(runs) > 1 or any(g.varies and (g.sums or is_batched(x, y)) for g, x, y in consts):
        return [replace(_UNKNOWN, meet=source_line(full) or "")] * len(full.outvars)
    inside = [replace(g, lie=Lie(), positions=None) for g in given]
    outs = _growths(open_jaxpr(parts.body), open_jaxpr(other.body), walk, inside)
    stacked = max(runs, default=0)
    return [g if g.degree is None else replace(g, sums=0, varies=True, lie=Lie(stacked)) for g in outs]


def _while(full: Equation, small: Equation, given: list[Growth], walk: Walk) -> list[Growth]:
    """A loop whose trips are counted by what it carries: examples meet where that depends on them."""
    params, other = full.params, small.params
    first = params["cond_nconsts"] + params["body_nconsts"]
    asked, used, carry = given[: params["cond_nconsts"]], given[params["cond_nconsts"] : first], given[first:]
    while True:  # ends, as `_scan` does
        bodies = open_jaxpr(params["body_jaxpr"]), open_jaxpr(other["body_jaxpr"])
        joined = [_join(a, b) for a, b in zip(carry, _growths(*bodies, walk, [*used, *carry]), strict=True)]
        if joined == carry:
            break
        carry = joined
    conditions = open_jaxpr(params["cond_jaxpr"]), open_jaxpr(other["cond_jaxpr"])
    (goes_on,) = _growths(*conditions, walk, [*asked, *carry])
    if goes_on.varies:
        return [replace(_UNKNOWN, meet=source_line(full) or "")] * len(carry)
    return carry


def _join(*growths: Growth) -> Growth:
    """What holds for whichever of the values it is."""
    tall = {g.degree for g in growths if not g.zero} or {Fraction(0)}
    lies = {g.lie for g in growths if g.lie.runs}
    meet = next((g.meet for g in growths if g.meet is not None), None)
    return Growth(
        degree=tall.pop() if len(tall) == 1 else None,
        varies=any(g.varies for g in growths),
        sums=max(g.sums for g in growths),
        zero=all(g.zero for g in growths),
        meet="" if meet is None and len(lies) > 1 else meet,
        lie=next(iter(lies), Lie(along=frozenset().union(*(g.lie.along for g in growths)))),
        positions=growths[0].positions if len({g.positions for g in growths}) == 1 else None,
    )


def _is_local_backward(
    full: Equation, small: Equation, given: Sequence[Growth], made: Sequence[Growth], walk: Walk
) -> bool:
    """Whether a function's own derivative needs no other examples than those of a microbatch.

    The cotangent of an element of an example is the same in a microbatch as in the whole batch; that of a value of
    degree d without a batch dim is of degree 1 - d, since the losses of microbatches add up.
    """
    try:
        ours, theirs = walk.rules.derivative(full), walk.rules.derivative(small)
    except (TypeError, ValueError):  # a function that is not differentiable
        return True
    if any(g.meet is not None or g.degree is None for g in (*given, *made)):
        return True
    forward = _growths(open_jaxpr(ours.forward), open_jaxpr(theirs.forward), walk, given)
    cotangents = [
        _cotangent(g, is_batched(x, y))
        for g, x, y, smooth in zip(made, full.outvars, small.outvars, ours.results, strict=True)
        if smooth
    ]
    backward = [*forward[len(made) :], *cotangents]
    found = _growths(open_jaxpr(ours.backward), open_jaxpr(theirs.backward), walk, backward)
    moving = zip(given, full.invars, small.invars, ours.operands, strict=True)
    wanted = [_cotangent(g, is_batched(x, y)) for g, x, y, smooth in moving if smooth]
    return all(
        g.meet is None and g.sums < 2 and (g.zero or g.degree == to.degree) for g, to in zip(found, wanted, strict=True)
    )


def _cotangent(growth: Growth, batched: bool) -> Growth:
    """Of a value the cotangent: of one that does not depend on the examples it is a sum over them."""
    assert growth.degree is not None
    if batched:
        return Growth(-growth.degree, varies=True, lie=growth.lie if growth.lie.runs else Lie(1))
    return Growth(1 - growth.degree, varies=True, sums=0 if growth.varies else 1)


def _bodies(equation: Equation) -> list[Jaxpr] | None:
    name, params = equation.primitive.name, equation.params
    if name in ("custom_jvp_call", "custom_vjp_call"):
        return [open_jaxpr(inline(params["call_jaxpr"]))]
    if is_remat(equation):
        return [open_jaxpr(params["jaxpr"])]
    if name == "cond":
        return [open_jaxpr(branch) for branch in params["branches"]]
    return None
