"""The user's step at its full batch: what its programs in all numbers of microbatches share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from .._jax.boundary import Boundaries
from .._jax.effects import NO_EFFECTS, Effects
from .._jax.grad import marked_calls, value_and_grad_p
from .._jax.jaxpr import ClosedJaxpr, eliminate_dead_code, inline, is_literal, open_jaxpr
from .._jax.lifting import lift_effects
from .._jax.placement import in_host_memory
from .._jax.trace import trace
from .donation import donated_inputs
from .marking import Marks, marks_of
from .rules import Rules
from .sorted_rows import with_sorted_rows
from .state import StateLeaf, relate_state


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedStep:
    """A step, traced once.

    Args:
      outer: the whole step, `jit` calls inlined; where it has one marked equation, without effects.
      names: path of each input.
      state_inputs: how many of the leading inputs come back as the leading outputs.
      donated: the inputs whose buffers the step takes over, as it says itself (`donation`).
      wishes: what it says about layouts (`_jax.trace`), of which the plan decides.
      offloads: where it moves what it computes on with to the host's memory (there).
      host_inputs: the inputs that are kept in the host's memory.
      host_outputs: the results that are.
      in_tree: structure of the arguments.
      out_tree: structure of the results.
      effects: lifted out of a step with one marked equation: what they read are further results of `outer`.
      rules: factor rules of the step's equations and of its programs'.
    """

    outer: ClosedJaxpr
    names: tuple[str, ...]
    state_inputs: int
    donated: frozenset[int]
    wishes: tuple[str, ...]
    offloads: tuple[str, ...]
    host_inputs: frozenset[int]
    host_outputs: frozenset[int]
    in_tree: Any
    out_tree: Any
    effects: Effects = NO_EFFECTS
    rules: Rules = field(default_factory=Rules)

    @cached_property
    def markers(self) -> tuple[int, ...]:
        """Positions of its `value_and_grad` equations."""
        return _markers(self.outer)

    @cached_property
    def marks(self) -> Marks:
        """Its marks in words."""
        return marks_of(self.outer)

    @cached_property
    def has_one_call(self) -> bool:
        """Whether there is one `value_and_grad` equation in all, in loops and loss functions too."""
        return marked_calls(self.outer) == 1

    @cached_property
    def sources(self) -> tuple[int | None, ...]:
        """For each input of the only marked equation the input of the step it is, or None if it is computed."""
        (marker,) = self.markers
        positions: dict[Any, int] = {var: i for i, var in enumerate(open_jaxpr(self.outer).invars)}
        invars = open_jaxpr(self.outer).eqns[marker].invars
        return tuple(None if is_literal(a) else positions.get(a) for a in invars)

    @cached_property
    def state(self) -> tuple[StateLeaf | None, ...]:
        """For each state input, how its dims relate to the parameters'; of a step with one marked equation."""
        (marker,) = self.markers
        num_consts = open_jaxpr(self.outer).eqns[marker].params["num_consts"]
        return relate_state(self.outer, marker, self.sources[num_consts:], self.state_inputs, self.rules)

    @cached_property
    def core(self) -> tuple[ClosedJaxpr, Boundaries]:
        """As `core_of`, of the loss function of the only marked equation."""
        (marker,) = self.markers
        return core_of(open_jaxpr(self.outer).eqns[marker].params["jaxpr"])

    def fingerprint(self, microbatches: int) -> str:
        """Equal for equal steps at equal shapes, cut into so many microbatches."""
        return _digest(microbatches, self._text)

    @cached_property
    def _text(self) -> bytes:
        return _text(self.outer)


def core_of(loss: ClosedJaxpr) -> tuple[ClosedJaxpr, Boundaries]:
    """The program of a loss function without dead code, its mixtures as operators, and the layer boundaries in it."""
    written = Boundaries()
    return with_sorted_rows(*without_dead_code(inline(loss, boundaries=written), written))


