"""Wide residual networks: bottleneck ResNets (He et al. 2016) widened as in Zagoruyko and Komodakis 2016.

Shapes: the suite of Zheng et al. (Alpa, OSDI 2022), where the 3x3 convolution of a bottleneck is `width_factor` times
as wide as its input. Batch normalisation uses the global batch's own statistics; their running averages live in
`state["statistics"]`, beside the parameters. The head has 1024 classes.
Model FLOPs of a sample: 3 * the sum over convolutions of 2 * kernel**2 * inputs * outputs * pixels, and 6 * inputs *
classes for the head; normalisations are not counted.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from .convolution import convolution, convolution_flops, convolution_parameters, scale_and_bias
from .layers import token_cross_entropy
from .parameters import normal, ones, zeros
from .train import Batch, Model, Optimizer, Target, make_target

MOMENTUM = 0.9


@dataclass(frozen=True, slots=True, kw_only=True)
class WideResNetConfig:
    """Shape of a wide ResNet; `dtype` is that of the activations, parameters stay float32.

    Attributes:
        blocks: bottleneck blocks in each of the resolutions; from the second on, the first block halves the image.
        channels: base channels, doubled with every halving of the image.
        width_factor: width of the 3x3 convolution over that of the 1x1 before it.
        image_size: height and width in pixels.
    """

    name: str
    blocks: tuple[int, ...]
    channels: int
    width_factor: int
    classes: int = 1024
    image_size: int = 224
    global_batch: int = 1536
    dtype: str = "float32"


FIFTY, HUNDRED_AND_ONE = (3, 4, 6, 3), (3, 4, 23, 3)

SOURCE = "Zagoruyko and Komodakis 2016; Zheng et al. 2022 (Alpa)"

CONFIGS: dict[str, WideResNetConfig] = {
    config.name: config
    for config in (
        WideResNetConfig(name="wresnet-250m", blocks=FIFTY, channels=160, width_factor=2),
        WideResNetConfig(name="wresnet-500m", blocks=FIFTY, channels=224, width_factor=2),
        WideResNetConfig(name="wresnet-1b", blocks=FIFTY, channels=320, width_factor=2),
        WideResNetConfig(name="wresnet-2b", blocks=FIFTY, channels=448, width_factor=2),
        WideResNetConfig(name="wresnet-4b", blocks=FIFTY, channels=640, width_factor=2),
        WideResNetConfig(name="wresnet-6.8b", blocks=FIFTY, channels=320, width_factor=16),
        WideResNetConfig(name="wresnet-13b", blocks=HUNDRED_AND_ONE, channels=320, width_factor=16, global_batch=1520),
        WideResNetConfig(
            name="wresnet-tiny",
            blocks=(1, 1),
            channels=32,
            width_factor=2,
            classes=16,
            image_size=16,
            global_batch=32,
        ),
    )
}


def batch_norm(
    params: dict[str, jax.Array], statistics: dict[str, jax.Array], x: jax.Array, epsilon: float = 1e-5
) -> tuple[jax.Array, dict[str, jax.Array]]:
    """Batch normalisation (Ioffe and Szegedy 2015) over batch, height and width of NHWC activations.

    Args:
        params: float32 `scale` and `bias` of shape (channels,).
        statistics: running `mean` and `variance`, likewise; never used to normalise here.
        x: (b, h, w, channels).

    Returns:
        The normalised activations and the running averages moved towards this batch's.
    """
    x32 = x.astype(jnp.float32)
    mean = jnp.mean(x32, axis=(0, 1, 2))
    variance = jnp.mean(jnp.square(x32 - mean), axis=(0, 1, 2))
    normalised = (x32 - mean) * (lax.rsqrt(variance + epsilon) * params["scale"]) + params["bias"]
    moved = {
        "mean": MOMENTUM * statistics["mean"] + (1.0 - MOMENTUM) * lax.stop_gradient(mean),
        "variance": MOMENTUM * statistics["variance"] + (1.0 - MOMENTUM) * lax.stop_gradient(variance),
    }
    return normalised.astype(x.dtype), moved


def running(channels: int) -> dict[str, Any]:
    """Declares the running statistics of `batch_norm`."""
    return {"mean": zeros(channels), "variance": ones(channels)}


def strides(config: WideResNetConfig) -> Iterator[tuple[int, int]]:
    """The channels and the stride of every block in order."""
    for level, blocks in enumerate(config.blocks):
        for index in range(blocks):
            yield config.channels * 2**level, 2 if level > 0 and index == 0 else 1


def declare_block(inputs: int, channels: int, width: int, stride: int) -> tuple[dict[str, Any], dict[str, Any]]:
    """Parameters and statistics of a bottleneck block; with a projection where the residual changes shape."""
    outputs = 4 * channels
    convolutions = {
        "reduce": convolution_parameters(1, inputs, channels),
        "spatial": convolution_parameters(3, channels, width),
        "expand": convolution_parameters(1, width, outputs),
    }
    if inputs != outputs or stride != 1:
        convolutions["project"] = convolution_parameters(1, inputs, outputs)
    widths = {key: weight.shape[-1] for key, weight in convolutions.items()}
    params = {key: {"w": weight, "norm": scale_and_bias(widths[key])} for key, weight in convolutions.items()}
    return params, {key: running(width) for key, width in widths.items()}


def block(params: dict[str, Any], statistics: dict[str, Any], x: jax.Array, *, stride: int) -> tuple[jax.Array, Any]:
    """A bottleneck block, (b, h, w, inputs) -> (b, h / stride, w / stride, 4 * channels), and its statistics."""
    moved = {}

    def normalised(key: str, x: jax.Array, stride: int = 1) -> jax.Array:
        x = convolution(params[key]["w"], x, stride=stride)
        x, moved[key] = batch_norm(params[key]["norm"], statistics[key], x)
        return x

    y = jax.nn.relu(normalised("reduce", x))
    y = jax.nn.relu(normalised("spatial", y, stride))
    y = normalised("expand", y)
    residual = normalised("project", x, stride) if "project" in params else x
    return jax.nn.relu(y + residual), moved


def max_pool(x: jax.Array) -> jax.Array:
    """Maximum over 3x3 windows with stride 2, (b, h, w, c) -> (b, h / 2, w / 2, c)."""
    return lax.reduce_window(x, -jnp.inf, lax.max, (1, 3, 3, 1), (1, 2, 2, 1), ((0, 0), (1, 1), (1, 1), (0, 0)))


def build(config: WideResNetConfig, *, optimizer: Optimizer = "sgd", remat: bool = False) -> Target:
    """The training step of a wide ResNet.

    The batch is `images`, (global_batch, image_size, image_size, 3) in `config.dtype`, and int32 `labels`
    (global_batch,).

    Args:
        config: its shape.
        optimizer: see `train.make_target`.
        remat: recompute each block in the backward pass.

    Raises:
        ValueError: the image cannot be halved as often as the network does.
    """
    halvings = 2 ** (len(config.blocks) + 1)
    if config.image_size % halvings:
        raise ValueError(
            f"refused to build {config.name!r}: got image_size={config.image_size}, needed a multiple of {halvings}, "
            f"the image being halved {len(config.blocks) + 1} times; "
            f"try image_size={-(-config.image_size // halvings) * halvings}"
        )
    dtype = jnp.dtype(config.dtype)
    stem = convolution_parameters(7, 3, config.channels)
    flops = convolution_flops(stem, config.image_size // 2)
    size = config.image_size // 4  # a stride of 2, then the pooling
    params: dict[str, Any] = {"stem": {"w": stem, "norm": scale_and_bias(config.channels)}, "blocks": []}
    statistics: dict[str, Any] = {"stem": running(config.channels), "blocks": []}
    inputs = config.channels
    for channels, stride in strides(config):
        block_params, block_statistics = declare_block(inputs, channels, channels * config.width_factor, stride)
        params["blocks"].append(block_params)
        statistics["blocks"].append(block_statistics)
        # The first convolution of a block runs before the image is halved, all others after.
        flops += convolution_flops(block_params["reduce"]["w"], size)
        size //= stride
        flops += sum(convolution_flops(part["w"], size) for key, part in block_params.items() if key != "reduce")
        inputs = 4 * channels
    params["head"] = {"w": normal(inputs, config.classes, deviation=inputs**-0.5), "b": zeros(config.classes)}
    flops += 2 * inputs * config.classes

    def applied(stride: int) -> Callable[..., Any]:
        apply = functools.partial(block, stride=stride)
        return jax.jit(jax.checkpoint(apply) if remat else apply)  # blocks that are alike are traced once

    apply = {stride: applied(stride) for _, stride in strides(config)}

    def loss(params: dict[str, Any], batch: Batch, statistics: dict[str, Any]) -> tuple[jax.Array, Any]:
        x = convolution(params["stem"]["w"], batch["images"].astype(dtype), stride=2)
        x, stem_statistics = batch_norm(params["stem"]["norm"], statistics["stem"], x)
        x = max_pool(jax.nn.relu(x))
        moved = []
        for (_, stride), part, old in zip(strides(config), params["blocks"], statistics["blocks"], strict=True):
            x, new = apply[stride](part, old, x)
            moved.append(new)
        features = jnp.mean(x.astype(jnp.float32), axis=(1, 2))  # (b, inputs)
        logits = features @ params["head"]["w"] + params["head"]["b"]
        return token_cross_entropy(logits, batch["labels"]), {"stem": stem_statistics, "blocks": moved}

    def make_batch(key: jax.Array) -> Batch:
        image_key, label_key = jax.random.split(key)
        shape = (config.global_batch, config.image_size, config.image_size, 3)
        return {
            "images": jax.random.normal(image_key, shape, dtype),
            "labels": jax.random.randint(label_key, (config.global_batch,), 0, config.classes, jnp.int32),
        }

    model = Model(
        name=config.name,
        family="wresnet",
        params=params,
        statistics=statistics,
        loss=loss,
        make_batch=make_batch,
        model_flops_per_sample=3 * flops,
        reduction="mean",
    )
    return make_target(model, optimizer=optimizer)
