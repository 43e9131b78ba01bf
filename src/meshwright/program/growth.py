"""How the values of a loss function depend on the batch: the power of its size, sums over it, examples that meet.

The program is known at two batch sizes; an abstract interpretation walks both together. The *degree* of a value is the
power of the batch size it grows with when the batch is repeated: an element has degree 0, a sum over the batch one
more, a quotient the difference. Counts written into the program as literals show their degree by differing between the
two sizes. The batch dims of a value are those whose extents differ.

Examples meet where a value would need those of other microbatches: a statistic that goes back into the examples (batch
normalisation), two batch dims (contrastive losses), a batch that is shifted, sorted, summed up along itself or read at
indices of other examples. Nothing is known of whatever comes of it.

Known limit: examples that are put in another order and back, as some mixtures of experts do, have met.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from fractions import Fraction
from typing import Any

from .._jax.jaxpr import ClosedJaxpr, Equation, Jaxpr, inline, is_literal, is_remat, open_jaxpr, scan_parts, source_line
from .places import INDEX_ARITHMETIC

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
_COMPARISONS = frozenset(["lt", "le", "gt", "ge", "eq", "ne", "is_finite", "sign"])
_CUTS = ("slice", "dynamic_slice")
# By the parameter that says along which dims they mix elements.
_ALONG: Mapping[str, str] = {
    "sort": "dimension", "rev": "dimensions", "cumsum": "axis", "cummax": "axis", "cummin": "axis", "cumprod": "axis",
    "cumlogsumexp": "axis",
}  # fmt: skip
# A constant beside a count does not change what it counts: a guard against zero.
_GUARDS = ("max", "min", "add", "add_any", "sub")
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
      place: whether it holds the examples' own positions in the batch, as an index (`x[arange(batch), label]`).
    """

    degree: Fraction | None = Fraction(0)
    varies: bool = False
    sums: int = 0
    zero: bool = False
    meet: str | None = None
    place: bool = False


_UNKNOWN = Growth(degree=None, varies=True, sums=2)


def growths_of(
    full: ClosedJaxpr, small: ClosedJaxpr, microbatches: int, split_dims: Sequence[int | None],
    degrees: Sequence[int] = (), env: dict[Any, Growth] | None = None,
) -> list[Growth]:  # fmt: skip
    """The growth of each result of a loss function.

    Args:
      full: the loss function at the full batch.
      small: the same at the size of a microbatch.
      microbatches: how many of the second make the first.
      split_dims: for each leading input, the dim that is the batch.
      degrees: of each input behind these, which are statistics of the whole batch.
      env: that of each value at the top level is written into it, by its variable in `full`.
    """
    a, b = open_jaxpr(full), open_jaxpr(small)
    given = [Growth(varies=d is not None) for d in split_dims] + [Growth(degree=Fraction(d)) for d in degrees]
    given += [Growth()] * (len(a.invars) - len(given))
    return _growths(a, b, microbatches, given, env)


def degrees_of(
    full: ClosedJaxpr, small: ClosedJaxpr, microbatches: int, split_dims: Sequence[int | None]
) -> dict[Any, Fraction]:
    """The degree of each value at the top level of a loss function of which one is known, by its variable in `full`; a
    guard (`maximum(count, 1)`) has that of what it guards.

    Args: as of `growths_of`.
    """
    env: dict[Any, Growth] = {}
    growths_of(full, small, microbatches, split_dims, env=env)
    found = {var: growth.degree for var, growth in env.items() if growth.degree is not None}
    for equation in open_jaxpr(full).eqns:
        (var, *_), atoms = equation.outvars, equation.invars
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
    full: Jaxpr, small: Jaxpr, ratio: int, operands: Sequence[Growth], env: dict[Any, Growth] | None = None
) -> list[Growth]:
    """Growth of each output; the batch dims of a value are those whose extent differs between the programs. That of
    each value is written into `env`, if it is given."""
    if _names(full) != _names(small):
        return [_UNKNOWN] * len(full.outvars)
    env = {} if env is None else env
    env.update(zip(full.invars, operands, strict=True))
    env.update({var: Growth() for var in full.constvars})

    def read(x: Any, y: Any) -> Growth:
        return (_literal(x, y, ratio) if is_literal(y) else _UNKNOWN) if is_literal(x) else env[x]

    for a, b in zip(full.eqns, small.eqns, strict=True):
        given = [read(x, y) for x, y in zip(a.invars, b.invars, strict=True)]
        env.update(zip(a.outvars, _equation(a, b, given, ratio), strict=True))
    return [read(x, y) for x, y in zip(full.outvars, small.outvars, strict=True)]


