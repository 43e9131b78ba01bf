"""A program with dims padded so that mesh axes divide them: a vocabulary of 50257, 25 heads, 6001 rows over 7 devices.

The program that is planned is another one with the same inputs, outputs and numbers. In it the dims are longer from
where an input is first read (`pad`) to where a value leaves, or meets an operator that cannot have them longer
(`slice`). All else (layouts, prices, memory, pipelines, lowering) sees a program like any other.

What is behind the end of a padded dim may be any number, infinities included. It never reaches a number of the user's:

* An operand that is reduced along a padded dim is *masked* first: 0 is put behind the end for a sum, the least or the
  largest number for a maximum or minimum.
* A result that has a padded dim of which an operand has nothing (logits have the vocabulary, hidden states have not) is
  masked, since the derivative sums the result's cotangent along that dim: the derivative of a mask is the same mask.
* A look-up by number in a padded dim is clamped, or out of range, at the end that the user's dim has.

A dim is followed from operand to result by the operators' factor rules, inside scans, rematerialised regions and
functions with derivatives of their own too. Padding adds at the end of a dim, so that a factor has to be the major one
of each dim that it is in (25 heads of 1600 = 25 x 64).

Known limits: the gradient of a maximum over nothing but minus infinities is shared with what is behind the end;
branches, `while` loops, kernels (but for `mw.attention`'s batch and heads), sorted rows and windows over images get
their operands as the user's program has them.
"""

from __future__ import annotations

from collections.abc import Container, Sequence, Set
from dataclasses import dataclass, replace
from fractions import Fraction
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .._jax import attention
from .._jax.boundary import Boundaries, layer_boundary
from .._jax.jaxpr import (
    ClosedJaxpr,
    Equation,
    bind,
    consts_of,
    inline,
    is_literal,
    is_remat,
    open_jaxpr,
    result_avals,
    scan_parts,
    user_context,
)
from .._jax.random import is_drawn_by_position, is_key, of_padded_shape
from ..errors import PlanError
from .factors import Dims, Rule, factors_of
from .graph import Graph
from .kernels import is_kernel
from .local import COMBINE, ON_ELEMENTS, evaluate_local, has_keys
from .padded_dims import Extents, PaddedDim, padded_shapes
from .padded_value import Value, as_it_is, constant, mask
from .rules import Rules, is_call
from .split import Split


@dataclass(frozen=True, slots=True)
class _Longer(Split):
    """A split of dims into less than one block each."""

    def offset(self, extent: int, dim: tuple[int, ...]) -> Any:
        """A longer dim begins with the first element of the user's."""
        del extent, dim
        return jnp.int32(0)


def padded_program(
    core: ClosedJaxpr, boundaries: Boundaries, graph: Graph, rules: Rules, padded: Sequence[PaddedDim]
) -> tuple[ClosedJaxpr, Boundaries]:
    """The same program, with dims longer inside.

    Args:
      core: the program, `jit` calls inlined.
      boundaries: its layer boundaries.
      graph: its operators.
      rules: their factor rules.
      padded: the dims; those that are a multiple already stay.

    Returns:
      The program and its layer boundaries.

    Raises:
      PlanError: if it cannot be traced so, or an input of this name is not there.
    """
    jaxpr = open_jaxpr(core)
    wanted = padded_shapes(graph, padded)
    padding = _Padding(rules)

    def run(*inputs: Any) -> list[Any]:
        given = [
            Value(x, tuple(x.shape), tuple(x.shape) if is_key(x) else extents, varies=position in graph.parameters)
            for position, (x, extents) in enumerate(zip(inputs, wanted, strict=True))
        ]
        return [value.at(value.shape) for value in padding.program(core, given, boundaries)]

    try:
        traced = jax.make_jaxpr(run)(*(jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in jaxpr.invars))
    except Exception as error:  # of any operator, on shapes that it was not written for: the step as it is has a plan
        raise PlanError(
            refused=f"to pad {', '.join(map(str, padded))}", got=f"{type(error).__name__}: {error}",
            needed="operators that can have these dims longer", where="the loss function", try_="padding=False",
        ) from error  # fmt: skip
    written = Boundaries()
    return inline(traced, boundaries=written), written


