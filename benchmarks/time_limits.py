"""Whether planning keeps its time limit, on every path to a plan, and says what it did not look at.

    python benchmarks/time_limits.py
    python benchmarks/time_limits.py --limits 1 --only 'gpt3-1.3b/*'

A row is a program, a path (one stage, any number, four, a preset, each search method, hosts of two kinds, little
memory) and a limit in seconds, each in a process of its own. What planning takes beyond tracing may be the limit, a
tenth of it, and what it takes to trace the step once (a plan is traced to be written out). An answer that took the
limit has to say what is missing: by a line in what was considered, or by a gap that is not small. A row that fails is
run once more, since other work on the machine takes time as well; the second run counts.

Prints one JSON object; exit status 1 if a row fails twice, or a command does.
"""

from __future__ import annotations

import argparse
import json
import subprocess
import sys
import time
from fnmatch import fnmatchcase
from itertools import product
from math import isfinite
from typing import Any

import planning_time

LIMITS = (1.0, 3.0, 10.0)

# Options of `plan_for` by path; without a cluster on eight V100.
PATHS: dict[str, dict[str, Any]] = {
    "stages=1": {"stages": 1},
    "any stages": {"stages": None},
    "stages=4": {"stages": 4},
    "preset": {"preset": "megatron(tp=2, pp=2)"},
    "two kinds": {"stages": None, "cluster": "p3.16xlarge:1+dgx-a100-40:1"},
    "little memory": {"stages": None, "tight": True},
    "little memory, stages=1": {"stages": 1, "tight": True},
    **{
        f"method={name}": {"stages": None, "method": name}
        for name in (
            "exhaustive", "bfs", "recursive", "dynamic_programming", "ilp", "mcmc", "mcts", "reinforce"
        )
    },
}  # fmt: skip

# Programs, and what a device may use where memory is to bind: about 1.3 times what their state takes on eight devices.
PROGRAMS = {"gpt-tiny": 4e6, "gpt3-1.3b": 5e9, "loop": 3e9}

# What may be taken beyond the limit, as a share of it; and gaps up to this one say that nothing is missing.
SHARE, SMALL_GAP = 0.1, 0.01

# A plan is cut short that takes this share of the limit.
CUT_SHORT = 0.9


def loop() -> tuple[Any, tuple[Any, ...]]:
    """A program that is no reference model: 24 layers of two kinds, one wide in every six, in a Python loop."""
    import jax
    import jax.numpy as jnp

    import meshwright as mw

    width, sequence, batch, heads = 1536, 512, 64, 12
    inner = [12_288 if number % 6 == 5 else 4_096 for number in range(24)]

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    def attended(layer: Any, x: jax.Array) -> jax.Array:
        q, k, v = (jnp.einsum("btd,dhk->bthk", x, layer[name]) for name in "qkv")
        scores = jax.nn.softmax(jnp.einsum("bthk,bshk->bhts", q, k), axis=-1)
        return jnp.einsum("bhts,bshk,hkd->btd", scores, v, layer["out"])

    def step(state: Any, data: Any) -> tuple[Any, Any]:
        params, moments = state

        def loss(p: Any) -> jax.Array:
            x = p["embedding"][data["inputs"]]
            for layer in p["layers"]:
                x = x + attended(layer, x / (1 + jnp.mean(x * x, axis=-1, keepdims=True)))
                x = x + jax.nn.gelu(x @ layer["up"]) @ layer["down"]
            logits = x @ p["embedding"].T
            chosen = jnp.take_along_axis(jax.nn.log_softmax(logits), data["targets"][..., None], axis=-1)
            return -jnp.mean(chosen)

        value, gradients = mw.value_and_grad(loss)(params)
        moments = jax.tree.map(lambda m, g: 0.9 * m + g, moments, gradients)
        return (jax.tree.map(lambda p, m: p - 1e-3 * m, params, moments), moments), value

    size = width // heads
    layers = [
        {**{name: array(width, heads, size) for name in "qkv"}, "out": array(heads, size, width),
         "up": array(width, wide), "down": array(wide, width)}
        for wide in inner
    ]  # fmt: skip
    params = {"embedding": array(32_000, width), "layers": layers}
    tokens = jax.ShapeDtypeStruct((batch, sequence), jnp.int32)
    return step, ((params, params), {"inputs": tokens, "targets": tokens})


