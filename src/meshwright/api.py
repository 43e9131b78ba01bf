"""The Python front door: `parallelize`, `plan_for`, `load_plan`, `value_and_grad`."""

from __future__ import annotations

import functools
import logging
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import jax

from ._jax.grad import value_and_grad as value_and_grad
from .cluster import Cluster, load_cluster
from .errors import PlanError
from .plan import Plan
from .plan.io import load_plan as load_plan
from .program.trace import Program, abstract, trace_program
from .runtime.step import PlannedStep
from .search.hierarchical import SearchRequest, mesh_argument, search
from .search.intra_op import ParameterInfo
from .search.pins import Pins

log = logging.getLogger("meshwright")


@dataclass(frozen=True, slots=True, kw_only=True)
class Planning:
    """A plan and what finding it took.

    Args:
      program: the traced step.
      plan: the plan.
      seconds: in all.
      trace_seconds: for tracing and analysing the step.
      solve_seconds: for the search.
      considered: the candidates, a line each.
    """

    program: Program
    plan: Plan
    seconds: float
    trace_seconds: float
    solve_seconds: float
    considered: tuple[str, ...]


def plan_for(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    cluster: Cluster | str = "local",
    microbatches: int | None = None,
    mesh: Any = None,
    pins: Mapping[str, Sequence[Any]] | None = None,
    zero: int | None = None,
    remat: str | None = None,
    memory_per_device: float | None = None,
    batch_axis: int = 0,
    reduction: str | None = None,
    time_limit_seconds: float = 60.0,
) -> Planning:
    """Find the fastest plan that fits memory. No device is touched unless `cluster` is "local".

    Args:
      step: a train step `(state, batch, ...) -> (state, metrics)`, or any function of arrays.
      args: its arguments, as arrays or `jax.ShapeDtypeStruct`s.
      cluster: a Cluster, "local", "preset:hosts" or a TOML file.
      microbatches: into how many parts the batch is cut; None for the fewest that fit.
      mesh: logical mesh: a shape such as (2, 4), axis names with sizes, or a list of those; None to try all.
      pins: layouts by path pattern: for each dim None, an axis or several; the rest is optimised around them.
      zero: ZeRO stage for every parameter, None to choose for each.
      remat: "none", "layer", or None to choose.
      memory_per_device: bytes a device may use; None for what it has.
      batch_axis: which axis of every array outside the state is the batch.
      reduction: "mean" or "sum": how losses of microbatches combine; None to read it from the program.
      time_limit_seconds: for the search.

    Raises:
      PlanError: if something is wrong with the request, or nothing fits.
    """
    start = time.perf_counter()
    where = load_cluster(cluster) if isinstance(cluster, str) else cluster
    if memory_per_device is not None:
        where = where.with_memory_limit(_positive(memory_per_device, "memory_per_device"))
    pinned = Pins(layouts={path: _layout(path, dims) for path, dims in (pins or {}).items()}, zero=zero)
    counts = [microbatches] if microbatches is not None else [1]
    trace_seconds = solve_seconds = 0.0
    while True:
        begun = time.perf_counter()
        program = trace_program(step, args, microbatches=counts[-1], batch_axis=batch_axis, reduction=reduction)
        trace_seconds += time.perf_counter() - begun
        request = SearchRequest(
            graph=program.graph, fingerprint=program.fingerprint, parameters=_parameters(program), cluster=where,
            microbatches=counts[-1], mesh=mesh_argument(mesh), pins=pinned, remat=remat,
            carried=0 if program.marked else program.state_inputs, time_limit_seconds=time_limit_seconds,
        )  # fmt: skip
        begun = time.perf_counter()
        try:
            result = search(request)
        except PlanError as error:
            solve_seconds += time.perf_counter() - begun
            more = _more_microbatches(program, args, counts[-1], batch_axis)
            if microbatches is not None or error.where != "memory" or more is None:
                raise
            counts.append(more)
            continue
        solve_seconds += time.perf_counter() - begun
        return Planning(
            program=program, plan=result.plan, seconds=time.perf_counter() - start, trace_seconds=trace_seconds,
            solve_seconds=solve_seconds, considered=result.considered,
        )  # fmt: skip


def _positive(value: float, name: str) -> float:
    if not value > 0 or value == float("inf"):
        raise PlanError(
            refused=name, got=repr(value), needed="a positive number of bytes", where=f"{name}=", try_=f"{name}=16e9"
        )
    return float(value)


def _layout(path: str, dims: Sequence[Any]) -> tuple[tuple[str, ...], ...]:
    layout = []
    for dim in tuple(dims):
        if dim is None:
            layout.append(())
        elif isinstance(dim, str):
            layout.append((dim,))
        elif isinstance(dim, Sequence) and all(isinstance(axis, str) for axis in dim):
            layout.append(tuple(dim))
        else:
            raise PlanError(
                refused=f"the pin of {path}", got=repr(dim), needed="None, an axis name or a tuple of axis names",
                where="pins=", try_='pins={"*kernel": (None, "model")}',
            )  # fmt: skip
    return tuple(layout)


