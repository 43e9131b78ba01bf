"""Plans for a cluster of several kinds of device: stages over all, a replica for each kind, or one kind alone."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import replace
from functools import partial
from math import inf, isfinite

from ..cluster import Cluster, devices_by_kind, one_kind_alone
from ..errors import PlanError, size_words
from ..search.driver import WORTH, Part, best_of_parts
from ..search.result import NothingFaster, SearchResult
from .any_stages import plan_in_stages
from .replicas import REPLICAS, may_have_replicas, plan_replicas
from .request import PlanRequest, on_devices

# Of the time: what stages over all devices may take where replicas are searched too; and what plans for one kind alone
# are given at least, together.
_STAGES_SHARE, _LEAST_SHARE = 0.75, 0.1


def plan_for_kinds(asked: PlanRequest, stages: int | None) -> SearchResult:
    """The fastest plan for the cluster. One for hosts of one kind leaves the others idle; where every process has to
    have a part in the plan, or a schedule is given, a note says that it would be faster.

    Args:
      asked: the request.
      stages: how many; None to choose.

    Raises:
      PlanError: if the request makes no sense, or nothing fits.
    """
    parts = []
    wanted = asked.schedule is None and may_have_replicas(asked, stages)
    if asked.schedule != REPLICAS:
        share = _STAGES_SHARE if wanted else 1.0
        parts.append(Part(words="stages", search=partial(_stages, asked, stages), share=share))
    if asked.schedule == REPLICAS or wanted:
        parts.append(Part(words=REPLICAS, search=partial(_replicas, asked, stages)))
    clusters = told_apart(asked.cluster) if _may_leave_out(asked) else ()
    if not clusters and len(parts) == 1:
        return parts[0].search(inf, asked.left_seconds)
    least = _LEAST_SHARE * asked.time_limit_seconds / max(len(clusters), 1)
    alone = [
        Part(
            words=f"{cluster.name} alone", share=1 / (len(clusters) - number), least_seconds=least,
            search=partial(_alone, asked, None if asked.schedule == REPLICAS else stages, cluster, devices),
        )
        for number, (cluster, devices) in enumerate(zip(clusters, devices_by_kind(asked.cluster), strict=False))
    ]  # fmt: skip
    idle = asked.may_idle and asked.schedule is None
    found = best_of_parts(
        [*parts, *(alone if idle else ())], left_seconds=lambda: asked.left_seconds,
        floor=lambda: asked.least_work_seconds,
    )  # fmt: skip
    return found if idle else _with_hint(asked, found, alone)


def _may_leave_out(asked: PlanRequest) -> bool:
    return asked.preset is None and asked.submeshes is None and not asked.mesh


def _stages(asked: PlanRequest, stages: int | None, faster_than_seconds: float, seconds: float) -> SearchResult:
    return plan_in_stages(asked.within(seconds), stages, faster_than_seconds=faster_than_seconds)


def _replicas(asked: PlanRequest, stages: int | None, faster_than_seconds: float, seconds: float) -> SearchResult:
    return plan_replicas(asked.within(seconds), stages, faster_than_seconds=faster_than_seconds)


def _alone(
    asked: PlanRequest, stages: int | None, cluster: Cluster, devices: Sequence[int], faster_than_seconds: float,
    seconds: float,
) -> SearchResult:  # fmt: skip
    """The fastest plan for the hosts of one kind, as one for the whole cluster."""
    asked.tell(f"planning for {cluster.name} alone")
    mine = replace(
        asked.within(seconds), cluster=cluster, schedule=None if asked.schedule == REPLICAS else asked.schedule
    )
    found = plan_in_stages(mine, stages, faster_than_seconds=faster_than_seconds)
    idle = asked.cluster.num_devices - len(devices)
    why = "are faster than all" if isfinite(faster_than_seconds) else "have a plan, and all together none"
    note = f"{'1 device is' if idle == 1 else f'{idle} devices are'} idle: {cluster.name} alone {why}"
    plan = on_devices(found.plan, devices, asked.cluster)
    return replace(
        found, plan=replace(plan, notes=(*plan.notes, note)),
        alternatives=tuple(replace(one, what=f"{cluster.name} alone, {one.what}") for one in found.alternatives),
    )  # fmt: skip


def _with_hint(asked: PlanRequest, found: SearchResult, alone: Sequence[Part]) -> SearchResult:
    """A plan with a note where one for the hosts of one kind would be faster."""
    best, words = (1 - WORTH) * found.counted_seconds, ""
    for part in alone:
        try:
            best = part.search(best, max(part.share * asked.left_seconds, part.least_seconds)).counted_seconds
            words = part.words
        except (NothingFaster, PlanError):
            continue
    if not words:
        return found
    note = f"{words} would take {best:.4g} s a step: better leave out the other hosts"
    return replace(found, plan=replace(found.plan, notes=(*found.plan.notes, note)))


def told_apart(cluster: Cluster) -> tuple[Cluster, ...]:
    """The hosts of each kind of device as a cluster of their own; where devices have one name, with what tells them
    apart: their memory, or else which hosts they are in."""
    alone = one_kind_alone(cluster)
    kinds = [one.hosts[0].device for one in alone]
    named = Counter(device.kind for device in kinds)
    sized = Counter((device.kind, size_words(device.memory_bytes)) for device in kinds)
    found = []
    for one, device in zip(alone, kinds, strict=True):
        size, more = size_words(device.memory_bytes), ""
        if named[device.kind] > 1:
            mine = [str(number) for number, host in enumerate(cluster.hosts) if host.device == device]
            more = f" of {size}" if sized[device.kind, size] == 1 else f" (host {', '.join(mine)})"
        found.append(replace(one, name=f"{one.name}{more}"))
    return tuple(found)
