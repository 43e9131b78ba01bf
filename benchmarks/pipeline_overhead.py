"""What a pipeline of two processes reaches of what two cores could give.

    python benchmarks/pipeline_overhead.py --steps 60 --microbatches 16

A perceptron of equal blocks is trained in two stages by two processes of one core each, and by each of these processes
alone on its core, microbatches in a loop (the whole batch at once is slower; its time is reported). With B equal
microbatches two stages can at best be 2 B / (B + 1) times as fast as one: the bubble takes one microbatch. Reported is
the share of that which is reached, `efficiency`.

All take turns in one run: a step on core 0, one on core 1, one of the pipeline, one on core 0 and so on, so that each
step of the pipeline stands between two on either core. Where the cores differ the one-core step is that of the slower:
equal stages go at its pace, whoever runs them. `all_steps` are all of them. Cores of a virtual machine that share
theirs with neighbours go at one of several speeds, each for parts of a second and apart from the other, and two stages
in lockstep then wait for whichever is slow; so `steady_steps` are those where the four one-core steps around agree
within --agree, which says nothing about the pipeline's own time, and their median is what has to reach --least (the
exit status is 1 otherwise, 2 if fewer than five steps were steady: the machine has to be quieter, or --steps more).

Python's share is measured apart: the executor walks a step whose programs and transfers are replaced by their results.
`cpu_seconds` are those of process 0 in a step of the pipeline. Prints one JSON object.

Known limit: real-time priority (`chrt`) is no way to a quiet machine: the kernel gives it 95 % of a core, which slows
the one-core step, that never waits, and hardly the pipeline, that does.
"""

from __future__ import annotations

import argparse
import json
import os
import shlex
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

LEAST_EFFICIENCY = 0.85
LEAST_MICROBATCH_SECONDS = 0.020

# Steps run before any is timed: the first compiles, the second may still allocate.
_WARM_UP = 2

# Of fewer a median says little.
_LEAST_STEADY = 5


