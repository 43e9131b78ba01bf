"""Plans of one stage: the best of all numbers of microbatches, whatever memory there is."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshwright import zoo
from meshwright.cluster import load_cluster
from meshwright.errors import MemoryExceeded, PlanError
from meshwright.plan import Memory, Plan
from meshwright.planning import refine
from meshwright.planning.plan_for import plan_for
from meshwright.planning.request import Planning
from meshwright.program.traces import traces_of
from meshwright.search.intra.limited import LimitedProblem
from meshwright.search.stages.reserve import MissedMemory
from meshwright.solve import Unsolved

CLUSTER = load_cluster("p3.16xlarge:1")


def planned(target: Any, **options: Any) -> Planning:
    return plan_for(target.step, (target.example_state, target.example_batch), cluster=CLUSTER, **options)


def peak(planning: Planning) -> float:
    return planning.plan.stages[0].memory.total


@cache
def traced(name: str) -> tuple[Any, float]:
    """A target with a memory of its traces, and the bytes that its fastest plan holds."""
    target = zoo.mlp(width=512, layers=3, batch=512) if name == "mlp" else zoo.registry.build("gpt-tiny")
    target = replace(target, step=traces_of(target.step))
    return target, peak(planned(target))


@pytest.mark.parametrize(
    ("share", "name"),
    [
        (0.4, "mlp"),
        *(pytest.param(share, "mlp", marks=pytest.mark.slow) for share in (0.9, 0.6)),
        *(pytest.param(share, "gpt", marks=pytest.mark.slow) for share in (0.9, 0.6, 0.4)),
    ],
)
def test_it_is_the_best_of_all_numbers_of_microbatches(name: str, share: float) -> None:
    """Each number is planned by itself; in a share of the memory that the fastest plan needs some do not fit."""
    target, most = traced(name)
    memory = share * 1.04 * most
    found = planned(target, memory_per_device=memory)
    seconds = {}
    for count in (1, 2, 4, 8, 16, 32):
        try:
            seconds[count] = planned(target, memory_per_device=memory, microbatches=count).counted_seconds
        except MemoryExceeded:
            continue
        except PlanError:
            break  # it cannot be cut so finely
    best = min(seconds.values())
    assert found.least_seconds <= best * (1 + 1e-9)
    assert found.counted_seconds <= best * 1.005
    assert peak(found) * 1.04 <= found.plan.stages[0].memory_limit_bytes * (1 + 1e-9)


def test_pins_that_finer_microbatches_cannot_have_are_no_refusal() -> None:
    """64 examples over eight devices: in 16 microbatches there are four for each to share."""
    target = zoo.mlp(width=512, layers=4, batch=64)
    pins = {"args[1]*": ("x", None)}
    free = planned(target, mesh=(8,), pins=pins)
    memory = 0.97 * 1.04 * peak(free)
    assert planned(target, mesh=(8,), pins=pins, memory_per_device=memory).plan.stages


def test_what_fits_in_no_number_is_refused_by_the_one_that_needs_least() -> None:
    target = zoo.mlp(width=512, layers=4, batch=64)
    with pytest.raises(
        MemoryExceeded,
        match=r"got 2\.098 MiB usable on a device, 2\.017 MiB of it by the count of the search; needed at least .* "
        "with 64 microbatches",
    ):
        planned(target, memory_per_device=2.2e6)


def test_a_refusal_says_what_was_compared(monkeypatch: pytest.MonkeyPatch) -> None:
    """A plan has to fit with 4 % to spare: one whose peak is less than the memory may be refused."""
    target = zoo.mlp(width=512, layers=2, batch=64)
    monkeypatch.setattr(MissedMemory, "learn", lambda *args: None)
    write, written = refine.written_out, dict[Plan, Plan]()

    def writing(found: Plan, *args: Any, **options: Any) -> Plan:
        # Nothing is learnt: the same plan is written out again and again.
        if found not in written:
            written[found] = write(found, *args, **options)
        plan = written[found]
        none = {"gradients": 0.0, "optimizer": 0.0, "activations": 0.0, "workspace": 0.0}
        held = [Memory(parameters=0.98 * stage.memory_limit_bytes, **none) for stage in plan.stages]
        pairs = zip(plan.stages, held, strict=True)
        return replace(plan, stages=tuple(replace(stage, memory=memory) for stage, memory in pairs))

    monkeypatch.setattr(refine, "written_out", writing)
    with pytest.raises(MemoryExceeded) as caught:
        planned(target, microbatches=1, stages=1, mesh=(8,), remat="none", memory_per_device=2.0**30)
    assert caught.value.got == "1 GiB usable on a device"
    assert caught.value.needed.startswith("about 1.019 GiB on a device: 1004 MiB, the predicted peak")
    assert caught.value.needed.endswith("and 4% to spare")


def test_layouts_that_were_not_solved_in_time_have_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """They may fit, and be faster than what other parts of the space find."""
    target = zoo.mlp(width=512, layers=4, batch=64)
    best = planned(target, microbatches=1, stages=1)

    def unsolved(*args: Any, **options: Any) -> Any:
        raise Unsolved("the time is over")

    for name in ("within", "proven"):
        monkeypatch.setattr(LimitedProblem, name, unsolved)
    with pytest.raises(MemoryExceeded, match="found none that fit in the time") as caught:
        planned(target, microbatches=1, stages=1, memory_per_device=0.95 * peak(best))
    assert 0 < caught.value.least_seconds <= best.step_seconds * (1 + 1e-9)


@pytest.mark.parametrize(
    ("devices", "options", "stages"),
    [(1, {}, 1), (4, {"mesh": (4,)}, 1), (4, {"mesh": (2,)}, 2)],
)
def test_inference_has_the_stages_that_devices_and_meshes_leave(
    devices: int, options: dict[str, Any], stages: int
) -> None:
    cluster = replace(CLUSTER, hosts=(replace(CLUSTER.hosts[0], devices=devices),))
    weights = [jax.ShapeDtypeStruct((64, 64), jnp.float32)] * 2
    batch = jax.ShapeDtypeStruct((32, 64), jnp.float32)

    def forward(w: Any, x: Any) -> Any:
        return jnp.tanh(jnp.tanh(x @ w[0]) @ w[1])

    found = plan_for(forward, (weights, batch), cluster=cluster, schedule="inference", **options)
    assert len(found.plan.stages) == stages


def test_what_was_not_looked_at_in_time_is_in_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """A logical mesh for which the solver had no time may have the fastest plan."""
    target = zoo.mlp(width=512, layers=4, batch=64)
    fastest = planned(target, microbatches=1, stages=1)
    memory = 0.98 * 1.04 * peak(fastest)
    best = planned(target, microbatches=1, stages=1, memory_per_device=memory)
    within, meshes = LimitedProblem.within, set[Any]()

    def unsolved(self: Any, *args: Any, **options: Any) -> Any:
        meshes.add(tuple(self.sizes.items()))
        if tuple(self.sizes.items()) == best.plan.stages[0].mesh:
            raise Unsolved("the time is over")
        return within(self, *args, **options)

    monkeypatch.setattr(LimitedProblem, "within", unsolved)
    found = planned(target, microbatches=1, stages=1, memory_per_device=memory)
    assert found.plan.stages[0].mesh != best.plan.stages[0].mesh
    assert found.least_seconds <= best.step_seconds * (1 + 1e-9)
