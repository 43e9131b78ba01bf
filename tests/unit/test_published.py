"""Rows of published measurements: what they state, what they measured, and reasons where they state no plan of ours."""

from __future__ import annotations

import csv
from contextlib import suppress
from dataclasses import replace
from pathlib import Path

import pytest
from published import evaluate_rows, report, summary
from published_cells import AMOUNTS, COUNTS, FLAGS, Inexpressible, Row, RowsError, read_rows
from published_measured import measured_memory, measured_step_seconds
from published_plans import sharding_of
from published_profiles import read_profiles
from published_row import ROW
from published_rows import stated_row

from meshwright import zoo
from meshwright.cluster import load_cluster


def test_a_row_states_a_plan() -> None:
    (plan,) = stated_row(ROW).candidates
    assert (plan.tensor, plan.pipeline, plan.data, plan.microbatches) == (2, 2, 4, 8)
    assert plan.recompute == "layer"
    assert stated_row(ROW).cluster.hosts[0].nics == 8


def test_a_row_that_leaves_the_microbatch_open_has_candidates() -> None:
    plans = stated_row({**ROW, "mbs": ""}).candidates
    assert [plan.microbatches for plan in plans] == [16, 8, 4, 2, 1]


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"gbs": ""}, "global batch is not stated"),
        ({"dp": "3"}, "is not 16 devices"),
        ({"gbs": "60"}, "not a multiple"),
        ({"accelerator": "abacus"}, "'abacus' is not known"),
        ({"recompute": "sometimes"}, "'sometimes' is not known"),
        ({"shard": "in thirds"}, "no layout of ours"),
        ({"model": "AmoebaNet-D (18,256)"}, "batch size and depth are not stated"),
        ({"n_heads": "n/a"}, "n_heads is 'n/a', no whole number"),
        ({"mbs": "0"}, "mbs is '0', no whole number"),
        ({"step_time_s": "inf"}, "step_time_s is 'inf', no number"),
        ({"n_layers": ""}, "n_layers is not stated"),
        ({"n_heads": "15"}, "15 heads do not share"),
        ({"n_experts": "8", "top_k": "9"}, "9 of 8 experts"),
        ({"model": "Mixtral-9x9B"}, "n_experts is not stated"),
        ({"model": "BERT-large"}, "is an encoder"),
        ({"model": "T5-7B"}, "not by this name"),
        ({"accelerator": "H200-PCIe-141GB"}, "is not known"),
        ({"accelerator": "MI300A"}, "is not known"),
        ({"accelerator": "TPUv4", "n_devices": "7", "tp": "1", "pp": "1", "dp": "7", "gbs": "14"}, "TPUv4"),
        ({"devices_per_node": "16"}, "16 devices a host"),
        ({"model": "Wide-ResNet-34 c160 w2"}, "not in the zoo"),
        ({"shard": "hsdp in parts"}, "does not say inside of how many"),
    ],
)
def test_what_cannot_be_expressed_says_why(changes: dict[str, str], reason: str) -> None:
    with pytest.raises(Inexpressible, match=reason):
        stated_row({**ROW, **changes})


def test_a_framework_that_nobody_knows_is_as_its_devices_are_thought_to_be() -> None:
    row = {**ROW, "framework": "pencil"}
    told, known = evaluate_rows([row, ROW], read_profiles())
    assert stated_row(row).profile_key == "other/A100-SXM-80GB"
    assert told.predicted_step_seconds is not None
    assert known.predicted_step_seconds is not None
    assert 0.5 < told.predicted_step_seconds / known.predicted_step_seconds < 1.5


@pytest.mark.parametrize(
    ("kind", "preset"),
    [
        ("V100-SXM2-32GB", "p3dn.24xlarge"), ("A100-PCIe-40GB", "dgx-a100-40"), ("H800-SXM-80GB", "dgx-h100"),
        ("H200-SXM-141GB", "dgx-h200"), ("B200", "dgx-b200"), ("TPU v4", "tpu-v4:16"), ("TPUv6e", "tpu-v6e:16"),
        ("TPUv7x (Ironwood)", "tpu-v7x:16"), ("TPU7x", "tpu-v7x:16"), ("B300-SXM", "dgx-b300"),
        ("GB300", "gb300-nvl72"), ("MI300X", "mi300x-8"), ("AMD Instinct MI325X", "mi325x-8"), ("MI355X", "mi355x-8"),
        ("L40S", "l40s-8"), ("A100-PCIe-80GB", "a100-pcie-8"), ("h100-pcie", "h100-pcie-8"),
    ],
)  # fmt: skip
def test_devices_are_known_by_their_kind(kind: str, preset: str) -> None:
    assert stated_row({**ROW, "accelerator": kind}).cluster.device == load_cluster(preset).device