class _Padding:
    """Evaluates programs with longer dims.

    Args:
      rules: of their equations.
      differentiated: whether JAX differentiates what is evaluated; not inside a function's own derivative.
    """

    def __init__(self, rules: Rules, *, differentiated: bool = True) -> None:
        self._rules, self._differentiated = rules, differentiated

    def program(self, closed: Any, operands: Sequence[Value], boundaries: Boundaries | None = None) -> list[Value]:
        """Evaluate a program, with its layer boundaries where it has some."""
        jaxpr = open_jaxpr(closed)
        marks = Boundaries() if boundaries is None else boundaries
        env: dict[Any, Value] = dict(zip(jaxpr.invars, operands, strict=True))
        for var, const in zip(jaxpr.constvars, consts_of(closed), strict=True):
            env[var] = constant(const)

        def read(atom: Any) -> Value:
            return constant(atom.val) if is_literal(atom) else env[atom]

        for position, equation in enumerate(jaxpr.eqns):
            if position in marks.before:
                layer_boundary()
            with user_context(equation):
                made = self._equation(
                    equation, [read(atom) for atom in equation.invars], is_cut=position in marks.scans
                )
            env.update(zip(equation.outvars, made, strict=True))
        if len(jaxpr.eqns) in marks.before:
            layer_boundary()
        return [read(atom) for atom in jaxpr.outvars]

    def _equation(self, equation: Equation, operands: Sequence[Value], *, is_cut: bool) -> Sequence[Value]:
        name = equation.primitive.name
        if all(value.wanted == value.shape == value.extents for value in operands) and not is_cut:
            made = _as_they_are(equation, operands, bind(equation, *(value.x for value in operands)))
            if _grows(equation, operands):
                (only,) = made
                return [replace(only, grow=partial(self._grown, equation, operands))]
            return made
        if name == "scan":
            return self._scan(equation, operands, is_cut=is_cut)
        if is_remat(equation):
            return self._remat(equation, operands)
        if name in ("custom_jvp_call", "custom_vjp_call"):
            if self._differentiated and any(value.varies for value in operands):
                return self._differentiated_call(equation, operands)
            return self.program(inline(equation.params["call_jaxpr"], caller=equation), operands)
        if not is_call(equation) and not has_keys(equation) and not is_kernel(equation) and name not in _AS_IT_IS:
            made = self._longer(equation, operands)
            if made is not None:
                return made
        return _as_they_are(equation, operands, bind(equation, *(value.at(value.shape) for value in operands)))

    def _longer(self, equation: Equation, operands: Sequence[Value]) -> list[Value] | None:
        """An equation with factors longer; None if there are none, or it cannot have them."""
        self._rules.prepare([(equation, False)])
        rule = self._rules.rule(equation, differentiated=False)
        ratios = _ratios(equation, rule, operands)
        if not ratios:
            return None
        shapes = [_scaled(value.shape, dims, rule, ratios) for value, dims in zip(operands, rule.operands, strict=True)]
        results = [
            _scaled(var.aval.shape, dims, rule, ratios)
            for var, dims in zip(equation.outvars, rule.results, strict=True)
        ]
        given = [value.read_as(s) for value, s in zip(operands, shapes, strict=True)]
        kept, name = factors_of(rule.results), equation.primitive.name
        reduced = ratios.keys() - kept
        # The derivative sums what comes back to a result along what it has and an operand has not, and may multiply it
        # by the other operands: neither may be what no number is. A mask of the result keeps that from what comes back.
        summed = {
            f
            for value, dims in zip(given, rule.operands, strict=True)
            if self._differentiated and value.varies
            for f in ratios.keys() & kept - factors_of([dims])
        }
        fill = 1 if name in ON_ELEMENTS - _ZERO_IS_SAFE else 0
        xs = []
        for position, (value, dims) in enumerate(zip(given, rule.operands, strict=True)):
            if name == "gather":
                xs.append(_looked_up(equation, value) if position == 0 else _within(equation, rule, ratios, value.x))
                continue
            x = value.masked({d for d, dim in enumerate(dims) if reduced.intersection(dim)}, COMBINE.get(name, "sum"))
            if name not in _LINEAR and not (value.zero and fill == 0):
                x = mask(x, value.shape, {d for d, dim in enumerate(dims) if summed.intersection(dim)}, fill)
            xs.append(x)
        found = self._evaluated(equation, rule, ratios, shapes, results, xs)
        if found is None:
            return None
        zero = self._makes_zeros(equation, rule, ratios.keys() & kept, summed, given)
        made = []
        for x, var, dims, varies in zip(
            found, equation.outvars, rule.results, _varies(equation, operands), strict=True
        ):
            shape = tuple(var.aval.shape)
            value = Value(x, shape, tuple(x.shape), zero, varies)
            behind = {d for d, factors in enumerate(dims) if summed.intersection(factors)}
            if behind and varies:
                everywhere = all(x.shape[d] == n or d in behind for d, n in enumerate(shape))
                value = Value(mask(x, shape, behind, 0), shape, tuple(x.shape), zero or everywhere, varies, x)
            made.append(value)
        return made

    def _grown(self, equation: Equation, operands: Sequence[Value], extents: Extents) -> Any:
        """The result of an equation over what depends on no array, made longer in the first place (a mask, positions,
        random bits); None where that cannot be."""
        self._rules.prepare([(equation, False)])
        rule, shape = self._rules.rule(equation, differentiated=False), equation.outvars[0].aval.shape
        ratios = _lengthened(rule, rule.splittable, shape, extents, rule.results[0])
        if _scaled(shape, rule.results[0], rule, ratios) != extents:
            return None
        shapes = [_scaled(value.shape, dims, rule, ratios) for value, dims in zip(operands, rule.operands, strict=True)]
        given = [value.at(wanted) for value, wanted in zip(operands, shapes, strict=True)]
        with user_context(equation):
            found = self._evaluated(equation, rule, ratios, shapes, [extents], given)
        return None if found is None else found[0]

    def _makes_zeros(
        self, equation: Equation, rule: Rule, longer: Set[int], cleared: Set[int], operands: Sequence[Value]
    ) -> bool:
        """Whether the results have nothing but zeros behind the ends of `longer` factors; operands of products were
        masked along `cleared` ones."""
        name = equation.primitive.name
        held = [factors_of([dims]) for dims in rule.operands]
        if name == "dot_general":
            return all(
                any(f in has and (v.zero or f in cleared) for v, has in zip(operands, held, strict=True))
                for f in longer
            )
        if name == "mul":
            numbers = [value.is_finite_number() for value in operands]
            return all(
                v.zero and (known or longer <= has) for v, has, known in zip(operands, held, numbers, strict=True)
            )
        return name in _ZERO_OF_ZERO and all(v.zero and longer <= has for v, has in zip(operands, held, strict=True))

    def _evaluated(
        self,
        equation: Equation,
        rule: Rule,
        ratios: dict[int, Fraction],
        shapes: Sequence[Extents],
        results: Sequence[Extents],
        operands: Sequence[Any],
    ) -> Sequence[Any] | None:
        """Results of an equation on longer operands; None if they are not of the shapes that its rule says."""
        name = equation.primitive.name
        if name in ("random_bits", "random_split") or "whole" in equation.params:
            own = len(results[0]) - len(equation.params["shape"])  # of the keys
            return bind(of_padded_shape(equation, results[0][own:]), *operands)
        if name in _SHAPED:
            axes = tuple((str(f),) if f in ratios else () for f in range(len(rule.factors)))
            sizes: Any = {str(f): 1 / ratio for f, ratio in ratios.items()}
            return evaluate_local(equation, _Longer(rule, axes, sizes), operands)
        if name in ("gather", "scatter-add"):
            # What indices behind the end are is not promised.
            params: dict[str, Any] = {**equation.params, "unique_indices": False, "indices_are_sorted": False}
            if name == "gather":
                numbers, whole = params["dimension_numbers"], equation.invars[0].aval.shape
                params["slice_sizes"] = tuple(
                    have if size == n and d not in numbers.start_index_map else size
                    for d, (size, n, have) in enumerate(zip(params["slice_sizes"], whole, shapes[0], strict=True))
                )
            equation = equation.replace(params=params)
        avals = [
            jax.ShapeDtypeStruct(shape, var.aval.dtype) for shape, var in zip(shapes, equation.invars, strict=True)
        ]
        found = result_avals(equation, avals)
        if found is None or [tuple(one.shape) for one in found] != list(results):
            return None
        return bind(equation, *operands)

    def _remat(self, equation: Equation, operands: Sequence[Value]) -> list[Value]:
        body, params = equation.params["jaxpr"], equation.params
        made: list[Value] = []

        def run(xs: Sequence[Any]) -> list[Any]:
            made[:] = self.program(body, [value.again(x) for value, x in zip(operands, xs, strict=True)])
            return [value.x for value in made]

        found = jax.checkpoint(run, policy=params["policy"], prevent_cse=params["prevent_cse"])(
            [value.x for value in operands]
        )
        return [value.again(x) for value, x in zip(made, found, strict=True)]

    def _differentiated_call(self, equation: Equation, operands: Sequence[Value]) -> list[Value]:
        """A function with a derivative of its own, of which both programs are evaluated with longer dims."""
        self._rules.prepare([(equation, True)])
        parts = self._rules.derivative(equation)
        inside, count = _Padding(self._rules, differentiated=False), len(equation.outvars)
        made: list[Value] = []

        def forward(*xs: Any) -> tuple[list[Any], list[Any]]:
            given = [value.again(x) for value, x in zip(operands, xs, strict=True)]
            made[:] = inside.program(parts.forward, given)
            found = [value.x for value in made]
            return found[:count], found[count:]

        def backward(residuals: Sequence[Any], cotangents: Sequence[Any]) -> tuple[Any, ...]:
            given = [value.again(x) for value, x in zip(made[count:], residuals, strict=True)]
            for value, smooth, x in zip(made, parts.results, cotangents, strict=False):
                if smooth:
                    given.append(Value(x, value.shape, value.extents, zero=False))
            grads = iter(inside.program(parts.backward, given))
            return tuple(
                next(grads).at(value.extents).astype(value.x.dtype) if smooth else None
                for value, smooth in zip(operands, parts.operands, strict=True)
            )

        @jax.custom_vjp
        def call(*xs: Any) -> list[Any]:
            return forward(*xs)[0]

        call.defvjp(forward, backward)
        xs = [value.x for value in operands]
        jax.eval_shape(forward, *xs)  # how long the results are
        found = call(*xs)
        # What comes back is for the function's own derivative to say, whatever its program does.
        return [
            replace(value.again(x), varies=smooth)
            for value, x, smooth in zip(made[:count], found, parts.results, strict=True)
        ]

    def _scan(self, equation: Equation, operands: Sequence[Value], *, is_cut: bool) -> list[Value]:
        parts = scan_parts(equation)
        first_xs = parts.num_consts + parts.num_carry
        # What every trip reads is padded once, in front of the loop; rows are padded in their trips.
        consts = [value.read_as(value.wanted) for value in operands[: parts.num_consts]]
        carry = [value.read_as(value.wanted) for value in operands[parts.num_consts : first_xs]]
        xs = [value.read_as((value.shape[0], *value.extents[1:])) for value in operands[first_xs:]]
        rows = [replace(value, shape=value.shape[1:], wanted=value.wanted[1:], unmasked=None) for value in xs]
        made: list[Value] = []

        def trip(carried: Sequence[Any], row: Sequence[Any]) -> tuple[list[Any], list[Any]]:
            if is_cut:
                layer_boundary()
            now = [value.again(x) for value, x in zip((*carry, *rows), (*carried, *row), strict=True)]
            made[:] = self.program(parts.body, [*(value.again(value.x) for value in consts), *now])
            kept = [value.at(have.extents) for value, have in zip(made, carry, strict=False)]
            return kept, [value.x for value in made[len(carry) :]]

        one = [jax.ShapeDtypeStruct(value.extents[1:], value.x.dtype) for value in xs]
        while True:
            # A carry is as long as the body leaves it, holds what that leaves behind the end, and varies with it.
            jax.eval_shape(trip, [jax.ShapeDtypeStruct(v.extents, v.x.dtype) for v in carry], one)
            known = [(value.extents, value.zero, value.varies) for value in carry]
            for position, (have, left) in enumerate(zip(carry, made, strict=False)):
                longer = tuple(map(max, have.extents, left.extents))
                carry[position] = replace(
                    have.read_as(longer), zero=have.has_zeros(longer) and left.has_zeros(longer),
                    varies=have.varies or left.varies,
                )  # fmt: skip
            if known == [(value.extents, value.zero, value.varies) for value in carry]:
                break
        final, stacked = lax.scan(
            trip, [value.x for value in carry], [value.x for value in xs], length=parts.length, reverse=parts.reverse,
            unroll=parts.unroll,
        )  # fmt: skip
        results = [value.again(x) for value, x in zip(carry, final, strict=True)]
        for value, x in zip(made[len(carry) :], stacked, strict=True):
            results.append(Value(x, (parts.length, *value.shape), tuple(x.shape), value.zero, value.varies))
        return results


