"""Efficiency profiles and memory layouts of the frameworks that published measurements (`benchmarks/published.py`).

Profiles are fitted and kept in `published_profiles.json`, one for each generation of a framework and kind of device.
Layouts of memory are known from documents and code, but for two numbers of each generation: how many copies of the
logits are alive at once, and what the framework reserves.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from dataclasses import asdict, fields, replace
from pathlib import Path

from published_cells import Row
from published_clusters import device_of
from published_rows import StatedRow
from stated import MemoryLayout

from meshwright.cluster import Device
from meshwright.cost.efficiency import EfficiencyProfile, profile_of as profile_of_device
from meshwright.zoo import wide_resnet

FILE = Path(__file__).with_name("published_profiles.json")

Profiles = Mapping[str, EfficiencyProfile]

_GIB = 2.0**30

# ZeRO (Rajbhandari et al. 2020): two-byte parameters and gradients, 12 bytes of Adam.
ZERO_PAPER = MemoryLayout(weights=2.0, gradients=2.0, optimizer=12.0)

LAYOUTS: Mapping[str, MemoryLayout] = {
    "megatron-2020": MemoryLayout(
        weights=2, gradients=2, optimizer=12, fuses=False, masks=True, reserve_bytes=2 * _GIB
    ),
    "megatron-2021": MemoryLayout(
        weights=2, gradients=4, optimizer=12, fuses=False, masks=True, reserve_bytes=2 * _GIB
    ),
    "megatron-deepspeed": MemoryLayout(
        weights=2, gradients=4, optimizer=12, fuses=False, masks=True, reserve_bytes=2 * _GIB
    ),
    "megatron-2022": MemoryLayout(
        weights=2, gradients=4, optimizer=12, fuses=False, masks=True, reserve_bytes=2 * _GIB
    ),
    "megatron-core": MemoryLayout(weights=2, gradients=4, optimizer=12, fuses=False, reserve_bytes=3 * _GIB),
    "deepspeed-zero3": MemoryLayout(
        weights=2, gradients=2, optimizer=12, fuses=False, masks=True, gathered=4, reserve_bytes=3 * _GIB
    ),
    "metaseq": MemoryLayout(weights=2, gradients=2, optimizer=12, fuses=False, masks=True, reserve_bytes=3 * _GIB),
    "gpt-neox": MemoryLayout(weights=2, gradients=2, optimizer=16, fuses=False, masks=True, reserve_bytes=3 * _GIB),
    "other": MemoryLayout(fuses=True, reserve_bytes=2 * _GIB),
    "alpa": MemoryLayout(weights=2, gradients=2, optimizer=12, whole_gradients=True),
    "maxtext": MemoryLayout(gathered=4),
    "llm-foundry": MemoryLayout(fuses=False, reserve_bytes=1 * _GIB),
    "torchtitan-eager": MemoryLayout(fuses=True, logits=10, inside=2),
    "torchtitan": MemoryLayout(fuses=True, logits=10, inside=2),
    "fms-fsdp": MemoryLayout(fuses=True, reserve_bytes=2 * _GIB),
    # Twelve bytes a parameter, as its benchmarks of memory measured.
    "torchgpipe": MemoryLayout(weights=4, gradients=4, optimizer=4, fuses=False, reserve_bytes=1 * _GIB),
    # Measured from outside: with the allocator's pool and the buckets of gradients.
    "internevo": MemoryLayout(
        weights=2, gradients=2, optimizer=16, fuses=True, logits=14, inside=3, reserve_bytes=16 * _GIB
    ),
}


def read_profiles() -> dict[str, EfficiencyProfile]:
    """The fitted profiles, by generation and kind of device."""
    if not FILE.exists():
        return {}
    known = {field.name for field in fields(EfficiencyProfile)}
    content = json.loads(FILE.read_text())["profiles"]
    return {
        key: EfficiencyProfile(**{name: value for name, value in entry.items() if name in known})
        for key, entry in content.items()
    }


def write_profiles(profiles: Profiles) -> None:
    """Keep fitted profiles."""
    content = {
        "how": "benchmarks/published.py --fit: least squares of the logarithm of predicted over measured step time, "
        "with a weak pull to the default profile of the device; nothing is fitted for a single row",
        "profiles": {key: asdict(profile) for key, profile in sorted(profiles.items())},
    }
    FILE.write_text(json.dumps(content, indent=1) + "\n")


def prior_of(stated: StatedRow) -> EfficiencyProfile:
    """What a profile is before anything is fitted: of the device, with overlap as the framework has it."""
    return profile_of_device(stated.cluster.device).but(
        name=stated.profile_key, hidden_weights=0.7, hidden_activations=stated.generation.hidden_activations,
        broadcasts=stated.generation.name == "internevo", recipe="not fitted",
    )  # fmt: skip


def profile_of(stated: StatedRow, profiles: Profiles) -> EfficiencyProfile:
    """A row's: fitted, or that of the same framework on the device that is the most alike, whose products reach as
    much more or less of their peak as the two devices' do, or that of the device."""
    if stated.profile_key in profiles:
        return profiles[stated.profile_key]
    mine, prior = stated.cluster.device, prior_of(stated)
    near: list[tuple[float, str, Device]] = []
    for key in profiles:
        generation, kind = key.split("/", 1)
        device = device_of(kind)
        if generation == stated.generation.name and device.platform == mine.platform:
            near.append((abs(math.log(_peak(device) / _peak(mine))), key, device))
    if not near:
        return prior
    _, key, device = min(near, key=lambda one: one[:2])
    more = prior.matmul / profile_of_device(device).matmul
    reached = {name: min(1.0, more * getattr(profiles[key], name)) for name in ("matmul", "narrow", "attention")}
    return profiles[key].but(name=f"{key} for {mine.kind}", **reached)


def _peak(device: Device) -> float:
    return max(rate for dtype, rate in device.peak_flops.items() if not dtype.startswith("float8"))


def layout_of(row: Row, stated: StatedRow) -> MemoryLayout:
    """A row's layout of memory."""
    layout = LAYOUTS[stated.generation.name]
    plan = stated.candidates[0]
    if stated.family is wide_resnet:
        # float32 parameters and momentum; what convolutions work in.
        return replace(layout, weights=4, gradients=4, optimizer=4, reserve_bytes=2 * _GIB)
    if stated.generation.name == "llm-foundry" and "PURE" in (row.get("precision") or ""):
        # Parameters, gradients and optimizer state all in two bytes.
        return replace(layout, weights=2, gradients=2, optimizer=4)
    if stated.generation.name.startswith("torchtitan") and plan.pipeline > 1:
        # Parameters stay gathered in two bytes, wide ones and their optimizer state are split.
        return replace(layout, weights=2, gradients=4, optimizer=12, whole_gradients=True)
    return layout


def usable_bytes(stated: StatedRow) -> float:
    """What a device lets a program use: what software reserves is counted in the prediction, so nearly all."""
    return 0.985 * stated.cluster.device.memory_bytes
