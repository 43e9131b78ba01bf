"""Step times that a calibrated cost model predicts, beside measured ones: does it rank plans as the clock does?

    python benchmarks/calibration.py [--models gpt mlp] [--cluster cluster.toml] [--batch-scale 4] [--rounds 7] [--json]

On eight virtual CPU devices: calibrates (or reads a calibration made before), then plans each small reference model in
up to ten ways that differ in what they compute and move, and times all in turn in one process. Per model: predicted and
measured seconds of each plan and their rank correlation (Spearman). Over all models it is given twice: of seconds, and
within models, of seconds over the geometric mean of the model's own. Measured is the median over rounds of the
fastest step of each: in a round the fastest is what other work on the machine disturbs least, and one lucky step of all
rounds decides nothing. Plans whose measured intervals overlap (`calibrate.sample`) are ties
that no prediction can rank; they are counted, and so are pairs that the clock tells apart and the prediction has in the
other order.

Plans are predicted before any of them is run; nothing is fitted to a step. Each model has a process of its own: steps
of a process that has run other models before take up to 1.3 times as long.
"""

from __future__ import annotations

import argparse
import json
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from side_by_side import FAMILIES, record, tiny

# isort: split
import jax
from scipy.stats import spearmanr

from meshwright.calibrate.calibration import calibrate
from meshwright.calibrate.sample import sample_of
from meshwright.cluster import Cluster, load_cluster
from meshwright.errors import PlanError
from meshwright.planning.plan_for import Planning, plan_for
from meshwright.runtime.executable import executable

# Times the small models' own batch: enough that a step is more than calling it.
SCALES = {"mlp": 32}
SCALE = 4

# Ways to plan; what is refused for a model, or gives the plan of a way before it, is left out.
WAYS: tuple[dict[str, Any], ...] = (
    {"preset": "data_parallel()"},
    {"preset": "zero(stage=3)"},
    {"preset": "megatron(tp=2)"},
    {"preset": "megatron(tp=4)"},
    {"preset": "megatron(tp=8)"},
    {"preset": "data_parallel()", "microbatches": 4},
    {"preset": "zero(stage=3)", "microbatches": 4},
    {"preset": "megatron(tp=2)", "microbatches": 4},
    {"preset": "megatron(tp=8)", "microbatches": 4},
    {"preset": "data_parallel()", "microbatches": 8},
)


def plans(target: Any, cluster: Cluster, *, seconds: float) -> list[tuple[str, Planning]]:
    """Plans of a model that differ, in the order of `WAYS`."""
    found: list[tuple[str, Planning]] = []
    for way in WAYS:
        try:
            one = plan_for(
                target.step, (target.example_state, target.example_batch), cluster=cluster, time_limit_seconds=seconds,
                **way,
            )  # fmt: skip
        except PlanError as error:
            print(f"  {way}: {error}"[:160], file=sys.stderr)
            continue
        same = [
            (p.plan.stages[0].mesh, p.plan.microbatches, p.plan.stages[0].operators, p.plan.stages[0].parameters)
            for _, p in found
        ]
        stage = one.plan.stages[0]
        if (stage.mesh, one.plan.microbatches, stage.operators, stage.parameters) in same:
            continue
        found.append((", ".join(f"{k}={v}" for k, v in way.items()), one))
    return found


class Running:
    """A plan with the state it has reached."""

    def __init__(self, target: Any, planning: Planning) -> None:
        self._step = executable(planning.program, planning.plan, jax.devices())
        state = jax.jit(target.init)(jax.random.key(0))
        batch = jax.jit(target.make_batch)(jax.random.key(1))
        # Where the plan wants them: what moves arrays there is no part of a step.
        flat = self._step.place(jax.tree.leaves((state, batch)))
        self._state, self._batch = jax.tree.unflatten(jax.tree.structure((state, batch)), flat)

    def run(self) -> float:
        begun = time.perf_counter()
        self._state, metrics = self._step(self._state, self._batch)
        jax.block_until_ready((self._state, metrics))
        return time.perf_counter() - begun


def measured(running: Sequence[Running], *, rounds: int, steps: int) -> list[list[float]]:
    """For each plan the fastest step of each round, plans in turn."""
    for one in running:
        one.run(), one.run()
    fastest: list[list[float]] = [[] for _ in running]
    for number in range(rounds):
        order = range(len(running)) if number % 2 else range(len(running) - 1, -1, -1)
        taken: list[list[float]] = [[] for _ in running]
        for _ in range(steps):
            for position in order:
                taken[position].append(running[position].run())
        for position, seconds in enumerate(taken):
            fastest[position].append(min(seconds))
    return fastest


