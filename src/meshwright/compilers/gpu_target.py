"""What XLA's compiler for NVIDIA GPUs is told of one: a `GpuTargetConfigProto` as text, from `gpu_targets.toml`.

Facts are kept rather than XLA's own files, whose newest have fields that the compilers of released JAX refuse.
"""

from __future__ import annotations

import tomllib
from functools import cache
from importlib import resources
from typing import Any

from ..cluster import Device

# The same for all of compute capability 7.0 to 10.3: NVIDIA CUDA C++ Programming Guide, and XLA's files.
_COMMON = {
    "threads_per_block_limit": 1024, "threads_per_warp": 32, "shared_memory_per_block": 49152,
    "registers_per_core_limit": 65536, "registers_per_block_limit": 65536,
    "block_dim_limit_x": 2147483647, "block_dim_limit_y": 65535, "block_dim_limit_z": 65535,
}  # fmt: skip

# Of `device_memory_size`, what XLA lets a program take where no allocator says how much there is. Past 95 % of that,
# arguments and results left out, it rematerialises: GetSchedulerMemoryLimit in openxla/xla
# xla/service/gpu/gpu_hlo_schedule.cc@0253526.
_PROGRAM_SHARE = 0.8


@cache
def _targets() -> dict[str, dict[str, Any]]:
    text = resources.files("meshwright.compilers").joinpath("gpu_targets.toml").read_text(encoding="utf-8")
    return tomllib.loads(text)


def gpu_kinds() -> tuple[str, ...]:
    """JAX's names of the GPUs that can be compiled for."""
    return tuple(_targets())


def compute_capability(kind: str) -> str | None:
    """Of a kind of GPU, such as "9.0"; None of one that is not known, and of other devices."""
    return _targets().get(kind, {}).get("compute_capability")


def gpu_target(device: Device) -> str:
    """The target that XLA compiles for: such a GPU, with as much memory as the cluster lets a program use.

    Where a program runs, JAX tells XLA the same by what its allocator has: three quarters of the memory, or what
    XLA_CLIENT_MEM_FRACTION says.

    Args:
      device: of one of `gpu_kinds`.
    """
    facts = dict(_targets()[device.kind])
    capability = facts.pop("compute_capability")
    major, minor = capability.removesuffix("a").split(".")
    feature = "ACCELERATED_FEATURES" if capability.endswith("a") else "NONE"
    usable = min(device.usable_memory_bytes, facts.pop("memory_size"))
    numbers = {**_COMMON, **facts, "device_memory_size": round(usable / _PROGRAM_SHARE)}
    described = "\n".join(f"  {name}: {value}" for name, value in numbers.items())
    # cuDNN: the version in XLA's files of the same commits.
    return f"""gpu_device_info {{
{described}
  cuda_compute_capability {{ major: {major} minor: {minor} feature_extension: {feature} }}
}}
platform_name: "CUDA"
dnn_version_info {{ major: 9 minor: 10 }}
device_description_str: "{device.kind}"
"""
