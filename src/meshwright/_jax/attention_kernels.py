"""The kernels of `meshwright.attention` by platform, chosen when a program is lowered.

* NVIDIA GPUs since Ampere, in bfloat16 or float16: cuDNN's.
* TPUs, heads of a multiple of 128 and positions that fill blocks of 128: JAX's splash attention.
* Everything else: blocks in plain XLA operations (`attention_blocks`).

All take and give what `attention_blocks` does, and the backward pass of each takes the log-sum-exp over all keys where
it has only some of them: that is what attention over a split sequence is made of.

Known limit: under a plain `jax.jit` over arrays that are split over several GPUs, cuDNN's kernel runs whole on each.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp
from jax._src.cudnn import fused_attention_stablehlo as cudnn  # its primitives have no public form; 0.10 to 0.12
from jax.interpreters import mlir

from . import attention_blocks
from .attention_blocks import Mask

_HALF = ("bfloat16", "float16")

# Parts of the names of NVIDIA's GPUs before Ampere, for which cuDNN has no such kernel, and of those since Hopper.
_BEFORE_AMPERE = ("V100", "P100", "P40", "P4", "T4", "K80", "M60", "TITAN", "Quadro RTX")
_SINCE_HOPPER = ("H100", "H200", "H800", "H20", "GH200", "B100", "B200", "B300", "GB200", "GB300")

# Positions of a block of splash attention, as MaxText has it (`sa_block_q` in its base configuration; JAX's default is
# 128), and of which they are multiples.
_SPLASH_BLOCK, _LANES = 512, 128


def has_kernel(platform: str, kind: str, dtype: str) -> bool:
    """Whether devices have a kernel for attention of this type and suitable heads, other than blocks.

    Args:
      platform: "cpu", "gpu" or "tpu".
      kind: JAX's name of the device.
      dtype: of queries, keys and values.
    """
    is_nvidia = platform == "gpu" and not kind.startswith(("AMD", "MI"))
    return platform == "tpu" or (is_nvidia and dtype in _HALF and _generation_of(kind) >= 8)


def generation(device: Any) -> int:
    """The first number of the compute capability of an NVIDIA GPU: 8 of Ampere, 9 of Hopper; 0 before Ampere.

    Args:
      device: here or not, as JAX describes it; None where that is not known: the GPU that is here, or that is named
        while tracing (`_jax.cudnn.as_on`).
    """
    if device is None:
        return next((number for number in (9, 8) if cudnn.check_compute_capability(f"{number}.0")), 0)
    capability = getattr(device, "compute_capability", None)
    if isinstance(capability, str):
        return int(capability.split(".")[0])
    return _generation_of(device.device_kind)


def _generation_of(kind: str) -> int:
    """The same by the name of an NVIDIA GPU."""
    if any(part in kind for part in _BEFORE_AMPERE):
        return 0
    return 9 if any(part in kind for part in _SINCE_HOPPER) else 8


def takes_cudnn(query: Any, value: Any, mask: Mask, generation: int) -> bool:
    """Whether cuDNN has a kernel for such arrays (the conditions of `jax.nn.dot_product_attention`)."""
    size, of_values = query.shape[-1], value.shape[-1]
    since_hopper = generation >= 9
    fits = size <= (256 if since_hopper else 128) and size % 8 == of_values % 8 == 0
    fits &= size == of_values or since_hopper
    return generation >= 8 and str(query.dtype) in _HALF and fits and not mask.offset


def takes_splash(query: Any, key: Any, value: Any) -> bool:
    """Whether splash attention has a kernel for such arrays."""
    sizes = query.shape[1], key.shape[1], query.shape[-1], value.shape[-1]
    return all(size % _LANES == 0 for size in sizes)


def _cudnn_options(
    query: jax.Array, key: jax.Array, mask: Mask, scale: float
) -> tuple[list[jax.Array], dict[str, Any]]:
    """Operands beside queries, keys and values, and parameters, of cuDNN's kernels."""
    none, lengths = jnp.zeros((0,), query.dtype), jnp.zeros((0,), jnp.int32)
    lengths_and_pages = [none, *cudnn._fix_seqlen_offsets(lengths, lengths, lengths, lengths, query, key)]
    kind = cudnn.MaskType.CAUSAL if mask.causal else cudnn.MaskType.NO_MASK
    return [*lengths_and_pages, lengths, lengths], {
        "scale": scale, "seed": 42, "dropout_rate": 0.0, "variadic_args": (False, False), "mask_type": kind,
        "layout": cudnn.AttentionLayout.BTNH.value, "sliding_window_length": mask.window,
    }  # fmt: skip


def _together(query: jax.Array) -> jax.Array:
    """Heads of one dim, (b, s, k, g, d) -> (b, s, k x g, d)."""
    return query.reshape(*query.shape[:2], -1, query.shape[-1])


def _cudnn_forward(query: jax.Array, key: jax.Array, value: jax.Array, *, mask: Mask, scale: float) -> Any:
    batch, queries, key_heads, group, _ = query.shape
    heads = _together(query)
    more, options = _cudnn_options(heads, key, mask, scale)
    out, sums = cudnn._dot_product_attention_fwd_p.bind(heads, key, value, *more, **options, is_training=True)
    return out.reshape(*query.shape[:-1], value.shape[-1]), sums.reshape(batch, key_heads, group, queries)


