"""Every plan of a small request, priced and simulated: what the plan that is found and its gap are compared with.

Looked at are all numbers of microbatches that planning considers, all cuts into stages, submeshes, logical meshes and
rematerialisations, and all schedules that fit, by the costs and the simulator of `Space`. A stage's layouts are those
that the integer program proves to be best within memory at its place under 1F1B. A stage on one device has one layout,
and what is proven of one stage alone is tested by enumeration (`test_whole_programs`): on two devices nothing is left
out, unless memory binds. On more the optimum may be a little lower still: a gap that is refuted here is wrong, one that
is not may be.

Hosts of several kinds are put in every order that planning considers.

Not here: stages that share their devices, of which gaps do not speak, and replicas.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp

import meshwright as mw
from meshwright.cluster import Cluster, Host, host_orders, load_cluster
from meshwright.lowering.written_out import written_out
from meshwright.planning.checks import request_of
from meshwright.planning.microbatch_counts import microbatch_counts
from meshwright.planning.plan_for import plan_without_advice
from meshwright.planning.programs import StepPrograms
from meshwright.planning.refine import MARGIN, held_bytes, usable_bytes
from meshwright.planning.request import Planning, PlanOptions
from meshwright.planning.stages import stage_request
from meshwright.program.traces import Traces, traces_of
from meshwright.schedule import WORTH_SPLITTING
from meshwright.search.pipelines.candidate import scheduled
from meshwright.search.space.choice import Choice
from meshwright.search.space.space import Space
from meshwright.search.stages.reserve import MissedMemory

# Relative, to which layouts are solved.
_GAP = 1e-6


def perceptron(widths: Sequence[int], batch: int, *, tied: bool = False) -> tuple[Callable[..., Any], tuple[Any, ...]]:
    """A train step of matrices from each width to the next, and its arguments.

    Args:
      widths: of the input and of each layer's result.
      batch: samples.
      tied: whether the last matrix is the first one, transposed.
    """
    last = len(widths) - 2

    def step(params: Any, data: Any) -> tuple[Any, Any]:
        inputs, targets = data

        def loss(p: Any) -> Any:
            hidden = inputs
            for number in range(last + 1):
                matrix = p["0"].T if tied and number == last else p[str(number)]
                hidden = hidden @ matrix
                hidden = jax.nn.relu(hidden) if number < last else hidden
            return jnp.mean((hidden - targets) ** 2)

        value, gradients = mw.value_and_grad(loss)(params)
        return jax.tree.map(lambda p, g: p - 0.1 * g, params, gradients), value

    def array(*shape: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(shape, jnp.float32)

    params = {str(n): array(widths[n], widths[n + 1]) for n in range(last + 1 - tied)}
    return step, (params, (array(batch, widths[0]), array(batch, widths[-1])))


def cluster_of(
    hosts: int, devices: int, *, flops: float = 1.0, link: float = 1.0, nic: float = 1.0, latency: float = 1.0,
    kernel: float = 1.0, kind: str = "device", last: float = 1.0,
) -> Cluster:  # fmt: skip
    """Hosts like those of p3.16xlarge, with fewer devices; other speeds make other plans the best ones.

    Args:
      hosts: how many.
      devices: of each.
      flops: times those of a V100.
      link: times its bandwidth inside a host.
      nic: times that between hosts.
      latency: times that of both, and of starting a collective.
      kernel: times what starting a kernel takes.
      kind: of device; but for those of a known kind products do not pay for tiles (`cost.kernels`).
      last: times these FLOP/s on the last host, whose devices are of a kind of their own where that is not 1.
    """
    host = load_cluster("p3.16xlarge:1").hosts[0]

    def scaled(wires: Any, bandwidth: float) -> Any:
        return replace(
            wires, bandwidth_bytes_per_second=bandwidth * wires.bandwidth_bytes_per_second,
            latency_seconds=latency * wires.latency_seconds, launch_seconds=latency * wires.launch_seconds,
        )  # fmt: skip

    device = replace(
        host.device, kind=kind, peak_flops={name: flops * peak for name, peak in host.device.peak_flops.items()},
        kernel_launch_seconds=kernel * host.device.kernel_launch_seconds,
    )  # fmt: skip
    small: Host = replace(host, devices=devices, device=device, link=scaled(host.link, link), nic=scaled(host.nic, nic))
    found = [small] * hosts
    if last != 1:
        other = {name: last * peak for name, peak in device.peak_flops.items()}
        found[-1] = replace(small, device=replace(device, kind="other", peak_flops=other))
    return Cluster(name=f"{hosts} x {devices}", hosts=tuple(found))


@dataclass(frozen=True, slots=True, kw_only=True)
class Simulated:
    """A plan.

    Args:
      seconds: of its step under its schedule.
      schedule: its name.
      choice: all else, but for its layouts.
      space: of the choice.
    """

    seconds: float
    schedule: str
    choice: Choice
    space: Space

    @property
    def counted_seconds(self) -> float:
        """As of `Planning`: a split backward has to be worth it."""
        return self.seconds * (1 + WORTH_SPLITTING * (self.schedule == "zero_bubble"))

    @property
    def fits(self) -> bool:
        """Whether its programs fit memory with the margin that planning keeps."""
        made = self.space.plan(self.choice)
        if made is None:
            return False
        written = written_out(*made, self.space.cluster.device.compiler)
        held = zip(held_bytes(written), usable_bytes(written), strict=True)
        return all(MARGIN * peak <= usable for peak, usable in held)

    def __str__(self) -> str:
        stages = ", ".join(
            f"layers {one.first}-{one.last} on devices {one.submesh.first}-{one.submesh.stop}"
            f"{', rematerialised' if one.remat == 'layer' else ''}"
            for one in self.choice.stages
        )
        return f"{self.seconds:.6g} s: {self.choice.microbatches} microbatches, {self.schedule}, {stages}"


class EveryPlan:
    """All plans of a request.

    Args:
      step: as of `plan_for`.
      args: as there.
      cluster: as there.
      memory_bytes: that a device may use; None for what it has.
    """

    def __init__(
        self, step: Callable[..., Any], args: Sequence[Any], cluster: Cluster, *, memory_bytes: float | None = None
    ) -> None:
        self._traces: Traces = traces_of(step)
        self._args, self.cluster = args, cluster
        self._planned: dict[int | None, Planning] = {}
        self._fits: dict[int, bool] = {}
        self._options = PlanOptions(cluster=cluster, stages=None, memory_per_device=memory_bytes)

    def _spaces(self) -> Iterator[Space]:
        """Of all that planning may choose from, in the memory that it counts on before it knows of a plan."""
        asked = request_of(self._traces, self._args, self._options, started=time.perf_counter())
        asked.expectations.give_up()  # every number of microbatches is traced
        for order in host_orders(asked.cluster):
            ordered = replace(asked, cluster=order.cluster)
            programs = StepPrograms(ordered, microbatch_counts(ordered))
            yield Space(stage_request(ordered, programs), reserve=MissedMemory(MARGIN), gap=_GAP)

    @cached_property
    def plans(self) -> tuple[Simulated, ...]:
        """Those that are counted to fit, by what they count for, the fastest first."""
        found = (plan for space in self._spaces() for plan in _simulated(space))
        return tuple(sorted(found, key=lambda one: one.counted_seconds))

    def best(self, stages: int | None) -> Simulated | None:
        """The plan that counts for the least of those whose programs fit; None for none.

        Args:
          stages: how many; None for any number.
        """
        plans = ((n, one) for n, one in enumerate(self.plans) if stages is None or len(one.choice.stages) == stages)
        return next((one for n, one in plans if self._fit(n)), None)

    def _fit(self, number: int) -> bool:
        """Whether the plan of this number fits; its programs are traced once."""
        if number not in self._fits:
            self._fits[number] = self.plans[number].fits
        return self._fits[number]

    def planned(self, stages: int | None) -> Planning:
        """What planning finds.

        Args:
          stages: how many; None for any number.
        """
        if stages not in self._planned:
            options = replace(self._options, stages=stages)
            # Of all devices: plans that leave the slower ones idle are not among those that are known here.
            with patch("meshwright.planning.device_kinds.told_apart", lambda cluster: ()):
                self._planned[stages] = plan_without_advice(self._traces, self._args, options)
        return self._planned[stages]


def _simulated(space: Space) -> Iterator[Simulated]:
    for choice in space.structures.all():
        placed = space._placed(choice)
        found = placed and scheduled(space.stages.costs_of(choice), placed, space.schedules, chunks=1)
        if found:
            for name, seconds in ((found.scheduled.name, found.seconds), *found.scheduled.others):
                yield Simulated(seconds=seconds, schedule=name, choice=choice, space=space)
