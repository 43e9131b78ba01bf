"""Sharding rules of equations, as Shardy (inside jaxlib) writes them.

Every distinct equation is lowered once, all of them in one StableHLO module; the pass
`sdy-populate-op-sharding-rules` annotates each operation with its factors, and the operations behind an equation are
found by following its results back to its operands. No table of operators is kept here.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import jax
from jax._src.lib.mlir import ir, passmanager  # jaxlib's MLIR bindings; no public form up to 0.12

from .jaxpr import Equation, bind, is_literal

_PIPELINE = "builtin.module(inline,func.func(sdy-populate-op-sharding-rules))"
_RULE = re.compile(r"op_sharding_rule<\((.*?)\)->\((.*?)\) \{(.*?)\}(.*?)>")
_FACTOR = re.compile(r"[a-z]_\d+|[a-z]")


@dataclass(frozen=True, slots=True, kw_only=True)
class OpRule:
    """The rule of one StableHLO operation: per operand and result the factors of each dim, major first."""

    operands: tuple[tuple[tuple[str, ...], ...], ...]
    results: tuple[tuple[tuple[str, ...], ...], ...]
    sizes: dict[str, int]
    reduction: frozenset[str]
    permutation: frozenset[str]
    need_replication: frozenset[str]


@dataclass(frozen=True, slots=True, kw_only=True)
class LoweredOp:
    """One StableHLO operation; values are numbered, shapes are in `Lowered.shapes`."""

    name: str
    operands: tuple[int, ...]
    results: tuple[int, ...]
    rule: OpRule | None


@dataclass(frozen=True, slots=True, kw_only=True)
class Lowered:
    """The StableHLO operations behind one equation, in program order."""

    operands: tuple[int | None, ...]
    results: tuple[int, ...]
    ops: tuple[LoweredOp, ...]
    shapes: dict[int, tuple[int, ...]]


def parse_rule(text: str) -> OpRule:
    """Parse Shardy's printed form, e.g. `([i, kl])->([i, k, l]) {i=4, k=2, l=8} reduction={k}`."""
    match = _RULE.search(text)
    if match is None:
        # A rule without factors (all scalars) prints no braces at all.
        scalar = re.search(r"op_sharding_rule<\((.*?)\)->\((.*?)\)", text)
        if scalar is None:
            raise ValueError(f"refused a Shardy rule: got {text!r}, needed the printed form of op_sharding_rule")
        return OpRule(
            operands=_tensors(scalar[1]), results=_tensors(scalar[2]), sizes={}, reduction=frozenset(),
            permutation=frozenset(), need_replication=frozenset(),
        )  # fmt: skip
    operands, results, sizes, rest = match.groups()

    def marked(word: str) -> frozenset[str]:
        found = re.search(word + r"=\{(.*?)\}", rest)
        return frozenset(_FACTOR.findall(found[1])) if found else frozenset()

    return OpRule(
        operands=_tensors(operands),
        results=_tensors(results),
        sizes={name: int(size) for name, size in re.findall(r"(\w+)=(\d+)", sizes)},
        reduction=marked("reduction"),
        permutation=marked("permutation"),
        need_replication=marked("need_replication"),
    )


def _tensors(text: str) -> tuple[tuple[tuple[str, ...], ...], ...]:
    return tuple(
        tuple(tuple(_FACTOR.findall(dim)) for dim in tensor.split(",")) if tensor.strip() else ()
        for tensor in re.findall(r"\[(.*?)\]", text)
    )


def lower_with_rules(equations: Sequence[Equation]) -> list[Lowered]:
    """Lower equations side by side and return each one's annotated operations.

    Cost: one JAX lowering for all of them (about 1 ms an equation) and one pass (microseconds an operation).
    """
    operand_avals = [[atom.aval for atom in eqn.invars if not is_literal(atom)] for eqn in equations]

    def side_by_side(groups: list[list[Any]]) -> list[Any]:
        outs = []
        for equation, group in zip(equations, groups, strict=True):
            given = iter(group)
            operands = [atom.val if is_literal(atom) else next(given) for atom in equation.invars]
            outs.append(list(bind(equation, *operands)))
        return outs

    avals = [[jax.ShapeDtypeStruct(a.shape, a.dtype) for a in group] for group in operand_avals]
    module = jax.jit(side_by_side, keep_unused=True).lower(avals).compiler_ir("stablehlo")
    with module.context:
        passmanager.PassManager.parse(_PIPELINE).run(module.operation)
    return _read(module, equations)


def _read(module: Any, equations: Sequence[Equation]) -> list[Lowered]:
    functions = {str(op.name).strip('"'): op for op in module.body.operations}
    shapes: dict[int, tuple[int, ...]] = {}
    producer: dict[int, int] = {}
    ops: list[LoweredOp] = []

    def new(value: Any) -> int:
        index = len(shapes)
        shapes[index] = tuple(ir.RankedTensorType(value.type).shape)
        return index

    def walk(function: Any, arguments: Sequence[int]) -> tuple[int, ...]:
        """Append the operations of `function`; calls are walked in line."""
        block = function.regions[0].blocks[0]
        ids = dict(zip(block.arguments, arguments, strict=True))
        for op in block.operations:
            operation = op.operation
            if not all(isinstance(v.type, ir.RankedTensorType) for v in (*operation.operands, *operation.results)):
                continue
            operands = tuple(ids[v] for v in operation.operands)
            if operation.name == "func.return":
                return operands
            if operation.name == "func.call":
                callee = str(operation.attributes["callee"]).lstrip("@").strip('"')
                ids.update(zip(operation.results, walk(functions[callee], operands), strict=True))
                continue
            results = tuple(new(v) for v in operation.results)
            ids.update(zip(operation.results, results, strict=True))
            attributes = operation.attributes
            rule = parse_rule(str(attributes["sdy.sharding_rule"])) if "sdy.sharding_rule" in attributes else None
            for result in results:
                producer[result] = len(ops)
            ops.append(LoweredOp(name=operation.name, operands=operands, results=results, rule=rule))
        raise AssertionError("a function without a return")

    main = functions["main"]
    returned = walk(main, [new(argument) for argument in main.regions[0].blocks[0].arguments])

    found = []
    next_argument = next_result = 0
    for equation in equations:
        operands: list[int | None] = []
        for atom in equation.invars:
            operands.append(None if is_literal(atom) else next_argument)
            next_argument += 0 if is_literal(atom) else 1
        results = returned[next_result : next_result + len(equation.outvars)]
        next_result += len(equation.outvars)
        needed: set[int] = set()
        stack = list(results)
        while stack:
            index = producer.get(stack.pop())
            if index is not None and index not in needed:
                needed.add(index)
                stack.extend(ops[index].operands)
        found.append(
            Lowered(operands=tuple(operands), results=results, ops=tuple(ops[i] for i in sorted(needed)), shapes=shapes)
        )
    return found
