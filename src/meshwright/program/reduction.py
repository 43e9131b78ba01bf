"""Whether a loss, or a result beside it, is a mean or a sum over the batch, from the program itself.

The gradient of a batch is the mean of its microbatches' gradients for a mean, their sum for a sum; taking one for the
other trains with a wrong learning rate and no error. A loss of degree 0 in the size of the batch is a mean, one of
degree 1 a sum (`growth`), if it is linear in sums over the examples: a quotient of two sums, the root of a mean or a
maximum is neither. Counts and other statistics that depend on the batch alone are those of the whole batch
(`batch_statistics`), so that a masked mean is a mean.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal

import jax.numpy as jnp

from .._jax.jaxpr import ClosedJaxpr, Equation, Jaxpr, calling_line, is_literal, open_jaxpr, source_line
from .._jax.plain import programs_in
from ..errors import PlanError
from .growth import Growth, Walk, growths_of, is_batched
from .rules import Rules

# How a result combines over microbatches; "same": any of them has it.
Reduction = Literal["mean", "sum", "max", "min", "same"]

_PASSED_ON = ("convert_element_type", "reshape", "squeeze", "copy", "stop_gradient", "reduce_max", "reduce_min")


@dataclass(frozen=True, slots=True, kw_only=True)
class Results:
    """What a loss function makes, at the full batch and at the size of a microbatch.

    Args:
      full: the loss function at the full batch.
      small: the same at the size of a microbatch.
      microbatches: how many of the second make the first.
      growths: of each result.
      piece: what the number of microbatches, times that of the blocks that the batch lies in, has to divide; 0 if
        nothing has the batch.
    """

    full: Jaxpr
    small: Jaxpr
    microbatches: int
    growths: Sequence[Growth]
    piece: int = 0


def results_of(
    full: ClosedJaxpr, small: ClosedJaxpr, microbatches: int, split_dims: Sequence[int | None], rules: Rules,
    degrees: Sequence[int] = (),
) -> Results:  # fmt: skip
    """How the results of a loss function depend on the batch.

    Args:
      full: as of `Results`.
      small: the same.
      microbatches: the same.
      split_dims: for each leading input, the dim that is the batch.
      rules: the factor rules of the program.
      degrees: of each input behind these, which are statistics of the whole batch.
    """
    walk = Walk(microbatches, rules)
    growths = growths_of(full, small, walk, split_dims, degrees)
    return Results(
        full=open_jaxpr(full), small=open_jaxpr(small), microbatches=microbatches, growths=growths, piece=walk.piece
    )


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
    if loss.meet is None and (other := _first_other(a, results.small)) is not None:
        raise PlanError(
            refused=f"microbatches={microbatches}",
            got=f"a loss function that computes in another way at the size of a microbatch: {len(results.small.eqns)} "
            f"operations in place of {len(a.eqns)}, {other}",
            needed="the same operations at any batch size", where=last,
            try_="jax.vmap, jax.lax.map or whole arrays in place of Python code that asks for the batch size; another "
            'number of microbatches; or reduction="mean" or "sum"',
        )  # fmt: skip
    if loss.meet is not None and (found := _check_at(a, loss.meet)) is not None:
        check, caller = found
        made = {var: i for i, equation in enumerate(a.eqns) for var in equation.outvars}
        of = next(
            (line for e in _behind(a, made, caller.invars[::-1]) if (line := calling_line(e))), "the loss function"
        )
        raise PlanError(
            refused=f"microbatches={microbatches}",
            got=f"a check of values of the batch in the loss function ({check.primitive.name} in a branch that they "
            "choose, as equinox.error_if has it), which a microbatch makes of its own examples alone",
            needed="a loss whose examples do not need those of other microbatches",
            where=f"{of}, checked at {source_line(check)}",
            try_="a check of what the loss function returns, outside of it; microbatches=1; or "
            'reduction="mean" to check, and to let examples meet, within each microbatch alone',
        )  # fmt: skip
    if loss.meet is not None:
        raise PlanError(
            refused=f"microbatches={microbatches}", got="a loss whose examples meet each other in the batch (they are "
            "compared, sorted or shifted, or normalised by statistics of the batch that depend on parameters)",
            needed="a loss whose examples do not need those of other microbatches", where=loss.meet or last,
            try_='microbatches=1, or reduction="mean" to let examples meet within each microbatch alone',
        )  # fmt: skip
    raise PlanError(
        refused=f"microbatches={microbatches}",
        got="a loss that is not linear in its sums over the batch (a product or quotient of two, the root of a mean)"
        if bent
        else "a loss that is neither plainly a mean nor plainly a sum over the batch",
        needed="to know how the losses of microbatches combine",
        where=last,
        try_='reduction="mean" (every microbatch weighs the same), reduction="sum", or dividing by a count that does '
        "not depend on the examples",
    )


def _first_other(full: Jaxpr, small: Jaxpr) -> str | None:
    """The first operation of the whole batch that a microbatch has not, in words; None if all are alike."""
    for number, equation in enumerate(full.eqns):
        if number >= len(small.eqns) or small.eqns[number].primitive.name != equation.primitive.name:
            return f"first {equation.primitive.name} at {source_line(equation) or 'the loss function'}"
    return None if len(full.eqns) == len(small.eqns) else "more of them at the end"


def _check_at(program: Any, line: str) -> tuple[Equation, Equation] | None:
    """The callback in a branch at a line, where that is why examples meet there, and the equation of the program that
    has it."""
    for equation in open_jaxpr(program).eqns:
        for one in programs_in(equation):
            if equation.primitive.name == "cond" and source_line(equation) == line:
                for inside in open_jaxpr(one).eqns:
                    if inside.primitive.name in ("pure_callback", "io_callback"):
                        return inside, equation
            if (found := _check_at(one, line)) is not None:
                return found[0], equation
    return None


# Of truths one is the largest where any is, the least where all are.
_EXTREMES: Mapping[str, Reduction] = {
    "reduce_max": "max", "reduce_min": "min", "reduce_or": "max", "reduce_and": "min",
}  # fmt: skip


class ReductionWarning(UserWarning):
    """A result whose value over the batch does not follow from its values over microbatches."""


def aux_reductions(
    results: Results, *, each: int = 0, accepted: bool = False
) -> tuple[tuple[Reduction, ...], tuple[str, ...]]:
    """How each result beside the loss combines over microbatches, and notes on those that do not, with their lines, of
    which it also warns.

    Args:
      results: of the loss function.
      each: how many of them, the last, are rows of which each microbatch keeps its own.
      accepted: whether the user lets examples meet within each microbatch alone.

    Raises:
      PlanError: where examples of the batch meet in one, and that is not accepted.
    """
    a, b, microbatches, growths = results.full, results.small, results.microbatches, results.growths
    made = {var: i for i, equation in enumerate(a.eqns) for var in equation.outvars}
    found: list[Reduction] = []
    notes: list[str] = []
    whole = len(a.outvars) - each
    for x, y, growth in zip(a.outvars[1:whole], b.outvars[1:whole], growths[1:whole], strict=True):
        if is_batched(x, y) and (
            growth.lie.runs > 1 or growth.lie.majors or (growth.meet is not None and not accepted)
        ):
            raise PlanError(
                refused=f"microbatches={microbatches}",
                got=f"a result of shape {x.aval.shape} in which examples of the batch meet each other"
                if growth.meet is not None
                else f"a result of shape {x.aval.shape} that does not lead with the batch in the dim that has it",
                needed="results beside the loss whose examples do not need those of other microbatches",
                where=_line(a, made, x), try_="microbatches=1, or computing it outside the loss function",
            )  # fmt: skip
        numbers = jnp.issubdtype(x.aval.dtype, jnp.number)
        extreme = _extreme(a, b, made, x)
        truth = x.aval.dtype == jnp.bool_
        if is_batched(x, y) or not (numbers or truth) or (growth.degree == 0 and not growth.varies):
            found.append("same")
        elif extreme is not None:
            found.append(extreme)
        elif growth.degree == 1 and growth.sums < 2 and numbers:
            found.append("sum")
        else:
            mean = jnp.issubdtype(x.aval.dtype, jnp.inexact)
            if (growth.degree != 0 or growth.sums == 2 or not mean) and not (accepted and growth.meet is not None):
                notes.append(
                    f"the result computed at {_line(a, made, x)} is neither a mean nor a sum, maximum or minimum over "
                    f"the batch: with microbatches it is {'their mean' if mean else 'that of the last one'}"
                )
                warnings.warn(notes[-1], ReductionWarning, stacklevel=2)
            found.append("mean" if mean else "same")
    return (*found, *(("same",) * each)), tuple(notes)


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
    return next((line for one in _behind(jaxpr, made, [atom]) if (line := source_line(one))), "the loss function")


def _behind(jaxpr: Jaxpr, made: Mapping[Any, int], atoms: Sequence[Any]) -> Iterator[Equation]:
    """The equations that make some values, the nearest first; not all of a large program."""
    waiting = list(atoms)
    for one in waiting:
        if not is_literal(one) and one in made:
            equation = jaxpr.eqns[made[one]]
            yield equation
            waiting.extend(equation.invars if len(waiting) < 100 else ())
