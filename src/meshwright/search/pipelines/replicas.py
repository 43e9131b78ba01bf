"""Replicas on unlike devices: each kind of device runs the whole program, on a share of the microbatches by its speed.

The variables are, for each group of like devices, a plan of the whole program (the one-stage problem, for the group's
own number of microbatches), and the shares. With seconds s_i of a microbatch and o_i once a step, handing microbatches
out one by one, each to the group that finishes it first, minimises max(a_i s_i + o_i): the time of each group grows
with its share. The first shares come from estimates of the program's parts (`stages.estimates`); plans are solved for
them, and once more where the solved plans change the shares.

After its last microbatch each group sends its gradients to all others, and each updates its own copy.

Known limits: one replica for each kind of device; results of the loss function that grow with the batch are not
gathered.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from itertools import accumulate, groupby, pairwise
from math import inf, isfinite

import numpy as np

from ...cluster import Cluster
from ...plan import Plan
from ...program.staged import StagedProgram
from ...schedule import replicas
from ...simulate import Timing, simulate
from ..inter.problem import Option, PlacedStage
from ..inter.submeshes import Submesh, Submeshes
from ..intra.parameters import ParameterInfo
from ..restrictions.constraints import Constraints
from ..stages.costs import StageCosts
from .assembly import plan_of, planned_stage
from .timing import stage_timing

# Rounds of solving replicas for their shares and sharing out again.
_MOST_ROUNDS = 2


def like_groups(cluster: Cluster) -> tuple[Submesh, ...]:
    """The runs of hosts of one kind.

    >>> from meshwright.cluster import load_cluster
    >>> [group.size for group in like_groups(load_cluster("p4d.24xlarge:2+p3.16xlarge:1"))]
    [16, 8]
    """
    sizes = [sum(host.devices for host in run) for _, run in groupby(cluster.hosts, key=lambda host: host.device)]
    return tuple(Submesh(first, stop) for first, stop in pairwise(accumulate(sizes, initial=0)))


def shared_out(microbatches: int, seconds: Sequence[float], once: Sequence[float]) -> tuple[int, ...]:
    """How many microbatches each group runs so that the last one finishes as early as possible, at least one each.

    >>> shared_out(8, (1.0, 3.0), (0.0, 0.0))
    (6, 2)

    Args:
      microbatches: in all, no fewer than there are to share them.
      seconds: of one, by who runs it.
      once: seconds of each besides.
    """
    shares = [1] * len(seconds)
    for _ in range(microbatches - len(shares)):
        done = [(count + 1) * each + more for count, each, more in zip(shares, seconds, once, strict=True)]
        shares[done.index(min(done))] += 1
    return tuple(shares)


class Replicas:
    """Plans of replicas of one program in one number of microbatches.

    Args:
      program: as one stage, at the size of one microbatch.
      parameters: of the source program.
      cluster: in which hosts of a kind are together.
      constraints: what is fixed.
      remat: as the user asked.
    """

    def __init__(
        self, program: StagedProgram, *, parameters: Sequence[ParameterInfo], cluster: Cluster,
        constraints: Constraints, remat: str | None,
    ) -> None:  # fmt: skip
        self.program, self.groups = program, like_groups(cluster)
        self._submeshes = submeshes = Submeshes(cluster)
        self._costs_of = partial(
            StageCosts, parameters=parameters, submeshes=submeshes, constraints=constraints, remat=remat
        )
        self._costs: dict[int, StageCosts] = {}

    @property
    def usable_bytes(self) -> list[float]:
        """The usable bytes of a device of each group."""
        return [self._submeshes.part(group).device.usable_memory_bytes for group in self.groups]

    @property
    def exchange_seconds(self) -> list[float]:
        """The seconds in which each group sends its gradients to all others."""
        graph = self.program.graph
        size = sum(graph.values[graph.inputs[p]].bytes for p in graph.parameters)
        seconds = self._submeshes.transfer_seconds
        return [sum(seconds(one, other, size) for other in self.groups if other != one) for one in self.groups]

    def expected(self, microbatches: int) -> tuple[float, tuple[int, ...]]:
        """Seconds of a step in so many microbatches by the estimates of this program's parts, each microbatch taking
        and keeping its share, and how they are shared out; infinite where nothing fits. What smaller microbatches lose
        is left out, and so is what parts of the program lose together."""
        here, whole, one = self.program.microbatches, np.array([0, len(self.program.layers)]), np.ones(1)
        costs = self._run(here)
        each = [float(costs.shared(whole, one, 1, group, here / microbatches)[0]) for group in self.groups]
        if not all(map(isfinite, each)):
            return inf, ()
        once = self.exchange_seconds
        shares = shared_out(microbatches, each, once)
        return max(n * s + o for n, s, o in zip(shares, each, once, strict=True)), shares

    def plan(self, limit_bytes: Sequence[float]) -> Plan | None:
        """The plan with the best shares of the microbatches; None if a replica does not fit.

        Args:
          limit_bytes: of each group what may be counted on a device.
        """
        count = self.program.microbatches
        _, shares = self.expected(count)
        if not shares or min(limit_bytes) <= 0:
            return None
        for _ in range(_MOST_ROUNDS):
            solved = [self._solved(*one) for one in zip(self.groups, shares, limit_bytes, strict=True)]
            found = [one for one in solved if one is not None]
            if len(found) < len(self.groups):
                return None
            # A replica's best layouts depend on its share, and shares on what the layouts take.
            exchanged = zip(found, self.exchange_seconds, strict=True)
            once = [option.per_step_seconds + seconds for (_, option), seconds in exchanged]
            better = shared_out(count, [option.seconds for _, option in found], once)
            if better == shares:
                break
            shares = better
        else:
            found = [one for one in map(self._solved, self.groups, shares, limit_bytes) if one is not None]
        return self._assembled(shares, found) if len(found) == len(self.groups) else None

    def _solved(self, group: Submesh, share: int, limit_bytes: float) -> tuple[StageCosts, Option] | None:
        """The fastest option of a group for its share, with its costs; None where nothing fits."""
        costs = self._run(share)
        option = costs.solve_within(0, len(self.program.layers), group, 1, limit_bytes)
        return (costs, option) if option is not None else None

    def _run(self, times: int) -> StageCosts:
        """The costs of the program where a step runs it so many times."""
        if times not in self._costs:
            self._costs[times] = self._costs_of(replace(self.program, microbatches=times))
        return self._costs[times]

    def _assembled(self, shares: tuple[int, ...], solved: Sequence[tuple[StageCosts, Option]]) -> Plan:
        program, groups, tags = self.program, self.groups, [option.tag for _, option in solved]
        timings = [stage_timing(*one) for one in zip(tags, self.exchange_seconds, strict=True)]
        stages = [
            planned_stage(
                costs.solver, PlacedStage(0, len(program.layers), group, option), 1, 0, timing, timing.workspace_bytes
            )
            for group, (costs, option), timing in zip(groups, solved, timings, strict=True)
        ]
        schedule = replicas(len(groups), program.microbatches, shares=shares)
        timeline = simulate(schedule, Timing(stages=tuple(timings), updates_wait_for_all=True))
        return plan_of(
            program, self._submeshes.cluster, stages, tags, schedule=schedule.name, options=(("shares", shares),),
            step_seconds=timeline.step_seconds, bubble_fraction=timeline.bubble_fraction,
        )  # fmt: skip
