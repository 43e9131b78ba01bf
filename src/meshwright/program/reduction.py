"""Whether a loss is a mean or a sum over the batch, from the program itself.

The gradient of a batch is the mean of its microbatches' gradients for a mean, their sum for a sum; taking one for the
other trains with a wrong learning rate and no error. The *degree* of a value is the power of the batch size it grows
with when the batch is repeated: an element has degree 0, a sum over the batch one more, a quotient the difference. A
loss of degree 0 is a mean, one of degree 1 a sum. Counts written into the program as literals show their degree by
differing between two batch sizes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from fractions import Fraction
from typing import Any

from .._jax.jaxpr import ClosedJaxpr, Equation, Jaxpr, inline, is_literal, is_remat, open_jaxpr, source_line
from ..errors import PlanError

Degree = Fraction | None  # None: unknown, or not a power

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


def loss_reduction(full: ClosedJaxpr, small: ClosedJaxpr, microbatches: int, split_dims: Sequence[int | None]) -> str:
    """ "mean" or "sum".

    Args:
      full: the loss function at the full batch.
      small: the same at the size of a microbatch.
      microbatches: how many of the second make the first.
      split_dims: for each leading input, the dim that is the batch.

    Raises:
      PlanError: where the degree cannot be told; `reduction=` settles it.
    """
    a, b = open_jaxpr(full), open_jaxpr(small)
    names = [e.primitive.name for e in a.eqns]
    degree = _degrees(a, b, microbatches)[0] if names == [e.primitive.name for e in b.eqns] else None
    if degree == 0:
        return "mean"
    if degree == 1:
        return "sum"
    last = next((source_line(e) for e in reversed(a.eqns) if a.outvars[0] in e.outvars), "the loss function")
    raise PlanError(
        refused=f"microbatches={microbatches}",
        got="a loss that is neither plainly a mean nor plainly a sum over the batch",
        needed="to know how the losses of microbatches combine",
        where=last,
        try_='reduction="mean" or reduction="sum"',
    )


def _degrees(full: Jaxpr, small: Jaxpr, ratio: int, operands: Sequence[Degree] | None = None) -> list[Degree]:
    """Degree of each output; the batch dims of a value are those whose extent differs between the programs."""
    env: dict[Any, Degree] = {}
    for var, degree in zip(full.invars, operands or [Fraction(0)] * len(full.invars), strict=True):
        env[var] = degree
    for var in full.constvars:
        env[var] = Fraction(0)
    for a, b in zip(full.eqns, small.eqns, strict=True):
        given = [_literal(x, y, ratio) if is_literal(x) else env[x] for x, y in zip(a.invars, b.invars, strict=True)]
        for var, degree in zip(a.outvars, _equation(a, b, given, ratio), strict=True):
            env[var] = degree
    return [
        _literal(x, y, ratio) if is_literal(x) else env[x] for x, y in zip(full.outvars, small.outvars, strict=True)
    ]


def _literal(full: Any, small: Any, ratio: int) -> Degree:
    try:
        x, y = float(full.val), float(small.val)
    except (TypeError, ValueError):
        return Fraction(0)
    if x == y:
        return Fraction(0)
    if x * y <= 0:
        return None
    power = math.log(x / y, ratio)
    return Fraction(round(power)) if abs(power - round(power)) < 1e-4 else None


def _equation(full: Equation, small: Equation, given: list[Degree], ratio: int) -> list[Degree]:
    name, count = full.primitive.name, len(full.outvars)
    if any(d is None for d in given):
        return [None] * count
    known = [d for d in given if d is not None]
    if name in ("mul", "dot_general", "conv_general_dilated"):
        return [known[0] + known[1] + _summed(full, small)]
    if name == "div":
        return [known[0] - known[1]]
    if name == "reduce_sum":
        return [known[0] + _summed(full, small)]
    if name == "integer_pow":
        return [known[0] * full.params["y"]]
    if name == "square":
        return [known[0] * 2]
    if name in ("sqrt", "rsqrt"):
        return [known[0] * Fraction(1, 2) * (1 if name == "sqrt" else -1)]
    if name in _SAME:
        tall = {d for d, atom in zip(known, full.invars, strict=True) if not _is_zero(atom)}
        return [tall.pop() if len(tall) == 1 else Fraction(0) if not tall else None] * count
    bodies = _bodies(full), _bodies(small)
    if bodies[0] is not None and bodies[1] is not None:
        inner = known[1:] if name == "cond" else known
        found = [_degrees(x, y, ratio, inner) for x, y in zip(*bodies, strict=True)]
        return found[0] if all(f == found[0] for f in found) else [None] * count
    if all(d == 0 for d in known):
        return [Fraction(0)] * count  # elementwise on elements, or a scan over layers
    return [None] * count


def _summed(full: Equation, small: Equation) -> int:
    """1 if the equation sums over a batch dim."""
    name = full.primitive.name
    if name == "reduce_sum":
        axes = full.params["axes"]
    elif name == "dot_general":
        axes = full.params["dimension_numbers"][0][0]
    else:
        return 0
    x, y = full.invars[0].aval.shape, small.invars[0].aval.shape
    return sum(1 for axis in axes if x[axis] != y[axis])


def _is_zero(atom: Any) -> bool:
    """Literals that any degree may be added to or compared with: 0 and the infinities."""
    if not is_literal(atom):
        return False
    value = float(atom.val)
    return value == 0 or math.isinf(value)


def _bodies(equation: Equation) -> list[Jaxpr] | None:
    name, params = equation.primitive.name, equation.params
    if name in ("custom_jvp_call", "custom_vjp_call"):
        return [open_jaxpr(inline(params["call_jaxpr"]))]
    if is_remat(equation):
        return [open_jaxpr(params["jaxpr"])]
    if name == "cond":
        return [open_jaxpr(branch) for branch in params["branches"]]
    return None
