"""One local program as several that run one after the other: forward and backward, or input and weight gradients.

A stage is traced once, forward and backward together, on the shards of one device. Here that program is cut in two: the
first part computes some of the outputs, the second the others, from the inputs and from *residuals* that the first
hands on. Which values become residuals is a minimum cut over bytes (found by a maximum flow; PyTorch's AOTAutograd cuts
its joint graphs so too): what is cheap to compute (arithmetic, broadcasts, casts) may be computed again in the second
part, what is not (products, collectives, loops) runs once; inputs that are at hand anyway, parameters above all, cost
nothing, and collectives on them run again: a weight that is gathered for its use is not kept for every microbatch. Of
equally good cuts the one with the least computed again is taken, which is unique, so that every process cuts alike.

Cost: one maximum flow over the values that the second part wants of the first, a few thousand nodes at most.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from math import prod
from typing import Any

import jax
import numpy as np
from jax.sharding import AbstractMesh, Mesh, PartitionSpec

from .jaxpr import OWN_KERNEL, ClosedJaxpr, Equation, Jaxpr, consts_of, inline, is_literal, open_jaxpr
from .liveness_collectives import NAMES as COLLECTIVES
from .manual import is_shard_map
from .random import is_key

# Cheap although results and operands differ in shape.
_CHEAP = frozenset(
    """axis_index broadcast_in_dim concatenate copy dynamic_slice expand_dims iota pad reshape rev slice squeeze
    transpose""".split()  # noqa: SIM905 (a table, not a column)
)
# Never cheap, also where all operands happen to have the result's shape, as in products of square matrices.
_COSTLY = OWN_KERNEL | COLLECTIVES
_COSTLY |= frozenset(
    """conv_general_dilated dot_general gather ragged_dot_general scatter scatter-add scatter-max scatter-min
    scatter-mul scatter-sub""".split()  # noqa: SIM905
)
_NEVER_CUT = np.int32(2**31 - 1)


@dataclass(frozen=True, slots=True, kw_only=True)
class Halves:
    """A program cut in two.

    Args:
      first: its outputs are those asked for, then the residuals.
      first_inputs: which inputs of the whole program it reads, in its order.
      second: its inputs are the residuals, then `second_inputs`; its outputs the other ones, in order.
      second_inputs: which inputs of the whole program it reads, in its order.
      residuals: how many values the first hands to the second.
    """

    first: ClosedJaxpr
    first_inputs: tuple[int, ...]
    second: ClosedJaxpr
    second_inputs: tuple[int, ...]
    residuals: int


def trace_local(
    function: Callable[..., Sequence[Any]], avals: Sequence[jax.ShapeDtypeStruct], mesh: Mesh | AbstractMesh
) -> ClosedJaxpr:
    """The program that one device of a mesh runs, its collectives named by the mesh's axes.

    Args:
      function: of one device's shards, which may use collectives.
      avals: shapes of these shards.
      mesh: its axes.
    """
    everywhere = PartitionSpec()
    region = jax.shard_map(function, mesh=mesh, in_specs=everywhere, out_specs=everywhere, check_vma=False)
    whole = jax.make_jaxpr(region)(*avals)
    top = open_jaxpr(whole)
    (equation,) = (e for e in top.eqns if is_shard_map(e))
    body = equation.params["jaxpr"]
    jaxpr = open_jaxpr(body)
    constants: dict[Any, Any] = dict(zip(top.constvars, consts_of(whole), strict=True))
    pairs = list(zip(equation.invars, jaxpr.invars, strict=True))
    given: dict[Any, Any] = {atom: var for atom, var in pairs if not is_literal(atom) and atom not in constants}
    known = [
        (var, atom.val if is_literal(atom) else constants[atom])
        for atom, var in pairs
        if is_literal(atom) or atom in constants
    ]
    known += zip(jaxpr.constvars, consts_of(body), strict=True)
    opened = jaxpr.replace(
        constvars=[var for var, _ in known],
        invars=[given.get(var, var) for var in top.invars],
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )
    return inline(ClosedJaxpr(opened, [value for _, value in known]))


def part_of(
    closed: ClosedJaxpr, equations: Sequence[Equation], inputs: Sequence[Any], outputs: Sequence[Any]
) -> ClosedJaxpr:
    """Some equations of a program, with its constants.

    Args:
      closed: the program.
      equations: of it, in order.
      inputs: variables that the equations read and do not make.
      outputs: variables that they make, or inputs, or literals.
    """
    jaxpr: Jaxpr = open_jaxpr(closed)
    part = jaxpr.replace(
        invars=list(inputs), outvars=list(outputs), eqns=list(equations),
        debug_info=jaxpr.debug_info.with_unknown_names(),
    )  # fmt: skip
    return ClosedJaxpr(part, list(consts_of(closed)))


def least_effort_first(closed: ClosedJaxpr) -> list[int]:
    """The outputs of a program, those that need the fewest equations first.

    Args:
      closed: the program.
    """
    jaxpr: Jaxpr = open_jaxpr(closed)
    needed: dict[Any, int] = {}  # of each variable, a bit for each equation
    for place, equation in enumerate(jaxpr.eqns):
        mask = 1 << place
        for atom in equation.invars:
            if not is_literal(atom):
                mask |= needed.get(atom, 0)
        needed.update(dict.fromkeys(equation.outvars, mask))
    effort = [0 if is_literal(atom) else needed.get(atom, 0).bit_count() for atom in jaxpr.outvars]
    return sorted(range(len(effort)), key=effort.__getitem__)


def split_program(
    closed: ClosedJaxpr, *, first: Sequence[int], late: Sequence[int], input_bytes: Sequence[int]
) -> Halves:
    """Cut a program in two.

    Args:
      closed: the program.
      first: outputs that the first part computes.
      late: inputs that only the second part has.
      input_bytes: for each input what it costs to keep it for the second part; 0 where it is at hand anyway.

    Raises:
      ValueError: an output of the first part depends on a late input.
    """
    jaxpr: Jaxpr = open_jaxpr(closed)
    constants = set(jaxpr.constvars)
    inputs: dict[Any, int] = {var: i for i, var in enumerate(jaxpr.invars)}
    maker: dict[Any, int] = {var: i for i, equation in enumerate(jaxpr.eqns) for var in equation.outvars}
    early_outputs = [jaxpr.outvars[i] for i in first]
    late_outputs = [atom for i, atom in enumerate(jaxpr.outvars) if i not in set(first)]
    tainted = _tainted(jaxpr, {jaxpr.invars[i] for i in late})
    mine = _needed(jaxpr, maker, early_outputs)
    wanted = _needed(jaxpr, maker, late_outputs)
    if any(i in tainted for i in mine) or any(inputs.get(a) in set(late) for a in early_outputs if not is_literal(a)):
        raise ValueError("refused to cut a program: the first part needs what only the second is given")
    backward = [i for i in sorted(wanted) if i in tainted]
    reads = dict.fromkeys(a for i in backward for a in jaxpr.eqns[i].invars if not is_literal(a))
    reads.update(dict.fromkeys(a for a in late_outputs if not is_literal(a)))
    demanded = [
        v for v in reads if v not in constants and inputs.get(v) not in set(late) and maker.get(v) not in tainted
    ]

    fetched = _fetches(jaxpr, {var for var, i in inputs.items() if not input_bytes[i] and i not in set(late)})

    def again_when_run(position: int) -> bool:
        return position in fetched or is_cheap(jaxpr.eqns[position])

    def again(position: int) -> bool:
        return position not in mine or again_when_run(position)

    def cost(var: Any) -> int:
        return input_bytes[inputs[var]] if var in inputs else max(1, size_bytes(var.aval))

    while True:
        kept = _least_kept(jaxpr, demanded, maker, again, cost, constants)
        # In the order they are made: every process must compile the same program.
        residuals = [v for equation in jaxpr.eqns for v in equation.outvars if v in kept]
        computed = set(backward)
        stack = [v for v in demanded if v not in kept]
        while stack:
            position = maker.get(stack.pop())
            if position is not None and position not in computed:
                computed.add(position)
                stack += [a for a in jaxpr.eqns[position].invars if not is_literal(a) and a not in kept]
        before = _needed(jaxpr, maker, [*early_outputs, *residuals])
        # What the first part runs for residuals alone the second was free to run; it is not, once the first does.
        twice = {i for i in before & computed if not again_when_run(i)} - mine
        if not twice:
            break
        mine |= twice
    first_equations = [jaxpr.eqns[i] for i in sorted(before)]
    second_equations = [jaxpr.eqns[i] for i in sorted(computed)]
    first_inputs = _read(jaxpr, first_equations, [*early_outputs, *residuals])
    second_inputs = _read(jaxpr, second_equations, late_outputs)
    return Halves(
        first=part_of(
            closed, first_equations, [jaxpr.invars[i] for i in first_inputs], [*early_outputs, *residuals]
        ),
        first_inputs=first_inputs,
        second=part_of(
            closed, second_equations, [*residuals, *(jaxpr.invars[i] for i in second_inputs)], late_outputs
        ),
        second_inputs=second_inputs,
        residuals=len(residuals),
    )  # fmt: skip


def _fetches(jaxpr: Jaxpr, at_hand: set[Any]) -> set[int]:
    """Collectives on what is at hand: a weight that is gathered for its use."""
    known = at_hand | set(jaxpr.constvars)
    found = set()
    for position, equation in enumerate(jaxpr.eqns):
        collective = equation.primitive.name in COLLECTIVES
        if (collective or is_cheap(equation)) and all(is_literal(a) or a in known for a in equation.invars):
            known.update(equation.outvars)
            if collective:
                found.add(position)
    return found


def is_cheap(equation: Equation) -> bool:
    """Whether an equation costs no more than reading what it reads: arithmetic, or another view of its operand."""
    name = equation.primitive.name
    if name in _CHEAP:
        return True
    if name in _COSTLY or name.startswith("random_"):
        return False
    if any(
        hasattr(value, "eqns") or hasattr(value, "jaxpr") for value in jax.tree.leaves(list(equation.params.values()))
    ):
        return False
    shape = equation.outvars[0].aval.shape
    return len(equation.outvars) == 1 and all(_spreads(atom.aval.shape, shape) for atom in equation.invars)


def _spreads(operand: tuple[int, ...], result: tuple[int, ...]) -> bool:
    """Whether arithmetic spreads an operand over a result of another shape: scalars, and dims of one."""
    return not operand or (
        len(operand) == len(result) and all(n in (1, m) for n, m in zip(operand, result, strict=True))
    )


def size_bytes(aval: Any) -> int:
    """Bytes of an array of this shape and dtype."""
    return prod(aval.shape) * (8 if is_key(aval) else aval.dtype.itemsize)


def _tainted(jaxpr: Jaxpr, late: set[Any]) -> set[int]:
    """The equations that depend on a late input."""
    reached = set(late)
    found = set()
    for position, equation in enumerate(jaxpr.eqns):
        if any(not is_literal(a) and a in reached for a in equation.invars):
            found.add(position)
            reached.update(equation.outvars)
    return found


def _needed(jaxpr: Jaxpr, maker: dict[Any, int], outputs: Sequence[Any]) -> set[int]:
    """The equations that the outputs depend on."""
    found: set[int] = set()
    stack = [a for a in outputs if not is_literal(a)]
    while stack:
        position = maker.get(stack.pop())
        if position is not None and position not in found:
            found.add(position)
            stack += [a for a in jaxpr.eqns[position].invars if not is_literal(a)]
    return found


def _read(jaxpr: Jaxpr, equations: Sequence[Equation], outputs: Sequence[Any]) -> tuple[int, ...]:
    """The program's inputs that equations or outputs read."""
    atoms = {a for equation in equations for a in equation.invars if not is_literal(a)}
    atoms |= {a for a in outputs if not is_literal(a)}
    return tuple(i for i, var in enumerate(jaxpr.invars) if var in atoms)