def _parameters(program: Program) -> list[ParameterInfo]:
    """Each parameter with the bytes of the optimizer state that is laid out like it."""
    graph = program.graph
    extra = [0.0] * len(graph.parameters)
    invars = program.outer.jaxpr.invars if hasattr(program.outer, "jaxpr") else program.outer.invars
    for index, leaf in enumerate(program.state):
        if leaf is not None and index not in program.parameter_inputs:
            aval = invars[index].aval
            extra[leaf.parameter] += float(aval.size) * aval.dtype.itemsize
    return [
        ParameterInfo(name=graph.values[graph.inputs[p]].name, optimizer_bytes=bytes_)
        for p, bytes_ in zip(graph.parameters, extra, strict=True)
    ]


def _more_microbatches(program: Program, args: Sequence[Any], now: int, batch_axis: int) -> int | None:
    """The next number of microbatches that divides the batch, or None."""
    if not program.marked:
        return None
    extents = {
        leaf.shape[batch_axis]
        for leaf in jax.tree.leaves(abstract(tuple(args[1:])))
        if len(leaf.shape) > batch_axis and not jax.dtypes.issubdtype(leaf.dtype, jax.dtypes.prng_key)
    }
    if not extents:
        return None
    return next((m for m in range(now * 2, min(extents) + 1) if all(e % m == 0 for e in extents)), None)


class Parallelized:
    """A step that plans itself on its first call and then runs by the plan. Made by `parallelize`."""

    def __init__(self, step: Callable[..., Any], options: Mapping[str, Any], plan: Plan | None) -> None:
        functools.update_wrapper(self, step)
        self._function = step
        self._options = dict(options)
        self._given = plan
        self._steps: dict[Any, PlannedStep] = {}

    def __call__(self, *args: Any) -> Any:
        return self._planned(args)(*args)

    def plan(self, *args: Any) -> Plan:
        """The plan for arguments of these shapes (arrays or `ShapeDtypeStruct`s)."""
        return self._planned(args).plan

    def planned(self, *args: Any) -> PlannedStep:
        """The executable step for arguments of these shapes."""
        return self._planned(args)

    def init(self, make_state: Callable[..., Any], *args: Any, batch: Any) -> Any:
        """The state `make_state(*args)`, created already sharded, never whole on one device.

        Args:
          make_state: builds the step's first argument.
          args: its arguments.
          batch: the step's other argument (a tuple if it has several), as arrays or `ShapeDtypeStruct`s.
        """
        state = jax.eval_shape(make_state, *args)
        rest = batch if isinstance(batch, tuple) else (batch,)
        planned = self._planned((state, *rest))
        leaves, tree = jax.tree.flatten(state)
        shardings = jax.tree.unflatten(tree, planned.in_shardings[: len(leaves)])
        return jax.jit(make_state, out_shardings=shardings)(*args)

    def _planned(self, args: Sequence[Any]) -> PlannedStep:
        leaves, tree = jax.tree.flatten(tuple(args))
        try:
            key = (tree, tuple((leaf.shape, leaf.dtype) for leaf in leaves))
        except AttributeError:
            key = (tree, tuple((x.shape, x.dtype) for x in jax.tree.leaves(abstract(tuple(args)))))
        planned = self._steps.get(key)
        if planned is None:
            if self._steps:
                log.warning("%s: arguments of new shapes, planning again", getattr(self._function, "__name__", "the step"))
            planned = self._steps[key] = self._make(args)
        return planned

    def _make(self, args: Sequence[Any]) -> PlannedStep:
        if self._given is not None:
            program = trace_program(
                self._function, args, microbatches=self._given.microbatches,
                batch_axis=self._options.get("batch_axis", 0), reduction=self._options.get("reduction"),
            )  # fmt: skip
            plan = self._given
        else:
            planning = plan_for(self._function, args, **self._options)
            program, plan = planning.program, planning.plan
        devices = jax.devices()
        if len(devices) < plan.num_devices:
            raise PlanError(
                refused="to run the plan", got=f"{len(devices)} devices", needed=f"{plan.num_devices}, as planned",
                where="jax.devices()", try_='cluster="local", or more processes',
            )  # fmt: skip
        return PlannedStep(program, plan, devices[: plan.num_devices])


def parallelize(step: Callable[..., Any] | None = None, /, *, plan: Plan | None = None, **options: Any) -> Any:
    """Run a train step, written for one device, on a whole cluster by the fastest plan that fits.

    Args:
      step: `(state, batch, ...) -> (state, metrics)`, or any function of arrays. With `meshwright.value_and_grad` in
        place of `jax.value_and_grad` the batch can be cut into microbatches.
      plan: run this plan instead of searching.
      options: as in `plan_for`.

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
