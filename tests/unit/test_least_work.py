"""The least that any plan takes: all arithmetic, shared evenly."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshwright import value_and_grad, zoo
from meshwright.cluster import load_cluster
from meshwright.planning.plan_for import plan_for
from meshwright.program.traces import traces_of
from meshwright.search.prices.least_work import least_work_seconds

MODELS = ["gpt-tiny", "wresnet-tiny", "moe-tiny", "mlp-tiny"]
OTHERS = ["tpu-v5e:8", "p3.16xlarge:1+p4d.24xlarge:1"]


@pytest.mark.parametrize(
    ("cluster", "name"),
    [
        ("p3.16xlarge:1", "mlp-tiny"),
        *(pytest.param("p3.16xlarge:1", name, marks=pytest.mark.slow) for name in MODELS[:-1]),
        *((cluster, "mlp-tiny") for cluster in OTHERS),
        *(pytest.param(cluster, name, marks=pytest.mark.slow) for cluster in OTHERS for name in MODELS[:-1]),
    ],
)
def test_no_plan_takes_less_than_its_arithmetic(name: str, cluster: str) -> None:
    target, where = zoo.build(name, global_batch=64), load_cluster(cluster)
    traces, args = traces_of(target.step), (target.example_state, target.example_batch)
    graphs = {count: traces.program(args, microbatches=count).graph for count in (1, 4)}
    floors = [least_work_seconds(graph, count, where) for count, graph in graphs.items()]
    assert floors[0] == pytest.approx(floors[1], rel=1e-6), "cutting a batch makes no work more or less"
    for stages in (1, 2):
        found = plan_for(traces, args, cluster=where, stages=stages, microbatches=4)
        assert 0 < floors[0] < found.step_seconds


def test_arithmetic_of_a_product_by_hand() -> None:
    """[64, 128] x [128, 256] and the gradient of its weights: 2 x 2 x 64 x 128 x 256 FLOPs, on 8 devices."""

    def step(weights: Any, x: Any) -> Any:
        value, grads = value_and_grad(lambda w: jnp.sum(x @ w))(weights)
        return weights - grads, value

    args = jax.ShapeDtypeStruct((128, 256), jnp.float32), jax.ShapeDtypeStruct((64, 128), jnp.float32)
    where, traces = load_cluster("p3.16xlarge:1"), traces_of(step)
    found = least_work_seconds(traces.program(args).graph, 1, where)
    assert found == pytest.approx(2 * 2 * 64 * 128 * 256 / (8 * where.device.achievable_flops("float32")))
