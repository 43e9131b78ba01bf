"""Factor rules against brute force: every equation run split, on real data, beside the same equation run whole.

A rule is wrong if a split it allows gives other results or other gradients than one device does, and it is missing if a
split it refuses would have given the right ones. The first is a bug of this package or of the rule's source; the second
only costs speed.

Cost: a few dozen splits compile together, unoptimised: about 30 ms a split. Each factor is split alone, since splits of
different factors do not meet. Known limits: loops and rematerialised regions are planned equation by equation, so what
is inside them is validated and they themselves are not; a missing split is looked for among the rule's factors only.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import Mesh, PartitionSpec
from met_equations import collect

from meshwright._jax.jaxpr import Equation, bind, inline, is_dropped
from meshwright._jax.random import is_key
from meshwright.lowering.follow import Follower
from meshwright.program.derivative import is_cut
from meshwright.program.factors import Factor, Rule
from meshwright.program.local import COMBINE, evaluate_local
from meshwright.program.rules import Rules, is_call
from meshwright.program.split import Split
from meshwright.sharding import Algorithm, Spec, algorithm_of

Problem = Literal["result", "gradient", "failure", "missing"]

_AXIS = "x"
_TOGETHER = 40  # splits compiled together: XLA's time grows faster than the program
# Relative to the largest magnitude; sums in another order differ by this much.
_TOLERANCE = {"float64": 1e-10, "float32": 2e-5, "complex64": 2e-5, "bfloat16": 4e-2, "float16": 5e-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Violation:
    """One split of one equation that is not what it should be.

    Args:
      primitive: name of the equation's primitive.
      problem: `result` or `gradient` (the split gives other numbers), `failure` (the split cannot be run), `missing`
        (the split would give the right numbers and is not offered).
      factor: the factor that was split.
      blocks: into how many blocks.
      detail: what was got and needed, in words.
    """

    primitive: str
    problem: Problem
    factor: int
    blocks: int
    detail: str


@dataclass(frozen=True, slots=True, kw_only=True)
class _Case:
    """One split of one equation."""

    equation: Equation
    operands: Sequence[Any]
    moving: tuple[bool, ...]  # which operands have a cotangent
    rule: Rule
    factor: int
    algorithm: Algorithm
    whole: int  # position of the unsplit equation


def validate_rule(equation: Equation, operands: Sequence[Any], *, blocks: int = 2) -> list[Violation]:
    """Validate one equation on concrete `operands`; see `validate_rules`."""
    return validate_rules([(equation, operands)], blocks=blocks)


def validate_function(function: Callable[..., Any], *args: Any, blocks: int = 2) -> list[Violation]:
    """Validate every equation met while evaluating `function(*args)`, those inside its loops and calls included."""
    return validate_rules(collect(inline(jax.make_jaxpr(function)(*args)), jax.tree.leaves(args)), blocks=blocks)


def validate_rules(equations: Iterable[tuple[Equation, Sequence[Any]]], *, blocks: int = 2) -> list[Violation]:
    """Run every split of every equation over `blocks` devices and compare with the whole equation.

    Args:
      equations: equations with the arrays to run them on; every literal has its value among the operands.
      blocks: size of the mesh axis; factors it does not divide are left out.

    Returns: what is wrong, in the order of the equations.

    Raises:
      ValueError: if JAX has fewer than `blocks` devices.
    """
    if len(jax.devices()) < blocks:
        raise ValueError(
            f"refused to validate rules over {blocks} devices: got {len(jax.devices())} devices, needed {blocks}; "
            f"try XLA_FLAGS=--xla_force_host_platform_device_count={blocks} in the environment"
        )
    equations = [(equation, [_on_host(x) for x in operands]) for equation, operands in equations]
    smooth = [_moving(equation) for equation, _ in equations]
    rules = Rules()
    rules.prepare([(equation, any(moving)) for (equation, _), moving in zip(equations, smooth, strict=True)])
    rules.prepare([(equation, False) for equation, _ in equations])
    cases = []
    for position, ((equation, operands), moving) in enumerate(zip(equations, smooth, strict=True)):
        rule = rules.rule(equation, differentiated=any(moving))
        forward = rules.rule(equation, differentiated=False)
        cases += _cases(equation, operands, moving, rule, blocks, position)
        if forward != rule:
            cases += _cases(equation, operands, (False,) * len(moving), forward, blocks, position)
    needed = _run_whole(equations, smooth, sorted({case.whole for case in cases}))
    follower = Follower(rules, {_AXIS: blocks})
    found = []
    for start in range(0, len(cases), _TOGETHER):
        found += _violations(cases[start : start + _TOGETHER], needed, follower, blocks)
    return found


def missing_splits(equation: Equation, operands: Sequence[Any], *, blocks: int = 2) -> list[Violation]:
    """Factors the rule keeps whole though the primitive, bound to blocks of them, gives blocks of its results.

    The blocks are evaluated one after the other on one device; a factor that is in no result is tried as a sum.
    """
    if is_call(equation) or any(is_key(atom.aval) for atom in equation.invars):
        return []
    rules = Rules()
    rules.prepare([(equation, False)])
    rule = rules.rule(equation, differentiated=False)
    whole = [np.asarray(r) for r in bind(equation, *operands)]
    found = []
    for index, factor in enumerate(rule.factors):
        opened = Rule(
            rule.operands,
            rule.results,
            tuple(Factor(f.size, "parallel") if i == index else f for i, f in enumerate(rule.factors)),
        )
        if factor.kind not in ("whole", "spatial") or factor.size % blocks or index not in opened.splittable:
            continue
        if _shape_free_blocks_agree(equation, operands, whole, opened, index, blocks):
            detail = f"factor {index} of size {factor.size} is {factor.kind}: {rule.operands} -> {rule.results}"
            found.append(
                Violation(
                    primitive=equation.primitive.name, problem="missing", factor=index, blocks=blocks, detail=detail
                )
            )
    return found


def _moving(equation: Equation) -> tuple[bool, ...]:
    """For each operand whether it can have a cotangent; a literal has none."""
    smooth = tuple(not hasattr(a, "val") and jnp.issubdtype(a.aval.dtype, jnp.inexact) for a in equation.invars)
    results = [jnp.issubdtype(v.aval.dtype, jnp.inexact) for v in equation.outvars]
    still = (False,) * len(smooth)
    if not any(smooth) or not any(results) or is_cut(equation.primitive.name):
        return still
    avals = [jax.ShapeDtypeStruct(a.aval.shape, a.aval.dtype) for a in equation.invars]
    try:
        jax.eval_shape(lambda *xs: _with_gradients(lambda *ys: bind(equation, *ys), xs, smooth, None), *avals)
    except (NotImplementedError, ValueError, TypeError):  # JAX has no derivative for it
        return still
    return smooth


def _with_gradients(
    run: Callable[..., Sequence[Any]],
    operands: Sequence[Any],
    moving: Sequence[bool],
    cotangents: Sequence[Any] | None,
) -> tuple[list[Any], list[Any]]:
    """Results of `run`, and the cotangents of its `moving` operands; `cotangents` default to ones."""
    if not any(moving):
        return list(run(*operands)), []

    def moved(*some: Any) -> tuple[list[Any], list[Any]]:
        given = iter(some)
        results = list(run(*(next(given) if m else x for x, m in zip(operands, moving, strict=True))))
        return [r for r in results if jnp.issubdtype(r.dtype, jnp.inexact)], results

    made, pull, results = jax.vjp(moved, *(x for x, m in zip(operands, moving, strict=True) if m), has_aux=True)
    return results, list(pull([jnp.ones_like(r) for r in made] if cotangents is None else list(cotangents)))


def _cases(
    equation: Equation, operands: Sequence[Any], moving: tuple[bool, ...], rule: Rule, blocks: int, whole: int
) -> list[_Case]:
    at_once = not is_call(equation) and COMBINE.get(equation.primitive.name) in ("max", "min")
    found = []
    for factor in rule.splittable:
        if rule.factors[factor].size % blocks == 0:
            axes = tuple((_AXIS,) if i == factor else () for i in range(len(rule.factors)))
            algorithm = algorithm_of(rule, axes, moving, combines_at_once=at_once)
            found.append(
                _Case(
                    equation=equation,
                    operands=operands,
                    moving=moving,
                    rule=rule,
                    factor=factor,
                    algorithm=algorithm,
                    whole=whole,
                )
            )
    return found


def _cotangents(equation: Equation) -> list[np.ndarray]:
    """Random cotangents of an equation's differentiable results."""
    random = np.random.default_rng(0)
    avals = [v.aval for v in equation.outvars if jnp.issubdtype(v.aval.dtype, jnp.inexact)]
    return [np.asarray(random.standard_normal(a.shape)).astype(a.dtype) for a in avals]


