"""Timing programs against each other in one process, in turn, so that what else the machine does falls on all alike.

Used by the other benchmarks; it must be imported before JAX, whose devices it sets.
"""

from __future__ import annotations

import os

os.environ["XLA_FLAGS"] = (os.environ.get("XLA_FLAGS", "") + " --xla_force_host_platform_device_count=8").strip()
os.environ.setdefault("JAX_PLATFORMS", "cpu")

import platform
import shlex
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax

from meshwright import zoo

FAMILIES = ("gpt", "llama", "moe", "wresnet", "unet", "mlp", "bert")

# Steps run before any is timed: the first compiles, the second may still allocate.
_WARM_UP = 2


class Training:
    """A training step with the state it has reached.

    Args:
      step: `(state, batch) -> (state, metrics)`, donating the state.
      state: at the start, where the step wants it.
      batch: the same every time.
    """

    def __init__(self, step: Callable[[Any, Any], tuple[Any, Any]], state: Any, batch: Any) -> None:
        self._step = step
        self._state = state
        self._batch = batch

    def run(self) -> float:
        """Seconds of one step, until its results are there."""
        start = time.perf_counter()
        self._state, metrics = self._step(self._state, self._batch)
        jax.block_until_ready((self._state, metrics))
        return time.perf_counter() - start


def tiny(family: str, batch_scale: int) -> zoo.Target:
    """The small model of a family at `batch_scale` times its batch."""
    name = f"{family}-tiny"
    batch = jax.tree.leaves(zoo.build(name).example_batch)[0].shape[0]
    return zoo.build(name, global_batch=batch * batch_scale)


Timings = dict[str, list[list[float]]]


def alternate(contenders: Mapping[str, Training], *, rounds: int, round_seconds: float) -> Timings:
    """Time all contenders in turn, step by step.

    Args:
      contenders: by name.
      rounds: how often to start over.
      round_seconds: about how long one round runs, all contenders together.

    Returns:
      For each name, the seconds of each step of each round.
    """
    for training in contenders.values():
        for _ in range(_WARM_UP):
            training.run()
    timings: Timings = {name: [] for name in contenders}
    for _ in range(rounds):
        taken: dict[str, list[float]] = {name: [] for name in contenders}
        end = time.perf_counter() + round_seconds
        order = list(contenders)
        while time.perf_counter() < end or len(taken[order[0]]) < 3:
            for name in order:
                taken[name].append(contenders[name].run())
            # Nobody always runs right after the same neighbour's memory traffic.
            order.reverse()
        for name, seconds in taken.items():
            timings[name].append(seconds)
    return timings


def step_seconds(timings: Timings) -> dict[str, float]:
    """Seconds of a step: for each name, the median of the rounds' medians."""
    return {name: statistics.median(map(statistics.median, rounds)) for name, rounds in timings.items()}


def ratio(timings: Timings, ours: str, theirs: str) -> dict[str, float]:
    """Our seconds over theirs.

    Returns:
      median, lowest and highest of the rounds' quotients of medians; fastest: the quotient of the fastest steps of all,
      which other work on the machine disturbs least.
    """
    pairs = list(zip(timings[ours], timings[theirs], strict=True))
    quotients = [statistics.median(a) / statistics.median(b) for a, b in pairs]
    return {
        "median": round(statistics.median(quotients), 4),
        "lowest": round(min(quotients), 4),
        "highest": round(max(quotients), 4),
        "fastest": round(min(min(a) for a, _ in pairs) / min(min(b) for _, b in pairs), 4),
    }


def record(what: str, config: Mapping[str, Any], results: Sequence[Any]) -> dict[str, Any]:
    """What a benchmark prints: figures with all that is needed to repeat them."""
    return {
        "what": what,
        "where": {
            "machine": platform.machine(),
            "system": platform.system(),
            "cpus": len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count(),
            "devices": f"{len(jax.devices())} virtual {jax.devices()[0].platform}",
        },
        "versions": {"python": platform.python_version(), "jax": jax.__version__},
        "config": dict(config),
        "command": "python " + shlex.join(sys.argv),
        "results": list(results),
    }
