"""Devices that are not here, to compile for: XLA's TPU and GPU compilers need none.

JAX describes them by `jax.experimental.topologies.get_topology_desc`. Its TPU plugin is libtpu, its GPU plugin that of
CUDA: packages that are installed or not, whatever the machine. Seen with JAX 0.10.2, libtpu 0.0.42 and CUDA 12.9.
"""

from __future__ import annotations

import importlib
import importlib.util
import os
from collections.abc import Mapping, Sequence
from math import gcd
from pathlib import Path
from typing import Any

import jax
from jax._src.lib import _jax  # jaxlib's clients; no public form up to 0.12
from jax.experimental import topologies

# The TPU compiler's names of the chips that JAX names so, and how many chips a machine has by torus dim.
_TPUS: dict[str, tuple[str, tuple[int, int, int]]] = {
    "TPU v4": ("v4", (2, 2, 1)),
    "TPU v5 lite": ("v5e", (2, 2, 1)),
    "TPU v5": ("v5p", (2, 2, 1)),
    "TPU v6 lite": ("v6e", (2, 2, 1)),
}

# Of libtpu: no search for the metadata of a machine in a data centre, which takes minutes where there is none, and no
# log of that (the type of machine is any that it knows: the topology says what is compiled for); several processes that
# compile at a time.
_LIBTPU = {
    "TPU_SKIP_MDS_QUERY": "1", "TPU_MIN_LOG_LEVEL": "3", "TPU_STDERR_LOG_LEVEL": "3", "ALLOW_MULTIPLE_LIBTPU_LOAD": "1",
    "TPU_ACCELERATOR_TYPE": "v5litepod-8", "TPU_WORKER_HOSTNAMES": "localhost",
}  # fmt: skip


# What XLA says of a product for which none of its Triton tiles serves (jax-ml/jax#34010). With a GPU it tries them out,
# and takes the library's product then.
_NO_TILES = "Couldn't find output tile sizes"


def compile_ahead(lowered: Any, options: Mapping[str, Any] | None = None) -> Any:
    """A lowered program compiled for devices that are not here; where one of its products has no Triton tiles, with the
    library's products.

    Args:
      lowered: as `jax.jit(f).lower(...)` returns it.
      options: of the compiler.
    """
    asked = dict(options or {})
    try:
        return lowered.compile(compiler_options=asked)
    except jax.errors.JaxRuntimeError as error:
        if _NO_TILES not in str(error):
            raise
        return lowered.compile(compiler_options={**asked, "xla_gpu_enable_triton_gemm": False})


def has_tpu_compiler() -> bool:
    """Whether libtpu is installed."""
    return importlib.util.find_spec("libtpu") is not None


def tpu_kinds() -> tuple[str, ...]:
    """JAX's names of the TPUs that can be compiled for."""
    return tuple(_TPUS)


def _has_tpus() -> bool:
    """Whether this machine has TPUs: what their own start reads in the environment must not be changed."""
    return any(any(Path("/dev").glob(pattern)) for pattern in ("accel[0-9]*", "vfio/[0-9]*"))


def tpu_devices(kind: str, torus: Sequence[int], wraps: Sequence[bool], slices: int) -> tuple[jax.Device, ...]:
    """The chips of slices of a TPU, slice by slice, each in the row-major order of its torus.

    Args:
      kind: one of `tpu_kinds`.
      torus: chips by dim.
      wraps: of each dim, whether it closes to a ring.
      slices: of that shape.
    """
    if not _has_tpus():
        for name, value in _LIBTPU.items():
            os.environ.setdefault(name, value)
    name, bounds = _TPUS[kind]
    dims = (*torus, *(1,) * (3 - len(torus)))
    rings = (*wraps, *(False,) * (3 - len(wraps)))
    options = {
        # Of a part of a slice, what it has of a machine.
        "chips_per_host_bounds": tuple(gcd(dim, bound) for dim, bound in zip(dims, bounds, strict=True)),
        "wrap": rings,
        # One device for the two cores of a chip, as JAX runs it.
        "chip_config_name": "megacore" if kind == "TPU v4" else "default",
        **({"num_slices": slices} if slices > 1 else {}),
    }
    topology = topologies.get_topology_desc(f"{name}:{'x'.join(map(str, torus))}", "tpu", **options)
    return tuple(sorted(topology.devices, key=lambda one: (getattr(one, "slice_index", None) or 0, tuple(one.coords))))


def _cuda_plugin() -> str | None:
    names = ("jax_plugins.xla_cuda12", "jax_plugins.xla_cuda13") if importlib.util.find_spec("jax_plugins") else ()
    return next((name for name in names if importlib.util.find_spec(name)), None)


def has_cuda_compiler() -> bool:
    """Whether JAX's plugin for NVIDIA GPUs is installed."""
    return _cuda_plugin() is not None


def gpu_devices(target: str, hosts: int, devices: int) -> tuple[jax.Device, ...]:
    """NVIDIA GPUs, host by host.

    Args:
      target: a `GpuTargetConfigProto` as text.
      hosts: between which there is a network, not NVLink.
      devices: of each host.
    """
    # Of JAX's check of CUDA's libraries, which fails where there is no GPU.
    os.environ.setdefault("JAX_SKIP_CUDA_CONSTRAINTS_CHECK", "1")
    options = {"target_config": target, "topology": f"{hosts}x1x{devices}"}
    try:
        topology = topologies.get_topology_desc("", "cuda", **options)
    except NotImplementedError:  # JAX started before that was set, and left the plugin out
        importlib.import_module(_cuda_plugin() or "").initialize()
        topology = topologies.get_topology_desc("", "cuda", **options)
    return tuple(sorted(topology.devices, key=lambda one: one.id))


def lower(jitted: Any, avals: Sequence[jax.ShapeDtypeStruct], device: jax.Device) -> Any:
    """A jitted function lowered from shapes alone; compiled, it is what a call on such devices runs.

    Args:
      jitted: as `jax.jit` returns it.
      avals: of its arguments, with their shardings.
      device: one of those that it is for, here or not.
    """
    # A GPU that is not here calls itself "gpu", and JAX asks those that are here whether that is CUDA or ROCm
    # (github.com/jax-ml/jax/issues/23971). Only NVIDIA's are compiled for without one.
    absent = device.platform == "gpu" and isinstance(device.client, _jax.CompileOnlyPyClient)
    return jitted.trace(*avals).lower(lowering_platforms=("cuda",) if absent else None)
