"""Convolutions for the image models: NHWC activations, HWIO weights, and their FLOPs."""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .parameters import Parameter, normal, ones, zeros


def convolution_parameters(kernel: int, inputs: int, outputs: int) -> Parameter:
    """Declares a square kernel (kernel, kernel, inputs, outputs) that keeps a ReLU's variance (He et al. 2015)."""
    return normal(kernel, kernel, inputs, outputs, deviation=math.sqrt(2.0 / (kernel**2 * inputs)))


def convolution(weight: jax.Array, x: jax.Array, *, stride: int = 1) -> jax.Array:
    """Convolution with zero padding that keeps height and width (stride 1) or halves them (stride 2).

    Args:
        weight: (kernel, kernel, inputs, outputs), cast to the dtype of x.
        x: (b, h, w, inputs).
        stride: of both spatial dims.

    Returns:
        (b, h / stride, w / stride, outputs).
    """
    before = (weight.shape[0] - 1) // 2
    padding = [(before, before)] * 2
    dims = ("NHWC", "HWIO", "NHWC")
    return lax.conv_general_dilated(x, weight.astype(x.dtype), (stride, stride), padding, dimension_numbers=dims)


def convolution_flops(weight: Parameter, size: int) -> int:
    """Forward FLOPs of one image for a declared kernel and a square output of `size` by `size` pixels."""
    return 2 * math.prod(weight.shape) * size**2


def scale_and_bias(channels: int) -> dict[str, Any]:
    """Declares the scale and the bias of a normalisation over `channels`."""
    return {"scale": ones(channels), "bias": zeros(channels)}


def group_norm(params: dict[str, jax.Array], x: jax.Array, *, groups: int, epsilon: float = 1e-5) -> jax.Array:
    """Group normalisation (Wu and He 2018) of NHWC activations, statistics in float32; groups divide the channels."""
    batch, height, width, channels = x.shape
    grouped = x.astype(jnp.float32).reshape(batch, height, width, groups, channels // groups)
    centred = grouped - jnp.mean(grouped, axis=(1, 2, 4), keepdims=True)
    variance = jnp.mean(jnp.square(centred), axis=(1, 2, 4), keepdims=True)
    normalised = (centred * lax.rsqrt(variance + epsilon)).reshape(x.shape)
    return (normalised * params["scale"] + params["bias"]).astype(x.dtype)
