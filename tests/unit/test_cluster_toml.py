"""Clusters written as TOML come back equal; documents with a mistake are refused with file, key and a way out."""

import dataclasses

import pytest

from meshwright.cluster import Cluster, ClusterError, Host, load_cluster, preset_names
from meshwright.cluster.toml_format import cluster_from_toml

GOOD = """\
name = "pair"
fabric_oversubscription = 2

[[host]]
count = 2
devices = 4
nics = 1
[host.device]
kind = "toy"
memory_bytes = 1000
memory_bandwidth_bytes_per_second = 1e3
efficiency = 0.5
kernel_launch_seconds = 0
usable_memory_fraction = 1.0
[host.device.peak_flops]
float32 = 1e6
[host.link]
bandwidth_bytes_per_second = 100.0
latency_seconds = 1e-6
[host.nic]
bandwidth_bytes_per_second = 10.0
latency_seconds = 1e-5
launch_seconds = 1e-4
"""


def test_reads_what_is_written():
    cluster = cluster_from_toml(GOOD, source="pair.toml")
    assert (cluster.name, cluster.num_devices, len(cluster.hosts)) == ("pair", 8, 2)
    assert cluster.fabric_oversubscription == 2
    assert cluster.hosts[0].nic.launch_seconds == 1e-4
    assert cluster.hosts[1].link.launch_seconds == 0.0


SLICES = ["tpu-v5e:256x2", "tpu-v5p:512", "tpu-v5e:4"]
MIXED = ["p4d.24xlarge:2+p3.16xlarge:2", "cpu+cpu:2"]


@pytest.mark.parametrize("text", [*preset_names(), "dgx-h100:3", *SLICES, *MIXED])
def test_presets_survive_a_round_trip(text):
    cluster = load_cluster(text)
    again = cluster_from_toml(cluster.to_toml(), source="text")
    assert again == cluster
    assert again.fingerprint() == cluster.fingerprint()


def test_a_host_without_nics_is_written_without_them():
    lone = Host(device=load_cluster("cpu").device, devices=3, link=load_cluster("cpu").hosts[0].link, nics=0)
    wired = dataclasses.replace(lone, wires=((0, 1, 2), (1, 2, 1)))
    for host in (lone, wired):
        cluster = Cluster(name="lone", hosts=(host,), fabric_hosts_per_leaf=4)
        assert "[host.nic]" not in cluster.to_toml()
        assert cluster_from_toml(cluster.to_toml(), source="text") == cluster


def test_a_round_trip_keeps_odd_names_odd_dtypes_and_different_hosts():
    host = load_cluster("p3.16xlarge").hosts[0]
    device = dataclasses.replace(
        host.device, kind='a "quoted"\n\x7f\\ kind é 🚀', peak_flops={"float32": 1.5, "odd.t": 2}
    )
    host = dataclasses.replace(host, device=device)
    cluster = Cluster(name="tab\tname", hosts=(host, dataclasses.replace(host, devices=2), host, host))
    assert cluster_from_toml(cluster.to_toml(), source="text") == cluster


