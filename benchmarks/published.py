"""Predictions beside published measurements: step times and memory of models and plans that others ran.

    python benchmarks/published.py --rows published_throughput.csv
    python benchmarks/published.py --rows published_memory.csv --json
    python benchmarks/published.py --rows published_throughput.csv --fit

Each row is a model (of the zoo, its layers one scan), a stated plan and hardware (`published_rows`), evaluated by
`meshwright.stated`: the graph, rules, layouts, prices, schedule and simulator of every plan, and no search but where a
row leaves something open (then the fastest that fits of a few candidates). What is fitted is one efficiency profile for
each generation of a framework and kind of device (`published_profiles.json`, written by `--fit`, which also says what
each would predict of rows it has not seen: a fifth of the rows left out at a time).
"""

from __future__ import annotations

import argparse
import csv
import json
import sys
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import numpy as np
from published_fit import cross_validated, fitted_profiles
from published_profiles import (
    ZERO_PAPER,
    Profiles,
    layout_of,
    profile_of,
    read_profiles,
    usable_bytes,
    write_profiles,
)
from published_rows import (
    Inexpressible,
    Row,
    StatedRow,
    measured_memory,
    measured_step_seconds,
    sharding_of,
    stated_row,
)
from scipy.stats import spearmanr

from meshwright.errors import PlanError
from meshwright.program.traces import Traces
from meshwright.stated import Evaluation, SolvedPlan, price_stated, solve_stated
from meshwright.zoo import moe


@dataclass(frozen=True, kw_only=True)
class Solved:
    """A row with the layouts of its candidates."""

    row: Row
    stated: StatedRow
    plans: tuple[SolvedPlan, ...]
    base: SolvedPlan | None = None


@dataclass(kw_only=True)
class Solver:
    """Solves rows; rows of one shape share a trace."""

    traces: dict[Any, tuple[Traces, tuple[Any, ...]]] = field(default_factory=dict)

    def solve(self, row: Row) -> Solved:
        """The layouts of a row.

        Raises:
          Inexpressible: if it cannot be expressed.
        """
        stated = stated_row(row)
        found, refused = [], ""
        for plan in stated.candidates:
            try:
                found.append(self._solve(stated, plan, stated.config_of(plan)))
            except PlanError as error:
                refused = str(error)
        if not found:
            raise Inexpressible(refused)
        base = None
        if stated.one_layer:
            plan = stated.candidates[0]
            base = self._solve(stated, plan, stated.config_of(plan, layers=2))
        elif "percent" in (row.get("unit") or ""):
            plan = stated.baseline(stated.candidates[0])
            base = self._solve(stated, plan, stated.config_of(plan))
        return Solved(row=row, stated=stated, plans=tuple(found), base=base)

    def _solve(self, stated: StatedRow, plan: Any, config: Any) -> SolvedPlan:
        key = stated.family.__name__, config
        if key not in self.traces:
            # Layers that are no scan are marked in the model.
            marked = stated.family is moe and plan.recompute == "layer"
            target = stated.family.build(config, remat=marked)
            self.traces[key] = Traces(target.step), (target.example_state, target.example_batch)
        traces, args = self.traces[key]
        return solve_stated(plan, traces, args, stated.cluster)


@dataclass(frozen=True, kw_only=True)
class Result:
    """A row's prediction beside its measurement; `error` is relative, of seconds where measured, else of bytes."""

    row_id: str
    source: str
    predicted_step_seconds: float | None
    measured_step_seconds: float | None
    predicted_memory_bytes: float | None
    measured_memory_bytes: float | None
    error: float | None
    fits: bool | None
    ran: bool | None
    reason: str = ""


def evaluate(solved: Solved, profiles: Profiles) -> Result:
    """A solved row under profiles."""
    row, stated = solved.row, solved.stated
    profile, layout = profile_of(stated, profiles), layout_of(row, stated)
    limit = usable_bytes(stated)
    priced = [price_stated(plan, profile, layout, narrow_products=stated.narrow_products) for plan in solved.plans]
    best = min(priced, key=lambda one: (one.peak_bytes > limit, one.step_seconds))
    seconds: float | None = best.step_seconds
    if stated.one_layer and solved.base is not None:
        two = price_stated(solved.base, profile, layout, narrow_products=stated.narrow_products)
        seconds = _passes(two) - _passes(best)
    memory, wanted = _memory(solved, best, layout, profile), measured_memory(row)
    measured = measured_step_seconds(row) if "quantity" not in row else None
    if "quantity" in row:
        seconds = None
    pair = (seconds, measured) if measured else (memory, wanted)
    error = pair[0] / pair[1] - 1 if pair[0] is not None and pair[1] else None
    status = row.get("status") or ""
    ran = None if status not in ("ok", "oom_or_fail") or "quantity" in row else status == "ok"
    return Result(
        row_id=row["row_id"], source=row["source"], predicted_step_seconds=seconds, measured_step_seconds=measured,
        predicted_memory_bytes=memory, measured_memory_bytes=wanted, error=error, ran=ran,
        fits=best.peak_bytes <= limit,
    )  # fmt: skip


def _passes(one: Evaluation) -> float:
    stage = one.timeline.timing.stages[0]
    return stage.forward_seconds + stage.backward_seconds


def _memory(solved: Solved, best: Evaluation, layout: Any, profile: Any) -> float | None:
    """Bytes (or percent) of what a row measured; the peak where it says nothing else."""
    quantity = solved.row.get("quantity") or ""
    if "parameters+gradients+optimizer" in quantity:
        return best.state_bytes
    if quantity.startswith("activations"):
        return best.activation_bytes
    if "percent" in quantity and solved.base is not None:
        return 100 * best.activation_bytes / price_stated(solved.base, profile, layout).activation_bytes
    return best.peak_bytes


