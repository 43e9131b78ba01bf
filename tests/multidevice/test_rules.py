"""Every factor rule in use gives, split, the results and gradients of one device."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from met_equations import collect
from rule_cases import GROUPS, normal
from rule_validation import Violation, missing_splits, validate_function, validate_rules

import meshwright.zoo as zoo
from meshwright._jax.grad import value_and_grad_p
from meshwright._jax.jaxpr import ClosedJaxpr, Equation, eliminate_dead_code, evaluate, inline, open_jaxpr
from meshwright._jax.random import is_key
from meshwright.program import local


def kind(equation: Equation) -> tuple[Any, ...]:
    """Equal for equations that one validation covers."""
    programs = ("jaxpr", "thunk", "bwd", "fwd", "update_jaxpr")
    params = str({k: v for k, v in equation.params.items() if not any(word in k for word in programs)})
    if equation.params.keys() & {"call_jaxpr", "branches", "body_jaxpr"}:
        params += str(equation)
    avals = [atom.aval for atom in equation.invars]
    shapes = {a.shape for a in avals if a.shape}
    elementwise = len(shapes) == 1 and not equation.params.keys() - {"accuracy"}
    ranks = () if elementwise else tuple(a.ndim for a in avals)
    return equation.primitive.name, params, ranks, tuple(str(a.dtype) for a in avals)


def told(violations: Sequence[Violation]) -> str:
    return "\n".join(f"{v.primitive}, factor {v.factor} in {v.blocks}: {v.problem}, {v.detail}" for v in violations)


@pytest.mark.parametrize("group", GROUPS)
def test_rules_of_hand_written_cases(group: str) -> None:
    functions = [function for function, _ in GROUPS[group].values()]
    args = [args for _, args in GROUPS[group].values()]
    traced = jax.make_jaxpr(lambda args: [f(*a) for f, a in zip(functions, args, strict=True)])(args)
    equations = collect(inline(traced), jax.tree.leaves(args), key=kind)
    assert len(equations) > len(functions) / 2
    violations = validate_rules(equations, blocks=2)
    if group in ("indexing", "elementwise", "shapes"):  # where a block's position enters
        positional = [
            (e, x) for e, x in equations if e.primitive.name in ("gather", "scatter-add", "random_bits", "iota", "pad")
        ]
        violations += validate_rules(positional, blocks=4)
    assert not violations, told(violations)


def zoo_programs(names: Sequence[str], *, derivative: bool) -> Iterator[ClosedJaxpr]:
    """The losses of these models, or their derivatives as JAX writes them."""
    for name in names:
        target = zoo.build(name)
        step = inline(jax.make_jaxpr(target.step)(target.example_state, target.example_batch))
        for equation in step.jaxpr.eqns:
            if equation.primitive is value_and_grad_p:
                core = eliminate_dead_code(inline(equation.params["jaxpr"]))
                if not derivative:
                    yield core
                    continue
                avals = [jax.ShapeDtypeStruct(v.aval.shape, v.aval.dtype) for v in core.jaxpr.invars]
                wrt = tuple(range(equation.params["num_consts"], len(avals)))
                loss = lambda *leaves, core=core: evaluate(core, *leaves)[0]  # noqa: E731
                yield inline(jax.make_jaxpr(jax.grad(loss, argnums=wrt))(*avals))


def equations_of(program: Any) -> Iterator[Equation]:
    for equation in open_jaxpr(program).eqns:
        inside = [open_jaxpr(leaf) for leaf in jax.tree.leaves(dict(equation.params))]
        for body in inside:
            if hasattr(body, "eqns") and any(v.aval.shape for v in body.invars):
                yield from equations_of(body)
        if equation.primitive.name != "scan" and "remat" not in equation.primitive.name:
            yield equation


def size(equation: Equation) -> int:
    return sum(atom.aval.size for atom in (*equation.invars, *equation.outvars))


def made_up(equation: Equation) -> list[Any]:
    """Random operands; integers are small enough to be indices of anything."""
    random = np.random.default_rng(0)

    def array(aval: Any) -> Any:
        if is_key(aval):
            return jax.random.split(jax.random.key(1), aval.shape) if aval.shape else jax.random.key(1)
        if jnp.issubdtype(aval.dtype, jnp.inexact):
            return jnp.asarray(random.uniform(0.1, 1.0, aval.shape), aval.dtype)
        return jnp.asarray(random.integers(0, 2, aval.shape), aval.dtype)

    return [atom.val if hasattr(atom, "val") else array(atom.aval) for atom in equation.invars]


TINY = [name for name in zoo.names() if name.endswith("-tiny")]


@pytest.mark.slow  # in `make test` the cases above, of every family of operators
@pytest.mark.parametrize(("names", "derivative"), [(TINY, False), (TINY, True)])
def test_rules_of_the_reference_models(names: Sequence[str], *, derivative: bool) -> None:
    distinct: dict[Any, Equation] = {}
    for program in zoo_programs(names, derivative=derivative):
        for equation in equations_of(program):
            known = distinct.setdefault(kind(equation), equation)
            if size(equation) < size(known):
                distinct[kind(equation)] = equation
    assert len(distinct) > 100
    violations = validate_rules([(equation, made_up(equation)) for equation in distinct.values()], blocks=2)
    assert not violations, told(violations)


def test_a_wrong_result_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def without_offset(equation: Equation, split: Any, operands: Sequence[Any]) -> Sequence[Any]:
        shape = split.local_shape(equation.outvars[0].aval.shape, split.rule.results[0])
        return (jax.lax.broadcasted_iota(jnp.int32, shape, equation.params["dimension"]),)

    monkeypatch.setitem(local._EVALUATORS, "iota", without_offset)
    found = validate_function(lambda x: x + jnp.arange(8), jnp.zeros(8, jnp.int32))
    assert [(v.primitive, v.problem) for v in found] == [("iota", "result")]


def test_a_wrong_gradient_is_reported(monkeypatch: pytest.MonkeyPatch) -> None:
    def deaf(equation: Equation, split: Any, operands: Sequence[Any]) -> Sequence[Any]:
        return (jax.lax.stop_gradient(jnp.sin(operands[0])),)

    monkeypatch.setitem(local._EVALUATORS, "sin", deaf)
    found = validate_function(jnp.sin, normal(8))
    assert [(v.primitive, v.problem) for v in found] == [("sin", "gradient")]


def test_a_missing_split_is_reported() -> None:
    # The dims that stay in place are split by the rule; the reversed one gives blocks of the result in another order.
    (reversal,) = jax.make_jaxpr(lambda x: jax.lax.rev(x, (0,)))(jnp.zeros((8, 4))).jaxpr.eqns
    assert missing_splits(reversal, [normal(8, 4)]) == []
    # A product of elements has no collective; tried as a sum it does not agree either.
    (product,) = jax.make_jaxpr(lambda x: jnp.prod(x, 0))(jnp.zeros((8, 4))).jaxpr.eqns
    assert missing_splits(product, [normal(8, 4)]) == []
