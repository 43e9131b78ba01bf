"""Machines of published measurements as clusters of ours (`benchmarks/published.py`).

Presets, by the kind of device that a row names, with the devices and NICs of a host that it says. A device has one
efficiency profile however it is spelled (`device_kind`).
"""

from __future__ import annotations

import re
from dataclasses import replace

from published_cells import Inexpressible, Row, number

from meshwright.cluster import Cluster, ClusterError, Device, Host, load_cluster

# Devices as the tables write them.
_PRESETS = {
    "V100-SXM2-16GB": "p3.16xlarge",
    "V100-SXM3-32GB": "dgx-2",
    "A100-SXM-40GB": "dgx-a100-40",
    "A100-SXM-80GB": "dgx-a100-80",
    "A800-80GB": "dgx-a100-80",
    "H100-SXM-80GB": "dgx-h100",
    "H100-SXM-96GB-HBM2e-500W": "grand-teton",
    "TPUv5e": "tpu-v5e",
    "P40-24GB": "p40-8",
}

# Devices that are written otherwise, the first that is found in the name. Cards for PCIe are other chips than those
# with NVLink, but for A100's of 40 GB and older ones.
_KINDS = (
    (r"H[18]00.*PCIe", "h100-pcie-8"), (r"A[18]00.*PCIe(?!.*40)", "a100-pcie-8"), (r"L40S", "l40s-8"),
    (r"V100.*16", "p3.16xlarge"), (r"V100.*SXM3", "dgx-2"), (r"V100", "p3dn.24xlarge"), (r"A100.*40", "dgx-a100-40"),
    (r"A[18]00(?!\d)", "dgx-a100-80"), (r"GB300", "gb300-nvl72"), (r"B300", "dgx-b300"), (r"GB200", "gb200-nvl72"),
    (r"B200", "dgx-b200"), (r"GH200", "gh200-4"), (r"H200", "dgx-h200"), (r"H[18]00(?!\d)", "dgx-h100"),
    (r"MI300(?!A)", "mi300x-8"), (r"MI325", "mi325x-8"), (r"MI355", "mi355x-8"), (r"4090", "rtx4090-4"),
    (r"P40(?!\d)", "p40-8"), (r"TPU.?v4", "tpu-v4"), (r"TPU.?v5p", "tpu-v5p"), (r"TPU.?v5", "tpu-v5e"),
    (r"TPU.?v6|Trillium", "tpu-v6e"), (r"TPU.?v?7|Ironwood", "tpu-v7x"),
)  # fmt: skip

# Racks in one NVLink domain, of which rows count the devices of a board.
_RACKS = ("gb200-nvl72", "gb300-nvl72")

# Chips of the largest slice of each; what is larger is several, over the data-center network.
_POD = {"tpu-v4": 4096, "tpu-v5e": 256, "tpu-v5p": 8960, "tpu-v6e": 256, "tpu-v7x": 9216}


def _is_card(row: Row) -> bool:
    return re.search(r"PCIe", row["accelerator"], re.IGNORECASE) is not None


def _preset(row: Row) -> str:
    """Of a row's devices.

    Raises:
      Inexpressible: if none has them.
    """
    kind = row["accelerator"]
    like = next((preset for pattern, preset in _KINDS if re.search(pattern, kind, re.IGNORECASE)), None)
    preset = _PRESETS.get(kind) or like
    if preset is None or (_is_card(row) and re.search(r"[HB][23]00", kind, re.IGNORECASE)):
        raise Inexpressible(f"accelerator {kind!r} is not known")
    return preset


def device_kind(row: Row) -> str:
    """A row's devices as the tables write them where they have them, else as the row does."""
    kind, preset = row["accelerator"], _preset(row)
    if kind in _PRESETS or _is_card(row):
        return kind
    return next((known for known, of in _PRESETS.items() if of == preset), kind)


def device_of(kind: str) -> Device:
    """The device that the tables call so."""
    return load_cluster(_preset({"accelerator": kind})).device


def _chips(row: Row, preset: str) -> int:
    """Chips of one slice of a row's TPUs: as it says of slices or of replicas over the data-center network, or all of
    them, or as few slices as there can be."""
    devices = number(row, "n_devices") or 1
    text = f"{row.get('interconnect') or ''} {row.get('shard') or ''}"
    told = re.search(r"\bv\d\w?-(\d{1,5})\b", text)
    slices = re.search(r"\bdcn (\d{1,3})\b|\b(\d{1,3}) replicas over DCN|\b(\d{1,3}) slices\b", text, re.IGNORECASE)
    # Names of slices of v4 and v5p count cores, of which a chip has two.
    cores = 2 if preset in ("tpu-v4", "tpu-v5p") else 1
    many = int(next(filter(None, slices.groups()))) if slices else -(-devices // _POD[preset])
    chips = max(1, int(told[1]) // cores) if told else max(1, devices // max(1, many))
    if devices % chips:
        raise Inexpressible(f"{devices} devices are no whole number of slices of {chips} chips")
    return chips


def _nics(row: Row) -> tuple[int, float] | None:
    """NICs of a host and the rate of one in bytes/s, where the row's text tells."""
    text = row.get("interconnect") or ""
    many = re.search(r"(?<!\d)([1-9]\d{0,3})\s*x\s*([1-9]\d{0,4})\s*Gb/s", text)
    if many:
        return int(many[1]), float(many[2]) / 8 * 1e9
    whole = re.search(r"(?<!\d)([1-9]\d{0,5})\s*Gb/s per node", text)
    if whole:
        count = max(1, int(whole[1]) // (400 if "H100" in row["accelerator"] else 200))
        return count, float(whole[1]) / count / 8 * 1e9
    hdr = re.search(r"(?<!\d)([1-9]\d{0,3})x HDR", text)
    return (int(hdr[1]), 25e9) if hdr else None


def cluster_of(row: Row) -> Cluster:
    """The preset of a row's machines, with the NICs that the row says: of which a collective reaches 96 %.

    Raises:
      Inexpressible: if there are no such machines.
    """
    preset = _preset(row)
    try:
        cluster = load_cluster(f"{preset}:{_chips(row, preset)}" if preset in _POD else preset)
    except ClusterError as error:
        raise Inexpressible(f"accelerator {row['accelerator']!r}: {error}") from error
    devices, per_node = number(row, "n_devices") or 1, number(row, "devices_per_node")
    if per_node and devices > per_node and devices % per_node:
        raise Inexpressible(f"{devices} devices are no whole number of hosts of {per_node}")
    host = cluster.hosts[0]
    if _is_card(row) and not preset.endswith("-pcie-8"):
        host = replace(host, link=load_cluster("rtx4090-4").hosts[0].link, wires=())
    if preset not in _POD:
        host = _with_nics(host if preset in _RACKS else _with_devices(host, per_node, preset), row)
    return replace(cluster, hosts=(host,))


def _with_devices(host: Host, many: int | None, preset: str) -> Host:
    if many in (None, host.devices):
        return host
    if many > host.devices:
        raise Inexpressible(f"{many} devices a host: those of {preset} have {host.devices}")
    return replace(host, devices=many, nics=max(1, host.nics * many // host.devices))


def _with_nics(host: Host, row: Row) -> Host:
    told = _nics(row)
    if told is None:
        return host
    nic = replace(host.nic, bandwidth_bytes_per_second=0.96 * told[1])
    return replace(host, nics=told[0], nic=nic)