@pytest.mark.parametrize(
    ("old", "new", "place", "needed", "try_"),
    [
        ("devices = 4", "device_count = 4", "[[host]] 1, key 'device_count'", "a known key", "'devices'?"),
        ("latency_seconds = 1e-6", "latency_second = 1", "[host.link]", "a known key", "'latency_seconds'"),
        ('name = "pair"', 'nam = "pair"', "pair.toml, key 'nam'", "a known key", "'name'"),
        ('name = "pair"\n', "", "pair.toml, key 'name'", "the key 'name'", "add name = ..."),
        ("efficiency = 0.5\n", "", "[host.device], key 'efficiency'", "the key 'efficiency'", "add efficiency = ..."),
        ("efficiency = 0.5", "efficiency = 1.5", "Device.efficiency", "> 0 and <= 1", "a plain number"),
        ("efficiency = 0.5", "efficiency = nan", "Device.efficiency", "> 0 and <= 1", "a plain number"),
        ("memory_bytes = 1000", 'memory_bytes = "1 kB"', "Device.memory_bytes", "a finite number > 0", "in bytes"),
        ("memory_bytes = 1000", "memory_bytes = -1", "Device.memory_bytes", "a finite number > 0", "in bytes"),
        ("float32 = 1e6", "float32 = 0", "[host.device], Device.peak_flops.float32", "> 0", "in FLOP/s"),
        ("float32 = 1e6", "bfloat16 = 1e6", "[host.device], Device.peak_flops", "at least 'float32'", "float32 ="),
        (
            "bandwidth_bytes_per_second = 10.0",
            "bandwidth_bytes_per_second = 0",
            "[host.nic], Link.",
            "> 0",
            "bytes per",
        ),
        ("count = 2", "count = 0", "[[host]] 1, Host.count", "a whole number >= 1", "integer"),
        ("count = 2", "count = 1000000000", "[[host]] 1, Host.count", "and <= 100000", "integer"),
        ("devices = 4", "devices = 10000000000000", "[[host]] 1, Host.devices", "and <= 100000", "integer"),
        ("memory_bytes = 1000", "memory_bytes = 1" + 400 * "0", "Device.memory_bytes", "a finite number", "in bytes"),
        ("memory_bytes = 1000", "memory_bytes = 1" + 5000 * "0", "pair.toml", "a TOML document", "to_toml"),
        ("nics = 1", "nics = 1\nwires = " + 5000 * "[", "pair.toml", "a TOML document", "to_toml"),
        ("devices = 4", "devices = 4.0", "[[host]] 1, Host.devices", "a whole number >= 1", "integer"),
        ("_oversubscription = 2", "_oversubscription = 0.5", "Cluster.fabric_oversubscription", ">= 1", "number"),
        (
            "latency_seconds = 1e-6",
            "latency_seconds = 1e-6\nexchange_efficiency = 1.2",
            "[host.link], Link.exchange_efficiency",
            "> 0 and <= 1",
            "a ratio",
        ),
        ("latency_seconds = 1e-5", "latency_seconds = -1e-5", "[host.nic], Link.latency_seconds", ">= 0", "in seconds"),
        ("nics = 1", "nics = 0", "[[host]] 1, Host.nic", "a description of the NICs", "without [host.nic]"),
        ("nics = 1", "nics = 1\ntorus_wrap = [true]", "key 'torus_wrap'", "a known key", "'torus_wraps'"),
        ("nics = 1", "nics = 1\ntorus = [2]", "[[host]] 1, Host.torus_wraps", "1 times true or false", "[false]"),
        ("nics = 1", "nics = 1\nwires = [[0, 1, 1]]", "[[host]] 1, Host.wires", "a way between all", "device 2"),
        ("nics = 1", "nics = 1\nwires = 3", "[[host]] 1, Host.wires", "a list", "wires = []"),
        ("fabric_oversub", "fabric_oversup", "pair.toml, key 'fabric_oversupscription'", "a known", "fabric_oversubsc"),
        ("[[host]]", "[host]", "pair.toml, key 'host'", "one or more [[host]] tables", "[[host]]"),
        ("[host.link]\nband", "[host]\nlink = 3\nx.band", "pair.toml", "a TOML document", "to_toml"),
        ("nics = 1", "nics = 1\nlink = 3", "pair.toml", "a TOML document", "to_toml"),
    ],
)
def test_refuses_with_the_place_and_a_way_out(old, new, place, needed, try_):
    assert GOOD.count(old) == 1
    with pytest.raises(ClusterError) as caught:
        cluster_from_toml(GOOD.replace(old, new), source="pair.toml")
    error = caught.value
    assert error.where.startswith("pair.toml")
    assert place in error.where
    assert needed in error.needed
    assert try_ in error.try_


@pytest.mark.parametrize(
    ("text", "needed"),
    [
        ("", "the key 'name'"),
        ('name = "x"', "the key 'host'"),
        ('name = "x"\nhost = []', "at least one host"),
        ('name = "x"\nhost = [1]', "a table"),
        ('name = "x"\n[[host]]\ndevices = 1\nnics = 1\ndevice = 1\nlink = 1\nnic = 1', "a table"),
    ],
)
def test_refuses_documents_that_describe_no_cluster(text, needed):
    with pytest.raises(ClusterError) as caught:
        cluster_from_toml(text, source="bad.toml")
    assert needed in caught.value.needed