UNSIZED = {
    **ROW,
    "n_layers": "",
    "d_model": "",
    "n_heads": "",
    "d_ff": "",
    "vocab": "",
    "tp": "1",
    "pp": "1",
    "dp": "16",
}


@pytest.mark.parametrize(
    ("name", "model", "layers"),
    [
        ("Mixtral-8x7B", "mixtral", 32), ("DeepSeek-V3 671B", "deepseek", 61), ("Qwen3-30B-A3B", "qwen", 48),
        ("Qwen3 235B", "qwen", 94), ("gpt-oss-120b", "gpt-oss", 36), ("Llama 4 Scout", "llama", 48),
        ("Gemma-3-27B", "gemma", 62), ("Kimi K2", "deepseek", 61),
    ],
)  # fmt: skip
def test_models_of_today_are_known_by_name(name: str, model: str, layers: int) -> None:
    found = stated_row({**UNSIZED, "model": name})
    assert (found.config.family, found.config.layers, found.config.sequence) == (model, layers, 512)
    assert found.note.startswith(f"{name}: taken for the zoo's")


@pytest.mark.parametrize(
    ("name", "family"),
    [("T5-11B", "t5"), ("ViT-G/14", "vit"), ("DiT-XL/2", "dit"), ("Mamba-2 1.3B", "mamba"), ("Llama-3.1-8B", "llama")],
)
def test_so_are_models_of_other_families(name: str, family: str) -> None:
    assert stated_row({**UNSIZED, "model": name}).family_name == family


def test_layers_of_a_pipeline_are_one_scan() -> None:
    found = stated_row({**UNSIZED, "model": "DeepSeek-V3", "pp": "4", "dp": "4", "ep": "4"})
    (run,) = found.config.runs
    assert run.layers == 61
    assert run.pattern[0].feed_forward.experts == 256


def test_experts_have_as_many_slots_as_tokens_choose() -> None:
    row = {**ROW, "model": "MoE", "n_experts": "64", "top_k": "6", "mlp_gated": "1", "n_kv_heads": "4", "tp": "2"}
    (layer,) = stated_row(row).config.kinds
    mixture = layer.feed_forward
    assert mixture.capacity * mixture.experts == mixture.top_k * mixture.group
    assert layer.attention.kv_heads == 4


def test_experts_over_tensor_devices_are_shared_by_them() -> None:
    row = {**UNSIZED, "model": "Mixtral-8x7B", "tp": "8", "dp": "2", "ep": "8"}
    with pytest.raises(Inexpressible, match="no part of dp 2"):
        stated_row(row)
    plan = stated_row({**row, "framework": "Megatron-Core"}).candidates[0]
    assert (plan.tensor, plan.expert, plan.data) == (8, 2, 1)


def test_a_mixture_on_a_machine_of_today_is_predicted() -> None:
    sizes = {"n_layers": "4", "d_model": "1024", "n_heads": "16", "n_kv_heads": "4", "d_ff": "512", "mlp_gated": "1"}
    row = {**ROW, **sizes, "model": "MoE", "n_experts": "16", "top_k": "4", "accelerator": "B300-SXM", "tp": "1"}
    (found,) = evaluate_rows([{**row, "pp": "1", "dp": "16", "ep": "8"}], read_profiles())
    assert not found.reason
    assert found.predicted_step_seconds is not None


def test_hosts_have_as_many_devices_as_a_row_says() -> None:
    row = {**ROW, "accelerator": "GH200-96GB", "devices_per_node": "4"}
    (host,), (known,) = stated_row(row).cluster.hosts, load_cluster("gh200-4").hosts
    assert (host.device, host.devices, host.wires) == (known.device, known.devices, known.wires)


