"""`check="compile"`: the plan that is returned has been compiled by the compiler of its cluster, and fits.

A search counts memory by a model of the compiler. What the compiler says outranks it: where a plan needs more than a
device has, the search is repeated in as much less memory as the model was too low; where it needs much less than was
predicted, in as much more, and a faster plan is taken if it fits. A program that fits because XLA rematerialises by
itself counts as too large: it is slower than its plan says. The cluster's devices need not be here (`compilers`).

Cost: a compilation for each plan that is tried, about as long as before the first step of any run of it.

Known limits: the model is corrected by one number for the whole plan; another plan may be off by another.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf

import jax

from ..cluster import Cluster
from ..compilers import check_compiler, target_devices
from ..compilers.facts import StageFacts, facts_of
from ..errors import MemoryExceeded, size_words
from ..notes.device_memory import memory_notes
from ..program.effects import without_effects
from ..runtime.executable import executable
from ..search.considered import Considered
from .request import Planning, PlanOptions

# Plans that are compiled at most.
_ATTEMPTS = 4

# The memory that the next search is given: of what would be right if its plan were off as much as this one; of what
# this plan takes by prediction, where the compiler does not say by how much it is too large; times as much where
# nothing fits by prediction, since predicted peaks are up to 1.5 of compiled ones (docs/compilers.md).
_SPARE = 0.98
_LESS = 0.8
_FURTHER = 1.4

# Less memory on top is not worth another search and compilation; chosen, not measured.
_MORE = 1.1


def checked_plan(
    plan: Callable[[PlanOptions], Planning], options: PlanOptions, *, cluster: Cluster, tell: Callable[[str], None],
    whole: Cluster, devices: Sequence[jax.Device] | None = None,
) -> Planning:  # fmt: skip
    """The best plan that the compiler accepts.

    Args:
      plan: finds a plan of the step.
      options: what was asked for, `cluster` aside.
      cluster: with the memory that devices may use.
      tell: called with a few words at each part of the work.
      whole: the cluster with all memory of its devices.
      devices: those of the cluster, in its order, where they are here.

    Raises:
      PlanError: if the cluster has no compiler here, or nothing fits, by the model or the compiler.
    """
    if devices is None:
        check_compiler(cluster)
    limit = cluster.device.usable_memory_bytes
    # The best plan so far that fits, the memory that its search was given, and that of the last which was too large.
    best: Planning | None = None
    scale, held, too_much = 1.0, 0.0, inf
    refused: MemoryExceeded | None = None
    lines: list[Considered] = []
    for attempt in range(_ATTEMPTS):
        try:
            found = plan(replace(options, cluster=_with_memory(cluster, scale), memory_per_device=None))
        except MemoryExceeded as error:
            refused = refused or error
            if lines:
                break  # less memory than any plan needs, by the model
            scale *= _FURTHER
            continue
        if best is not None and found.step_seconds >= best.step_seconds:
            break
        tell(f"compiling plan {attempt + 1} for {cluster.device_kinds}")
        there = target_devices(cluster, found.plan) if devices is None else devices
        step = executable(without_effects(found.program), found.plan, there)
        facts = facts_of(step, found.plan, cluster=cluster)
        found = _in_cluster(found, cluster)
        worst = max(facts, key=lambda one: (len(one.refusals), one.peak_bytes[1] > limit, one.rematerialised,
                                            one.peak_bytes[1]))  # fmt: skip
        lines.append(Considered("compiled", _words(worst, limit), seconds=found.step_seconds))
        predicted, compiled = worst.peak_bytes
        if compiled <= limit and not worst.rematerialised:
            note = f"compiled for {cluster.device_kinds}: {_words(worst, limit)}"
            peaks = [one.peak_bytes[1] for one in facts]
            notes = (*found.plan.notes, note, *memory_notes(found.plan, peaks, whole))
            best, held = replace(found, plan=replace(found.plan, notes=notes)), scale
            scale = _SPARE * predicted / compiled
        else:
            too_much = scale
            is_known = limit < compiled < inf
            scale = _SPARE * predicted / compiled if is_known else _LESS * min(scale, predicted / limit)
        if best is not None:
            scale = min(scale, (held + too_much) / 2)
        if best is not None and scale < _MORE * held:
            break
    if best is None and not lines and refused is not None:
        raise refused
    if best is None:
        raise MemoryExceeded(
            refused=f"every plan that was compiled for {cluster.name}", got="; ".join(one.outcome for one in lines),
            needed="less on a device than it has", where='check="compile"',
            try_="more devices, or a smaller batch" + ("" if options.remat == "layer" else ', or remat="layer"'),
        )  # fmt: skip
    return replace(best, considered=(*best.considered, *lines))


def _with_memory(cluster: Cluster, scale: float) -> Cluster:
    """The cluster with so many times the usable memory on each device."""
    if scale == 1.0:
        return cluster
    hosts = {}
    for host in cluster.hosts:
        usable = scale * host.device.usable_memory_bytes
        device = replace(host.device, memory_bytes=usable, usable_memory_fraction=1.0)
        hosts.setdefault(id(host), replace(host, device=device))
    return replace(cluster, hosts=tuple(hosts[id(host)] for host in cluster.hosts))


def _in_cluster(found: Planning, cluster: Cluster) -> Planning:
    """A plan that was made with other memory, for the cluster itself."""
    limit = cluster.device.usable_memory_bytes
    stages = tuple(replace(stage, memory_limit_bytes=limit) for stage in found.plan.stages)
    plan = replace(found.plan, stages=stages, cluster_fingerprint=cluster.fingerprint())
    return replace(found, plan=plan, cluster=cluster)


def _words(worst: StageFacts, limit_bytes: float) -> str:
    predicted, compiled = worst.peak_bytes
    if compiled == inf:
        return f"does not fit {size_words(limit_bytes)} (predicted {size_words(predicted)}): {worst.refusals[0]:.160}"
    fits = "fits" if compiled <= limit_bytes else "does not fit"
    if compiled <= limit_bytes and worst.rematerialised:
        fits = f"where XLA computes {worst.rematerialised} values twice to fit"
    return f"{size_words(compiled)} on a device, {fits} {size_words(limit_bytes)}; predicted {size_words(predicted)}"