# Equations whose parameters hold shapes or positions, which `evaluate_local` rewrites.
_SHAPED = frozenset(["broadcast_in_dim", "reshape", "iota", "slice", "dynamic_slice"])
# Equations that get their operands as the user's program has them.
_AS_IT_IS = frozenset(["scatter", "scatter-sub", "scatter-mul", "scatter-min", "scatter-max", "ragged_dot_general"])
# Equations that make of single numbers and keys, and of what is made so, an array of any extents.
_GROWS = ON_ELEMENTS | {
    "broadcast_in_dim", "iota", "random_bits", "shift_left", "shift_right_arithmetic", "shift_right_logical",
    "bitcast_convert_type",
}  # fmt: skip
# Their derivatives read none of their operands, but to compare them.
_LINEAR = frozenset(
    """add add_any broadcast_in_dim clamp concatenate convert_element_type dynamic_slice dynamic_update_slice max min
    pad select_n sub""".split()  # noqa: SIM905 (a table)
)
# Operators on elements whose derivatives are finite where an operand is zero, as those of quotients and powers need not
# be.
_ZERO_IS_SAFE = frozenset(["mul"])
# Of zeros they make zeros.
_ZERO_OF_ZERO = frozenset(
    """abs add add_any asin asinh atan atanh broadcast_in_dim ceil concatenate convert_element_type copy cumsum erf
    expm1 floor imag log1p neg real reduce_max reduce_min reduce_precision reduce_sum reshape rev round select_n
    sign sin sinh slice sqrt square squeeze stop_gradient sub tan tanh transpose""".split()  # noqa: SIM905 (a table)
)


