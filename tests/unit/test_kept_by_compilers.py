"""What one program stores for its backward pass, by its compiler: what kernels write of it, by lifetimes too."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshwright._jax.jaxpr import eliminate_dead_code, inline
from meshwright._jax.liveness_adapter import dataflow_of
from meshwright.memory.fusion import Fusion
from meshwright.program.build import build_graph
from meshwright.program.residuals import kept_in_one_program
from meshwright.program.rules import Rules

ROWS, WIDTH = 512, 256


def loss_of(body: Callable[[Any], Any]) -> Callable[..., Any]:
    """Something elementwise between two products."""
    return lambda x, first, second: jnp.sum((body(x @ first) @ second).astype(jnp.float32) ** 2)


def shapes(dtype: Any) -> list[jax.ShapeDtypeStruct]:
    return [jax.ShapeDtypeStruct((rows, WIDTH), dtype) for rows in (ROWS, WIDTH, WIDTH)]


def kept(body: Callable[[Any], Any], dtype: Any, platform: str) -> list[str]:
    """Arrays of all rows that are kept, as the search counts them: what makes each, and its type."""
    closed = eliminate_dead_code(inline(jax.make_jaxpr(loss_of(body))(*shapes(dtype))))
    graph = build_graph(closed, Rules(), parameters=(1, 2), losses=[0])
    values = [v for v in kept_in_one_program(graph, platform) if v in graph.producer]
    return sorted(
        f"{graph.values[v].name} {graph.values[v].dtype}" for v in values if graph.values[v].shape == (ROWS, WIDTH)
    )


def written(body: Callable[[Any], Any], dtype: Any, name: str, platform: str) -> list[int]:
    """Bytes of the arrays of all rows that operations of this name make and kernels write."""
    found = dataflow_of(jax.grad(loss_of(body), argnums=(1, 2)), *shapes(dtype), platform=platform)
    large = {v for v, value in enumerate(found.values) if value.elements == ROWS * WIDTH}
    made = {v for one in found.operations if one.name == name for v in one.writes}
    stored = made & large & {v for kernel in Fusion(found).run() for v in kernel.writes}
    return [found.values[v].size_bytes for v in sorted(stored)]


def normalised(product: Any) -> Any:
    """As batch norm has it: statistics of a wide copy of what is stored in 16 bits."""
    wide = product.astype(jnp.float32)
    mean, square = jnp.mean(wide, axis=0), jnp.mean(wide**2, axis=0)
    return ((wide - mean) * jax.lax.rsqrt(square - mean**2 + 1e-5)).astype(product.dtype)


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_gpus_store_a_product_in_16_bits_and_no_wide_copy(platform: str) -> None:
    """CPUs multiply in float32, and keep what they make for all its readers."""
    stored = "dot_general bfloat16" if platform == "gpu" else "convert_element_type float32"
    assert kept(normalised, jnp.bfloat16, platform) == sorted(
        ["convert_element_type bfloat16", "dot_general bfloat16", stored]
    )
    product = {"gpu": 2, "cpu": 4}[platform] * ROWS * WIDTH
    assert product in written(normalised, jnp.bfloat16, "dot_general", platform)


def divided(product: Any) -> Any:
    quotient = product / (1.0 + product * product)
    return jnp.cumsum(quotient * quotient, axis=0) * product


@pytest.mark.parametrize("platform", ["gpu", "cpu"])
def test_gpus_divide_again_and_others_keep_the_quotient(platform: str) -> None:
    """By the search as by lifetimes: else a plan that fits is refused by the one, or a gap holds for less memory."""
    on_gpu = platform == "gpu"
    assert ("div float32" in kept(divided, jnp.float32, platform)) != on_gpu
    assert bool(written(divided, jnp.float32, "div", platform)) != on_gpu
