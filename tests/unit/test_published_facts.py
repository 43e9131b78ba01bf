"""Facts of published rows: what a row says is in the model and the plan, or the row is refused; faults cost one row."""

from __future__ import annotations

import sys
from pathlib import Path

import published
import pytest
from published import evaluate_rows, report, summary
from published_cells import MOST, Inexpressible, Row
from published_clusters import cluster_of, device_kind, device_of
from published_fit import best_of
from published_frameworks import GENERATIONS, generation_of
from published_measured import measured_step_seconds
from published_models import note_of, precision_of
from published_plans import recompute_of, sharding_of
from published_profiles import LAYOUTS, layout_of, prior_of, profile_of, read_profiles, usable_bytes
from published_row import ROW
from published_rows import stated_row
from stated import price_stated

from meshwright.cluster import load_cluster
from meshwright.zoo import gpt

EXPERTS = {"n_experts": "8", "top_k": "2", "pp": "1", "dp": "8"}
LAYER = {"status": "per-layer", "n_layers": "1", "pp": "1", "dp": "8"}


# One row and the others


def test_a_row_that_breaks_a_program_costs_no_other(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture
) -> None:
    usual = published.stated_row

    def broken(row: Row):
        return 1 // 0 if row["row_id"] == "X2" else usual(row)

    monkeypatch.setattr(published, "stated_row", broken)
    results = evaluate_rows([ROW, {**ROW, "row_id": "X2"}, {**ROW, "row_id": "X3", "gbs": ""}], read_profiles())
    first, failed, refused = results
    assert first.error is not None
    assert failed.reason.startswith("failed unexpectedly: ZeroDivisionError: ")
    assert [one.failed for one in results] == [False, True, False]
    assert summary(results)["failed"] == 1
    assert report(results)["inexpressible"].keys() == {"X2", "X3"}
    assert "ZeroDivisionError" in capsys.readouterr().err
    assert refused.reason == "the global batch is not stated"


def test_a_fault_is_the_exit_code(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture
) -> None:
    file = tmp_path / "rows.csv"
    file.write_text("row_id,source,model\nX1,here,GPT\n")
    monkeypatch.setattr(sys, "argv", ["published.py", "--rows", str(file), "--processes", "1"])
    assert published.main() == 0
    monkeypatch.setattr(published, "stated_row", lambda row: 1 // 0)
    assert published.main() == 1
    assert "1 rows failed unexpectedly, of 1" in capsys.readouterr().out


@pytest.mark.parametrize("name", MOST)
def test_sizes_that_nothing_has_are_refused(name: str) -> None:
    for text in (str(MOST[name] + 1), "1e15", "1e300"):
        with pytest.raises(Inexpressible, match=f"{name} is '{text}', needed {MOST[name]} at most"):
            stated_row({**ROW, name: text})


def test_amounts_that_nothing_has_are_refused() -> None:
    for text in ("1e-300", "1e300"):
        with pytest.raises(Inexpressible, match="needed 1e-09 to"):
            stated_row({**ROW, "step_time_s": text})


def test_every_generation_has_a_layout_of_memory() -> None:
    assert {generation.name for _, _, generation in GENERATIONS} | {"other"} <= LAYOUTS.keys()


def test_rows_at_the_edge_are_predicted() -> None:
    least = {name: "1" for name in MOST if name not in ("n_experts", "top_k", "devices_per_node", "d_model")}
    rows = [{**ROW, **least}, {**ROW, "framework": "torchgpipe 0.0.5"}, {**ROW, **LAYER}]
    for found in evaluate_rows(rows, read_profiles()):
        assert not found.reason
        assert found.predicted_step_seconds > 0


# What contradicts itself


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"ep": "2"}, "no experts are stated"),
        ({"ep": "2", "n_experts": "1"}, "no experts are stated"),
        ({**EXPERTS, "ep": "16", "dp": "16", "n_devices": "32"}, "does not share 8 experts"),
        ({**EXPERTS, "ep": "3"}, "does not share 8 experts"),
        ({**EXPERTS, "ep": "8", "dp": "4", "tp": "4"}, "no part of dp 4"),
        ({**EXPERTS, "n_experts": "9000"}, "experts in 8 layers"),
        ({"grad_accum": "7"}, "= 56 is not the global batch of 64"),
        ({"mbs": "", "grad_accum": "7"}, "dp 4 x grad_accum 7"),
        ({"n_heads": "1", "n_kv_heads": "1"}, "tp is 2"),
        ({"n_layers": "7"}, "2 stages do not share 7 layers"),
        ({"n_layers": "8", "vpp": "3"}, "6 stages do not share 8 layers"),
        ({"n_layers": "1"}, "2 stages, and 1 layers"),
        ({"vpp": "4", "pp": "1", "dp": "8"}, "no pipeline to interleave"),
        ({"vpp": "2", "mbs": "16"}, "a multiple of pp 2 microbatches"),
        ({"devices_per_node": "6"}, "hosts of 6"),
        ({"shard": "zero1 within 3"}, "groups of 3"),
        ({"pp": "256", "vpp": "2", "n_layers": "512", "n_devices": "512", "dp": "1"}, "needed 65536 at most"),
        ({"seq_len": "100000000", "gbs": "8000000", "mbs": "1000000"}, "elements"),
        ({**LAYER, "n_layers": "2"}, "try n_layers = 1"),
        ({**LAYER, **EXPERTS, "n_layers": "2"}, "try n_layers = 1"),
        ({"n_kv_heads": "3"}, "kv_heads=3"),
        ({"d_model": "1008", "mlp_gated": "1"}, "heads of 63 features"),
    ],
)
def test_contradictions_are_refused(changes: dict[str, str], reason: str) -> None:
    (found,) = evaluate_rows([{**ROW, **changes}], {})
    assert reason in found.reason
    assert not found.failed