def _compiled(function: Callable[..., Any], *args: Any) -> Any:
    """The result of `function(*args)`, compiled in a hurry: each is run once."""
    options: dict[str, Any] = {"xla_backend_optimization_level": 0}
    return jax.jit(function).lower(*args).compile(compiler_options=options)(*args)


def _run_whole(
    equations: Sequence[tuple[Equation, Sequence[Any]]], smooth: Sequence[tuple[bool, ...]], positions: Sequence[int]
) -> dict[int, list[np.ndarray]]:
    """Results, then cotangents of operands, of unsplit equations, by position."""

    def run(chosen: Sequence[int]) -> Callable[..., Any]:
        def whole(groups: Sequence[Sequence[Any]]) -> list[Any]:
            made = []
            for i, group in zip(chosen, groups, strict=True):
                equation = equations[i][0]
                results, gradients = _with_gradients(
                    partial(bind, equation), group, smooth[i], _cotangents(equation) if any(smooth[i]) else []
                )
                made.append([*results, *gradients])
            return made

        return whole

    found: dict[int, list[np.ndarray]] = {}
    for start in range(0, len(positions), _TOGETHER):
        chosen = positions[start : start + _TOGETHER]
        made = _compiled(run(chosen), [equations[i][1] for i in chosen])
        found.update(zip(chosen, made, strict=True))
    return found


