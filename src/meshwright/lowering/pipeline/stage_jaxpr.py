"""A stage's equations, cut out of the core with the variables of their graph."""

from __future__ import annotations

from typing import Any

from ..._jax.jaxpr import ClosedJaxpr, is_literal, is_remat, open_jaxpr, scan_parts
from ..._jax.passes import part_of
from ...program.cut import Cut
from ...program.graph import Graph, Path, once_for_each
from ...program.staged import StagedProgram


def stage_jaxpr(staged: StagedProgram, cut: Cut) -> tuple[ClosedJaxpr, tuple[int, ...]]:
    """A stage's equations as a program with the inputs and outputs of its graph, and their positions in the core."""
    core = open_jaxpr(staged.core)
    value_of, name = _variables(staged)
    positions = tuple(sorted({operator.path[0] for operator in cut.graph.operators}))

    def read(atom: Any) -> Any:
        return atom if is_literal(atom) else name.get(value_of.get(atom, -1), atom)

    equations = [core.eqns[p].replace(invars=[read(a) for a in core.eqns[p].invars]) for p in positions]
    inputs = [name[cut.values[v]] for v in cut.graph.inputs]
    outputs = [name[cut.values[v]] for v in cut.graph.outputs if v is not None]
    return part_of(staged.core, equations, inputs, outputs), positions


@once_for_each
def _variables(staged: StagedProgram) -> tuple[dict[Any, int], dict[int, Any]]:
    """For each variable of the core its value, and for each value its variable: every stage asks."""
    value_of = _values(open_jaxpr(staged.core), staged.graph)
    name: dict[int, Any] = {}
    for var, value in value_of.items():
        name.setdefault(value, var)
    return value_of, name


def _values(core: Any, graph: Graph) -> dict[Any, int]:
    """For each variable at the top level of a program its value in the graph. A variable that passes through a
    checkpoint untouched is the value it was."""
    operator = {op.path: op for op in graph.operators}
    top: dict[Any, int] = dict(zip(core.invars, graph.inputs, strict=True))

    def walk(jaxpr: Any, known: dict[Any, int], prefix: Path) -> None:
        for position, equation in enumerate(jaxpr.eqns):
            path = (*prefix, position)
            if is_remat(equation):
                body = open_jaxpr(equation.params["jaxpr"])
                pairs = zip(body.invars, equation.invars, strict=True)
                inner: dict[Any, int] = {var: known[a] for var, a in pairs if not is_literal(a) and a in known}
                walk(body, inner, path)
                made: list[int | None] = [None if is_literal(a) else inner.get(a) for a in body.outvars]
            elif equation.primitive.name == "scan":
                parts = scan_parts(equation)
                made = []
                for i in range(len(equation.outvars)):
                    carried = i < parts.num_carry
                    at = parts.num_consts + i if carried else len(open_jaxpr(parts.body).invars) + i
                    link = operator.get((*path, -1, at))
                    made.append(None if link is None else link.results[1 if carried else 0])
            else:
                made = list(operator[path].results)
            known.update((var, value) for var, value in zip(equation.outvars, made, strict=True) if value is not None)

    walk(core, top, ())
    return top