def test_uneven_stages_are_what_some_frameworks_have() -> None:
    for framework in ("torchtitan", "Megatron-Core r0.9", "Megatron-DeepSpeed"):
        assert stated_row({**ROW, "framework": framework, "n_layers": "7", "vpp": "1"}).candidates
    assert stated_row({**ROW, "source_date": "2024-12", "n_layers": "7"}).candidates


def test_experts_share_the_batch() -> None:
    (plan,) = stated_row({**ROW, **EXPERTS, "ep": "4"}).candidates
    assert (plan.data, plan.expert, plan.microbatches) == (2, 4, 4)


# Models


def test_models_have_the_feed_forward_and_key_heads_of_the_row() -> None:
    assert stated_row(ROW).config.intermediate is None
    config = stated_row({**ROW, "d_ff": "2048", "n_kv_heads": "2", "model": "Falcon"}).config
    assert isinstance(config, gpt.GPTConfig)
    assert (config.intermediate, config.kv_heads) == (2048, 2)
    rows = [ROW, {**ROW, "d_ff": "2048"}, {**ROW, "n_kv_heads": "2"}]
    whole, narrow, shared = evaluate_rows(rows, read_profiles())
    assert narrow.predicted_step_seconds < 0.95 * whole.predicted_step_seconds
    assert shared.predicted_memory_bytes < whole.predicted_memory_bytes


@pytest.mark.parametrize(
    "name", ["Mamba 7B", "BERT-large", "T5-11B", "flan-t5", "ViT-22B", "Stable Diffusion", "Whisper", "Falcon Mamba 7B"]
)
def test_other_families_are_refused(name: str) -> None:
    with pytest.raises(Inexpressible, match="the zoo has no such one"):
        stated_row({**ROW, "model": name})


@pytest.mark.parametrize(
    "name",
    ["Falcon-40B", "Qwen2.5-7B", "Mistral 7B", "OPT-175B", "BLOOM 176B", "PaLM 540B", "Nemotron-4 15B", "DeepSeek 67B"],
)
def test_decoders_are_taken_by_their_sizes(name: str) -> None:
    assert stated_row({**ROW, "model": name}).config.hidden == 1024
    assert note_of({**ROW, "model": name}) == ""


def test_what_a_name_leaves_open_is_said() -> None:
    (found,) = evaluate_rows([{**ROW, "model": ""}], read_profiles())
    assert found.note == "no name: taken for a decoder-only transformer of the sizes stated"
    assert found.predicted_step_seconds is not None
    with pytest.raises(Inexpressible, match="n_experts is not stated"):
        stated_row({**ROW, "model": "Mixtral 8x7B"})


def test_active_experts_count_in_a_rate() -> None:
    rate = {**ROW, **EXPERTS, "step_time_s": "", "tflops_per_dev": "100", "tflops_kind": "model"}
    width, feed_forward = 1024, 4 * 1024 * 4096
    layer = 8 * width**2 + 4 * 512 * width + (3 * feed_forward + 2 * width * 8) / 2  # a dense one and two experts
    flops = 64 * 512 * 3 * (8 * layer + 2 * width * 51200)
    assert measured_step_seconds(rate) == pytest.approx(flops / (100e12 * 16))
    # Alpa's formula for them counts more than that.
    assert measured_step_seconds({**rate, "tflops_kind": "hardware (alpa moe formula)"}) is None


