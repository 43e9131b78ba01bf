"""Seconds of a collective over one or more axes of a logical mesh: the alpha-beta model.

One axis of size n with latency a, bandwidth b and launch cost l (Thakur, Rabenseifner and Gropp, "Optimization of
collective communication operations in MPICH", 2005: the ring algorithms), for S bytes:

    all_reduce      l + 2(n-1) a + 2(n-1)/n S/b      S: the local buffer
    all_gather      l +  (n-1) a +  (n-1)/n S/b      S: the gathered output
    reduce_scatter  l +  (n-1) a +  (n-1)/n S/b      S: the input
    all_to_all      l +  (n-1) a +  (n-1)/n S/b'     S: the local buffer; b' the axis's exchange bandwidth
    permute         l +        a +          S/b      S: the buffer sent

Several axes at once are one collective, so one launch (the largest). For a reduction or a gather the buffer goes
through the axes one after the other, the fastest axis with all of it and each next one with what is left after division
by the sizes before it; for equal axes this is exactly the ring over their product, and it is never dearer than that
ring on the slowest axis, so only this price is computed. An all-to-all carries the whole buffer along every axis when
it is done axis by axis, but less often pays latency; the cheaper of that and the direct exchange is taken. A permute
over several axes has the slowest of them on its way.

Axes of size 1 and empty buffers cost nothing.

Known limits: no overlap of collectives with each other, no trees, no reduction inside the network. One axis that spans
h hosts with several devices on each is priced as a ring, two axes over the same devices in two levels; on the same
wires the ring is dearer by (n-1)/n over (h-1)/h: 1.9 for 2 hosts of 8, 1.06 for 16. Against published bus bandwidths of
large messages an all-to-all is priced 10 to 23 % too low (tests/unit/test_cost_collective.py).
"""

from __future__ import annotations

import difflib
import math
from collections.abc import Callable, Sequence

from ..cluster import Axis


def all_reduce_seconds(local_bytes: float, axes: Sequence[Axis]) -> float:
    """Seconds to sum a buffer of `local_bytes` on each device over `axes`, the sum left on every device."""
    return _seconds(local_bytes, axes, lambda size, used: 2 * _staged(size, used))


def all_gather_seconds(output_bytes: float, axes: Sequence[Axis]) -> float:
    """Seconds until every device holds the `output_bytes` that lay in equal parts over `axes`."""
    return _seconds(output_bytes, axes, _staged)


def reduce_scatter_seconds(input_bytes: float, axes: Sequence[Axis]) -> float:
    """Seconds to sum a buffer of `input_bytes` on each device over `axes`, each device left with its part."""
    return _seconds(input_bytes, axes, _staged)


def all_to_all_seconds(local_bytes: float, axes: Sequence[Axis]) -> float:
    """Seconds for every device of a group to send an equal part of its `local_bytes` to every other one."""
    return _seconds(local_bytes, axes, _exchange)


def permute_seconds(sent_bytes: float, axes: Sequence[Axis]) -> float:
    """Seconds for every device to send `sent_bytes` to one other device of its group."""
    return _seconds(sent_bytes, axes, _hop)


_BY_KIND: dict[str, Callable[[float, Sequence[Axis]], float]] = {
    "all_reduce": all_reduce_seconds,
    "all_gather": all_gather_seconds,
    "reduce_scatter": reduce_scatter_seconds,
    "all_to_all": all_to_all_seconds,
    "permute": permute_seconds,
}


def collective_seconds(kind: str, size_bytes: float, axes: Sequence[Axis]) -> float:
    """Predicted seconds of one collective.

    Args: `kind`: "all_reduce", "all_gather", "reduce_scatter", "all_to_all" or "permute". `size_bytes`: the buffer on
    one device that is not yet (or no longer) divided by `axes`: the local buffer, the gathered output, the input, the
    local buffer, the buffer sent. `axes`: the mesh axes it spans, in any order.

    Raises ValueError for an unknown kind, or for bytes that are negative or not finite.

    >>> axis = Axis(name="x", size=4, latency_seconds=1.0, bandwidth_bytes_per_second=10.0, launch_seconds=5.0)
    >>> collective_seconds("all_reduce", 100.0, [axis])  # 5 + 2*3*1 + 2*3/4*100/10
    26.0
    """
    price = _BY_KIND.get(kind)
    if price is None:
        near = difflib.get_close_matches(kind, _BY_KIND, n=1)
        raise ValueError(
            f"refused a collective: got kind {kind!r}; needed one of {', '.join(_BY_KIND)}; "
            f"where: collective_seconds(kind); try: {near[0] if near else 'all_reduce'!r}"
        )
    return price(size_bytes, axes)


def _seconds(size_bytes: float, axes: Sequence[Axis], travel: Callable[[float, list[Axis]], float]) -> float:
    if not 0 <= size_bytes < math.inf:  # false for NaN too
        raise ValueError(
            f"refused a collective: got {size_bytes!r} bytes; needed a finite number >= 0; "
            f"where: over axes {tuple(axis.name for axis in axes)}; try: the bytes of one device's buffer"
        )
    used = [axis for axis in axes if axis.size > 1]
    if not used or size_bytes == 0:
        return 0.0
    return max(axis.launch_seconds for axis in used) + travel(size_bytes, used)


def _staged(size_bytes: float, axes: list[Axis]) -> float:
    """A reduce-scatter (or, backwards, an all-gather) axis by axis, the fastest axis with the largest buffer."""
    total, remaining = 0.0, size_bytes
    for axis in sorted(axes, key=lambda axis: -axis.bandwidth_bytes_per_second):
        steps = axis.size - 1
        total += steps * axis.latency_seconds + steps / axis.size * remaining / axis.bandwidth_bytes_per_second
        remaining /= axis.size
    return total


def _exchange(size_bytes: float, axes: list[Axis]) -> float:
    by_axis = sum(_direct(size_bytes, axis.size, [axis]) for axis in axes)
    return min(by_axis, _direct(size_bytes, math.prod(axis.size for axis in axes), axes))


def _direct(size_bytes: float, size: int, axes: list[Axis]) -> float:
    """Every device to every other one of `size`, at the worst latency and exchange bandwidth of `axes`."""
    latency = max(axis.latency_seconds for axis in axes)
    bandwidth = min(axis.exchange_bandwidth_bytes_per_second or axis.bandwidth_bytes_per_second for axis in axes)
    return (size - 1) * latency + (size - 1) / size * size_bytes / bandwidth


def _hop(size_bytes: float, axes: list[Axis]) -> float:
    latency = max(axis.latency_seconds for axis in axes)
    return latency + size_bytes / min(axis.bandwidth_bytes_per_second for axis in axes)