def _cudnn_backward(
    query: jax.Array, key: jax.Array, value: jax.Array, out: jax.Array, sums: jax.Array, cotangent: jax.Array, *,
    mask: Mask, scale: float,
) -> Any:  # fmt: skip
    heads, mixed, moved = map(_together, (query, out, cotangent))
    more, options = _cudnn_options(heads, key, mask, scale)
    sums = sums.reshape(sums.shape[0], -1, sums.shape[-1])
    to_query, *others = cudnn._dot_product_attention_bwd_p.bind(heads, key, value, *more, sums, mixed, moved, **options)
    return (to_query.reshape(query.shape), *others)


def _splash(query: jax.Array, key: jax.Array, mask: Mask, *, interpret: bool) -> Any:
    """Splash attention of the queries of one key head."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel, splash_attention_mask

    shape = query.shape[1], key.shape[1]
    one: Any = splash_attention_mask.FullMask(shape)
    if mask.causal and mask.window is not None:
        one = splash_attention_mask.LocalMask(shape, (mask.window - 1, 0), mask.offset)
    elif mask.causal:
        one = splash_attention_mask.CausalMask(shape, mask.offset)
    rows, columns = (
        next(size for size in range(min(extent, _SPLASH_BLOCK), 0, -_LANES) if extent % size == 0) for extent in shape
    )
    sizes = splash_attention_kernel.BlockSizes(
        block_q=rows, block_kv=columns, block_kv_compute=columns, block_q_dkv=rows, block_kv_dkv=columns,
        block_kv_dkv_compute=columns, block_q_dq=rows, block_kv_dq=columns,
    )  # fmt: skip
    masks = splash_attention_mask.MultiHeadMask([one] * query.shape[3])
    return splash_attention_kernel.make_splash_mqa(
        masks, block_sizes=sizes, head_shards=1, q_seq_shards=1, save_residuals=True, interpret=interpret
    )


def _by_head(query: jax.Array, *others: jax.Array) -> list[jax.Array]:
    """(b, s, k, g, d) -> (b, k, g, s, d), and keys and values (b, t, k, d) -> (b, k, t, d)."""
    return [query.transpose(0, 2, 3, 1, 4), *(other.swapaxes(1, 2) for other in others)]


def splash_forward(
    query: jax.Array, key: jax.Array, value: jax.Array, *, mask: Mask, scale: float, interpret: bool = False
) -> Any:
    """`attention_blocks.forward` by splash attention; `interpret` runs it on any device."""
    kernel = _splash(query, key, mask, interpret=interpret)
    out, (sums,) = jax.vmap(jax.vmap(kernel))(*_by_head(query * scale, key, value))
    return out.transpose(0, 3, 1, 2, 4), sums


def splash_backward(
    query: jax.Array, key: jax.Array, value: jax.Array, out: jax.Array, sums: jax.Array, cotangent: jax.Array, *,
    mask: Mask, scale: float, interpret: bool = False,
) -> Any:  # fmt: skip
    """`attention_blocks.backward` by splash attention; `interpret` runs it on any device."""
    from jax.experimental.pallas.ops.tpu.splash_attention import splash_attention_kernel

    kernel = _splash(query, key, mask, interpret=interpret)
    options = {**kernel.kwargs, "save_residuals": False, "residual_checkpoint_name": None}
    names = (
        "save_residuals", "mask_value", "is_mqa", "block_sizes", "residual_checkpoint_name", "mask_function",
        "attn_logits_soft_cap", "interpret",
    )  # fmt: skip
    before = [options[name] for name in names]
    # There is no public form that takes a log-sum-exp; 0.10 to 0.12.
    gradients: Callable[..., Any] = splash_attention_kernel._splash_attention_bwd

    def of_head(*operands: Any) -> Any:
        query, key, value, out, sums, cotangent = operands
        kept = query, key, value, None, None, out, sums, kernel.dq_mask_info, kernel.dkv_mask_info
        return gradients(*before, kept, cotangent)[3:6]

    turned = _by_head(query * scale, key, value)
    mixed, moved = (one.transpose(0, 2, 3, 1, 4) for one in (out, cotangent))
    to_query, to_key, to_value = jax.vmap(jax.vmap(of_head))(*turned, mixed, sums, moved)
    to_query = (to_query * scale).astype(query.dtype).transpose(0, 3, 1, 2, 4)
    return to_query, *(one.swapaxes(1, 2).astype(key.dtype) for one in (to_key, to_value))


def device_of(ctx: Any) -> Any:
    """A device that a program is lowered for, here or not; None where that is not said."""
    axes = ctx.module_context.axis_context
    mesh = getattr(axes, "mesh", None)
    devices = getattr(axes, "device_assignment", None) or getattr(mesh, "_flat_devices_tuple", None)
    return devices[0] if devices else None


def lowering(platform: str, *, backward: bool) -> Callable[..., Any]:
    """A lowering rule for operands as of `attention_blocks.forward` or, `backward`, of its backward pass.

    Args:
      platform: "cuda", "tpu" or another.
      backward: which of the two.
    """
    blocks = attention_blocks.backward if backward else attention_blocks.forward

    def rule(ctx: Any, *operands: Any, mask: Mask, scale: float) -> Any:
        query, key, value = ctx.avals_in[:3]
        function: Callable[..., Any] = blocks
        if platform == "cuda" and takes_cudnn(query, value, mask, generation(device_of(ctx))):
            function = _cudnn_backward if backward else _cudnn_forward
        elif platform == "tpu" and takes_splash(query, key, value):
            function = splash_backward if backward else splash_forward
        return mlir.lower_fun(partial(function, mask=mask, scale=scale), multiple_results=True)(ctx, *operands)

    return rule
