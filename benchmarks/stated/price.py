"""A solved stated plan under an efficiency profile and a layout of memory: seconds of its step, bytes on a device.

Collectives on activations come between kernels. Those on parameters and gradients run ahead of them or behind, as far
as the profile says and there is compute to run beside. Pipelines are simulated under their schedule.
"""

from __future__ import annotations

from dataclasses import dataclass
from math import prod

from meshwright.cost.collective import collective_seconds
from meshwright.cost.efficiency import EfficiencyProfile
from meshwright.cost.kernels import kernel_seconds
from meshwright.simulate import EdgeTiming, StageTiming, Timeline, Timing, simulate

from .plan import StatedPlan
from .solved import SolvedKind, SolvedPlan
from .work import Movement


@dataclass(frozen=True, slots=True, kw_only=True)
class MemoryLayout:
    """How software lays a training state and its temporaries out on a device.

    >>> MemoryLayout(weights=2, gradients=2, optimizer=12).state_bytes(used=1.0, stored=0.25, zero=1)
    7.0

    Args:
      weights: bytes of an element of a parameter, in the layout operators use.
      gradients: of its gradient: the same layout, from ZeRO 2 on that of optimizer state.
      optimizer: of what the optimizer keeps for it (a wider copy included), in its own layout.
      whole_gradients: whether gradients exist whole before they are scattered, also from ZeRO 2 on.
      fuses: whether chains of cheap operations are fused and their inside not kept (`stage_memory`).
      masks: whether dropout keeps masks.
      gathered: bytes of an element of a gathered layer (ZeRO 3), all copies that are alive at once.
      logits: bytes of an element of the largest product before the loss, all copies that are alive at once.
      inside: how often what a rematerialised layer computes again is there at once, with its cotangents.
      reserve_bytes: of the framework, its libraries and the collectives' buffers.
    """

    weights: float = 4.0
    gradients: float = 4.0
    optimizer: float = 8.0
    whole_gradients: bool = False
    fuses: bool = True
    masks: bool = False
    gathered: float = 8.0
    logits: float = 8.0
    inside: float = 1.0
    reserve_bytes: float = 0.0

    def state_bytes(self, *, used: float, stored: float, zero: int) -> float:
        """Of parameters, gradients and optimizer state.

        Args:
          used: elements on a device in the layout that operators use.
          stored: elements on a device in that of optimizer state.
          zero: the ZeRO stage.
        """
        scattered = zero >= 2 and not self.whole_gradients
        return self.weights * used + self.gradients * (stored if scattered else used) + self.optimizer * stored


@dataclass(frozen=True, kw_only=True, eq=False)
class Evaluation:
    """What a stated plan would take.

    Args:
      step_seconds: of a step.
      timeline: its simulation.
      compute_seconds: of the busiest rank's kernels in a step.
      exposed_seconds: of the busiest rank's collectives that do not hide.
      layout: of memory.
    """

    step_seconds: float
    timeline: Timeline
    compute_seconds: float
    exposed_seconds: float
    layout: MemoryLayout

    @property
    def peak_bytes(self) -> float:
        """On a device of the fullest rank, with what the framework reserves."""
        return max(self.timeline.peak_bytes) + self.layout.reserve_bytes

    @property
    def state_bytes(self) -> float:
        """Parameters, gradients and optimizer state on a device of the first rank."""
        return sum(stage.constant_bytes for stage in self._first)

    @property
    def activation_bytes(self) -> float:
        """What a device of the first rank keeps for the backward pass at the worst moment."""
        workspace = max(stage.workspace_bytes for stage in self._first)
        return max(held for _, held in self.timeline.memory[0]) - self.state_bytes - workspace

    @property
    def _first(self) -> list[StageTiming]:
        ranks = self.timeline.schedule.stage_ranks
        return [stage for stage, rank in zip(self.timeline.timing.stages, ranks, strict=True) if rank == 0]


