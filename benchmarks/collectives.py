"""Predicted seconds of collectives beside published measurements.

    python benchmarks/collectives.py [--rows FILE.csv] [--from-bytes 1048576] [--json]
    python benchmarks/collectives.py --fit

Prints one JSON object (`--json`) or tables: what was run, with which versions, one entry per row, and the median and
mean absolute error per source (`item`) and overall, over messages of at least `--from-bytes`. `--fit` fits the
constants that presets mark [fit] again, and says what each source's error is when it is left out of the fit.

The file's columns: `item`, `parameter`, `value`, `unit`, `source` as published; then what that is here: `cluster` and
`host_devices` (devices of each host that take part, if not all), `shape` and `axes` of the logical mesh, `kind`,
`size_bytes`, `curve` (whether it is a point of one), `in_switch` (whether switches may sum), and `not_expressed`, the
reason where no preset is that machine.
"""

from __future__ import annotations

import argparse
import csv
import dataclasses
import json
import platform
import shlex
import sys
from dataclasses import dataclass
from functools import cache
from math import prod
from pathlib import Path
from typing import Any

import numpy as np
import scipy
from scipy.optimize import minimize

import meshwright
from meshwright.cluster import Cluster, Link, LogicalMesh, load_cluster
from meshwright.cost.collective import collective_algorithm, collective_seconds

ROWS = Path(__file__).parents[1] / "tests" / "data" / "collective_curves.csv"
_UNITS = {"us": 1e-6, "ms": 1e-3}


@dataclass(frozen=True, slots=True, kw_only=True)
class Row:
    """One published number. `curve`: whether it is a point of a curve over message sizes."""

    curve: bool
    item: str
    parameter: str
    cluster: str
    host_devices: int | None
    shape: tuple[int, ...]
    axes: tuple[str, ...]
    kind: str
    size_bytes: float
    in_switch: bool
    measured_seconds: float


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    row: Row
    predicted_seconds: float
    algorithm: str

    @property
    def error(self) -> float:
        return self.predicted_seconds / self.row.measured_seconds - 1


def read_rows(path: Path) -> tuple[list[Row], list[tuple[str, str, str]]]:
    """The rows of a file, and (item, parameter, reason) of those that cannot be expressed."""
    rows, others = [], []
    with path.open(encoding="utf-8", newline="") as file:
        for line in csv.DictReader(file):
            if line["not_expressed"]:
                others.append((line["item"], line["parameter"], line["not_expressed"]))
                continue
            shape = tuple(int(size) for size in line["shape"].split(","))
            axes = tuple(line["axes"].split(","))
            size = float(line["size_bytes"])
            devices = prod(length for name, length in zip("xyz", shape, strict=False) if name in axes)
            if line["unit"] in _UNITS:
                seconds = float(line["value"]) * _UNITS[line["unit"]]
            else:  # GB/s of bus bandwidth, as nccl-tests defines it
                moved = (2 if line["kind"] == "all_reduce" else 1) * (devices - 1) / devices * size
                seconds = moved / (float(line["value"]) * 1e9)
            rows.append(
                Row(
                    item=line["item"], parameter=line["parameter"], curve=line["curve"] == "yes",
                    cluster=line["cluster"],
                    host_devices=int(line["host_devices"]) if line["host_devices"] else None, shape=shape, axes=axes,
                    kind=line["kind"], size_bytes=size, in_switch=line["in_switch"] == "yes",
                    measured_seconds=seconds,
                )
            )  # fmt: skip
    return rows, others


@cache
def mesh_of(cluster: str, host_devices: int | None, in_switch: bool, shape: tuple[int, ...]) -> LogicalMesh:
    return _mesh(load_cluster(cluster), host_devices, in_switch, shape)


def _mesh(found: Cluster, host_devices: int | None, in_switch: bool, shape: tuple[int, ...]) -> LogicalMesh:
    def changed(host: Any) -> Any:
        if host_devices is not None:
            host = dataclasses.replace(host, devices=host_devices)
        if not in_switch:
            link = dataclasses.replace(host.link, reduction_bandwidth_bytes_per_second=0.0)
            host = dataclasses.replace(host, link=link)
        return host

    return dataclasses.replace(found, hosts=tuple(changed(host) for host in found.hosts)).logical_mesh(shape)


