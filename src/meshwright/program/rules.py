"""Factor rules of all equations of a program: Shardy's for plain ones, composed ones for calls that are kept whole.

A *call* is an equation with a program inside that is executed as one operator (`custom_jvp_call`, `custom_vjp_call`,
`cond`, `while`). It may be split along those dims that pass through all of its equations, forward and backward. Of a
function with a derivative of its own they may meet reductions, which collectives inside complete (`Rule.inside`).
"""

from __future__ import annotations

import warnings
from collections.abc import Hashable, Iterable, Sequence, Set as AbstractSet
from math import prod
from typing import Any, Literal

from .._jax.effects import first_effect, in_custom_derivative
from .._jax.jaxpr import (
    Equation,
    Jaxpr,
    Vjp,
    custom_jvp_of,
    eliminate_dead_code,
    inline,
    is_literal,
    is_remat,
    open_jaxpr,
    scan_parts,
    source_line,
    vjp_parts,
)
from .._jax.pallas import grid_of, is_pallas_call
from .._jax.shardy import lower_with_rules
from .._jax.sorted_rows import is_sorted_rows
from .factors import Composer, Rule, compose, whole_rule
from .flops import equation_flops
from .graph import CALLS
from .kernels import is_kernel, kernel_rule
from .local import ON_ELEMENTS, has_keys, overflows, restrict
from .sorted_rule import sorted_rule

# One element in, one out; a partial sum passes through unchanged.
_LINEAR = ("convert_element_type", "reshape", "transpose", "neg", "broadcast_in_dim", "squeeze", "reduce_sum")


class ReplicationWarning(UserWarning):
    """An operator is run whole on every device because its factors are unknown."""


def is_call(equation: Equation) -> bool:
    """Whether an equation holds a program and is run as one operator."""
    return equation.primitive.name in CALLS


def call_bodies(equation: Equation) -> list[Jaxpr]:
    """The programs inside a call, forward only."""
    params = equation.params
    match equation.primitive.name:
        case "cond":
            return [open_jaxpr(branch) for branch in params["branches"]]
        case "while":
            return [open_jaxpr(params["cond_jaxpr"]), open_jaxpr(params["body_jaxpr"])]
        case "custom_jvp_call" | "custom_vjp_call":
            return [open_jaxpr(inline(params["call_jaxpr"], caller=equation))]
    raise AssertionError(equation.primitive.name)


# Of equations that hold no program the rule is a fact about their signature, the same for all programs: what Shardy
# says, and what of it can be executed on shards.
_SHARDY: dict[tuple[Any, ...], Rule] = {}
_RESTRICTED: dict[tuple[Any, ...], Rule] = {}


