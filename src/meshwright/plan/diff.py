"""What changed between two plans, in lines a person reads.

Parameters and inputs are compared by name over all stages, everything else stage by stage. Changes that are the same
for the same parameter of many layers share a line; of operators and settled values the first few are named. Equal plans
give no line, unequal ones at least one. Cost: linear in the plans.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable, Iterator, Mapping, Sequence
from math import inf, isfinite
from typing import Any

from ..sharding.spec import Spec
from .plan import Collective, InputPlan, Memory, OperatorPlan, ParameterPlan, Plan, Prediction, Stage, Transfer
from .words import common_name, mesh_words, name_pattern, optimizer_words, spec_words

_NAMED = 3


def diff_plans(a: Plan, b: Plan) -> tuple[str, ...]:
    """What turns plan `a` into plan `b`, a line each.

    Args:
      a: the plan before.
      b: the plan after.

    Returns:
      Lines such as `stage 1: mesh x=8 -> x=2 y=4`, with stages counted from 1 and predictions in SI units with their
      ratio; empty if the plans are equal.
    """
    return tuple(_lines(a, b)) if a != b else ()


def _lines(a: Plan, b: Plan) -> Iterator[str]:
    for name in ("program", "cluster", "cluster_fingerprint", "microbatches", "schedule"):
        yield from _scalar(name.replace("_", " "), getattr(a, name), getattr(b, name))
    yield from _scalar("schedule options", _options(a), _options(b))
    yield from _scalar("scans split", _splits(a), _splits(b))
    yield from _scalar("padded dims", _padded(a), _padded(b))
    yield from _scalar("stages", len(a.stages), len(b.stages))
    for number, (before, after) in enumerate(zip(a.stages, b.stages, strict=False), start=1):
        for line in _stage_lines(before, after):
            yield f"stage {number}: {line}"
    yield from _named_lines("parameter", a, b, lambda stage: stage.parameters, _parameter_words)
    yield from _named_lines("input", a, b, lambda stage: stage.inputs, _input_words)
    yield from _transfers(a.transfers, b.transfers)
    yield from _predicted(a.predicted, b.predicted)
    if a.notes != b.notes:
        yield from (f"note removed: {note}" for note in a.notes if note not in b.notes)
        yield from (f"note added: {note}" for note in b.notes if note not in a.notes)
        if Counter(a.notes).keys() == Counter(b.notes).keys():
            yield "notes: in another order or number"


def _options(plan: Plan) -> str:
    return ", ".join(f"{name}={value}" for name, value in plan.schedule_options) or "none"


def _padded(plan: Plan) -> str:
    return ", ".join(f"{one.name}[{one.dim}] to a multiple of {one.multiple}" for one in plan.padded) or "none"


def _splits(plan: Plan) -> str:
    return ", ".join(f"equation {e} into {' '.join(map(str, trips))} trips" for e, trips in plan.scan_splits) or "none"


def _transfers(a: Sequence[Transfer], b: Sequence[Transfer]) -> Iterator[str]:
    if a == b:
        return
    before, after = ({(t.source, t.target): [] for t in side} for side in (a, b))
    for found, side in ((before, a), (after, b)):
        for t in side:
            found[t.source, t.target].append(t)
    lines = []
    for edge in {**before, **after}:
        x, y = before.get(edge, []), after.get(edge, [])
        place = f"transfers from stage {edge[0] + 1} to stage {edge[1] + 1}"
        lines += _scalar(f"{place}, count", len(x), len(y))
        lines += _quantity(place, "bytes", sum(t.bytes for t in x), sum(t.bytes for t in y))
        seconds = [sum(t.forward_seconds + t.backward_seconds for t in side) for side in (x, y)]
        lines += _quantity(f"predicted {place}, both ways", "s", *seconds)
    yield from lines or ("transfers of other values, or in another order",)


def _scalar(name: str, before: object, after: object) -> Iterator[str]:
    if before != after:
        yield f"{name} {before} -> {after}"


# One stage


def _stage_lines(a: Stage, b: Stage) -> Iterator[str]:
    yield from _scalar("layers", _range(a.layers), _range(b.layers))
    yield from _scalar("equations", _run(a.equations), _run(b.equations))
    yield from _scalar("devices", _positions(a.devices), _positions(b.devices))
    yield from _scalar("device kind", a.device_kind, b.device_kind)
    yield from _scalar("mesh", mesh_words(a.mesh), mesh_words(b.mesh))
    yield from _operators(a.operators, b.operators)
    yield from _settled(a, b)
    if (a.rematerialised, a.kept_inside) != (b.rematerialised, b.kept_inside):
        before, after = _equations(a), _equations(b)
        yield f"rematerialised {before} -> {after}" if before != after else f"rematerialised {before}, but others"
    yield from _memory(a.memory, b.memory)
    yield from _quantity("memory limit", "bytes", a.memory_limit_bytes, b.memory_limit_bytes)
    yield from _communication(a.communication, b.communication)
    if a.flops is None or b.flops is None:
        yield from _scalar("predicted FLOPs", *("none" if x is None else f"{x:.6g}" for x in (a.flops, b.flops)))
    else:
        yield from _quantity("predicted FLOPs", "on a device", a.flops, b.flops)
    yield from _quantity("predicted compute", "s", a.compute_seconds, b.compute_seconds)
    yield from _quantity("predicted communication", "s", a.communication_seconds, b.communication_seconds)
    yield from _quantity("predicted forward", "s", a.forward_seconds, b.forward_seconds)
    yield from _quantity("predicted backward", "s", a.backward_seconds, b.backward_seconds)
    yield from _quantity("predicted weight gradients", "s", a.weight_seconds, b.weight_seconds)
    yield from _quantity("predicted synchronisation", "s", a.synchronise_seconds, b.synchronise_seconds)
    yield from _quantity("predicted update", "s", a.update_seconds, b.update_seconds)
    yield from _scalar("microbatches in flight", a.in_flight, b.in_flight)
    yield from _scalar("gradient exchange", a.gradient_exchange, b.gradient_exchange)


def _run(equations: tuple[int, int] | None) -> str:
    return "all" if equations is None else _range(equations)


def _range(layers: tuple[int, int]) -> str:
    return f"{layers[0]}:{layers[1]}"


def _positions(devices: Sequence[int]) -> str:
    runs: list[list[int]] = []
    for device in devices:
        if runs and device == runs[-1][1] + 1:
            runs[-1][1] = device
        else:
            runs.append([device, device])
    return " ".join(str(first) if first == last else f"{first}-{last}" for first, last in runs) or "none"


def _equations(stage: Stage) -> str:
    ranges = [r for _, runs in stage.rematerialised for r in runs]
    kept = f", {len(stage.kept_inside)} of them kept" if stage.kept_inside else ""
    total = sum(last - first for first, last in ranges)
    return f"{total} equations in {len(ranges)} ranges{kept}" if ranges else "nothing"


def _operators(a: Sequence[OperatorPlan], b: Sequence[OperatorPlan]) -> Iterator[str]:
    if a == b:
        return
    before, after = _by(a, lambda o: (o.path, o.name)), _by(b, lambda o: (o.path, o.name))
    both = [key for key in before if key in after]
    changed = [key for key in both if before[key] != after[key]]
    if changed:
        named = [f"{_at(before[key])} ({_axes(before[key])} -> {_axes(after[key])})" for key in changed[:_NAMED]]
        yield f"{len(changed)} of {len(both)} operators split otherwise: {_first(named, len(changed))}"
    for word, mine, other in (("removed", before, after), ("added", after, before)):
        gone = [o for key, o in mine.items() if key not in other]
        if gone:
            yield f"{len(gone)} operators {word}: {_first([_at(o) for o in gone[:_NAMED]], len(gone))}"
    if both != [key for key in after if key in before]:
        yield "operators in another order"


def _at(operator: OperatorPlan) -> str:
    return f"{operator.name} at {'.'.join(map(str, operator.path))}"


def _axes(operator: OperatorPlan) -> str:
    split = ", ".join(" ".join(axes) or "-" for axes in operator.axes)
    return f"{split} | broadcast {' '.join(sorted(operator.broadcast))}" if operator.broadcast else split


def _settled(a: Stage, b: Stage) -> Iterator[str]:
    if a.settled == b.settled:
        return
    before, after = _by(a.settled, lambda s: s[0]), _by(b.settled, lambda s: s[0])
    changed = [key for key in {**before, **after} if before.get(key) != after.get(key)]
    if not changed:
        yield "settled values in another order"
        return
    named = [f"value {key[0]} ({_target(before, key)} -> {_target(after, key)})" for key in changed[:_NAMED]]
    yield f"{len(changed)} values settled otherwise: {_first(named, len(changed))}"


def _target(settled: Mapping[Any, tuple[int, Spec]], key: Any) -> str:
    return spec_words(settled[key][1]) if key in settled else "not settled"


def _by(entries: Sequence[Any], key: Callable[[Any], Hashable]) -> dict[Any, Any]:
    """Entries by key and how often the key came before, so that none is lost."""
    seen: Counter[Hashable] = Counter()
    found = {}
    for entry in entries:
        found[(key(entry), seen[key(entry)])] = entry
        seen[key(entry)] += 1
    return found


def _first(named: Sequence[str], count: int) -> str:
    return ", ".join(named) + (f" and {count - len(named)} more" if count > len(named) else "")


# Predictions


def _memory(a: Memory, b: Memory) -> Iterator[str]:
    for name in ("parameters", "gradients", "optimizer", "activations", "workspace", "total"):
        yield from _quantity(f"predicted memory, {name}", "bytes", getattr(a, name), getattr(b, name))


def _communication(a: Sequence[Collective], b: Sequence[Collective]) -> Iterator[str]:
    if a == b:
        return
    before, after = _by(a, lambda c: c.kind), _by(b, lambda c: c.kind)
    lines = []
    for key in {**before, **after}:
        nothing = Collective(kind=key[0], count=0, bytes=0.0)
        x, y = before.get(key, nothing), after.get(key, nothing)
        lines += _scalar(f"predicted {x.kind}, count", x.count, y.count)
        lines += _quantity(f"predicted {x.kind}", "bytes", x.bytes, y.bytes)
    yield from lines or ("predicted collectives in another order, or without those of no bytes",)


def _predicted(a: Prediction | None, b: Prediction | None) -> Iterator[str]:
    if a is None or b is None:
        yield from _scalar("prediction", "none" if a is None else "given", "none" if b is None else "given")
        return
    yield from _quantity("predicted step", "s", a.step_seconds, b.step_seconds)
    yield from _quantity("predicted model rate", "TFLOP/s a device", a.tflops_per_device, b.tflops_per_device)
    yield from _quantity("predicted executed work", "FLOP a device", a.flops_per_device, b.flops_per_device)
    yield from _quantity("optimality gap", "", a.optimality_gap, b.optimality_gap)
    yield from _quantity("bubble", "of all devices' time", a.bubble_fraction, b.bubble_fraction)


def _quantity(name: str, unit: str, before: float, after: float) -> Iterator[str]:
    if before != after:
        ratio = f" ({after / before:.4g}x)" if 0 < before < inf and isfinite(after) else ""
        yield f"{name} {before:.6g} -> {after:.6g} {unit}".rstrip() + ratio


# Parameters and inputs


def _named_lines(
    kind: str, a: Plan, b: Plan, entries: Callable[[Stage], Sequence[Any]], words: Callable[[Any], str]
) -> Iterator[str]:
    staged = len(a.stages) > 1 or len(b.stages) > 1
    before, after = (_by_name(plan, entries, words, staged=staged) for plan in (a, b))
    changes: dict[tuple[str, str, str], list[str]] = {}
    for name in {**before, **after}:
        old, new = before.get(name, []), after.get(name, [])
        if old != new:
            # The shape is said only where it is what changed.
            reshaped = {shape for _, shape in old} != {shape for _, shape in new} and old and new
            was, becomes = (
                "; ".join(f"{said} of shape {shape}" if reshaped else said for said, shape in side) or "absent"
                for side in (old, new)
            )
            changes.setdefault((name_pattern(name), was, becomes), []).append(name)
    for (_, was, becomes), names in changes.items():
        count = f" ({len(names)} of them)" if len(names) > 1 else ""
        yield f"{kind} {common_name(names)}{count}: {was} -> {becomes}"
    if [name for name in before if name in after] != [name for name in after if name in before]:
        yield f"{kind}s in another order"


def _by_name(
    plan: Plan, entries: Callable[[Stage], Sequence[Any]], words: Callable[[Any], str], *, staged: bool
) -> dict[str, list[tuple[str, tuple[int, ...]]]]:
    """Layout in words and shape, a pair for each stage that holds the array."""
    found: dict[str, list[tuple[str, tuple[int, ...]]]] = {}
    for number, stage in enumerate(plan.stages, start=1):
        for entry in entries(stage):
            said = f"{words(entry)}, in stage {number}" if staged else words(entry)
            found.setdefault(entry.name, []).append((said, entry.shape))
    return found


def _parameter_words(parameter: ParameterPlan) -> str:
    beyond = optimizer_words(parameter)
    rows = f"rows {_range(parameter.rows)} " if parameter.rows is not None else ""
    scattered = ", gradients scattered in each microbatch" if parameter.scattered else ""
    return rows + spec_words(parameter.use) + (f", optimizer {beyond}" if beyond else "") + scattered


def _input_words(given: InputPlan) -> str:
    return spec_words(given.spec)
