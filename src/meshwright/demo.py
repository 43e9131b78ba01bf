"""A small GPT trained twice on bytes of the Python standard library's own sources: on all local devices, and on one.

The plan is explained first, and the losses of both runs stand side by side at the end. As a pipeline, the devices are
four stages, and what they do in a step is shown as the simulator predicts it.

Both runs start from the same state and see the same batches. Virtual devices share the machine's cores, so the parallel
run is not expected to be the faster one: what it shows is that the plan computes the same.
"""

from __future__ import annotations

import statistics
import sysconfig
import time
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import jax
import numpy as np
from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

from .errors import PlanError
from .planning.plan_for import plan_for
from .report.explain import explain_plan
from .report.table import format_count, format_ratio, format_seconds
from .report.timeline import timeline_text
from .runtime.executable import executable
from .simulate import simulate_plan
from .zoo import gpt

# Final losses further apart than this, relatively, mean that the plan computes something else.
TOLERANCE = 1e-3

_CONFIG = gpt.GPTConfig(
    name="gpt-demo", hidden=128, layers=4, heads=8, vocabulary=256, sequence=128, global_batch=16, dtype="float32"
)
# Of the pipeline. More microbatches would make the bubble smaller, and the chart too narrow to read.
_PIPELINE: dict[str, Any] = {"stages": 4, "microbatches": 8}
_CHART_COLUMNS = 76
# As much text as a run of any length needs.
_CORPUS_BYTES = 2_000_000


@dataclass(frozen=True, slots=True, kw_only=True)
class Training:
    """One run: the loss of each step in nats a byte, and the median time of a step after the first."""

    losses: tuple[float, ...]
    step_seconds: float


def run_demo(*, steps: int, pipeline: bool = False) -> bool:
    """Plan, train on all devices, train on one; print both, and whether the final losses agree.

    Args:
      steps: training steps of each run, at least 1.
      pipeline: whether the devices are to be stages.

    Raises:
      PlanError: if no source of the standard library can be read, or no plan fits.
    """
    console = Console(highlight=False)
    target = gpt.build(_CONFIG)
    corpus = standard_library_bytes(_CORPUS_BYTES)
    console.print(
        f"A GPT of {format_count(target.parameters)} parameters, {_CONFIG.layers} layers, on bytes of the Python "
        f"standard library; {steps} steps of {_CONFIG.global_batch} x {_CONFIG.sequence} bytes\n",
        soft_wrap=True,
    )
    with console.status("planning"):
        wanted = _PIPELINE if pipeline else {}
        planning = plan_for(target.step, (target.example_state, target.example_batch), **wanted)
    plan = planning.plan
    explained = explain_plan(
        plan, considered=planning.considered, alternatives=planning.alternatives, width=console.width
    )
    console.print(explained, markup=False, soft_wrap=True)
    console.print(f"\nPlanned in {format_seconds(planning.seconds)}\n")
    if pipeline:
        text = timeline_text(simulate_plan(plan), width=_CHART_COLUMNS)
        console.print(f"A step, as simulated:\n\n{text}\n", markup=False, soft_wrap=True)

    planned = executable(planning.program, plan, jax.devices())
    state = planned.create(target.init, jax.random.key(0))
    parallel = _train(planned, state, corpus, steps, f"{plan.num_devices} devices", console)
    # The state is donated in both, so that both hold one copy of it.
    state = jax.jit(target.init)(jax.random.key(0))
    alone = _train(jax.jit(target.step, donate_argnums=0), state, corpus, steps, "1 device", console)

    ours, theirs = parallel.losses[-1], alone.losses[-1]
    difference = abs(ours - theirs) / abs(theirs)
    agree = difference <= TOLERANCE
    console.print(f"\nloss after {steps} steps (the first step's was {alone.losses[0]:.4f}):")
    console.print(f"  {plan.num_devices} devices  {ours:.6f}\n  1 device   {theirs:.6f}")
    console.print(
        f"  relative difference {difference:.1e}: {'they agree' if agree else 'THEY DISAGREE'} "
        f"(at most {TOLERANCE:.0e} is allowed)"
    )
    if steps > 1:
        console.print(_times(parallel, alone, plan.num_devices))
    return agree


def standard_library_bytes(limit: int) -> np.ndarray:
    """The first `limit` bytes of the standard library's top-level modules in the order of their names, as uint8.

    Raises:
      PlanError: if there are too few to cut a sequence from.
    """
    folder = Path(sysconfig.get_path("stdlib"))
    text = bytearray()
    for path in sorted(folder.glob("*.py")):
        text += path.read_bytes()
        if len(text) >= limit:
            break
    if len(text) <= _CONFIG.sequence:
        raise PlanError(
            refused="the demo", got=f"{len(text)} bytes of Python sources", needed=f"more than {_CONFIG.sequence}",
            where=str(folder), try_="a Python installed with its standard library's sources",
        )  # fmt: skip
    return np.frombuffer(bytes(text[:limit]), dtype=np.uint8)


def batches(corpus: np.ndarray, steps: int) -> Iterator[dict[str, np.ndarray]]:
    """The same random pieces of `corpus` (bytes,) on every call: `tokens` and `labels`, int32 (batch, sequence)."""
    generator = np.random.default_rng(0)
    length = _CONFIG.sequence + 1
    for _ in range(steps):
        starts = generator.integers(0, len(corpus) - length + 1, _CONFIG.global_batch)
        pieces = np.stack([corpus[start : start + length] for start in starts]).astype(np.int32)
        yield {"tokens": pieces[:, :-1], "labels": pieces[:, 1:]}


def _train(
    step: Callable[..., Any], state: Any, corpus: np.ndarray, steps: int, name: str, console: Console
) -> Training:
    losses, seconds = [], []
    tokens = _CONFIG.global_batch * _CONFIG.sequence
    columns = (
        TextColumn(f"{name:>9}"), BarColumn(), MofNCompleteColumn(), TextColumn("{task.description}"),
        TimeElapsedColumn(),
    )  # fmt: skip
    with Progress(*columns, console=console) as progress:
        task = progress.add_task("compiling", total=steps)
        for batch in batches(corpus, steps):
            begun = time.perf_counter()
            state, metrics = step(state, batch)
            losses.append(float(metrics["loss"]))
            seconds.append(time.perf_counter() - begun)
            rate = f"{format_count(tokens / seconds[-1])} tokens/s" if len(seconds) > 1 else "compiled"
            progress.update(task, advance=1, description=f"loss {losses[-1]:.4f}  {rate}")
    return Training(losses=tuple(losses), step_seconds=statistics.median(seconds[1:] or seconds))


def _times(parallel: Training, alone: Training, num_devices: int) -> str:
    ratio = format_ratio(parallel.step_seconds / alone.step_seconds)
    said = (
        f"\nstep time: {format_seconds(parallel.step_seconds)} on {num_devices} devices, "
        f"{format_seconds(alone.step_seconds)} on one: {ratio} as long"
    )
    if jax.default_backend() == "cpu":
        said += "\n(virtual devices share the cores of one machine: no speed-up is to be expected)"
    return said
