"""Plans that rows of published measurements state (`benchmarks/published.py`).

Sizes that contradict each other or the model are refused: no such run can have been. A row that leaves something open
which a plan needs has several candidates.
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import dataclass, replace

from published_cells import Inexpressible, Row, number
from published_frameworks import Generation, generation_of
from published_models import experts_of
from stated import StatedPlan
from stated.plan import Recompute

# What a simulation of a pipeline takes grows with ranks and stages: 256 of each take half a minute.
_MOST_SIMULATED = 256 * 256

# A batch that is this near to a whole number of microbatches was rounded by who wrote it down.
_ROUNDED = 0.02


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of a plan's axes; `data` are all devices that share the batch, those of experts included."""

    devices: int
    tensor: int
    pipeline: int
    context: int
    data: int
    expert: int


def sizes_of(row: Row) -> Sizes:
    """As a row states them.

    Raises:
      Inexpressible: if they are not stated, or are not those of so many devices.
    """
    devices = number(row, "n_devices")
    if devices is None:
        raise Inexpressible("the number of devices is not stated")
    tensor, pipeline, context, expert = (number(row, name) or 1 for name in ("tp", "pp", "cp", "ep"))
    data = number(row, "dp")
    if data is None:
        if row.get("tp"):
            data = max(1, devices // (tensor * pipeline * context))
        elif "largest-dim" in (row.get("shard") or "") and devices > 1:
            raise Inexpressible("parameters split by a heuristic, the rest by another planner's search: no stated plan")
        else:
            data = devices
    if generation_of(row).name == "megatron-core" and expert > data and tensor * data % expert == 0:
        # It deals experts over tensor devices too, whole: these are taken to share each expert's products.
        expert = data
    if tensor * pipeline * context * data != devices:
        raise Inexpressible(f"tp x pp x cp x dp = {tensor * pipeline * context * data} is not {devices} devices")
    return Sizes(
        devices=devices, tensor=tensor, pipeline=pipeline, context=context, data=data, expert=expert
    )  # fmt: skip


def check_sizes(row: Row, sizes: Sizes, generation: Generation) -> None:
    """Refuse what cannot have run.

    Raises:
      Inexpressible: saying which numbers contradict each other.
    """
    experts, heads, layers = experts_of(row), number(row, "n_heads"), number(row, "n_layers")
    if sizes.expert > 1 and not experts:
        raise Inexpressible(f"ep is {sizes.expert}, and no experts are stated")
    if experts and experts % sizes.expert:
        raise Inexpressible(f"ep is {sizes.expert}, which does not share {experts} experts evenly")
    if sizes.data % sizes.expert:
        raise Inexpressible(f"ep is {sizes.expert}, which is no part of dp {sizes.data}")
    if heads and heads % sizes.tensor:
        raise Inexpressible(f"tp is {sizes.tensor}, which does not share {heads} heads evenly")
    chunks = number(row, "vpp") or 1
    stages = sizes.pipeline * chunks
    if chunks > 1 and sizes.pipeline == 1:
        raise Inexpressible(f"vpp is {chunks}, and there is no pipeline to interleave")
    if layers and layers < stages:
        raise Inexpressible(f"pp x vpp = {stages} stages, and {layers} layers")
    if sizes.pipeline * stages > _MOST_SIMULATED:
        raise Inexpressible(
            f"pp x pp x vpp = {sizes.pipeline * stages}, needed {_MOST_SIMULATED} at most to simulate it"
        )
    if layers and layers % stages and generation.even_stages:
        raise Inexpressible(f"pp x vpp = {stages} stages do not share {layers} layers evenly")
    batch, micro, accumulate = (number(row, name) for name in ("gbs", "mbs", "grad_accum"))
    if batch and micro and accumulate and row.get("dp") and micro * accumulate * sizes.data != batch:
        raise Inexpressible(
            f"mbs x grad_accum x dp = {micro * accumulate * sizes.data} is not the global batch of {batch}"
        )


def sharding_of(row: Row, default: int, data: int) -> tuple[int, int]:
    """ZeRO stage, and groups of devices that each hold everything; `default` where a row says nothing.

    Raises:
      Inexpressible: if it is no layout of ours.
    """
    text = re.sub(r"zero[-_ ](?=\d)", "zero", (row.get("shard") or "").lower())
    if not text:
        return default, 1
    if text == "hsdp":
        # Parameters are split inside a host.
        return 3, _groups(row, data, 8)
    if text.startswith("hsdp"):
        inside = re.search(r"fsdp ([1-9]\d{0,6})\b", text)
        if inside is None:
            raise Inexpressible(f"sharding {row['shard']!r} does not say inside of how many devices")
        return 3, _groups(row, data, int(inside[1]))
    if "zero1" in text or "(pos)" in text or re.search(r"distributed[- _]optimizer", text):
        within = re.search(r"within ([1-9]\d{0,6})\b", text)
        return 1, _groups(row, data, int(within[1])) if within else 1
    if "zero2" in text or "weight-update" in text:
        return 2, 1
    if "zero3" in text or "fsdp" in text:
        return 3, 1
    if text in ("none", "ddp", "zero0") or "largest-dim" in text:
        return 0, 1
    raise Inexpressible(f"sharding {row['shard']!r} is no layout of ours: none, ddp, zero1 to zero3, fsdp or hsdp")


def _groups(row: Row, data: int, within: int) -> int:
    if data > within and data % within:
        raise Inexpressible(f"sharding {row['shard']!r}: groups of {within} do not share {data} devices evenly")
    return max(1, data // within)


def recompute_of(row: Row, generation: Generation) -> tuple[Recompute, float]:
    """What is computed again, and of which share of the layers.

    Raises:
      Inexpressible: if it is not known.
    """
    text = (row.get("recompute") or "").lower()
    if text in ("", "none") or text.startswith("minimal"):  # MaxText's keeps what products make
        return "none", 1.0
    if text in ("full", "custom") or "offload" in text:
        return "layer", 1.0
    if "attention" in text or (text == "selective" and generation.core_attention):
        return "attention", 1.0
    if "2nd" in text:
        return "layer", 0.5
    if "per-op" in text:
        return "alternate", 1.0
    if text == "selective":
        # fms-fsdp recomputes a share of its layers: hfu_pct over mfu_pct says which (a forward pass is a third).
        mfu, hfu = row.get("mfu_pct"), row.get("hfu_pct")
        if mfu and hfu:
            return "layer", min(1.0, max(0.0, 3 * (float(hfu) / float(mfu) - 1)))
        return "alternate", 1.0
    raise Inexpressible(f"recomputation {row['recompute']!r} is not known: none, full or selective")


def _microbatches(row: Row, batch: int, sizes: Sizes) -> Sequence[int]:
    """Samples of a device's microbatch that a row states, or leaves open."""
    micro, accumulate = number(row, "mbs"), number(row, "grad_accum")
    if micro is None and accumulate is not None:
        if batch % (accumulate * sizes.data):
            raise Inexpressible(f"batch {batch} is not a multiple of dp {sizes.data} x grad_accum {accumulate}")
        return [batch // (accumulate * sizes.data)]
    if micro is not None:
        return [micro]
    if sizes.pipeline == 1 and "quantity" in row:
        return [max(1, batch // sizes.data)]
    return [m for m in (1, 2, 4, 8, 16) if batch % (m * sizes.data) == 0]


def whole_batch(row: Row, batch: int, sizes: Sizes) -> int:
    """The batch, or where it is no multiple of what shares it the nearest one that is, if that is near: texts round."""
    part = sizes.data * (number(row, "mbs") or 1)
    nearest = max(1, round(batch / part)) * part
    return nearest if abs(nearest - batch) <= _ROUNDED * batch else batch


def _chunks(row: Row, generation: Generation, sizes: Sizes) -> Sequence[int]:
    """Stages of a rank that a row states, or leaves open."""
    if not row.get("vpp") and generation.interleaves and sizes.pipeline > 1:
        each = (number(row, "n_layers") or 1) // sizes.pipeline
        return sorted({v for v in (1, 2, 4, each) if each % v == 0})
    return [number(row, "vpp") or 1]


def candidates(
    row: Row, generation: Generation, sizes: Sizes, *, batch: int, slices: int, searched: bool
) -> tuple[StatedPlan, ...]:  # fmt: skip
    """The plans that a row may mean; one if it says everything.

    Args:
      row: the row.
      generation: of its framework.
      sizes: of its axes.
      batch: samples of a step.
      slices: of TPUs that it has; 1 for other devices.
      searched: whether layouts are left to a search.

    Raises:
      Inexpressible: if none has whole microbatches.
    """
    data = sizes.data // sizes.expert
    zero, replicas = sharding_of(row, generation.zero, data)
    if zero == 3 and replicas == 1 and data % slices == 0 and "dcn" not in (row.get("shard") or "").lower():
        # Nobody gathers parameters over the data-center network where the row does not say so.
        replicas = slices
    if sizes.pipeline > 1 and zero == 3:
        # Under pipelines software keeps parameters gathered from microbatch to microbatch (torchtitan:
        # reshard_after_forward=False; Llama 3 says so): else each would gather them anew.
        zero = 2
    recompute, share = recompute_of(row, generation)
    sequence_parallel = row["sp"] == "1" if row.get("sp") else generation.sequence_parallel and sizes.tensor > 1
    # A search that kept the best of all logical meshes, without saying which.
    every = bool(experts_of(row)) and "auto" in (row.get("shard") or "")
    micros = _microbatches(row, batch, sizes)
    counts = [batch // (m * sizes.data) for m in micros if batch % (m * sizes.data) == 0]
    if not counts:
        raise Inexpressible(
            f"batch {batch} is not a multiple of dp {sizes.data}" + (f" x microbatch {micros}" if micros else "")
        )
    found = []
    for count in counts:
        for chunks in _chunks(row, generation, sizes):
            if chunks > 1 and count % sizes.pipeline:
                continue
            plan = StatedPlan(
                tensor=sizes.tensor, pipeline=sizes.pipeline, chunks=chunks, data=data, expert=sizes.expert,
                replicas=replicas, context=sizes.context, zero=zero, sequence_parallel=sequence_parallel,
                microbatches=count, recompute=recompute, recompute_share=share, searched=searched,
            )  # fmt: skip
            found.append(plan)
            if every:
                splits = [n for n in (2, 4, 8) if data % n == 0]
                found += [replace(plan, data=data // n, expert=n) for n in splits]
                found += [replace(plan, data=data // n, tensor=n) for n in splits]
    if not found:
        raise Inexpressible(f"interleaved stages need a multiple of pp {sizes.pipeline} microbatches, not {counts}")
    return tuple(found)