def _grows(equation: Equation, operands: Sequence[Value]) -> bool:
    """Whether an equation makes its result of single numbers and keys, or of what is made of those."""
    if equation.primitive.name == "random_bits" and not is_drawn_by_position(equation.invars[0].aval):
        return False  # an element depends on how many there are
    free = all((value.grow is not None or not value.shape) and not value.varies for value in operands)
    return free and equation.primitive.name in _GROWS


def _varies(equation: Equation, operands: Sequence[Value]) -> list[bool]:
    """For each result whether cotangents come back to it."""
    moves = equation.primitive.name != "stop_gradient" and any(value.varies for value in operands)
    return [moves and jnp.issubdtype(var.aval.dtype, jnp.inexact) for var in equation.outvars]


def _as_they_are(equation: Equation, operands: Sequence[Value], results: Sequence[Any]) -> list[Value]:
    """Results of an equation that has no longer dims."""
    return [as_it_is(x, varies) for x, varies in zip(results, _varies(equation, operands), strict=True)]


def _ratios(equation: Equation, rule: Rule, operands: Sequence[Value]) -> dict[int, Fraction]:
    """By factor, how many times as long it is to be."""
    able = {f for f in rule.splittable if rule.factors[f].kind in ("parallel", "reduction")}
    if equation.primitive.name == attention.FORWARD:
        # Queries and keys are counted from their first.
        able = set.intersection(*(factors_of([dims]) for dims in rule.operands[:3])) & able
    if equation.primitive.name == "scatter-add":
        indexed = equation.params["dimension_numbers"].scatter_dims_to_operand_dims
        able -= {f for d in indexed for f in rule.operands[0][d]}
    found: dict[int, Fraction] = {}
    for value, dims in zip(operands, rule.operands, strict=True):
        longest = tuple(map(max, value.extents, value.wanted))
        for factor, ratio in _lengthened(rule, able, value.shape, longest, dims).items():
            found[factor] = max(ratio, found.get(factor, ratio))
    return found


