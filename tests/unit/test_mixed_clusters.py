"""Clusters of several kinds of device: stages are sized to what they land on, and in the best order of the kinds."""

from __future__ import annotations

from dataclasses import replace
from functools import cache
from itertools import combinations, pairwise
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from meshwright import value_and_grad
from meshwright.cluster import Cluster, Device, Host, Link, host_orders, load_cluster, one_kind_alone
from meshwright.errors import MemoryExceeded
from meshwright.plan.io import plan_from_dict, plan_to_dict
from meshwright.planning import checks, device_kinds
from meshwright.planning.device_kinds import told_apart
from meshwright.planning.plan_for import plan_for
from meshwright.presets import gpipe
from meshwright.program.staged import StagedProgram, staged_program
from meshwright.program.trace import trace_program
from meshwright.report.explain import explain_plan
from meshwright.search.intra.parameters import parameter_infos
from meshwright.search.pipelines.driver import StageRequest, search_stages
from meshwright.search.result import NothingFaster, SearchResult

SLOW = Device(
    kind="slow", peak_flops={"float32": 10e12}, memory_bytes=64e9, memory_bandwidth_bytes_per_second=1e12,
    efficiency=0.6, kernel_launch_seconds=4e-6, usable_memory_fraction=1.0,
)  # fmt: skip
# Twice as fast in everything.
FAST = replace(
    SLOW, kind="fast", peak_flops={"float32": 20e12}, memory_bandwidth_bytes_per_second=2e12,
    kernel_launch_seconds=2e-6,
)  # fmt: skip
# Moving values costs next to nothing: what is left is balance.
LINK = Link(bandwidth_bytes_per_second=1e13, latency_seconds=1e-9, launch_seconds=1e-9)


def host(device: Device, devices: int = 1) -> Host:
    return Host(device=device, devices=devices, link=LINK, nic=LINK, nics=1)


def cluster_of(*hosts: Host) -> Cluster:
    return Cluster(name="mixed", hosts=hosts)


def chain(state: Any, x: Any) -> Any:
    """Twelve equal layers."""

    def loss(weights: Any) -> Any:
        h = x
        for w in weights:
            h = jnp.tanh(h @ w)
        return jnp.sum(h)

    value, grads = value_and_grad(loss)(state)
    return jax.tree.map(lambda p, g: p - 1e-3 * g, state, grads), value


ARGS = ([jax.ShapeDtypeStruct((2048, 2048), jnp.float32)] * 12, jax.ShapeDtypeStruct((65536, 2048), jnp.float32))


@cache
def staged(microbatches: int, layers: int) -> tuple[StagedProgram, Any]:
    program = trace_program(chain, ARGS, microbatches=microbatches)
    return staged_program(program, layers=layers, exactly=True), tuple(parameter_infos(program))


def seconds(cluster: Cluster, layers: tuple[int, ...], submeshes: tuple[int, ...], microbatches: int = 8) -> float:
    """Of a step of given stages, each on what it lands on."""
    program, infos = staged(microbatches, sum(layers))
    result = search_stages(
        StageRequest(
            programs=[program], parameters=infos, cluster=cluster, layers=layers, submeshes=submeshes, remat="none",
            schedules=("one_f_one_b",),
        )
    )  # fmt: skip
    assert result.plan.predicted is not None
    return result.plan.predicted.step_seconds


def test_stages_are_as_long_as_their_devices_are_fast() -> None:
    """By hand: a layer takes three units of time on the fast device (its product, and the gradients of both operands),
    six on the slow one, the first layer two and four, since nobody wants the gradient of the batch. Who takes both
    devices for the slow kind cuts 6 + 6: the first stage works 34 for each of 8 microbatches and once waits for 18 of
    the second, 12 of which it spends on its next forward. Cut 4 + 8, the second stage works 24 for each, after the
    first forward (8) and before the last backward (14)."""
    cluster = cluster_of(host(SLOW), host(FAST))
    blind, aware = seconds(cluster, (6, 6), (1, 1)), seconds(cluster, (4, 8), (1, 1))
    by_hand = (8 * 34 + 6) / (8 + 8 * 24 + 14)
    assert blind / aware == pytest.approx(by_hand, rel=0.005)
    planned = plan_for(chain, ARGS, cluster=cluster, microbatches=8, stages=2, schedule="one_f_one_b", remat="none")
    assert planned.step_seconds <= aware * (1 + 1e-9)
    length = {stage.device_kind: stage.layers[1] - stage.layers[0] for stage in planned.plan.stages}
    assert length == {"slow": 4, "fast": 8}
    assert planned.step_seconds < planned_as_if_slow() / 1.25


def planned_as_if_slow() -> float:
    """What the plan made for two slow devices takes on the mixed cluster."""
    uniform = cluster_of(host(SLOW), host(SLOW))
    plan = plan_for(chain, ARGS, cluster=uniform, microbatches=8, stages=2, schedule="one_f_one_b", remat="none").plan
    lengths = tuple(stage.layers[1] - stage.layers[0] for stage in plan.stages)
    return seconds(cluster_of(host(SLOW), host(FAST)), lengths, (1, 1))


