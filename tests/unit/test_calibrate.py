"""Calibration: constants found again from synthetic measurements, samples, files and where they hold, the command."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import pytest

import meshwright as mw
from meshwright import cli
from meshwright.calibrate import calibration as calibration_module
from meshwright.calibrate.calibration import calibrate, calibration_document, check_out
from meshwright.calibrate.case import Case, Chain, Collective, Product
from meshwright.calibrate.cases import cases_of, groups_of
from meshwright.calibrate.fit import Fitted, fit
from meshwright.calibrate.measure import Measurement, measure
from meshwright.calibrate.origin import check_origin, origin_of
from meshwright.calibrate.sample import Sample, sample_of
from meshwright.cluster import Cluster, ClusterError, load_cluster
from meshwright.errors import PlanError


def seconds_on(cluster: Cluster, case: Case) -> float:
    if isinstance(case, Collective):
        return case.seconds(cluster.logical_mesh(case.shape).axes[case.axis])
    return case.seconds(cluster.device)


def synthetic(cluster: Cluster, *, noise: float = 0.0, quick: bool = False) -> list[Measurement]:
    """What a machine that is exactly `cluster` would be measured as."""
    chance, found = random.Random(7), []
    for series in cases_of(cluster, quick=quick):
        for case in series:
            seconds = seconds_on(cluster, case) * (1 + noise * chance.uniform(-1, 1))
            found.append(Measurement(case=case, sample=sample_of([seconds] * 7)))
    return found


def changed(cluster: Cluster) -> Cluster:
    """Other constants everywhere."""
    (host, *_) = cluster.hosts
    device = replace(
        host.device, peak_flops={dtype: 0.4 * rate for dtype, rate in host.device.peak_flops.items()},
        memory_bandwidth_bytes_per_second=0.3 * host.device.memory_bandwidth_bytes_per_second, memory_overlap=0.6,
        kernel_launch_seconds=7e-6,
        transpose_bandwidth_bytes_per_second=0.7 * host.device.transpose_bandwidth_bytes_per_second,
        vector_flops=1.6 * host.device.vector_flops,
    )  # fmt: skip
    link = replace(
        host.link, bandwidth_bytes_per_second=0.5 * host.link.bandwidth_bytes_per_second, latency_seconds=9e-6,
        launch_seconds=70e-6, exchange_efficiency=0.7,
        reduction_bandwidth_bytes_per_second=0.8 * host.link.reduction_bandwidth_bytes_per_second,
        sum_bandwidth_bytes_per_second=0.3 * host.link.sum_bandwidth_bytes_per_second,
    )  # fmt: skip
    return replace(cluster, hosts=tuple(replace(host, device=device, link=link) for host in cluster.hosts))


def close(a: Cluster, b: Cluster, tolerance: float) -> None:
    one, two = a.hosts[0], b.hosts[0]
    for dtype in ("float32", "bfloat16", "float16"):
        assert one.device.achievable_flops(dtype) == pytest.approx(two.device.achievable_flops(dtype), rel=tolerance)
    for name in ("memory_bandwidth_bytes_per_second", "memory_overlap", "kernel_launch_seconds"):
        assert getattr(one.device, name) == pytest.approx(getattr(two.device, name), rel=tolerance)
    # Few cases tell of these, and the description holds each with a hundredth of one.
    for name in ("transpose_bandwidth_bytes_per_second", "vector_flops"):
        assert getattr(one.device, name) == pytest.approx(getattr(two.device, name), rel=5 * tolerance)
    numbers = ("bandwidth_bytes_per_second", "latency_seconds", "launch_seconds", "exchange_efficiency")
    for name in (*numbers, "reduction_bandwidth_bytes_per_second", "sum_bandwidth_bytes_per_second"):
        assert getattr(one.link, name) == pytest.approx(getattr(two.link, name), rel=tolerance)


@pytest.mark.parametrize("name", ["cpu", "dgx-a100-80", "dgx-h200"])
def test_the_fit_finds_the_constants(name: str) -> None:
    described = load_cluster(name)
    truth = changed(described)
    found = fit(described, synthetic(truth))
    close(found.cluster, truth, 1e-3)
    assert max(map(abs, found.errors)) < 1e-3
    assert found.cluster.hosts[0].nic == described.hosts[0].nic  # no axis crossed it


def test_a_published_peak_stays_the_denominator() -> None:
    described = load_cluster("dgx-a100-80")
    device = fit(described, synthetic(changed(described))).cluster.device
    assert device.efficiency < 1
    assert max(device.peak_flops[t] / described.device.peak_flops[t] for t in ("float32", "bfloat16")) == pytest.approx(
        1
    )


def test_wild_cases_do_not_bend_the_fit() -> None:
    """5 % of noise everywhere, and a tenth of the cases ten times too slow."""
    described = load_cluster("cpu")
    truth = changed(described)
    measured = synthetic(truth, noise=0.05)
    for position in range(0, len(measured), 10):
        one = measured[position]
        measured[position] = replace(one, sample=sample_of([10 * one.sample.seconds]))
    found = fit(described, measured)
    (host, true) = found.cluster.hosts[0], truth.hosts[0]
    rates = ("memory_bandwidth_bytes_per_second",)
    assert all(getattr(host.device, n) == pytest.approx(getattr(true.device, n), rel=0.3) for n in rates)
    assert host.link.bandwidth_bytes_per_second == pytest.approx(true.link.bandwidth_bytes_per_second, rel=0.3)
    assert host.link.launch_seconds == pytest.approx(true.link.launch_seconds, rel=0.3)


def test_a_single_device_has_no_links_to_fit() -> None:
    described = load_cluster("cpu")
    alone = replace(described, hosts=(replace(described.hosts[0], devices=1),))
    assert not list(groups_of(alone))
    assert fit(alone, synthetic(alone, quick=True)).cluster.hosts[0].link == described.hosts[0].link
    assert fit(alone, []).cluster == alone


def test_groups_are_those_that_cross_different_links() -> None:
    assert [axis.size for _, _, axis in groups_of(load_cluster("cpu"))] == [8, 2, 4]
    wired = load_cluster("p3.16xlarge")  # groups of a hybrid cube-mesh differ in their wires
    assert sum(axis.size == 4 for _, _, axis in groups_of(wired)) == 2


def test_samples() -> None:
    sample = sample_of([*(float(n) for n in range(1, 20)), 1e9])
    assert (sample.seconds, sample.runs) == (10.5, 20)
    assert 5 <= sample.low < sample.seconds < sample.high <= 16
    assert sample_of([2.0]) == Sample(seconds=2.0, low=2.0, high=2.0, runs=1)


class Clockwork:
    """A program that takes what the cost model says, in no time."""

    cluster = load_cluster("cpu")
    made: list[Case]

    def __init__(self, case: Case, devices: Sequence[Any]) -> None:
        Clockwork.made.append(case)
        self._once = seconds_on(self.cluster, case)

    def seconds(self, times: int) -> float:
        return self.without(times) + times * self._once

    def without(self, times: int) -> float:
        return 1e-3


def test_measuring_takes_the_calls_off_and_leaves_out_what_takes_too_long() -> None:
    Clockwork.made = []
    cases = cases_of(Clockwork.cluster, quick=False)
    told: list[float] = []
    found = measure(cases, [], time_limit_seconds=2, repeated=Clockwork, tell=lambda text, share: told.append(share))
    for one in found:
        assert one.sample.seconds == pytest.approx(seconds_on(Clockwork.cluster, one.case), rel=1e-6)
    assert told == sorted(told)
    assert told[-1] <= 1
    assert {series[0] for series in cases} <= {one.case for one in found}
    longest = max(seconds_on(Clockwork.cluster, one.case) for one in found)
    assert longest < 0.2 < max(seconds_on(Clockwork.cluster, case) for case in Clockwork.made)


class Disturbed(Clockwork):
    """The same, where every third run takes three times as long: something else runs."""

    def __init__(self, case: Case, devices: Sequence[Any]) -> None:
        super().__init__(case, devices)
        self._runs = 0

    def seconds(self, times: int) -> float:
        self._runs += 1
        return super().seconds(times) * (1 if self._runs % 3 else 3)


def test_what_disturbs_some_runs_does_not_count() -> None:
    Clockwork.made = []
    for one in measure(cases_of(Clockwork.cluster, quick=True), [], time_limit_seconds=2, repeated=Disturbed):
        assert one.sample.high == pytest.approx(seconds_on(Clockwork.cluster, one.case), rel=1e-6)


def test_on_cpus_arrays_leave_the_caches() -> None:
    """Eight devices of 4 MiB each are what a processor's last cache holds; devices of their own run one at a time."""
    for name, least, most in (("cpu", 2**22, 64), ("dgx-a100-80", 0, 1)):
        for case in (case for series in cases_of(load_cluster(name), quick=False) for case in series):
            if isinstance(case, Chain):
                assert case.together * case.size_bytes >= least
            if isinstance(case, Chain | Product | Collective):
                assert case.together <= most
            if isinstance(case, Collective) and case.together > 1:
                assert case.together * case.size_bytes <= 2**20


