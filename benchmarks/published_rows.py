"""Rows of published measurements as models, stated plans and hardware (`benchmarks/published.py`).

A row that leaves something open which a plan needs gets the choice its authors would have made: the fastest that fits,
among the candidates that `StatedRow.candidates` lists. A row that says something we cannot express is refused with the
reason (`Inexpressible`).
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace
from importlib import import_module
from typing import Any

from published_cells import UNITS, Inexpressible, Row, amount, check_cells, needed_number, number

from meshwright.cluster import Cluster, ClusterError, load_cluster
from meshwright.stated import StatedPlan
from meshwright.zoo import gpt, llama, moe, wide_resnet


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What is known of a framework at a time, from its documents and code, not fitted.

    Args:
      name: with the kind of device, the key of its efficiency profile.
      fused_attention: whether attention is one kernel.
        zero: the ZeRO stage where a row does not say.
      sequence_parallel: where a row does not say and tensor parallelism is used.
      interleaves: whether its pipelines may have been interleaved where a row does not say.
    """

    name: str
    fused_attention: bool
    zero: int = 0
    sequence_parallel: bool = False
    interleaves: bool = False


_GENERATIONS: tuple[tuple[str, str, Generation], ...] = (
    # framework prefix, source_date from, what it was
    ("Alpa", "", Generation(name="alpa", fused_attention=False)),
    ("MaxText", "", Generation(name="maxtext", fused_attention=True, sequence_parallel=True)),
    ("llm-foundry", "", Generation(name="llm-foundry", fused_attention=True)),
    ("torchtitan eager", "", Generation(name="torchtitan-eager", fused_attention=True)),
    ("torchtitan", "", Generation(name="torchtitan", fused_attention=True)),
    ("fms-fsdp", "", Generation(name="fms-fsdp", fused_attention=True)),
    ("InternEvo", "", Generation(name="internevo", fused_attention=True)),
    ("DeepSpeed ZeRO-3", "", Generation(name="deepspeed-zero3", fused_attention=False)),
    ("Megatron-DeepSpeed", "", Generation(name="megatron-deepspeed", fused_attention=False)),
    ("FSDP+Megatron", "", Generation(name="metaseq", fused_attention=False, zero=3)),
    ("GPT-NeoX", "", Generation(name="gpt-neox", fused_attention=False, zero=1)),
    (
        "Megatron-Core", "",
        Generation(
            name="megatron-core", fused_attention=True, zero=1, sequence_parallel=True,
            interleaves=True,
        ),
    ),
    ("Megatron-LM", "2022", Generation(name="megatron-2022", fused_attention=False)),
    ("Megatron-LM", "2021-04", Generation(name="megatron-2021", fused_attention=False)),
    ("Megatron-LM", "", Generation(name="megatron-2020", fused_attention=False)),
    ("torchgpipe", "", Generation(name="torchgpipe", fused_attention=False)),
)  # fmt: skip


def generation_of(row: Row) -> Generation:
    """The framework of a row at its time; one that is not known has the efficiency that its devices are thought to."""
    framework = row.get("framework") or row["source"]
    date = row.get("source_date") or {"Korthikanti 2022": "2022-05"}.get(row["source"], "9999")
    if framework == "torchtitan" and re.search(r"\beager\b", row.get("notes") or ""):
        framework = "torchtitan eager"
    if framework.startswith("Korthikanti"):
        framework = "Megatron-LM"
    for prefix, since, generation in _GENERATIONS:
        if framework.startswith(prefix) and date >= since:
            return generation
    # Of a framework that nobody has told us of: attention is one kernel since 2022, all else as rows say.
    return Generation(name="other", fused_attention=date >= "2022-06")