def test_every_rate_gives_the_step() -> None:
    tokens = 64 * 512
    assert measured_step_seconds(ROW) == 0.3
    for name, value in (("tokens_per_s", tokens / 0.3), ("tokens_per_s_per_dev", tokens / 0.3 / 16)):
        assert measured_step_seconds({**ROW, "step_time_s": "", name: str(value)}) == pytest.approx(0.3)
    # 96 s l h^2 (1 + s / 6h) + 6 s h v for each sample, as Narayanan et al. count with the rematerialised forward pass.
    flops = 64 * 512 * (96 * 8 * 1024**2 * (1 + 512 / (6 * 1024)) + 6 * 1024 * 51200)
    rate = {"step_time_s": "", "tflops_per_dev": str(flops / 0.3 / 16 / 1e12), "tflops_kind": "hardware"}
    assert measured_step_seconds({**ROW, **rate}) == pytest.approx(0.3)


def test_rates_of_models_of_today_are_in_their_own_flops() -> None:
    target = zoo.build("qwen3-30b-a3b", sequence=512)
    rate = {**ROW, "model": "Qwen3-30B-A3B", "step_time_s": "", "tflops_per_dev": "100", "tflops_kind": "model"}
    rate |= {"n_layers": "", "d_model": "", "n_heads": "", "d_ff": "", "vocab": ""}
    assert measured_step_seconds(rate) == pytest.approx(64 * target.model_flops_per_sample / (100e12 * 16))
    # Every layer of a mixture with gates has experts.
    sizes = {"n_experts": "16", "top_k": "4", "mlp_gated": "1", "d_ff": "512", "d_model": "1024", "n_heads": "16"}
    row = {**rate, **sizes, "model": "MoE", "n_layers": "8", "vocab": "51200"}
    found = stated_row({**row, "mbs": "2"})
    built = zoo.decoder.build(found.config)
    vocabulary = 6 * 1024 * 512 * (found.config.vocabulary - 51200)
    expected = 64 * (built.model_flops_per_sample - vocabulary) / (100e12 * 16)
    assert measured_step_seconds(row) == pytest.approx(expected)


@pytest.mark.parametrize(
    ("text", "zero", "replicas"),
    [("none", 0, 1), ("zero1 within 8", 1, 8), ("fsdp2", 3, 1), ("hsdp: fsdp 16 within a slice", 3, 4), ("hsdp", 3, 8)],
)
def test_shardings_are_a_zero_stage_and_replicas(text: str, zero: int, replicas: int) -> None:
    assert sharding_of({**ROW, "shard": text}, 0, 64) == (zero, replicas)


def test_model_states_need_no_program() -> None:
    row = {
        "row_id": "M1", "source": "ZeRO", "model": "any", "params_b": "7.5", "dp": "64", "shard": "zero1 (Pos)",
        "quantity": "model states per device", "value": "31.4", "unit": "GB",
    }  # fmt: skip
    (found,) = evaluate_rows([row], {})
    assert found.error == pytest.approx(0.0, abs=1e-3)
    assert measured_memory(row) == 31.4e9


def test_a_report_has_every_row_and_its_reason() -> None:
    results = evaluate_rows([ROW, {**ROW, "row_id": "X2", "gbs": ""}], read_profiles())
    found = report(results)
    assert found["inexpressible"] == {"X2": "the global batch is not stated"}
    first = found["rows"][0]
    assert first["predicted_step_seconds"] > 0
    assert first["predicted_memory_bytes"] > 0
    assert first["error"] == pytest.approx(first["predicted_step_seconds"] / 0.3 - 1)
    assert summary(results)["feasibility"]["fits, ran"] == 1


# Rows of three sources, as their publishers have them (`source_ref`).
PUBLISHED = Path(__file__).resolve().parents[1] / "data" / "published_rows.csv"


def published(source: str) -> list[Row]:
    with PUBLISHED.open() as file:
        return [row for row in csv.DictReader(file) if row["source"].startswith(source)]


@pytest.mark.slow
@pytest.mark.parametrize("source", ["Megatron-LM SC21", "fms-fsdp"])
def test_steps_are_predicted_as_they_were_measured(source: str) -> None:
    """What is claimed of all published rows, of a few of them, with the profiles that are kept."""
    found = summary(evaluate_rows(published(source), read_profiles()))
    assert found["predicted"] == found["rows"] >= 8
    assert found["median_absolute_error"] <= 0.10
    assert found["error_90th_percentile"] <= 0.25
    assert found["spearman"] >= 0.9
    assert found["feasibility"] == {
        "fits, ran": found["rows"], "fits, out of memory": 0, "does not fit, ran": 0, "does not fit, out of memory": 0,
    }  # fmt: skip


