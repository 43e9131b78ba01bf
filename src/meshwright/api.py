"""The Python front door: `parallelize`, `plan_for`, `load_plan`, `value_and_grad`."""

from __future__ import annotations

import functools
import hashlib
import inspect
import json
import logging
from collections.abc import Callable, Mapping, Sequence
from difflib import get_close_matches
from functools import cached_property
from pathlib import Path
from types import MethodType
from typing import Any

import jax
from jax.sharding import SingleDeviceSharding

from ._jax.context import no_mesh
from ._jax.devices import named_devices
from ._jax.grad import value_and_grad as value_and_grad
from ._jax.jaxpr import is_traced
from ._jax.jitted import as_one_call, bound_to_static
from ._jax.placement import placement
from ._jax.trace import trace
from .calibrate.origin import check_origin
from .cluster import Cluster, cluster_of, load_cluster
from .cluster.errors import ClusterError
from .errors import PlanError
from .notes.device_memory import warn_of_memory
from .plan import Plan
from .plan.io import load_plan as load_plan, plan_from_dict, plan_to_dict
from .planning.checks import check_batch_axis, check_refine, check_time_limit
from .planning.plan_for import Planning as Planning, plan_for as plan_for
from .program.trace import Program, abstract
from .program.traces import traces_of
from .runtime.agree import agree, exchange_texts
from .runtime.devices import Placed, devices_for, lies_as_planned
from .runtime.executable import Executable, check_devices, executable, needed_devices
from .runtime.watch import watch

log = logging.getLogger("meshwright")

# How long other processes wait for the plan of process 0: the search's own default limit, and tracing a large step.
_SEARCH_SECONDS = inspect.signature(plan_for).parameters["time_limit_seconds"].default
_TRACE_SECONDS = 600.0


