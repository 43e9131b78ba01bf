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
      hidden_activations: the share of tensor parallelism's collectives that its pieces hide behind products.
    """

    name: str
    fused_attention: bool
    zero: int = 0
    sequence_parallel: bool = False
    interleaves: bool = False
    even_stages: bool = False
    core_attention: bool = False
    hidden_activations: float = 0.0


_MEGATRON_CORE = Generation(
    name="megatron-core", fused_attention=True, zero=1, sequence_parallel=True, interleaves=True, core_attention=True,
    # Gathers and scatters go in pieces beside the products that need or make them (tp_comm_overlap). How much that
    # hides no document says: taken for as much as others hide of their gradients' sums.
    hidden_activations=0.7,
)  # fmt: skip

GENERATIONS: tuple[tuple[str, str, Generation], ...] = (
    # framework, any spelling; source_date from; what it was
    (r"\balpa\b", "", Generation(name="alpa", fused_attention=False)),
    (r"maxtext", "", Generation(name="maxtext", fused_attention=True, sequence_parallel=True)),
    (r"llm[- ]?foundry|mosaicml", "", Generation(name="llm-foundry", fused_attention=True)),
    (r"torch ?titan eager", "", Generation(name="torchtitan-eager", fused_attention=True)),
    (r"torch ?titan", "", Generation(name="torchtitan", fused_attention=True)),
    (r"fms-fsdp", "", Generation(name="fms-fsdp", fused_attention=True)),
    (r"intern(evo|lm)", "", Generation(name="internevo", fused_attention=True)),
    (r"deepspeed zero-3", "", Generation(name="deepspeed-zero3", fused_attention=False)),
    (
        r"megatron-deepspeed", "",
        Generation(name="megatron-deepspeed", fused_attention=False, core_attention=True),
    ),
    (r"fsdp\+megatron|metaseq", "", Generation(name="metaseq", fused_attention=False, zero=3)),
    (r"gpt-neox", "", Generation(name="gpt-neox", fused_attention=False, zero=1, core_attention=True)),
    (r"megatron[- ]core|megatron[- ]bridge|\bnemo\b", "", _MEGATRON_CORE),
    # Since the end of 2024 the first and the last stage may have fewer layers (--decoder-first-pipeline-num-layers).
    ("megatron-lm", "2024-10", Generation(name="megatron-2022", fused_attention=False, core_attention=True)),
    (
        "megatron-lm", "2022",
        Generation(name="megatron-2022", fused_attention=False, even_stages=True, core_attention=True),
    ),
    (
        "megatron-lm", "2021-04",
        Generation(name="megatron-2021", fused_attention=False, even_stages=True, core_attention=True),
    ),
    (
        "megatron-lm", "",
        Generation(name="megatron-2020", fused_attention=False, even_stages=True, core_attention=True),
    ),
    (r"torchgpipe", "", Generation(name="torchgpipe", fused_attention=False)),
)  # fmt: skip


def generation_of(row: Row) -> Generation:
    """The framework of a row at its time; one that is not known has the efficiency that its devices are thought to."""
    framework = row.get("framework") or row["source"]
    date = row.get("source_date") or {"Korthikanti 2022": "2022-05"}.get(row["source"], "9999")
    if framework == "torchtitan" and re.search(r"\beager\b", row.get("notes") or ""):
        framework = "torchtitan eager"
    if framework.startswith("Korthikanti"):
        framework = "Megatron-LM"
    for pattern, since, generation in GENERATIONS:
        if re.search(pattern, framework, re.IGNORECASE) and date >= since:
            return generation
    # Of a framework that nobody has told us of: attention is one kernel since 2022, pipelines are interleaved and
    # sequences split where tensors are since 2023, all else as rows say.
    return Generation(
        name="other", fused_attention=date >= "2022-06", interleaves=date >= "2023", sequence_parallel=date >= "2023",
        core_attention=re.search("megatron", framework, re.IGNORECASE) is not None,
    )  # fmt: skip
