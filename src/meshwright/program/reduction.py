"""Whether a loss, or a result beside it, is a mean or a sum over the batch, from the program itself.

The gradient of a batch is the mean of its microbatches' gradients for a mean, their sum for a sum; taking one for the
other trains with a wrong learning rate and no error. The *degree* of a value is the power of the batch size it grows
with when the batch is repeated: an element has degree 0, a sum over the batch one more, a quotient the difference. A
loss of degree 0 is a mean, one of degree 1 a sum. Counts written into the program as literals show their degree by
differing between two batch sizes.

The degree alone is not enough: a masked mean has degree 0, but its microbatches divide by counts of their own. So each
value also says whether it is linear in sums over the batch; a loss that is not (a quotient of two sums, the root of a
mean, a maximum) is neither a mean nor a sum. A statistic of degree 0 that goes back into the examples, as in batch
normalisation, is taken as it is: its microbatches use statistics of their own, as every framework's do. But examples
that are compared with each other, as in contrastive losses, would not meet those of other microbatches: a value with
two batch dims, or one shifted along its batch, makes whatever comes of it unknown.

Known limit: examples put in another order (`rev`, `sort`, a gather by a permutation) are not told from those of a layer
that puts them back, as mixtures of experts do; a loss that compares them with the old order is taken for a mean.
"""

from __future__ import annotations

import math
import warnings
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any, Literal

import jax.numpy as jnp

from .._jax.jaxpr import ClosedJaxpr, Equation, Jaxpr, inline, is_literal, is_remat, open_jaxpr, scan_parts, source_line
from ..errors import PlanError

# How a result combines over microbatches; "same": any of them has it.
Reduction = Literal["mean", "sum", "max", "min", "same"]

_SAME = frozenset(
    [
        "convert_element_type",
        "reshape",
        "transpose",
        "broadcast_in_dim",
        "squeeze",
        "neg",
        "copy",
        "stop_gradient",
        "slice",
        "dynamic_slice",
        "abs",
        "rev",
        "reduce_precision",
        "expand_dims",
        "select_n",
        "concatenate",
        "pad",
        "gather",
        "reduce_max",
        "reduce_min",
        "max",
        "min",
        "add",
        "add_any",
        "sub",
        "cumsum",
        "cummax",
        "real",
        "imag",
        "reduce_window_max",
        "reduce_window_sum",
        "optimization_barrier",
        "clamp",
    ]
)
_LINEAR = frozenset(
    [
        "convert_element_type",
        "reshape",
        "transpose",
        "broadcast_in_dim",
        "squeeze",
        "neg",
        "copy",
        "stop_gradient",
        "slice",
        "rev",
        "reduce_precision",
        "expand_dims",
        "concatenate",
        "pad",
        "add",
        "add_any",
        "sub",
        "cumsum",
        "real",
        "imag",
        "reduce_sum",
        "optimization_barrier",
    ]
)
_PASSED_ON = ("convert_element_type", "reshape", "squeeze", "copy", "stop_gradient", "reduce_max", "reduce_min")
_COMPARISONS = frozenset(["lt", "le", "gt", "ge", "eq", "ne", "is_finite", "sign"])
_CUTS = ("slice", "dynamic_slice")
_PRODUCTS = ("mul", "dot_general", "conv_general_dilated")


@dataclass(frozen=True, slots=True)
class _Growth:
    """How a value depends on the batch.

    Args:
      degree: the power of the batch size it grows with; None if unknown, or not a power.
      varies: whether it depends on the examples.
      sums: for a value without a batch dim: 0 if it holds no sum over the examples, 1 if it is linear in such sums,
        2 if it depends on the examples in another way.
      zero: whether it is 0 or infinite, which any degree may be added to or compared with.
      meet: where examples are compared with each other, if that is why nothing is known.
    """

    degree: Fraction | None = Fraction(0)
    varies: bool = False
    sums: int = 0
    zero: bool = False
    meet: str | None = None