class Rules:
    """Factor rules by equation, each distinct equation analysed once.

    Use: `prepare` with every equation that will be asked for (one lowering for all), then `rule`.
    """

    def __init__(self) -> None:
        self._plain: dict[tuple[Any, ...], Rule] = {}
        self._rules: dict[tuple[Any, ...], Rule] = {}
        # By identity: the pieces of a scan have the same equations. Who is in here lives as long.
        self._signatures: dict[int, tuple[Equation, tuple[Any, ...]]] = {}
        self._derivatives: dict[tuple[Any, ...], Vjp] = {}

    def prepare(self, equations: Iterable[tuple[Equation, bool]]) -> None:
        """Analyse equations; the flag says whether a cotangent passes through."""
        wanted: dict[tuple[Any, ...], Equation] = {}
        for equation, differentiated in equations:
            for plain in self._plain_equations(equation, differentiated):
                key = self._signature(plain)
                if key in _SHARDY:
                    self._plain[key] = _SHARDY[key]
                elif key not in self._plain:
                    wanted.setdefault(key, plain)
        lowerable = {k: eqn for k, eqn in wanted.items() if not has_keys(eqn) and not is_kernel(eqn)}
        for key, eqn in wanted.items():
            if is_kernel(eqn):
                self._plain[key], why = kernel_rule(eqn)
                if _runs_whole(self._plain[key]):
                    _warn_whole(eqn, why)
            elif key not in lowerable:
                self._plain[key] = _key_rule(eqn)
        for (key, eqn), lowered in zip(lowerable.items(), _lower(list(lowerable.values())), strict=True):
            operands = [atom.aval.shape for atom in eqn.invars]
            if lowered is None:
                self._plain[key] = whole_rule(operands, [v.aval.shape for v in eqn.outvars])
            else:
                rule = compose(lowered, operands, masks=eqn.primitive.name in ("gather", "scatter-add"))
                unknown = [op.name for op in lowered.ops if op.rule is None and op.operands]
                if unknown and eqn.primitive.name in ON_ELEMENTS:
                    rule = _elements_rule(eqn) or rule  # lowered to a loop (the incomplete gamma function)
                if unknown and eqn.primitive.name != "top_k" and _runs_whole(rule):
                    _warn_whole(eqn, f"no sharding rule is known for {unknown[0]}")
                elif _is_lasting(key):
                    _SHARDY[key] = rule  # every program is warned of the others
                self._plain[key] = rule

    def _plain_equations(self, equation: Equation, differentiated: bool) -> Iterable[Equation]:
        if is_call(equation):
            for body in self._programs(equation, differentiated):
                for inner in body.eqns:
                    yield from self._plain_equations(inner, False)
        elif equation.primitive.name == "scan":
            for inner in open_jaxpr(scan_parts(equation).body).eqns:
                yield from self._plain_equations(inner, False)
        elif is_remat(equation) or is_sorted_rows(equation):
            for inner in open_jaxpr(equation.params["jaxpr"]).eqns:
                yield from self._plain_equations(inner, False)
        else:
            yield equation

    def _programs(self, equation: Equation, differentiated: bool) -> list[Jaxpr]:
        if differentiated and equation.primitive.name != "while":
            parts = self.derivative(equation)
            return [open_jaxpr(parts.forward), open_jaxpr(parts.backward)]
        return call_bodies(equation)

    def derivative(self, equation: Equation) -> Vjp:
        """The programs behind a call that is differentiated. They are traced when the equation is prepared: under a
        mesh JAX would remember a rule's program for that mesh alone."""
        key = self._signature(equation)
        if key not in self._derivatives:
            parts = vjp_parts(equation)
            effect = first_effect(parts.forward) or first_effect(parts.backward)
            if effect is not None:
                raise in_custom_derivative(effect)
            self._derivatives[key] = parts
        return self._derivatives[key]

    def backward_flops(self, equation: Equation) -> float | None:
        """FLOPs of products in one run of the derivative of a call that is differentiated; None of anything else."""
        if equation.primitive.name not in ("custom_jvp_call", "custom_vjp_call"):
            return None
        inside = [equation_flops(inner) for inner in open_jaxpr(self.derivative(equation).backward).eqns]
        return sum(flops for flops, is_product in inside if is_product)

    def rule(self, equation: Equation, *, differentiated: bool) -> Rule:
        """The rule of one equation, restricted to what can be executed on shards."""
        key = (self._signature(equation), differentiated)
        if key not in self._rules:
            if is_sorted_rows(equation):
                rule = sorted_rule(equation, lambda inner: self.rule(inner, differentiated=False))
            elif is_call(equation) or equation.primitive.name == "scan" or is_remat(equation):
                rule = self._call_rule(equation, differentiated)
            else:
                plain = self._plain[key[0]]
                shared = (plain, *key)
                rule = _RESTRICTED.get(shared)
                if rule is None:
                    rule = plain
                    if not has_keys(equation) and not is_kernel(equation):
                        rule = restrict(equation, plain, differentiated=differentiated)
                    if _is_lasting(key[0]):
                        _RESTRICTED[shared] = rule
                if equation.primitive.name == "top_k":
                    rule = _top_k_rule(equation)
                elif equation.primitive.name == "pad":
                    rule = _pad_rule(equation)
            self._rules[key] = rule
        return self._rules[key]

    def _signature(self, equation: Equation) -> tuple[Any, ...]:
        if id(equation) not in self._signatures:
            self._signatures[id(equation)] = equation, _signature(equation)
        return self._signatures[id(equation)][1]

    def _call_rule(self, equation: Equation, differentiated: bool) -> Rule:
        composer = Composer()
        operands = [composer.tensor(a.aval.shape) for a in equation.invars]
        results = [composer.tensor(v.aval.shape) for v in equation.outvars]
        name = equation.primitive.name
        if differentiated and name in ("custom_jvp_call", "custom_vjp_call", "cond"):
            parts, straight = self.derivative(equation), name != "cond"
            forward, backward = open_jaxpr(parts.forward), open_jaxpr(parts.backward)
            # A single result may be left partial, as that of a product.
            single = straight and len(results) == 1
            sums = _reaches_linearly(forward, forward.outvars[:1]) if single else frozenset[Any]()
            made = self._pass(composer, forward, operands, sums=sums, reduces="forward" if straight else None)
            _unify_all(composer, made[: len(results)], results)
            cotangents = [r for r, smooth in zip(results, parts.results, strict=True) if smooth]
            back = self._pass(
                composer, backward, [*made[len(results) :], *cotangents],
                sums=_reaches_linearly(backward, backward.outvars), reduces="backward" if straight else None,
            )  # fmt: skip
            _unify_all(composer, back, [o for o, smooth in zip(operands, parts.operands, strict=True) if smooth])
        elif name == "cond":
            for branch in call_bodies(equation):
                _unify_all(composer, self._pass(composer, branch, operands[1:]), results)
        elif name == "while":
            condition, body = call_bodies(equation)
            split = equation.params["cond_nconsts"], equation.params["body_nconsts"]
            carry = operands[sum(split) :]
            self._pass(composer, condition, [*operands[: split[0]], *carry])
            _unify_all(composer, self._pass(composer, body, [*operands[split[0] : sum(split)], *carry]), carry)
            _unify_all(composer, carry, results)
        elif name == "scan":
            self._scan_inside_call(composer, equation, operands, results)
        elif is_remat(equation):
            _unify_all(composer, self._pass(composer, open_jaxpr(equation.params["jaxpr"]), operands), results)
        else:
            body = open_jaxpr(eliminate_dead_code(inline(equation.params["call_jaxpr"], caller=equation)))
            sums = _reaches_linearly(body, body.outvars) if len(results) == 1 else frozenset[Any]()
            _unify_all(composer, self._pass(composer, body, operands, sums=sums, reduces="forward"), results)
        return composer.rule(operands, results)

    def _scan_inside_call(self, composer: Composer, equation: Equation, operands: Any, results: Any) -> None:
        parts = scan_parts(equation)
        first_xs = parts.num_consts + parts.num_carry
        for tensor in (*operands[first_xs:], *results[parts.num_carry :]):
            composer.mark(tensor[0], "whole")
        carry = operands[parts.num_consts : first_xs]
        inner = [*operands[:first_xs], *(tensor[1:] for tensor in operands[first_xs:])]
        made = self._pass(composer, open_jaxpr(parts.body), inner)
        _unify_all(composer, made[: parts.num_carry], carry)
        _unify_all(composer, carry, results[: parts.num_carry])
        _unify_all(composer, made[parts.num_carry :], [tensor[1:] for tensor in results[parts.num_carry :]])

    def _pass(
        self, composer: Composer, jaxpr: Jaxpr, operands: Sequence[Any], *, sums: AbstractSet[Any] = frozenset(),
        reduces: Literal["forward", "backward"] | None = None,
    ) -> list[Any]:  # fmt: skip
        """Relate the dims of a program's inputs to those of its outputs, given back; the rest as of `relate`."""
        env: dict[Any, Any] = dict(zip(jaxpr.invars, operands, strict=True))
        env.update((var, composer.whole(var.aval.shape)) for var in jaxpr.constvars)
        self.relate(composer, jaxpr.eqns, env, summed=sums, reduces=reduces)
        return [composer.tensor(a.aval.shape) if is_literal(a) else env[a] for a in jaxpr.outvars]

    def relate(
        self,
        composer: Composer,
        equations: Iterable[Equation],
        env: dict[Any, Any],
        *,
        summed: AbstractSet[Any] = frozenset(),
        reduces: Literal["forward", "backward"] | None = None,
    ) -> None:
        """Identify dims of a program's variables that are one index.

        Args:
          equations: in program order.
          env: dims of each variable known so far; extended.
          summed: variables that may be left partial by the reduction that makes them: forward they leave the result
            partial, backward the cotangent of an operand without that factor, as it has to be.
          reduces: in which pass the program runs, where what other reductions make may be completed by collectives
            inside; None where none may be, in loops and branches.
        """

        def read(atom: Any) -> Any:
            if is_literal(atom):
                return composer.tensor(atom.aval.shape)
            if atom not in env:  # a constant of the program
                env[atom] = composer.whole(atom.aval.shape)
            return env[atom]

        for equation in equations:
            rule = self.rule(equation, differentiated=False)
            atoms = [composer.atom(factor.size) for factor in rule.factors]
            outs = [composer.tensor(v.aval.shape) for v in equation.outvars]
            env.update(zip(equation.outvars, outs, strict=True))
            tensors = [*(read(atom) for atom in equation.invars), *outs]
            for tensor, dims in zip(tensors, (*rule.operands, *rule.results), strict=True):
                for dim, factors in zip(tensor, dims, strict=True):
                    composer.unify(dim, [atoms[f] for f in factors])
            reduced = [atom for atom, factor in zip(atoms, rule.factors, strict=True) if factor.kind == "reduction"]
            for atom, factor in zip(atoms, rule.factors, strict=True):
                if factor.kind in ("whole", "spatial", "circulating"):
                    composer.mark([atom], "whole")
            if equation.outvars and all(v in summed for v in equation.outvars):
                if reduces == "forward":
                    composer.mark(reduced, "reduction")
            elif reduces is None:
                composer.mark(reduced, "whole")
            elif reduced:
                size = sum(float(prod(v.aval.shape) * v.aval.dtype.itemsize) for v in equation.outvars)
                composer.reduce(reduced, outs[0], size, backward=reduces == "backward")
            for one in rule.inside:  # of a call in this one
                over = [atoms[f] for f in one.over]
                if reduces is None:
                    composer.mark(over, "whole")
                else:
                    result = [[atoms[f] for f in dim] for dim in one.dims]
                    composer.reduce(over, result, one.size_bytes, backward=reduces == "backward")