def evaluate_rows(rows: Sequence[Row], profiles: Profiles) -> list[Result]:
    """Every row; those that cannot be expressed with the reason."""
    solver, found = Solver(), []
    for row in rows:
        states = _model_states(row)
        if states is not None:
            found.append(states)
            continue
        try:
            found.append(evaluate(solver.solve(row), profiles))
        except Inexpressible as error:
            found.append(_reason(row, str(error)))
    return found


def _reason(row: Row, text: str) -> Result:
    return Result(
        row_id=row["row_id"], source=row["source"], predicted_step_seconds=None, measured_step_seconds=None,
        predicted_memory_bytes=None, measured_memory_bytes=None, error=None, fits=None, ran=None, reason=text,
    )  # fmt: skip


def _model_states(row: Row) -> Result | None:
    """Rows of model states alone, of any model: no program, only the layout of its state."""
    if "model states" not in (row.get("quantity") or ""):
        return None
    elements, devices = float(row["params_b"]) * 1e9, int(row["dp"])
    zero, _ = sharding_of(row, 0, devices)
    whole = 1 / devices
    held = ZERO_PAPER.state_bytes(used=elements * (whole if zero == 3 else 1), stored=elements * whole, zero=zero)
    wanted = measured_memory(row)
    return Result(
        row_id=row["row_id"], source=row["source"], predicted_step_seconds=None, measured_step_seconds=None,
        predicted_memory_bytes=held, measured_memory_bytes=wanted, error=held / wanted - 1, fits=None, ran=None,
    )  # fmt: skip


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Median, mean and 90th percentile of absolute relative errors, rank correlation, and who fits."""
    pairs = [
        (r.predicted_step_seconds, r.measured_step_seconds)
        if r.measured_step_seconds
        else (r.predicted_memory_bytes, r.measured_memory_bytes)
        for r in results
        if r.error is not None
    ]
    errors = np.abs([r.error for r in results if r.error is not None])
    told = [(r.fits, r.ran) for r in results if r.ran is not None and r.fits is not None]
    found: dict[str, Any] = {"rows": len(results), "predicted": len(errors)}
    if len(errors):
        found |= {
            "median_absolute_error": float(np.median(errors)), "mean_absolute_error": float(np.mean(errors)),
            "error_90th_percentile": float(np.quantile(errors, 0.9)),
        }  # fmt: skip
    if len(pairs) > 2:
        found["spearman"] = float(spearmanr([a for a, _ in pairs], [b for _, b in pairs])[0])
    found["feasibility"] = {
        f"{'fits' if fits else 'does not fit'}, {'ran' if ran else 'out of memory'}": told.count((fits, ran))
        for fits in (True, False)
        for ran in (True, False)
    }
    return found


def report(results: Sequence[Result]) -> dict[str, Any]:
    """Per source and overall."""
    sources: dict[str, list[Result]] = defaultdict(list)
    for result in results:
        sources[result.source].append(result)
    return {
        "sources": {source: summary(of) for source, of in sources.items()},
        "overall": summary(results),
        "inexpressible": {r.row_id: r.reason for r in results if r.reason},
        "rows": [asdict(result) for result in results],
    }


def show(found: Mapping[str, Any]) -> None:
    """Tables for people."""
    print(f"{'source':40} {'rows':>5} {'median':>7} {'mean':>7} {'90 %':>7} {'rank':>6}  fits/ran")
    for source, of in (*found["sources"].items(), ("overall", found["overall"])):
        numbers = [of.get(k) for k in ("median_absolute_error", "mean_absolute_error", "error_90th_percentile")]
        text = " ".join("      -" if n is None else f"{100 * n:6.1f}%" for n in numbers)
        rank = "     -" if of.get("spearman") is None else f"{of['spearman']:6.3f}"
        wrong = of["feasibility"]["fits, out of memory"] + of["feasibility"]["does not fit, ran"]
        right = sum(of["feasibility"].values()) - wrong
        print(f"{source:40} {of['predicted']:5d} {text} {rank}  {right} right, {wrong} wrong")
    for row_id, reason in found["inexpressible"].items():
        print(f"{row_id} not expressible: {reason}")


def main() -> None:
    """The command."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True, help="CSV in the format of the published tables")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    parser.add_argument("--only", default="", help="row ids or sources, comma between them")
    parser.add_argument("--fit", action="store_true", help="fit the profiles to these rows and write them")
    given = parser.parse_args()
    with given.rows.open(newline="") as file:
        rows = list(csv.DictReader(file))
    if given.only:
        wanted = given.only.split(",")
        rows = [row for row in rows if any(w == row["row_id"] or w in row["source"] for w in wanted)]
    begun = time.perf_counter()
    if given.fit:
        solver, solved = Solver(), []
        for row in rows:
            try:
                solved.append(solver.solve(row))
            except Inexpressible as error:
                print(f"{row['row_id']} not expressible: {error}", file=sys.stderr)
        profiles = {**read_profiles(), **fitted_profiles(solved)}
        left_out = cross_validated(solved)
        write_profiles(profiles, left_out)
        show(report([evaluate(one, profiles) for one in solved]))
        print("predicted by profiles fitted to other rows of the same group:")
        for key, of in left_out.items():
            numbers = 100 * of["median_left_out"], 100 * of["90th_percentile_left_out"]
            print(f"{key:45} {of['rows']:4d} rows, median {numbers[0]:5.1f} %, 90th percentile {numbers[1]:5.1f} %")
        return
    found = report(evaluate_rows(rows, read_profiles()))
    found["seconds"] = time.perf_counter() - begun
    if given.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)


if __name__ == "__main__":
    main()