def test_logical_meshes_are_ranked_as_they_were_measured() -> None:
    """GPT on 8 V100s: (1, 8), (2, 4), (4, 2), and (8, 1) does not fit; Wide-ResNet: (8, 1), (2, 4), (4, 2)."""
    rows = published("Alpa OSDI22 Fig 9")
    results = evaluate_rows(rows, read_profiles())
    for model in ("GPT", "Wide-ResNet"):
        mine = [(row, one) for row, one in zip(rows, results, strict=True) if row["model"].startswith(model)]
        assert len(mine) >= 3
        assert all(one.fits == one.ran for _, one in mine)
        ran = [one for _, one in mine if one.ran]
        assert sorted(ran, key=lambda one: one.predicted_step_seconds) == sorted(
            ran, key=lambda one: one.measured_step_seconds
        )


TEXTS = (
    "model", "accelerator", "interconnect", "precision", "shard", "recompute", "framework", "source_date",
    "tflops_kind",
)  # fmt: skip


@pytest.mark.parametrize("name", [*COUNTS, *AMOUNTS, *FLAGS, *TEXTS])
def test_no_cell_ends_the_others(name: str) -> None:
    """Whatever a cell holds, its row is predicted or refused with a reason."""
    for base in (ROW, {**ROW, "accelerator": "TPUv4", "step_time_s": "", "tflops_per_dev": "100"}):
        for text in ("", "n/a", "0", "-1", "2.5", "nan", "inf", "3", "7.0", "0x 100 Gb/s", "Wide-ResNet-50 c0 w2"):
            row = {**base, name: text}
            with suppress(Inexpressible):
                assert stated_row(row).candidates
                measured = measured_step_seconds(row)
                assert measured is None or measured > 0


def test_models_that_the_zoo_cannot_build_are_refused_one_by_one() -> None:
    odd = {**ROW, "n_experts": "8", "n_layers": "7", "pp": "1", "dp": "8", "row_id": "X3"}
    refused, told = evaluate_rows([odd, ROW], read_profiles())
    assert refused.reason.startswith("moe: ")
    assert told.error is not None


def test_hosts_have_the_devices_that_a_row_says() -> None:
    boards = stated_row({**ROW, "accelerator": "tpu v4", "devices_per_node": "4"}).cluster.hosts[0]
    assert boards.devices == 16
    fewer = stated_row({**ROW, "devices_per_node": "4", "interconnect": ""}).cluster.hosts[0]
    assert (fewer.devices, fewer.nics) == (4, 4)
    cards = stated_row({**ROW, "accelerator": "A100-PCIe-80GB"}).cluster.hosts[0]
    assert cards.link == load_cluster("rtx4090-4").hosts[0].link


def test_steps_and_memory_have_statistics_of_their_own() -> None:
    (both,) = evaluate_rows([{**ROW, "peak_mem_gb": "10"}], read_profiles())
    memory = replace(both, measured_step_seconds=None, error=both.memory_error)
    found = summary([both, memory])
    assert found["predicted"] == 1
    assert found["memory"]["predicted"] == 2
    assert found["median_absolute_error"] == pytest.approx(abs(both.error))
    assert found["memory"]["median_absolute_error"] == pytest.approx(abs(both.memory_error))
    assert summary([memory])["median_absolute_error"] == pytest.approx(abs(both.memory_error))
    assert summary([both] * 3)["spearman"] is None  # of equals there is no rank; JSON has no NaN


@pytest.mark.parametrize(
    ("text", "reason"),
    [
        ("", "needed row_id, source, model too"), ("row_id,source\nX,here\n", "needed model too"),
        ("row_id,source,model\n", "needed a row"),
    ],
)  # fmt: skip
def test_files_that_are_no_tables_are_refused(tmp_path: Path, text: str, reason: str) -> None:
    file = tmp_path / "rows.csv"
    file.write_text(text)
    with pytest.raises(RowsError, match=reason):
        read_rows(file)
    with pytest.raises(RowsError, match="No such file"):
        read_rows(tmp_path / "none.csv")
