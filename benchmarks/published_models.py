"""Models of published measurements as models of the zoo (`benchmarks/published.py`).

Wide-ResNets, and models of today, by their name (`published_named`); decoder-only transformers by their sizes, whatever
they are called: gated ones are Llamas, those with experts GShard's or, with gates, fewer key heads or another number of
experts a token, decoders of mixtures, others GPTs with the feed-forward and the key heads that a row says. What a name
says to be of a family that the zoo does not have is refused.
"""

from __future__ import annotations

import re
from typing import Any

from published_cells import Inexpressible, Row, amount, needed_number, number
from published_frameworks import Generation
from published_named import as_run, dealt, experts_named, named

from meshwright.cluster import Device
from meshwright.zoo import decoder, gpt, llama, moe, wide_resnet
from meshwright.zoo.decoder_attention import GroupedAttention
from meshwright.zoo.decoder_feed_forward import Mixture

# What is no decoder-only transformer, by its name.
_FOREIGN = (
    (
        "a state-space or recurrent model",
        r"mamba|rwkv|jamba|zamba|hymba|\bsamba\b|hyena|retnet|lstm|\brnn|\bs4\b|\bssm\b|griffin|recurrentgemma"
        r"|nemotron-?h\b",
    ),
    ("an encoder", r"bert\w*\b|electra|\besm-?\d"),
    (
        "an encoder and a decoder",
        r"\b(m|flan-?|by|long)?t5(v|\b)|\bul2\b|\bm?bart\b|pegasus|nllb|seq2seq|encoder|\bnmt\b",
    ),
    (
        "a model of images",
        r"diffusion|\bdit\b|sdxl|u-?net\b|\bvit\b|vision|\bclip\b|\bswin|imagen|dall-?e|resnet|efficientnet|convnext"
        r"|\bvgg|mobilenet|amoebanet",
    ),
    ("a model of images and text", r"llava|flamingo|\bblip|(\b|intern)vl\b|multi-?modal"),
    ("a model of speech", r"whisper|wav2vec|conformer|speech|\basr\b|\btts\b"),
    ("no language model", r"dlrm|recommend|alphafold|\bgnn\b"),
)

# Decoder-only transformers that are known by name; others are taken for such by their sizes, and it is said.
_DECODERS = (
    r"gpt|llama|\bmpt\b|\bopt\b|bloom|falcon|qwen|mi[sx]tral|palm|nemotron|deepseek|internlm|gemma|\bphi\b|\byi\b|baichuan"
    r"|gopher|chinchilla|starcoder|codegen|pythia|\bmt-nlg|turing|\bglm|maxtext|gshard|moe"
)

_MIXTURES = r"moe|mixtral|\d+x\d+(\.\d+)?b\b|-a\d+(\.\d+)?b\b"

# Layers of the zoo's model with experts are no scan: each costs time to trace and to solve.
_MOST_UNROLLED = 128

# Types that products may have, the first that is found; those of the second element are no types of training here.
_PRECISIONS = (
    (r"int\d|fp[46]\b|nf4|w\da\d", "no"), (r"fp8|float8|e4m3|e5m2", "float8"), (r"bf16|bfloat16", "bfloat16"),
    (r"fp16|float16", "float16"), (r"tf32|tensorfloat", "tf32"), (r"fp32|float32|\b32\b", "float32"),
    (r"mixed|amp|half|\b16\b", "half"),
)  # fmt: skip


def precision_of(row: Row, device: Device) -> tuple[str, bool]:
    """The type of activations, and whether products with parameters run in one of one byte.

    Raises:
      Inexpressible: if a device has no such type, or nothing trains in it.
    """
    stated = row.get("precision") or ""
    # Remarks in parentheses say what was not used.
    text = re.sub(r"\([^)]*\)", "", stated.lower()).strip()
    found = next((kind for pattern, kind in _PRECISIONS if re.search(pattern, text)), None) if text else "half"
    half = next((kind for kind in ("bfloat16", "float16") if kind in device.peak_flops), "float32")
    if found is None or found == "no":
        raise Inexpressible(f"precision {stated!r} is none of fp32, tf32, fp16, bf16 and fp8")
    if found == "float8":
        if not any(kind.startswith("float8") for kind in device.peak_flops):
            raise Inexpressible(f"precision {stated!r}: {device.kind} has no products of one byte")
        return half, True
    if found == "tf32":
        # NVIDIA's devices that have bfloat16 have it, and their float32 is it, as JAX uses them.
        if device.platform != "gpu" or "bfloat16" not in device.peak_flops:
            raise Inexpressible(f"precision {stated!r}: {device.kind} has no TensorFloat-32")
        return "float32", False
    return half if found == "half" else found, False


