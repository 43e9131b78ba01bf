"""Presets, files and the local machine by a short text."""

import dataclasses
from importlib import resources

import jax
import pytest

from meshwright._jax import devices as jax_devices
from meshwright._jax.devices import VisibleDevices
from meshwright.cluster import ClusterError, load_cluster, preset_names

EXPECTED = {
    "cpu", "p3.16xlarge", "p3dn.24xlarge", "p4d.24xlarge", "p4de.24xlarge", "p5.48xlarge", "p6-b200.48xlarge", "dgx-1v",
    "dgx-2", "dgx-a100-40", "dgx-a100-80", "selene", "dgx-h100", "dgx-h200", "dgx-b200", "gb200-nvl72", "a3-highgpu-8g",
    "a3-megagpu-8g", "grand-teton", "rtx4090-4", "p40-8", "tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x",
    "dgx-b300", "gb300-nvl72", "gh200-4", "mi300x-8", "mi325x-8", "mi355x-8", "a100-pcie-8", "h100-pcie-8", "l40s-8",
}  # fmt: skip
TPUS = ("tpu-v4", "tpu-v5e", "tpu-v5p", "tpu-v6e", "tpu-v7x")


def test_presets_by_name_and_number_of_hosts():
    assert set(preset_names()) >= EXPECTED
    for name in sorted(set(preset_names()) - set(TPUS)):
        one, three = load_cluster(name), load_cluster(f"{name}:3")
        assert (one.name, three.name) == (name, f"{name}:3")
        assert len(one.hosts) == 1
        assert three.hosts == one.hosts * 3


def test_several_presets_are_one_cluster():
    cluster = load_cluster("p4d.24xlarge:2+p3.16xlarge:3")
    assert cluster.name == "p4d.24xlarge:2+p3.16xlarge:3"
    assert cluster.hosts == load_cluster("p4d.24xlarge").hosts * 2 + load_cluster("p3.16xlarge").hosts * 3
    with pytest.raises(ClusterError, match=r"refused cluster 'p4d.24xlarge\+p3.16xlarg'.*did you mean 'p3.16xlarge'"):
        load_cluster("p4d.24xlarge+p3.16xlarg")


@pytest.mark.parametrize(
    ("text", "torus", "rings", "nics"),
    [
        ("tpu-v5e:1", (1, 1), (False, False), 1),
        ("tpu-v5e:8", (2, 4), (False, False), 1),
        ("tpu-v5e:256", (16, 16), (True, True), 32),
        ("tpu-v6e:128", (8, 16), (False, True), 16),
        ("tpu-v4:32", (2, 4, 4), (False, True, True), 8),
        ("tpu-v4:64", (4, 4, 4), (True, True, True), 16),
        ("tpu-v4:192", (4, 4, 12), (True, True, True), 48),
        ("tpu-v5p:1024", (8, 8, 16), (True, True, True), 256),
        ("tpu-v5p:8960", (16, 20, 28), (True, True, True), 2240),
        ("tpu-v7x:9216", (16, 24, 24), (True, True, True), 2304),
    ],
)
def test_slices_of_tpus(text, torus, rings, nics):
    (host,) = load_cluster(text).hosts
    assert (host.torus, host.torus_wraps, host.nics) == (torus, rings, nics)
    assert host.devices == int(text.partition(":")[2])


def test_several_slices_are_several_hosts():
    cluster = load_cluster("tpu-v5e:256x4")
    assert cluster.hosts == load_cluster("tpu-v5e:256").hosts * 4
    assert cluster.num_devices == 1024
    assert load_cluster("tpu-v5e") == dataclasses.replace(load_cluster("tpu-v5e:8"), name="tpu-v5e")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("tpu-v5e:100", "64 or 128"),
        ("tpu-v5e:512", "several slices, as in '16x2'"),
        ("tpu-v4:100", "64 or 128"),
        ("tpu-v4:8192", "3968 or 4032 or 4096"),
        ("tpu-v5e:16x", "'tpu-v5e:16x2' for two slices"),
        ("tpu-v5e:x2", "'tpu-v5e:16x2' for two slices"),
        ("p3.16xlarge:2x2", "'p3.16xlarge:2'"),
    ],
)
def test_refuses_slices_that_do_not_exist(text, words):
    with pytest.raises(ClusterError) as caught:
        load_cluster(text)
    assert words in caught.value.try_


@pytest.mark.parametrize("name", preset_names())
def test_every_number_of_a_preset_names_its_source(name):
    """A comment on the line, on the line above, or on the header of a table of numbers from one source."""
    lines = resources.files("meshwright.cluster").joinpath(f"presets/{name}.toml").read_text("utf-8").splitlines()
    header = above = ""
    for line in lines:
        if line.startswith("["):
            header = line
        elif "=" in line and not line.startswith(("#", "name")):
            shared = header if header.startswith("[host.device.peak_flops]") else ""
            assert "#" in line or above.startswith("#") or "#" in shared, line
        above = line


