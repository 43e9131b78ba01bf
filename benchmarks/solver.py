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
import time
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


def three_axes(blocks: int, *, states: int = 6, tightness: float | None, seed: int = 0) -> Problem:
    """A network with nested skips on a mesh of three axes: hundreds of choices a node, some alike to neighbours.

    A choice gives each axis one of `states` states, of which five can be told apart from outside (replicated, or
    sharded on one of four dims). Every block has a weight, which is all that takes memory; block i and the i-th last
    share a skip, and all blocks one conditioning value.

    Args:
        blocks: the number of blocks, of two operators and a weight each.
        states: states of each axis for an operator; a node has at most states**3 choices.
        tightness: where the memory limit lies between the least memory of all nodes (0) and that of their cheapest
            choices (1); `None` for no limit.
        seed: of the random numbers.
    """
    rng = np.random.default_rng(seed)
    costs: list[np.ndarray] = []
    memory: list[np.ndarray] = []
    seen: list[np.ndarray] = []  # of each node and choice, what each axis looks like from outside
    edges: dict[tuple[int, int], np.ndarray] = {}

    def node(number: int, *, weight: bool) -> int:
        choices = np.stack(np.meshgrid(*[np.arange(number)] * 3, indexing="ij"), axis=-1).reshape(-1, 3)
        outside = np.minimum(choices, 4)
        shards = 2.0 ** (outside > 0).sum(axis=1)
        seconds = rng.integers(0, 8, (3, number)).astype(float)
        work = rng.integers(4, 40)
        costs.append(
            (0.1 * work * shards if weight else work / shards) + seconds[np.arange(3), choices].sum(axis=1) / 4
        )
        memory.append(rng.integers(1, 9) * 1e6 / shards if weight else np.zeros(len(choices)))
        seen.append(outside)
        return len(costs) - 1

    def connect(u: int, v: int) -> None:
        before, after = seen[u][:, None, :], seen[v][None, :, :]
        gathered = ((before > 0) & (before != after)).sum(axis=2)
        shards = 2.0 ** (before > 0).sum(axis=2)
        table = rng.integers(1, 30) * gathered * (1 + gathered) / shards
        # both dims of a tensor on all axes at once, the other way round: no collective does that
        table[((before > 0) & (after > 0) & (before != after)).all(axis=2)] = np.inf
        edges[(min(u, v), max(u, v))] = table if u < v else table.T

    condition = node(3, weight=False)
    last, skips = condition, []
    for block in range(blocks):
        for operator in range(2):
            here = node(states if operator else states - 1, weight=False)
            connect(last, here)
            last = here
        connect(last, node(4, weight=True))
        if block % 3 == 0 and block:
            connect(condition, last)
        if block < blocks // 2:
            skips.append(last)
        elif skips and block > blocks // 2:
            connect(skips.pop(), last)
    limit = np.inf
    if tightness is not None:
        least = sum(float(m.min()) for m in memory)
        cheapest = sum(float(m[c.argmin()]) for m, c in zip(memory, costs, strict=True))
        limit = least + tightness * (cheapest - least)
    return Problem(costs=tuple(costs), edges=edges, memory=tuple(memory), memory_limit=limit)


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
    for blocks in (8, 40):
        for states in (5, 6):
            for tightness in (None, 0.3):
                config = {"blocks": blocks, "states": states, "tightness": tightness, "seed": 0}
                yield "three axes", config, three_axes(blocks, states=states, tightness=tightness)
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
        start = time.process_time()
        try:
            found = solve(problem, gap=args.gap, time_limit_seconds=args.time_limit)
            row |= {
                "seconds": round(found.seconds, 4),
                "processor_seconds": round(time.process_time() - start, 4),
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
