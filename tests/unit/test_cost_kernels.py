"""Kernels by class and size: roofs, tiles, and what a profile may say."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given, strategies as st

from meshwright.cluster import load_cluster
from meshwright.cluster.load import preset_names
from meshwright.cost.efficiency import EfficiencyProfile, profile_of
from meshwright.cost.kernels import Kernel, kernel_seconds

A100 = replace(load_cluster("dgx-a100-80").device, kernel_launch_seconds=0.0)
PLAIN = EfficiencyProfile(name="plain", matmul=0.8, attention=0.5, memory=1.0, passes=2.0, tiles=False)


def product(m: float, n: float, k: float, *, batch: float = 1, dtype: str = "bfloat16") -> Kernel:
    moved = 2 * batch * (m * k + k * n + m * n)
    return Kernel("product", 2 * batch * m * n * k, moved, dtype, (batch, m, n, k))


def rate(kernel: Kernel, profile: EfficiencyProfile) -> float:
    return kernel.flops / kernel_seconds(kernel, A100, profile)


def test_a_large_product_reaches_its_fraction_of_the_peak() -> None:
    assert rate(product(16384, 16384, 16384), PLAIN) == pytest.approx(0.8 * 312e12, rel=0.02)


def test_a_thin_product_is_bound_by_memory() -> None:
    thin = product(8, 8192, 8192)
    assert kernel_seconds(thin, A100, PLAIN) >= thin.moved_bytes / A100.memory_bandwidth_bytes_per_second


@pytest.mark.parametrize("sizes", [(512, 512, 512), (1024, 1024, 1024), (4096, 4096, 4096)])
def test_larger_products_run_at_a_higher_rate(sizes: tuple[int, int, int]) -> None:
    profile = profile_of(A100)
    larger = product(*(2 * size for size in sizes))
    assert rate(larger, profile) > rate(product(*sizes), profile)


def test_a_last_wave_of_few_tiles_costs_a_whole_one() -> None:
    profile = replace(PLAIN, tiles=True)
    # 108 processors: 12 x 9 tiles of 256 x 128 fill one wave; one row of tiles more needs most of a second.
    one, more = product(12 * 256, 9 * 128, 8192), product(13 * 256, 9 * 128, 8192)
    assert rate(one, profile) > 1.2 * rate(more, profile)


def test_attention_counts_what_a_mask_leaves_and_is_slower_with_narrow_heads() -> None:
    kernel = Kernel("attention", 1e12, 1e6, "bfloat16", (0.5, 0.0))
    assert kernel_seconds(kernel, A100, PLAIN) == pytest.approx(0.5e12 / (0.5 * 312e12))
    # FlashAttention-3, figure 5: cuDNN at 16,384 positions with heads of 64 and of 128.
    wide, narrow = (kernel_seconds(kernel._replace(shape=(1.0, size)), A100, PLAIN) for size in (128.0, 64.0))
    assert narrow / wide == pytest.approx(595 / 413, rel=0.03)


def test_memory_passes_as_often_as_the_profile_says() -> None:
    expected = 2e9 / A100.memory_bandwidth_bytes_per_second
    assert kernel_seconds(Kernel("stored", 0.0, 1e9), A100, PLAIN) == pytest.approx(expected)
    fused = kernel_seconds(Kernel("fused", 0.0, 1e9), A100, replace(PLAIN, fused_share=0.25))
    assert fused == pytest.approx(expected / 4)


def test_arithmetic_of_chains_comes_on_top_where_a_device_says_how_fast_it_is() -> None:
    device = replace(A100, vector_flops=1e12)
    for kind in ("stored", "fused"):
        nothing, work = Kernel(kind, 0.0, 1e9), Kernel(kind, 3e9, 1e9)
        assert kernel_seconds(work, A100, PLAIN) == kernel_seconds(nothing, A100, PLAIN) > 0
        more = kernel_seconds(work, device, PLAIN) - kernel_seconds(nothing, device, PLAIN)
        assert more == pytest.approx(3e-3)
    # What is fused takes nothing else there.
    assert kernel_seconds(Kernel("fused", 3e9, 1e9), device, PLAIN) == pytest.approx(3e-3)


def test_a_right_operand_that_is_packed_passes_more_often() -> None:
    device, packed = replace(A100, memory_overlap=0.0), PLAIN.but(packed=2.0)
    for kernel, right in ((product(8, 512, 256), 512 * 256), (product(512, 8, 256, batch=3), 3 * 8 * 256)):
        more = kernel_seconds(kernel, device, packed) - kernel_seconds(kernel, device, PLAIN)
        assert more == pytest.approx(2 * 2 * right / A100.memory_bandwidth_bytes_per_second)


def test_what_does_not_hide_comes_on_top() -> None:
    kernel = product(8192, 8192, 8192)
    arithmetic = kernel.flops / (0.8 * 312e12)
    traffic = kernel.moved_bytes / A100.memory_bandwidth_bytes_per_second
    for overlap in (0.0, 0.5, 1.0):
        device = replace(A100, memory_overlap=overlap)
        assert kernel_seconds(kernel, device, PLAIN) == pytest.approx(arithmetic + (1 - overlap) * traffic)


def test_all_but_what_is_fused_is_started() -> None:
    device = replace(A100, kernel_launch_seconds=3e-6)
    kernels = [
        product(64, 64, 64), product(1, 64, 64), Kernel("convolution", 1e6, 1e3, "bfloat16"),
        Kernel("attention", 1e6, 1e3, "bfloat16", (0.5, 0.0)), Kernel("stored", 0.0, 1e3), Kernel("fused", 0.0, 1e3),
    ]  # fmt: skip
    starts = [kernel_seconds(k, device, PLAIN) - kernel_seconds(k, A100, PLAIN) for k in kernels]
    assert starts == pytest.approx([*[3e-6] * 5, 0.0])


def test_transposes_have_a_rate_of_their_own() -> None:
    device = replace(A100, transpose_bandwidth_bytes_per_second=1e9, kernel_launch_seconds=3e-6)
    assert kernel_seconds(Kernel("transpose", 0.0, 2e6), device, PLAIN) == pytest.approx(2e-3 + 3e-6)


def test_few_features_leave_lanes_idle() -> None:
    many, few = (Kernel("convolution", 1e12, 1e3, "bfloat16", (features,)) for features in (1e9, 4))
    assert kernel_seconds(few, A100, PLAIN) == kernel_seconds(many, A100, PLAIN)
    ramp = PLAIN.but(feature_ramp=4.0)
    assert kernel_seconds(few, A100, ramp) == pytest.approx(2 * kernel_seconds(many, A100, ramp), rel=1e-6)


def test_narrow_types_have_a_fraction_of_their_own() -> None:
    device = replace(A100, peak_flops={**A100.peak_flops, "float8_e4m3fn": 624e12})
    profile = replace(PLAIN, narrow=0.4)
    narrow = product(16384, 16384, 16384, dtype="float8_e4m3fn")
    assert narrow.flops / kernel_seconds(narrow, device, profile) == pytest.approx(0.4 * 624e12, rel=0.02)


DEVICES = {name: load_cluster(f"{name}:4" if "tpu" in name else name).device for name in preset_names()}
DIMS = st.one_of(st.sampled_from([1, 2, 3, 4, 8, 63, 64, 65, 128, 1024, 12288]), st.integers(1, 20000))


@given(
    name=st.sampled_from(sorted(DEVICES)), dtype=st.sampled_from(["float32", "bfloat16"]), dim=st.integers(0, 3),
    shape=st.tuples(st.integers(1, 200), DIMS, DIMS, DIMS), more=st.integers(1, 100),
)  # fmt: skip
def test_a_larger_product_takes_longer_but_no_longer_than_its_halves(
    name: str, dtype: str, dim: int, shape: tuple[int, int, int, int], more: int
) -> None:
    device = DEVICES[name]

    def seconds(extent: int) -> float:
        batch, m, n, k = (extent if place == dim else size for place, size in enumerate(shape))
        moved = (4 if dtype == "float32" else 2) * batch * (m * k + k * n + m * n)
        kernel = Kernel("product", 2.0 * batch * m * n * k, moved, dtype, (batch, m, n, k))
        return kernel_seconds(kernel, device, profile_of(device))

    half = shape[dim]
    assert seconds(half) <= seconds(half + more) * (1 + 1e-9)
    assert seconds(2 * half) <= 2 * seconds(half) * (1 + 1e-9)


@pytest.mark.parametrize(
    "wrong", [{"matmul": 1.2}, {"matmul": 0.0}, {"network": float("nan")}, {"hidden_weights": -0.1}, {"passes": -1.0}]
)
def test_a_profile_refuses_what_no_device_does(wrong: dict[str, float]) -> None:
    with pytest.raises(ValueError, match="refused the efficiency profile"):
        EfficiencyProfile(name="wrong", **wrong)


def test_every_device_has_a_profile() -> None:
    devices = {name: load_cluster(name).device for name in ("p3.16xlarge", "dgx-h100", "dgx-b200", "tpu-v5e:4", "cpu")}
    found = {name: profile_of(device) for name, device in devices.items()}
    assert [profile.name for profile in found.values()] == ["V100", "H100", "B200", "TPU", "cpu"]
    assert all(found[name].matmul == device.efficiency for name, device in devices.items())