def test_no_order_and_no_stages_are_faster() -> None:
    """Brute force: every order of the kinds, every cut of the layers, every row of submeshes."""
    cluster = cluster_of(host(SLOW, 2), host(FAST))
    layers, devices = 4, 3
    best = float("inf")
    for order in host_orders(cluster):
        for stages in (1, 2, 3):
            for cut in combinations(range(1, layers), stages - 1):
                lengths = tuple(b - a for a, b in pairwise((0, *cut, layers)))
                for split in combinations(range(1, devices), stages - 1):
                    sizes = tuple(b - a for a, b in pairwise((0, *split, devices)))
                    if _is_row(order.cluster, sizes):
                        best = min(best, seconds(order.cluster, lengths, sizes))
    program, infos = staged(8, layers)
    found = []
    for order in host_orders(cluster):
        request = StageRequest(
            programs=[program], parameters=infos, cluster=order.cluster, remat="none", schedules=("one_f_one_b",)
        )
        predicted = search_stages(request).plan.predicted
        assert predicted is not None
        found.append(predicted.step_seconds)
    assert min(found) == pytest.approx(best, rel=1e-6)


def _is_row(cluster: Cluster, sizes: tuple[int, ...]) -> bool:
    """Whether stages of so many devices, one after the other, lie on submeshes."""
    from meshwright.search.inter.submeshes import Submesh, Submeshes

    stops = [sum(sizes[: n + 1]) for n in range(len(sizes))]
    pieces = Submeshes(cluster)
    return all(pieces.is_submesh(Submesh(stop - size, stop)) for stop, size in zip(stops, sizes, strict=True))


def test_the_order_of_kinds_is_searched() -> None:
    """What a first stage keeps for its microbatches in flight fits the large memory only."""
    small = replace(FAST, kind="fast and small", memory_bytes=1.1e9)
    mixed = cluster_of(host(small), host(SLOW))
    wishes: dict[str, Any] = {"microbatches": 8, "stages": 2, "schedule": "one_f_one_b", "remat": "none"}
    plan = plan_for(chain, ARGS, cluster=mixed, **wishes).plan
    assert [stage.device_kind for stage in plan.stages] == ["slow", "fast and small"]
    # Devices are numbered as in the cluster that was given.
    assert [stage.devices for stage in plan.stages] == [(1,), (0,)]
    assert [stage.memory_limit_bytes for stage in plan.stages] == [64e9, 1.1e9]
    assert all(stage.memory.total <= stage.memory_limit_bytes for stage in plan.stages)
    assert plan_from_dict(plan_to_dict(plan)) == plan
    text = explain_plan(plan)
    assert "of kind" in text
    assert "work is" in text


def test_orders_of_hosts() -> None:
    slow, fast, other = host(SLOW), host(FAST, 2), host(replace(SLOW, kind="other"))
    (only,) = host_orders(cluster_of(slow, slow))
    assert only.devices == (0, 1)
    assert {order.devices for order in host_orders(cluster_of(slow, fast, slow))} == {
        (0, 1, 2, 3), (0, 3, 1, 2), (1, 2, 0, 3),
    }  # fmt: skip
    assert len(host_orders(cluster_of(slow, fast, other))) == 6
    # Hosts stay under their leaf switches.
    leaves = replace(cluster_of(slow, fast, slow, fast), fabric_hosts_per_leaf=2)
    assert len(host_orders(leaves)) == 1
    assert len(host_orders(replace(cluster_of(slow, slow, fast, fast), fabric_hosts_per_leaf=2))) == 2


def test_a_preset_has_equal_stages_on_unequal_devices() -> None:
    """The hand-set plan is priced on the devices it gets, and ours is not slower."""
    cluster = load_cluster("p3.16xlarge:1+p4d.24xlarge:1")
    even = plan_for(chain, ARGS, cluster=cluster, microbatches=8, preset=gpipe(stages=2))
    assert [stage.device_kind for stage in even.plan.stages] == list(cluster.devices_of_kind)
    assert even.plan.stages[0].forward_seconds > even.plan.stages[1].forward_seconds
    ours = plan_for(chain, ARGS, cluster=cluster, microbatches=8, stages=2)
    assert ours.step_seconds <= even.step_seconds * (1 + 1e-9)


