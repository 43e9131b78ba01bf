"""Plans of replicas: on a cluster of several kinds of device a copy of the program for each kind, and shares of the
batch by their speed."""

from __future__ import annotations

from dataclasses import replace

from ..cluster import Cluster, host_orders
from ..errors import PlanError
from ..lowering.pipeline.local_stages import check_replicas
from ..program.staged import staged_program
from ..search.intra.parameters import parameter_infos
from ..search.pipelines.replicas import Replicas, ReplicaSearch, like_groups
from ..search.result import SearchResult
from .microbatch_counts import microbatch_counts
from .refine import Refinement
from .request import PlanRequest, on_devices


def may_have_replicas(asked: PlanRequest) -> bool:
    """Whether the cluster has several kinds of device, and the request leaves open what each of them does."""
    kinds = _kinds(asked.cluster)
    free = not asked.mesh and asked.submeshes is None and asked.preset is None
    return kinds > 1 and free and asked.stages in (None, kinds)


def plan_replicas(asked: PlanRequest) -> SearchResult:
    """The fastest plan of replicas, as many as there are kinds of device.

    Raises:
      MemoryExceeded: if some kind of device cannot hold the program.
      NothingFaster: if no plan is as fast as asked for.
      PlanError: if there can be no replicas of this step on this cluster.
    """
    kinds = _kinds(asked.cluster)
    order = next((one for one in host_orders(asked.cluster) if len(like_groups(one.cluster)) == kinds), None)
    if order is None or not may_have_replicas(asked):
        raise PlanError(
            refused="the schedule replicas", got=f"cluster {asked.cluster.name} of {asked.cluster.device_kinds}",
            needed="several kinds of device, each with leaf switches of its own, a replica for each, and no mesh, "
            "submeshes or preset", where="schedule=", try_="schedule=None, for the best of the others",
        )  # fmt: skip
    counts = [count for count in microbatch_counts(asked) if count >= kinds]
    if not counts:
        raise PlanError(
            refused="the schedule replicas", got=f"at most {max(microbatch_counts(asked))} microbatches",
            needed=f"one for each of {kinds} kinds of device", where="microbatches=", try_="a larger batch",
        )  # fmt: skip

    def made(count: int) -> Replicas:
        program = asked.program(count)
        asked.constraints.check(program.input_names, [program.graph.values[v].name for v in program.graph.inputs])
        check_replicas(program)
        return Replicas(
            staged_program(program, layers=1, scan_splits={}), parameters=parameter_infos(program),
            cluster=order.cluster, constraints=asked.constraints, remat=asked.remat,
        )  # fmt: skip

    asked.tell("sharing microbatches out")
    search = ReplicaSearch(made, counts, asked.tell)
    found = Refinement(asked).run(
        lambda missed, most, seconds: search.run(missed(""), seconds=seconds, faster_than_seconds=most),
        what=search.refusal.refused, where=search.refusal.where, try_=search.refusal.try_,
    )  # fmt: skip
    return replace(found, plan=on_devices(found.plan, order.devices, asked.cluster))


def _kinds(cluster: Cluster) -> int:
    return len({host.device for host in cluster.hosts})