_UNKNOWN = _Growth(degree=None, varies=True, sums=2)


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What a loss function makes, at the full batch and at the size of a microbatch.

    Args:
      full: the loss function at the full batch.
      small: the same at the size of a microbatch.
      microbatches: how many of the second make the first.
      growths: of each result.
    """

    full: Jaxpr
    small: Jaxpr
    microbatches: int
    growths: Sequence[_Growth]


def results_of(full: ClosedJaxpr, small: ClosedJaxpr, microbatches: int, split_dims: Sequence[int | None]) -> Results:
    """How the results of a loss function depend on the batch.

    Args:
      full: as of `Results`.
      small: the same.
      microbatches: the same.
      split_dims: for each leading input, the dim that is the batch.
    """
    a, b = open_jaxpr(full), open_jaxpr(small)
    given = [_Growth(varies=d is not None) for d in split_dims]
    given += [_Growth()] * (len(a.invars) - len(given))
    growths = _growths(a, b, microbatches, given) if _names(a) == _names(b) else [_UNKNOWN] * len(a.outvars)
    return Results(full=a, small=b, microbatches=microbatches, growths=growths)


def loss_reduction(results: Results) -> str:
    """ "mean" or "sum".

    Raises:
      PlanError: where it is neither, or cannot be told; `reduction=` settles it.
    """
    a, microbatches, loss = results.full, results.microbatches, results.growths[0]
    if loss.sums < 2 and loss.degree in (0, 1):
        return "mean" if loss.degree == 0 else "sum"
    last = next((source_line(e) for e in reversed(a.eqns) if a.outvars[0] in e.outvars), "the loss function")
    bent = loss.degree is not None and loss.sums == 2
    if loss.meet is not None:
        raise PlanError(
            refused=f"microbatches={microbatches}", got="a loss that compares examples of the batch with each other",
            needed="a loss whose examples do not need those of other microbatches", where=loss.meet or last,
            try_='microbatches=1, or reduction="mean" to compare examples within each microbatch alone',
        )  # fmt: skip
    raise PlanError(
        refused=f"microbatches={microbatches}",
        got="a loss that is not linear in its sums over the batch (a masked mean, the root of a mean)"
        if bent
        else "a loss that is neither plainly a mean nor plainly a sum over the batch",
        needed="to know how the losses of microbatches combine",
        where=last,
        try_='reduction="mean" (every microbatch weighs the same), reduction="sum", or dividing by a count that does '
        "not depend on the examples",
    )


# Of truths one is the largest where any is, the least where all are.
_EXTREMES: Mapping[str, Reduction] = {
    "reduce_max": "max", "reduce_min": "min", "reduce_or": "max", "reduce_and": "min",
}  # fmt: skip


class ReductionWarning(UserWarning):
    """A result whose value over the batch does not follow from its values over microbatches."""


def aux_reductions(results: Results, *, each: int = 0) -> tuple[Reduction, ...]:
    """How each result beside the loss combines over microbatches; warns, with its line, of those that do not.

    Args:
      results: of the loss function.
      each: how many of them, the last, are rows of which each microbatch keeps its own.

    Raises:
      PlanError: where one compares examples of the batch with each other.
    """
    a, b, microbatches, growths = results.full, results.small, results.microbatches, results.growths
    made = {var: i for i, equation in enumerate(a.eqns) for var in equation.outvars}
    found: list[Reduction] = []
    whole = len(a.outvars) - each
    for x, y, growth in zip(a.outvars[1:whole], b.outvars[1:whole], growths[1:whole], strict=True):
        if growth.meet is not None and _is_batched(x, y):
            raise PlanError(
                refused=f"microbatches={microbatches}",
                got=f"a result of shape {x.aval.shape} that compares examples of the batch with each other",
                needed="results beside the loss whose examples do not need those of other microbatches",
                where=_line(a, made, x), try_="microbatches=1, or computing it outside the loss function",
            )  # fmt: skip
        numbers = jnp.issubdtype(x.aval.dtype, jnp.number)
        extreme = _extreme(a, b, made, x)
        truth = x.aval.dtype == jnp.bool_
        if _is_batched(x, y) or not (numbers or truth) or (growth.degree == 0 and not growth.varies):
            found.append("same")
        elif extreme is not None:
            found.append(extreme)
        elif growth.degree == 1 and growth.sums < 2 and numbers:
            found.append("sum")
        else:
            mean = jnp.issubdtype(x.aval.dtype, jnp.inexact)
            if growth.degree != 0 or growth.sums == 2 or not mean:
                warnings.warn(
                    f"the result computed at {_line(a, made, x)} is neither a mean nor a sum, maximum or minimum over "
                    f"the batch: with microbatches it is {'their mean' if mean else 'that of the last one'}",
                    ReductionWarning,
                    stacklevel=2,
                )
            found.append("mean" if mean else "same")
    return (*found, *(("same",) * each))


def _extreme(full: Jaxpr, small: Jaxpr, made: Mapping[Any, int], atom: Any) -> Reduction | None:
    """ "max" or "min" where a result is that of values over the batch, passed on as it is."""
    while not is_literal(atom) and atom in made:
        position = made[atom]
        equation, other = full.eqns[position], small.eqns[position]
        name = equation.primitive.name
        if name in _EXTREMES and (name in ("reduce_max", "reduce_min") or atom.aval.dtype == jnp.bool_):
            shapes = equation.invars[0].aval.shape, other.invars[0].aval.shape
            pooled = [d for d, (x, y) in enumerate(zip(*shapes, strict=True)) if x != y]
            if pooled and set(pooled) <= set(equation.params["axes"]):
                return _EXTREMES[name]
        elif name not in _PASSED_ON:
            return None
        atom = equation.invars[0]
    return None


def _line(jaxpr: Jaxpr, made: Mapping[Any, int], atom: Any) -> str:
    """The user's line nearest to where `atom` is computed (JAX's own functions have none)."""
    waiting = [atom]
    for one in waiting:
        if not is_literal(one) and one in made:
            equation = jaxpr.eqns[made[one]]
            if line := source_line(equation):
                return line
            waiting.extend(equation.invars if len(waiting) < 100 else ())
    return "the loss function"


def _names(jaxpr: Jaxpr) -> list[str]:
    return [equation.primitive.name for equation in jaxpr.eqns]


def _growths(full: Jaxpr, small: Jaxpr, ratio: int, operands: Sequence[_Growth]) -> list[_Growth]:
    """Growth of each output; the batch dims of a value are those whose extent differs between the programs."""
    if _names(full) != _names(small):
        return [_UNKNOWN] * len(full.outvars)
    env: dict[Any, _Growth] = dict(zip(full.invars, operands, strict=True))
    env.update({var: _Growth() for var in full.constvars})

    def read(x: Any, y: Any) -> _Growth:
        return (_literal(x, y, ratio) if is_literal(y) else _UNKNOWN) if is_literal(x) else env[x]

    for a, b in zip(full.eqns, small.eqns, strict=True):
        given = [read(x, y) for x, y in zip(a.invars, b.invars, strict=True)]
        env.update(zip(a.outvars, _equation(a, b, given, ratio), strict=True))
    return [read(x, y) for x, y in zip(full.outvars, small.outvars, strict=True)]


def _literal(full: Any, small: Any, ratio: int) -> _Growth:
    try:
        x, y = float(full.val), float(small.val)
    except (TypeError, ValueError):
        return _Growth()
    if x == y or math.isnan(x):
        return _Growth(zero=x == 0 or math.isinf(x))
    if x * y <= 0 or math.isinf(x * y) or math.isnan(y):
        return _UNKNOWN
    power = math.log(x / y, ratio)
    return _Growth(degree=Fraction(round(power)) if abs(power - round(power)) < 1e-4 else None)


def _equation(full: Equation, small: Equation, given: list[_Growth], ratio: int) -> list[_Growth]:
    name = full.primitive.name
    ours, theirs = _bodies(full), _bodies(small)
    if ours is not None and theirs is not None:
        inner = given[1:] if name == "cond" else given
        found = [_growths(x, y, ratio, inner) for x, y in zip(ours, theirs, strict=True)]
        outs = [_join(*branches) for branches in zip(*found, strict=True)]
        return [replace(g, sums=2) if g.varies else g for g in outs] if name == "cond" and given[0].sums else outs
    if name == "scan":
        return _scan(full, small, given, ratio)
    degree = _degree(full, small, given)
    zero = name in _SAME and all(g.zero for g in given) and bool(given)
    met = next((g.meet for g in given if g.meet is not None), None)
    found = []
    for x, y in zip(full.outvars, small.outvars, strict=True):
        growth = _Growth(degree, *_sums(full, small, given, _is_batched(x, y)), zero)
        meet = met if met is not None or not (growth.varies and _meet(name, x, y, ratio)) else source_line(full) or ""
        if degree is None or meet is not None or (_is_batched(x, y) and any(g.sums and g.degree != 0 for g in given)):
            growth = replace(_UNKNOWN, meet=meet)
        found.append(growth)
    return found


def _meet(name: str, full: Any, small: Any, ratio: int) -> bool:
    """Whether a result holds examples beside others: pairs of them, or all but some, as shifts along the batch do."""
    shapes = getattr(full.aval, "shape", ()), getattr(small.aval, "shape", ())
    if len(shapes[0]) != len(shapes[1]):
        return False  # a batch of one example may be spread out by another way
    grown = [(x, y) for x, y in zip(*shapes, strict=True) if x != y]
    return len(grown) > 1 or (name in _CUTS and any(x != ratio * y for x, y in grown))


def _is_batched(full: Any, small: Any) -> bool:
    return getattr(full.aval, "shape", ()) != getattr(small.aval, "shape", ())


def _sums(full: Equation, small: Equation, given: list[_Growth], batched: bool) -> tuple[bool, int]:
    """Whether a result depends on the examples, and how it holds sums over them."""
    name = full.primitive.name
    if batched:
        return any(g.varies for g in given) or name in ("random_bits", "iota"), 0
    if not any(g.varies for g in given):
        return False, 0
    examples = [g.varies and _is_batched(x, y) for g, x, y in zip(given, full.invars, small.invars, strict=True)]
    pooled = [g.sums for g in given]
    if 2 in pooled:
        return True, 2
    if any(examples):
        return True, 1 if name in ("reduce_sum", "dot_general") and not any(pooled) else 2
    linear = (
        name in _LINEAR
        or (name in _PRODUCTS and sum(1 for p in pooled if p) == 1)
        or (name == "div" and not pooled[1])
        or (name == "select_n" and not pooled[0])
    )
    return True, 1 if linear else 2


def _degree(full: Equation, small: Equation, given: list[_Growth]) -> Fraction | None:
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


def _scan(full: Equation, small: Equation, given: list[_Growth], ratio: int) -> list[_Growth]:
    """A loop of the same length in both programs: what it carries has one growth."""
    parts, other = scan_parts(full), scan_parts(small)
    if parts.length != other.length:
        return [_UNKNOWN] * len(full.outvars)
    first, last = parts.num_consts, parts.num_consts + parts.num_carry
    carry = given[first:last]
    while True:  # ends: growths only go up, towards unknown
        outs = _growths(open_jaxpr(parts.body), open_jaxpr(other.body), ratio, [*given[:first], *carry, *given[last:]])
        joined = [_join(a, b) for a, b in zip(carry, outs, strict=False)]
        if joined == carry:
            return [*carry, *outs[parts.num_carry :]]
        carry = joined


def _join(*growths: _Growth) -> _Growth:
    """What holds for whichever of the values it is."""
    tall = {g.degree for g in growths if not g.zero} or {Fraction(0)}
    return _Growth(
        degree=tall.pop() if len(tall) == 1 else None,
        varies=any(g.varies for g in growths),
        sums=max(g.sums for g in growths),
        zero=all(g.zero for g in growths),
        meet=next((g.meet for g in growths if g.meet is not None), None),
    )


def _bodies(equation: Equation) -> list[Jaxpr] | None:
    name, params = equation.primitive.name, equation.params
    if name in ("custom_jvp_call", "custom_vjp_call"):
        return [open_jaxpr(inline(params["call_jaxpr"]))]
    if is_remat(equation):
        return [open_jaxpr(params["jaxpr"])]
    if name == "cond":
        return [open_jaxpr(branch) for branch in params["branches"]]
    return None
