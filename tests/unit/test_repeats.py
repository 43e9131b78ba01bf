"""Layers that a program repeats are traced once; the step is the same."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshwright._jax.jaxpr import open_jaxpr, source_line
from meshwright.cluster import load_cluster
from meshwright.lowering import evaluate
from meshwright.lowering.local_step import LocalStep
from meshwright.lowering.repeats import Repeats
from meshwright.plan import Plan
from meshwright.planning.plan_for import plan_for
from meshwright.program.local import evaluate_local
from meshwright.program.trace import Program
from meshwright.zoo import gpt

LAYERS = 6
SMALL = replace(
    gpt.CONFIGS["gpt-tiny"], sequence=64, global_batch=16, hidden=64, heads=4, layers=LAYERS, dtype="bfloat16"
)
CASES: dict[str, dict[str, Any]] = {
    "no remat": {"remat": "none", "microbatches": 1, "mesh": (8,)},
    "remat": {"remat": "layer", "microbatches": 1, "mesh": (8,)},
    "microbatches": {"remat": "none", "microbatches": 2, "mesh": (8,)},
    "stored split": {"remat": "none", "microbatches": 1, "zero": 3, "mesh": (8,)},
    "a mesh of two axes": {"remat": "none", "microbatches": 1, "mesh": (2, 4)},
}


@cache
def planned(case: str) -> tuple[Program, Plan]:
    target = gpt.build(SMALL)
    found = plan_for(
        target.step,
        (target.example_state, target.example_batch),
        cluster=load_cluster("dgx-a100-80"),
        stages=1,
        **CASES[case],
    )
    assert isinstance(found.program, Program)
    return found.program, found.plan


def traced(program: Program, plan: Plan) -> tuple[list[tuple[str, str, str]], int]:
    """The equations of a step, each with its shape and its line, in any order; and its predicted peak."""
    local = LocalStep(program, plan)
    closed = jax.make_jaxpr(local.on(local.abstract_mesh(), "gpu"))(*local.avals())

    def walk(jaxpr: Any) -> list[tuple[str, str, str]]:
        found = []
        for equation in jaxpr.eqns:
            inner = [open_jaxpr(one) for one in jax.tree.leaves(list(equation.params.values()))]
            bodies = [one for one in inner if hasattr(one, "eqns")]
            if equation.primitive.name not in ("jit", "pjit"):
                shapes = str([var.aval for var in equation.outvars])
                found.append((equation.primitive.name, shapes, source_line(equation)))
            for body in bodies:
                found += walk(body)
        return found

    return walk(open_jaxpr(closed)), local.predicted_memory("gpu").peak_bytes


@pytest.mark.parametrize(
    "case", [pytest.param(n, marks=[pytest.mark.slow] * (n not in {"remat", "stored split"})) for n in CASES]
)
def test_a_step_has_the_same_equations_and_peak_as_without_runs(case: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """What compilers find dead aside: a run leaves all that some later equation reads."""
    program, plan = planned(case)
    equations, peak = traced(program, plan)
    monkeypatch.setattr(Repeats, "evaluate", lambda *_: False)
    plain, plain_peak = traced(program, plan)
    assert peak == plain_peak
    dear = ("dot_general", "all_gather", "reduce_scatter", "psum", "all_to_all", "exp", "tanh", "rsqrt")
    assert Counter(e for e in equations if e[0] in dear) == Counter(e for e in plain if e[0] in dear)


@pytest.mark.parametrize(("case", "most"), [("no remat", 0.3), ("remat", 0.45), ("microbatches", 0.3)])
def test_equal_layers_are_evaluated_once(case: str, most: float, monkeypatch: pytest.MonkeyPatch) -> None:
    program, plan = planned(case)
    counted: Counter[str] = Counter()

    def counting(equation: Any, split: Any, operands: Any) -> Any:
        counted[equation.primitive.name] += 1
        return evaluate_local(equation, split, operands)

    monkeypatch.setattr(evaluate, "evaluate_local", counting)
    local = LocalStep(program, plan)
    jax.make_jaxpr(local.on(local.abstract_mesh(), "gpu"))(*local.avals())
    operators = Counter(operator.name for operator in program.graph.operators)
    assert counted["exp"] <= operators["exp"] * most
    assert 0 < counted["reduce_sum"] <= operators["reduce_sum"] * most


def test_layers_that_differ_are_no_repeats() -> None:
    """In a literal, and in a parameter of an equation."""

    def step(params: list[jax.Array], x: jax.Array) -> jax.Array:
        for layer, weight in enumerate(params):
            y = jnp.tanh(x @ weight) * (1.0 + layer // 2)
            x = x + jnp.flip(jnp.cumsum(y, axis=layer % 2), axis=layer % 2)
        return x

    weights, x = [jax.ShapeDtypeStruct((32, 32), jnp.float32)] * 8, jax.ShapeDtypeStruct((32, 32), jnp.float32)
    found = plan_for(step, (weights, x), cluster=load_cluster("dgx-a100-80"), stages=1)
    assert isinstance(found.program, Program)
    program, plan = found.program, found.plan
    local = LocalStep(program, plan)
    jaxpr = open_jaxpr(program.core)
    runs = local._sharded._repeats.runs(jaxpr, [(at,) for at in range(len(jaxpr.eqns))], ())
    keys = Counter(run.repeated.key for run in runs if run.repeated is not None)
    assert set(keys.values()) <= {1, 2}
