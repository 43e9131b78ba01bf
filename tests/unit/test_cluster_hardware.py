"""Devices, links and hosts refuse numbers that cannot be, and say what was wrong."""

import dataclasses
import math
import pickle

import pytest

from meshwright.cluster import Cluster, ClusterError, Device, Host, Link, load_cluster
from meshwright.cluster.hardware import NO_NIC

DEVICE = Device(
    kind="toy",
    peak_flops={"float32": 10.0, "bfloat16": 40.0},
    memory_bytes=1000.0,
    memory_bandwidth_bytes_per_second=100.0,
    efficiency=0.5,
    kernel_launch_seconds=0.0,
    usable_memory_fraction=0.9,
)
LINK = Link(bandwidth_bytes_per_second=8.0, latency_seconds=1.0)
HOST = Host(device=DEVICE, devices=4, link=LINK, nics=2, nic=LINK)


@pytest.mark.parametrize(
    ("part", "field", "value", "needed"),
    [
        (DEVICE, "kind", "", "a non-empty text"),
        (DEVICE, "memory_bytes", 0, "a finite number > 0"),
        (DEVICE, "memory_bytes", -1.0, "a finite number > 0"),
        (DEVICE, "memory_bytes", math.nan, "a finite number > 0"),
        (DEVICE, "memory_bytes", "16 GB", "a finite number > 0"),
        (DEVICE, "memory_bandwidth_bytes_per_second", math.inf, "a finite number > 0"),
        (DEVICE, "efficiency", 1.01, "a finite number > 0 and <= 1"),
        (DEVICE, "efficiency", 0.0, "a finite number > 0 and <= 1"),
        (DEVICE, "efficiency", True, "a finite number > 0 and <= 1"),
        (DEVICE, "kernel_launch_seconds", -1e-9, "a finite number >= 0"),
        (DEVICE, "vector_flops", float("inf"), "a finite number >= 0"),
        (DEVICE, "usable_memory_fraction", 2, "a finite number > 0 and <= 1"),
        (DEVICE, "peak_flops", {}, "a table of FLOP/s by dtype name, with at least 'float32'"),
        (DEVICE, "peak_flops", {"bfloat16": 1.0}, "a table of FLOP/s by dtype name, with at least 'float32'"),
        (LINK, "bandwidth_bytes_per_second", 0.0, "a finite number > 0"),
        (LINK, "latency_seconds", math.nan, "a finite number >= 0"),
        (LINK, "launch_seconds", None, "a finite number >= 0"),
        (HOST, "devices", 0, "a whole number >= 1"),
        (HOST, "devices", 8.0, "a whole number >= 1"),
        (HOST, "nics", True, "a whole number >= 1"),
        (HOST, "device", "V100", "a Device"),
        (HOST, "nic", 3e9, "a Link"),
    ],
)
def test_refuses(part, field, value, needed):
    with pytest.raises(ClusterError) as caught:
        dataclasses.replace(part, **{field: value})
    error = caught.value
    assert error.needed == needed
    assert error.where == f"{type(part).__name__}.{field}"
    assert repr(value) in error.got
    for words in ("refused", "got", "needed", "where", "try"):
        assert words in str(error)


def test_refuses_a_peak_that_is_no_rate():
    with pytest.raises(ClusterError, match=r"Device\.peak_flops\.bfloat16.*in FLOP/s"):
        dataclasses.replace(DEVICE, peak_flops={"float32": 1.0, "bfloat16": -4.0})


def test_device_rates_and_memory():
    assert DEVICE.achievable_flops("bfloat16") == 20.0
    assert DEVICE.achievable_flops("int8") == DEVICE.achievable_flops("float8_e5m2") == 20.0
    assert DEVICE.achievable_flops("float64") == DEVICE.achievable_flops("float32") == 5.0
    assert DEVICE.usable_memory_bytes == 900.0
    assert HOST.nic_bandwidth_bytes_per_second == 16.0


def test_a_device_does_not_follow_the_mapping_it_was_given():
    peaks = {"float32": 1.0}
    device = dataclasses.replace(DEVICE, peak_flops=peaks)
    peaks["float32"] = 2.0
    assert device.peak_flops == {"float32": 1.0}


def test_equal_clusters_are_equal_hash_equal_and_survive_pickling():
    cluster = Cluster(name="pair", hosts=(HOST, HOST))
    again = pickle.loads(pickle.dumps(cluster))
    assert again == cluster
    assert hash(again) == hash(cluster)
    assert again.fingerprint() == cluster.fingerprint()