def _reaches_linearly(jaxpr: Jaxpr, targets: Iterable[Any]) -> AbstractSet[Any]:
    """The variables of a program that reach these outputs of it alone, and linearly."""
    users: dict[Any, list[Equation]] = {}
    for equation in jaxpr.eqns:
        for atom in equation.invars:
            if not is_literal(atom):
                users.setdefault(atom, []).append(equation)
    good: set[Any] = set()
    outputs = {atom for atom in targets if not is_literal(atom)}
    others = {atom for atom in jaxpr.outvars if not is_literal(atom)} - outputs
    for equation in reversed(jaxpr.eqns):
        for var in equation.outvars:
            if var in others:
                continue
            uses = users.get(var, [])
            linear = (u.primitive.name in _LINEAR and not overflows(u) and {*u.outvars} <= good for u in uses)
            if all(linear) and (uses or var in outputs):
                good.add(var)
    return good


def _unify_all(composer: Composer, left: Sequence[Any], right: Sequence[Any]) -> None:
    for a, b in zip(left, right, strict=True):
        for x, y in zip(a, b, strict=True):
            composer.unify(x, y)


def _lower(equations: Sequence[Equation]) -> list[Any]:
    """Lower all at once; if one cannot be lowered, find it and give None for it alone."""
    if not equations:
        return []
    try:
        return list(lower_with_rules(equations))
    except Exception as error:  # whatever a primitive's lowering raises: it falls back to replication
        if len(equations) == 1:
            _warn_whole(equations[0], f"it could not be analysed ({type(error).__name__}: {error})")
            return [None]
        half = len(equations) // 2
        return [*_lower(equations[:half]), *_lower(equations[half:])]