def without_dead_code(whole: ClosedJaxpr, written: Boundaries) -> tuple[ClosedJaxpr, Boundaries]:
    """An inlined program without dead code, and the layer boundaries that were in it."""
    core = eliminate_dead_code(whole)
    # What is left has the variables it had, some of them dropped.
    places = {id(var): place for place, eqn in enumerate(open_jaxpr(whole).eqns) for var in eqn.outvars}
    kept: list[int] = []
    for eqn in open_jaxpr(core).eqns:
        known = [places[id(var)] for var in eqn.outvars if id(var) in places]
        kept.append(known[0] if known else max(kept, default=0))  # one without results stays behind the one before
    before = sorted({sum(place < cut for place in kept) for cut in written.before})
    scans = [number for number, place in enumerate(kept) if place in written.scans]
    return core, Boundaries(before=[cut for cut in before if 0 < cut < len(kept)], scans=scans)


def trace_step(step: Callable[..., Any], shapes: tuple[Any, ...]) -> TracedStep:
    """Trace `step` on arguments of these shapes.

    Args:
      step: a function of arrays; the first argument is the state if the first result has its structure and shapes.
      shapes: its arguments (`abstract`).
    """
    found = trace(step, shapes)
    outer, out_tree = inline(found.program), jax.tree.structure(found.results)
    state_inputs = _state_inputs(outer, shapes, out_tree)
    donated = donated_inputs(found.program, outer, state_inputs)
    # State stays where the step leaves it: what comes from elsewhere is moved there before the first step.
    hosted = [*found.hosted[:state_inputs], *map(in_host_memory, jax.tree.leaves(shapes)[state_inputs:])]
    host_inputs = frozenset(i for i, is_one in enumerate(hosted) if is_one)
    effects = NO_EFFECTS
    if len(_markers(outer)) == 1:  # else it is planned whole, and lifted then, when its derivatives are in line
        outer, effects = lifted(outer)
    return TracedStep(
        outer=outer, effects=effects, out_tree=out_tree, in_tree=jax.tree.structure(shapes),
        names=tuple(f"args{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(shapes)),
        state_inputs=state_inputs, donated=donated, wishes=found.wishes,
        offloads=found.offloads, host_inputs=host_inputs,
        host_outputs=frozenset(i for i, is_one in enumerate(found.hosted) if is_one),
    )  # fmt: skip


def traced(step: Callable[..., Any], shapes: tuple[Any, ...]) -> ClosedJaxpr:
    """A step's program, `jit` calls inlined."""
    return inline(trace(step, shapes).program)


def lifted(program: ClosedJaxpr) -> tuple[ClosedJaxpr, Effects]:
    """As `lift_effects`, `jit` calls inlined."""
    pure, effects = lift_effects(program)
    return (inline(pure), effects) if effects.lifted else (program, effects)


def _markers(outer: ClosedJaxpr) -> tuple[int, ...]:
    return tuple(i for i, eqn in enumerate(open_jaxpr(outer).eqns) if eqn.primitive is value_and_grad_p)


def _state_inputs(outer: ClosedJaxpr, shapes: tuple[Any, ...], out_tree: Any) -> int:
    """How many leading inputs come back as the leading outputs."""
    if not shapes:
        return 0
    first = jax.tree.structure(shapes[0])
    children = out_tree.children() if out_tree.node_data() is not None else []
    heads = [out_tree, *(children[:1] if children else [])]
    avals = [(a.aval.shape, a.aval.dtype) for a in open_jaxpr(outer).outvars]
    want = [(leaf.shape, leaf.dtype) for leaf in jax.tree.leaves(shapes[0])]
    if any(head == first for head in heads) and avals[: len(want)] == want:
        return len(want)
    return 0


def fingerprint(whole: ClosedJaxpr) -> str:
    """Equal for equal programs at equal shapes."""
    return _digest(1, _text(whole))


def _digest(microbatches: int, text: bytes) -> str:
    return hashlib.sha256(f"{microbatches}\n".encode() + text).hexdigest()[:16]


def _text(program: ClosedJaxpr) -> bytes:
    """The primitives and shapes of a program."""
    lines: list[str] = []
    for equation in open_jaxpr(program).eqns:
        shapes = " ".join(str(a.aval) for a in (*equation.invars, *equation.outvars))
        lines.append(f"{equation.primitive.name} {shapes}\n")
        if equation.primitive is value_and_grad_p:
            lines.append(fingerprint(inline(equation.params["jaxpr"])))
    return "".join(lines).encode()
