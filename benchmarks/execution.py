"""Step time of the plan that Meshwright chooses, over the best of three plans written by hand in plain JAX.

    python benchmarks/execution.py --models gpt mlp --rounds 3 --batch-scale 4

By hand: data parallel, FSDP and tensor parallel on all devices (`expert_plans`), each with stock `jax.jit` and
NamedShardings. All four train the same model, timed in alternation in one process. Prints one JSON object; beside
each plan of ours stand the seconds that the cost model predicted.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Sequence
from typing import Any

from side_by_side import FAMILIES, Training, alternate, ratio, record, step_seconds, tiny

# isort: split
import jax
from expert_plans import plans

from meshwright.plan import Plan
from meshwright.planning.plan_for import plan_for
from meshwright.runtime.step import PlannedStep

OURS = "meshwright"


def described(plan: Plan) -> dict[str, Any]:
    """What was chosen, and the seconds it was thought to take."""
    (stage,) = plan.stages
    return {
        "mesh": dict(stage.mesh),
        "inputs": {entry.name: str(entry.spec) for entry in stage.inputs},
        "parameters": dict(Counter(f"{p.use} stored as {p.storage}" for p in stage.parameters).most_common()),
        "collectives": {c.kind: {"count": c.count, "bytes": c.bytes} for c in stage.communication},
        "predicted_seconds": plan.predicted.step_seconds,
        "predicted_compute_seconds": stage.compute_seconds,
        "predicted_communication_seconds": stage.communication_seconds,
    }


def measure(family: str, *, batch_scale: int, rounds: int, round_seconds: float) -> dict[str, Any]:
    """One model's row."""
    target = tiny(family, batch_scale)
    planning = plan_for(target.step, (target.example_state, target.example_batch), cluster="local")
    ours = PlannedStep(planning.program, planning.plan, jax.devices())
    contenders = {OURS: _training(target, ours, *ours.program.in_tree.unflatten(ours.in_shardings))}
    for name, plan in plans(target, jax.devices()).items():
        contenders[name] = _training(target, plan.jitted(), plan.state, plan.batch)
    timings = alternate(contenders, rounds=rounds, round_seconds=round_seconds)
    seconds = step_seconds(timings)
    best = min((name for name in seconds if name != OURS), key=seconds.__getitem__)
    return {
        "model": target.name,
        "seconds": seconds,
        "best_by_hand": best,
        "ratio": ratio(timings, OURS, best),
        "plan": described(planning.plan),
    }


def _training(target: Any, step: Any, state: Any, batch: Any) -> Training:
    return Training(
        step,
        jax.jit(target.init, out_shardings=state)(jax.random.key(0)),
        jax.device_put(jax.jit(target.make_batch)(jax.random.key(1)), batch),
    )


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all models asked for and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--round-seconds", type=float, default=3.0, help="about, for each model")
    parser.add_argument("--batch-scale", type=int, default=4, help="times the small models' own batch")
    args = parser.parse_args(arguments)
    rows = []
    for family in args.models:
        rows.append(measure(family, batch_scale=args.batch_scale, rounds=args.rounds, round_seconds=args.round_seconds))
        print(json.dumps(rows[-1]), file=sys.stderr)
    what = "seconds of a training step by the plan Meshwright chooses, over the best of three plans by hand"
    print(json.dumps(record(what, vars(args), rows), indent=1))


if __name__ == "__main__":
    main()
