"""Calibration: the devices at hand measured, a cluster fitted to them, and what the fit is worth, in one object."""

from __future__ import annotations

import statistics
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

from ..cluster import Cluster, MeasuredOn, load_cluster
from ..errors import PlanError
from .case import Product, case_document
from .cases import cases_of
from .fit import Fitted, fit
from .measure import Measurement, measure
from .origin import origin_of

SECONDS = 60.0
QUICK_SECONDS = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class Calibration:
    """What was measured, and the cluster that explains it best.

    Args:
      fitted: the cluster, with each measurement and what is predicted of it.
    """

    fitted: Fitted

    @property
    def cluster(self) -> Cluster:
        """To plan for."""
        return self.fitted.cluster

    @property
    def origin(self) -> MeasuredOn:
        """The devices it was made on."""
        assert self.cluster.measured_on is not None
        return self.cluster.measured_on

    @property
    def measured_dtypes(self) -> tuple[str, ...]:
        """Of the products that were timed."""
        return tuple(sorted({m.case.dtype for m in self.fitted.measured if isinstance(m.case, Product)}))

    def to_toml(self) -> str:
        """The cluster as `load_cluster` reads it."""
        return self.cluster.to_toml()

    def save(self, path: str | Path) -> None:
        """Write the cluster to a file that ends in .toml.

        Raises:
          PlanError: if it cannot be written.
        """
        try:
            Path(path).write_text(self.to_toml(), "utf-8")
        except OSError as error:
            raise PlanError(
                refused="to write the calibration", got=f"{type(error).__name__}: {error.strerror}",
                needed="a file to write", where=str(path), try_="another path",
            ) from error  # fmt: skip

    def median_errors(self) -> dict[str, float]:
        """The median absolute error of each kind of case under the fitted constants."""
        found: dict[str, list[float]] = {}
        for one, error in zip(self.fitted.measured, self.fitted.errors, strict=True):
            found.setdefault(str(case_document(one.case)["kind"]), []).append(abs(error))
        return {kind: statistics.median(errors) for kind, errors in found.items()}


def check_out(path: str | Path) -> None:
    """Refuse, before a minute is spent measuring, a path that a calibration cannot be written to.

    Raises:
      PlanError: if it does not end in .toml, or its folder is not there.
    """
    path = Path(path)
    if path.suffix != ".toml" or not path.parent.is_dir() or path.is_dir():
        raise PlanError(
            refused="to write the calibration", got=f"{path}",
            needed="a file that ends in .toml, in a folder that exists", where="--out", try_="--out cluster.toml",
        )  # fmt: skip


def calibrate(
    *,
    quick: bool = False,
    time_limit_seconds: float | None = None,
    devices: Sequence[Any] | None = None,
    tell: Callable[[str, float], None] = lambda text, share: None,
) -> Calibration:
    """Measure the local devices and fit a cluster to them.

    Args:
      quick: fewer cases in less time.
      time_limit_seconds: about how long to measure; a minute, or a quarter of one for `quick`, if not given.
      devices: the `jax.Device`s to measure, in order; all that there are if not given.
      tell: called with a few words and the share of the work that is done.

    Raises:
      ClusterError: if no preset describes such devices, whose memory and shape cannot be measured.
      PlanError: if the devices are not all of this process.
    """
    import jax

    here = list(jax.devices() if devices is None else devices)
    if jax.process_count() > 1:
        raise PlanError(
            refused="to calibrate", got=f"{jax.process_count()} processes", needed="one process that has all devices",
            where="calibrate", try_="calibrating one host alone, and adding its NICs to the file by hand",
        )  # fmt: skip
    cluster = load_cluster("local")
    if len(here) != cluster.num_devices:
        cluster = replace(cluster, hosts=(replace(cluster.hosts[0], devices=len(here)),))
    limit = time_limit_seconds if time_limit_seconds is not None else QUICK_SECONDS if quick else SECONDS
    tell("starting", 0.0)
    measured = measure(cases_of(cluster, quick=quick), here, time_limit_seconds=limit, tell=tell)
    tell("fitting", 1.0)
    named = replace(cluster, name=f"{len(here)} x {cluster.device.kind}, measured", measured_on=origin_of(here))
    return Calibration(fitted=fit(named, measured))


def calibration_document(calibration: Calibration) -> dict[str, Any]:
    """What `meshwright calibrate --json` prints."""
    fitted, device, host = calibration.fitted, calibration.cluster.device, calibration.cluster.hosts[0]
    rows = zip(fitted.measured, fitted.predicted, fitted.errors, strict=True)
    return {
        "schema": 1,
        "origin": asdict(calibration.origin),
        "device": {
            "peak_flops": dict(device.peak_flops), "efficiency": device.efficiency,
            "memory_bandwidth_bytes_per_second": device.memory_bandwidth_bytes_per_second,
            "memory_overlap": device.memory_overlap, "kernel_launch_seconds": device.kernel_launch_seconds,
            "transpose_bandwidth_bytes_per_second": device.transpose_bandwidth_bytes_per_second,
            "vector_flops": device.vector_flops,
        },
        "link": {
            "bandwidth_bytes_per_second": host.link.bandwidth_bytes_per_second,
            "latency_seconds": host.link.latency_seconds, "launch_seconds": host.link.launch_seconds,
            "exchange_efficiency": host.link.exchange_efficiency,
            "reduction_bandwidth_bytes_per_second": host.link.reduction_bandwidth_bytes_per_second,
            "sum_bandwidth_bytes_per_second": host.link.sum_bandwidth_bytes_per_second,
        },
        "median_errors": calibration.median_errors(),
        "cases": [_row(one, predicted, error) for one, predicted, error in rows],
        "toml": calibration.to_toml(),
    }  # fmt: skip


def _row(one: Measurement, predicted: float, error: float) -> dict[str, Any]:
    return {
        **case_document(one.case), "measured_seconds": one.sample.seconds, "low_seconds": one.sample.low,
        "high_seconds": one.sample.high, "runs": one.sample.runs, "predicted_seconds": predicted, "error": error,
    }  # fmt: skip
