"""What the cost model sees in a case: its kernels, traced as in any plan."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import replace
from functools import cache
from math import prod
from typing import Any

import jax
import jax.numpy as jnp

from .._jax.grad import value_and_grad
from ..cluster import load_cluster
from ..cost.kernels import Kernel
from ..program.traces import Traces
from ..search.prices.choices import operator_choices
from ..search.prices.kernels import OperatorKernels
from ..search.prices.operators import Prices
from .programs import chain_function, chain_shape, convolution


@cache
def chain_kernels(name: str, size_bytes: int) -> tuple[Kernel, ...]:
    """The kernels of a chain on one device.

    >>> [(kernel.kind, kernel.moved_bytes, kernel.flops) for kernel in chain_kernels("add", 4096)]
    [('fused', 4096.0, 1024.0), ('stored', 4096.0, 1024.0)]

    Args:
      name: of the chain.
      size_bytes: of its operand.
    """
    operand = jax.ShapeDtypeStruct(chain_shape(size_bytes), jnp.float32)
    return tuple(
        kernels.forward for _, kernels, repeats in _traced(chain_function(name), operand) for _ in range(repeats)
    )


@cache
def convolution_kernels(batch: int, edge: int, channels: int, features: int) -> tuple[Kernel, ...]:
    """The kernels of a convolution 3 x 3, of its derivative and of adding that to both operands, on one device.

    Args:
      batch: images.
      edge: of an image, in pixels.
      channels: of an image.
      features: that are made of it.
    """
    shapes = {"image": (batch, edge, edge, channels), "kernel": (3, 3, channels, features)}
    operands = {name: jax.ShapeDtypeStruct(shape, jnp.float32) for name, shape in shapes.items()}

    def step(operands: Any) -> Any:
        def loss(operands: Any) -> jax.Array:
            return jnp.sum(convolution(operands["image"], operands["kernel"]))

        return value_and_grad(loss)(operands)

    ((_, found, _),) = (one for one in _traced(step, operands) if one[0] == "conv_general_dilated")
    updates = (Kernel("stored", 0.0, 4.0 * prod(shape)) for shape in shapes.values())
    return (found.forward, *(one.kernel for one in found.gradients), *updates)


def _traced(function: Callable[..., Any], operand: Any) -> Iterable[tuple[str, OperatorKernels, int]]:
    """Of each operator its primitive, its kernels on one CPU device, and how often it runs."""
    cluster = load_cluster("cpu")
    host = replace(cluster.hosts[0], devices=1)
    prices = Prices(replace(cluster, hosts=(host,)).logical_mesh((1,)), cluster.device)
    graph = Traces(function).program((operand,)).graph
    for operator in graph.operators:
        (only, *_) = operator_choices(graph, operator, prices.sizes, of_parameters=False)
        yield operator.name, prices.kernels(graph, operator, only.algorithm), operator.repeats
