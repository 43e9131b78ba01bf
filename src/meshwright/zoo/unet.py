"""A U-Net that predicts the noise in an image: the denoiser of Ho et al. 2020 (DDPM).

Residual blocks with group normalisation and a time embedding, self-attention where the image is small, one level
for each halving of the image and skip connections across the U. Base channels and images are those of the suite of
Zheng et al. (Alpa, OSDI 2022), whose own network also attends to a text: this one has none, and about the parameter
count of the names all the same. Channels double at each level but the last.
Model FLOPs of a sample: 3 * the sum of 2 * kernel**2 * inputs * outputs * pixels over convolutions, 8 * n * c**2 +
4 * n**2 * c over attentions of n pixels and c channels, and 2 * inputs * outputs over the time embedding's products.
"""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp

from .convolution import convolution, convolution_flops, convolution_parameters, group_norm, scale_and_bias
from .layers import attention_parameters, self_attention
from .parameters import normal, zeros
from .train import Batch, Model, Optimizer, Target, make_target

TIMESTEPS = 1000


@dataclass(frozen=True, slots=True, kw_only=True)
class UNetConfig:
    """Shape of a U-Net; `dtype` is that of the activations, parameters stay float32.

    Attributes:
        channels: base channels; a multiple of `groups`.
        multipliers: channels of each level over the base channels.
        blocks: residual blocks of a level on the way down; one more on the way up.
        heads: of every attention.
        groups: of every group normalisation.
        attention_size: largest image, in pixels a side, with attention, whose cost grows as the fourth power of it.
    """

    name: str
    channels: int
    multipliers: tuple[int, ...] = (1, 2, 4, 4)
    blocks: int = 1
    heads: int = 8
    groups: int = 32
    attention_size: int = 16
    image_size: int = 32
    image_channels: int = 3
    global_batch: int = 2048
    dtype: str = "float32"


SOURCE = "Ho et al. 2020; Zheng et al. 2022 (Alpa)"

CONFIGS: dict[str, UNetConfig] = {
    config.name: config
    for config in (
        UNetConfig(name="unet-470m", channels=320, global_batch=256),
        UNetConfig(name="unet-1b", channels=480),
        UNetConfig(name="unet-2b", channels=672),
        UNetConfig(
            name="unet-tiny",
            channels=32,
            multipliers=(1, 2),
            groups=8,
            attention_size=4,
            image_size=8,
            global_batch=16,
        ),
    )
}


def dense_parameters(inputs: int, outputs: int) -> dict[str, Any]:
    """Declares `dense`: (inputs, outputs) and its bias."""
    return {"w": normal(inputs, outputs, deviation=inputs**-0.5), "b": zeros(outputs)}


def dense(params: dict[str, jax.Array], x: jax.Array) -> jax.Array:
    """A dense product, (b, inputs) -> (b, outputs)."""
    return x @ params["w"].astype(x.dtype) + params["b"].astype(x.dtype)


def biased_parameters(kernel: int, inputs: int, outputs: int) -> dict[str, Any]:
    """Declares `biased_convolution`."""
    return {"w": convolution_parameters(kernel, inputs, outputs), "b": zeros(outputs)}


def biased_convolution(params: dict[str, jax.Array], x: jax.Array, *, stride: int = 1) -> jax.Array:
    """A convolution and its bias; see `convolution.convolution`."""
    return convolution(params["w"], x, stride=stride) + params["b"].astype(x.dtype)