def _lengthened(rule: Rule, able: Container[int], shape: Extents, extents: Extents, dims: Dims) -> dict[int, Fraction]:
    """By factor, how many times as long it is in a tensor of these extents that is of a `shape`."""
    found = {}
    for n, longer, dim in zip(shape, extents, dims, strict=True):
        lead = next((f for f in dim if rule.factors[f].size > 1), None)
        if (
            lead is not None
            and lead in able
            and longer != n
            and (Fraction(longer, n) * rule.factors[lead].size).denominator == 1
        ):
            found[lead] = Fraction(longer, n)
    return found


def _scaled(shape: Sequence[int], dims: Dims, rule: Rule, ratios: dict[int, Fraction]) -> Extents:
    """A shape with the factors of its dims longer."""
    found = []
    for extent, dim in zip(shape, dims, strict=True):
        lead = next((f for f in dim if rule.factors[f].size > 1), None)
        found.append(int(extent * ratios.get(lead, Fraction(1))) if lead is not None else extent)
    return tuple(found)


def _looked_up(equation: Equation, value: Value) -> Any:
    """The operand of a gather, which reads and changes only what is before the end of the dims that it looks up in."""
    return value.before_mask(set(equation.params["dimension_numbers"].start_index_map))


def _within(equation: Equation, rule: Rule, ratios: dict[int, Fraction], indices: Any) -> Any:
    """Indices of a gather from a longer operand that read what they would read of the user's."""
    params, shape = equation.params, equation.invars[0].aval.shape
    if jnp.iinfo(indices.dtype).bits < 32:  # which need not reach behind the end
        indices = indices.astype(jnp.int32)
    columns = []
    for column, dim in enumerate(params["dimension_numbers"].start_index_map):
        index, lead = indices[..., column], next(iter(rule.operands[0][dim]), None)
        if lead in ratios:
            if params["mode"] == lax.GatherScatterMode.CLIP:
                index = jnp.minimum(index, jnp.asarray(shape[dim] - 1, index.dtype))
            elif params["mode"] == lax.GatherScatterMode.FILL_OR_DROP:
                index = jnp.where(index < shape[dim], index, jnp.asarray(jnp.iinfo(index.dtype).max, index.dtype))
        columns.append(index)
    return jnp.stack(columns, axis=-1)
