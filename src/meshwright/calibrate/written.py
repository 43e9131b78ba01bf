"""What the cost model counts of a chain of operations: bytes written and kernels, traced and priced as in any plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp

from ..cluster import load_cluster
from ..program.traces import Traces
from ..search.choices import operator_choices
from ..search.prices import Prices
from .programs import chain_function, chain_shape


@cache
def written(name: str, size_bytes: int) -> tuple[float, int]:
    """Bytes that the cost model counts for a chain, and how many results are stored.

    >>> written("add", 4096)  # the sum is stored, the product a part of it
    (4505.6, 1)

    Args:
      name: of the chain.
      size_bytes: of its operand.
    """
    # On a device that writes one byte a second and starts kernels at once, seconds are bytes.
    cluster = load_cluster("cpu")
    device = replace(cluster.device, memory_bandwidth_bytes_per_second=1.0, kernel_launch_seconds=0.0)
    host = replace(cluster.hosts[0], device=device, devices=1)
    mesh = replace(cluster, hosts=(host,)).logical_mesh((1,))
    operand = jax.ShapeDtypeStruct(chain_shape(size_bytes), jnp.float32)
    graph = Traces(chain_function(name)).program((operand,)).graph
    prices, total, kernels = Prices(mesh, device), 0.0, 0
    for operator in graph.operators:
        (only, *_) = operator_choices(graph, operator, prices.sizes, of_parameters=False)
        compute, _ = prices.operator(graph, operator, only.algorithm, forward_runs=1)
        total += operator.repeats * compute
        kernels += prices.is_stored(graph, operator)
    return total, kernels