# Hardware and precision


@pytest.mark.parametrize(
    ("device", "text", "expected"),
    [
        ("dgx-a100-80", "tf32", ("float32", False)), ("dgx-a100-80", "bf16/PURE", ("bfloat16", False)),
        ("dgx-h100", "amp_fp8/DEFAULT", ("bfloat16", True)), ("tpu-v5e", "bf16 (int8 not used)", ("bfloat16", False)),
        ("p3.16xlarge", "", ("float16", False)), ("p40-8", "mixed", ("float32", False)),
        ("dgx-a100-80", "bf16 with fp32 master weights", ("bfloat16", False)),
    ],
)  # fmt: skip
def test_precisions_are_types_of_the_device(device: str, text: str, expected: tuple[str, bool]) -> None:
    assert precision_of({**ROW, "precision": text}, load_cluster(device).hosts[0].device) == expected


@pytest.mark.parametrize(
    ("device", "text", "reason"),
    [
        ("dgx-a100-80", "int4", "none of fp32"), ("dgx-h100", "int8", "none of fp32"), ("dgx-h100", "?", "none of"),
        ("dgx-a100-80", "fp8", "no products of one byte"), ("p3.16xlarge", "tf32", "no TensorFloat-32"),
        ("tpu-v5e", "tf32", "no TensorFloat-32"),
    ],
)  # fmt: skip
def test_precisions_that_a_device_has_not_are_refused(device: str, text: str, reason: str) -> None:
    with pytest.raises(Inexpressible, match=reason):
        precision_of({**ROW, "precision": text}, load_cluster(device).hosts[0].device)


def test_devices_are_the_same_however_they_are_spelled() -> None:
    slices = {**ROW, "n_devices": "512", "devices_per_node": "4", "interconnect": ""}
    one, other = ({**slices, "accelerator": kind} for kind in ("TPUv5e", "TPU v5e"))
    assert cluster_of(one) == cluster_of(other)
    assert device_kind(one) == device_kind(other) == "TPUv5e"
    assert cluster_of(one).hosts[0].devices == 256
    assert cluster_of({**one, "interconnect": "32x v5e-16 over DCN"}).hosts[0].devices == 16
    pods = {**one, "accelerator": "TPU v4", "n_devices": "6144", "devices_per_node": ""}
    assert cluster_of(pods).hosts[0].devices == 3072
    assert (
        cluster_of({**pods, "n_devices": "512", "shard": "hsdp: fsdp 64 x 8 replicas over DCN"}).hosts[0].devices == 64
    )
    assert cluster_of({**pods, "n_devices": "512", "shard": "fsdp 512 (dcn 2)"}).hosts[0].devices == 256
    with pytest.raises(Inexpressible, match="a slice of 150 chips"):
        cluster_of({**one, "n_devices": "300", "devices_per_node": ""})
    for kind in ("MI250X", "RTX A1000"):
        with pytest.raises(Inexpressible, match="is not known"):
            cluster_of({**ROW, "accelerator": kind})


# Sharding and recomputation


@pytest.mark.parametrize(
    ("text", "zero"),
    [("ddp", 0), ("DDP", 0), ("ZeRO-1", 1), ("zero 1", 1), ("Zero_2", 2), ("ZeRO-3", 3), ("Distributed Optimizer", 1)],
)
def test_spellings_of_sharding(text: str, zero: int) -> None:
    assert sharding_of({**ROW, "shard": text}, 3, 64) == (zero, 1)


@pytest.mark.parametrize(
    ("framework", "date", "expected"),
    [
        ("Megatron-LM", "2022-05", "attention"), ("NeMo 2.0", "2024-06", "attention"), ("GPT-NeoX", "", "attention"),
        ("Megatron-DeepSpeed", "2022-01", "attention"), ("torchtitan", "2024-12", "alternate"),
        ("fms-fsdp", "2024-03", "layer"),
    ],
)  # fmt: skip
def test_selective_is_what_the_framework_calls_so(framework: str, date: str, expected: str) -> None:
    row = {**ROW, "framework": framework, "source_date": date, "recompute": "selective"}
    rates = {"mfu_pct": "50", "hfu_pct": "60"} if framework.startswith(("fms", "Mega")) else {}
    assert recompute_of({**row, **rates}, generation_of(row))[0] == expected