def predict(row: Row) -> Prediction:
    """What the presets and the model say of a row."""
    mesh = mesh_of(row.cluster, row.host_devices, row.in_switch, row.shape)
    axes = [mesh.axis(name) for name in row.axes]
    return Prediction(
        row=row, predicted_seconds=collective_seconds(row.kind, row.size_bytes, axes),
        algorithm=collective_algorithm(row.kind, row.size_bytes, axes),
    )  # fmt: skip


def summary(predictions: list[Prediction], from_bytes: float) -> dict[str, dict[str, float]]:
    """Errors per item, and overall, of messages of at least `from_bytes`."""
    by_item: dict[str, list[float]] = {}
    for one in predictions:
        if one.row.size_bytes >= from_bytes:
            # The points of one curve are one source, and so are all single numbers of large messages.
            by_item.setdefault(one.row.item if one.row.curve else "large messages", []).append(one.error)
    by_item["overall"] = [error for errors in by_item.values() for error in errors]
    return {
        name: {
            "rows": len(errors),
            "median_absolute_error": float(np.median(np.abs(errors))),
            "mean_absolute_error": float(np.mean(np.abs(errors))),
            "largest_absolute_error": float(np.max(np.abs(errors))),
        }
        for name, errors in by_item.items()
    }


# Fitting -------------------------------------------------------------------------------------------------------------

# The constants that presets mark [fit]: which link, which field, and on which clusters.
_NVLINK = ("dgx-h200", "p6-b200.48xlarge", "p6-b200.48xlarge:4", "p4de.24xlarge:2", "p5.48xlarge:2", "dgx-a100-80")
_CONSTANTS = (
    ("NVLink launch_seconds", "link", "launch_seconds", _NVLINK),
    ("chunk_steps", "both", "chunk_steps", _NVLINK),
    ("EFA v1 latency_seconds", "nic", "latency_seconds", ("p4de.24xlarge:2",)),
    ("EFA v1 launch_seconds", "nic", "launch_seconds", ("p4de.24xlarge:2",)),
    ("EFA v2 latency_seconds", "nic", "latency_seconds", ("p5.48xlarge:2",)),
    ("EFA v2 launch_seconds", "nic", "launch_seconds", ("p5.48xlarge:2",)),
    ("EFA v4 launch_seconds", "nic", "launch_seconds", ("p6-b200.48xlarge:4",)),
)


# What a NIC without a curve of its own gets: a step as in NCCL's table (tree, LL128), a launch as inside a host.
_UNMEASURED_LATENCY_SECONDS = 8.5e-6


def fit(rows: list[Row]) -> dict[str, float]:
    """The constants with the least mean absolute logarithm of predicted over measured.

    What no row tells anything about is what a NIC without measurements gets.
    """
    clusters = {row.cluster: load_cluster(row.cluster) for row in rows}
    told = [any(name in clusters for name in place[3]) for place in _CONSTANTS]

    def start_of(place: tuple[str, str, str, tuple[str, ...]]) -> float:
        host = load_cluster(place[3][-1]).hosts[0]
        return getattr(host.nic if place[1] == "nic" else host.link, place[2])

    start = [start_of(place) for place in _CONSTANTS]

    def values_of(scales: np.ndarray) -> np.ndarray:
        values = np.array(start)
        values[told] *= np.exp(scales)
        for number, (place, known) in enumerate(zip(_CONSTANTS, told, strict=True)):
            if not known:
                values[number] = values[0] if place[2] == "launch_seconds" else _UNMEASURED_LATENCY_SECONDS
        return values

    def loss(scales: np.ndarray) -> float:
        values = values_of(scales)
        meshes: dict[tuple[Any, ...], LogicalMesh] = {}
        errors = []
        for row in rows:
            key = row.cluster, row.host_devices, row.in_switch, row.shape
            if key not in meshes:
                meshes[key] = _mesh(_with(clusters[row.cluster], row.cluster, values), *key[1:])
            axes = [meshes[key].axis(name) for name in row.axes]
            errors.append(np.log(collective_seconds(row.kind, row.size_bytes, axes) / row.measured_seconds))
        return float(np.mean(np.abs(errors)))

    options = {"maxiter": 300, "adaptive": True, "xatol": 1e-2, "fatol": 1e-5}
    best = values_of(minimize(loss, np.zeros(sum(told)), method="Nelder-Mead", options=options).x)
    return {place[0]: float(value) for place, value in zip(_CONSTANTS, best, strict=True)}