class Parallelized:
    """A step that plans itself on its first call and then runs by the plan. Made by `parallelize`."""

    def __init__(self, step: Callable[..., Any], options: Mapping[str, Any], plan: Any) -> None:
        _check_options(options, plan)
        devices = options.get("devices")
        self._named = named_devices(devices) if devices is not None else None
        if isinstance(plan, (str, Path)):
            plan = load_plan(plan)
        functools.update_wrapper(self, step)
        self._function = as_one_call(step)
        self._options = dict(options)
        self._given = plan
        self._steps: dict[Any, Executable] = {}
        self._by_static: dict[Any, Parallelized] = {}

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Run the step on arguments as the step itself takes them; the first call plans.

        What is donated (`donate` of `plan_for`), as a rule the training state, is gone afterwards.
        """
        one, args, named = self._bound(args, kwargs)
        if named:
            args = one._positional(args, named)
        one._check_arrays(args)
        return one._planned(args)(*args)

    def __get__(self, instance: Any, owner: type | None = None) -> Any:
        return self if instance is None else MethodType(self, instance)

    def _bound(
        self, args: Sequence[Any], kwargs: Mapping[str, Any] | None = None
    ) -> tuple[Parallelized, tuple[Any, ...], Mapping[str, Any]]:
        """The step for the static arguments among these (`static_argnums` of `jax.jit`), and the other ones."""
        bound = bound_to_static(self._function, args, kwargs)
        if bound.step is self._function:
            return self, bound.args, bound.kwargs
        if bound.key not in self._by_static:
            options = {**self._options}
            if "donate" in options:
                options["donate"] = bound.donate(options["donate"])
            self._by_static[bound.key] = Parallelized(bound.step, options, self._given)
        return self._by_static[bound.key], bound.args, bound.kwargs

    def _check_arrays(self, args: Sequence[Any]) -> None:
        for leaf in jax.tree.leaves(tuple(args)):
            if is_traced(leaf) or isinstance(leaf, jax.ShapeDtypeStruct):
                traced = is_traced(leaf)
                raise PlanError(
                    refused="to run the step",
                    got="arguments being traced by jax.jit or jax.grad" if traced else "shapes without values",
                    needed="arrays: the step is compiled already, and is not to be differentiated"
                    if traced
                    else "arrays", where=getattr(self._function, "__name__", "the step"),
                    try_="calling it outside jax.jit" if traced else "step.plan(...), which takes shapes",
                )  # fmt: skip

    def plan(self, *args: Any) -> Plan:
        """The plan for arguments of these shapes (arrays or `ShapeDtypeStruct`s)."""
        return self.planned(*args).plan

    def planned(self, *args: Any) -> Executable:
        """The executable step for arguments of these shapes."""
        one, args, _ = self._bound(args)
        return one._planned(args)

    def init(self, make_state: Callable[..., Any], *args: Any, batch: Any = None) -> Any:
        """The state `make_state(*args)`, created already sharded, never whole on one device.

        Args:
          make_state: builds the step's first argument.
          args: its arguments.
          batch: the step's other argument (a tuple if it has several), as arrays or `ShapeDtypeStruct`s. Not needed
            once the step has been planned for a state of this shape (by `plan` or a call).

        Raises:
          PlanError: if `batch` is not given and no plan for such a state exists.
        """
        return self._planned_for(make_state, args, batch, "init").create(make_state, *args)

    def abstract_state(self, make_state: Callable[..., Any], *args: Any, batch: Any = None) -> Any:
        """The state `make_state(*args)` as the plan keeps it, without values: what a checkpoint is restored into.

        Args: as of `init`.

        Returns:
          a tree of `ShapeDtypeStruct`s with shardings, one for each leaf.

        Raises:
          PlanError: if `batch` is not given and no plan for such a state exists.
        """
        planned = self._planned_for(make_state, args, batch, "abstract_state")
        leaves, tree = jax.tree.flatten(jax.eval_shape(make_state, *args))
        shardings = planned.in_shardings[: len(leaves)]
        kept = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=s) for x, s in zip(leaves, shardings, strict=True)]
        return jax.tree.unflatten(tree, kept)

    def _planned_for(self, make_state: Callable[..., Any], args: Sequence[Any], batch: Any, where: str) -> Executable:
        """The executable step for a state that a function makes."""
        if not callable(make_state):
            raise PlanError(
                refused="to create the state", got=f"{type(make_state).__name__}, which cannot be called",
                needed="a function that makes it", where=where, try_=f"{where}(make_state, *args, batch=batch)",
            )  # fmt: skip
        with no_mesh():
            state = trace(make_state, args).results
        leaves, tree = jax.tree.flatten(state)
        planned = self._with_state(leaves, tree) if batch is None else None
        if planned is None:
            if batch is None:
                raise PlanError(
                    refused="to create the state", got="no batch, and no plan for a state of this shape",
                    needed="the shapes of a batch, to plan by", where=where,
                    try_=f"{where}(make_state, *args, batch=batch)",
                )  # fmt: skip
            planned = self.planned(state, *(batch if isinstance(batch, tuple) else (batch,)))
        return planned

    def _positional(self, args: Sequence[Any], kwargs: Mapping[str, Any]) -> tuple[Any, ...]:
        """Arguments given by name, put in their places."""
        bound = inspect.signature(self._function).bind(*args, **kwargs)
        if bound.kwargs:
            raise PlanError(
                refused="an argument of the step", got=f"the keyword-only {next(iter(bound.kwargs))}",
                needed="arguments that have a position", where=getattr(self._function, "__name__", "the step"),
                try_="closing over it, or a step without * in its signature",
            )  # fmt: skip
        return bound.args

    def _with_state(self, leaves: Sequence[Any], tree: Any) -> Executable | None:
        """The latest planned step whose first argument looks like this."""
        every = [planned for one in (self, *self._by_static.values()) for planned in one._steps.values()]
        for planned in reversed(every):
            program = planned.program
            shapes = planned.avals()[: program.state_inputs]
            same = [(a.shape, a.dtype) for a in shapes] == [(x.shape, x.dtype) for x in leaves]
            if same and program.in_tree.children()[0] == tree:
                return planned
        return None

    @no_mesh()
    def _planned(self, args: Sequence[Any]) -> Executable:
        given, tree = jax.tree.flatten(tuple(args))
        leaves = given
        if not all(isinstance(leaf, (jax.Array, jax.ShapeDtypeStruct)) for leaf in given):
            leaves = jax.tree.leaves(abstract(tuple(args)))
        shapes = (tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        key = (shapes, tuple(map(placement, leaves)), self._devices(given, tree))
        planned = self._steps.get(key)
        if planned is None:
            planned = next((old for known, old in self._steps.items() if _serves(known, old, key)), None)
            if planned is None:
                if self._steps:
                    name = getattr(self._function, "__name__", "the step")
                    log.warning("%s: arguments of new shapes or on other devices, planning again", name)
                planned = self._make(args, key[2])
            self._steps[key] = planned
        return planned

    def _devices(self, leaves: Sequence[Any], tree: Any) -> tuple[jax.Device, ...]:
        """The devices to run on: those that are named, those of an earlier plan whose arrays these are, or those of the
        arguments."""
        if self._named is not None:
            return self._named
        for ((known, _), _, devices), planned in reversed(self._steps.items()):
            if known == tree and lies_as_planned(leaves, planned.in_shardings, devices):
                return devices
        return devices_for(Placed(leaves), self._wanted)

    @cached_property
    def _wanted(self) -> int | None:
        """How many devices the plan is for; None for those at hand."""
        if self._given is not None:
            return needed_devices(self._given)
        cluster = self._options.get("cluster", "local")
        if not isinstance(cluster, (str, Cluster)) or cluster == "local":
            return None
        return (load_cluster(cluster) if isinstance(cluster, str) else cluster).num_devices

    def _make(self, args: Sequence[Any], devices: Sequence[jax.Device]) -> Executable:
        name = getattr(self._function, "__name__", "the step")
        with watch.call(f"the planning of {name}{self._news(args)}", tuple(range(jax.process_count()))):
            _check_same_arguments(args)
            if self._given is not None:
                program, plan = self._traced(args, self._given), self._given
                check_devices(plan, devices)
                _check_cluster(plan, devices)
            else:
                _check_devices(self._options.get("cluster", "local"), devices)
                program, plan = self._found(args, devices)
            agreed = _check_agreed(program, plan, devices)
            warn_of_memory(plan, devices)
            made = executable(program, plan, devices)
        made.what = f"{name} by plan {agreed}"
        return made

    def _news(self, args: Sequence[Any]) -> str:
        """What the arguments' shapes were in the last plan, where they differ."""
        if not self._steps:
            return ""
        now, before = _shapes(args), next(reversed(self._steps.values()))
        old = [f"{aval.dtype}{list(aval.shape)}" for aval in before.avals()]
        news = [f"{n} as {x} ({y} before)" for (n, x), y in zip(now.items(), old, strict=False) if x != y]
        return f" for {', '.join(news)}" if news else ""

    def _traced(self, args: Sequence[Any], plan: Plan) -> Program:
        """The step as the plan has it."""
        given = {name: self._options[name] for name in ("batch_axis", "reduction", "donate") if name in self._options}
        return program_for(self._function, args, plan, **given)

    def _found(self, args: Sequence[Any], devices: Sequence[jax.Device]) -> tuple[Program, Plan]:
        """The plan that is searched for, the same in every process: process 0 searches."""
        options: dict[str, Any] = {**self._options, "devices": devices}
        if options.get("refine") == "measure":
            # Every process takes part in measuring; process 0 decides there too.
            planning = plan_for(self._function, args, **options)
            return planning.program, planning.plan
        found: list[Planning] = []

        def search() -> str:
            found.append(plan_for(self._function, args, **options))
            return json.dumps(plan_to_dict(found[0].plan))

        limit = self._options.get("time_limit_seconds", _SEARCH_SECONDS) + _TRACE_SECONDS
        text = agree(search, about="the plan", timeout_seconds=limit)
        plan = plan_from_dict(json.loads(text), source="the plan of process 0")
        return (found[0].program if found else self._traced(args, plan)), plan


