"""Random training steps with random dims padded: the loss function's values and gradients stay what they are."""

from __future__ import annotations

import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from random_steps import random_step

from meshwright._jax.jaxpr import evaluate, open_jaxpr
from meshwright._jax.random import is_key
from meshwright.errors import PlanError
from meshwright.program.padded_dims import PaddedDim
from meshwright.program.trace import Program, trace_program

pytestmark = pytest.mark.filterwarnings("ignore::meshwright.program.rules.ReplicationWarning")


def drawn(program: Program, seed: int) -> list[Any]:
    """Inputs of a program's loss function."""
    numbers, found = np.random.default_rng(seed), []
    for var in open_jaxpr(program.core).invars:
        shape, dtype = var.aval.shape, var.aval.dtype
        if is_key(var.aval):
            found.append(jax.random.split(jax.random.key(seed), shape) if shape else jax.random.key(seed))
        elif jnp.issubdtype(dtype, jnp.inexact):
            found.append(jnp.asarray(0.5 * numbers.standard_normal(shape), dtype))
        else:
            found.append(jnp.asarray(numbers.integers(0, 2 if jnp.issubdtype(dtype, jnp.bool_) else 4, shape), dtype))
    return found


def outcome(program: Program, inputs: list[Any]) -> Any:
    """Results and gradients of a loss function."""
    first = program.num_consts

    def loss(*parameters: Any) -> Any:
        value, *rest = evaluate(program.core, *inputs[:first], *parameters)
        return value, rest

    parameters = range(len(inputs) - first)
    return jax.jit(jax.value_and_grad(loss, argnums=tuple(parameters), has_aux=True))(*inputs[first:])


def compare(seed: int, microbatches: int) -> bool:
    """Whether a seed's step can be cut so, and has dims that were padded; then with them it computes the same."""
    one = random_step(seed)
    args = one.make_state(), one.batch
    try:
        plain = trace_program(one.step, args, microbatches=microbatches)
    except PlanError:
        return False
    draws, graph = random.Random(seed), plain.graph
    padded = [
        PaddedDim(graph.values[v].name, dim, draws.choice([3, 5, 7, 9, 11]))
        for v in graph.inputs
        for dim, extent in enumerate(graph.values[v].shape)
        if extent > 1 and draws.random() < 0.6
    ]
    longer = trace_program(one.step, args, microbatches=microbatches, padded=padded)
    inputs = drawn(plain, seed)
    before, after = (jax.tree.leaves(outcome(program, inputs)) for program in (plain, longer))
    for a, b in zip(before, after, strict=True):
        if not is_key(a):
            a, b = np.asarray(a, np.float32), np.asarray(b, np.float32)
            np.testing.assert_allclose(b, a, rtol=3e-3, atol=1e-5 * max(1, np.abs(a).max(initial=0)))
    return len(longer.graph.operators) > len(graph.operators)


@pytest.mark.parametrize(
    "seeds", [range(2), *(pytest.param(range(n, n + 10), marks=pytest.mark.slow) for n in range(2, 62, 10))],
    ids=lambda seeds: f"{seeds[0]} to {seeds[-1]}",
)  # fmt: skip
def test_random_steps_with_padded_dims(seeds: range) -> None:
    were = [compare(seed, microbatches) for seed in seeds for microbatches in (1, 2)]
    assert any(were)
    jax.clear_caches()  # what this many programs have left