def _with(cluster: Cluster, name: str, values: np.ndarray) -> Cluster:
    host = cluster.hosts[0]
    for (_, where, field, names), value in zip(_CONSTANTS, values, strict=True):
        if name in names:
            for part in ("link", "nic") if where == "both" else (where,):
                link: Link = dataclasses.replace(getattr(host, part), **{field: float(value)})
                host = dataclasses.replace(host, **{part: link})
    return dataclasses.replace(cluster, hosts=(host,) * len(cluster.hosts))


def fit_report(rows: list[Row]) -> dict[str, Any]:
    """All rows fitted, and for each curve the error of the fit that has not seen it."""
    curves = [row for row in rows if row.size_bytes >= 1 << 20 and row.curve]
    found: dict[str, Any] = {"fitted": fit(curves), "left_out": {}}
    for item in sorted({row.item for row in curves}):
        values = fit([row for row in curves if row.item != item])
        names = [place[0] for place in _CONSTANTS]
        errors = []
        for row in (row for row in curves if row.item == item):
            cluster = _with(load_cluster(row.cluster), row.cluster, np.array([values[name] for name in names]))
            mesh = _mesh(cluster, row.host_devices, row.in_switch, row.shape)
            seconds = collective_seconds(row.kind, row.size_bytes, [mesh.axis(name) for name in row.axes])
            errors.append(abs(seconds / row.measured_seconds - 1))
        found["left_out"][item] = float(np.median(errors))
    return found


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=Path, default=ROWS)
    parser.add_argument("--from-bytes", type=float, default=float(1 << 20))
    parser.add_argument("--json", action="store_true")
    parser.add_argument("--fit", action="store_true")
    given = parser.parse_args()
    rows, others = read_rows(given.rows)
    if given.fit:
        print(json.dumps(fit_report(rows), indent=1))
        return
    predictions = [predict(row) for row in rows]
    errors = summary(predictions, given.from_bytes)
    if given.json:
        print(json.dumps({
            "command": shlex.join(sys.argv), "meshwright": meshwright.__version__, "numpy": np.__version__,
            "scipy": scipy.__version__, "python": platform.python_version(), "machine": platform.platform(),
            "from_bytes": given.from_bytes,
            "rows": [
                {
                    "item": one.row.item, "parameter": one.row.parameter, "cluster": one.row.cluster,
                    "shape": one.row.shape, "axes": one.row.axes, "kind": one.row.kind,
                    "size_bytes": one.row.size_bytes, "measured_seconds": one.row.measured_seconds,
                    "predicted_seconds": one.predicted_seconds, "algorithm": one.algorithm, "error": one.error,
                }
                for one in predictions
            ],
            "not_expressed": [{"item": i, "parameter": p, "reason": why} for i, p, why in others],
            "errors": errors,
        }, indent=1))  # fmt: skip
        return
    for one in predictions:
        row, microseconds = one.row, (one.row.measured_seconds * 1e6, one.predicted_seconds * 1e6)
        print(f"{row.item[:34]:34} {row.kind:14} {row.size_bytes:14.0f} B {microseconds[0]:10.0f} us measured", end=" ")
        print(f"{microseconds[1]:10.0f} us predicted {100 * one.error:+6.0f} % {one.algorithm}")
    print()
    for item, parameter, why in others:
        print(f"not expressed: {item}, {parameter}: {why}")
    print()
    print(f"absolute error for messages of at least {given.from_bytes:.0f} bytes:")
    for name, error in errors.items():
        parts = (f"{part} {100 * error[f'{part}_absolute_error']:.1f} %" for part in ("median", "mean", "largest"))
        print(f"{name:34} {error['rows']:4} rows: {', '.join(parts)}")


if __name__ == "__main__":
    main()