def _violations(
    cases: Sequence[_Case], needed: Mapping[int, Sequence[Any]], follower: Follower, blocks: int
) -> list[Violation]:
    failures: dict[int, str] = {}

    def local(groups: Sequence[Sequence[Any]], cotangents: Sequence[Sequence[Any]]) -> list[Any]:
        made = []
        for index, (case, group, back) in enumerate(zip(cases, groups, cotangents, strict=True)):
            want = [
                jax.ShapeDtypeStruct(spec.local_shape(atom.aval.shape, {_AXIS: blocks}), atom.aval.dtype)
                for atom, spec in _compared(case)
            ]
            try:
                got = _split_run(case, group, back, follower, blocks)
                if [(g.shape, g.dtype) for g in got] != [(w.shape, w.dtype) for w in want]:
                    raise ValueError(f"got {[(g.shape, str(g.dtype)) for g in got]}, needed {want}")
            except Exception as error:  # whatever a primitive raises on shards is this split's failure, not the run's
                failures[index] = f"{type(error).__name__}: {error}"
                got = [_zeros(w) for w in want]
            made.append(got)
        return made

    def dims(spec: Spec) -> PartitionSpec:
        return PartitionSpec(*(axes or None for axes in spec.dims))

    def smooth(case: _Case) -> list[Spec]:
        pairs = zip(case.equation.outvars, case.algorithm.results, strict=True)
        return [s for v, s in pairs if jnp.issubdtype(v.aval.dtype, jnp.inexact)] if any(case.moving) else []

    run = jax.shard_map(
        local,
        mesh=Mesh(np.array(jax.devices()[:blocks]), (_AXIS,)),
        in_specs=(
            [[dims(s) for s in case.algorithm.operands] for case in cases],
            [[dims(s) for s in smooth(case)] for case in cases],
        ),
        out_specs=[[dims(s) for _, s in _compared(case)] for case in cases],
        check_vma=False,
    )
    cotangents = [_cotangents(case.equation) if any(case.moving) else [] for case in cases]
    results = _compiled(run, [case.operands for case in cases], cotangents)
    found = []
    for index, (case, got) in enumerate(zip(cases, results, strict=True)):
        problem, detail = _compare(case, got, needed[case.whole])
        if index in failures:
            problem, detail = "failure", failures[index]
        if detail:
            source = f"{case.rule.operands} -> {case.rule.results} of {[a.aval.shape for a in case.equation.invars]}"
            found.append(
                Violation(
                    primitive=case.equation.primitive.name,
                    problem=problem,
                    factor=case.factor,
                    blocks=blocks,
                    detail=f"{detail}; {source}",
                )
            )
    return found