def test_the_time_limit_leaves_the_smallest_of_each_series() -> None:
    Clockwork.made = []
    cases = cases_of(Clockwork.cluster, quick=True)
    found = {one.case for one in measure(cases, [], time_limit_seconds=0, repeated=Clockwork)}
    assert found <= {case for series in cases for case in series[:2]}
    assert found >= {series[0] for series in cases}


def test_what_is_not_measured_stays_as_described() -> None:
    described = load_cluster("cpu")
    tiny = [one for one in synthetic(changed(described)) if getattr(one.case, "size_bytes", 0) == 1024]
    link = fit(described, tiny).cluster.hosts[0].link
    assert link.bandwidth_bytes_per_second == pytest.approx(described.hosts[0].link.bandwidth_bytes_per_second, rel=0.3)
    assert link.launch_seconds == pytest.approx(70e-6, rel=0.1)


@pytest.fixture
def measured_at_once(monkeypatch: pytest.MonkeyPatch) -> Cluster:
    """`calibrate` finds a machine with other constants, without measuring."""
    truth = changed(load_cluster("cpu"))

    def fake(cases: Any, devices: Any, *, time_limit_seconds: float, tell: Callable[..., None]) -> list[Measurement]:
        tell("round 1", 0.5)
        (host,) = truth.hosts
        here = replace(truth, hosts=(replace(host, devices=len(devices)),))
        return [Measurement(case=c, sample=sample_of([seconds_on(here, c)] * 7)) for series in cases for c in series]

    monkeypatch.setattr(calibration_module, "measure", fake)
    return truth