def test_devices_that_are_better_left_out_are_told() -> None:
    """One device a hundred times as slow beside two: any share of it takes longer than the two take for all."""
    slow = replace(SLOW, kind="slowest", peak_flops={"float32": 0.1e12}, memory_bandwidth_bytes_per_second=1e10)
    fast = cluster_of(host(FAST, 2))
    options = {"stages": None, "time_limit_seconds": 20.0}
    without = plan_for(chain, ARGS, cluster=fast, **options)
    found = plan_for(chain, ARGS, cluster=cluster_of(host(FAST, 2), host(slow)), **options)
    assert found.step_seconds == pytest.approx(without.step_seconds)
    assert {device for stage in found.plan.stages for device in stage.devices} == {0, 1}
    assert any(note.startswith("1 device is idle: 2 x fast alone are faster than all") for note in found.plan.notes)
    all_of_them = min(one.step_seconds for one in found.alternatives)
    assert all_of_them > found.step_seconds
    text = explain_plan(found.plan, alternatives=found.alternatives)
    assert "too little to be trusted" not in text


def test_devices_that_help_are_not_told_to_be_left_out() -> None:
    found = plan_for(chain, ARGS, cluster=cluster_of(host(FAST), host(SLOW)), stages=None, time_limit_seconds=20.0)
    alone = [line for line in map(str, found.considered) if " x fast alone: " in line or " x slow alone: " in line]
    assert len(alone) == 2
    assert all(line.endswith("none that fits and is faster") for line in alone)
    assert not any("left out" in note or "leave out" in note for note in found.plan.notes)


def test_of_two_kinds_that_are_faster_alone_one_has_the_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """And a kind that cannot hold the step says so."""
    cluster = cluster_of(host(FAST), host(SLOW), host(replace(SLOW, kind="small", memory_bytes=1e6)))
    known = plan_for(chain, ARGS, cluster=cluster_of(host(FAST)))
    seconds = {"1 x fast": 2e-3, "1 x slow": 1e-3, "mixed": 3e-3}

    def found(asked: Any) -> Any:
        if asked.cluster.name == "1 x small":
            raise MemoryExceeded(refused="it", got="1", needed="2", where="here", try_="more")
        if seconds[asked.cluster.name] >= asked.faster_than_seconds:
            raise NothingFaster(asked.faster_than_seconds, ())
        predicted = replace(known.plan.predicted, step_seconds=seconds[asked.cluster.name])
        plan = replace(known.plan, predicted=predicted, notes=())
        return SearchResult(plan=plan, considered=(), program=known.program)

    monkeypatch.setattr(device_kinds, "plan_in_stages", found)
    monkeypatch.setattr(device_kinds, "may_have_replicas", lambda asked: False)
    plan = plan_for(chain, ARGS, cluster=cluster, stages=None)
    assert [note for note in plan.plan.notes if "alone" in note] == [
        "2 devices are idle: 1 x slow alone are faster than all"
    ]
    assert plan.plan.stages[0].devices == (1,)
    with monkeypatch.context() as patched:  # every process that runs a step has to have a part in its plan
        patched.setattr(checks, "process_count", lambda: 3)
        run = plan_for(chain, ARGS, cluster=cluster, stages=None, devices=jax.devices()[:3])
    assert run.step_seconds == 3e-3
    assert [note for note in run.plan.notes if "alone" in note] == [
        "1 x slow alone would take 0.001 s a step: better leave out the other hosts"
    ]
    assert "1 x small alone: refused it: got 1; needed 2; where: here; try more" in map(str, plan.considered)
    seconds["mixed"] = 1.003e-3  # too little to leave devices idle for
    assert not any("alone" in note for note in plan_for(chain, ARGS, cluster=cluster, stages=None).plan.notes)


def test_kinds_of_one_name_are_told_apart() -> None:
    half = replace(FAST, memory_bytes=FAST.memory_bytes / 2)
    slower = replace(FAST, kernel_launch_seconds=3e-6)

    def names(*devices: Device) -> list[str]:
        return [alone.name for alone in told_apart(cluster_of(*map(host, devices)))]

    assert names(FAST, SLOW) == ["1 x fast", "1 x slow"]
    assert names(FAST, half) == ["1 x fast of 59.6 GiB", "1 x fast of 29.8 GiB"]
    assert names(FAST, slower, FAST) == ["2 x fast (host 0, 2)", "1 x fast (host 1)"]


def test_kinds_that_there_is_no_time_for_are_in_the_gap() -> None:
    mixed = cluster_of(host(FAST), host(SLOW))
    found = plan_for(chain, ARGS, cluster=mixed, stages=None, time_limit_seconds=0)
    alone = [one for one in found.considered if str(one.what).endswith(" alone")]
    assert [one.searched for one in alone] == [False, False]
    assert all(found.least_seconds <= one.least_seconds * (1 + 1e-9) for one in alone)


def test_kinds_under_one_leaf_switch_have_no_cluster_of_their_own() -> None:
    mixed = cluster_of(host(FAST), host(SLOW))
    assert [(alone.name, alone.num_devices) for alone in one_kind_alone(mixed)] == [("1 x fast", 1), ("1 x slow", 1)]
    assert one_kind_alone(replace(mixed, fabric_hosts_per_leaf=2)) == ()
    assert one_kind_alone(cluster_of(host(FAST), host(FAST))) == ()