def _split_run(case: _Case, shards: Sequence[Any], back: Sequence[Any], follower: Follower, blocks: int) -> list[Any]:
    """Results, then cotangents of operands, on one device, summed where they are partial."""
    equation, algorithm = case.equation, case.algorithm
    if is_call(equation):
        run = partial(_call, follower, equation, algorithm, any(case.moving))
    else:
        split = Split(case.rule, algorithm.axes, {_AXIS: blocks})
        run = partial(_plain, equation, split)
    results, gradients = _with_gradients(run, shards, case.moving, back)
    moved = [s for s, m in zip(algorithm.operands, case.moving, strict=True) if m]
    return [
        *(_summed(r, s.partial) for r, s in zip(results, algorithm.results, strict=True)),
        *(_summed(g, s.broadcast) for g, s in zip(gradients, moved, strict=True)),
    ]


def _call(follower: Follower, equation: Equation, algorithm: Algorithm, moving: bool, *shards: Any) -> Sequence[Any]:
    return follower.call(equation, algorithm, shards, differentiated=moving)


def _plain(equation: Equation, split: Split, *shards: Any) -> Sequence[Any]:
    return evaluate_local(equation, split, shards)


def _on_host(x: Any) -> Any:
    """`x` where every mesh can be fed from it without a program of its own."""
    return x if is_key(jax.typeof(x)) else np.asarray(x)


def _zeros(aval: Any) -> Any:
    if is_key(aval):
        return jax.random.wrap_key_data(jnp.zeros((*aval.shape, 2), jnp.uint32))
    return jnp.zeros(aval.shape, aval.dtype)


def _summed(shard: Any, axes: frozenset[str]) -> Any:
    return lax.psum(shard, tuple(axes)) if axes else shard


def _compared(case: _Case) -> list[tuple[Any, Spec]]:
    """What is compared: results, then cotangents of operands, with how each lies on the mesh."""
    moving = zip(case.equation.invars, case.algorithm.operands, case.moving, strict=True)
    return [
        *zip(case.equation.outvars, case.algorithm.results, strict=True),
        *((atom, spec) for atom, spec, m in moving if m),
    ]


def _compare(case: _Case, got: Sequence[Any], need: Sequence[Any]) -> tuple[Problem, str]:
    """What is wrong, in words; empty if nothing is."""
    count = len(case.equation.outvars)
    for position, (a, b) in enumerate(zip(got, need, strict=False)):  # a split without gradients has fewer
        if position < count and is_dropped(case.equation.outvars[position]):
            continue
        error = difference(a, b)
        if error > _TOLERANCE.get(str(b.dtype), 0.0):
            what: Problem = "result" if position < count else "gradient"
            place = position if position < count else position - count
            return what, f"{what} {place} is off by {error:.3g} of its largest magnitude"
    return "result", ""


def difference(got: Any, need: Any) -> float:
    """Largest difference relative to the largest finite magnitude; infinite where NaNs or infinities do not agree."""
    if is_key(need):
        got, need = jax.random.key_data(got), jax.random.key_data(need)
    wide = np.complex128 if jnp.issubdtype(need.dtype, jnp.complexfloating) else np.float64
    a, b = np.asarray(got).astype(wide), np.asarray(need).astype(wide)
    if a.shape != b.shape:
        return np.inf
    finite = np.isfinite(b)
    if not np.array_equal(a[~finite], b[~finite], equal_nan=True):
        return np.inf
    a, b = a[finite], b[finite]
    return float(np.max(np.abs(a - b)) / max(np.max(np.abs(b)), 1e-6)) if a.size else 0.0


def _shape_free_blocks_agree(
    equation: Equation, operands: Sequence[Any], whole: Sequence[np.ndarray], rule: Rule, factor: int, blocks: int
) -> bool:
    def along(dims: Sequence[Sequence[int]]) -> int | None:
        return next((d for d, dim in enumerate(dims) if factor in dim), None)

    made = []
    for block in range(blocks):
        shards = []
        for x, dims in zip(operands, rule.operands, strict=True):
            d = along(dims)
            shards.append(x if d is None else np.split(np.asarray(x), blocks, axis=d)[block])
        try:
            made.append([np.asarray(r) for r in bind(equation, *shards)])
        except Exception:  # the primitive refuses blocks: its parameters hold the whole shape
            return False
    for position, dims in enumerate(rule.results):
        pieces = [results[position] for results in made]
        d = along(dims)
        joined = sum(pieces[1:], pieces[0]) if d is None else np.concatenate(pieces, axis=d)
        if difference(joined, whole[position]) > _TOLERANCE.get(str(whole[position].dtype), 0.0):
            return False
    return True
