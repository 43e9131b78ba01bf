"""Convolutions in groups are split by whole groups: rules, numbers of one device, and what tensor parallelism sends."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from met_equations import collect
from one_device import assert_as_on_one_device
from rule_cases import Case, conv, conv_backward, normal
from rule_validation import validate_rules

import meshwright as mw
from meshwright._jax.jaxpr import Equation, inline
from meshwright.program.groups import group_factor
from meshwright.program.rules import Rules


def causal(x: Any, kernel: Any) -> Any:
    """Each channel by itself, as in a state-space model."""
    return lax.conv_general_dilated(
        x, kernel, (1,), [(kernel.shape[0] - 1, 0)], dimension_numbers=("NWC", "WIO", "NWC"),
        feature_group_count=x.shape[-1],
    )  # fmt: skip


def both_mapped(x: Any, kernel: Any) -> Any:
    """Each with a kernel of its own, which `jax.vmap` writes as groups; and with its gradients."""
    y, pull = jax.vjp(jax.vmap(conv, in_axes=(1, 0), out_axes=1), x, kernel)
    return pull(jnp.sin(y))


# Each with the convolutions of its derivative, whose kernels' gradients have groups of the batch.
CASES: dict[str, tuple[int, Case]] = {
    "by depth": (8, (partial(conv_backward, feature_group_count=8), (normal(4, 8, 8, 8), normal(3, 3, 1, 8)))),
    "by depth, two made of each": (
        8, (partial(conv_backward, feature_group_count=8), (normal(4, 8, 8, 8), normal(3, 3, 1, 16))),
    ),
    "by depth with stride": (
        8, (partial(conv_backward, feature_group_count=8, strides=(2, 2)), (normal(4, 8, 8, 8), normal(3, 3, 1, 8))),
    ),
    "in groups": (4, (partial(conv_backward, feature_group_count=4), (normal(4, 8, 8, 8), normal(3, 3, 2, 12)))),
    "in groups of the batch": (
        4, (partial(conv_backward, batch_group_count=4), (normal(8, 8, 8, 4), normal(3, 3, 4, 8))),
    ),
    "mapped with its kernel": (4, (both_mapped, (normal(2, 4, 8, 8, 4), normal(4, 3, 3, 4, 8)))),
}  # fmt: skip


def convolutions(name: str) -> list[tuple[Equation, Sequence[Any]]]:
    _, (function, args) = CASES[name]
    met = collect(inline(jax.make_jaxpr(function)(*args)), list(args))
    return [(equation, values) for equation, values in met if equation.primitive.name == "conv_general_dilated"]


@pytest.mark.parametrize("name", CASES)
def test_groups_are_a_factor_that_can_be_split(name: str) -> None:
    groups, _ = CASES[name]
    found = convolutions(name)
    assert len(found) == 3  # the result, and the gradients of both operands
    rules = Rules()
    rules.prepare([(equation, False) for equation, _ in found])
    for equation, _ in found:
        rule = rules.rule(equation, differentiated=False)
        factor = group_factor(equation, rule)
        assert factor in rule.splittable
        assert rule.factors[factor].size == groups


def test_splits_give_the_results_and_gradients_of_one_device() -> None:
    violations = validate_rules([one for name in CASES for one in convolutions(name)], blocks=4)
    assert not violations, [(v.primitive, v.problem, v.detail) for v in violations]


def loss(weights: Any, batch: Any) -> Any:
    x = causal(batch["x"] @ weights["in"], weights["kernel"])
    return jnp.mean((jax.nn.silu(x) @ weights["out"] - batch["y"]) ** 2)


def step(weights: Any, batch: Any) -> Any:
    value, gradients = mw.value_and_grad(loss)(weights, batch)
    return jax.tree.map(lambda w, g: w - 0.001 * g, weights, gradients), value


def plain_step(weights: Any, batch: Any) -> Any:
    """Planned whole: the gradients' convolutions are operators of the plan too."""
    value, gradients = jax.value_and_grad(loss)(weights, batch)
    return jax.tree.map(lambda w, g: w - 0.001 * g, weights, gradients), value


def given() -> tuple[Any, Any]:
    rng = np.random.default_rng(0)
    array = lambda *shape: jnp.asarray(rng.normal(size=shape), jnp.float32)  # noqa: E731
    weights = {"in": array(8, 32), "kernel": array(4, 1, 32), "out": array(32, 8)}
    return weights, {"x": array(16, 16, 8), "y": array(16, 16, 8)}


def axes_of_convolutions(stage: Any) -> list[set[str]]:
    return [{a for axes in one.axes for a in axes} for one in stage.operators if one.name == "conv_general_dilated"]


@pytest.mark.parametrize(
    ("options", "split_by"),
    [
        ({"preset": "megatron(tp=8)"}, {"model"}),
        ({"preset": "megatron(tp=4, dp=2)", "microbatches": 2}, {"data", "model"}),
        ({"preset": "data_parallel"}, {"data"}),
    ],
    ids=["tensor", "tensor and data", "data"],
)
def test_numbers_are_those_of_one_device(options: Any, split_by: set[str]) -> None:
    weights, batch = given()
    parallel = assert_as_on_one_device(step, weights, batch, **options)
    (stage,) = parallel.plan(weights, batch).stages
    assert axes_of_convolutions(stage) == [split_by]


def test_tensor_parallelism_sends_one_sum() -> None:
    # Columns, channels, rows: nothing is gathered between the two products.
    weights, batch = given()
    (stage,) = mw.parallelize(step, cluster="local", preset="megatron(tp=8)").plan(weights, batch).stages
    assert [(one.kind, one.count) for one in stage.communication] == [("all_reduce", 1)]


def test_gradients_that_are_operators_of_the_plan() -> None:
    weights, batch = given()
    pins = {"args[0]['in']": (None, "model"), "args[0]['kernel']": (None, None, "model")}
    parallel = assert_as_on_one_device(plain_step, weights, batch, mesh={"model": 8}, pins=pins)
    (stage,) = parallel.plan(weights, batch).stages
    assert axes_of_convolutions(stage) == [{"model"}] * 3