@dataclass(frozen=True, kw_only=True)
class StatedRow:
    """A row made ready.

    Args:
      row_id: of the row.
      source: of the row.
      generation: of its framework.
      family_name: module of the zoo.
      config: of the model, of one microbatch on all devices.
      candidates: the plans it may mean; one if it says everything.
      batch: samples of a step.
      cluster: a host, or hosts.
      device_kind: as the row says.
      narrow_products: whether products run in float8.
      one_layer: whether only a layer of the model was measured.
    """

    row_id: str
    source: str
    generation: Generation
    family_name: str
    config: Any
    candidates: tuple[StatedPlan, ...]
    batch: int
    cluster: Cluster
    device_kind: str
    narrow_products: bool
    one_layer: bool

    @property
    def family(self) -> Any:
        """The module of the zoo."""
        return import_module(f"meshwright.zoo.{self.family_name}")

    @property
    def profile_key(self) -> str:
        """Of its efficiency profile."""
        return f"{self.generation.name}/{self.device_kind}"

    def config_of(self, plan: StatedPlan, *, layers: int | None = None) -> Any:
        """The model at the size of a microbatch, or one like it of other depth."""
        config = replace(self.config, global_batch=self.batch // plan.microbatches)
        return config if layers is None else replace(config, layers=layers)

    @staticmethod
    def baseline(plan: StatedPlan) -> StatedPlan:
        """What a percentage is of: nothing computed again, no sequence parallelism."""
        return replace(plan, recompute="none", sequence_parallel=False)


# Hardware

_PRESETS = {
    "V100-SXM2-16GB": "p3.16xlarge",
    "V100-SXM3-32GB": "dgx-2",
    "A100-SXM-40GB": "dgx-a100-40",
    "A100-SXM-80GB": "dgx-a100-80",
    "A800-80GB": "dgx-a100-80",
    "H100-SXM-80GB": "dgx-h100",
    "H100-SXM-96GB-HBM2e-500W": "grand-teton",
    "TPUv5e": "tpu-v5e:256",
    "P40-24GB": "p40-8",
}

# Kinds of device that are written otherwise, the first that is found in the name; of slices of TPUs the chips follow.
_KINDS = (
    (r"V100.*16", "p3.16xlarge"), (r"V100.*SXM3", "dgx-2"), (r"V100", "p3dn.24xlarge"), (r"A100.*40", "dgx-a100-40"),
    (r"A[18]00", "dgx-a100-80"), (r"GB200", "gb200-nvl72"), (r"B200", "dgx-b200"), (r"H200", "dgx-h200"),
    (r"H[18]00", "dgx-h100"), (r"4090", "rtx4090-4"), (r"P40", "p40-8"), (r"TPU.?v4", "tpu-v4:"),
    (r"TPU.?v5p", "tpu-v5p:"), (r"TPU.?v5", "tpu-v5e:"), (r"TPU.?v6|Trillium", "tpu-v6e:"),
)  # fmt: skip


def _nics(row: Row) -> tuple[int, float] | None:
    """NICs of a host and the rate of one in bytes/s, where the row's text tells."""
    text = row.get("interconnect") or ""
    many = re.search(r"([1-9]\d*)\s*x\s*([1-9]\d*)\s*Gb/s", text)
    if many:
        return int(many[1]), float(many[2]) / 8 * 1e9
    whole = re.search(r"([1-9]\d*)\s*Gb/s per node", text)
    if whole:
        count = max(1, int(whole[1]) // (400 if "H100" in row["accelerator"] else 200))
        return count, float(whole[1]) / count / 8 * 1e9
    hdr = re.search(r"([1-9]\d*)x HDR", text)
    return (int(hdr[1]), 25e9) if hdr else None


def cluster_of(row: Row) -> Cluster:
    """The preset of a row's machines, with the NICs that the row says: of which a collective reaches 96 %."""
    kind = row["accelerator"]
    like = next((preset for pattern, preset in _KINDS if re.search(pattern, kind, re.IGNORECASE)), None)
    preset = _PRESETS.get(kind) or like
    cards = re.search(r"PCIe", kind, re.IGNORECASE)
    if preset is None or (cards and re.search(r"[HB]\d00", kind, re.IGNORECASE)):
        # H100's cards for PCIe are another chip than those with NVLink.
        raise Inexpressible(f"accelerator {kind!r} is not known")
    try:
        cluster = load_cluster(f"{preset}{number(row, 'n_devices')}" if preset.endswith(":") else preset)
    except ClusterError as error:
        raise Inexpressible(f"accelerator {kind!r}: {error}") from error
    host = cluster.hosts[0]
    if cards:
        host = replace(host, link=load_cluster("rtx4090-4").hosts[0].link, wires=())
    many = number(row, "devices_per_node") or host.devices
    # Of TPUs and of racks in one NVLink domain a row counts the devices of a board.
    tpus = host.device.platform == "tpu"
    if many != host.devices and not tpus and preset != "gb200-nvl72":
        if many > host.devices:
            raise Inexpressible(f"{many} devices a host: those of {preset} have {host.devices}")
        host = replace(host, devices=many, nics=max(1, host.nics * many // host.devices))
    told = _nics(row)
    if told is not None and not tpus:
        nic = replace(host.nic, bandwidth_bytes_per_second=0.96 * told[1])
        host = replace(host, nics=told[0], nic=nic)
    return replace(cluster, hosts=(host,))


# Plans


def _experts(row: Row) -> int | None:
    """How many, told by a column or the model's name; None of a dense model."""
    named = re.search(r"MoE .*\bE(\d+)", row["model"])
    return number(row, "n_experts") or (int(named[1]) if named else None)


def sharding_of(row: Row, default: int, data: int) -> tuple[int, int]:
    """ZeRO stage, and groups of devices that each hold everything; `default` where a row says nothing."""
    text = (row.get("shard") or "").lower()
    if not text:
        return default, 1
    if text == "hsdp":
        # Parameters are split inside a host.
        return 3, max(1, data // 8)
    if text.startswith("hsdp"):
        inside = re.search(r"fsdp ([1-9]\d*)", text)
        if inside is None:
            raise Inexpressible(f"sharding {row['shard']!r} does not say inside of how many devices")
        return 3, max(1, data // int(inside[1]))
    if "zero1" in text or "(pos)" in text:
        within = re.search(r"within ([1-9]\d*)", text)
        return 1, max(1, data // int(within[1])) if within else 1
    if "zero2" in text or "weight-update" in text:
        return 2, 1
    if "zero3" in text or "fsdp" in text:
        return 3, 1
    if text == "none" or "largest-dim" in text:
        return 0, 1
    raise Inexpressible(f"sharding {row['shard']!r} is no layout of ours")


def _recompute(row: Row, generation: Generation) -> tuple[str, float]:
    text = (row.get("recompute") or "").lower()
    if text in ("", "none"):
        return "none", 1.0
    if text == "full" or "offload" in text:
        return "layer", 1.0
    if "attention" in text:
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
    raise Inexpressible(f"recomputation {row['recompute']!r} is not known")


def stated_row(row: Row) -> StatedRow:
    """A row made ready.

    Raises:
      Inexpressible: saying why it cannot.
    """
    check_cells(row)
    generation = generation_of(row)
    model = row["model"]
    if not row.get("accelerator"):
        raise Inexpressible("no accelerator is stated")
    if "U-Net" in model or "AmoebaNet" in model or model.startswith("ResNet"):
        raise Inexpressible(f"{model}: batch size and depth are not stated")
    batch, devices = number(row, "gbs"), number(row, "n_devices")
    if "ResNet" in model and not model.startswith("Wide"):
        raise Inexpressible(f"{model} is not in the zoo")
    if batch is None:
        raise Inexpressible("the global batch is not stated")
    if devices is None:
        raise Inexpressible("the number of devices is not stated")
    tensor, pipeline, context = (number(row, name) or 1 for name in ("tp", "pp", "cp"))
    data = number(row, "dp")
    if data is None:
        if row.get("tp"):
            data = devices // (tensor * pipeline * context)
        elif "largest-dim" in (row.get("shard") or "") and devices > 1:
            raise Inexpressible("parameters split by a heuristic, the rest by another planner's search: no stated plan")
        else:
            data = devices
    expert = number(row, "ep") or 1
    if tensor * pipeline * context * data != devices or data % expert:
        raise Inexpressible(f"tp x pp x cp x dp = {tensor * pipeline * context * data} is not {devices} devices")
    data //= expert
    zero, replicas = sharding_of(row, generation.zero, data)
    # A search that kept the best of all logical meshes, without saying which.
    every = bool(_experts(row)) and "auto" in (row.get("shard") or "")
    if generation.name.startswith("torchtitan") and pipeline > 1 and zero == 3:
        # Under pipelines it keeps parameters gathered from microbatch to microbatch (reshard_after_forward=False).
        zero = 2
    recompute, share = _recompute(row, generation)
    sequence_parallel = row["sp"] == "1" if row.get("sp") else generation.sequence_parallel and tensor > 1
    try:
        family, config = _model(row, generation, batch)
    except ValueError as error:  # a shape that the zoo's model cannot have
        raise Inexpressible(f"{model}: {error}") from error
    searched = family is wide_resnet and "auto" in (row.get("shard") or "")
    layers = number(row, "n_layers") or 1
    micro = number(row, "mbs")
    accumulate = number(row, "grad_accum")
    if micro is None and accumulate is not None:
        micros = [max(1, batch // (accumulate * data))]
    elif micro is not None:
        micros = [micro]
    elif pipeline == 1 and "quantity" in row:
        micros = [max(1, batch // data)]
    else:
        micros = [m for m in (1, 2, 4, 8, 16) if batch % (m * data) == 0]
    chunks = [number(row, "vpp") or 1]
    if not row.get("vpp") and generation.interleaves and pipeline > 1:
        chunks = sorted({v for v in (1, 2, 4, layers // pipeline) if layers // pipeline % v == 0})
    found = []
    for m in micros:
        if batch % (m * data):
            continue
        count = batch // (m * data)
        for v in chunks:
            if (v > 1 and count % pipeline) or layers < pipeline * v:
                continue
            plan = StatedPlan(
                tensor=tensor, pipeline=pipeline, chunks=v, data=data, expert=expert, replicas=replicas,
                context=context, zero=zero, sequence_parallel=sequence_parallel, microbatches=count,
                recompute=recompute, recompute_share=share, searched=searched,
            )  # fmt: skip
            found.append(plan)
            if every:
                splits = [n for n in (2, 4, 8) if data % n == 0]
                found += [replace(plan, data=data // n, expert=n) for n in splits]
                found += [replace(plan, data=data // n, tensor=n) for n in splits]
    if not found:
        raise Inexpressible(f"batch {batch} is not a multiple of dp {data} x microbatch {micros}")
    return StatedRow(
        row_id=row["row_id"], source=row["source"], generation=generation,
        family_name=family.__name__.rpartition(".")[2], config=config,
        candidates=tuple(found), batch=batch, cluster=cluster_of(row), device_kind=row["accelerator"],
        narrow_products="fp8" in (row.get("precision") or "").lower(), one_layer=row.get("status") == "per-layer",
    )  # fmt: skip


def _model(row: Row, generation: Generation, batch: int) -> tuple[Any, Any]:
    """A family of the zoo and a shape."""
    precision = (row.get("precision") or "").lower()
    dtype = "float32" if "fp32" in precision else "float16" if "fp16" in precision else "bfloat16"
    name = row["model"]
    wide = re.match(r"Wide-ResNet-(\d+) c([1-9]\d*) w([1-9]\d*)", name)
    if wide:
        blocks = {"50": wide_resnet.FIFTY, "101": wide_resnet.HUNDRED_AND_ONE}.get(wide[1])
        if blocks is None:
            raise Inexpressible(f"{name} is not in the zoo: of Wide-ResNets 50 and 101 are")
        return wide_resnet, wide_resnet.WideResNetConfig(
            name=name, blocks=blocks, channels=int(wide[2]), width_factor=int(wide[3]), dtype=dtype, global_batch=batch
        )
    if not row.get("d_model"):
        raise Inexpressible(f"{name}: its width is not stated")
    layers, hidden, heads, sequence = (needed_number(row, k) for k in ("n_layers", "d_model", "n_heads", "seq_len"))
    if hidden % heads:
        raise Inexpressible(f"{name}: {heads} heads do not share a width of {hidden} evenly")
    vocabulary = number(row, "vocab") or 51200
    wide_inner = number(row, "d_ff") or 4 * hidden
    experts = _experts(row)
    if experts:
        if number(row, "top_k") not in (None, 2):
            raise Inexpressible(f"{name}: the zoo's experts are two for each token, not {row['top_k']}")
        if row.get("mlp_gated") == "1" or number(row, "n_kv_heads") not in (None, heads):
            raise Inexpressible(f"{name}: the zoo's model with experts has no gates and no shared keys and values")
        return moe, moe.MoEConfig(
            name=name, hidden=hidden, layers=layers, heads=heads, experts=experts, dtype=dtype,
            vocabulary=vocabulary, sequence=sequence, global_batch=batch, intermediate=wide_inner,
        )  # fmt: skip
    gated = row.get("mlp_gated") == "1" or (not row.get("mlp_gated") and wide_inner != 4 * hidden)
    # Embedding and head are split over tensor devices; frameworks pad the vocabulary to do so.
    multiple = 128 * (number(row, "tp") or 1)
    vocabulary = -(-vocabulary // multiple) * multiple
    if gated:
        kv = number(row, "n_kv_heads") or heads
        head = hidden // heads
        params = amount(row, "params_b") * 1e9
        if params:

            def count(dim: int) -> float:
                inner = hidden * dim * (2 * heads + 2 * kv) + 3 * hidden * wide_inner
                return layers * inner + 2 * vocabulary * hidden

            head = min((head, 128), key=lambda dim: abs(count(dim) / params - 1))
        return llama, llama.LlamaConfig(
            name=name, hidden=hidden, layers=layers, heads=heads, kv_heads=kv, intermediate=wide_inner,
            vocabulary=vocabulary, sequence=sequence, global_batch=batch, dtype=dtype,
            fused_attention=generation.fused_attention, head_dim=head,
        )  # fmt: skip
    return gpt, gpt.GPTConfig(
        name=name, hidden=hidden, layers=layers, heads=heads, vocabulary=vocabulary, sequence=sequence,
        global_batch=batch, dtype=dtype, scan=True, fused_attention=generation.fused_attention,
        positions=generation.name != "llm-foundry",
    )  # fmt: skip


# What was measured


def measured_step_seconds(row: Row) -> float | None:
    """Seconds of a step, from whichever rate a row gives; None if it gives none."""
    if amount(row, "step_time_s"):
        return amount(row, "step_time_s")
    batch, sequence, devices = (amount(row, name) for name in ("gbs", "seq_len", "n_devices"))
    if amount(row, "tokens_per_s_per_dev") and batch * sequence * devices:
        return batch * sequence / (amount(row, "tokens_per_s_per_dev") * devices)
    if amount(row, "tokens_per_s") and batch * sequence:
        return batch * sequence / amount(row, "tokens_per_s")
    if amount(row, "samples_per_s") and batch:
        return batch / amount(row, "samples_per_s")
    if amount(row, "tflops_per_dev") and batch * sequence * devices and row.get("d_model"):
        return batch * _flops_per_sample(row) / (amount(row, "tflops_per_dev") * 1e12 * devices)
    return None


def _flops_per_sample(row: Row) -> float:
    """As the sources count: of a GPT as Narayanan et al. 2021 (96 s l h^2 (...) with the rematerialised forward pass,
    72 without), of a gated model products and attention without a mask."""
    layers, h, s, v = (number(row, k) or 0 for k in ("n_layers", "d_model", "seq_len", "vocab"))
    f, heads = number(row, "d_ff") or 4 * h, number(row, "n_heads")
    passes = 4 if (row.get("tflops_kind") or "").startswith("hardware") else 3
    if row.get("mlp_gated") == "1":
        head = 128 if (row.get("framework") or "").startswith("MaxText") else h // heads
        kv = number(row, "n_kv_heads") or heads
        per_layer = 2 * h * head * (2 * heads + 2 * kv) + 6 * h * f + 4 * s * head * heads
        return s * (passes * layers * per_layer + 3 * 2 * h * v)
    return s * (passes * layers * (24 * h * h * (1 + s / (6 * h))) + 3 * 2 * h * v)


def measured_memory(row: Row) -> float | None:
    """Bytes (percent where the unit says so) that a row measured; None if it measured none."""
    if row.get("value"):
        return amount(row, "value") * UNITS[row["unit"]]
    return amount(row, "peak_mem_gb") * UNITS["GiB"] or None