def test_cluster_refuses_no_hosts_and_impossible_fabrics():
    with pytest.raises(ClusterError, match="got 0 hosts"):
        Cluster(name="none", hosts=())
    with pytest.raises(ClusterError, match=r"whole number >= 1; where: Cluster\.fabric_hosts_per_leaf"):
        Cluster(name="flat", hosts=(HOST,), fabric_hosts_per_leaf=0)
    with pytest.raises(ClusterError, match=r"needed a finite number >= 1; where: Cluster\.fabric_oversubscription"):
        Cluster(name="wide", hosts=(HOST,), fabric_oversubscription=0.5)
    with pytest.raises(ClusterError, match="needed a Host"):
        Cluster(name="odd", hosts=(DEVICE,))


def test_cluster_refuses_hosts_that_cannot_reach_each_other():
    alone = Host(device=DEVICE, devices=2, link=HOST.link, nics=0)
    assert Cluster(name="one", hosts=(alone,)).num_devices == 2
    with pytest.raises(ClusterError, match=r"2 hosts, of which host 1 has no NIC; needed a way between all hosts"):
        Cluster(name="two", hosts=(HOST, alone))
    chip = dataclasses.replace(HOST, device=dataclasses.replace(DEVICE, kind="TPU v4"))
    with pytest.raises(ClusterError, match=r"platforms gpu and tpu; needed one platform"):
        Cluster(name="odd", hosts=(HOST, chip))


def test_a_host_has_nics_that_are_described_or_none():
    for nics, nic in ((1, NO_NIC), (0, HOST.nic)):
        with pytest.raises(ClusterError, match="a description of the NICs if there are any"):
            dataclasses.replace(HOST, nics=nics, nic=nic)
    for nics in (-1, False, 1.0):
        with pytest.raises(ClusterError, match="a whole number >= 1"):
            dataclasses.replace(HOST, nics=nics)
    assert dataclasses.replace(HOST, nics=0, nic=NO_NIC).nic_bandwidth_bytes_per_second == 0.0


def test_a_mixed_cluster_has_the_least_of_each():
    cluster = load_cluster("p4d.24xlarge:2+p3.16xlarge")
    a100, v100 = load_cluster("p4d.24xlarge").device, load_cluster("p3.16xlarge").device
    assert cluster.devices_of_kind == {a100.kind: 16, v100.kind: 8}
    assert (cluster.device_at(15), cluster.device_at(16)) == (a100, v100)
    device = cluster.device
    assert device.kind == f"{a100.kind} or {v100.kind}"
    assert device.platform == "gpu"
    for dtype in ("float32", "float16", "bfloat16", "int8"):
        least = min(a100.achievable_flops(dtype), v100.achievable_flops(dtype))
        assert device.achievable_flops(dtype) == pytest.approx(least)
    assert device.usable_memory_bytes == pytest.approx(v100.usable_memory_bytes)
    assert device.memory_bandwidth_bytes_per_second == v100.memory_bandwidth_bytes_per_second
    assert device.kernel_launch_seconds == v100.kernel_launch_seconds
    limited = cluster.with_memory_limit(20e9)
    assert [limited.device_at(i).usable_memory_bytes for i in (0, 16)] == [20e9, v100.usable_memory_bytes]


def test_fingerprint_is_of_the_hardware_alone():
    cluster = Cluster(name="a", hosts=(HOST, HOST))
    assert cluster.fingerprint() == "d7ad74168c5e9235"  # the same in every process and release
    assert dataclasses.replace(cluster, name="b").fingerprint() == cluster.fingerprint()
    whole = dataclasses.replace(HOST, device=dataclasses.replace(DEVICE, memory_bytes=1000))
    assert Cluster(name="a", hosts=(whole, whole)).fingerprint() == cluster.fingerprint()
    assert cluster.with_memory_limit(10.0).fingerprint() == cluster.fingerprint()  # a plan's times hold
    for changed in (
        dataclasses.replace(cluster, hosts=(HOST,)),
        dataclasses.replace(cluster, fabric_oversubscription=2.0),
        Cluster(name="a", hosts=(dataclasses.replace(HOST, device=dataclasses.replace(DEVICE, vector_flops=1e9)),) * 2),
        dataclasses.replace(cluster, hosts=(HOST, dataclasses.replace(HOST, nics=1))),
    ):
        assert changed.fingerprint() != cluster.fingerprint()


def test_memory_limit_lowers_what_is_usable_and_never_raises_it():
    cluster = Cluster(name="a", hosts=(HOST, HOST))
    assert cluster.with_memory_limit(333).device.usable_memory_bytes == 333.0
    assert cluster.with_memory_limit(1e9).device.usable_memory_bytes == DEVICE.usable_memory_bytes
    with pytest.raises(ClusterError, match="needed a finite number > 0"):
        cluster.with_memory_limit(0)