def _literal(full: Any, small: Any, ratio: int) -> Growth:
    try:
        x, y = float(full.val), float(small.val)
    except (TypeError, ValueError):
        return Growth()
    if x == y or math.isnan(x):
        return Growth(zero=x == 0 or math.isinf(x))
    if x * y <= 0 or math.isinf(x * y) or math.isnan(y):
        return _UNKNOWN
    power = math.log(x / y, ratio)
    return Growth(degree=Fraction(round(power)) if abs(power - round(power)) < 1e-4 else None)


def _equation(full: Equation, small: Equation, given: list[Growth], ratio: int) -> list[Growth]:
    name = full.primitive.name
    ours, theirs = _bodies(full), _bodies(small)
    if ours is not None and theirs is not None:
        inner = given[1:] if name == "cond" else given
        found = [_growths(x, y, ratio, inner) for x, y in zip(ours, theirs, strict=True)]
        outs = [_join(*branches) for branches in zip(*found, strict=True)]
        return [replace(g, sums=2) if g.varies else g for g in outs] if name == "cond" and given[0].sums else outs
    if name == "scan":
        return _scan(full, small, given, ratio)
    if name == "while":
        return _while(full, small, given, ratio)
    if name == "iota":
        grows = full.params["shape"][full.params["dimension"]] != small.params["shape"][small.params["dimension"]]
        return [Growth(varies=grows, place=grows)]
    met = next((g.meet for g in given if g.meet is not None), None)
    if met is None and name in INDEX_ARITHMETIC and any(g.place for g in given):
        return [Growth(varies=True, place=True)]
    degree = _degree(full, small, given)
    zero = name in _SAME and all(g.zero for g in given) and bool(given)
    mixed = any(g.varies for g in given) and _mixes(full, small, given)
    found = []
    for x, y in zip(full.outvars, small.outvars, strict=True):
        batched = is_batched(x, y)
        growth = Growth(degree, *_sums(full, small, given, batched), zero)
        meets = growth.varies and (_meet(name, x, y, ratio) or mixed or (batched and any(g.sums for g in given)))
        meet = met if met is not None or not meets else source_line(full) or ""
        if degree is None or meet is not None:
            growth = replace(_UNKNOWN, meet=meet)
        found.append(growth)
    return found


def _mixes(full: Equation, small: Equation, given: Sequence[Growth]) -> bool:
    """Whether an equation lets elements of different examples meet along the batch, in an array of the same batch."""
    name, params = full.primitive.name, full.params
    shapes = [[getattr(atom.aval, "shape", ()) for atom in one.invars] for one in (full, small)]
    grown = [{d for d, (x, y) in enumerate(zip(a, b, strict=False)) if x != y} for a, b in zip(*shapes, strict=True)]
    if name in _ALONG:
        along = params[_ALONG[name]]
        return not grown[0].isdisjoint(along if isinstance(along, (tuple, list)) else (along,))
    if name == "gather" and grown[0]:
        numbers = params["dimension_numbers"]
        own = {*numbers.operand_batching_dims}
        own |= {d for d in grown[0] if params["slice_sizes"][d] == shapes[0][0][d]}
        return not grown[0] <= (own | set(numbers.start_index_map) if given[1].place else own)
    if name.startswith("scatter") and grown[0]:
        numbers = params["dimension_numbers"]
        at = set(numbers.scatter_dims_to_operand_dims)
        return not given[1].place and not grown[0].isdisjoint(at)
    if name == "pure_callback":  # nobody knows what it does
        return any(grown)
    if name.startswith("reduce_window") or name in ("cumred", "select_and_scatter_add"):
        window = params.get("window_dimensions", ())
        return any(d < len(window) and window[d] > 1 for d in grown[0])
    return False