def price_stated(
    solved: SolvedPlan,
    profile: EfficiencyProfile,
    layout: MemoryLayout | None = None,
    *,
    narrow_products: bool = False,
) -> Evaluation:
    """A solved plan under an efficiency profile.

    Args:
      solved: by `solve_stated`.
      profile: of the software on these devices.
      layout: of memory; None for that of a compiler that fuses, with wide parameters.
      narrow_products: whether products with parameters run in a type of one byte.
    """
    device, plan = solved.cluster.device, solved.plan
    axes = {axis.name: axis for axis in solved.mesh.axes}

    def moved(movement: Movement, share: float = 1.0) -> float:
        spanned = [axes[name] for name in movement.axes]
        return collective_seconds(movement.kind, share * movement.size_bytes, spanned) / profile.network

    share, layout = plan.recompute_share, layout or MemoryLayout()
    times: dict[str, StageTiming] = {}
    parts: dict[str, tuple[float, float]] = {}
    for name, kind in solved.kinds.items():
        compute = [0.0, 0.0]
        weights, activations = [0.0, 0.0], [0.0, 0.0]
        for kernel, runs in kind.work.kernels:
            # Products with parameters in layers; the head stays wide.
            if narrow_products and kernel.kind == "product" and kernel.shape[:1] == (1,) and runs.in_loop:
                kernel = kernel._replace(dtype="float8_e4m3fn")
            seconds = kernel_seconds(kernel, device, profile)
            compute[0] += runs.forward * seconds
            compute[1] += (share * runs.again + runs.backward) * seconds
        for movement, runs in kind.work.movements:
            seconds = moved(movement)
            into = weights if movement.weights else activations
            into[0] += runs.forward * seconds
            into[1] += (share * runs.again + runs.backward) * seconds
        hide = profile.hidden_weights, profile.hidden_activations
        passes = [_beside(compute[n], (weights[n], activations[n]), hide) for n in (0, 1)]
        # The program's parameters have four bytes an element; what is summed and gathered has the software's.
        synchronise = sum(moved(one, layout.gradients / 4) for one in kind.work.synchronise)
        fetch = sum(moved(one, layout.weights / 4) for one in kind.work.fetch)
        if profile.broadcasts:
            # A broadcast passes every device; its last piece arrives after as many steps.
            for one in kind.work.fetch:
                hops = prod(axes[name].size for name in one.axes)
                step = max(axes[name].latency_seconds for name in one.axes)
                fetch += hops * (max(axes[name].launch_seconds for name in one.axes) + (hops - 1) * step)
        # Gradients are summed beside the last microbatch's backward pass, parameters fetched beside the next forward.
        synchronise -= min(profile.hidden_weights * synchronise, profile.hidden_weights * compute[1])
        fetch -= min(profile.hidden_weights * fetch, profile.hidden_weights * compute[0])
        update = kind.work.update_bytes / (profile.memory * device.memory_bandwidth_bytes_per_second)
        times[name] = StageTiming(
            forward_seconds=passes[0], backward_seconds=passes[1], synchronise_seconds=synchronise,
            update_seconds=update + fetch, **_stage_bytes(kind, plan, layout),
        )  # fmt: skip
        parts[name] = sum(compute), sum(passes) - sum(compute)
    edges = tuple(
        EdgeTiming(edge=edge, forward_seconds=seconds, backward_seconds=seconds)
        for edge in solved.schedule.edges
        if (seconds := _sent_seconds(solved, edge.source, edge.target, profile)) >= 0
    )
    timing = Timing(stages=tuple(times[name] for name in solved.order), edges=edges)
    timelines = [simulate(schedule, timing) for schedule in solved.schedules]
    timeline, step = timelines[0], timelines[0].step_seconds
    if len(timelines) > 1:
        here, further = (schedule.microbatches for schedule in solved.schedules)
        period = (timelines[1].step_seconds - step) / (further - here)
        step += period * (plan.microbatches - here)
    busy: dict[int, tuple[float, float]] = {}  # by rank: it runs all its chunks in every microbatch
    for name, rank in zip(solved.order, solved.schedule.stage_ranks, strict=True):
        compute, exposed = busy.get(rank, (0.0, 0.0))
        busy[rank] = compute + parts[name][0], exposed + parts[name][1]
    compute, exposed = max(busy.values())
    return Evaluation(
        step_seconds=step * (1 + profile.idle), timeline=timeline, compute_seconds=plan.microbatches * compute,
        exposed_seconds=plan.microbatches * exposed, layout=layout,
    )  # fmt: skip


def _stage_bytes(kind: SolvedKind, plan: StatedPlan, layout: MemoryLayout) -> dict[str, float]:
    """What a stage holds throughout, for each microbatch in flight, and while it works."""
    kept = (kind.kept.fused if layout.fuses else kind.kept.eager) + (kind.kept.masks if layout.masks else 0.0)
    inside = kind.kept.inside if layout.fuses else kind.kept.inside_eager
    work = layout.logits * kind.kept.logits_elements, layout.inside * inside + layout.gathered * kind.state.layer
    return {
        "constant_bytes": layout.state_bytes(used=kind.state.used, stored=kind.state.stored, zero=plan.zero),
        "in_flight_bytes": kept,
        "workspace_bytes": max(work),
    }


def _beside(compute: float, collectives: tuple[float, float], hidden: tuple[float, float]) -> float:
    """Seconds of compute with collectives of which so much can run beside it."""
    most = sum(share * seconds for share, seconds in zip(hidden, collectives, strict=True))
    return compute + sum(collectives) - min(most, max(hidden) * compute)


def _sent_seconds(solved: SolvedPlan, source: int, target: int, profile: EfficiencyProfile) -> float:
    """To the next stage: each device sends its share to its counterpart, by its share of the NICs, or by the link."""
    plan, host = solved.plan, solved.cluster.hosts[0]
    kind = solved.kinds[solved.order[source]]
    size = kind.sent_bytes
    devices = solved.mesh.num_devices
    whole = solved.cluster.hosts[0].devices
    if devices * plan.pipeline <= whole:
        bandwidth, latency = host.link.bandwidth_bytes_per_second * devices, host.link.latency_seconds
    else:
        per_device = host.nic_bandwidth_bytes_per_second / max(whole, 1)
        bandwidth, latency = per_device * devices, host.nic.latency_seconds
    return size / bandwidth / profile.network + latency + host.nic.launch_seconds