def time_embedding(timesteps: jax.Array, size: int) -> jax.Array:
    """Sines and cosines of int32 (b,) timesteps at geometric frequencies, float32 (b, size)."""
    frequency = jnp.exp(-math.log(10_000.0) / (size // 2) * jnp.arange(size // 2, dtype=jnp.float32))
    angle = timesteps.astype(jnp.float32)[:, None] * frequency
    return jnp.concatenate([jnp.sin(angle), jnp.cos(angle)], axis=-1)


def declare_block(config: UNetConfig, inputs: int, outputs: int, size: int) -> tuple[dict[str, Any], int]:
    """Parameters and forward FLOPs of a residual block on `size` by `size` pixels, with attention where it is small."""
    time = 4 * config.channels
    params: dict[str, Any] = {
        "in_norm": scale_and_bias(inputs),
        "in": biased_parameters(3, inputs, outputs),
        "time": dense_parameters(time, outputs),
        "out_norm": scale_and_bias(outputs),
        "out": biased_parameters(3, outputs, outputs),
    }
    if inputs != outputs:
        params["shortcut"] = biased_parameters(1, inputs, outputs)
    flops = 2 * time * outputs
    flops += sum(convolution_flops(params[key]["w"], size) for key in ("in", "out", "shortcut") if key in params)
    if size <= config.attention_size:
        pixels = size**2
        params["attention_norm"] = scale_and_bias(outputs)
        params["attention"] = attention_parameters(config.name, outputs, config.heads)
        flops += 8 * pixels * outputs**2 + 4 * pixels**2 * outputs
    return params, flops


def declare(config: UNetConfig) -> tuple[dict[str, Any], int]:
    """Parameters and forward FLOPs of the whole network; `denoise` walks the same levels."""
    base, size = config.channels, config.image_size
    time = 4 * base
    params: dict[str, Any] = {
        "time": {"in": dense_parameters(base, time), "out": dense_parameters(time, time)},
        "in": biased_parameters(3, config.image_channels, base),
        "down": [],
        "up": [],
    }
    flops = 2 * base * time + 2 * time * time + convolution_flops(params["in"]["w"], size)

    def resize(channels: int) -> dict[str, Any]:
        nonlocal flops
        resized = biased_parameters(3, channels, channels)
        flops += convolution_flops(resized["w"], size)
        return resized

    def blocks(inputs: list[int], outputs: int) -> list[dict[str, Any]]:
        nonlocal flops
        declared = [declare_block(config, channels, outputs, size) for channels in inputs]
        flops += sum(cost for _, cost in declared)
        return [block for block, _ in declared]

    channels, skips = base, [base]
    for index, multiplier in enumerate(config.multipliers):
        outputs = multiplier * base
        level: dict[str, Any] = {"blocks": blocks([channels] + [outputs] * (config.blocks - 1), outputs)}
        channels = outputs
        skips += [outputs] * config.blocks
        if index + 1 < len(config.multipliers):
            size //= 2
            level["halve"] = resize(channels)
            skips.append(channels)
        params["down"].append(level)
    params["middle"] = blocks([channels] * 2, channels)
    for index, multiplier in reversed(list(enumerate(config.multipliers))):
        outputs = multiplier * base
        before = [channels] + [outputs] * config.blocks
        level = {"blocks": blocks([b + skips.pop() for b in before], outputs)}
        channels = outputs
        if index > 0:
            size *= 2
            level["double"] = resize(channels)
        params["up"].append(level)
    params["out_norm"] = scale_and_bias(base)
    params["out"] = biased_parameters(3, base, config.image_channels)
    return params, flops + convolution_flops(params["out"]["w"], size)


def residual_block(params: dict[str, Any], x: jax.Array, time: jax.Array, *, groups: int) -> jax.Array:
    """A residual block, (b, h, w, inputs) and time (b, 4 * channels) -> (b, h, w, outputs)."""
    y = jax.nn.silu(group_norm(params["in_norm"], x, groups=groups))
    y = biased_convolution(params["in"], y) + dense(params["time"], jax.nn.silu(time))[:, None, None, :]
    y = jax.nn.silu(group_norm(params["out_norm"], y, groups=groups))
    y = biased_convolution(params["out"], y)
    x = y + (biased_convolution(params["shortcut"], x) if "shortcut" in params else x)
    if "attention" not in params:
        return x
    batch, height, width, channels = x.shape
    pixels = group_norm(params["attention_norm"], x, groups=groups).reshape(batch, height * width, channels)
    return x + self_attention(params["attention"], pixels, causal=False).reshape(x.shape)


def doubled(x: jax.Array) -> jax.Array:
    """Every pixel twice in both directions, (b, h, w, c) -> (b, 2 * h, 2 * w, c)."""
    batch, height, width, channels = x.shape
    x = jnp.broadcast_to(x[:, :, None, :, None, :], (batch, height, 2, width, 2, channels))
    return x.reshape(batch, 2 * height, 2 * width, channels)


def denoise(
    config: UNetConfig, params: dict[str, Any], images: jax.Array, timesteps: jax.Array, *, remat: bool
) -> jax.Array:
    """The predicted noise, (b, h, w, image channels) -> the same, for int32 timesteps (b,)."""

    def apply(params: dict[str, Any], x: jax.Array, time: jax.Array) -> jax.Array:
        return residual_block(params, x, time, groups=config.groups)

    block = jax.checkpoint(apply) if remat else apply
    time = time_embedding(timesteps, config.channels).astype(images.dtype)
    time = dense(params["time"]["out"], jax.nn.silu(dense(params["time"]["in"], time)))  # (b, 4 * channels)
    x = biased_convolution(params["in"], images)
    skips = [x]
    for level in params["down"]:
        for block_params in level["blocks"]:
            x = block(block_params, x, time)
            skips.append(x)
        if "halve" in level:
            x = biased_convolution(level["halve"], x, stride=2)
            skips.append(x)
    for block_params in params["middle"]:
        x = block(block_params, x, time)
    for level in params["up"]:
        for block_params in level["blocks"]:
            x = block(block_params, jnp.concatenate([x, skips.pop()], axis=-1), time)
        if "double" in level:
            x = biased_convolution(level["double"], doubled(x))
    return biased_convolution(params["out"], jax.nn.silu(group_norm(params["out_norm"], x, groups=config.groups)))


def build(config: UNetConfig, *, optimizer: Optimizer = "adam", remat: bool = False) -> Target:
    """The training step of a U-Net: the mean-square error of the noise predicted from a noised image.

    The batch is `images` and `noise`, (global_batch, image_size, image_size, image_channels) in `config.dtype`, and
    int32 `timesteps` (global_batch,).

    Args:
        config: its shape.
        optimizer: see `train.make_target`.
        remat: recompute each residual block in the backward pass.

    Raises:
        ValueError: the channels of a level are not a multiple of `heads`, or the base channels not one of `groups`, or
            the image cannot be halved for every level but the first.
    """
    if config.channels % config.groups:
        raise ValueError(
            f"refused to build {config.name!r}: got channels={config.channels} in groups={config.groups}, needed a "
            f"multiple of the groups; try groups={math.gcd(config.channels, config.groups)}"
        )
    halvings = 2 ** (len(config.multipliers) - 1)
    if config.image_size % halvings:
        raise ValueError(
            f"refused to build {config.name!r}: got image_size={config.image_size} with "
            f"{len(config.multipliers)} levels, needed a multiple of {halvings}; "
            f"try image_size={max(config.image_size // halvings, 1) * halvings}"
        )
    dtype = jnp.dtype(config.dtype)
    params, flops = declare(config)

    def loss(params: dict[str, Any], batch: Batch) -> jax.Array:
        # The cosine schedule of Nichol and Dhariwal 2021: from the image alone to noise alone.
        angle = (0.5 * math.pi / TIMESTEPS) * batch["timesteps"].astype(jnp.float32)[:, None, None, None]
        noised = jnp.cos(angle) * batch["images"] + jnp.sin(angle) * batch["noise"]
        predicted = denoise(config, params, noised.astype(dtype), batch["timesteps"], remat=remat)
        return jnp.mean(jnp.square(predicted.astype(jnp.float32) - batch["noise"]))

    def make_batch(key: jax.Array) -> Batch:
        image_key, noise_key, time_key = jax.random.split(key, 3)
        shape = (config.global_batch, config.image_size, config.image_size, config.image_channels)
        return {
            "images": jax.random.normal(image_key, shape, dtype),
            "noise": jax.random.normal(noise_key, shape, dtype),
            "timesteps": jax.random.randint(time_key, (config.global_batch,), 0, TIMESTEPS, jnp.int32),
        }

    model = Model(
        name=config.name,
        family="unet",
        params=params,
        loss=loss,
        make_batch=make_batch,
        model_flops_per_sample=3 * flops,
    )
    return make_target(model, optimizer=optimizer)
