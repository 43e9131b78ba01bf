"""Options of XLA's compilers by which the programs of plans run collectives beside compute.

By default the compiler of TPU v5p gathers parameters while nothing else runs, and that of A100s orders programs for
little memory. These are the options by which users of JAX change that, from the lists of XLA (its
`docs/flags_guidance.md` and `docs/gpu_optimization_levels.md`) and of MaxText; `docs/compilers.md` says what
each does to schedules and peaks. A program has them as options of its own, so that others in the process are compiled
as before. What the environment sets stays as it is set there, and a compiler that does not know them goes without.
"""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from functools import cache
from typing import Any

import jax

from .ahead import lower

# Gathers in steps that are fused with the products beside them.
_TPU = {
    "xla_tpu_enable_async_collective_fusion": True,
    "xla_tpu_enable_async_collective_fusion_fuse_all_gather": True,
    "xla_tpu_enable_async_collective_fusion_multiple_steps": True,
    "xla_tpu_overlap_compute_collective_tc": True,
    "xla_enable_async_all_gather": "enabled",
}
# The order that hides latency: the default of NVIDIA's GPUs since Hopper (compute capability 9). For those before
# Ampere (8) XLA estimates otherwise how long a kernel takes, and they keep their order for little memory. AMD's
# ("gfx942") are asked for it too, since their memory is counted so; what it hides there is not known.
_GPU = {"xla_gpu_enable_latency_hiding_scheduler": True}


def compiler_options(devices: Sequence[jax.Device]) -> dict[str, Any]:
    """The options for a program on these devices, as `jax.jit(compiler_options=)` takes them.

    Args:
      devices: that it runs on, here or not.
    """
    device = next((one for one in devices if one.process_index == jax.process_index()), devices[0])
    asked = _asked(device) if len(devices) > 1 else {}
    flags = f"{os.environ.get('XLA_FLAGS', '')} {os.environ.get('LIBTPU_INIT_ARGS', '')}".split()
    given = {flag.lstrip("-").partition("=")[0] for flag in flags}
    left = [(name, value) for name, value in asked.items() if name not in given]
    if left and not _knows(device, tuple(left)):
        left = [one for one in left if _knows(device, (one,))]
    return dict(left)


def _asked(device: jax.Device) -> Mapping[str, Any]:
    capability = str(getattr(device, "compute_capability", ""))
    return _TPU if device.platform == "tpu" else _GPU if capability.startswith(("8.", "gfx")) else {}


@cache
def _knows(device: jax.Device, options: tuple[tuple[str, Any], ...]) -> bool:
    """Whether a device's compiler takes these options: newer ones may have others."""
    nothing = jax.ShapeDtypeStruct((), "float32", sharding=jax.sharding.SingleDeviceSharding(device))
    try:
        lower(jax.jit(lambda x: x), [nothing], device).compile(compiler_options=dict(options))
    except jax.errors.JaxRuntimeError as error:
        if not any(words in str(error) for words in ("compile option", "While setting option", "into flag")):
            raise
        return False
    return True
