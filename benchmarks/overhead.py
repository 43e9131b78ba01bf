"""Step time of a plan that Meshwright runs, over that of the same shardings given to `jax.jit` by hand.

    python benchmarks/overhead.py --models gpt mlp --rounds 5 --batch-scale 4

The plan is found by Meshwright. Ours runs it by its own partitioner; by hand, the plain step is jitted with the layouts
that the plan gives the state and the batch, and JAX's automatic partitioner does the rest. Both start from equal states
and are timed in alternation in one process. Prints one JSON object.
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from typing import Any

from side_by_side import FAMILIES, Training, alternate, ratio, record, step_seconds, tiny

# isort: split
import jax

from meshwright.planning.plan_for import plan_for
from meshwright.runtime.step import PlannedStep


def measure(family: str, *, batch_scale: int, rounds: int, round_seconds: float) -> dict[str, Any]:
    """One model's row."""
    target = tiny(family, batch_scale)
    planning = plan_for(target.step, (target.example_state, target.example_batch), cluster="local")
    ours = PlannedStep(planning.program, planning.plan, jax.devices())
    state_in, batch_in = ours.program.in_tree.unflatten(ours.in_shardings)
    by_hand = jax.jit(
        target.step,
        in_shardings=(state_in, batch_in),
        out_shardings=ours.program.out_tree.unflatten(ours.out_shardings),
        donate_argnums=0,
    )
    make_state = jax.jit(target.init, out_shardings=state_in)
    batch = jax.device_put(jax.jit(target.make_batch)(jax.random.key(1)), batch_in)
    contenders = {
        "ours": Training(ours, make_state(jax.random.key(0)), batch),
        "by hand": Training(by_hand, make_state(jax.random.key(0)), batch),
    }
    timings = alternate(contenders, rounds=rounds, round_seconds=round_seconds)
    seconds = step_seconds(timings)
    return {
        "model": target.name,
        "mesh": dict(planning.plan.stages[0].mesh),
        "ours_seconds": seconds["ours"],
        "by_hand_seconds": seconds["by hand"],
        "ratio": ratio(timings, "ours", "by hand"),
    }


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all models asked for and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--models", nargs="+", choices=FAMILIES, default=list(FAMILIES))
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--round-seconds", type=float, default=2.0, help="about, for each model")
    parser.add_argument("--batch-scale", type=int, default=4, help="times the small models' own batch")
    args = parser.parse_args(arguments)
    rows = []
    for family in args.models:
        rows.append(measure(family, batch_scale=args.batch_scale, rounds=args.rounds, round_seconds=args.round_seconds))
        print(json.dumps(rows[-1]), file=sys.stderr)
    what = "seconds of a training step by Meshwright's plan, over the same shardings by hand with jax.jit"
    print(json.dumps(record(what, vars(args), rows), indent=1))


if __name__ == "__main__":
    main()
