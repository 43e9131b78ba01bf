"""How long `meshwright.solve.solve` takes, and what gap it proves, on graphs shaped like training steps.

    python benchmarks/solver.py --nodes 100 1000 --choices 6 12 --gap 0 --time-limit 60

Prints one JSON object: what was run, where, with which versions, and one entry per problem.
"""

from __future__ import annotations

import argparse
import json
import platform
import shlex
import sys
from collections.abc import Iterator

import numpy as np
import scipy

from meshwright.solve import Problem, Unsolved, solve


def chain_of_layers(nodes: int, choices: int, *, tightness: float | None, same: bool = False, seed: int = 0) -> Problem:
    """A chain of layers with residual skip edges, one weight on every other operator, and memory that trades with time.

    Args:
        nodes: about how many nodes.
        choices: the number of choices of each node.
        tightness: where the memory limit lies between the least memory of all nodes (0) and that of their cheapest
            choices (1); `None` for no limit.
        same: whether all layers have the same numbers, as in a real network; otherwise they are drawn independently.
        seed: of the random numbers.
    """
    rng = np.random.default_rng(seed)
    per_layer = 12  # 8 operators in a chain, 4 weights beside them
    layers = max(nodes // per_layer, 1)
    costs: list[np.ndarray] = []
    memory: list[np.ndarray] = []
    edges: dict[tuple[int, int], np.ndarray] = {}

    def reshard(layer: np.random.Generator) -> np.ndarray:
        table = layer.random((choices, choices)) * 4
        table[np.arange(choices), np.arange(choices)] = 0.0
        return np.where(layer.random(table.shape) < 0.05, np.inf, table) + 0.0

    before, residual = -1, -1
    for index in range(layers):
        layer = np.random.default_rng(seed) if same else rng
        for operator in range(8):
            node = len(costs)
            saving = layer.random(choices)
            costs.append(np.round(5 * saving + layer.random(choices), 6))
            memory.append(np.round((1 - saving + 0.3 * layer.random(choices)) * 1e8))
            if operator % 2:
                weight = len(costs)
                shards = 2.0 ** layer.integers(0, 4, choices)
                costs.append(np.round(layer.random(choices) + np.log2(shards) * 0.7, 6))
                memory.append(np.round(8e8 / shards))
                edges[(node, weight)] = reshard(layer)
            if before >= 0:
                edges[(before, node)] = reshard(layer)
            if operator in (3, 7):
                if residual >= 0:
                    edges[(residual, node)] = reshard(layer)
                residual = node
            before = node
        if index and index % (layers // 2 or 1) == 0:
            edges[(0, before)] = reshard(layer)  # a long skip, as from an embedding shared with the output
    limit = np.inf
    if tightness is not None:
        least = sum(float(m.min()) for m in memory)
        cheapest = sum(float(m[c.argmin()]) for m, c in zip(memory, costs, strict=True))
        limit = least + tightness * (cheapest - least)
    return Problem(costs=tuple(costs), edges=edges, memory=tuple(memory), memory_limit=limit)


def grid(side: int, choices: int, *, seed: int = 0) -> Problem:
    """A square grid: treewidth `side`, so soon too wide for elimination. No memory limit."""
    rng = np.random.default_rng(seed)
    edges = {}
    for v in range(side * side):
        for u in [v + 1] * (v % side < side - 1) + [v + side] * (v < side * (side - 1)):
            edges[(v, u)] = rng.random((choices, choices))
    return Problem(costs=tuple(rng.random(choices) for _ in range(side * side)), edges=edges)


def problems(nodes: list[int], choices: list[int]) -> Iterator[tuple[str, dict[str, object], Problem]]:
    """Every problem to run: its kind, its configuration, itself."""
    for n in nodes:
        for k in choices:
            for tightness in (None, 0.3, 0.7):
                for same in (False, True):
                    config: dict[str, object] = {
                        "nodes": n,
                        "choices": k,
                        "tightness": tightness,
                        "same": same,
                        "seed": 0,
                    }
                    yield "chain of layers", config, chain_of_layers(n, k, tightness=tightness, same=same)
    yield "grid", {"side": 12, "choices": 6, "seed": 0}, grid(12, 6)


def main() -> None:
    """Run all problems and print the result."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--nodes", type=int, nargs="+", default=[100, 1000])
    parser.add_argument("--choices", type=int, nargs="+", default=[6, 12])
    parser.add_argument("--gap", type=float, default=0.0)
    parser.add_argument("--time-limit", type=float, default=60.0, help="seconds, for each problem")
    args = parser.parse_args()
    rows = []
    for kind, config, problem in problems(args.nodes, args.choices):
        row: dict[str, object] = {"problem": kind, **config, "edges": len(problem.edges)}
        try:
            found = solve(problem, gap=args.gap, time_limit_seconds=args.time_limit)
            row |= {
                "seconds": round(found.seconds, 4),
                "method": found.method,
                "objective_seconds": found.objective,
                "gap": found.gap,
                "proven": found.proven,
            }
        except Unsolved as error:
            row |= {"unsolved": str(error)}
        rows.append(row)
        print(json.dumps(row), file=sys.stderr)
    result = {
        "what": "seconds to solve one assignment problem",
        "where": {"machine": platform.machine(), "system": platform.system(), "processor": platform.processor()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "scipy": scipy.__version__},
        "command": "python " + shlex.join(sys.argv),
        "results": rows,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
