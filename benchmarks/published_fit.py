"""Fits efficiency profiles to published step times (`benchmarks/published.py --fit`).

One profile for each generation of a framework and kind of device, at most seven numbers for its rows together. The
residual is the logarithm of predicted over measured time, with a soft loss so that a few rows that something else
slowed do not decide; each number is pulled weakly to the default of the device, which settles what rows do not tell.
"""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Sequence
from typing import Any

import numpy as np
from published_profiles import layout_of, prior_of
from published_rows import measured_step_seconds
from scipy.optimize import least_squares

from meshwright.cost.efficiency import EfficiencyProfile
from meshwright.stated import price_stated

# Lowest, highest, and how far from the default is one standard deviation.
_RANGES = {
    "matmul": (0.3, 1.0, 0.1),
    "narrow": (0.2, 1.0, 0.15),
    "convolution": (0.2, 1.0, 0.2),
    "attention": (0.1, 1.0, 0.15),
    "passes": (0.5, 8.0, 1.0),
    "network": (0.05, 1.0, 0.2),
    "hidden_weights": (0.0, 1.0, 0.3),
}
_PULL = 0.1


def numbers_of(rows: Sequence[Any]) -> tuple[str, ...]:
    """What a group of rows can tell about its profile."""
    names = ["matmul", "passes"]
    if any(len(one.stated.candidates[0].axes) > 1 or one.stated.candidates[0].data > 1 for one in rows):
        names += ["network", "hidden_weights"]
    if any(one.stated.narrow_products for one in rows):
        names.append("narrow")
    if any(one.stated.generation.fused_attention for one in rows):
        names.append("attention")
    if any("ResNet" in one.row["model"] for one in rows):
        names.append("convolution")
    return tuple(names)


def seconds_of(one: Any, profile: EfficiencyProfile) -> float:
    """A row's step under a profile, of its fastest candidate."""
    layout = layout_of(one.row, one.stated)
    narrow = one.stated.narrow_products
    return min(price_stated(plan, profile, layout, narrow_products=narrow).step_seconds for plan in one.plans)


def fit(rows: Sequence[Any], names: Sequence[str], prior: EfficiencyProfile) -> EfficiencyProfile:
    """The profile that suits rows best.

    Args:
      rows: solved, all measured.
      names: the numbers to fit.
      prior: where they start and are pulled to.
    """
    low, high, scale = (np.array([_RANGES[name][n] for name in names]) for n in range(3))
    start = np.array([getattr(prior, name) for name in names])
    measured = [measured_step_seconds(one.row) for one in rows]

    def residuals(x: np.ndarray) -> np.ndarray:
        profile = prior.but(**{name: float(v) for name, v in zip(names, x, strict=True)})
        told = [math.log(seconds_of(one, profile) / m) for one, m in zip(rows, measured, strict=True)]
        return np.array([*told, *(_PULL * (x - start) / scale)])

    inside = np.clip(start, low + 1e-6, high - 1e-6)
    found = least_squares(
        residuals, inside, bounds=(low, high), loss="soft_l1", f_scale=0.1, diff_step=1e-3, max_nfev=40
    )
    return prior.but(**{name: round(float(v), 4) for name, v in zip(names, found.x, strict=True)})


def groups(solved: Sequence[Any]) -> dict[str, list[Any]]:
    """Rows whose step was measured whole, by profile."""
    found: dict[str, list[Any]] = defaultdict(list)
    for one in solved:
        if measured_step_seconds(one.row) and one.row.get("status") == "ok":
            found[one.stated.profile_key].append(one)
    return dict(sorted(found.items()))


def fitted_profiles(solved: Sequence[Any]) -> dict[str, EfficiencyProfile]:
    """A profile for each group of rows."""
    found = {}
    for key, rows in groups(solved).items():
        profile = fit(rows, numbers_of(rows), prior_of(rows[0].stated))
        found[key] = profile.but(recipe=f"fitted to {len(rows)} rows")
    return found


def cross_validated(solved: Sequence[Any]) -> dict[str, dict[str, float]]:
    """For each group, errors of rows predicted by a profile fitted without them, a fifth left out at a time."""
    found = {}
    for key, rows in groups(solved).items():
        if len(rows) < 3:
            continue
        folds, errors = min(5, len(rows)), []
        for number in range(folds):
            out = rows[number::folds]
            kept = [one for one in rows if one not in out]
            profile = fit(kept, numbers_of(rows), prior_of(rows[0].stated))
            errors += [abs(seconds_of(one, profile) / measured_step_seconds(one.row) - 1) for one in out]
        found[key] = {
            "rows": len(rows), "median_left_out": float(np.median(errors)),
            "90th_percentile_left_out": float(np.quantile(errors, 0.9)),
        }  # fmt: skip
    return found
