"""Replicas on unlike devices: shares of the batch by speed, held to hand calculation and to all other shares."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from itertools import pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given, strategies as st
from test_mixed_clusters import FAST, LINK, SLOW, chain, cluster_of, host

from meshwright import value_and_grad
from meshwright.cluster import Cluster, Device
from meshwright.errors import MemoryExceeded, PlanError
from meshwright.plan import Plan
from meshwright.plan.check import check_plan
from meshwright.plan.io import plan_from_dict, plan_to_dict
from meshwright.planning import refine
from meshwright.planning.plan_for import plan_for
from meshwright.report.explain import explain_plan
from meshwright.schedule import ScheduleError, check_schedule, replicas
from meshwright.search.pipelines.replicas import like_groups, shared_out
from meshwright.simulate import simulate_plan

ARGS = ([jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 12, jax.ShapeDtypeStruct((12 * 4096, 2048), jnp.float32))


def planned(cluster: Cluster, **options: Any) -> Plan:
    return plan_for(chain, ARGS, cluster=cluster, **{"stages": None, "schedule": "replicas", **options}).plan


def seconds(plan: Plan) -> float:
    assert plan.predicted is not None
    return plan.predicted.step_seconds


def ways_to_share(microbatches: int, replicas: int) -> list[tuple[int, ...]]:
    if replicas == 1:
        return [(microbatches,)]
    return [
        (first, *rest)
        for first in range(1, microbatches - replicas + 2)
        for rest in ways_to_share(microbatches - first, replicas - 1)
    ]


@given(
    times=st.lists(st.tuples(st.integers(1, 20), st.integers(0, 30)), min_size=1, max_size=4),
    more=st.integers(0, 8),
)
def test_no_other_shares_are_done_earlier(times: list[tuple[int, int]], more: int) -> None:
    count = len(times) + more
    each, once = [float(s) for s, _ in times], [float(o) for _, o in times]

    def last(shares: tuple[int, ...]) -> float:
        return max(n * s + o for n, s, o in zip(shares, each, once, strict=True))

    found = shared_out(count, each, once)
    assert sum(found) == count
    assert min(found) >= 1
    assert last(found) == min(last(shares) for shares in ways_to_share(count, len(times)))


def test_shares_are_as_large_as_devices_are_fast() -> None:
    """By hand: the fast device takes half the time for everything, so of 12 microbatches it runs 8 while the slow one
    runs 4. Who takes both for the slow kind gives each 6, and the slow one takes 6 / 4 times as long."""
    plan = planned(cluster_of(host(FAST), host(SLOW)), microbatches=12, remat="none")
    assert plan.shares == (8, 4)
    assert [stage.device_kind for stage in plan.stages] == ["fast", "slow"]
    slow = plan.stages[1]
    once = slow.synchronise_seconds + slow.update_seconds
    microbatch = slow.forward_seconds + slow.backward_seconds
    assert seconds(plan) == pytest.approx(4 * microbatch + once, rel=0.01)
    even = simulate_plan(replace(plan, schedule_options=(("shares", (6, 6)),))).step_seconds
    assert even / seconds(plan) == pytest.approx((6 * microbatch + once) / (4 * microbatch + once), rel=0.01)
    assert even / seconds(plan) > 1.4


@pytest.mark.parametrize("ratio", [1.5, 3.0])
def test_no_share_is_faster(ratio: float) -> None:
    """Brute force over all shares, three kinds of device."""
    third = replace(
        SLOW, kind="third", kernel_launch_seconds=SLOW.kernel_launch_seconds / ratio,
        peak_flops={"float32": ratio * 10e12}, memory_bandwidth_bytes_per_second=ratio * 1e12,
    )  # fmt: skip
    plan = planned(cluster_of(host(SLOW), host(third), host(FAST)), microbatches=16, remat="none")
    others = [
        simulate_plan(replace(plan, schedule_options=(("shares", shares),))).step_seconds
        for shares in ways_to_share(16, 3)
    ]
    assert seconds(plan) == pytest.approx(min(others), rel=1e-9)


def test_replicas_are_taken_where_stages_would_send_much() -> None:
    """Over a slow link activations of 128 MB a microbatch cost more than 200 MB of gradients once a step."""
    slow_link = replace(LINK, bandwidth_bytes_per_second=1e9)
    hosts = [replace(host(device), nic=slow_link) for device in (FAST, SLOW)]
    cluster = cluster_of(*hosts)
    found = plan_for(chain, ARGS, cluster=cluster, microbatches=3, stages=None, remat="none")
    assert found.plan.schedule == "replicas"
    assert any("layers x devices" in one.what for one in found.alternatives)
    stages = plan_for(chain, ARGS, cluster=cluster, microbatches=3, stages=2, schedule="one_f_one_b", remat="none")
    assert found.step_seconds < stages.step_seconds
    # Where moving values is free, stages that keep their weights need not exchange gradients.
    free = plan_for(chain, ARGS, cluster=cluster_of(host(FAST), host(SLOW)), microbatches=4, stages=None)
    assert free.step_seconds <= seconds(planned(cluster_of(host(FAST), host(SLOW)), microbatches=4)) * (1 + 1e-9)


def test_groups_of_several_hosts_are_meshes_of_their_own() -> None:
    cluster = cluster_of(host(SLOW, 2), host(FAST, 2), host(SLOW, 2))
    plan = planned(cluster, microbatches=8, remat="none")
    assert [(stage.device_kind, stage.devices) for stage in plan.stages] == [("slow", (0, 1, 4, 5)), ("fast", (2, 3))]
    # Four slow devices are as fast as two that are twice as fast.
    assert plan.shares == (4, 4)
    assert plan_from_dict(plan_to_dict(plan)) == plan
    text = explain_plan(plan)
    for words in ("replicas: 2 of the whole program", "4 of 8", "REPLICAS 1 to 2 of 2", "work is even"):
        assert words in text


def test_memory_of_the_smaller_kind_holds() -> None:
    """Its replica keeps less: a step in finer microbatches, or none at all. Parameters, gradients and those that arrive
    are three times the state, its share of the batch the third part of two."""
    state = 12 * 2048 * 2048 * 4
    small = replace(SLOW, kind="small", memory_bytes=4.5 * state)
    plan = planned(cluster_of(host(FAST), host(small)))
    assert plan.stages[1].memory.total <= plan.stages[1].memory_limit_bytes == 4.5 * state
    none = replace(SLOW, kind="none", memory_bytes=1.5 * state)
    with pytest.raises(
        MemoryExceeded,
        match=r"cluster mixed.*try leaving out schedule=, which fits.*or stages",
    ):
        planned(cluster_of(host(FAST), host(none)))
    # Stages of unequal length fit there.
    fits = plan_for(chain, ARGS, cluster=cluster_of(host(FAST), host(none)), stages=None).plan
    assert fits.schedule != "replicas"


def test_schedule() -> None:
    schedule = replicas(3, 6, shares=(3, 1, 2))
    assert check_schedule(schedule) == ()
    assert [list(schedule.microbatches_of(stage)) for stage in range(3)] == [[0, 1, 2], [3], [4, 5]]
    assert schedule.in_flight == (1, 1, 1)
    missing = replace(schedule, ranks=(schedule.ranks[0][2:], *schedule.ranks[1:]))
    assert check_schedule(missing) == (
        "stage 0, microbatch 0: got 0 times forward; needed once",
        "stage 0, microbatch 0: got 0 times backward; needed once",
    )
    twice = replace(schedule, ranks=(schedule.ranks[0], (*schedule.ranks[2][:2], *schedule.ranks[1]), ()))
    assert check_schedule(twice)
    assert "shares: got (3, 1, 1)" in check_schedule(replace(schedule, shares=(3, 1, 1)))[0]


@pytest.mark.parametrize("shares", [(), (4,), (4, 0), (2, 1), (1, 1, 2)])
def test_shares_that_are_none(shares: tuple[int, ...]) -> None:
    with pytest.raises(ScheduleError, match=r"2 numbers of at least 1 that add up to 4 microbatches"):
        replicas(2, 4, shares=shares)


def test_plans_that_contradict_themselves() -> None:
    plan = planned(cluster_of(host(FAST), host(SLOW)), microbatches=4, remat="none")
    with pytest.raises(PlanError, match=r"the shares 1, 1; needed 2 numbers of at least 1 that add up to 4"):
        check_plan(replace(plan, schedule_options=(("shares", (1, 1)),)))
    with pytest.raises(PlanError, match=r"shares under the schedule none; needed the schedule replicas"):
        check_plan(replace(plan, stages=plan.stages[:1], schedule="none"))
    alone = replace(plan, stages=plan.stages[:1], schedule_options=(("shares", (4,)),))
    with pytest.raises(PlanError, match=r"1 replica with the options shares; needed several replicas"):
        check_plan(alone)
    shorter = replace(plan.stages[1], equations=(0, 3))
    with pytest.raises(PlanError, match=r"equations \(0, 3\); needed .* as the replica before has"):
        check_plan(replace(plan, stages=(plan.stages[0], shorter)))


@pytest.mark.parametrize(
    ("devices", "options", "message"),
    [
        ((SLOW, SLOW), {}, r"got cluster mixed of slow; needed several kinds of device"),
        ((SLOW, FAST), {"mesh": (2,)}, r"needed several kinds of device.* no mesh"),
        ((SLOW, FAST), {"stages": 3}, r"needed several kinds of device.* a replica for each"),
        ((SLOW, FAST), {"microbatches": 1}, r"at most 1 microbatches; needed one for each of 2 kinds"),
    ],
)
def test_replicas_that_cannot_be(devices: tuple[Device, ...], options: dict[str, Any], message: str) -> None:
    with pytest.raises(PlanError, match=message):
        planned(cluster_of(*map(host, devices)), **options)


def test_results_that_grow_with_the_batch_are_refused() -> None:
    def step(weights: Any, x: Any) -> Any:
        def loss(weights: Any) -> Any:
            out = x @ weights
            return jnp.sum(out), out

        (_, out), grads = value_and_grad(loss, has_aux=True)(weights)
        return weights - grads, out

    args = jax.ShapeDtypeStruct((8, 8), jnp.float32), jax.ShapeDtypeStruct((16, 8), jnp.float32)
    mixed = cluster_of(host(FAST), host(SLOW))
    with pytest.raises(PlanError, match=r"results of the loss function that grow with the batch"):
        plan_for(step, args, cluster=mixed, stages=None, schedule="replicas")
    assert plan_for(step, args, cluster=mixed, stages=None).plan.schedule != "replicas"


def test_pins_of_nothing_are_refused() -> None:
    with pytest.raises(PlanError, match="nonsense"):
        planned(cluster_of(host(FAST), host(SLOW)), microbatches=4, pins={"*nonsense*": (None, "x")})


def test_no_number_of_microbatches_is_faster(monkeypatch: pytest.MonkeyPatch) -> None:
    """Coarser ones start fewer kernels; finer ones than the step can be cut into are left out."""
    slow_start = [replace(device, kernel_launch_seconds=2e-3) for device in (FAST, SLOW)]
    cluster = cluster_of(*map(host, slow_start))

    def step(weights: Any, x: Any) -> Any:
        value, grads = value_and_grad(lambda w: jnp.sum(jnp.tanh(x.reshape(-1, 8, 256) @ w)))(weights)
        return weights - 1e-3 * grads, value

    args = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((256, 256), jnp.float32)
    options: dict[str, Any] = {"cluster": cluster, "stages": None, "schedule": "replicas"}
    written: list[int] = []
    write = refine.written_out

    def writing(plan: Plan, *those: Any, **more: Any) -> Plan:
        if plan.shares:  # not one of a kind of device alone
            written.append(plan.microbatches)
        return write(plan, *those, **more)

    monkeypatch.setattr(refine, "written_out", writing)
    found = plan_for(step, args, **options)
    assert written == [2], "what others lose is known by estimates"
    assert found.plan.predicted is not None
    assert found.plan.predicted.optimality_gap < 0.01
    each = [plan_for(step, args, microbatches=count, **options).step_seconds for count in (2, 4, 8, 16, 32)]
    assert found.step_seconds == pytest.approx(min(each))
    assert found.plan.microbatches == 2
    with pytest.raises(PlanError):
        plan_for(step, args, microbatches=64, **options)


def test_when_the_time_is_over_the_gap_says_what_replicas_might_take() -> None:
    """Nobody looks at them then, nor at more than one stage: nothing is known but how much arithmetic there is."""
    options: dict[str, Any] = {"cluster": cluster_of(host(FAST), host(SLOW)), "stages": None, "microbatches": 4}
    at_leisure, short = plan_for(chain, ARGS, **options), plan_for(chain, ARGS, **options, time_limit_seconds=0)
    assert at_leisure.plan.predicted is not None
    assert at_leisure.plan.predicted.optimality_gap < 0.05
    assert short.plan.predicted is not None
    assert (1 - short.plan.predicted.optimality_gap) * short.step_seconds <= at_leisure.step_seconds
    assert any(str(one).startswith("replicas: not searched, out of time, ") for one in short.considered)


def test_a_number_that_turns_out_too_large_is_in_the_gap(monkeypatch: pytest.MonkeyPatch) -> None:
    """In less memory it takes longer, or has no plan; in all of it there may be another that fits."""
    slow_start = [replace(device, kernel_launch_seconds=2e-3) for device in (FAST, SLOW)]

    def step(weights: Any, x: Any) -> Any:
        """In two microbatches or four."""
        value, grads = value_and_grad(lambda w: jnp.sum(jnp.tanh(x.reshape(-1, 8, 256) @ w)))(weights)
        return weights - 1e-3 * grads, value

    args = jax.ShapeDtypeStruct((256, 256), jnp.float32), jax.ShapeDtypeStruct((32, 256), jnp.float32)
    options: dict[str, Any] = {"cluster": cluster_of(*map(host, slow_start)), "stages": 2, "schedule": "replicas"}
    best, fits = plan_for(step, args, **options), refine.Refinement._fits
    assert best.plan.microbatches == 2

    def fitting(self: refine.Refinement, plan: Plan, counted: Sequence[float], part: str) -> bool:
        assert fits(self, plan, counted, part)
        if plan.microbatches != 2:
            return True
        self._leanest = refine._TooLarge(share=2.0, peak_bytes=2.0, usable_bytes=1.0, microbatches=plan.microbatches)
        usable = refine.usable_bytes(plan)
        self.missed(part).learn(2, counted, [2 * room for room in usable], usable, [True] * len(usable))
        return False

    monkeypatch.setattr(refine.Refinement, "_fits", fitting)
    other = plan_for(step, args, **options)
    assert other.plan.microbatches != 2
    assert other.step_seconds > best.step_seconds
    assert other.least_seconds <= best.step_seconds * (1 + 1e-9)


def test_groups() -> None:
    cluster = cluster_of(host(SLOW, 2), host(SLOW), host(FAST, 4))
    assert [(group.first, group.stop) for group in like_groups(cluster)] == [(0, 3), (3, 7)]
    bounds = [group.first for group in like_groups(cluster)]
    assert all(a < b for a, b in pairwise(bounds))
