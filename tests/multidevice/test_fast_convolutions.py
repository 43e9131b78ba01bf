"""Convolutions are brought into the forms that the CPU has fast code for, and compute the same."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from meshwright._jax.convolutions import with_fast_convolutions

pytestmark = pytest.mark.compiled

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
    compiled = jax.jit(with_fast_convolutions(gradients)).lower(kernel, images).compile()
    for found, want in zip(compiled(kernel, images), expected, strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)
    labels = {
        part.split("dim_labels=")[1].split(",")[0] for part in compiled.as_text().splitlines() if "dim_lab" in part
    }
    assert labels == {"b01f_01io->b01f"}


@pytest.mark.parametrize(
    ("image", "window", "strides"),
    [((2, 2), (3, 3), (1, 1)), ((4, 4), (3, 3), (2, 2)), ((5, 4), (7, 7), (2, 1)), ((1, 3), (3, 3), (1, 2))],
    ids=str,
)
def test_a_window_stays_one_where_images_are_smaller(
    image: tuple[int, int], window: tuple[int, int], strides: tuple[int, int]
) -> None:
    rng = np.random.default_rng(1)
    images, kernel = (jnp.array(rng.normal(size=s), jnp.float32) for s in ((6, *image, 3), (*window, 3, 7)))

    def of_image(kernel: Any, images: Any) -> Any:
        return jax.value_and_grad(loss, argnums=1)(kernel, images, strides, ("NHWC", "HWIO", "NHWC"))

    def windows(function: Any) -> set[str]:
        text = jax.jit(function).lower(kernel, images).compile().as_text()
        return {part.split("size=")[1].split(" ")[0] for part in text.splitlines() if " convolution(" in part}

    changed, size = with_fast_convolutions(of_image), "x".join(map(str, window))
    assert windows(of_image) != {size}
    assert windows(changed) == {size}
    for found, want in zip(jax.jit(changed)(kernel, images), jax.jit(of_image)(kernel, images), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


@pytest.mark.parametrize("batch", [1, 3])
def test_an_odd_number_of_channels_gets_one_more(batch: int) -> None:
    """Images have three; the gradient of a kernel reads as many as there are examples."""
    rng = np.random.default_rng(2)
    images, kernel = (jnp.array(rng.normal(size=s), jnp.float32) for s in ((batch, 5, 5, 3), (3, 3, 3, 8)))

    def gradients(kernel: Any, images: Any) -> Any:
        return jax.grad(loss, argnums=(0, 1))(kernel, images, (1, 1), ("NHWC", "HWIO", "NHWC"))

    changed = with_fast_convolutions(gradients)
    traced = [e for e in jax.make_jaxpr(changed)(kernel, images).eqns if e.primitive.name == "conv_general_dilated"]
    assert len(traced) == 3
    assert all((channels := e.invars[0].aval.shape[-1]) == 1 or channels % 2 == 0 for e in traced)
    for found, want in zip(jax.jit(changed)(kernel, images), jax.jit(gradients)(kernel, images), strict=True):
        np.testing.assert_allclose(found, want, rtol=1e-4, atol=1e-4)


def test_images_spread_far_apart_get_no_border() -> None:
    images, kernel = jnp.ones((2, 32, 32, 4)), jnp.ones((16, 16, 4, 4))

    def of_image(kernel: Any, images: Any) -> Any:
        return jax.grad(loss, argnums=1)(kernel, images, (16, 16), ("NHWC", "HWIO", "NHWC"))

    names = {e.primitive.name for e in jax.make_jaxpr(with_fast_convolutions(of_image))(kernel, images).eqns}
    assert "conv_general_dilated" in names
    assert "optimization_barrier" not in names


def test_what_has_no_convolution_is_left_alone() -> None:
    def plain(x: Any) -> Any:
        return {"out": jnp.sin(x)}

    traced = jax.make_jaxpr(with_fast_convolutions(plain))(jnp.ones(3))
    assert [equation.primitive.name for equation in traced.eqns] == ["sin"]
