"""Frameworks that published measurements, by generation (`benchmarks/published.py`).

What documents and code say of each; what is fitted, `published_profiles` has.
"""

from __future__ import annotations

import re
from dataclasses import dataclass

from published_cells import Row


@dataclass(frozen=True, kw_only=True)
class Generation:
    """What is known of a framework at a time, from its documents and code, not fitted.

    Args:
      name: with the kind of device, the key of its efficiency profile.
      fused_attention: whether attention is one kernel.
      zero: the ZeRO stage where a row does not say.
      sequence_parallel: where a row does not say and tensor parallelism is used.
      interleaves: whether its pipelines may have been interleaved where a row does not say.
      even_stages: whether its pipelines refuse stages of unequal numbers of layers.
      core_attention: whether "selective" recomputation is that of the attention core (Korthikanti et al. 2022).
    """

    name: str
    fused_attention: bool
    zero: int = 0
    sequence_parallel: bool = False
    interleaves: bool = False
    even_stages: bool = False
    core_attention: bool = False


GENERATIONS: tuple[tuple[str, str, Generation], ...] = (
    # framework prefix, source_date from, what it was
    ("Alpa", "", Generation(name="alpa", fused_attention=False)),
    ("MaxText", "", Generation(name="maxtext", fused_attention=True, sequence_parallel=True)),
    ("llm-foundry", "", Generation(name="llm-foundry", fused_attention=True)),
    ("torchtitan eager", "", Generation(name="torchtitan-eager", fused_attention=True)),
    ("torchtitan", "", Generation(name="torchtitan", fused_attention=True)),
    ("fms-fsdp", "", Generation(name="fms-fsdp", fused_attention=True)),
    ("InternEvo", "", Generation(name="internevo", fused_attention=True)),
    ("DeepSpeed ZeRO-3", "", Generation(name="deepspeed-zero3", fused_attention=False)),
    (
        "Megatron-DeepSpeed", "",
        Generation(name="megatron-deepspeed", fused_attention=False, core_attention=True),
    ),
    ("FSDP+Megatron", "", Generation(name="metaseq", fused_attention=False, zero=3)),
    ("GPT-NeoX", "", Generation(name="gpt-neox", fused_attention=False, zero=1, core_attention=True)),
    (
        "Megatron-Core", "",
        Generation(
            name="megatron-core", fused_attention=True, zero=1, sequence_parallel=True,
            interleaves=True, core_attention=True,
        ),
    ),
    # Since the end of 2024 the first and the last stage may have fewer layers (--decoder-first-pipeline-num-layers).
    ("Megatron-LM", "2024-10", Generation(name="megatron-2022", fused_attention=False, core_attention=True)),
    (
        "Megatron-LM", "2022",
        Generation(name="megatron-2022", fused_attention=False, even_stages=True, core_attention=True),
    ),
    (
        "Megatron-LM", "2021-04",
        Generation(name="megatron-2021", fused_attention=False, even_stages=True, core_attention=True),
    ),
    (
        "Megatron-LM", "",
        Generation(name="megatron-2020", fused_attention=False, even_stages=True, core_attention=True),
    ),
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
    for prefix, since, generation in GENERATIONS:
        if framework.startswith(prefix) and date >= since:
            return generation
    # Of a framework that nobody has told us of: attention is one kernel since 2022, all else as rows say.
    like_megatron = re.search("megatron|nemo", framework, re.IGNORECASE) is not None
    return Generation(name="other", fused_attention=date >= "2022-06", core_attention=like_megatron)