# Frameworks and their profiles


@pytest.mark.parametrize(
    ("framework", "date", "name"),
    [
        ("NeMo 24.07", "2024-07", "megatron-core"), ("NVIDIA Megatron-Core", "2024-03", "megatron-core"),
        ("Megatron-Bridge", "2025-10", "megatron-core"), ("GPT-NeoX", "2022-02", "gpt-neox"),
        ("TorchTitan", "2024-12", "torchtitan"), ("MosaicML LLM Foundry", "2023-11", "llm-foundry"),
        ("PyTorch FSDP (IBM fms-fsdp)", "2024-03", "fms-fsdp"), ("InternLM", "2024-01", "internevo"),
        ("megatron-lm", "2021-04", "megatron-2021"), ("Megatron-DeepSpeed", "2022-01", "megatron-deepspeed"),
        ("PyTorch FSDP", "2024-03", "other"),
    ],
)  # fmt: skip
def test_frameworks_are_known_in_any_spelling(framework: str, date: str, name: str) -> None:
    assert generation_of({**ROW, "framework": framework, "source_date": date}).name == name


def test_a_profile_of_the_framework_on_a_like_device_reaches_as_much_more_of_the_peak() -> None:
    """Megatron-Core was measured on H100s alone; A100s reach 0.77 of their peak where those reach 0.68."""
    profiles = read_profiles()
    fitted = profiles["megatron-core/H100-SXM-80GB"]
    found = profile_of(stated_row({**ROW, "framework": "Megatron-Core", "source_date": "2024-03"}), profiles)
    ratio = device_of("A100-SXM-80GB").efficiency / device_of("H100-SXM-80GB").efficiency
    assert found.matmul == pytest.approx(min(1.0, ratio * fitted.matmul))
    assert found.hidden_activations == fitted.hidden_activations > 0
    # What no TPU was measured with says nothing of them.
    tpus = stated_row({**ROW, "framework": "Megatron-Core", "accelerator": "TPU v4", "devices_per_node": ""})
    assert profile_of(tpus, profiles) == prior_of(tpus)


def test_parameters_are_split_inside_of_slices() -> None:
    """Over the data-center network only where a row says so."""
    pods = {**ROW, "accelerator": "TPU v4", "n_devices": "8192", "devices_per_node": "", "tp": "1", "pp": "1"}
    pods |= {"dp": "8192", "gbs": "16384", "mbs": "", "n_heads": "16"}
    for shard, replicas in (("fsdp", 2), ("fsdp 8192 (ici 4096 x dcn 2)", 1), ("none", 1)):
        assert {plan.replicas for plan in stated_row({**pods, "shard": shard}).candidates} == {replicas}


def test_pipelines_keep_parameters_gathered() -> None:
    found = stated_row({**ROW, "framework": "Llama 3", "source_date": "2024-07", "shard": "fsdp"})
    assert {plan.zero for plan in found.candidates} == {2}
    assert [plan.zero for plan in stated_row({**ROW, "shard": "fsdp", "pp": "1", "dp": "8"}).candidates] == [3]


def test_a_batch_that_was_rounded_is_the_nearest_whole_one() -> None:
    found = stated_row({**ROW, "gbs": "976", "dp": "124", "tp": "8", "pp": "1", "n_devices": "992", "mbs": ""})
    assert (found.batch, found.rounded) == (992, 976 / 992)
    with pytest.raises(Inexpressible, match="not a multiple"):
        stated_row({**ROW, "gbs": "60"})


def test_where_nothing_fits_the_least_is_taken() -> None:
    """Not the largest microbatch, which is the fastest."""
    open_row = {**ROW, "d_model": "8192", "n_heads": "64", "n_kv_heads": "64", "d_ff": "32768", "n_layers": "64"}
    (solved,) = published.solve_rows([{**open_row, "mbs": "", "recompute": "none"}])
    profile = profile_of(solved.stated, read_profiles())
    layout = layout_of(solved.row, solved.stated)
    priced = [price_stated(plan, profile, layout) for plan in solved.plans]
    least = min(priced, key=lambda one: one.peak_bytes)
    assert best_of(solved, profile).peak_bytes == least.peak_bytes
    assert least.peak_bytes > usable_bytes(solved.stated)
    assert least.step_seconds > min(one.step_seconds for one in priced)
