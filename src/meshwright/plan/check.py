"""What a plan must satisfy beyond the types of its fields, whoever made it: a search, a preset, a hand or a file.

Only what can be seen without the program and the cluster is checked: meshes and devices agree, every axis that is used
is an axis of its stage's mesh, specs fit the shapes they belong to, stages follow each other (or are copies of the
program, which share the microbatches out) and share no device, and transfers go from a stage to a later one. One pass
over the plan.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from difflib import get_close_matches
from itertools import chain, pairwise
from math import prod

from ..errors import PlanError
from ..sharding.spec import Spec
from .plan import Plan, Stage

AGAIN = "a file that `plan.save` wrote, or planning again"


def check_plan(plan: Plan, *, source: str = "the plan") -> None:
    """Refuse a plan that contradicts itself.

    Args:
      plan: to be checked.
      source: what to call it in errors, such as its file's name.

    Raises:
      PlanError: naming the first contradiction and its place.
    """
    if plan.microbatches < 1:
        raise refusal(source, "microbatches", f"{plan.microbatches}", "at least 1")
    if not plan.stages:
        raise refusal(source, "stages", "no stage", "at least one")
    for number, stage in enumerate(plan.stages):
        place = f"stages[{number}]"
        _check_mesh(stage, source, place)
        _check_axes(stage, source, place)
        _check_shapes(stage, source, place)
        if stage.gradient_exchange not in ("collective", "central"):
            got = f"{stage.gradient_exchange!r}"
            raise refusal(source, f"{place}.gradient_exchange", got, '"collective" or "central"')
        if stage.gradient_exchange == "central" and len(plan.stages) > 1:
            got = f'"central" in a plan of {len(plan.stages)} stages'
            raise refusal(source, f"{place}.gradient_exchange", got, "one stage", '"collective"')
    _check_order(plan, source)
    _check_shares(plan, source)
    _check_transfers(plan, source)


def refusal(source: str, place: str, got: str, needed: str, try_: str = AGAIN) -> PlanError:
    """The error for what stands at `place` (a path of fields, or "") of the plan called `source`."""
    return PlanError(
        refused="the plan", got=got, needed=needed, where=f"{source}: {place}" if place else source, try_=try_
    )


def _check_mesh(stage: Stage, source: str, place: str) -> None:
    names = [name for name, _ in stage.mesh]
    size = prod(n for _, n in stage.mesh)
    if len(set(names)) != len(names):
        raise refusal(source, f"{place}.mesh", f"the axes {', '.join(names)}", "each name once")
    if size != len(stage.devices):
        mesh = " ".join(f"{name}={n}" for name, n in stage.mesh)
        needed = f"{size}, the size of its mesh{f' {mesh}' if mesh else ''}"
        raise refusal(source, f"{place}.devices", f"{len(stage.devices)} devices", needed)
    if len(set(stage.devices)) != len(stage.devices):
        raise refusal(source, f"{place}.devices", "a device twice", "each device once")
    if stage.layers[0] > stage.layers[1]:
        raise refusal(
            source, f"{place}.layers", f"{list(stage.layers)}", "the first layer before the one past the last"
        )


def _check_axes(stage: Stage, source: str, place: str) -> None:
    names = [name for name, _ in stage.mesh]
    for where, axes in _used_axes(stage):
        for axis in axes:
            if axis not in names:
                near = get_close_matches(axis, names, n=1, cutoff=0.5)
                needed = f"an axis of the mesh ({', '.join(names)})"
                raise refusal(source, f"{place}.{where}", f"the axis {axis!r}", needed, *map(repr, near))


def _check_shapes(stage: Stage, source: str, place: str) -> None:
    for i, parameter in enumerate(stage.parameters):
        rows, dim = parameter.rows, parameter.rows_dim
        if not 0 <= dim < max(len(parameter.shape), 1):
            needed = f"a dim of the shape {parameter.shape}"
            raise refusal(source, f"{place}.parameters[{i}].rows_dim", f"the dim {dim}", needed)
        if rows is not None and (not parameter.shape or rows[1] - rows[0] != parameter.shape[dim]):
            needed = f"as many as dim {dim} of the shape {parameter.shape}"
            raise refusal(source, f"{place}.parameters[{i}].rows", f"the rows {rows[0]}:{rows[1]}", needed)
        if parameter.scattered and not parameter.stored_axes:
            needed = "false, or a storage split over more axes than the use"
            raise refusal(source, f"{place}.parameters[{i}].scattered", "true", needed)
    for where, shape, spec in _placed(stage):
        if len(spec.dims) != len(shape):
            needed = f"{len(shape)}, as the shape {shape} has"
            raise refusal(source, f"{place}.{where}", f"{len(spec.dims)} dims", needed)
        if not spec.divides(shape, stage.sizes):
            got = f"{spec!r} of the shape {shape}"
            raise refusal(source, f"{place}.{where}", got, f"splits that divide their dims on the mesh {stage.sizes}")


def _check_order(plan: Plan, source: str) -> None:
    """Stages follow each other in the program, or are copies of it, and no device serves two of them unless the
    schedule interleaves."""
    for number, (one, following) in enumerate(pairwise(plan.stages), start=1):
        place = f"stages[{number}]"
        if plan.schedule == "replicas":
            if (following.layers, following.equations) != (one.layers, one.equations) or one.equations is None:
                needed = f"{one.layers} and {one.equations}, as the replica before has"
                got = f"the layers {following.layers} and the equations {following.equations}"
                raise refusal(source, place, got, needed)
            continue
        if following.layers[0] != one.layers[1]:
            needed = f"{one.layers[1]}, where the stage before ends"
            raise refusal(source, f"{place}.layers", f"a first layer of {following.layers[0]}", needed)
        if one.equations is None or following.equations is None:
            raise refusal(source, f"{place}.equations", "no equations", "a range for each of several stages")
        if following.equations[0] != one.equations[1]:
            needed = f"{one.equations[1]}, where the stage before ends"
            raise refusal(source, f"{place}.equations", f"a first equation of {following.equations[0]}", needed)
    for number, stage in enumerate(plan.stages):
        if stage.equations is not None and stage.equations[0] > stage.equations[1]:
            needed = "the first equation before the one past the last"
            raise refusal(source, f"stages[{number}].equations", f"{list(stage.equations)}", needed)
        if stage.in_flight < 1:
            raise refusal(source, f"stages[{number}].in_flight", f"{stage.in_flight} microbatches", "at least 1")
    if len(plan.stages) > 1 and plan.schedule == "none":
        raise refusal(source, "schedule", f"none for {len(plan.stages)} stages", "the name of a schedule")
    chunks = dict(plan.schedule_options).get("chunks", 1)
    holder: dict[int, int] = {}
    for number, stage in enumerate(plan.stages):
        holders = {holder.setdefault(device, number): device for device in reversed(stage.devices)}
        for first, device in holders.items():
            if first != number and (chunks == 1 or stage.devices != plan.stages[first].devices):
                needed = "each device in one stage, or stages of one rank with the same devices and chunks > 1"
                raise refusal(source, f"stages[{number}].devices", f"device {device} of stages[{first}] too", needed)


def _check_shares(plan: Plan, source: str) -> None:
    """Replicas, and nobody else, share the microbatches out."""
    if plan.schedule != "replicas":
        if plan.shares:
            needed = "the schedule replicas"
            raise refusal(source, "schedule_options", f"shares under the schedule {plan.schedule}", needed)
        return
    shares = plan.shares
    if len(plan.stages) < 2 or len(plan.schedule_options) > 1:
        names = ", ".join(name for name, _ in plan.schedule_options)
        got = f"{len(plan.stages)} replica{'s' * (len(plan.stages) != 1)} with the options {names}"
        raise refusal(source, "schedule_options", got, "several replicas, and shares alone")
    if len(shares) != len(plan.stages) or min(shares) < 1 or sum(shares) != plan.microbatches:
        needed = f"{len(plan.stages)} numbers of at least 1 that add up to {plan.microbatches}"
        raise refusal(source, "schedule_options", f"the shares {', '.join(map(str, shares))}", needed)


def _check_transfers(plan: Plan, source: str) -> None:
    seen: set[tuple[int, int, int]] = set()
    for number, transfer in enumerate(plan.transfers):
        place = f"transfers[{number}]"
        if not 0 <= transfer.source < transfer.target < len(plan.stages):
            got = f"stage {transfer.source} to stage {transfer.target}"
            raise refusal(source, place, got, f"a stage and a later one, of {len(plan.stages)}")
        key = (transfer.source, transfer.target, transfer.value)
        if key in seen:
            raise refusal(source, place, f"value {transfer.value} twice on one edge", "each value once")
        seen.add(key)
    for number, (equation, trips) in enumerate(plan.scan_splits):
        if not trips or min(trips) < 1:
            got = f"trips {list(trips)} of equation {equation}"
            raise refusal(source, f"scan_splits[{number}]", got, "at least one trip for each piece")


def _placed(stage: Stage) -> Iterator[tuple[str, tuple[int, ...], Spec]]:
    """Place, global shape and spec of everything whose shape the plan knows."""
    for i, parameter in enumerate(stage.parameters):
        yield f"parameters[{i}].use", parameter.shape, parameter.use
        yield f"parameters[{i}].storage", parameter.shape, parameter.storage
    for i, given in enumerate(stage.inputs):
        yield f"inputs[{i}].spec", given.shape, given.spec


def _used_axes(stage: Stage) -> Iterator[tuple[str, Sequence[str]]]:
    specs = chain(
        ((where, spec) for where, _, spec in _placed(stage)),
        ((f"settled[{i}][1]", spec) for i, (_, spec) in enumerate(stage.settled)),
    )
    for where, spec in specs:
        yield where, (*spec.sharded_axes, *sorted(spec.partial), *sorted(spec.broadcast))
    # Thousands of operators share few ways to be split: each is looked at once, where it first stands.
    for (axes, broadcast), operator in {(o.axes, o.broadcast): o for o in reversed(stage.operators)}.items():
        yield f"operators ({operator.name} at {operator.path})", (*chain(*axes), *sorted(broadcast))
