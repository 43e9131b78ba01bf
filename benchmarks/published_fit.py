"""Fits efficiency profiles to published step times (`benchmarks/published.py --fit`), and says what a fit is worth:

    python benchmarks/published_fit.py --rows published_throughput.csv

One profile for each generation of a framework and kind of device, at most seven numbers for its rows together. The
residual is the logarithm of predicted over measured time, with a soft loss so that a few rows that something else
slowed do not decide; each number is pulled weakly to the default of the device, which settles what rows do not tell.
"""

from __future__ import annotations

import argparse
import json
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import numpy as np
from published_cells import RowsError, read_rows
from published_measured import measured_step_seconds
from published_profiles import layout_of, prior_of, profile_of, read_profiles, usable_bytes
from scipy.optimize import least_squares
from scipy.stats import spearmanr
from stated import Evaluation, price_stated

from meshwright.cost.efficiency import EfficiencyProfile

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


def best_of(one: Any, profile: EfficiencyProfile) -> Evaluation:
    """A row's fastest candidate that fits; where none does, the one that needs the least."""
    layout, narrow, limit = layout_of(one.row, one.stated), one.stated.narrow_products, usable_bytes(one.stated)
    priced = [price_stated(plan, profile, layout, narrow_products=narrow) for plan in one.plans]
    return min(priced, key=lambda found: (max(found.peak_bytes, limit), found.step_seconds))


def seconds_of(one: Any, profile: EfficiencyProfile) -> float:
    """A row's step under a profile."""
    return one.stated.rounded * best_of(one, profile).step_seconds


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


def half_left_out(solved: Sequence[Any]) -> list[tuple[Any, float]]:
    """Each row with the seconds that profiles predict which were fitted to every second row of each source, the row
    itself not among them."""
    places: dict[str, int] = defaultdict(int)
    halves: tuple[list[Any], list[Any]] = ([], [])
    for one in solved:
        halves[places[one.row["source"]] % 2].append(one)
        places[one.row["source"]] += 1
    return [pair for number in (0, 1) for pair in _predicted(halves[number], fitted_profiles(halves[1 - number]))]


def source_left_out(solved: Sequence[Any]) -> list[tuple[Any, float]]:
    """Each row with the seconds that profiles predict which were fitted to other sources alone: the profile of its
    framework and device if another source has it, or of one alike, or what is known of the device."""
    found = []
    for source in dict.fromkeys(one.row["source"] for one in solved):
        out = [one for one in solved if one.row["source"] == source]
        # Only the groups that the source is part of are fitted anew.
        mine = {one.stated.profile_key for one in out}
        kept = [one for one in solved if one.row["source"] != source]
        others = {key: profile for key, profile in read_profiles().items() if key not in mine and key in groups(kept)}
        again = fitted_profiles([one for one in kept if one.stated.profile_key in mine])
        found += _predicted(out, {**others, **again})
    return found


def _predicted(rows: Sequence[Any], profiles: Mapping[str, EfficiencyProfile]) -> list[tuple[Any, float]]:
    measured = [one for one in rows if measured_step_seconds(one.row) and one.row.get("status") == "ok"]
    return [(one, seconds_of(one, profile_of(one.stated, profiles))) for one in measured]


def held_out_errors(pairs: Sequence[tuple[Any, float]]) -> dict[str, dict[str, float]]:
    """Of each source and overall: rows, median and 90th percentile of the absolute error, rank correlation."""
    sources: dict[str, list[tuple[float, float]]] = defaultdict(list)
    for one, predicted in pairs:
        sources[one.row["source"]].append((predicted, measured_step_seconds(one.row)))
    sources["overall"] = [pair for of in sources.values() for pair in of]
    found = {}
    for source, of in sources.items():
        errors = [abs(predicted / measured - 1) for predicted, measured in of]
        found[source] = {
            "rows": len(of), "median": float(np.median(errors)), "90th_percentile": float(np.quantile(errors, 0.9)),
        }  # fmt: skip
        if len(of) > 2:
            found[source]["spearman"] = float(spearmanr(*zip(*of, strict=True))[0])
    return found


def main() -> None:
    """How well rows are predicted that no profile was fitted to; writes nothing."""
    from published import Solved, solve_rows

    parser = argparse.ArgumentParser(description=main.__doc__)
    parser.add_argument("--rows", type=Path, required=True, help="CSV in the format of the published tables")
    parser.add_argument("--processes", type=int, default=2)
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args()
    try:
        rows = read_rows(given.rows)
    except RowsError as error:
        parser.error(str(error))
    solved = [one for one in solve_rows(rows, processes=given.processes) if isinstance(one, Solved)]
    found = {
        "half of each source fitted, the other half predicted": held_out_errors(half_left_out(solved)),
        "fitted to other sources": held_out_errors(source_left_out(solved)),
    }
    if given.json:
        print(json.dumps(found, indent=1))
        return
    for what, sources in found.items():
        print(what)
        for source, of in sources.items():
            numbers = f"median {100 * of['median']:5.1f} %, 90th percentile {100 * of['90th_percentile']:5.1f} %"
            print(f"  {source:40} {of['rows']:4d} rows, {numbers}, rank {of.get('spearman', float('nan')):.3f}")


if __name__ == "__main__":
    main()