def program_for(
    step: Callable[..., Any], args: Sequence[Any], plan: Plan, *, batch_axis: int = 0, reduction: str | None = None,
    donate: Any = None,
) -> Program:  # fmt: skip
    """A step as a plan has it.

    Args:
      step: as of `plan_for`, like what follows.
      args: its arguments.
      plan: that was made for it.
      batch_axis: which axis of every array outside the state is the batch.
      reduction: how losses of microbatches combine; None to read it from the program.
      donate: which arguments are donated; None for what the step says.

    Raises:
      PlanError: if the step cannot be cut so.
    """
    traces = traces_of(step, donate)
    check_batch_axis(args, batch_axis)
    if plan.schedule == "inference":
        return traces.inference(args, microbatches=plan.microbatches, batch_axis=batch_axis)
    return traces.program(
        args, microbatches=plan.microbatches, batch_axis=batch_axis, reduction=reduction, padded=plan.padded
    )


def _serves(known: Any, planned: Executable, key: Any) -> bool:
    """Whether what was planned for some arguments serves others too: of the same shapes, for the same devices, and of
    places that the program knows or need not know. (What a step returns is on no mesh of the user's, and in the memory
    that the step leaves it in.)"""
    if (known[0], known[2]) != (key[0], key[2]):
        return False
    hosted = planned.program.host_inputs
    return all(
        new is None or new == old or (i in hosted and isinstance(new, SingleDeviceSharding))
        for i, (old, new) in enumerate(zip(known[1], key[1], strict=True))
    )


