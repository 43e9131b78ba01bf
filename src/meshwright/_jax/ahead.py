"""Devices that are not here, to compile for: XLA's TPU and GPU compilers need none.

JAX describes them by `jax.experimental.topologies.get_topology_desc`. Its TPU plugin is libtpu, its GPU plugin that of
CUDA: packages that are installed or not, whatever the machine. Seen with JAX 0.10.2 and libtpu 0.0.42.
"""

from __future__ import annotations

import importlib.util
import os
from collections.abc import Sequence
from math import gcd

import jax
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


def has_tpu_compiler() -> bool:
    """Whether libtpu is installed."""
    return importlib.util.find_spec("libtpu") is not None


def tpu_kinds() -> tuple[str, ...]:
    """JAX's names of the TPUs that can be compiled for."""
    return tuple(_TPUS)


def tpu_devices(kind: str, torus: Sequence[int], wraps: Sequence[bool], slices: int) -> tuple[jax.Device, ...]:
    """The chips of slices of a TPU, slice by slice, each in the row-major order of its torus.

    Args:
      kind: one of `tpu_kinds`.
      torus: chips by dim.
      wraps: of each dim, whether it closes to a ring.
      slices: of that shape.
    """
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