def test_files_round_trip(measured_at_once: Cluster, tmp_path: Path) -> None:
    found = calibrate(quick=True)
    path = tmp_path / "cluster.toml"
    found.save(path)
    assert load_cluster(str(path)) == found.cluster
    assert load_cluster(str(path)).measured_on == found.origin == origin_of(jax.devices())
    assert found.cluster.hosts[0].link.launch_seconds == pytest.approx(70e-6, rel=1e-2)
    with pytest.raises(PlanError, match="refused to write the calibration"):
        found.save(tmp_path / "nowhere" / "cluster.toml")


def test_a_part_of_the_devices(measured_at_once: Cluster) -> None:
    found = calibrate(quick=True, devices=jax.devices()[:2])
    assert found.cluster.num_devices == found.origin.devices == 2


def other_devices(path: Path, **changes: Any) -> Path:
    made = replace(origin_of(jax.devices()), **changes)
    described = load_cluster("dgx-h100" if made.platform == "gpu" else "local")
    hosts = (replace(described.hosts[0], devices=made.devices),)
    path.write_text(replace(described, hosts=hosts, measured_on=made).to_toml())
    return path


@pytest.mark.parametrize(
    ("changes", "shown"),
    [
        ({"device_kind": "NVIDIA H100 80GB HBM3", "platform": "gpu"}, "8 x NVIDIA H100"),
        ({"devices": 4}, "4 x cpu"),
        ({"jax": "0.1.0"}, "under JAX 0.1.0"),
        ({"processes": 2}, "8 x cpu in 2 processes"),
    ],
    ids=str,
)
def test_a_calibration_made_on_other_devices(changes: dict[str, Any], shown: str, tmp_path: Path) -> None:
    path = other_devices(tmp_path / "other.toml", **changes)
    assert load_cluster(str(path)).num_devices == changes.get("devices", 8)  # to plan for them is allowed
    with pytest.raises(PlanError, match=r"refused to run by this calibration.*needed the devices it was made on") as e:
        check_origin(load_cluster(str(path)))
    assert shown in str(e.value)
    step = mw.parallelize(lambda x: 2 * x, cluster=str(path))
    with pytest.raises(PlanError, match="refused to run by this calibration"):
        step(jax.numpy.ones(8))
    with pytest.raises(PlanError, match="refused to run by this calibration"):
        mw.plan_for(lambda x: 2 * x, (jax.numpy.ones(8),), cluster=str(path), refine="measure")


