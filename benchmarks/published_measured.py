"""What rows of published measurements measured (`benchmarks/published.py`): seconds of a step, bytes of a device."""

from __future__ import annotations

from published_cells import UNITS, Row, amount, number
from published_models import experts_of, is_gated, is_modern
from published_named import as_run, named

# Samples that FLOPs of one are counted by; groups of tokens that are dealt together have to divide them.
_ANY_BATCH = 1024


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
    if "alpa moe" in (row.get("tflops_kind") or ""):
        # Alpa counts dispatch and capacity of experts too, by a formula that gives up to twice what a token meets.
        return None
    if amount(row, "tflops_per_dev") and batch * devices and (row.get("d_model") or named(row)):
        return batch * _flops_per_sample(row) / (amount(row, "tflops_per_dev") * 1e12 * devices)
    return None


def _flops_per_sample(row: Row) -> float:
    """As the sources count: of a GPT as Narayanan et al. 2021 (96 s l h^2 (...) with the rematerialised forward pass,
    72 without), of a gated model products and attention without a mask; of experts those that a token meets, and the
    router, in every other layer as GShard has them, in every one of other mixtures. A model that the zoo has by name
    counts as it does there."""
    layers, h, s, v = (number(row, k) or 0 for k in ("n_layers", "d_model", "seq_len", "vocab"))
    f, heads = number(row, "d_ff") or 4 * h, number(row, "n_heads") or 1
    passes = 4 if (row.get("tflops_kind") or "").startswith("hardware") else 3
    known = None if row.get("d_model") else named(row)
    if known:
        module, config = known
        shape = as_run(config, row, batch=_ANY_BATCH, dtype=config.dtype, fused=False, one_scan=False)
        return passes / 3 * module.build(shape).model_flops_per_sample
    kv = number(row, "n_kv_heads") or heads
    gated = is_gated(row)
    head = 128 if gated and (row.get("framework") or "").startswith("MaxText") else h // heads
    feed_forward, experts = (6 if gated else 4) * h * f, experts_of(row)
    if experts:
        active = number(row, "top_k") or 2
        sparse = active * feed_forward + 2 * h * experts
        feed_forward = sparse if is_modern(row) else (feed_forward + sparse) / 2
    per_layer = 2 * h * head * (2 * heads + 2 * kv) + feed_forward + 4 * s * head * heads
    return s * (passes * layers * per_layer + 3 * 2 * h * v)


def measured_memory(row: Row) -> float | None:
    """Bytes (percent where the unit says so) that a row measured; None if it measured none."""
    if row.get("value"):
        return amount(row, "value") * UNITS[row["unit"]]
    return amount(row, "peak_mem_gb") * UNITS["GiB"] or None
