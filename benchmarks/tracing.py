"""What a search saves of tracing: programs that are expected instead of traced, and derivatives made in one trace.

    python benchmarks/tracing.py [--targets gpt3-39b moe-70b wresnet-13b]

Of each target two numbers of microbatches are traced; every other one is traced and expected from these
(`program.expected`), and the two compared. And the program of one microbatch is traced with its derivative, by
`jax.vjp` and by `_jax.reverse.vjp`, in alternation. Nothing runs. Prints one JSON object; exit status 1 where something
expected is another program.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Callable, Sequence
from statistics import median
from typing import Any

from side_by_side import record

# isort: split
import jax

from meshwright._jax.jaxpr import evaluate
from meshwright._jax.reverse import vjp
from meshwright.planning.microbatch_counts import even_divisors
from meshwright.program.batch import batch_extents
from meshwright.program.expected import Expectations
from meshwright.program.trace import Program
from meshwright.program.traces import Traces
from meshwright.targets import load_target

_TIMES = 3


def timed(work: Callable[[], Any]) -> tuple[float, Any]:
    """Seconds that it takes, and what it makes."""
    begun = time.perf_counter()
    made = work()
    return time.perf_counter() - begun, made


def of_expecting(traces: Traces, args: Any) -> dict[str, Any]:
    """Seconds to trace and to expect a program, in all numbers of microbatches but two."""
    (extent,) = batch_extents(args, 0)
    counts = [count for count in even_divisors(extent, extent) if 1 < count <= extent // 2]
    first = traces.staged(traces.program(args))
    second = traces.staged(traces.program(args, microbatches=counts[len(counts) // 2]), first)
    traced, expected, same, skipped = [], [], True, []
    for count in counts:
        if count == second.microbatches:
            continue
        seconds, real = timed(lambda count=count: traces.staged(traces.program(args, microbatches=count), first))
        also, found = timed(lambda count=count, real=real: Expectations().of(first, second, count, lambda: real))
        if found is None:
            skipped.append(count)
            continue
        same = same and found == real
        traced.append(seconds)
        expected.append(also)
    return {
        "traced_seconds": median(traced), "expected_seconds": median(expected),
        "ratio": median(expected) / median(traced), "programs": len(traced), "same": same, "nothing_expected": skipped,
    }  # fmt: skip


def of_differentiating(program: Program) -> dict[str, Any]:
    """Seconds to trace a core with its derivative in two ways."""
    avals = [jax.ShapeDtypeStruct(aval.shape, aval.dtype) for aval in program.core.in_avals]
    others, parameters = avals[: program.num_consts], avals[program.num_consts :]

    def run(parameters: list[Any], others: list[Any]) -> tuple[list[Any], list[Any]]:
        outs = evaluate(program.core, *others, *parameters)
        return outs[:1], outs[1:]

    def by_jax(parameters: list[Any], others: list[Any]) -> Any:
        results, pull, _ = jax.vjp(lambda given: run(given, others), parameters, has_aux=True)
        return results, pull([jax.numpy.ones_like(one) for one in results])

    def in_one(parameters: list[Any], others: list[Any]) -> Any:
        results, pull, _ = vjp(lambda given: run(given, others), parameters)
        return results, pull([jax.numpy.ones_like(one) for one in results])

    ways = {"jax": by_jax, "in_one": in_one}
    seconds: dict[str, list[float]] = {name: [] for name in ways}
    for _ in range(_TIMES):
        for name, way in ways.items():
            jax.clear_caches()
            seconds[name].append(timed(lambda way=way: jax.make_jaxpr(way)(parameters, others))[0])
    jax_seconds, our_seconds = median(seconds["jax"]), median(seconds["in_one"])
    return {"jax_vjp_seconds": jax_seconds, "vjp_seconds": our_seconds, "ratio": our_seconds / jax_seconds}


def main(arguments: Sequence[str] | None = None) -> None:
    """Measure all targets asked for and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--targets", nargs="+", default=["gpt3-39b", "moe-70b", "wresnet-13b"])
    args = parser.parse_args(arguments)
    rows = []
    for name in args.targets:
        target = load_target(name)
        traces = Traces(target.step)
        expecting = of_expecting(traces, target.example_args)
        (extent,) = batch_extents(target.example_args, 0)
        middle = even_divisors(extent, extent)
        program = traces.program(target.example_args, microbatches=middle[len(middle) // 2])
        rows.append({"target": name, "expecting": expecting, "differentiating": of_differentiating(program)})
        print(json.dumps(rows[-1]), file=sys.stderr)
    what = "seconds to trace programs, to expect them, and to differentiate them in two ways"
    print(json.dumps(record(what, vars(args), rows), indent=1))
    sys.exit(not all(row["expecting"]["same"] for row in rows))


if __name__ == "__main__":
    main()