def row(family: str, cluster: Cluster, arguments: Any) -> dict[str, Any]:
    """One model's."""
    target = tiny(family, arguments.batch_scale or SCALES.get(family, SCALE))
    found = plans(target, cluster, seconds=arguments.plan_seconds)
    seconds = measured([Running(target, p) for _, p in found], rounds=arguments.rounds, steps=arguments.steps)
    samples = [sample_of(s) for s in seconds]
    entries = []
    for (way, planning), fastest, sample in zip(found, seconds, samples, strict=True):
        stage = planning.plan.stages[0]
        entries.append({
            "plan": way, "predicted_seconds": planning.step_seconds, "measured_seconds": sample.seconds,
            "low_seconds": sample.low, "high_seconds": sample.high, "fastest_seconds": min(fastest),
            "predicted_compute_seconds": stage.compute_seconds,
            "predicted_communication_seconds": stage.communication_seconds,
            "collectives": {c.kind: {"count": c.count, "bytes": c.bytes} for c in stage.communication},
        })  # fmt: skip
    ratios = [e["predicted_seconds"] / e["measured_seconds"] for e in entries]
    pairs = [(a, b) for place, a in enumerate(entries) for b in entries[:place]]
    apart = [(a, b) for a, b in pairs if a["low_seconds"] > b["high_seconds"] or b["low_seconds"] > a["high_seconds"]]
    return {
        "model": target.name, "plans": entries, "rank_correlation": _correlation(entries),
        "pairs": len(pairs), "ties": len(pairs) - len(apart),
        "misordered": sum(
            (a["measured_seconds"] < b["measured_seconds"]) != (a["predicted_seconds"] < b["predicted_seconds"])
            for a, b in apart
        ),
        "median_predicted_over_measured": statistics.median(ratios),
    }  # fmt: skip


def in_a_process(family: str, cluster: Cluster, arguments: Any) -> dict[str, Any]:
    """As `row`, in a new process."""
    same = ("batch_scale", "rounds", "steps", "plan_seconds")
    given = {name.replace("_", "-"): getattr(arguments, name) for name in same}
    options = [f"--{name}={value}" for name, value in given.items() if value is not None]
    with tempfile.TemporaryDirectory() as folder:
        written = Path(folder) / "cluster.toml"
        written.write_text(cluster.to_toml())
        command = [sys.executable, __file__, "--models", family, "--cluster", str(written), "--json", *options]
        ended = subprocess.run(command, stdout=subprocess.PIPE, check=True)
    (found,) = json.loads(ended.stdout)["results"]
    return found


def _correlation(entries: Sequence[dict[str, Any]]) -> float:
    """Spearman's, of predicted and measured seconds."""
    found = spearmanr([e["predicted_seconds"] for e in entries], [e["measured_seconds"] for e in entries])
    return float(found.statistic)


def _within_models(rows: Sequence[dict[str, Any]]) -> list[dict[str, Any]]:
    """All plans, their seconds over the geometric mean of those of their model."""
    found = []
    for one in rows:
        kinds = ("predicted_seconds", "measured_seconds")
        means = {kind: statistics.geometric_mean(plan[kind] for plan in one["plans"]) for kind in kinds}
        found += [{kind: plan[kind] / means[kind] for kind in kinds} for plan in one["plans"]]
    return found


def show(result: dict[str, Any]) -> None:
    print(f"rank correlation over all models and plans {result['rank_correlation_of_all']:.2f}")
    print(f"rank correlation within models {result['rank_correlation_within_models']:.2f}")
    for one in result["results"]:
        pairs = f"{one['ties']} of {one['pairs']} pairs tied, {one['misordered']} misordered"
        print(f"{one['model']}: rank correlation {one['rank_correlation']:.2f}, {pairs}")
        for plan in sorted(one["plans"], key=lambda plan: plan["measured_seconds"]):
            moved = ", ".join(f"{k} {v['count']} x {v['bytes'] / 1024:.0f} KiB" for k, v in plan["collectives"].items())
            print(
                f"  measured {plan['measured_seconds'] * 1e3:8.2f} ms  predicted {plan['predicted_seconds'] * 1e3:8.2f}"
                f" (compute {plan['predicted_compute_seconds'] * 1e3:.2f}, collectives"
                f" {plan['predicted_communication_seconds'] * 1e3:.2f})  {plan['plan']}  [{moved}]"
            )


def main(arguments: Sequence[str] | None = None) -> None:
    """Calibrate, measure all models asked for and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--cluster", type=Path, help="a calibration made before; else one is made")
    parser.add_argument("--quick", action="store_true", help="calibrate quickly")
    parser.add_argument("--batch-scale", type=int, help="times the small models' own batch; else as in SCALES")
    parser.add_argument("--rounds", type=int, default=9)
    parser.add_argument("--steps", type=int, default=7, help="of each plan in a round")
    parser.add_argument("--plan-seconds", type=float, default=20.0, help="time limit of each search")
    parser.add_argument("--json", action="store_true")
    given = parser.parse_args(arguments)
    if given.cluster is None:
        calibration = calibrate(quick=given.quick)
        cluster, worth = calibration.cluster, calibration.median_errors()
    else:
        cluster, worth = load_cluster(str(given.cluster)), {}
    rows = []
    for family in given.models:
        begun = time.perf_counter()
        rows.append(row(family, cluster, given) if len(given.models) == 1 else in_a_process(family, cluster, given))
        print(f"{family}: {time.perf_counter() - begun:.0f} s", file=sys.stderr, flush=True)
    config = {name: str(v) if isinstance(v, Path) else v for name, v in vars(given).items()}
    result = record("rank correlation of predicted and measured step times", config, rows)
    result["cluster"], result["calibration_median_errors"] = cluster.to_toml(), worth
    plans = [plan for one in rows for plan in one["plans"]]
    result["rank_correlation_of_all"] = _correlation(plans)
    result["rank_correlation_within_models"] = _correlation(_within_models(rows))
    result["lowest_rank_correlation"] = min(one["rank_correlation"] for one in rows)
    print(json.dumps(result)) if given.json else show(result)


if __name__ == "__main__":
    main()
