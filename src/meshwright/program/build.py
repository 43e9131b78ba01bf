"""From a jaxpr to the graph of operators."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

import jax

from .._jax.jaxpr import (
    ClosedJaxpr,
    Equation,
    Jaxpr,
    is_dropped,
    is_literal,
    is_remat,
    open_jaxpr,
    scan_parts,
    source_line,
)
from .._jax.random import is_key
from .derivative import cotangents
from .factors import Composer, Rule
from .flops import equation_flops, multiplied
from .graph import Graph, Operator, Path, Value
from .local import COMBINE
from .rules import Rules, is_call


@dataclass(slots=True)
class _Raw:
    """An operator before its rule is known."""

    path: Path
    name: str
    operands: list[int | None]
    results: list[int | None]
    equation: Equation | None
    repeats: int
    outer_repeats: int
    operand_repeats: tuple[int, ...]
    region: Path | None
    source: str


def build_graph(
    closed: ClosedJaxpr,
    rules: Rules,
    *,
    parameters: Sequence[int] = (),
    losses: Sequence[int] = (),
    input_names: Sequence[str] | None = None,
) -> Graph:
    """The operators of an inlined program.

    Args:
      closed: the program, `jit` calls inlined.
      rules: where the rules of its equations are looked up; extended by those that are not there.
      parameters: positions of the differentiated inputs.
      losses: positions of the outputs that are differentiated.
      input_names: names of the inputs, for reports.
    """
    builder = _Builder()
    jaxpr = open_jaxpr(closed)
    names = input_names or [f"input {i}" for i in range(len(jaxpr.invars))]
    inputs = [builder.value(var, name) for var, name in zip(jaxpr.invars, names, strict=True)]
    env: dict[Any, int] = dict(zip(jaxpr.invars, inputs, strict=True))
    env.update({var: builder.value(var, "constant") for var in jaxpr.constvars})
    builder.walk(jaxpr, env, (), 1, None)
    outputs = [None if is_literal(atom) else env[atom] for atom in jaxpr.outvars]
    return builder.finish(rules, inputs, outputs, [inputs[p] for p in parameters], tuple(parameters), losses)


class _Builder:
    def __init__(self) -> None:
        self.avals: list[Any] = []
        self.names: list[str] = []
        self.raw: list[_Raw] = []

    def value(self, var: Any, name: str) -> int:
        self.avals.append(var.aval)
        self.names.append(name)
        return len(self.avals) - 1

    def walk(self, jaxpr: Jaxpr, env: dict[Any, int], prefix: Path, repeats: int, region: Path | None) -> None:
        for position, equation in enumerate(jaxpr.eqns):
            path = (*prefix, position)
            operands = [None if is_literal(a) else env[a] for a in equation.invars]
            if equation.primitive.name == "scan":
                self._scan(equation, env, operands, path, repeats, region)
            elif is_remat(equation):
                body = open_jaxpr(equation.params["jaxpr"])
                inner = self._bind(body, equation.invars, operands, path)
                self.walk(body, inner, path, repeats, path)
                for var, atom in zip(equation.outvars, body.outvars, strict=True):
                    env[var] = self._result(var, atom, inner, path)
            else:
                results = self._results(equation, env)
                source = source_line(equation)
                self.raw.append(
                    _Raw(
                        path,
                        equation.primitive.name,
                        operands,
                        results,
                        equation,
                        repeats,
                        repeats,
                        (repeats,) * len(operands),
                        region,
                        source,
                    )
                )

    def _results(self, equation: Equation, env: dict[Any, int]) -> list[int | None]:
        results: list[int | None] = []
        for var in equation.outvars:
            if is_dropped(var):
                results.append(None)
            else:
                env[var] = self.value(var, equation.primitive.name)
                results.append(env[var])
        return results

    def _bind(self, body: Jaxpr, atoms: Sequence[Any], operands: Sequence[int | None], path: Path) -> dict[Any, int]:
        inner: dict[Any, int] = {}
        for var, atom, value in zip(body.invars, atoms, operands, strict=True):
            inner[var] = self.value(atom, "literal") if value is None else value
        return inner

    def _result(self, var: Any, atom: Any, inner: dict[Any, int], path: Path) -> int:
        return self.value(var, "literal") if is_literal(atom) else inner[atom]

    def _scan(
        self,
        equation: Equation,
        env: dict[Any, int],
        operands: list[int | None],
        path: Path,
        repeats: int,
        region: Path | None,
    ) -> None:
        parts = scan_parts(equation)
        body = open_jaxpr(parts.body)
        source = source_line(equation)
        inner: dict[Any, int] = {}
        first_xs = parts.num_consts + parts.num_carry
        carries = []
        for i, (var, operand) in enumerate(zip(body.invars, operands, strict=True)):
            inside = self.value(var, "scan operand")
            inner[var] = inside
            if i < parts.num_consts:
                link, trips = "scan_const", repeats
            elif i < first_xs:
                carries.append((operand, inside))
                continue
            else:
                link, trips = "scan_slice", repeats * parts.length
            self.raw.append(
                _Raw((*path, -1, i), link, [operand], [inside], None, trips, repeats, (repeats,), region, source)
            )
        inner.update({var: self.value(var, "constant") for var in body.constvars})
        self.walk(body, inner, path, repeats * parts.length, region)

        def made(atom: Any) -> int | None:
            return None if is_literal(atom) else inner[atom]

        for i, (operand, inside) in enumerate(carries):
            var = equation.outvars[i]
            result = None if is_dropped(var) else self.value(var, "scan")
            if result is not None:
                env[var] = result
            link_operands = [operand, made(body.outvars[i])]
            self.raw.append(
                _Raw((*path, -1, parts.num_consts + i), "scan_carry", link_operands, [inside, result], None,
                     repeats * parts.length, repeats, (repeats, repeats * parts.length), region, source)
            )  # fmt: skip
        for i in range(parts.num_carry, len(equation.outvars)):
            var = equation.outvars[i]
            if is_dropped(var):
                continue
            env[var] = self.value(var, "scan")
            self.raw.append(
                _Raw((*path, -1, len(body.invars) + i), "scan_stack", [made(body.outvars[i])], [env[var]], None,
                     repeats * parts.length, repeats, (repeats * parts.length,), region, source)
            )  # fmt: skip

    def finish(
        self,
        rules: Rules,
        inputs: list[int],
        outputs: list[int | None],
        sources: list[int],
        parameters: tuple[int, ...],
        losses: Sequence[int],
    ) -> Graph:
        smooth = [not is_key(a) and _is_inexact(a.dtype) for a in self.avals]
        sinks = [value for value in (outputs[i] for i in losses) if value is not None]
        differentiated = cotangents(
            [
                (raw.name, [v for v in raw.operands if v is not None], [v for v in raw.results if v is not None])
                for raw in self.raw
            ],
            smooth,
            sources,
            sinks,
        )
        depends = self._depends(inputs)

        def is_differentiated(raw: _Raw) -> bool:
            return all(
                any(v is not None and differentiated[v] for v in values) for values in (raw.operands, raw.results)
            )

        passed = [is_differentiated(raw) for raw in self.raw]
        rules.prepare([(raw.equation, p) for raw, p in zip(self.raw, passed, strict=True) if raw.equation is not None])
        operators = []
        for index, raw in enumerate(self.raw):
            flops, matmul = equation_flops(raw.equation) if raw.equation is not None else (0.0, False)
            product = raw.equation if matmul else None
            operators.append(
                Operator(
                    index=index,
                    path=raw.path,
                    name=raw.name,
                    operands=tuple(raw.operands),
                    results=tuple(raw.results),
                    rule=self._link_rule(raw)
                    if raw.equation is None
                    else rules.rule(raw.equation, differentiated=passed[index]),
                    combine=None if raw.equation is None or is_call(raw.equation) else COMBINE.get(raw.name),
                    repeats=raw.repeats,
                    outer_repeats=raw.outer_repeats,
                    operand_repeats=raw.operand_repeats,
                    region=raw.region,
                    kept=False,
                    flops=flops,
                    matmul=matmul,
                    multiplied="" if product is None else multiplied(product),
                    backward_flops=None if product is None or not passed[index] else rules.backward_flops(product),
                    differentiated=passed[index],
                    source=raw.source,
                )
            )
        values = tuple(
            Value(
                index=index,
                shape=tuple(aval.shape),
                dtype=_name(aval.dtype),
                itemsize=8.0 if is_key(aval) else _itemsize(aval.dtype),
                differentiated=differentiated[index],
                constant=not depends[index],
                name=name,
            )
            for index, (aval, name) in enumerate(zip(self.avals, self.names, strict=True))
        )
        return Graph(
            values=values,
            operators=tuple(operators),
            inputs=tuple(inputs),
            outputs=tuple(outputs),
            parameters=parameters,
        )

    def _depends(self, inputs: Sequence[int]) -> list[bool]:
        """Which values depend on any input."""
        depends = [False] * len(self.avals)
        for value in inputs:
            depends[value] = True
        changed = True
        while changed:  # loop-carried values can make earlier ones depend on later ones
            changed = False
            for raw in self.raw:
                if any(v is not None and depends[v] for v in raw.operands):
                    for v in raw.results:
                        if v is not None and not depends[v]:
                            depends[v] = changed = True
        return depends

    def _link_rule(self, raw: _Raw) -> Rule:
        composer = Composer()

        def shape(value: int) -> tuple[int, ...]:
            return tuple(self.avals[value].shape)

        def stacked(tensor: list[list[int]], trips: int) -> list[list[int]]:
            return [[composer.atom(trips, "whole")], *tensor]

        match raw.name:
            case "scan_slice":
                assert raw.results[0] is not None
                inside = composer.tensor(shape(raw.results[0]))
                trips = 1 if raw.operands[0] is None else shape(raw.operands[0])[0]
                return composer.rule([stacked(inside, trips)], [inside])
            case "scan_stack":
                assert raw.results[0] is not None
                outside = shape(raw.results[0])
                inside = composer.tensor(outside[1:])
                return composer.rule([inside], [stacked(inside, outside[0])])
            case _:
                known = next(v for v in raw.results if v is not None)
                same = composer.tensor(shape(known))
                return composer.rule([same] * len(raw.operands), [same] * len(raw.results))


# A program has tens of thousands of values of a handful of dtypes, whose names NumPy makes anew each time.
@lru_cache(maxsize=256)
def _name(dtype: Any) -> str:
    return str(dtype)


@lru_cache(maxsize=256)
def _is_inexact(dtype: Any) -> bool:
    return bool(jax.numpy.issubdtype(dtype, jax.numpy.inexact))


@lru_cache(maxsize=256)
def _itemsize(dtype: Any) -> float:
    bits = {"int4": 4, "uint4": 4, "int2": 2, "uint2": 2, "float4_e2m1fn": 4}.get(str(dtype))
    return bits / 8 if bits else float(dtype.itemsize)