def _runs_whole(rule: Rule) -> bool:
    """Whether there are dims, and none that can be split."""
    return any(factor.size > 1 for factor in rule.factors) and not rule.splittable


def _warn_whole(equation: Equation, why: str) -> None:
    warnings.warn(
        f"{equation.primitive.name} at {source_line(equation)} runs whole on every device: {why}",
        ReplicationWarning,
        stacklevel=2,
    )


def _signature(equation: Equation) -> tuple[Any, ...]:
    """Equal for equations with the same rule."""
    params = equation.params
    described: Hashable
    if (function := custom_jvp_of(equation)) is not None:
        described = function
    elif is_call(equation) or equation.primitive.name == "scan":
        # Calls of one jitted function on the same shapes hold the same objects.
        described = tuple((name, _identity(params[name])) for name in sorted(params))
    elif equation.primitive.name == "slice":
        described = f"strides {params['strides']}"  # pieces of a scan take rows of their own, the shapes say how many
    elif is_sorted_rows(equation):
        described = params["rows"].key
    elif is_pallas_call(equation):
        described = str(grid_of(equation))  # as text its parameters leave out which blocks it reads
    else:
        described = str(sorted(params.items(), key=lambda kv: kv[0]))
    atoms = tuple((a.aval.shape, a.aval.dtype, is_literal(a)) for a in equation.invars)
    return (
        equation.primitive.name,
        described,
        atoms,
        tuple((v.aval.shape, v.aval.dtype) for v in equation.outvars),
    )