def _meet(name: str, full: Any, small: Any, ratio: int) -> bool:
    """Whether a result holds examples beside others: pairs of them, or all but some, as shifts along the batch do."""
    shapes = getattr(full.aval, "shape", ()), getattr(small.aval, "shape", ())
    if len(shapes[0]) != len(shapes[1]):
        return False  # a batch of one example may be spread out by another way
    grown = [(x, y) for x, y in zip(*shapes, strict=True) if x != y]
    return len(grown) > 1 or (name in _CUTS and any(x != ratio * y for x, y in grown))


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
        name in _LINEAR
        or (name in _PRODUCTS and sum(1 for p in pooled if p) == 1)
        or (name == "div" and not pooled[1])
        or (name == "select_n" and not pooled[0])
    )
    return True, 1 if linear else 2


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


def _scan(full: Equation, small: Equation, given: list[Growth], ratio: int) -> list[Growth]:
    """A loop of the same length in both programs: what it carries has one growth."""
    parts, other = scan_parts(full), scan_parts(small)
    first, last = parts.num_consts, parts.num_consts + parts.num_carry
    if parts.length != other.length:
        return _loop_over_examples(full, small, given, ratio)
    carry = given[first:last]
    while True:  # ends: growths only go up, towards unknown
        outs = _growths(open_jaxpr(parts.body), open_jaxpr(other.body), ratio, [*given[:first], *carry, *given[last:]])
        joined = [_join(a, b) for a, b in zip(carry, outs, strict=False)]
        if joined == carry:
            return [*carry, *outs[parts.num_carry :]]
        carry = joined


def _loop_over_examples(full: Equation, small: Equation, given: list[Growth], ratio: int) -> list[Growth]:
    """A loop with a trip for each example, which is as good as a `vmap` where no trip hears of another."""
    parts, other = scan_parts(full), scan_parts(small)
    consts = list(zip(given, full.invars, small.invars, strict=True))[: parts.num_consts]
    if parts.num_carry or any(g.varies and (g.sums or is_batched(x, y)) for g, x, y in consts):
        return [replace(_UNKNOWN, meet=source_line(full) or "")] * len(full.outvars)
    outs = _growths(open_jaxpr(parts.body), open_jaxpr(other.body), ratio, [replace(g, place=False) for g in given])
    return [g if g.degree is None else replace(g, sums=0, varies=True) for g in outs]


def _while(full: Equation, small: Equation, given: list[Growth], ratio: int) -> list[Growth]:
    """A loop whose trips are counted by what it carries: examples meet where that depends on them."""
    params, other = full.params, small.params
    first = params["cond_nconsts"] + params["body_nconsts"]
    asked, used, carry = given[: params["cond_nconsts"]], given[params["cond_nconsts"] : first], given[first:]
    while True:  # ends, as `_scan` does
        bodies = open_jaxpr(params["body_jaxpr"]), open_jaxpr(other["body_jaxpr"])
        joined = [_join(a, b) for a, b in zip(carry, _growths(*bodies, ratio, [*used, *carry]), strict=True)]
        if joined == carry:
            break
        carry = joined
    conditions = open_jaxpr(params["cond_jaxpr"]), open_jaxpr(other["cond_jaxpr"])
    (goes_on,) = _growths(*conditions, ratio, [*asked, *carry])
    if goes_on.varies:
        return [replace(_UNKNOWN, meet=source_line(full) or "")] * len(carry)
    return carry


def _join(*growths: Growth) -> Growth:
    """What holds for whichever of the values it is."""
    tall = {g.degree for g in growths if not g.zero} or {Fraction(0)}
    return Growth(
        degree=tall.pop() if len(tall) == 1 else None,
        varies=any(g.varies for g in growths),
        sums=max(g.sums for g in growths),
        zero=all(g.zero for g in growths),
        meet=next((g.meet for g in growths if g.meet is not None), None),
        place=all(g.place for g in growths),
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
