"""How close resharding plans come to the lower bound, how fast they are found, and what the published algorithms reach.

    python benchmarks/resharding.py --random 10000 --seed 0 --processes 2
    python benchmarks/resharding.py --planning
    python benchmarks/resharding.py --cases tests/data/resharding_cases.json

Every random plan is checked symbolically: its rounds bring every byte exactly once to every domain that lacks it, a
relay sends only what it has. Prints one JSON object: what was run, where, with which versions, and the results.
"""

from __future__ import annotations

import argparse
import json
import math
import platform
import random
import shlex
import sys
import time
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor
from dataclasses import dataclass
from fractions import Fraction
from multiprocessing import get_context
from pathlib import Path

import numpy as np
import scipy

from meshwright.resharding import (
    Host,
    Layout,
    Move,
    Network,
    Nic,
    ReshardPlan,
    check_transfers,
    grid_layout,
    plan_fluid_seconds,
    plan_reshard,
    uniform_network,
)
from meshwright.resharding.cases import read_cases, report
from meshwright.resharding.published import published_seconds

RATE = 1.25e9
SCALES = (0.5, 1, 1, 1, 1.5, 2, 4)
# Published algorithms are compared on cases of at most so many unit tasks, to keep the run short.
COMPARED_TASKS = 64


def random_case(seed: int) -> tuple[Network, Move]:
    """One move between meshes of 1 to 8 hosts of 1 to 8 devices; a third of them overlap, half have unequal NICs.

    Tensors are of rank 1 to 4 and 4 MiB to 1 GiB, so that whole elements do not decide; shards may be uneven.
    """
    chance = random.Random(seed)
    overlap, unequal = chance.random() < 1 / 3, chance.random() < 1 / 2
    hosts: list[list[int]] = []
    first = chance.randint(1, 8)

    def more_hosts(count: int, devices: int) -> None:
        for _ in range(count):
            begin = len(hosts) and hosts[-1][-1] + 1
            hosts.append(list(range(begin, begin + devices)))

    more_hosts(chance.randint(1, 8), first)
    source = [d for host in hosts for d in host]
    if overlap:
        more_hosts(chance.randint(0, 4), first)
        everything = [d for host in hosts for d in host]
        begin = chance.randrange(len(everything))
        target = everything[begin : begin + 8 * first]
    else:
        old = len(hosts)
        more_hosts(chance.randint(1, 8), chance.randint(1, 8))
        target = [d for host in hosts[old:] for d in host]
    if chance.random() < 1 / 8:
        chance.shuffle(target)
    rank = chance.randint(1, 4)
    elements = 2 ** chance.uniform(22, 28)
    weights = [chance.random() + 0.2 for _ in range(rank)]
    shape = tuple(max(round(elements ** (w / sum(weights))), 1) for w in weights)
    if chance.random() < 2 / 3:  # mostly round extents, as in models
        shape = tuple(-(-n // 64) * 64 for n in shape)
    move = Move(
        name=f"random {seed}",
        shape=shape,
        item_bytes=chance.choice((1, 2, 4)),
        source=_layout(chance, source, rank),
        destination=_layout(chance, target, rank),
    )
    nics = []
    for _ in hosts:
        scales = [chance.choice(SCALES) for _ in range(chance.choice((1, 1, 1, 2, 4)))] if unequal else [1]
        half = unequal and chance.random() < 1 / 8
        nics.append(tuple(Nic(send_rate=RATE * s / (2 if half else 1), receive_rate=RATE * s) for s in scales))
    core = RATE * chance.choice((1, 2, 3.5)) if chance.random() < 1 / 8 else None
    described = (Host(devices=tuple(d), nics=n) for d, n in zip(hosts, nics, strict=True))
    return Network(hosts=tuple(described), core_rate=core), move


def _layout(chance: random.Random, devices: list[int], rank: int) -> Layout:
    """A mesh of one to three axes over `devices`, and any spec over it."""
    shape, left = [], len(devices)
    while left > 1 and len(shape) < 2 and chance.random() < 2 / 3:
        shape.append(chance.choice([k for k in range(2, left + 1) if left % k == 0]))
        left //= shape[-1]
    shape.append(left)
    chance.shuffle(shape)
    axes = "abc"[: len(shape)]
    spec: list[list[str]] = [[] for _ in range(rank)]
    for axis in chance.sample(axes, len(axes)):
        if chance.random() < 0.7:
            spec[chance.randrange(rank)].append(axis)
    return grid_layout(devices, shape, axes, spec)


def meets_the_bound(plan: ReshardPlan) -> bool:
    """Whether theory promises the bound itself: no domain both sends and receives, no receiver sends slower."""
    senders = {s for task in plan.demand.classes for s in task.senders}
    receivers = {d for task in plan.demand.classes for d in task.receivers}
    network = plan.demand.network
    return not senders & receivers and all(network.send_rates[d] >= network.receive_rates[d] for d in receivers)


@dataclass(frozen=True, slots=True, kw_only=True)
class Outcome:
    """Of one random case.

    Args:
      number: its seed.
      planning_seconds: to plan it.
      promised: whether theory promises the bound itself.
      to_bound: ours to the lower bound; None where nothing has to cross.
      to_program: ours to the linear program with relays.
      exact: whether ours is the bound.
      sound: whether the bound is respected and no byte is moved more than needed.
      published: the best published algorithm's seconds to ours; None where they are not looked at.
    """

    number: int
    planning_seconds: float
    promised: bool = False
    to_bound: float | None = None
    to_program: float = 1.0
    exact: bool = False
    sound: bool = True
    published: Fraction | None = None


def run_case(number: int) -> Outcome:
    """Plan and check one random case."""
    network, move = random_case(number)
    start = time.perf_counter()
    plan = plan_reshard(network, [move])
    seconds = time.perf_counter() - start
    check_transfers(plan)
    bound, ours = plan.bound.seconds, plan.seconds
    sound = ours >= bound and plan.bytes_between_domains == plan.demand.needed_bytes
    if not bound:
        return Outcome(number=number, planning_seconds=seconds, sound=sound)
    compared = plan.demand.unit_tasks <= COMPARED_TASKS
    return Outcome(
        number=number,
        planning_seconds=seconds,
        promised=meets_the_bound(plan),
        to_bound=float(ours / bound),
        to_program=float(ours) / max(plan.relay_bound_seconds, float(bound)),
        exact=ours == bound,
        sound=sound,
        published=min(published_seconds(plan.demand).values()) / ours if compared else None,
    )


def run_random(count: int, seed: int, processes: int = 1) -> dict[str, object]:
    """Plan and check `count` random cases, in some processes."""
    found: list[Outcome] = []
    for outcome in _outcomes(range(seed, seed + count), processes):
        found.append(outcome)
        if len(found) % 500 == 0:
            print(f"{len(found)} cases", file=sys.stderr)
    moving = [(one, one.to_bound) for one in found if one.to_bound is not None]
    promised = [(one, ratio) for one, ratio in moving if one.promised]
    others = [(one, ratio) for one, ratio in moving if not one.promised]
    compared = [(one.number, one.published) for one in found if one.published is not None]
    late = [one.number for one, ratio in promised if ratio > 1 + 1 / 64]
    late += [one.number for one, _ in others if one.to_program > 1 + 1 / 64]
    return {
        "cases": count,
        "seed": seed,
        "counted": {
            "disjoint, full duplex": len(promised),
            "others": len(others),
            "at the bound exactly": sum(one.exact for one in found),
            "compared with published": len(compared),
        },
        "worst_ratio": {
            "disjoint, full duplex: to the bound": max((ratio for _, ratio in promised), default=1.0),
            "others: to the program with relays": max((one.to_program for one, _ in others), default=1.0),
            "others: to the bound": max((ratio for _, ratio in others), default=1.0),
        },
        "failures": sorted({*late, *(one.number for one in found if not one.sound)}),
        "more_than_a_64th_above_best_published": [number for number, gain in compared if gain < Fraction(64, 65)],
        "best_published_over_ours": _spread([float(gain) for _, gain in compared]),
        "planning_seconds": _spread([one.planning_seconds for one in found]),
    }


def _outcomes(seeds: range, processes: int) -> Iterator[Outcome]:
    """What becomes of cases, in their order."""
    if processes == 1:
        yield from map(run_case, seeds)
        return
    # A fork of a process with threads, as JAX has, may hang.
    with ProcessPoolExecutor(processes, mp_context=get_context("spawn")) as pool:
        yield from pool.map(run_case, seeds, chunksize=50)


def _spread(values: list[float]) -> dict[str, float]:
    if not values:
        return {}
    return {
        "mean": float(np.mean(values)),
        "median": float(np.median(values)),
        "p99": float(np.quantile(values, 0.99)),
        "most": max(values),
    }


def large_moves() -> Iterator[tuple[str, Network, list[Move]]]:
    """Moves of 4,096 and 32,768 unit tasks, kind and harsh, and a whole Llama-70B."""
    for devices in ((64, 64), (128, 256)):  # 4,096 and 32,768 unit tasks
        for per_host in (8, 1):
            for replicas in (1, 2):
                first, second = devices[0], devices[1] * replicas
                hosts = [range(i, i + per_host) for i in range(0, first + second, per_host)]
                source = grid_layout(range(first), (first,), ("a",), [("a",)])
                grid = (replicas, devices[1])
                destination = grid_layout(range(first, first + second), grid, ("r", "b"), [(), ("b",)])
                move = Move(name="t", shape=(8192, 8192), item_bytes=2, source=source, destination=destination)
                name = f"{first} devices to {replicas} x {devices[1]}, {per_host} a host"
                yield name, uniform_network(hosts, nic_rate=50e9), [move]
    hosts = [range(i, i + 8) for i in range(0, 96, 8)]
    yield "Llama-70B, FSDP 64 to TP 8 x 4", uniform_network(hosts, nic_rate=50e9), llama_70b()


def llama_70b() -> list[Move]:
    """Its 723 tensors, in bf16, from fully sharded over 64 devices to 4 replicas of tensor parallelism 8."""
    hidden, feed_forward, keys, words = 8192, 28672, 1024, 128256
    tensors = [("embedding", (words, hidden), 1), ("head", (hidden, words), 1), ("norm", (hidden,), None)]
    for layer in range(80):
        for name, shape, dim in (
            ("query", (hidden, hidden), 1),
            ("key", (hidden, keys), 1),
            ("value", (hidden, keys), 1),
            ("output", (hidden, hidden), 0),
            ("gate", (hidden, feed_forward), 1),
            ("up", (hidden, feed_forward), 1),
            ("down", (feed_forward, hidden), 0),
            ("attention_norm", (hidden,), None),
            ("feed_forward_norm", (hidden,), None),
        ):
            tensors.append((f"{layer}.{name}", shape, dim))
    source = grid_layout(range(64), (64,), ("fsdp",), [("fsdp",)])
    moves = []
    for name, shape, dim in tensors:
        spec = [("tp",) if d == dim else () for d in range(len(shape))]
        destination = grid_layout(range(64, 96), (4, 8), ("dp", "tp"), spec)
        moves.append(Move(name=name, shape=shape, item_bytes=2, source=source, destination=destination))
    return moves


def run_planning() -> list[dict[str, object]]:
    """How long it takes to plan large moves."""
    rows = []
    for name, network, moves in large_moves():
        start = time.perf_counter()
        plan = plan_reshard(network, moves)
        seconds = time.perf_counter() - start
        check_transfers(plan)
        rows.append(
            {
                "move": name,
                "tensors": len(moves),
                "unit_tasks": plan.demand.unit_tasks,
                "classes": len(plan.demand.classes),
                "planning_seconds": round(seconds, 4),
                "ours_to_bound": float(plan.seconds / plan.bound.seconds),
                "chunks": plan.chunks,
                "rounds": plan.rounds,
            }
        )
        print(json.dumps(rows[-1]), file=sys.stderr)
    return rows


def run_cases(path: Path) -> list[dict[str, object]]:
    """The cases of a file, with the fluid model beside the exclusive one."""
    rows = []
    for case in read_cases(path):
        row = report(case)
        row["ours_fluid_seconds"] = plan_fluid_seconds(plan_reshard(case.network, [case.move]))
        row["ours_to_bound"] = (
            row["ours_seconds"] / row["lower_bound_seconds"] if row["lower_bound_seconds"] else math.nan
        )
        rows.append(row)
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--random", type=int, default=0, metavar="N", help="random cases")
    parser.add_argument("--seed", type=int, default=0, help="of the first one")
    parser.add_argument("--processes", type=int, default=1, help="that share the random cases")
    parser.add_argument("--planning", action="store_true", help="planning times of large moves")
    parser.add_argument("--cases", type=Path, help="a file of cases")
    args = parser.parse_args()
    results: dict[str, object] = {}
    if args.random:
        results["random"] = run_random(args.random, args.seed, args.processes)
    if args.planning:
        results["planning"] = run_planning()
    if args.cases:
        results["cases"] = run_cases(args.cases)
    result = {
        "what": "resharding plans: seconds by their rounds, to the lower bound; seconds to find them",
        "where": {"machine": platform.machine(), "system": platform.system(), "processor": platform.processor()},
        "versions": {"python": platform.python_version(), "numpy": np.__version__, "scipy": scipy.__version__},
        "command": "python " + shlex.join(sys.argv),
        "results": results,
    }
    print(json.dumps(result, indent=1))


if __name__ == "__main__":
    main()
