"""The user's step at its full batch: what its programs in all numbers of microbatches share."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import jax

from .._jax.boundary import Boundaries
from .._jax.grad import marked_calls, value_and_grad_p
from .._jax.jaxpr import ClosedJaxpr, eliminate_dead_code, inline, is_literal, open_jaxpr
from .rules import Rules
from .state import StateLeaf, relate_state


@dataclass(frozen=True, kw_only=True, eq=False)
class TracedStep:
    """A step, traced once.

    Args:
      outer: the whole step, `jit` calls inlined.
      names: path of each input.
      state_inputs: how many of the leading inputs come back as the leading outputs.
      in_tree: structure of the arguments.
      out_tree: structure of the results.
      rules: factor rules of the step's equations and of its programs'.
    """

    outer: ClosedJaxpr
    names: tuple[str, ...]
    state_inputs: int
    in_tree: Any
    out_tree: Any
    rules: Rules = field(default_factory=Rules)

    @cached_property
    def markers(self) -> tuple[int, ...]:
        """Positions of its `value_and_grad` equations."""
        return tuple(i for i, eqn in enumerate(open_jaxpr(self.outer).eqns) if eqn.primitive is value_and_grad_p)

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
    """The program of a loss function without dead code, and the layer boundaries in it."""
    written = Boundaries()
    return without_dead_code(inline(loss, boundaries=written), written)


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
    outer, out_tree = traced(step, shapes)
    return TracedStep(
        outer=outer, out_tree=out_tree, in_tree=jax.tree.structure(shapes),
        names=tuple(f"args{jax.tree_util.keystr(path)}" for path, _ in jax.tree_util.tree_leaves_with_path(shapes)),
        state_inputs=_state_inputs(outer, shapes, out_tree),
    )  # fmt: skip


def traced(step: Callable[..., Any], shapes: tuple[Any, ...]) -> tuple[ClosedJaxpr, Any]:
    """A step's program, `jit` calls inlined, and the structure of its results."""
    closed, out_shape = jax.make_jaxpr(step, return_shape=True)(*shapes)
    return inline(closed), jax.tree.structure(out_shape)


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
