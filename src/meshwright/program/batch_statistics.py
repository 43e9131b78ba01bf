"""Statistics of the batch that depend on no parameter, computed once for the whole batch and not in every microbatch.

A loss divides by a count of tokens that are no padding, or reads advantages normalised by their mean and deviation over
the batch. In microbatches each would count its own. But such values need nothing that is trained: they are functions of
the batch alone. `with_batch_statistics` moves them in front of the loss, where the whole batch is at hand, and gives
them to every microbatch as an input. Losses that are then linear in sums over examples are as exact in microbatches as
any plain mean.

A count (of degree 1 in the size of the batch: `growth`) comes to a microbatch divided by the number of microbatches,
as if each had its share: a masked mean is then a mean over microbatches, like the regularisation beside it. Whether
that makes the loss a mean, and not something else, is found afterwards from what became of the program, whatever was
assumed of the degree.

A result beside the loss that depends on the size of the batch alone (`seen + x.shape[0]`) is a statistic too.

Known limits: values inside of loops and branches stay where they are, as do those that random numbers or products of
matrices are behind (the outputs of another model).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from .._jax.boundary import Boundaries
from .._jax.jaxpr import ClosedJaxpr, Equation, Jaxpr, Var, consts_of, is_literal, open_jaxpr
from .._jax.plain import programs_in
from .._jax.random import is_key
from .growth import Walk, degrees_of
from .rules import Rules

# More than a pass over the batch: not worth having twice.
_DEAR = frozenset(
    """attention conv_general_dilated custom_partitioning custom_vjp_call dot_general fft pallas_call ragged_dot_general
    scan while""".split()  # noqa: SIM905 (a table)
)


@dataclass(frozen=True, slots=True, kw_only=True)
class BatchStatistics:
    """A loss function that reads statistics of the batch as inputs, behind the others that are not differentiated.

    Args:
      full: the loss function at the full batch.
      small: the same at the size of a microbatch.
      statistics: the statistics as a program of the inputs that are not differentiated, at the full batch.
      degrees: of each statistic the power of the batch size that it is taken to grow with.
    """

    full: ClosedJaxpr
    small: ClosedJaxpr
    statistics: ClosedJaxpr
    degrees: tuple[int, ...]


def with_batch_statistics(
    full: ClosedJaxpr, small: ClosedJaxpr, microbatches: int, split_dims: Sequence[int | None], rules: Rules, *,
    sizes_alone: bool = False,
) -> BatchStatistics | None:  # fmt: skip
    """Find the statistics; None if there are none.

    Args:
      full: the loss function at the full batch.
      small: the same at the size of a microbatch.
      microbatches: how many of the second make the first.
      split_dims: for each leading input, which is not differentiated, the dim that is the batch.
      rules: the factor rules of the program.
      sizes_alone: only results that depend on the size of the batch, and on no example of it.
    """
    a, b = open_jaxpr(full), open_jaxpr(small)
    if [e.primitive.name for e in a.eqns] != [e.primitive.name for e in b.eqns]:
        return None
    found = _statistics(a, b, split_dims, sizes_alone=sizes_alone)
    if not found:
        return None
    degrees = degrees_of(full, small, Walk(microbatches, rules), split_dims)
    wanted = [a.eqns[place].outvars[position] for place, position in found]
    # Whole numbers and truths have no share: those of the whole batch stay what they are.
    labels = tuple(int(degrees.get(var) == 1 and jnp.issubdtype(var.aval.dtype, jnp.floating)) for var in wanted)
    num_consts = len(split_dims)
    program = ClosedJaxpr(
        a.replace(
            invars=a.invars[:num_consts], outvars=wanted, eqns=_behind(a, wanted),
            debug_info=a.debug_info.with_unknown_names(),
        ),
        consts_of(full),
    )  # fmt: skip
    return BatchStatistics(
        full=_given(full, wanted, num_consts),
        small=_given(small, [b.eqns[place].outvars[position] for place, position in found], num_consts),
        statistics=program,
        degrees=labels,
    )


def as_of_a_microbatch(
    core: ClosedJaxpr, boundaries: Boundaries, degrees: Sequence[int], first: int, microbatches: int
) -> tuple[ClosedJaxpr, Boundaries]:
    """The program of a microbatch whose inputs from `first` on are statistics of the whole batch: of counts it takes
    its share, before all else. And the layer boundaries, which were those of `core`."""
    jaxpr = open_jaxpr(core)
    renamed: dict[Any, Any] = {}
    shares: list[Equation] = []
    for var, degree in zip(jaxpr.invars[first:], degrees, strict=False):
        if degree == 1:
            share = jax.make_jaxpr(lambda x: x / microbatches)(jax.ShapeDtypeStruct(var.aval.shape, var.aval.dtype))
            (equation,) = open_jaxpr(share).eqns
            renamed[var] = Var(var.aval)
            shares.append(equation.replace(invars=[var, *equation.invars[1:]], outvars=[renamed[var]]))
    by = len(shares)
    moved = Boundaries(before=[cut + by for cut in boundaries.before], scans=[scan + by for scan in boundaries.scans])
    return ClosedJaxpr(_reading(jaxpr, renamed, shares), consts_of(core)), moved


def with_whole_literals(full: ClosedJaxpr, small: ClosedJaxpr) -> ClosedJaxpr:
    """The program of a microbatch whose results beside the loss are those of the whole batch where they are numbers
    that are written into the program (`1 / x.shape[0]`)."""
    a, b = open_jaxpr(full), open_jaxpr(small)
    others = [x if is_literal(x) and is_literal(y) else y for x, y in zip(a.outvars[1:], b.outvars[1:], strict=True)]
    return ClosedJaxpr(b.replace(outvars=[b.outvars[0], *others]), consts_of(small))


def _statistics(
    full: Jaxpr, small: Jaxpr, split_dims: Sequence[int | None], *, sizes_alone: bool
) -> list[tuple[int, int]]:
    """The statistics, as positions of an equation and of its result: what depends on the batch and on nothing that is
    differentiated, does not grow with it, and is read by something else than another such value. Of what depends on the
    size of the batch alone, results."""
    of_inputs = set(full.invars[: len(split_dims)]) | set(full.constvars)
    of_batch = {var for var, dim in zip(full.invars, split_dims, strict=False) if dim is not None}
    of_size: set[Any] = set()
    pooled: dict[Any, tuple[int, int]] = {}
    read: dict[Any, None] = {}
    places: dict[Any, tuple[int, int]] = {}
    for place, (a, b) in enumerate(zip(full.eqns, small.eqns, strict=True)):
        atoms = [atom for atom in a.invars if not is_literal(atom)]
        plain = all(atom in of_inputs for atom in atoms) and a.primitive.name not in _DEAR
        plain = plain and not a.primitive.name.startswith(("random_", "rng_", "threefry")) and not a.effects
        grows = [x.aval.shape != y.aval.shape for x, y in zip(a.outvars, b.outvars, strict=True)]
        if plain:
            of_inputs.update(a.outvars)
            fixed = {v: (place, i) for i, v in enumerate(a.outvars) if not grows[i]}
            places.update(fixed)
            if any(atom in of_batch for atom in atoms):
                of_batch.update(a.outvars)
                pooled.update(fixed)
            elif any(grows) or any(atom in of_size for atom in atoms) or _has_other_literals(a, b):
                of_size.update(a.outvars)
        if not plain or any(v not in pooled for v in a.outvars):
            read.update(dict.fromkeys(atom for atom in atoms if atom in pooled))
    results = [v for v in full.outvars if not is_literal(v) and v in places]
    read.update(dict.fromkeys(v for v in results if v in pooled))
    read = {} if sizes_alone else read
    read.update(dict.fromkeys(v for v in results if v in of_size))
    return [places[var] for var in read if _is_number(var)]


def _has_other_literals(full: Equation, small: Equation) -> bool:
    """Whether numbers that are written into an equation, or a program in it, differ."""
    pairs = zip(full.invars, small.invars, strict=True)
    if any(is_literal(x) and is_literal(y) and bool(np.any(x.val != y.val)) for x, y in pairs):
        return True
    inside = zip(programs_in(full), programs_in(small), strict=False)
    return any(
        _has_other_literals(x, y)
        for ours, theirs in inside
        for x, y in zip(open_jaxpr(ours).eqns, open_jaxpr(theirs).eqns, strict=False)
        if len(x.invars) == len(y.invars)
    )


def _is_number(var: Any) -> bool:
    return not is_key(var.aval)


def _behind(jaxpr: Jaxpr, wanted: Sequence[Any]) -> list[Equation]:
    """The equations that some values need."""
    needed, kept = set(wanted), []
    for equation in reversed(jaxpr.eqns):
        if any(var in needed for var in equation.outvars):
            kept.append(equation)
            needed.update(atom for atom in equation.invars if not is_literal(atom))
    return kept[::-1]


def _given(program: ClosedJaxpr, wanted: Sequence[Any], first: int) -> ClosedJaxpr:
    """The program with some values as inputs from position `first` on; what makes them is left for dead code."""
    jaxpr = open_jaxpr(program)
    renamed = {var: Var(var.aval) for var in wanted}
    read = _reading(jaxpr, renamed, [])
    return ClosedJaxpr(
        read.replace(
            invars=[*jaxpr.invars[:first], *renamed.values(), *jaxpr.invars[first:]],
            debug_info=jaxpr.debug_info.with_unknown_names(),
        ),
        consts_of(program),
    )  # fmt: skip


def _reading(jaxpr: Jaxpr, renamed: dict[Any, Any], before: Sequence[Equation]) -> Jaxpr:
    """The program that reads other variables in the place of some, behind some more equations."""

    def read(atom: Any) -> Any:
        return atom if is_literal(atom) else renamed.get(atom, atom)

    equations = [e.replace(invars=[read(atom) for atom in e.invars]) for e in jaxpr.eqns]
    return jaxpr.replace(
        eqns=[*before, *equations], outvars=[read(atom) for atom in jaxpr.outvars],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )  # fmt: skip


def marked_with(outer: ClosedJaxpr, marker: int, found: BatchStatistics, num_consts: int) -> tuple[ClosedJaxpr, int]:
    """The whole step with the statistics in front of its marked call, which reads them; and where the call is now."""
    jaxpr = open_jaxpr(outer)
    marked = jaxpr.eqns[marker]
    closed, program = found.statistics, open_jaxpr(found.statistics)
    env: dict[Any, Any] = dict(zip(program.invars, marked.invars[:num_consts], strict=True))
    constvars = {var: Var(var.aval) for var in program.constvars}
    env.update(constvars)

    def read(atom: Any) -> Any:
        return atom if is_literal(atom) else env[atom]

    before: list[Equation] = []
    for equation in program.eqns:
        made = [Var(var.aval) for var in equation.outvars]
        before.append(equation.replace(invars=[read(a) for a in equation.invars], outvars=made))
        env.update(zip(equation.outvars, made, strict=True))
    statistics = [read(atom) for atom in program.outvars]
    call = marked.replace(
        invars=[*marked.invars[:num_consts], *statistics, *marked.invars[num_consts:]],
        params={**marked.params, "jaxpr": found.full, "num_consts": num_consts + len(statistics)},
    )
    equations = [*jaxpr.eqns[:marker], *before, call, *jaxpr.eqns[marker + 1 :]]
    whole = jaxpr.replace(
        eqns=equations, constvars=[*jaxpr.constvars, *constvars.values()],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )  # fmt: skip
    return ClosedJaxpr(whole, [*consts_of(outer), *consts_of(closed)]), marker + len(before)
