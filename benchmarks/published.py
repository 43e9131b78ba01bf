"""Predictions beside published measurements: step times and memory of models and plans that others ran.

    python benchmarks/published.py --rows published_throughput.csv
    python benchmarks/published.py --rows published_memory.csv --json
    python benchmarks/published.py --rows published_throughput.csv --fit

Each row is a model (of the zoo, its layers one scan), a stated plan and hardware (`published_rows`), evaluated by
`stated`: the graph, rules, layouts, prices, schedule and simulator of every plan, and no search but where a row leaves
something open (then the fastest that fits of a few candidates). What is fitted is one efficiency profile for each
generation of a framework and kind of device (`published_profiles.json`, written by `--fit`); what such a fit is worth
for rows it has not seen, `published_fit.py` says.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import sys
import time
import traceback
from collections import defaultdict
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import asdict, dataclass, field, replace
from multiprocessing import get_context
from pathlib import Path
from typing import Any, TypeVar

import numpy as np
from published_cells import Inexpressible, Row, RowsError, Unexpected, amount, check_cells, needed_number, read_rows
from published_fit import best_of, fitted_profiles
from published_measured import measured_memory, measured_step_seconds
from published_plans import sharding_of
from published_profiles import (
    ZERO_PAPER,
    Profiles,
    layout_of,
    profile_of,
    read_profiles,
    usable_bytes,
    write_profiles,
)
from published_rows import StatedRow, stated_row
from scipy.stats import spearmanr
from stated import Evaluation, SolvedPlan, price_stated, solve_stated

from meshwright.errors import PlanError
from meshwright.program.traces import Traces
from meshwright.zoo import moe

_Found = TypeVar("_Found")


@dataclass(frozen=True, kw_only=True)
class Solved:
    """A row with the layouts of its candidates."""

    row: Row
    stated: StatedRow
    plans: tuple[SolvedPlan, ...]
    base: SolvedPlan | None = None


@dataclass(kw_only=True)
class Solver:
    """Solves rows; rows of one shape share a trace, and rows of one shape, plan and hardware their layouts."""

    traces: dict[Any, tuple[Traces, tuple[Any, ...]]] = field(default_factory=dict)
    plans: dict[Any, SolvedPlan] = field(default_factory=dict)

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
        # Layers that are no scan are marked in the model.
        marked = stated.family is moe and plan.recompute == "layer"
        key = stated.family_name, replace(config, name="any"), marked
        known = *key, plan, stated.cluster
        if known in self.plans:
            return self.plans[known]
        if key not in self.traces:
            try:
                target = stated.family.build(config, remat=marked)
            except ValueError as error:  # a shape that the zoo's model cannot have
                raise Inexpressible(f"{stated.family_name}: {error}") from error
            self.traces[key] = Traces(target.step), (target.example_state, target.example_batch)
        traces, args = self.traces[key]
        self.plans[known] = solve_stated(plan, traces, args, stated.cluster)
        return self.plans[known]


def solve_rows(rows: Sequence[Row], *, processes: int = 1) -> list[Solved | Inexpressible]:
    """Each row solved, or why it cannot be expressed.

    Args:
      rows: in any order.
      processes: that share the work; each traces for itself, so rows of like models go to one of them.
    """
    if processes == 1 or len(rows) < 2 * processes:
        return _solve(rows)
    places = sorted(range(len(rows)), key=lambda n: (rows[n]["model"], rows[n].get("seq_len") or "", n))
    parts = [places[n : n + _PART] for n in range(0, len(rows), _PART)]
    found: list[Any] = [None] * len(rows)
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        for part, solved in zip(parts, pool.map(_solve, [[rows[n] for n in part] for part in parts]), strict=True):
            for place, one in zip(part, solved, strict=True):
                found[place] = one
    return found


def _solve(rows: Sequence[Row]) -> list[Solved | Inexpressible]:
    return [_attempt(row, lambda row=row: _SOLVER.solve(row)) for row in rows]


def _attempt(row: Row, work: Callable[[], _Found]) -> _Found | Inexpressible:
    """What `work` finds for a row, or the reason why it finds nothing: one row must not cost the others theirs."""
    try:
        return work()
    except Inexpressible as error:
        return error
    except PlanError as error:
        return Inexpressible(str(error))
    except Exception as error:
        # A fault of these programs: it is counted (`summary`), and shown whole where it happens.
        print(f"{row['row_id']} failed:", file=sys.stderr)
        traceback.print_exception(error)
        return Unexpected(f"failed unexpectedly: {type(error).__name__}: {error}")


# Of this process.
_SOLVER = Solver()

# Rows that a process is given at once.
_PART = 12


@dataclass(frozen=True, kw_only=True)
class Result:
    """A row's prediction beside its measurement; `error` is relative, of seconds where measured, else of bytes.
    `memory_error` is of bytes (percent of a table of memory where its unit says so), wherever they were measured.
    `reason` says why nothing is predicted, `note` what was taken for granted, `failed` whether the reason is a fault.
    """

    row_id: str
    source: str
    predicted_step_seconds: float | None
    measured_step_seconds: float | None
    predicted_memory_bytes: float | None
    measured_memory_bytes: float | None
    error: float | None
    fits: bool | None
    ran: bool | None
    memory_error: float | None = None
    reason: str = ""
    note: str = ""
    failed: bool = False


def evaluate(solved: Solved, profiles: Profiles) -> Result:
    """A solved row under profiles."""
    row, stated = solved.row, solved.stated
    profile, layout = profile_of(stated, profiles), layout_of(row, stated)
    limit = usable_bytes(stated)
    best = best_of(solved, profile)
    seconds: float | None = stated.rounded * best.step_seconds
    if stated.one_layer and solved.base is not None:
        two = price_stated(solved.base, profile, layout, narrow_products=stated.narrow_products)
        seconds = _passes(two) - _passes(best)
    memory, wanted = _memory(solved, best, layout, profile), measured_memory(row)
    if not all(0 < number < math.inf for number in (seconds, memory)):
        raise ArithmeticError(f"predicted {seconds} seconds and {memory} bytes, needed positive numbers")
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
        fits=best.peak_bytes <= limit, note=stated.note,
        memory_error=memory / wanted - 1 if wanted else None,
    )  # fmt: skip


def _passes(one: Evaluation) -> float:
    stage = one.timeline.timing.stages[0]
    return stage.forward_seconds + stage.backward_seconds


def _memory(solved: Solved, best: Evaluation, layout: Any, profile: Any) -> float:
    """Bytes (or percent) of what a row measured; the peak where it says nothing else."""
    quantity = solved.row.get("quantity") or ""
    if "parameters+gradients+optimizer" in quantity:
        return best.state_bytes
    if quantity.startswith("activations"):
        return best.activation_bytes
    if "percent" in quantity and solved.base is not None:
        return 100 * best.activation_bytes / price_stated(solved.base, profile, layout).activation_bytes
    return best.peak_bytes


def evaluate_rows(rows: Sequence[Row], profiles: Profiles, *, processes: int = 1) -> list[Result]:
    """Every row; those that cannot be expressed with the reason."""
    states = [_model_states(row) for row in rows]
    left = [row for row, known in zip(rows, states, strict=True) if known is None]
    solved = iter(zip(left, solve_rows(left, processes=processes), strict=True))
    return [_result(*next(solved), profiles) if known is None else known for known in states]


def _result(row: Row, one: Solved | Inexpressible, profiles: Profiles) -> Result:
    found = one if isinstance(one, Inexpressible) else _attempt(row, lambda: evaluate(one, profiles))
    return _reason(row, found) if isinstance(found, Inexpressible) else found


def _reason(row: Row, error: Inexpressible) -> Result:
    return Result(
        row_id=row["row_id"], source=row["source"], predicted_step_seconds=None, measured_step_seconds=None,
        predicted_memory_bytes=None, measured_memory_bytes=None, error=None, fits=None, ran=None, reason=str(error),
        failed=isinstance(error, Unexpected),
    )  # fmt: skip


def _model_states(row: Row) -> Result | None:
    """Rows of model states alone, of any model: no program, only the layout of its state."""
    if "model states" not in (row.get("quantity") or ""):
        return None
    found = _attempt(row, lambda: _states(row))
    return _reason(row, found) if isinstance(found, Inexpressible) else found


def _states(row: Row) -> Result:
    check_cells(row)
    elements, devices, wanted = amount(row, "params_b") * 1e9, needed_number(row, "dp"), measured_memory(row)
    zero, _ = sharding_of(row, 0, devices)
    if not elements or wanted is None:
        raise Inexpressible("the number of parameters, or what they took, is not stated")
    whole = 1 / devices
    held = ZERO_PAPER.state_bytes(used=elements * (whole if zero == 3 else 1), stored=elements * whole, zero=zero)
    error = held / wanted - 1
    return Result(
        row_id=row["row_id"], source=row["source"], predicted_step_seconds=None, measured_step_seconds=None,
        predicted_memory_bytes=held, measured_memory_bytes=wanted, error=error, memory_error=error, fits=None, ran=None,
    )  # fmt: skip


def summary(results: Sequence[Result]) -> dict[str, Any]:
    """Median, mean and 90th percentile of absolute relative errors, rank correlation, and who fits: of step times, with
    those of memory under `memory`; of memory where no step was measured. `failed` are rows at which a program of ours
    failed."""
    steps = [
        (r.predicted_step_seconds, r.measured_step_seconds, r.error)
        for r in results
        if r.error is not None and r.measured_step_seconds
    ]
    memory = [
        (r.predicted_memory_bytes, r.measured_memory_bytes, r.memory_error)
        for r in results
        if r.memory_error is not None
    ]
    told = [(r.fits, r.ran) for r in results if r.ran is not None and r.fits is not None]
    failed = sum(result.failed for result in results)
    found: dict[str, Any] = {"rows": len(results), "failed": failed, **_statistics(steps or memory)}
    if steps and memory:
        found["memory"] = _statistics(memory)
    found["feasibility"] = {
        f"{'fits' if fits else 'does not fit'}, {'ran' if ran else 'out of memory'}": told.count((fits, ran))
        for fits in (True, False)
        for ran in (True, False)
    }
    return found


def _statistics(found: Sequence[tuple[Any, ...]]) -> dict[str, Any]:
    """Of what was predicted and measured, and the relative error: nothing of nothing, no rank of equals."""
    errors = np.abs([error for *_, error in found])
    if not len(errors):
        return {"predicted": 0}
    ranked = [[row[place] for row in found] for place in (0, 1)]
    ranks = len(found) > 2 and all(len(set(numbers)) > 1 for numbers in ranked)
    return {
        "predicted": len(errors), "median_absolute_error": float(np.median(errors)),
        "mean_absolute_error": float(np.mean(errors)), "error_90th_percentile": float(np.quantile(errors, 0.9)),
        "spearman": float(spearmanr(*ranked)[0]) if ranks else None,
    }  # fmt: skip


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
        wrong = of["feasibility"]["fits, out of memory"] + of["feasibility"]["does not fit, ran"]
        right = sum(of["feasibility"].values()) - wrong
        print(f"{source:40} {_in_words(of)}  {right} right, {wrong} wrong")
        if "memory" in of:
            print(f"{'  memory':40} {_in_words(of['memory'])}")
    for row in found["rows"]:
        if row["note"]:
            print(f"{row['row_id']} {row['note']}")
        if row["reason"]:
            print(f"{row['row_id']} not expressible: {row['reason']}")
    if found["overall"]["failed"]:
        print(f"{found['overall']['failed']} rows failed unexpectedly, of {found['overall']['rows']}")


def _in_words(of: Mapping[str, Any]) -> str:
    numbers = [of.get(k) for k in ("median_absolute_error", "mean_absolute_error", "error_90th_percentile")]
    text = " ".join("      -" if n is None else f"{100 * n:6.1f}%" for n in numbers)
    rank = "     -" if of.get("spearman") is None else f"{of['spearman']:6.3f}"
    return f"{of['predicted']:5d} {text} {rank}"


def main() -> int:
    """The command; 1 where a row failed unexpectedly."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rows", type=Path, required=True, help="CSV in the format of the published tables")
    parser.add_argument("--json", action="store_true", help="everything as JSON")
    parser.add_argument("--only", default="", help="row ids or sources, comma between them")
    parser.add_argument("--fit", action="store_true", help="fit the profiles to these rows and write them")
    parser.add_argument("--processes", type=int, default=min(2, os.cpu_count() or 1), help="that share the work")
    given = parser.parse_args()
    try:
        rows = read_rows(given.rows)
    except RowsError as error:
        parser.error(str(error))
    if given.only:
        wanted = given.only.split(",")
        rows = [row for row in rows if any(w == row["row_id"] or w in row["source"] for w in wanted)]
        if not rows:
            parser.error(f"--only {given.only}: no row has such an id or source")
    begun = time.perf_counter()
    if given.fit:
        found = solve_rows(rows, processes=given.processes)
        solved = [one for one in found if isinstance(one, Solved)]
        for row, one in zip(rows, found, strict=True):
            if isinstance(one, Inexpressible):
                print(f"{row['row_id']} not expressible: {one}", file=sys.stderr)
        profiles = {**read_profiles(), **fitted_profiles(solved)}
        write_profiles(profiles)
        show(report([_result(one.row, one, profiles) for one in solved]))
        return int(any(isinstance(one, Unexpected) for one in found))
    found = report(evaluate_rows(rows, read_profiles(), processes=given.processes))
    found["seconds"] = time.perf_counter() - begun
    if given.json:
        print(json.dumps(found, indent=1))
    else:
        show(found)
    return int(found["overall"]["failed"] > 0)


if __name__ == "__main__":
    sys.exit(main())