def test_files_that_no_calibration_wrote_and_broken_ones(tmp_path: Path) -> None:
    check_origin(load_cluster("local"))
    path = other_devices(tmp_path / "mine.toml")
    check_origin(load_cluster(str(path)))
    text = path.read_text()
    for found, wrong, where in (
        ("devices = 8\nplatform", "devices = 0\nplatform", "MeasuredOn.devices"),
        ('platform = "cpu"', 'platform = "abacus"', "MeasuredOn.platform"),
        ('platform = "cpu"', 'platform = "gpu"', "Cluster.measured_on"),
        ('device_kind = "cpu"', 'device_kind = "NVIDIA H100"', "Cluster.measured_on"),
        ("devices = 8\nplatform", "devices = 4\nplatform", "Cluster.measured_on"),
        ("processes = 1", "process = 1", "'process'"),
        ("processes = 1\n", "", "'processes'"),
    ):
        assert found in text
        path.write_text(text.replace(found, wrong))
        with pytest.raises(ClusterError, match="refused") as e:
            load_cluster(str(path))
        assert where in e.value.where


def test_where_numbers_are_from_does_not_make_another_cluster() -> None:
    local = load_cluster("local")
    measured = replace(local, measured_on=origin_of(jax.devices()))
    assert measured.fingerprint() == local.fingerprint()
    assert measured != local


def test_the_document_shows_measured_beside_fitted(measured_at_once: Cluster) -> None:
    found = calibrate(quick=True)
    document = json.loads(json.dumps(calibration_document(found), allow_nan=False))
    assert document["origin"]["devices"] == 8
    assert len(document["cases"]) == len(found.fitted.measured)
    row = document["cases"][-1]
    assert row["error"] == pytest.approx(row["predicted_seconds"] / row["measured_seconds"] - 1)
    assert row["low_seconds"] <= row["measured_seconds"] <= row["high_seconds"]
    assert set(document["median_errors"]) >= {"product", "gelu", "all_reduce", "permute"}


def test_the_command(measured_at_once: Cluster, capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    def run(*argv: str) -> tuple[int, str, str]:
        with pytest.raises(SystemExit) as ended:
            cli.main(["calibrate", "--quick", *argv])
        out, err = capsys.readouterr()
        return int(ended.value.code or 0), out, err

    status, out, err = run()
    assert status == 0
    assert "Measured on 8 x cpu" in err
    path = tmp_path / "found.toml"
    path.write_text(out)
    assert load_cluster(str(path)).name == "8 x cpu, measured"
    status, out, _ = run("--out", str(tmp_path / "cluster.toml"))
    assert status == 0
    assert "plan with --cluster" in out
    assert (tmp_path / "cluster.toml").read_text() == path.read_text()
    status, out, _ = run("--json")
    assert status == 0
    assert json.loads(out)["toml"] == path.read_text()
    for wrong in ("cluster.txt", "nowhere/cluster.toml"):
        status, _, err = run("--out", str(tmp_path / wrong))
        assert status == 2
        assert "refused to write the calibration" in err


def test_a_path_is_refused_before_measuring(tmp_path: Path) -> None:
    check_out(tmp_path / "cluster.toml")
    (tmp_path / "folder.toml").mkdir()
    with pytest.raises(PlanError):
        check_out(tmp_path / "folder.toml")


def test_fitted_errors() -> None:
    described = load_cluster("cpu")
    (one, *_) = synthetic(described)
    fitted = Fitted(cluster=described, measured=(one,), predicted=(2 * one.sample.seconds,))
    assert fitted.errors == (pytest.approx(1.0),)