def _identity(param: Any) -> Hashable:
    """Equal for parameters that are the same objects, as long as these live."""
    if isinstance(param, (tuple, list)):
        return tuple(map(_identity, param))
    return param if isinstance(param, (str, int, type(None))) else id(param)


def _is_lasting(signature: tuple[Any, ...]) -> bool:
    """Whether a signature says the same in another program: an address may be another object's there."""
    return isinstance(signature[1], str) and " at 0x" not in signature[1]


def _elements_rule(equation: Equation) -> Rule | None:
    """The rule of an operator on elements; None where its operands are not all of one shape."""
    shapes = [tuple(atom.aval.shape) for atom in (*equation.invars, *equation.outvars)]
    if len(set(shapes)) > 1:
        return None
    composer = Composer()
    same = composer.tensor(shapes[0])
    return composer.rule([same] * len(equation.invars), [same] * len(equation.outvars))


def _key_rule(equation: Equation) -> Rule:
    """Typed keys are never split; the bits drawn from one key may be."""
    operands = [atom.aval.shape for atom in equation.invars]
    results = [var.aval.shape for var in equation.outvars]
    composer = Composer()
    rule = composer.rule([composer.tensor(s) for s in operands], [composer.tensor(s) for s in results])
    if equation.primitive.name == "random_bits" and operands == [()]:
        return rule
    return rule.with_whole(range(len(rule.factors)))


def _top_k_rule(equation: Equation) -> Rule:
    """Shardy meets top_k only after it is expanded: all dims but the searched one pass through."""
    (shape,) = [atom.aval.shape for atom in equation.invars]
    composer = Composer()
    operand = composer.tensor(shape)
    composer.mark(operand[-1], "whole")
    last = [composer.atom(equation.outvars[0].aval.shape[-1], "whole")]
    return composer.rule([operand], [[*operand[:-1], last]] * len(equation.outvars))


def _pad_rule(equation: Equation) -> Rule:
    """A dim that is padded at its end may be split in the result, of which each block is made of the whole operand."""
    composer = Composer()
    operand = composer.tensor(equation.invars[0].aval.shape)
    result = []
    for dim, extent, (low, high, interior) in zip(
        operand, equation.outvars[0].aval.shape, equation.params["padding_config"], strict=True
    ):
        plain = low == high == interior == 0
        at_end = low == interior == 0 and high > 0
        if not plain:
            composer.mark(dim, "whole")
        result.append(dim if plain else [composer.atom(extent, "parallel" if at_end else "whole")])
    return composer.rule([operand, []], [result])