def built(program: str) -> tuple[Any, tuple[Any, ...]]:
    """A step and its arguments; a new function, of which JAX has no trace yet."""
    from meshwright import zoo

    if program == "loop":
        return loop()
    target = zoo.build(program)
    return target.step, (target.example_state, target.example_batch)


def measured(program: str, path: str, limit: float) -> dict[str, Any]:
    """A row, in this process."""
    from meshwright.errors import PlanError
    from meshwright.planning.plan_for import plan_without_advice
    from meshwright.planning.request import PlanOptions
    from meshwright.program.traces import traces_of

    wanted = {"cluster": "p3.16xlarge:1", **PATHS[path]}
    if wanted.pop("tight", False):
        wanted["memory_per_device"] = PROGRAMS[program]
    step, args = built(program)
    once = traces_of(step)
    once.staged(once.program(args))
    step, args = built(program)
    traces = traces_of(step)
    begun, cpu = time.perf_counter(), time.process_time()
    row: dict[str, Any] = {"trace_once": once.seconds}
    try:
        found = plan_without_advice(traces, args, PlanOptions(time_limit_seconds=limit, **wanted))
    except PlanError as error:
        row |= {"refused": str(error)[:200], "said": True}
    else:
        assert found.plan.predicted is not None
        gap = found.plan.predicted.optimality_gap
        said = [line for line in map(str, found.considered) if "out of time" in line or "not searched" in line]
        row |= {
            "step": found.step_seconds, "gap": gap if isfinite(gap) else None, "stages": len(found.plan.stages),
            "said": bool(said) or not gap <= SMALL_GAP, "words": said[:3],
        }  # fmt: skip
    row["traced"], row["cpu"] = traces.seconds, time.process_time() - cpu
    row["searched"] = time.perf_counter() - begun - traces.seconds
    row["allowed"] = (1 + SHARE) * limit + once.seconds
    row["cut_short"] = row["searched"] >= CUT_SHORT * limit
    return {key: round(value, 4) if isinstance(value, float) and key != "step" else value for key, value in row.items()}


def fault_of(row: dict[str, Any]) -> str:
    """What is wrong with a row; "" for nothing."""
    if "failed" in row:
        return row["failed"]
    if row["searched"] > row["allowed"]:
        return f"{row['searched'] - row['allowed']:.2f} s over what is allowed"
    return "" if row["said"] or not row["cut_short"] else "does not say what was not looked at"


def in_a_process(program: str, path: str, limit: float) -> dict[str, Any]:
    """A row, in a process of its own."""
    command = [sys.executable, __file__, "--one", json.dumps([program, path, limit])]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return json.loads(done.stdout) if done.returncode == 0 else {"failed": done.stderr.strip()[-400:]}


def main() -> int:
    """Plan all rows."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--only", default="*", help="patterns of PROGRAM/PATH, separated by semicolons")
    parser.add_argument("--limits", default=",".join(map(str, LIMITS)), help="seconds, separated by commas")
    parser.add_argument("--one", help=argparse.SUPPRESS)
    given = parser.parse_args()
    if given.one is not None:
        print(json.dumps(measured(*json.loads(given.one))))
        return 0
    rows: dict[str, Any] = {}
    for limit, program, path in product(map(float, given.limits.split(",")), PROGRAMS, PATHS):
        if not any(fnmatchcase(f"{program}/{path}", pattern) for pattern in given.only.split(";")):
            continue
        row = in_a_process(program, path, limit)
        if fault_of(row):
            again = in_a_process(program, path, limit)
            row = {**again, "first": {key: row.get(key) for key in ("searched", "allowed", "cpu", "failed")}}
        name = f"{program}/{path}/{limit:g}"
        rows[name] = {**row, "fault": fault_of(row)}
        print(f"{name}: {json.dumps(rows[name])}", file=sys.stderr, flush=True)
    faults = {name: row["fault"] for name, row in rows.items() if row["fault"]}
    print(json.dumps({"machine": planning_time.machine(), "faults": faults, "rows": rows}, indent=1))
    return 1 if faults else 0


if __name__ == "__main__":
    sys.exit(main())
