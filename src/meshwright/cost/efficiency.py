"""How much of a device's peak a program reaches, by class of operation: one profile per software and device kind.

A device's peak FLOP/s and bytes/s are facts of the hardware. What a framework makes of them is not: the library of
matrix products, whether attention is one kernel, what the compiler fuses, which collectives run beside compute. A
profile is these few fractions, equal for all models and plans; `cost.kernels` applies them to each operation at its
size, so a profile can be fitted to measurements of some models and used for others (Williams, Waterman and Patterson,
"Roofline", 2009, with a ceiling per class of operation).

A plan is searched under the profile of its devices (`profile_of`): what their description says of large products
(`Device.efficiency`, measured where it is a calibration), the rest by kind. Stated plans may be evaluated under one
that was fitted to a framework's published steps (`benchmarks/published_profiles.json`).
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, fields, replace
from functools import lru_cache
from typing import Any

from .._jax.dataflow import WIDE
from ..cluster import Device

# Passes backward over what a loop slices, for each one forward.
SLICED_BACKWARD = 3.0

# Fractions have to be in (0, 1]; the rest at least 0.
_FRACTIONS = ("matmul", "narrow", "convolution", "attention", "memory", "network")


@dataclass(frozen=True, slots=True, kw_only=True)
class EfficiencyProfile:
    """Fractions of a device's peaks.

    >>> EfficiencyProfile(name="toy", matmul=0.8).but(matmul=0.5).matmul
    0.5

    Args:
      name: of the software and the device.
      matmul: of peak FLOP/s that a large matrix product reaches.
      narrow: the same for types of one byte, of their own (higher) peak.
      convolution: the same for a convolution.
      feature_ramp: features of a convolution that cost as much again as its arithmetic: it takes 1 + feature_ramp / F
        times as long where it makes F.
      attention: the same for fused attention, of the FLOPs that the mask leaves.
      memory: of the memory bandwidth of the device (which presets give as large operations reach it).
      passes: how often a value that is stored passes through memory for each time it is made: once written, once or
        more read. Compilers that fuse less have more.
      fused_share: of that traffic, what is left of operations that are fused into their readers.
      joined: whether the compiler computes chains inside the products that read them, and again for each, in the place
        of storing what they make (`program.residuals.is_stored`).
      sliced: how often what the body of a loop takes out of a stack (a layer's weights) passes through memory for that,
        forward; three times as often backward, where it is taken again and its gradient is added to that of the stack.
      packed: how often the right operand of a product passes through memory beside being read: libraries bring it into
        blocks of their own.
      tiles: whether products pay for tiles that their result does not fill, and for a last wave of tiles that leaves
        processors idle.
      network: of the collectives' bandwidth.
      hidden_weights: the share of collectives on parameters that runs beside compute where there is enough of it. (In
        stated plans it is that of gradients too: published measurements do not tell the two apart.)
      hidden_gradients: the same for collectives on gradients of parameters.
      together_bytes: collectives on parameters and their gradients are sent together up to so many bytes; 0 for each by
        itself.
      hidden_activations: the same for collectives on activations.
      broadcasts: whether parts of updated parameters are sent round by one broadcast after the other, one for each
        device that holds a part, in the place of an all-gather.
      idle: seconds a step beside what the program does (loading data, logging), as a share of the step.
      recipe: where its numbers come from.

    Raises:
      ValueError: for numbers that are out of range.
    """

    name: str
    matmul: float = 0.8
    narrow: float = 0.6
    convolution: float = 0.6
    feature_ramp: float = 0.0
    attention: float = 0.5
    memory: float = 1.0
    passes: float = 2.0
    fused_share: float = 0.1
    joined: bool = False
    sliced: float = 0.0
    packed: float = 0.0
    tiles: bool = True
    network: float = 1.0
    hidden_weights: float = 0.0
    hidden_gradients: float = 0.0
    together_bytes: float = 0.0
    hidden_activations: float = 0.0
    broadcasts: bool = False
    idle: float = 0.0
    recipe: str = "default"

    def __post_init__(self) -> None:
        for field in fields(self):
            value = getattr(self, field.name)
            if isinstance(value, (str, bool)):
                continue
            top = 1.0 if field.name in _FRACTIONS or field.name.startswith("hidden") else math.inf
            if not (math.isfinite(value) and 0 <= value <= top and (value > 0 or field.name not in _FRACTIONS)):
                raise ValueError(
                    f"refused the efficiency profile {self.name!r}: got {field.name}={value!r}; needed a number from 0 "
                    f"{'to 1' if top == 1 else 'up'}; where: EfficiencyProfile({field.name}=); "
                    "try: a fraction of what the datasheet says"
                )

    def but(self, **changes: Any) -> EfficiencyProfile:
        """The same with some numbers changed."""
        return replace(self, **changes)


# What is known of a kind of device beside its description. attention: FlashAttention-2 reports 0.5 to 0.7 of A100's
# peak; FlashAttention-3 (Shah et al. 2024, figures 5 and 6: heads of 128, 16,384 positions) of cuDNN on H100 539
# (causal) and 595 TFLOP/s forward and 516 backward, 0.53 of the peak. On CPUs it is no kernel of its own and computes
# what the mask leaves out too, nothing comes in tiles, and products write their right operand once more and read it:
# without, calibrations predict their products of 32 x 256 x 256 a quarter too fast. XLA copies there what a loop
# slices, here in one pass, and backward brings it into another order (`search.prices.product_orders`): of 1 MiB of
# weights both are 3 ms, where 1.5 to 4.8 are measured (`benchmarks/cpu_costs.py`). TPU: chains are made inside the
# products that read them, and cost 0.15 of their traffic there: with 0.1, 0.15 and 0.2 two unrolled GPTs take
# 0.85 to 0.9, 0.95 to 1 and 1.05 to 1.1 times the compiler's cycles (`benchmarks/compiled_cycles.py`).
# Collectives of parameters. XLA sends those of GPUs together up to 30 MiB (xla_gpu_all_gather_combine_threshold_bytes
# and its like). Its latency-hiding scheduler, which orders programs for GPUs since Ampere (`_jax.compiler_options`),
# hides 0.86 to 0.93 of ZeRO-3's gathers and 0.85 to 0.98 of the sums of H100s, of A100s 0.54 to 0.87 and 0.37 to 0.94
# (`benchmarks/compiled_overlap.py`). TPUs gather ahead and hide no sums by their compiler's schedules; MaxText's steps
# fit with 0.36 of all collectives of parameters hidden (`benchmarks/published_profiles.json`): 0.54 of the gathers.
_TOGETHER = {"together_bytes": 30 * 2.0**20}
_HIDDEN = {
    "gpu": {"hidden_weights": 0.85, "hidden_gradients": 0.9},
    WIDE: {"hidden_weights": 0.7, "hidden_gradients": 0.7},
}
_BY_KIND: Mapping[str, EfficiencyProfile] = {
    "V100": EfficiencyProfile(name="V100", convolution=0.75, attention=0.4, **_TOGETHER),
    "A100": EfficiencyProfile(name="A100", attention=0.5, **_TOGETHER),
    "H100": EfficiencyProfile(name="H100", narrow=0.6, attention=0.53, **_TOGETHER),
    "H200": EfficiencyProfile(name="H200", narrow=0.6, attention=0.53, **_TOGETHER),
    "B200": EfficiencyProfile(name="B200", **_TOGETHER),
    "B300": EfficiencyProfile(name="B300", **_TOGETHER),
    "TPU": EfficiencyProfile(
        name="TPU", attention=0.4, joined=True, fused_share=0.15, tiles=False, hidden_weights=0.54
    ),
    "cpu": EfficiencyProfile(
        name="cpu", convolution=1.0, feature_ramp=4.0, attention=0.5, sliced=1.0, packed=2.0, tiles=False
    ),
    **{part: EfficiencyProfile(name=part, **_TOGETHER) for part in ("L40S", "RTX", "P40", "AMD")},
    "": EfficiencyProfile(name="any"),
}


@lru_cache(maxsize=256)
def profile_of(device: Device) -> EfficiencyProfile:
    """The profile of a device where nothing is known of the software but that it compiles and fuses.

    >>> from meshwright.cluster import load_cluster
    >>> profile_of(load_cluster("dgx-h100").device).name
    'H100'
    """
    known = next(profile for part, profile in _BY_KIND.items() if part in device.kind)
    hidden = _HIDDEN.get(device.compiler, {}) if "NVIDIA" in device.kind else {}
    return known.but(matmul=device.efficiency, **hidden)
