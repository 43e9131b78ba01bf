"""The user's step, traced: the program to be planned and what surrounds it.

A training step that calls `meshwright.value_and_grad` has a *core*, the loss function, whose forward graph is planned
for both passes; the rest (preprocessing, the optimizer's update) is elementwise or small and follows the layouts of the
state. Any other step (plain `jax.grad`, inference) is planned whole, as one forward program.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import jax
import numpy as np

from .._jax.boundary import Boundaries
from .._jax.effects import NO_EFFECTS, Effects, with_examples
from .._jax.grad import MarkedCall, inline_value_and_grad, traced_to_call, value_and_grad_p
from .._jax.jaxpr import ClosedJaxpr, Equation, eliminate_dead_code, inline, open_jaxpr, with_result_shapes
from .._jax.lifting import lift_from_loss
from .._jax.placement import cut_placement, placement
from ..errors import PlanError
from .batch_statistics import as_of_a_microbatch, marked_with, with_batch_statistics, with_whole_literals
from .build import build_graph
from .donation import named_inputs
from .graph import Graph
from .marking import NO_MARKS, Marks
from .padded_dims import PaddedDim
from .padding import padded_program
from .places import notes_on_draws, placed
from .reduction import Reduction, Results, aux_reductions, loss_reduction, results_of
from .replaced import refuse_replaced
from .rules import Rules
from .state import StateLeaf
from .step_notes import step_notes
from .traced_step import TracedStep, core_of, fingerprint, lifted, trace_step, traced, without_dead_code


@dataclass(frozen=True, kw_only=True)
class Program:
    """A traced step.

    Args:
      outer: the whole step at the full batch, `jit` calls inlined.
      core: the planned program at the size of one microbatch.
      graph: its operators.
      rules: their factor rules.
      marker: position of the `value_and_grad` equation in `outer`; None if the step is planned whole.
      num_consts: how many of the core's inputs are not differentiated (they come first).
      split_dims: for each of those, the dim that microbatches cut, or None.
      microbatches: into how many parts the batch is cut.
      input_names: path of each input of the step.
      state_inputs: how many of the step's leading inputs are state, that is, come back as its leading outputs.
      donated: the inputs whose buffers the step may take over.
      host_inputs: the inputs that are kept in the host's memory, state that is left there among them.
      host_outputs: the results that are.
      state: for each state input, how its dims relate to the parameters'.
      parameter_inputs: for each differentiated core input, the input of the step it is, or None if it is computed.
      core_inputs: for each other core input, the input of the step it is, or None.
      in_tree: structure of the step's arguments.
      out_tree: structure of its results.
      fingerprint: equal for equal programs at equal shapes.
      reduction: how losses of microbatches combine, "mean" or "sum".
      reduction_given: whether the user says so, so that each microbatch has statistics of its own.
      aux_reductions: with microbatches, how each of the core's other results combines.
      boundaries: where the user ended layers of the core (`meshwright.layer_boundary`).
      notes: what a plan in these microbatches has to say of the step.
      effects: to run after a step, on the further results that `outer` has for them, after those of `out_tree`.
      piece: what the number of microbatches, times that of the blocks that the batch lies in, has to divide; 0 if any.
      marks: of a step that is planned whole, the marks that it has.
      padded: dims that `core` has longer than the step.
      unpadded_flops: of the operators of the core without them, in one run; None where no dims are padded.
    """

    outer: ClosedJaxpr
    core: ClosedJaxpr
    graph: Graph
    rules: Rules
    marker: int | None
    num_consts: int
    split_dims: tuple[int | None, ...]
    microbatches: int
    input_names: tuple[str, ...]
    state_inputs: int
    donated: frozenset[int]
    host_inputs: frozenset[int]
    host_outputs: frozenset[int]
    state: tuple[StateLeaf | None, ...]
    parameter_inputs: tuple[int | None, ...]
    core_inputs: tuple[int | None, ...]
    in_tree: Any
    out_tree: Any
    fingerprint: str
    reduction: str
    reduction_given: bool = False
    aux_reductions: tuple[Reduction, ...] = ()
    boundaries: Boundaries = field(default_factory=Boundaries)
    notes: tuple[str, ...] = ()
    effects: Effects = NO_EFFECTS
    piece: int = 0
    marks: Marks = NO_MARKS
    padded: tuple[PaddedDim, ...] = ()
    unpadded_flops: float | None = None

    @property
    def marked(self) -> bool:
        """Whether the step has a core, planned by its forward graph."""
        return self.marker is not None


def abstract(args: Any) -> Any:
    """The arguments as shapes and dtypes, with what programs know of their places (`placement`); refuses leaves that
    are not arrays, naming them."""

    def one(path: Any, leaf: Any) -> jax.ShapeDtypeStruct:
        if isinstance(leaf, (bool, int, float, complex, np.generic)):
            leaf = jax.numpy.asarray(leaf)
        if isinstance(leaf, np.ndarray) and leaf.dtype.kind in "OSUMmV":
            leaf = leaf.tolist()  # objects and text are no numbers: refused below
        if not hasattr(leaf, "shape") or not hasattr(leaf, "dtype"):
            raise PlanError(
                refused="an argument of the step", got=f"{type(leaf).__name__} {leaf!r:.60}",
                needed="arrays (or ShapeDtypeStructs) at every leaf", where=f"argument{jax.tree_util.keystr(path)}",
                try_="closing over it, or splitting it off first (eqx.partition, nnx.split)",
            )  # fmt: skip
        if not all(isinstance(n, (int, np.integer)) and n >= 0 for n in leaf.shape):
            raise PlanError(
                refused="an argument of the step", got=f"shape {tuple(leaf.shape)}",
                needed="sizes that are whole numbers", where=f"argument{jax.tree_util.keystr(path)}",
                try_="jax.ShapeDtypeStruct((32, 128), jax.numpy.float32)",
            )  # fmt: skip
        # NumPy's 64-bit numbers become JAX's 32-bit ones; a Python scalar takes the dtype of what it meets.
        dtype = jax.dtypes.canonicalize_dtype(leaf.dtype, allow_extended_dtype=True)
        weak_type = getattr(leaf, "weak_type", False)
        return jax.ShapeDtypeStruct(leaf.shape, dtype, weak_type=weak_type, sharding=placement(leaf))

    _refuse_modules(args)
    return jax.tree_util.tree_map_with_path(one, args)


def _refuse_modules(args: Any) -> None:
    """A Flax NNX module is a pytree, but what a step writes into it would be lost without a word."""
    nnx = sys.modules.get("flax.nnx")
    if nnx is None:
        return

    def is_object(x: Any) -> bool:
        return isinstance(x, (nnx.Module, nnx.Optimizer))

    for path, leaf in jax.tree_util.tree_leaves_with_path(args, is_leaf=is_object):
        if is_object(leaf):
            raise PlanError(
                refused="an argument of the step", got=f"the NNX object {type(leaf).__name__}",
                needed="its state as a pytree: changes that a step makes to an object are lost",
                where=f"argument{jax.tree_util.keystr(path)}",
                try_="nnx.split before the step and nnx.merge inside it (examples/flax_nnx.py)",
            )  # fmt: skip


def trace_program(
    step: Callable[..., Any],
    args: Sequence[Any],
    *,
    microbatches: int = 1,
    batch_axis: int = 0,
    reduction: str | None = None,
    donate: Any = None,
    padded: Sequence[PaddedDim] = (),
    trace: Callable[..., TracedStep] = trace_step,
) -> Program:
    """Trace `step` on arguments of the given shapes.

    Args:
      step: a function of arrays; the first argument is the state if the first result has its structure and shapes.
      args: its arguments; only shapes and dtypes are looked at.
      microbatches: into how many parts to cut the batch.
      batch_axis: which axis of every array outside the state is the batch.
      reduction: "mean" or "sum", how losses of microbatches combine; None to find out from the program.
      donate: the arguments whose buffers the step may take over; None for those that the step says (`donation`).
      padded: dims of what the loss function reads that its program is to have longer.
      trace: of a step and shapes what programs in all numbers of microbatches share, for whoever remembers it.

    Raises:
      PlanError: for arguments that are not arrays, a batch that does not divide, microbatches without a core.
    """
    shapes = tuple(abstract(tuple(args)))
    _check_request(microbatches, batch_axis, reduction)
    _check_batch(shapes, microbatches, batch_axis)
    whole = trace(step, shapes)
    donated = whole.donated if donate is None else named_inputs(donate, shapes)
    notes = step_notes(whole, said=donate is not None)
    markers = whole.markers
    if len(markers) != 1:
        if microbatches > 1:
            raise PlanError(
                refused=f"microbatches={microbatches}",
                got=whole.marks.got, needed="exactly one, outside of loops",
                where=getattr(step, "__name__", "the step"), try_=f"{whole.marks.advice}; or microbatches=1",
            )  # fmt: skip
        return _uncut(whole, donated, notes, padded)
    outer, marker, sources = whole.outer, markers[0], whole.sources
    equation = open_jaxpr(outer).eqns[marker]
    num_consts = equation.params["num_consts"]
    core, boundaries = whole.core
    split_dims: tuple[int | None, ...] = (None,) * num_consts
    combined: tuple[Reduction, ...] = ()
    effects = whole.effects
    piece = 0
    reduction = reduction or equation.params["reduction"]
    given = reduction is not None
    if microbatches > 1:
        small = _microbatch_shapes(shapes, microbatches, batch_axis)
        full_call = _call(equation)
        small_call = _trace_small(step, small, microbatches, alone=whole.has_one_call)
        split_dims = _split_dims(full_call, small_call, microbatches)
        small_call, in_loss = lift_from_loss(small_call, microbatches, effects.lifted)
        effects = with_examples(effects, in_loss, microbatches)
        effects = replace(effects, run=lambda values, _: whole.effects.run(values, in_loss))
        full_core, (core, boundaries) = core, core_of(small_call.jaxpr)
        differentiated = [at >= num_consts for at in range(len(open_jaxpr(full_core).invars))]
        refuse_replaced(open_jaxpr(full_core), differentiated, whole.rules, microbatches)
        # Who says how microbatches combine lets each have statistics of its own.
        core = with_whole_literals(full_core, core)
        found = with_batch_statistics(full_core, core, microbatches, split_dims, whole.rules, sizes_alone=given)
        degrees: tuple[int, ...] = ()
        if found is not None:
            full_core, degrees = eliminate_dead_code(found.full), found.degrees
            core, boundaries = without_dead_code(found.small, boundaries)
        results = results_of(full_core, core, microbatches, split_dims, whole.rules, degrees)
        if reduction is None:
            piece, reduction = results.piece, loss_reduction(results)
        else:
            notes += (*_accepted(results, reduction), *_groups(results, full_call, split_dims, reduction))
        combined, said = aux_reductions(results, each=in_loss.count, accepted=given)
        notes += said
        core = placed(full_core, core, microbatches, whole.rules)
        if found is not None:
            core, boundaries = as_of_a_microbatch(core, boundaries, degrees, num_consts, microbatches)
            outer, marker = marked_with(outer, marker, found, num_consts)
            equation = open_jaxpr(outer).eqns[marker]
            whole.rules.prepare([(one, False) for one in open_jaxpr(found.statistics).eqns])
            sources = (*sources[:num_consts], *(None for _ in degrees), *sources[num_consts:])
            split_dims += (None,) * len(degrees)
            num_consts += len(degrees)
        outer = _with_rows(outer, marker, core, in_loss.count, microbatches)
    input_names = [whole.names[s] if s is not None else f"core input {i}" for i, s in enumerate(sources)]
    parameters = range(num_consts, len(equation.invars))
    rules = whole.rules

    def graph_of(core: ClosedJaxpr) -> Graph:
        return build_graph(core, rules, parameters=parameters, losses=[0], input_names=input_names)

    graph = graph_of(core)
    unpadded_flops = graph.flops if padded else None
    if padded:
        core, boundaries = padded_program(core, boundaries, graph, rules, padded)
        core, boundaries = without_dead_code(core, boundaries)
        graph = graph_of(core)
    return Program(
        outer=outer,
        core=core,
        graph=graph,
        rules=rules,
        marker=marker,
        num_consts=num_consts,
        split_dims=split_dims,
        microbatches=microbatches,
        input_names=whole.names,
        state_inputs=whole.state_inputs,
        donated=donated,
        host_inputs=whole.host_inputs,
        host_outputs=whole.host_outputs,
        state=whole.state,
        parameter_inputs=sources[num_consts:],
        core_inputs=sources[:num_consts],
        in_tree=whole.in_tree,
        out_tree=whole.out_tree,
        fingerprint=whole.fingerprint(microbatches),
        reduction=reduction or "mean",
        reduction_given=given,
        aux_reductions=combined,
        boundaries=boundaries,
        notes=(*notes, *notes_on_draws(core)),
        effects=effects,
        piece=piece,
        padded=tuple(padded),
        unpadded_flops=unpadded_flops,
    )


def _accepted(results: Results, reduction: str) -> tuple[str, ...]:
    """What the user accepts who says how the losses of microbatches combine."""
    try:
        found = loss_reduction(results)
    except PlanError as error:
        return (
            f'reduction="{reduction}" is taken for {error.got} ({error.where}): every microbatch computes it of its '
            "own examples, which gives other numbers than the whole batch",
        )
    if found == reduction:
        return ()
    return (f'reduction="{reduction}" is taken for a loss that is a {found} over the batch',)


def _with_rows(outer: ClosedJaxpr, marker: int, core: ClosedJaxpr, effects: int, microbatches: int) -> ClosedJaxpr:
    """The step with a row for each microbatch in what effects of the loss function read, at a microbatch's size.

    Args:
      outer: the step at the full batch.
      marker: position of its marked equation.
      core: its loss function at the size of a microbatch, whose last results are read by effects.
      effects: how many.
      microbatches: into how many parts the batch is cut.
    """
    if not effects:
        return outer
    avals = [atom.aval for atom in open_jaxpr(core).outvars]
    rows = {len(avals) - n: (microbatches, *avals[-n].shape[1:]) for n in range(1, effects + 1)}
    return with_result_shapes(outer, marker, rows)


def _groups(results: Results, call: MarkedCall, split_dims: Sequence[int | None], reduction: str) -> tuple[str, ...]:
    """What is accepted of groups of neighbouring examples (pairs, tokens that are dealt together)."""
    batch = math.gcd(*(shape[d] for shape, d in zip(call.shapes, split_dims, strict=False) if d is not None))
    if results.piece == 0 or results.piece % batch == 0:
        return ()
    examples = batch // math.gcd(results.piece, batch)
    return (
        f'reduction="{reduction}" is taken for a loss of groups of {examples} neighbouring examples: where a '
        "microbatch has fewer neighbours of a device's part of the batch, groups are of other examples",
    )


def _uncut(whole: TracedStep, donated: frozenset[int], notes: tuple[str, ...], padded: Sequence[PaddedDim]) -> Program:
    """A step without a core, or with several, as one program."""
    pure, effects = lifted(inline(inline_value_and_grad(whole.outer)))
    core = eliminate_dead_code(pure)
    names, said = whole.names, fingerprint(core)
    graph = build_graph(core, whole.rules, input_names=names)
    unpadded_flops = graph.flops if padded else None
    if padded:
        core = eliminate_dead_code(padded_program(core, Boundaries(), graph, whole.rules, padded)[0])
        graph = build_graph(core, whole.rules, input_names=names)
    return Program(
        outer=core, core=core, graph=graph, rules=whole.rules, marker=None,
        num_consts=len(names), split_dims=(None,) * len(names), microbatches=1, input_names=names,
        state_inputs=whole.state_inputs, donated=donated, host_inputs=whole.host_inputs,
        host_outputs=whole.host_outputs, state=(None,) * whole.state_inputs, parameter_inputs=(),
        core_inputs=tuple(range(len(names))), in_tree=whole.in_tree, out_tree=whole.out_tree,
        fingerprint=said, reduction="mean", notes=(*notes, *notes_on_draws(core)), effects=effects,
        marks=whole.marks, padded=tuple(padded), unpadded_flops=unpadded_flops,
    )  # fmt: skip


def _trace_small(step: Callable[..., Any], shapes: tuple[Any, ...], microbatches: int, *, alone: bool) -> MarkedCall:
    """The marked call of the step at the size of one microbatch.

    Args:
      step: of the user.
      shapes: its arguments.
      microbatches: for messages.
      alone: whether the whole step has no other call: then what comes after this one is not traced, which is most of a
        step. (A step that changes something outside itself is left in the middle.)
    """
    try:
        found = traced_to_call(step, shapes) if alone else None
        if found is None:
            outer = open_jaxpr(traced(step, shapes))
            found = _call(next(e for e in outer.eqns if e.primitive is value_and_grad_p))
    except (TypeError, ValueError) as error:
        raise PlanError(
            refused=f"microbatches={microbatches}", got=f"a step that fails at the size of a microbatch ({error})",
            needed="a step that takes its batch size from its arguments", where=getattr(step, "__name__", "the step"),
            try_="x.shape[0] in place of a written batch size; an array that is no batch (class weights) in the state, "
            "since every array outside it is cut, and jax.random.key for a key as two numbers; or microbatches=1",
        ) from error  # fmt: skip
    return found


def _call(equation: Equation) -> MarkedCall:
    """What a marked equation is."""
    return MarkedCall(
        jaxpr=equation.params["jaxpr"], num_consts=equation.params["num_consts"],
        shapes=tuple(tuple(atom.aval.shape) for atom in equation.invars),
    )  # fmt: skip


def _check_request(microbatches: Any, batch_axis: Any, reduction: Any) -> None:
    if not _is_whole(batch_axis) or batch_axis < 0:
        raise PlanError(
            refused="the batch axis", got=repr(batch_axis), needed="a whole number, at least 0", where="batch_axis=",
            try_="batch_axis=0",
        )  # fmt: skip
    if not _is_whole(microbatches) or microbatches < 1:
        raise PlanError(
            refused="the number of microbatches", got=repr(microbatches), needed="a whole number, at least 1",
            where="microbatches=", try_="microbatches=1",
        )  # fmt: skip
    if reduction not in (None, "mean", "sum"):
        raise PlanError(
            refused="the reduction", got=repr(reduction), needed='"mean", "sum" or None', where="reduction=",
            try_='reduction="mean"',
        )  # fmt: skip


def _is_whole(number: Any) -> bool:
    return isinstance(number, (int, np.integer)) and not isinstance(number, bool)


def is_batched(args: Sequence[Any], batch_axis: int) -> list[bool]:
    """For each leaf of a step's arguments, whether it holds the batch: every array after the first argument that has a
    batch axis, except PRNG keys.

    Args:
      args: the step's arguments as shapes (`abstract`).
      batch_axis: which axis is the batch.
    """
    state = len(jax.tree.leaves(args[0])) if args else 0
    leaves = jax.tree.leaves(tuple(args))
    found = [
        i >= state and len(x.shape) > batch_axis and not jax.dtypes.issubdtype(x.dtype, jax.dtypes.prng_key)
        for i, x in enumerate(leaves)
    ]
    # A raw key looks like a batch of two (or four) integers; it is one if nothing else has that size.
    raw = {i for i, x in enumerate(leaves) if found[i] and x.dtype == np.uint32 and x.shape in ((2,), (4,))}
    extents = {x.shape[batch_axis] for i, x in enumerate(leaves) if found[i] and i not in raw}
    return [f and not (i in raw and extents and leaves[i].shape[0] not in extents) for i, f in enumerate(found)]


def _check_batch(shapes: tuple[Any, ...], microbatches: int, batch_axis: int) -> None:
    for (path, leaf), batched in zip(
        jax.tree_util.tree_leaves_with_path(shapes), is_batched(shapes, batch_axis), strict=True
    ):
        if not batched:
            continue
        extent, name = leaf.shape[batch_axis], f"args{jax.tree_util.keystr(path)}"
        if extent == 0:
            raise PlanError(
                refused="an empty batch", got=f"shape {leaf.shape}", needed="at least one example", where=name,
                try_="dropping the last, empty batch",
            )  # fmt: skip
        if microbatches > 1 and extent % microbatches:
            raise PlanError(
                refused=f"microbatches={microbatches}", got=f"a batch of {extent}", needed="a batch that they divide",
                where=name, try_=f"microbatches={_divisor(extent, microbatches)}, or a batch of "
                f"{extent - extent % microbatches or microbatches}",
            )  # fmt: skip


def _divisor(extent: int, near: int) -> int:
    return max(d for d in range(1, min(extent, near) + 1) if extent % d == 0)


def _microbatch_shapes(shapes: tuple[Any, ...], microbatches: int, batch_axis: int) -> tuple[Any, ...]:
    leaves, tree = jax.tree.flatten(shapes)
    small = []
    for leaf, batched in zip(leaves, is_batched(shapes, batch_axis), strict=True):
        shape = list(leaf.shape)
        if batched:
            shape[batch_axis] //= microbatches
        place = cut_placement(leaf.sharding, tuple(shape))
        small.append(jax.ShapeDtypeStruct(tuple(shape), leaf.dtype, weak_type=leaf.weak_type, sharding=place))
    return jax.tree.unflatten(tree, small)


def _split_dims(full: MarkedCall, small: MarkedCall, microbatches: int) -> tuple[int | None, ...]:
    """The dim of each captured array that shrinks with the batch."""
    found: list[int | None] = []
    num_consts = full.num_consts
    if small.num_consts != num_consts:
        raise PlanError(
            refused=f"microbatches={microbatches}", got="a loss function that reads other arrays at another batch size",
            needed="the same arrays", where="the loss function", try_="microbatches=1",
        )  # fmt: skip
    for position, (a, b) in enumerate(zip(full.shapes, small.shapes, strict=True)):
        dims = [d for d, (x, y) in enumerate(zip(a, b, strict=True)) if x != y]
        if position >= num_consts and dims:
            raise PlanError(
                refused=f"microbatches={microbatches}", got="a differentiated array whose shape depends on the batch",
                needed="parameters of fixed shape", where="meshwright.value_and_grad", try_="microbatches=1",
            )  # fmt: skip
        if len(dims) > 1:
            raise PlanError(
                refused=f"microbatches={microbatches}",
                got=f"an array of shape {a} with the batch in more than one dim",
                needed="arrays that microbatches cut along one dim", where="what the loss function reads",
                try_="making it in the loss function, where it has the size of a microbatch; or microbatches=1",
            )  # fmt: skip
        if position < num_consts:
            found.append(dims[0] if dims else None)
    return tuple(found)
