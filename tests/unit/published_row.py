"""A published row that says everything: what the tests of published rows change."""

from __future__ import annotations

from collections.abc import Mapping

ROW: Mapping[str, str] = {
    "row_id": "X1", "source": "here", "source_date": "2021-06", "framework": "Megatron-LM", "model": "GPT",
    "n_layers": "8", "d_model": "1024", "n_heads": "16", "n_kv_heads": "16", "d_ff": "4096", "mlp_gated": "0",
    "vocab": "51200", "seq_len": "512", "accelerator": "A100-SXM-80GB", "n_devices": "16", "devices_per_node": "8",
    "interconnect": "8x200Gb/s HDR IB per node", "gbs": "64", "mbs": "2", "tp": "2", "pp": "2", "dp": "4",
    "shard": "none", "sp": "0", "recompute": "full", "precision": "fp16", "step_time_s": "0.3", "status": "ok",
}  # fmt: skip