def _least_kept(
    jaxpr: Jaxpr,
    demanded: Sequence[Any],
    maker: dict[Any, int],
    again: Callable[[int], bool],
    cost: Callable[[Any], int],
    constants: set[Any],
) -> set[Any]:
    """The values to keep, of least cost, so that all that is demanded can be computed from them by equations that may
    run again."""
    number: dict[Any, int] = {}
    edges: list[tuple[int, int, int]] = []  # capacities of -1 are never cut
    source, sink = 0, 1
    stack = list(reversed(demanded))
    while stack:
        var = stack.pop()
        if var in number:
            continue
        number[var] = 2 + 2 * len(number)
        edges.append((number[var], number[var] + 1, cost(var)))
        position = maker.get(var)
        if position is None or not again(position):
            edges.append((source, number[var], -1))
        else:
            stack += [a for a in jaxpr.eqns[position].invars if not is_literal(a) and a not in constants]
    for var, node in number.items():
        position = maker.get(var)
        if position is not None and again(position):
            operands = dict.fromkeys(a for a in jaxpr.eqns[position].invars if not is_literal(a) and a not in constants)
            edges += [(number[a] + 1, node, -1) for a in operands]
    edges += [(number[var] + 1, sink, -1) for var in demanded]
    if not number:
        return set()
    size = 2 + 2 * len(number)
    below_sink = _sink_side(edges, size, source, sink)
    return {var for var, node in number.items() if not below_sink[node] and below_sink[node + 1]}


def _sink_side(edges: Sequence[tuple[int, int, int]], size: int, source: int, sink: int) -> np.ndarray:
    """The sink's side of the minimum cut nearest to it: which nodes can still send to the sink under a maximum flow."""
    from scipy.sparse import csr_array  # a sixth of a second, which a plan of one stage never needs
    from scipy.sparse.csgraph import breadth_first_order, maximum_flow

    starts, stops, capacities = (np.array(column, dtype=np.int64) for column in zip(*edges, strict=True))
    finite = capacities >= 0
    # SciPy counts in 32 bits. Capacities are rounded up to a common unit that lets all of them add up.
    unit = max(1, -(-int(capacities[finite].sum()) // 2**29))
    scaled = np.where(finite, -(-capacities // unit), _NEVER_CUT).astype(np.int32)
    network = csr_array((scaled, (starts, stops)), shape=(size, size))
    flow = maximum_flow(network, source, sink).flow
    left = (network - flow).tocsr()
    left.data = (left.data > 0).astype(np.int32)
    left.eliminate_zeros()
    reached = breadth_first_order(left.T.tocsr(), sink, return_predecessors=False)
    side = np.zeros(size, dtype=bool)
    side[reached] = True
    return side
