"""The constants of a cluster that explain measurements best.

Each constant is found by robust least squares on the logarithms of predicted over measured seconds: a factor of two too
high weighs as much as one too low, small cases as much as large ones, and beyond a factor of about 1.5 a case counts
less and less (soft L1), so that one that the model cannot express does not bend the rest. Predictions are those of the
functions that price plans. The logarithms of the constants are the unknowns, which keeps them positive;
what the measurements do not tell stays as described.

Devices: FLOP/s of each dtype, bytes/s of memory, the share of a product's traffic that hides behind its arithmetic, the
cost of starting a kernel, and where they show the bytes/s of transposes and the FLOP/s of chains. Links: bytes/s,
latency, launch, the share of the bandwidth that an exchange reaches, and where a switch sums by itself, or devices sum
in the memory that they share, the bytes/s of that.

Known limit: the NICs of hosts are fitted where some axis crosses them, and are the description's otherwise.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace

import numpy as np

from ..cluster import Axis, Cluster, Device, Host, Link
from .case import Collective, Product
from .measure import Measurement

# Beyond this difference of logarithms a case counts less.
_OUTLYING = 0.4
# A time that is not seen in any measurement is fitted as this.
_LEAST_SECONDS = 1e-9
# How much a constant is held to the description, as a share of one measurement: next to nothing, but enough for one
# that no measurement tells of.
_HELD = 0.01


@dataclass(frozen=True, slots=True, kw_only=True)
class Fitted:
    """A cluster with constants that were fitted, and what it predicts of each measurement.

    Args:
      cluster: as described, with the constants that were fitted.
      measured: the measurements.
      predicted: seconds of each under the fitted constants.
    """

    cluster: Cluster
    measured: tuple[Measurement, ...]
    predicted: tuple[float, ...]

    @property
    def errors(self) -> tuple[float, ...]:
        """Predicted over measured, less one."""
        return tuple(p / m.sample.seconds - 1 for p, m in zip(self.predicted, self.measured, strict=True))


def fit(cluster: Cluster, measured: Sequence[Measurement]) -> Fitted:
    """The cluster whose predictions are nearest to the measurements.

    Args:
      cluster: what is known of it: its shape, its memory, where the search for constants begins.
      measured: on it.
    """
    device = _fit_device(cluster.device, measured)
    cluster = _with(cluster, device=device)
    collectives = [one for one in measured if isinstance(one.case, Collective)]
    if collectives:
        cluster = _fit_links(cluster, collectives)
    return Fitted(
        cluster=cluster, measured=tuple(measured), predicted=tuple(_predicted(cluster, one) for one in measured)
    )


def _fit_device(device: Device, measured: Sequence[Measurement]) -> Device:
    local = [one for one in measured if not isinstance(one.case, Collective)]
    products = [one.case for one in local if isinstance(one.case, Product)]
    dtypes = sorted({case.dtype for case in products})
    if not local:
        return device
    start = [*(math.log(device.achievable_flops(dtype)) for dtype in dtypes)]
    start += [
        math.log(device.memory_bandwidth_bytes_per_second),
        0.5,
        math.log(max(device.kernel_launch_seconds, 1e-7)),
    ]
    lowest = [-math.inf] * len(dtypes) + [-math.inf, 0.0, math.log(_LEAST_SECONDS)]
    highest = [math.inf] * len(dtypes) + [math.inf, 1.0, 0.0]
    # Whether arithmetic shows and arrays are transposed is known; how fast that is is measured.
    rates = [name for name in ("transpose_bandwidth_bytes_per_second", "vector_flops") if getattr(device, name)]
    start += [math.log(getattr(device, name)) for name in rates]
    lowest += [-math.inf] * len(rates)
    highest += [math.inf] * len(rates)

    def made(unknowns: np.ndarray) -> Device:
        reached = {dtype: math.exp(x) for dtype, x in zip(dtypes, unknowns, strict=False)}
        bandwidth, overlap, launch, *others = unknowns[len(dtypes) :]
        reaches = {name: math.exp(x) for name, x in zip(rates, others, strict=True)}
        return replace(
            _with_rates(device, reached), memory_bandwidth_bytes_per_second=math.exp(bandwidth),
            memory_overlap=float(overlap), kernel_launch_seconds=math.exp(launch),
            transpose_bandwidth_bytes_per_second=reaches.get("transpose_bandwidth_bytes_per_second", 0.0),
            vector_flops=reaches.get("vector_flops", 0.0),
        )  # fmt: skip

    def price(unknowns: np.ndarray) -> list[float]:
        guess = made(unknowns)
        return [one.case.seconds(guess) for one in local if not isinstance(one.case, Collective)]

    return made(_solved(price, local, start, (lowest, highest)))


def _with_rates(device: Device, reached: dict[str, float]) -> Device:
    """The device with the FLOP/s that were reached. Utilisation is stated of a published peak, so the best dtype keeps
    its own, and the efficiency says what is reached of it; virtual CPU devices have no published peak."""
    if not reached:
        return device
    shares = [rate / device.peak_flops.get(dtype, device.peak_flops["float32"]) for dtype, rate in reached.items()]
    efficiency = max(shares)
    if efficiency > 1.0 or device.platform == "cpu":
        efficiency = 1.0
    peaks = {**device.peak_flops, **{dtype: rate / efficiency for dtype, rate in reached.items()}}
    return replace(device, peak_flops=peaks, efficiency=efficiency)


def _fit_links(cluster: Cluster, measured: Sequence[Measurement]) -> Cluster:
    crossed = {level.kind for one in measured for level in _axis_of(cluster, one).levels if level.size > 1}
    places = [name for name, kinds in (("link", {"device"}), ("nic", {"host", "leaf"})) if kinds & crossed]
    links = [getattr(cluster.hosts[0], place) for place in places]
    start = [number for link in links for number in _numbers(link)]
    none = math.inf
    lowest = [-none, math.log(_LEAST_SECONDS), math.log(_LEAST_SECONDS), math.log(1e-3), -none, -none] * len(links)
    highest = [none, 0.0, 0.0, 0.0, none, none] * len(links)

    def made(unknowns: np.ndarray) -> Cluster:
        parts = np.reshape(unknowns, (len(links), -1))
        guess = {place: _link(link, x) for place, link, x in zip(places, links, parts, strict=True)}
        return _with(cluster, link=guess.get("link"), nic=guess.get("nic"))

    def price(unknowns: np.ndarray) -> list[float]:
        guess = made(unknowns)
        axes: dict[tuple[tuple[int, ...], int], Axis] = {}
        seconds = []
        for one in measured:
            assert isinstance(one.case, Collective)
            key = (one.case.shape, one.case.axis)
            if key not in axes:
                axes[key] = _axis_of(guess, one)
            seconds.append(one.case.seconds(axes[key]))
        return seconds

    return made(_solved(price, measured, start, (lowest, highest)))


def _numbers(link: Link) -> list[float]:
    times = (link.latency_seconds, link.launch_seconds)
    return [
        math.log(link.bandwidth_bytes_per_second), *(math.log(max(t, 1e-6)) for t in times),
        math.log(min(link.exchange_efficiency, 0.9)), math.log(link.reduction_bandwidth_bytes_per_second or 1.0),
        math.log(link.sum_bandwidth_bytes_per_second or 1.0),
    ]  # fmt: skip


def _link(link: Link, unknowns: np.ndarray) -> Link:
    bandwidth, latency, launch, exchange, reduction, sums = (math.exp(x) for x in unknowns)
    return replace(
        link, bandwidth_bytes_per_second=bandwidth, latency_seconds=latency, launch_seconds=launch,
        exchange_efficiency=min(exchange, 1.0),
        # Whether a switch sums, or memory is shared, is known; how fast that is is measured.
        reduction_bandwidth_bytes_per_second=reduction if link.reduction_bandwidth_bytes_per_second else 0.0,
        sum_bandwidth_bytes_per_second=sums if link.sum_bandwidth_bytes_per_second else 0.0,
    )  # fmt: skip


def _solved(
    price: Callable[[np.ndarray], Sequence[float]],
    measured: Sequence[Measurement],
    start: Sequence[float],
    bounds: tuple[Sequence[float], Sequence[float]],
) -> np.ndarray:
    seen = np.log([one.sample.seconds for one in measured])

    # Strictly inside of the bounds, as the solver wants it.
    inside = np.clip(start, np.asarray(bounds[0]) + 1e-6, np.asarray(bounds[1]) - 1e-6)

    def residuals(unknowns: np.ndarray) -> np.ndarray:
        missed = np.log(np.maximum(price(unknowns), 1e-30)) - seen
        return np.concatenate([missed, _HELD * (unknowns - inside)])

    from scipy.optimize import least_squares  # a third of a second, which most never need

    return least_squares(residuals, inside, bounds=bounds, loss="soft_l1", f_scale=_OUTLYING, x_scale=1.0).x


def _axis_of(cluster: Cluster, one: Measurement) -> Axis:
    assert isinstance(one.case, Collective)
    return cluster.logical_mesh(one.case.shape).axes[one.case.axis]


def _predicted(cluster: Cluster, one: Measurement) -> float:
    if isinstance(one.case, Collective):
        return one.case.seconds(_axis_of(cluster, one))
    return one.case.seconds(cluster.device)


def _with(
    cluster: Cluster, *, device: Device | None = None, link: Link | None = None, nic: Link | None = None
) -> Cluster:
    """The cluster with these parts in every host."""

    def changed(host: Host) -> Host:
        return replace(host, device=device or host.device, link=link or host.link, nic=nic or host.nic)

    return replace(cluster, hosts=tuple(changed(host) for host in cluster.hosts))
