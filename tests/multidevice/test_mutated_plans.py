"""Saved plans with something changed: a `PlanError` that says what, or the right numbers; nothing else."""

from __future__ import annotations

import copy
import random
import warnings
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import meshwright as mw
from meshwright.plan import Plan
from meshwright.plan.io import plan_from_dict, plan_to_dict
from meshwright.program.traces import traces_of
from meshwright.runtime.executable import executable
from meshwright.simulate import simulate_plan

_PLANS: tuple[dict[str, Any], ...] = (
    {"preset": "data_parallel()"},
    {"preset": "zero(stage=3)"},
    {"preset": "megatron(tp=2, dp=4)", "microbatches": 2},
    {"stages": 2, "microbatches": 4},
)


def _step(state: Any, x: Any, y: Any) -> Any:
    def loss(p: Any) -> Any:
        h = jnp.tanh(x @ p["a"] + p["bias"])
        mw.layer_boundary()
        h, _ = jax.lax.scan(lambda h, w: (jnp.tanh(h @ w), None), h, p["layers"])
        mw.layer_boundary()
        return jnp.mean((h @ p["b"] - y) ** 2)

    value, grads = mw.value_and_grad(loss)(state[0])
    momentum = jax.tree.map(lambda m, g: 0.9 * m + g, state[1], grads)
    return (jax.tree.map(lambda p, m: p - 0.1 * m, state[0], momentum), momentum), value


@cache
def _arguments() -> Any:
    numbers = np.random.default_rng(0)
    shapes = {"a": (8, 16), "b": (16, 8), "bias": (16,), "layers": (2, 16, 16)}
    parameters = {name: numbers.normal(size=shape).astype(np.float32) * 0.3 for name, shape in shapes.items()}
    x, y = (numbers.normal(size=(32, 8)).astype(np.float32) for _ in range(2))
    return (parameters, jax.tree.map(np.zeros_like, parameters)), x, y


@cache
def _plan(which: int) -> Plan:
    return mw.plan_for(_step, _arguments(), cluster="local", **_PLANS[which]).plan


def _places(document: Any, at: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """The paths of all that a document holds."""
    inner = document.items() if isinstance(document, dict) else enumerate(document)
    for key, value in inner:
        yield (*at, key)
        if isinstance(value, (dict, list)):
            yield from _places(value, (*at, key))


def _mutated(random_: random.Random, document: Any) -> Any:
    """A copy with one or two places dropped, doubled, shuffled or given other values of their kind."""
    document = copy.deepcopy(document)
    texts = ["", "x", "data", "stage", "one_f_one_b", "none"]
    for _ in range(random_.choice((1, 1, 1, 2))):
        *above, last = random_.choice(list(_places(document)))
        parent = document
        for key in above:
            parent = parent[key]
        value, kind = parent[last], random_.randrange(8)
        if kind == 0:
            parent.pop(last)
        elif kind == 1 and isinstance(parent, list):
            parent.insert(last, copy.deepcopy(value))
        elif kind == 2 and isinstance(parent, list):
            random_.shuffle(parent)
        elif isinstance(value, (int, float)):
            parent[last] = random_.choice((value + 1, max(value - 1, 0), 0, value * 2, value + 7))
        elif isinstance(value, str):
            parent[last] = random_.choice([*texts, value + "q"])
        elif isinstance(value, list):
            parent[last] = random_.choice(([], value[::-1], value + value, value[:1]))
    return document


def _read(seed: int) -> Plan | None:
    """What a mutated file of one of the plans says, or None if it is refused or says the same."""
    which = seed % len(_PLANS)
    document = _mutated(random.Random(seed), plan_to_dict(_plan(which)))
    try:
        plan = plan_from_dict(document, source="mutated.json")
    except mw.PlanError:
        return None
    return None if plan == _plan(which) else plan


def _check(seed: int, *, run: bool) -> bool:
    """Whether a mutated plan is one all the same."""
    plan = _read(seed)
    if plan is None:
        return False
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # of predicted memory, say
            simulate_plan(plan)
            if not run:
                program = traces_of(_step).program(_arguments(), microbatches=plan.microbatches)
                made = executable(program, plan, jax.devices())
                if len(plan.stages) == 1:
                    made.lower()  # type: ignore[union-attr]
                return True
            got = mw.parallelize(_step, plan=plan)(*_arguments())
    except mw.PlanError:
        return False
    for a, b in zip(jax.tree.leaves(got), jax.tree.leaves(jax.jit(_step)(*_arguments())), strict=True):
        np.testing.assert_allclose(a, b, rtol=1e-4, atol=1e-5)
    return True


def test_mutated_plans_are_refused_or_plans() -> None:
    assert sum(_check(seed, run=False) for seed in range(16)) > 3


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 400, 50))
def test_mutated_plans_are_refused_or_right(first: int) -> None:
    for seed in range(first, first + 50):
        _check(seed, run=True)


def _edited(which: int, *path: Any) -> tuple[Any, Any]:
    """A document of a plan, and what it holds at a path."""
    document = plan_to_dict(_plan(which))
    inner: Any = document
    for key in path:
        inner = inner[key]
    return document, inner


@pytest.mark.parametrize(
    ("which", "path", "change", "said"),
    [
        (0, ("stages", 0, "inputs"), lambda inputs: inputs.pop(), "4 parameters and 1 other inputs; needed 4 and 2"),
        (3, ("stages", 1, "parameters"), lambda parameters: parameters.pop(), r"stages\[1\]"),
        (0, ("stages", 0, "settled"), lambda settled: settled.append([4000, {"dims": [[]]}]), "value 4000"),
        (
            2,
            ("stages", 0, "operators", "ways", 0, "axes"),
            lambda axes: axes.__setitem__(2, ["data"]),
            r"operators\[0\].*each axis for one factor|each axis for one factor.*operators\[0\]",
        ),
        (2, ("stages", 0, "operators", "ways", 0, "axes"), lambda axes: axes.pop(), "dot_general of 2 factors"),
    ],
)
def test_a_plan_that_contradicts_its_program_says_where(
    which: int, path: Sequence[Any], change: Any, said: str
) -> None:
    document, inner = _edited(which, *path)
    change(inner)
    with pytest.raises(mw.PlanError, match=said):
        mw.parallelize(_step, plan=plan_from_dict(document, source="edited.json"))(*_arguments())
