"""Llama-2-7B and Mixtral-8x7B of MaxText (Flax NNX), AI-Hypercomputer/maxtext, at commit e591f30cbbf2.

Model, optimizer and loss are those of its `trainers/pre_train/train.py`. Its configurations stand but for two
things: attention is matrix products (the planner does not look into hand-written kernels), and Mixtral's experts have a
capacity (`capacity_factor=1`, dense products), as in its configuration for GPUs. The model rematerialises its layers in
full by itself, its default. `kernels/mhc` needs Python 3.12; neither model uses it.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from flax import linen, nnx
from public import FOLDER, import_from, stand_in

import meshwright as mw

import_from("maxtext", "src")
stand_in(
    "pathwaysutils", "pathwaysutils.elastic", "tiktoken", "tiktoken.load", "sentencepiece", "sympy", "transformers",
    "ml_goodput_measurement", "maxtext.kernels.mhc", "maxtext.kernels.mhc.api", "maxtext.kernels.mhc.common",
    "maxtext.common.checkpointing", "maxtext.diffusion", "maxtext.diffusion.block_diffusion", "maxtext.integration",
    "maxtext.integration.tunix", "maxtext.integration.tunix.tunix_adapter",
)  # fmt: skip

from maxtext.configs import pyconfig
from maxtext.trainers.pre_train import train
from maxtext.utils import maxtext_utils, model_creation_utils, train_utils

TOKENS = 2048


def maxtext(name: str, batch: int, *, scan: bool, **more: Any) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """Its train step.

    Args:
      name: of a model of its configurations.
      batch: samples a step.
      scan: whether its layers are a scan, or a Python loop.
      more: of its configuration.
    """
    file = os.path.join(os.environ[FOLDER], "maxtext", "src", "maxtext", "configs", "base.yml")
    config = pyconfig.initialize(
        ["train.py", file], model_name=name, scan_layers=scan, per_device_batch_size=batch, max_target_length=TOKENS,
        attention="dot_product", hardware="cpu", dataset_type="synthetic", enable_checkpointing=False, run_name="plan",
        skip_jax_distributed_system=True, **more,
    )  # fmt: skip
    mesh = maxtext_utils.get_mesh_from_config(config, jax.devices()[:1])
    _, made = model_creation_utils.create_nnx_abstract_model(config, mesh)
    _, optimizer = train_utils.create_training_optimizer(config, made)
    graph, *states = nnx.split(made, nnx.Param, ...)
    parameters, rest = jax.tree.map(lambda leaf: jax.ShapeDtypeStruct(leaf.shape, leaf.dtype), states)

    def step(state: Any, batch: dict[str, jax.Array]) -> tuple[Any, jax.Array]:
        parameters, moments, rest = state

        def loss_of(parameters: Any) -> jax.Array:
            model = nnx.merge(graph, parameters, rest, copy=True)
            with linen.logical_axis_rules(config.logical_axis_rules):
                return train.loss_fn(model, config, dict(batch), None, None, is_train=True)[0]

        loss, gradients = mw.value_and_grad(loss_of)(parameters)
        pure = nnx.to_pure_dict(parameters)
        updates, moments = optimizer.update(nnx.to_pure_dict(gradients), moments, pure)
        nnx.replace_by_pure_dict(parameters, jax.tree.map(lambda x, u: x + u.astype(x.dtype), pure, updates))
        return (parameters, moments, rest), loss

    keys = ("inputs", "inputs_position", "inputs_segmentation", "targets", "targets_position", "targets_segmentation")
    tokens = jax.ShapeDtypeStruct((batch, TOKENS), jnp.int32)
    moments = jax.eval_shape(lambda p: optimizer.init(nnx.to_pure_dict(p)), parameters)
    return step, ((parameters, moments, rest), dict.fromkeys(keys, tokens))


def llama2_7b(global_batch: int = 64) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return maxtext("llama2-7b", global_batch, scan=True)


def llama2_7b_unscanned(global_batch: int = 64) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return maxtext("llama2-7b", global_batch, scan=False)


def mixtral_8x7b(global_batch: int = 64) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return maxtext("mixtral-8x7b", global_batch, scan=True, **DENSE)


def mixtral_8x7b_unscanned(global_batch: int = 64) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    return maxtext("mixtral-8x7b", global_batch, scan=False, **DENSE)


# Tokens of an expert are gathered by one-hot products, as many as its capacity.
DENSE = {"sparse_matmul": False, "megablox": False, "capacity_factor": 1.0}