def experts_of(row: Row) -> int | None:
    """How many, told by a column or the model's name; None of a dense model."""
    told = re.search(r"MoE .*\bE(\d{1,6})\b", row["model"])
    experts = number(row, "n_experts") or (int(told[1]) if told else experts_named(row))
    return None if experts == 1 else experts


def is_gated(row: Row) -> bool:
    """Whether feed-forwards have gates: as stated, or where they are not four times as wide as a dense model."""
    if row.get("mlp_gated") or experts_of(row):
        return row.get("mlp_gated") == "1"
    return (number(row, "d_ff") or 0) not in (0, 4 * (number(row, "d_model") or 0))


def note_of(row: Row) -> str:
    """What was taken for granted of a model; empty where its name says it."""
    name, known = row["model"], named(row)
    if known and not row.get("d_model"):
        return f"{name}: taken for the zoo's {known[1].name}"
    if known or re.search(_DECODERS, name, re.IGNORECASE) or name.startswith("Wide-ResNet"):
        return ""
    told = f"{name!r} is no name we know" if name else "no name"
    return f"{told}: taken for a decoder-only transformer of the sizes stated"


def model_of(row: Row, generation: Generation, batch: int, device: Device) -> tuple[Any, Any]:
    """A family of the zoo and a shape.

    Raises:
      Inexpressible: if the zoo has no such model.
      ValueError: if the zoo's model cannot have the shape.
    """
    name = row["model"]
    dtype, _ = precision_of(row, device)
    if re.match(r"Wide-ResNet-", name):
        return wide_resnet, _wide_resnet(name, batch, dtype)
    known = named(row)
    if known and (known[0] is not llama or not row.get("d_model")):
        pipelined = (number(row, "pp") or 1) > 1
        fused = generation.fused_attention
        return known[0], as_run(known[1], row, batch=batch, dtype=dtype, fused=fused, one_scan=pipelined)
    for what, pattern in _FOREIGN:
        if re.search(pattern, name, re.IGNORECASE):
            raise Inexpressible(f"{name} is {what}: the zoo has no such one, or not by this name")
    if not row.get("d_model"):
        raise Inexpressible(f"{name}: its width is not stated")
    if experts_of(row) and is_modern(row):
        return decoder, _decoder(row, generation, batch, dtype)
    if experts_of(row):
        return moe, _mixture(row, batch, dtype)
    if not number(row, "n_experts") and re.search(_MIXTURES, name, re.IGNORECASE):
        raise Inexpressible(f"{name}: its n_experts is not stated")
    if is_gated(row):
        return llama, _llama(row, generation, batch, dtype)
    sizes = _sizes(row)
    wide_inner = number(row, "d_ff") or 4 * sizes["hidden"]
    return gpt, gpt.GPTConfig(
        **sizes, global_batch=batch, dtype=dtype, scan=True,
        attention="fused" if generation.fused_attention else "plain",
        positions=generation.name != "llm-foundry",
        intermediate=None if wide_inner == 4 * sizes["hidden"] else wide_inner,
        kv_heads=None if number(row, "n_kv_heads") == sizes["heads"] else number(row, "n_kv_heads"),
    )  # fmt: skip