def options(arguments: Sequence[str] | None = None) -> argparse.Namespace:
    """What is asked for."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--steps", type=int, default=60, help="of each kind")
    parser.add_argument("--microbatches", type=int, default=16)
    parser.add_argument("--examples", type=int, default=192, help="of a microbatch")
    parser.add_argument("--width", type=int, default=768)
    parser.add_argument("--blocks", type=int, default=8)
    parser.add_argument("--schedule", default="eager_one_f_one_b")
    parser.add_argument("--transport", choices=("planned", "naive"), default="planned")
    parser.add_argument("--least", type=float, default=LEAST_EFFICIENCY)
    parser.add_argument("--agree", type=float, default=0.05, help="how far one-core steps around a steady one differ")
    parser.add_argument("--out", type=Path, help=argparse.SUPPRESS)
    return parser.parse_args(arguments)


def main() -> None:
    """Start the two processes, print what process 0 found, and say whether it is enough."""
    from meshwright.launch import run

    args = options()
    cores = sorted(os.sched_getaffinity(0))[:2]
    if len(cores) < 2:
        raise SystemExit("refused pipeline_overhead: got one core; needed two; where: sched_getaffinity; try taskset")
    with tempfile.TemporaryDirectory() as folder:
        out = Path(folder, "found.json")
        result = run(
            __file__, [*sys.argv[1:], "--out", str(out)], processes=2, devices_per_process=1, timeout_seconds=900,
            environment={"JAX_PLATFORMS": "cpu", "MESHWRIGHT_BENCHMARK_CORES": ",".join(map(str, cores))},
        )  # fmt: skip
        result.check()
        found = json.loads(out.read_text())
    print(json.dumps(found, indent=1))
    steady = found["results"]["efficiency"]["steady_steps"]
    if steady["count"] < _LEAST_STEADY:
        raise SystemExit(2)
    raise SystemExit(0 if steady["median"] >= args.least else 1)


def measure(args: argparse.Namespace) -> None:
    """In each of the two processes; process 0 writes what it found."""
    import jax
    import jax.numpy as jnp
    import numpy as np
    from jax.experimental.multihost_utils import sync_global_devices

    import meshwright as mw
    from meshwright.runtime.agree import exchange_texts
    from meshwright.runtime.pipeline.transport import ProcessTransport

    mw.initialize(timeout_seconds=120)

    def loss_of(weights: Any, x: Any) -> Any:
        # Scaled by a parameter, so that the first block computes the gradient of its input like the others.
        x = x * weights["scale"]
        for number, block in enumerate(weights["blocks"]):
            if number == args.blocks // 2:
                mw.layer_boundary()
            x = jax.nn.relu(x @ block)
        return jnp.mean(x * x)

    def step(weights: Any, x: Any) -> Any:
        loss, grads = mw.value_and_grad(loss_of)(weights, x)
        return jax.tree.map(lambda w, g: w - 1e-3 * g, weights, grads), loss

    def in_a_loop(weights: Any, x: Any) -> Any:
        """By hand, microbatch by microbatch."""

        def add(sums: Any, part: Any) -> Any:
            return jax.tree.map(jnp.add, sums, jax.value_and_grad(loss_of)(weights, part)), None

        zeros = (jnp.zeros(()), jax.tree.map(jnp.zeros_like, weights))
        (loss, grads), _ = jax.lax.scan(add, zeros, x.reshape(args.microbatches, -1, args.width))
        count = args.microbatches
        return jax.tree.map(lambda w, g: w - 1e-3 * g / count, weights, grads), loss / count

    generator = np.random.default_rng(0)
    scale = (2 / args.width) ** 0.5
    blocks = [
        generator.normal(0, scale, (args.width, args.width)).astype(np.float32) for _ in range(args.blocks)
    ]  # fmt: skip
    weights = {"scale": np.ones(args.width, np.float32), "blocks": blocks}
    x = generator.normal(size=(args.microbatches * args.examples, args.width)).astype(np.float32)

    pipeline = mw.parallelize(step, stages=2, microbatches=args.microbatches, schedule=args.schedule)
    here = jax.device_put(x, jax.local_devices()[0])
    alone = _trained(jax.jit(in_a_loop, donate_argnums=0), weights, here)
    at_once = _trained(jax.jit(step, donate_argnums=0), weights, here)
    both = _trained(pipeline, weights, x)
    planned = pipeline.planned(weights, x)
    if args.transport == "naive":
        planned._executor._transport = ProcessTransport()
    mine = jax.process_index()

    def one_after_the_other(run: Callable[[], tuple[float, float]]) -> float:
        for process in range(2):
            if process == mine:
                seconds, _ = run()
            sync_global_devices("one core after the other")
        return seconds

    for run in (both, alone, at_once):
        for _ in range(_WARM_UP):
            run()
    losses = [run()[1] for run in (both, alone, at_once)]
    whole_batch = min(one_after_the_other(at_once) for _ in range(3))
    one_core, pipelined, busy = [one_after_the_other(alone)], [], []
    for _ in range(args.steps):
        begun = time.process_time()
        pipelined.append(both()[0])
        busy.append(time.process_time() - begun)
        one_core.append(one_after_the_other(alone))
    python = {**_python_seconds(planned, weights, x), "seconds_per_small_transfer": _transfer_seconds(planned)}
    said = exchange_texts(json.dumps(one_core), among=range(2), about="one-core steps", timeout_seconds=60)
    if mine:
        return
    if not max(losses) - min(losses) <= 1e-4 * abs(losses[0]):
        raise SystemExit(f"the losses differ: {losses}")
    one_core = [json.loads(said[process]) for process in range(2)]
    microbatch = min(map(min, one_core)) / args.microbatches
    if microbatch < LEAST_MICROBATCH_SECONDS:
        raise SystemExit(f"a microbatch of {microbatch:.4f} s is too short; try more --examples")
    best = 2 * args.microbatches / (args.microbatches + 1)
    all_steps, steady = [], []
    for number, seconds in enumerate(pipelined):
        around = [of_core[number : number + 2] for of_core in one_core]
        all_steps.append(max(map(statistics.mean, around)) / seconds / best)
        if max(map(max, around)) <= (1 + args.agree) * min(map(min, around)):
            steady.append(all_steps[-1])
    results = {
        "efficiency": {"steady_steps": _spread(steady), "all_steps": _spread(all_steps)},
        "best_possible_speed_up": round(best, 4),
        "step_seconds": _spread(pipelined),
        "one_core_seconds": list(map(_spread, one_core)),
        "whole_batch_seconds": round(whole_batch, 4),
        "cpu_seconds": _spread(busy),
        "microbatch_seconds": round(microbatch, 5),
        "stages": [list(stage.equations or ()) for stage in planned.plan.stages],
        **python,
    }  # fmt: skip
    record = {
        "what": "speed-up of two stages in two processes of one core each over one core, of the best possible",
        "where": {"cores": os.environ["MESHWRIGHT_BENCHMARK_CORES"], "system": os.uname().sysname},
        "versions": {"python": sys.version.split()[0], "jax": jax.__version__},
        "config": {name: value for name, value in vars(args).items() if name != "out"},
        "command": "python " + shlex.join(sys.argv[: sys.argv.index("--out")]),
        "results": results,
    }
    args.out.write_text(json.dumps(record))


def _spread(found: Sequence[float]) -> dict[str, float]:
    """How many there are, the least, the middle and the most."""
    if not found:
        return {"count": 0}
    named = {"least": min(found), "median": statistics.median(found), "most": max(found)}
    return {"count": len(found), **{name: round(value, 4) for name, value in named.items()}}


def _trained(step: Callable[..., Any], weights: Any, x: Any) -> Callable[[], tuple[float, float]]:
    """Runs a step on the state it has reached; returns its seconds and its loss."""
    import jax

    state = jax.tree.map(lambda w: w.copy(), weights)

    def run() -> tuple[float, float]:
        nonlocal state
        start = time.perf_counter()
        state, loss = step(state, x)
        loss = float(loss)
        for leaf in jax.tree.leaves(state):
            leaf.block_until_ready()
        return time.perf_counter() - start, loss

    return run


def _python_seconds(planned: Any, weights: Any, x: Any) -> dict[str, Any]:
    """What the executor itself takes for an instruction, its programs and transfers answered from memory."""
    executor = planned._executor
    answers: dict[Any, Any] = {}

    def remembered(key: Any, call: Callable[..., Any]) -> Callable[..., Any]:
        def answer(*args: Any) -> Any:
            if key not in answers:
                answers[key] = call(*args)
            return answers[key]

        return answer

    class Transport:
        """Answers with what was moved in the same layout before."""

        def __init__(self, real: Any) -> None:
            self._real = real

        def move(self, values: Any, targets: Any, about: Any) -> Any:
            key = (*((value.shape, value.dtype) for value in values), *targets)
            if key not in answers:
                answers[key] = self._real.move(values, targets, about)
            return answers[key]

    for stage, programs in enumerate(executor._programs):
        for work, program in programs.items():
            programs[work] = replace(program, run=remembered((stage, work), program.run))
    executor._transport = Transport(executor._transport)
    import jax

    flat = jax.tree.leaves((weights, x))

    def walk() -> float:
        memories = [planned._memory(number, flat) for number in range(len(planned.stages))]
        start = time.perf_counter()
        executor.run(memories)
        return time.perf_counter() - start

    walk()
    count = len(executor._order)
    seconds = min(walk() for _ in range(5))
    return {"instructions": count, "python_seconds_per_instruction": round(seconds / count, 8)}


def _transfer_seconds(planned: Any) -> dict[str, float]:
    """Of four kilobytes from the first stage to the second, one after the other, by each transport."""
    import jax
    import numpy as np
    from jax.sharding import NamedSharding, PartitionSpec

    from meshwright.runtime.pipeline.transport import PlannedTransport, ProcessTransport
    from meshwright.runtime.placing import ghost, put

    source, target = (NamedSharding(stage.mesh, PartitionSpec()) for stage in planned.stages)
    small = np.ones((32, 32), np.float32)
    mine = planned.stages[0].is_mine
    value = put(small, source) if mine else ghost(small.shape, small.dtype, source)
    found: dict[str, list[float]] = {"planned": [], "naive": []}
    transports = {"planned": PlannedTransport(), "naive": ProcessTransport()}
    for _ in range(6):
        for name, transport in transports.items():
            begun = time.perf_counter()
            for _ in range(200):
                jax.block_until_ready(transport.move([value], [target]))
            found[name].append((time.perf_counter() - begun) / 200)
    return {name: round(min(seconds), 8) for name, seconds in found.items()}


if __name__ == "__main__":
    if "--out" in sys.argv:
        core = int(os.environ["MESHWRIGHT_BENCHMARK_CORES"].split(",")[int(os.environ["MESHWRIGHT_PROCESS_ID"])])
        # Before JAX is imported: XLA makes as many threads as the process may use cores.
        os.sched_setaffinity(0, {core})
        measure(options())
    else:
        main()