def _shapes(args: Sequence[Any]) -> dict[str, str]:
    """What the leaves of a step's arguments are, by their paths."""
    leaves = jax.tree_util.tree_leaves_with_path(abstract(tuple(args)))
    return {f"args{jax.tree_util.keystr(path)}": f"{leaf.dtype}{list(leaf.shape)}" for path, leaf in leaves}


def _check_same_arguments(args: Sequence[Any]) -> None:
    """Refuse, in every process, arguments whose shapes are not the same in all."""
    shapes = _shapes(args)
    among = range(jax.process_count())
    said = exchange_texts(json.dumps(shapes), among=among, about="the plan", timeout_seconds=_TRACE_SECONDS)
    for process in among:
        theirs = json.loads(said[process])
        for name in [*shapes, *theirs]:
            if shapes.get(name) != theirs.get(name):
                raise PlanError(
                    refused="to plan the step", got=f"{name} as {theirs.get(name, 'nothing')} in process {process}, "
                    f"as {shapes.get(name, 'nothing')} here",
                    needed="arguments of the same shapes in all processes: each has the whole batch of the step",
                    where=f"process {jax.process_index()}",
                    try_="dropping or padding the last batch, on every host alike",
                )  # fmt: skip


def _check_agreed(program: Program, plan: Plan, devices: Sequence[jax.Device]) -> str:
    """Refuse, in every process, programs or plans that are not the same in all: they would wait for each other.

    Returns: a short text that is the same for the same plan.
    """
    agreed = [program.fingerprint, plan_to_dict(plan), [device.id for device in devices]]
    text = hashlib.sha256(json.dumps(agreed).encode()).hexdigest()[:16]
    among = range(jax.process_count())
    said = exchange_texts(text, among=among, about="the plan", timeout_seconds=_TRACE_SECONDS)
    others = [process for process in among if said[process] != text]
    if others:
        raise PlanError(
            refused="to run the plan", got=f"another step or plan in processes {', '.join(map(str, others))}",
            needed="the same in all processes", where=f"process {jax.process_index()}",
            try_="the same script, arguments of the same shapes, and the same plan= everywhere",
        )  # fmt: skip
    return text


def _check_options(options: Mapping[str, Any], plan: Any) -> None:
    known = [name for name, p in inspect.signature(plan_for).parameters.items() if p.kind is p.KEYWORD_ONLY]
    for name in options:
        if name not in known:
            near = get_close_matches(name, known, n=2) or ["time_limit_seconds", "microbatches"]
            raise PlanError(
                refused=f"the option {name!r}", got=f"parallelize(..., {name}=...)", needed=", ".join(known),
                where="parallelize", try_=" or ".join(near),
            )  # fmt: skip
    if "time_limit_seconds" in options:
        check_time_limit(options["time_limit_seconds"])
    check_refine(options.get("refine"))
    if plan is None:
        return
    if not isinstance(plan, (Plan, str, Path)):
        raise PlanError(
            refused="the plan", got=type(plan).__name__, needed="a Plan or the path of a saved one", where="plan=",
            try_="meshwright.load_plan(path)",
        )  # fmt: skip
    if taken := sorted(set(options) - {"batch_axis", "reduction", "donate", "devices"}):
        raise PlanError(
            refused=f"the option {taken[0]!r}", got="a plan as well, which says all of it", needed="one or the other",
            where="parallelize", try_=f"leaving out plan= or {', '.join(f'{name}=' for name in taken)}",
        )  # fmt: skip


