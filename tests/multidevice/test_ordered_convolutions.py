"""Convolutions in loops are brought into the order that the CPU has fast code for, and compute the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright._jax.convolutions import with_ordered_convolutions

IMAGE, KERNEL = (4, 6, 5, 3), (3, 2, 3, 7)


def loss(kernel: Any, image: Any, strides: tuple[int, int], dims: tuple[str, str, str]) -> Any:
    made = jax.lax.conv_general_dilated(jnp.tanh(image), kernel, strides, "SAME", dimension_numbers=dims)
    return jnp.sum(jnp.sin(made))


@pytest.mark.parametrize("strides", [(1, 1), (2, 1)])
@pytest.mark.parametrize("dims", [("NHWC", "HWIO", "NHWC"), ("NCHW", "OIHW", "NCHW")])
def test_gradients_are_the_same_and_in_order(strides: tuple[int, int], dims: tuple[str, str, str]) -> None:
    rng = np.random.default_rng(0)

    def ordered(shape: tuple[int, ...], names: str, usual: str) -> Any:
        return jnp.array(rng.normal(size=[shape[usual.index(name)] for name in names]), jnp.float32)

    image, kernel = ordered(IMAGE, dims[0], "NHWC"), ordered(KERNEL, dims[1], "HWIO")

    def gradients(kernel: Any, images: Any) -> Any:
        def trip(total: Any, image: Any) -> Any:
            of_kernel, of_image = jax.grad(loss, argnums=(0, 1))(kernel, image, strides, dims)
            return total + of_kernel, of_image

        return jax.lax.scan(trip, jnp.zeros_like(kernel), images)

    images = jnp.stack([image, 2 * image])
    expected = jax.jit(gradients)(kernel, images)
    compiled = jax.jit(with_ordered_convolutions(gradients)).lower(kernel, images).compile()
    for found, want in zip(compiled(kernel, images), expected, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)
    labels = {
        part.split("dim_labels=")[1].split(",")[0] for part in compiled.as_text().splitlines() if "dim_lab" in part
    }
    assert labels == {"b01f_01io->b01f"}


def test_what_has_no_convolution_is_left_alone() -> None:
    def plain(x: Any) -> Any:
        return {"out": jnp.sin(x)}

    traced = jax.make_jaxpr(with_ordered_convolutions(plain))(jnp.ones(3))
    assert [equation.primitive.name for equation in traced.eqns] == ["sin"]
