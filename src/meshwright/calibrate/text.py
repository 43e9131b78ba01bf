"""A calibration as text: the fitted constants, and for each kind of case how sure and how near they are."""

from __future__ import annotations

import statistics

from ..report.table import format_bytes_rate, format_flops_rate, format_seconds, format_table
from .calibration import Calibration
from .case import case_document


def calibration_text(calibration: Calibration) -> str:
    """Tables for people."""
    device, link = calibration.cluster.device, calibration.cluster.hosts[0].link
    rates = [
        (f"products of {dtype}", format_flops_rate(device.achievable_flops(dtype)))
        for dtype in calibration.measured_dtypes
    ]
    constants = [
        *rates,
        ("memory", format_bytes_rate(device.memory_bandwidth_bytes_per_second)),
        ("traffic hidden by products", f"{100 * device.memory_overlap:.0f} %"),
        ("starting a kernel", format_seconds(device.kernel_launch_seconds)),
    ]
    if device.transpose_bandwidth_bytes_per_second:
        constants.append(("transposes", format_bytes_rate(device.transpose_bandwidth_bytes_per_second)))
    if device.vector_flops:
        constants.append(("arithmetic of chains", format_flops_rate(device.vector_flops)))
    sums = link.sum_bandwidth_bytes_per_second
    if any("group" in case_document(one.case) for one in calibration.fitted.measured):
        constants += [
            ("link", format_bytes_rate(link.bandwidth_bytes_per_second)),
            *([("sums in shared memory", format_bytes_rate(sums))] if sums else []),
            ("link in an exchange", f"{100 * link.exchange_efficiency:.0f} % of that"),
            ("latency of a step of a collective", format_seconds(link.latency_seconds)),
            ("starting a collective", format_seconds(link.launch_seconds)),
        ]
    spreads: dict[str, list[float]] = {}
    for one in calibration.fitted.measured:
        spreads.setdefault(str(case_document(one.case)["kind"]), []).append(one.sample.spread)
    rows = [
        (kind, str(len(spreads[kind])), f"{100 * statistics.median(spreads[kind]):.0f} %", f"{100 * error:.0f} %")
        for kind, error in calibration.median_errors().items()
    ]
    return "\n".join(
        [
            f"Measured on {calibration.origin}",
            "",
            format_table(("fitted", "value"), constants, left=1),
            "",
            format_table(("cases", "how many", "known to", "median error of the fit"), rows, left=1),
        ]
    )