def _check_devices(cluster: Any, devices: Sequence[jax.Device]) -> None:
    """Refuse, before anything is planned, a cluster that cannot be run on these devices."""
    if not isinstance(cluster, (str, Cluster)) or cluster == "local":
        return
    wanted = load_cluster(cluster) if isinstance(cluster, str) else cluster
    check_origin(wanted)
    if len(devices) < wanted.num_devices or wanted.device.platform != devices[0].platform:
        raise PlanError(
            refused="to run on the cluster", got=f"{len(devices)} {devices[0].platform} devices",
            needed=f"{wanted.num_devices} x {wanted.device.kind}, as {wanted.name} has", where="cluster=",
            try_='cluster="local"; meshwright.plan_for plans for a cluster that is elsewhere',
        )  # fmt: skip


def _check_cluster(plan: Plan, devices: Sequence[jax.Device]) -> None:
    """Refuse a plan for another platform; warn of one whose predicted times are for other devices."""
    try:
        here = cluster_of(devices)
    except ClusterError:
        return  # devices that no preset describes: nothing to compare with
    if plan.cluster_fingerprint == here.fingerprint():
        return
    try:
        planned = load_cluster(plan.cluster).device
    except ClusterError:
        planned = here.device  # a cluster that is not described on this machine
    if planned.platform != devices[0].platform:
        raise PlanError(
            refused="to run the plan", got=f"{len(devices)} {devices[0].platform} devices",
            needed=f"the platform it was made for: {plan.num_devices} x {planned.kind} of {plan.cluster}",
            where="plan=", try_="planning again for the devices at hand",
        )  # fmt: skip
    log.warning("the plan was made for cluster %s, whose devices differ: its predicted times do not hold", plan.cluster)


def parallelize(
    step: Callable[..., Any] | None = None, /, *, plan: Plan | str | Path | None = None, **options: Any
) -> Any:
    """Run a train step, written for one device, on a whole cluster by the fastest plan that fits.

    Args:
      step: `(state, batch, ...) -> (state, metrics)`, or any function of arrays. With `meshwright.value_and_grad` in
        place of `jax.value_and_grad` the batch can be cut into microbatches, and the state is donated.
      plan: run this plan, or the one saved at this path, instead of searching.
      options: as in `plan_for`.

    A training state (a first argument that comes back as the first result, and by whose leaves `value_and_grad`
    differentiates) is donated: pass on what the step returned, not what it was given, or say `donate=()`. An array that
    stands in it twice, or in another argument as well, is copied first.

    The step runs on `devices`, or else where its arguments lie: arrays on several devices say which these are, as under
    `jax.jit`, and all are moved to the layouts of the plan. With nothing said these are the first of `jax.devices()`.
    What the step leaves in the host's memory is kept there (docs/arguments.md).

    What the step prints and calls (`jax.debug`, `io_callback`) runs after it, in order, on whole values
    (docs/effects.md).

    Raises:
      PlanError: for an option that does not exist; at the first call, for whatever `plan_for` refuses.

    >>> import jax.numpy as jnp
    >>> @parallelize
    ... def step(w, x):
    ...     loss, grad = value_and_grad(lambda w: jnp.mean((x @ w) ** 2))(w)
    ...     return w - 0.1 * grad, loss
    >>> w, loss = step(jnp.ones((4, 2)), jnp.ones((8, 4)))
    >>> float(loss)
    16.0
    """
    if step is None:
        return functools.partial(parallelize, plan=plan, **options)
    return Parallelized(step, options, plan)
