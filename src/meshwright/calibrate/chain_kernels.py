"""What the cost model sees in a chain of operations: its kernels, traced as in any plan."""

from __future__ import annotations

from dataclasses import replace
from functools import cache

import jax
import jax.numpy as jnp

from ..cluster import load_cluster
from ..cost.kernels import Kernel
from ..program.traces import Traces
from ..search.choices import operator_choices
from ..search.prices import Prices
from .programs import chain_function, chain_shape


@cache
def chain_kernels(name: str, size_bytes: int) -> tuple[Kernel, ...]:
    """The kernels of a chain on one device.

    >>> [(kernel.kind, kernel.moved_bytes) for kernel in chain_kernels("add", 4096)]
    [('fused', 4096.0), ('stored', 4096.0)]

    Args:
      name: of the chain.
      size_bytes: of its operand.
    """
    cluster = load_cluster("cpu")
    host = replace(cluster.hosts[0], devices=1)
    prices = Prices(replace(cluster, hosts=(host,)).logical_mesh((1,)), cluster.device)
    operand = jax.ShapeDtypeStruct(chain_shape(size_bytes), jnp.float32)
    graph, found = Traces(chain_function(name)).program((operand,)).graph, []
    for operator in graph.operators:
        (only, *_) = operator_choices(graph, operator, prices.sizes, of_parameters=False)
        found += [prices.kernels(graph, operator, only.algorithm).forward] * operator.repeats
    return tuple(found)