def _sizes(row: Row, *, padded: bool = True) -> dict[str, Any]:
    """What configurations of transformers share."""
    layers, hidden, heads, sequence = (needed_number(row, k) for k in ("n_layers", "d_model", "n_heads", "seq_len"))
    if hidden % heads:
        raise Inexpressible(f"{row['model']}: {heads} heads do not share a width of {hidden} evenly")
    vocabulary = number(row, "vocab") or 51200
    if padded:
        # Embedding and head are split over tensor devices; frameworks pad the vocabulary to do so.
        multiple = 128 * (number(row, "tp") or 1)
        vocabulary = -(-vocabulary // multiple) * multiple
    return {
        "name": row["model"], "layers": layers, "hidden": hidden, "heads": heads, "sequence": sequence,
        "vocabulary": vocabulary,
    }  # fmt: skip


def _wide_resnet(name: str, batch: int, dtype: str) -> wide_resnet.WideResNetConfig:
    told = re.match(r"Wide-ResNet-(\d+) c([1-9]\d{0,4}) w([1-9]\d{0,2})\b", name)
    blocks = {"50": wide_resnet.FIFTY, "101": wide_resnet.HUNDRED_AND_ONE}.get(told[1]) if told else None
    if told is None or blocks is None:
        raise Inexpressible(f"{name} is not in the zoo: of Wide-ResNets 50 and 101 are, as in 'Wide-ResNet-50 c320 w2'")
    return wide_resnet.WideResNetConfig(
        name=name, blocks=blocks, channels=int(told[2]), width_factor=int(told[3]), dtype=dtype, global_batch=batch
    )


def is_modern(row: Row) -> bool:
    """Whether a row's mixtures are not GShard's: with gates, fewer key heads or other than two experts a token."""
    heads = number(row, "n_heads")
    return is_gated(row) or number(row, "n_kv_heads") not in (None, heads) or number(row, "top_k") not in (None, 2)


def _decoder(row: Row, generation: Generation, batch: int, dtype: str) -> decoder.DecoderConfig:
    """All layers alike, each a mixture of gated experts as wide as the row says."""
    sizes, experts = _sizes(row), experts_of(row) or 1
    hidden, heads = sizes["hidden"], sizes["heads"]
    top_k, kv_heads = number(row, "top_k") or 2, number(row, "n_kv_heads") or heads
    if top_k > experts or heads % kv_heads:
        raise Inexpressible(f"{row['model']}: {top_k} of {experts} experts, {heads} heads with {kv_heads} of keys")
    mixture = Mixture(experts=experts, top_k=top_k, intermediate=number(row, "d_ff") or 4 * hidden)
    layer = decoder.Layer(
        attention=GroupedAttention(heads=heads, kv_heads=kv_heads, head_dim=hidden // heads),
        feed_forward=dealt(mixture),
    )  # fmt: skip
    return decoder.DecoderConfig(
        name=row["model"], family="mixture", hidden=hidden, vocabulary=sizes["vocabulary"], sequence=sizes["sequence"],
        runs=(decoder.Run(pattern=(layer,), repeats=sizes["layers"]),), global_batch=batch, dtype=dtype,
        attention="operator" if generation.fused_attention else "plain",
    )  # fmt: skip


def _mixture(row: Row, batch: int, dtype: str) -> moe.MoEConfig:
    name, sizes, experts = row["model"], _sizes(row, padded=False), experts_of(row) or 1
    config = moe.MoEConfig(
        **sizes, experts=experts, dtype=dtype, global_batch=batch,
        intermediate=number(row, "d_ff") or 4 * sizes["hidden"],
    )  # fmt: skip
    if experts > config.capacity_factor * config.expert_group or sizes["layers"] > _MOST_UNROLLED:
        raise Inexpressible(
            f"{name}: {experts} experts in {sizes['layers']} layers; the zoo's model has at most "
            f"{config.capacity_factor * config.expert_group} in {_MOST_UNROLLED}"
        )
    return config


def _llama(row: Row, generation: Generation, batch: int, dtype: str) -> llama.LlamaConfig:
    sizes = _sizes(row)
    hidden, heads = sizes["hidden"], sizes["heads"]
    kv = number(row, "n_kv_heads") or heads
    inner = number(row, "d_ff") or 4 * hidden
    head, params = hidden // heads, amount(row, "params_b") * 1e9
    if params:

        def count(dim: int) -> float:
            of_layer = hidden * dim * (2 * heads + 2 * kv) + 3 * hidden * inner
            return sizes["layers"] * of_layer + 2 * sizes["vocabulary"] * hidden

        head = min((head, 128), key=lambda dim: abs(count(dim) / params - 1))
    if head % 2:
        raise Inexpressible(f"{row['model']}: heads of {head} features, needed an even number for rotary positions")
    return llama.LlamaConfig(
        **sizes, kv_heads=kv, intermediate=inner, global_batch=batch, dtype=dtype,
        attention="fused" if generation.fused_attention else "plain", head_dim=head,
    )  # fmt: skip