def test_presets_that_share_a_kind_of_device_describe_it_alike():
    by_kind = {}
    for name in preset_names():
        device = load_cluster(name).device
        assert by_kind.setdefault(device.kind, device) == device


def test_presets_that_share_a_kind_of_device_join_it_alike():
    """'local' takes any of them: what is inside a host must not depend on which."""
    by_kind = {}
    for name in preset_names():
        host = load_cluster(name).hosts[0]
        inside = (host.link, host.wires, host.torus)
        assert by_kind.setdefault(host.device.kind, inside) == inside, name


def test_link_latencies_and_bandwidths_are_in_si_units():
    """A slip of a prefix (GB/s for bytes/s, microseconds for seconds) leaves these ranges."""
    for name in preset_names():
        host = load_cluster(name).hosts[0]
        for link in (host.link, host.nic):
            assert 1e8 < link.bandwidth_bytes_per_second < 1e12
            assert 1e-7 < link.latency_seconds < 1e-3
            assert 1e-6 < link.launch_seconds < 1e-3
            assert link.reduction_bandwidth_bytes_per_second < link.bandwidth_bytes_per_second
        assert 1e9 < min(host.device.peak_flops.values()) <= max(host.device.peak_flops.values()) < 1e16
        assert 1e9 < host.device.memory_bytes < 1e12


def test_reads_a_file(tmp_path):
    path = tmp_path / "mine.toml"
    path.write_text(load_cluster("p4d.24xlarge:2").to_toml(), "utf-8")
    assert load_cluster(str(path)) == load_cluster("p4d.24xlarge:2")


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("p3.16xlarg", "did you mean 'p3.16xlarge'"),
        ("", "one of a100-pcie-8, a3-highgpu-8g, "),
        ("../presets/cpu", "one of a100-pcie-8, a3-highgpu-8g, "),
        ("p3.16xlarge:", "'p3.16xlarge:2'"),
        ("p3.16xlarge:0", "'p3.16xlarge:2'"),
        ("p3.16xlarge:-1", "'p3.16xlarge:2'"),
        ("p3.16xlarge:two", "'p3.16xlarge:2'"),
        ("p3.16xlarge:1000000", "from 1 to 999999"),
        ("/no/such/place.toml", "a file that cannot be read"),
    ],
)
def test_refuses_texts_that_name_nothing(text, words):
    with pytest.raises(ClusterError) as caught:
        load_cluster(text)
    assert words in str(caught.value)
    assert repr(text) in str(caught.value)


def test_refuses_a_file_that_is_not_text(tmp_path):
    path = tmp_path / "bytes.toml"
    path.write_bytes(b"\xff\xfe")
    with pytest.raises(ClusterError, match="a file that cannot be read"):
        load_cluster(str(path))


def test_local_is_the_cpu_preset_with_the_devices_jax_sees():
    local, cpu = load_cluster("local"), load_cluster("cpu")
    assert local.num_devices == jax.device_count()
    assert len(local.hosts) == 1
    assert local.device == cpu.device
    assert local.hosts[0].link == cpu.hosts[0].link


def see(monkeypatch, kind, *devices_of_process):
    seen = VisibleDevices(kind=kind, devices_of_process=devices_of_process)
    monkeypatch.setattr(jax_devices, "visible_devices", lambda devices: seen)


def test_local_finds_the_preset_of_a_gpu(monkeypatch):
    see(monkeypatch, "NVIDIA H200", 4)
    local = load_cluster("local")
    assert local.num_devices == 4
    assert local.device == load_cluster("dgx-h200").device


def test_local_takes_each_process_for_a_host(monkeypatch):
    see(monkeypatch, "cpu", 2, 4)
    assert [host.devices for host in load_cluster("local").hosts] == [2, 4]


def test_local_refuses_what_it_cannot_know(monkeypatch):
    see(monkeypatch, "NVIDIA Unheard-of", 8)
    with pytest.raises(ClusterError, match=r"8 devices of kind 'NVIDIA Unheard-of'.*write a TOML file"):
        load_cluster("local")
    see(monkeypatch, "NVIDIA H100 80GB HBM3", 8, 8)
    with pytest.raises(ClusterError, match=r"dgx-h100 or p5\.48xlarge.*try: 'a3-highgpu-8g:2'"):
        load_cluster("local")
    see(monkeypatch, "NVIDIA H100 80GB HBM3", 8)  # one host: the NICs do not matter
    assert load_cluster("local").num_devices == 8


def test_local_takes_all_processes_of_a_tpu_for_one_slice(monkeypatch):
    see(monkeypatch, "TPU v5 lite", 8, 8)
    assert load_cluster("local").hosts == load_cluster("tpu-v5e:16").hosts
    see(monkeypatch, "TPU v5 lite", 7)
    with pytest.raises(ClusterError, match=r"refused cluster 'local': got a slice of 7 chips"):
        load_cluster("local")
