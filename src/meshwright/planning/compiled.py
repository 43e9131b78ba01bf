"""`check="compile"`: the plan that is returned has been compiled by the compiler of its cluster, and fits.
`refine="compile"`: of the best few plans the one that is the fastest by what the compiler says.

A search counts memory by a model of the compiler. What the compiler says outranks it: where a plan needs more than a
device has, the search is repeated in as much less memory as the model was too low; where it needs much less than was
predicted, in as much more, and a faster plan is taken if it fits. A program that fits because XLA rematerialises by
itself counts as too large: it is slower than its plan says. The cluster's devices need not be here (`compilers`).

Cost: a compilation for each plan that is tried, about as long as before the first step of any run of it.

Known limits: the model is corrected by one number for the whole plan; another plan may be off by another. Compilers say
what kernels take on TPUs alone, and nothing of collectives: these are as predicted.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from math import inf, isnan

import jax

from ..cluster import Cluster
from ..compilers import check_compiler, target_devices
from ..compilers.facts import StageFacts, facts_of
from ..errors import MemoryExceeded, PlanError, size_words, smaller_words
from ..notes.device_memory import memory_notes
from ..program.effects import without_effects
from ..report.table import format_seconds
from ..runtime.executable import executable
from ..search.considered import Considered
from .measured import candidates
from .request import Planning, PlanOptions, PlanRequest

# Plans that are compiled at most.
_ATTEMPTS = 4

# The memory that the next search is given: of what would be right if its plan were off as much as this one; of what
# this plan takes by prediction, where the compiler does not say by how much it is too large; times as much where
# nothing fits by prediction: a search counts up to 1.3 of a compiled peak (gpt3-1.3b rematerialised on v5e).
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
        facts = _facts(found, cluster, devices)
        found, worst = _in_cluster(found, cluster), _worst(facts, limit)
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
            try_=smaller_words(options.remat),
        )  # fmt: skip
    return replace(best, considered=(*best.considered, *lines))


def compiled_best(
    plan: Callable[[PlanOptions], Planning], options: PlanOptions, asked: PlanRequest, *, whole: Cluster,
    devices: Sequence[jax.Device] | None = None,
) -> Planning:  # fmt: skip
    """Of the best few plans that the compiler accepts the fastest, its kernels in the compiler's seconds where it says
    them; `checked_plan` if it accepts none.

    Args:
      plan: finds a plan of the step.
      options: what was asked for.
      asked: the same, looked up.
      whole: the cluster with all memory of its devices.
      devices: those of the cluster, in its order, where they are here.

    Raises:
      PlanError: as of `checked_plan`.
    """
    cluster = asked.cluster
    if devices is None:
        check_compiler(cluster)
    limit, fitting, lines = cluster.device.usable_memory_bytes, [], []
    try:
        chosen = candidates(plan, options, asked)
    except MemoryExceeded:
        chosen = []  # by prediction: the compiler may think otherwise
    for number, (name, found) in enumerate(chosen):
        asked.tell(f"compiling plan {number + 1} of {len(chosen)} for {cluster.device_kinds}")
        try:
            facts = _facts(found, cluster, devices)
        except PlanError as error:
            lines.append(Considered("compiled", f"{name}: {error!s:.160}", seconds=found.step_seconds))
            continue
        worst = _worst(facts, limit)
        words = f"{name}: {_words(worst, limit)}"
        if worst.peak_bytes[1] <= limit and not worst.rematerialised:
            seconds = seconds_by_compiler(found, facts)
            words = f"{name}: {format_seconds(seconds)} by the compiler, {_words(worst, limit)}"
            fitting.append((seconds, number, found, [one.peak_bytes[1] for one in facts]))
        lines.append(Considered("compiled", words, seconds=found.step_seconds))
    if not fitting:
        found = checked_plan(plan, options, cluster=cluster, tell=asked.tell, whole=whole, devices=devices)
        return replace(found, considered=(*found.considered, *lines))
    _, _, best, peaks = min(fitting, key=lambda one: one[:2])
    note = f"chosen by what the compiler says for {cluster.device_kinds}: {'; '.join(one.outcome for one in lines)}"
    return replace(best.noted(note, *memory_notes(best.plan, peaks, whole)), considered=(*best.considered, *lines))


def seconds_by_compiler(found: Planning, facts: Sequence[StageFacts]) -> float:
    """Seconds of a step whose kernels take what the compiler says, and the rest as predicted; of several stages the
    predicted step, longer or shorter as its slowest stage is."""
    predicted = [one.compute_seconds + one.communication_seconds for one in found.plan.stages]
    changes = [after - before for before, after in (one.compute_seconds for one in facts)]
    changes = [0.0 if isnan(change) else change for change in changes]
    if len(predicted) == 1:
        return found.step_seconds + changes[0]
    changed = max(one + change for one, change in zip(predicted, changes, strict=True))
    return found.step_seconds * changed / max(predicted)


def _facts(found: Planning, cluster: Cluster, devices: Sequence[jax.Device] | None) -> tuple[StageFacts, ...]:
    """What the compiler says of a plan's programs."""
    there = target_devices(cluster, found.plan) if devices is None else devices
    return facts_of(executable(without_effects(found.program), found.plan, there), found.plan, cluster=cluster)


def _worst(facts: Sequence[StageFacts], limit_bytes: float) -> StageFacts:
    """Of the stage that fits the least."""
    return max(
        facts, key=lambda one: (len(one.refusals), one.peak_bytes[1] > limit_bytes, one.rematerialised,
                                one.peak_bytes[1])
    )  # fmt: skip


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
