"""Clusters of several kinds of device: stages over all, a replica for each kind, or one kind alone, the others idle."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import replace
from math import isfinite

from ..cluster import Cluster, devices_by_kind, one_kind_alone
from ..errors import PlanError, size_words
from ..search.driver import WORTH, Part
from ..search.pipelines.replicas import REPLICAS
from ..search.result import NothingFaster, SearchResult
from .one_or_several import plan_in_stages
from .replicas import may_have_replicas, plan_replicas
from .request import PlanRequest, on_devices

# Shares of the time: what stages over all devices may take where replicas are searched too; and what plans for one kind
# alone are given at least, together. Chosen, not measured.
_STAGES_SHARE, _LEAST_SHARE = 0.75, 0.1


def plan_for_kinds(asked: PlanRequest) -> SearchResult:
    """The fastest plan for a cluster of one or several kinds of device: stages over all, a replica for each kind, or
    one kind alone, which leaves the others idle. Where every process has to have a part in the plan, or a schedule is
    given, a note says that one kind alone would be faster.

    Raises:
      PlanError: if the request makes no sense, or nothing fits.
    """
    parts = []
    wanted = asked.schedule is None and may_have_replicas(asked)
    if asked.schedule != REPLICAS:
        share = _STAGES_SHARE if wanted else 1.0
        parts.append(
            Part(words="stages", search=lambda *limits: plan_in_stages(asked.within(*limits)), share=share)
        )  # fmt: skip
    if asked.schedule == REPLICAS or wanted:
        parts.append(Part(words=REPLICAS, search=lambda *limits: plan_replicas(asked.within(*limits))))
    free = asked.preset is None and asked.submeshes is None and not asked.mesh
    clusters = told_apart(asked.cluster) if free else ()
    if not clusters and len(parts) == 1:
        return parts[0].search(asked.faster_than_seconds, asked.left_seconds)
    alone = list(_alone(asked, clusters))
    if asked.may_idle and asked.schedule is None:
        return asked.best_of([*parts, *alone])
    found = asked.best_of(parts)
    best, words = (1 - WORTH) * found.counted_seconds, ""
    for part in alone:
        try:
            best = part.search(best, max(part.share * asked.left_seconds, part.least_seconds)).counted_seconds
            words = part.words
        except (NothingFaster, PlanError):
            continue
    note = f"{words} would take {best:.4g} s a step: better leave out the other hosts"
    return found.noted(note) if words else found


def _alone(asked: PlanRequest, clusters: Sequence[Cluster]) -> Iterator[Part]:
    """The hosts of each kind alone, their plans as ones for the whole cluster."""
    least = _LEAST_SHARE * asked.time_limit_seconds / max(len(clusters), 1)
    of_replicas = asked.schedule == REPLICAS
    free = replace(asked, stages=None, schedule=None) if of_replicas else asked
    for number, (cluster, devices) in enumerate(zip(clusters, devices_by_kind(asked.cluster), strict=False)):

        def search(
            most_seconds: float, seconds: float, cluster: Cluster = cluster, devices: Sequence[int] = devices
        ) -> SearchResult:
            asked.tell(f"planning for {cluster.name} alone")
            found = plan_in_stages(replace(free.within(most_seconds, seconds), cluster=cluster))
            idle = asked.cluster.num_devices - len(devices)
            why = "are faster than all" if isfinite(most_seconds) else "have a plan, and all together none"
            note = f"{'1 device is' if idle == 1 else f'{idle} devices are'} idle: {cluster.name} alone {why}"
            others = tuple(replace(one, what=f"{cluster.name} alone, {one.what}") for one in found.alternatives)
            whole = on_devices(found.plan, devices, asked.cluster)
            return replace(found, plan=whole, alternatives=others).noted(note)

        yield Part(
            words=f"{cluster.name} alone", share=1 / (len(clusters) - number), least_seconds=least, search=search
        )


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
