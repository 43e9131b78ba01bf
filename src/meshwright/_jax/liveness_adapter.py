"""From a traced step to the memory model's program: which kind each primitive is.

Calls are written in line, the start of a recomputation becomes a barrier, and loops get their slices and stacked
results explicitly. A primitive not known here is arithmetic if its one result has its operands' shape, and otherwise
has its own kernel and result; new primitives appear with each release of JAX.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Hashable, Mapping, Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from meshwright._jax.attention import BACKWARD, FORWARD, scratch_of
from meshwright._jax.dataflow import Kind, Program
from meshwright._jax.jaxpr import OWN_KERNEL, called_body, is_dropped, is_literal, open_jaxpr, scan_parts, source_line
from meshwright._jax.liveness_builder import Builder
from meshwright._jax.liveness_collectives import NAMES as COLLECTIVES, add_collective
from meshwright._jax.liveness_pipelined import Late, scatters_of_stacks
from meshwright._jax.liveness_turned import is_turned, read_as, turned_slices
from meshwright._jax.ragged_on_cpu import products_of_all_groups
from meshwright._jax.random import is_drawn_by_arithmetic

_PLAIN = (bool, int, str, type(None))  # parameters that are compared as they are
_VIEWS = ("reshape", "squeeze", "expand_dims", "stop_gradient", "sharding_constraint", "pvary", "pcast", "copy", "name")
_PERMUTES = ("rev", "slice", "pad", "concatenate", "dynamic_slice", "gather")
_REDUCES = ("reduce_sum", "reduce_max", "reduce_min", "reduce_prod", "reduce_and", "reduce_or")
_EXPENSIVE = frozenset(
    """acos acosh asin asinh atan atan2 atanh cbrt cosh digamma div erf erf_inv erfc exp exp2 expm1 lgamma log
    log1p logistic pow rsqrt sinh sqrt tan tanh""".split()  # noqa: SIM905 (a table, not a column)
)
# What XLA's CPU kernel library (YNNPACK) takes in beside a reduction.
_LIBRARY = frozenset(
    """abs add add_any cbrt ceil convert_element_type cos div erf exp expm1 floor log log1p logistic max min mul
    neg pow round rsqrt sign sin sqrt square sub tanh""".split()  # noqa: SIM905 (a table, not a column)
)


def dataflow_of(
    function: Callable[..., Any], *arguments: Any, donate_argnums: Sequence[int] = (), platform: str = "cpu",
    host_inputs: Collection[int] = (), host_outputs: Collection[int] = (),
) -> Program:  # fmt: skip
    """The memory model's program of ``jax.jit(function, donate_argnums=...)`` on these (abstract) arguments.

    `meshwright.memory.liveness.predict` says what memory it needs. If the whole function is one `jax.shard_map`, all
    bytes are those of one device. `platform`, `host_inputs`, `host_outputs`: as of `program_of`, leaves counted.

    Raises:
      ValueError: if a `jax.shard_map` stands beside other operations, which then have no size per device.
    """
    closed = jax.make_jaxpr(function)(*arguments)
    donated: list[bool] = []
    for position, argument in enumerate(arguments):
        donated += [position in donate_argnums] * len(jax.tree.leaves(argument))
    return program_of(
        closed, donated, platform=platform, host_inputs=host_inputs, host_outputs=host_outputs
    )  # fmt: skip


def program_of(
    closed: Any, donated: Sequence[bool] = (), *, mesh: Mapping[str, int] | None = None, platform: str = "cpu",
    host_inputs: Collection[int] = (), host_outputs: Collection[int] = (), is_body: bool = False,
) -> Program:  # fmt: skip
    """The memory model's program of a closed jaxpr.

    Args:
      closed: the traced program.
      donated: for each of its inputs, whether its buffer may be taken over; none by default.
      mesh: the axes of the `shard_map` whose body it is, in order, with their sizes; None where it is none.
      platform: whose compiler orders and fuses it: "cpu", "gpu" or "tpu".
      host_inputs: positions of inputs in the host's memory: on the device from where they are first read.
      host_outputs: positions of results that go there: on the device until they have been computed.
      is_body: whether it is a branch or a loop's body, whose arguments lie as the compiler likes.

    Raises:
      ValueError: see `dataflow_of`.
    """
    hosted = [i in host_inputs for i in range(len(open_jaxpr(closed).invars))]
    given = list(zip([*donated, *(False for _ in hosted[len(donated) :])], hosted, strict=True))
    jaxpr, given, mesh = _unwrapped(open_jaxpr(closed), given, mesh)
    reader = _Reader(mesh=mesh, platform=platform)
    there = {var for var, (_, is_hosted) in zip(jaxpr.invars, given, strict=True) if is_hosted}
    inputs = [var for var in (*jaxpr.constvars, *jaxpr.invars) if var not in there]
    arguments = [reader.value(var.aval) for var in inputs]
    env = dict(zip(inputs, arguments, strict=True))
    reader.given.update(() if is_body else arguments)
    reader.fetched.update(there)
    reader.equations(jaxpr, env)
    outputs = [
        reader.sent(value) if i in host_outputs else value
        for i, value in enumerate(reader.read(env, atom) for atom in jaxpr.outvars)
    ]
    taken = {var for var, (is_donated, _) in zip(jaxpr.invars, given, strict=True) if is_donated}
    flags = [var in taken for var in inputs]
    return reader.program(arguments, outputs, _matched(reader, arguments, outputs, flags))


_Flags = tuple[bool, bool]
"""Of one input of a program: (is donated, is in the host's memory)."""


def _unwrapped(
    jaxpr: Any, flags: list[_Flags], mesh: Mapping[str, int] | None
) -> tuple[Any, list[_Flags], Mapping[str, int] | None]:
    """The body of a jaxpr that is nothing but one call, with the flags of the body's inputs, and its mesh."""
    given: dict[Any, _Flags]
    while len(jaxpr.eqns) == 1 and jaxpr.eqns[0].primitive.name in ("shard_map", "jit", "pjit"):
        (call,) = jaxpr.eqns
        if list(jaxpr.outvars) != list(call.outvars):
            break
        given = dict(zip(jaxpr.invars, flags, strict=True))
        flags = [(False, False) if is_literal(a) else given.get(a, (False, False)) for a in call.invars]
        if call.primitive.name == "shard_map":
            mesh = dict(call.params["mesh"].shape)
        jaxpr = open_jaxpr(call.params["jaxpr"])
    return jaxpr, flags, mesh


def _matched(
    reader: Builder, arguments: list[int], outputs: list[int], donated: Sequence[bool]
) -> tuple[tuple[int, int], ...]:
    """Pairs of donated argument and output of one shape and dtype, in order, as JAX makes them."""
    waiting: dict[Any, list[int]] = {}
    for position, (value, given) in enumerate(zip(arguments, donated, strict=True)):
        if given:
            waiting.setdefault(reader.types[value], []).append(position)
    pairs = []
    for position, value in enumerate(outputs):
        if queue := waiting.get(reader.types[value]):
            pairs.append((queue.pop(0), position))
    return tuple(pairs)


def _said(params: Mapping[str, Any]) -> Hashable:
    """Parameters of an equation, equal for those that say the same."""
    if "grid_mapping" in params:  # of a Pallas kernel, as text it leaves out which blocks it reads
        return id(params["grid_mapping"])
    return tuple((name, value if type(value) in _PLAIN else str(value)) for name, value in sorted(params.items()))


class _Reader(Builder):
    """Adds the equations of a jaxpr to a program.

    Attributes:
      behind: collectives, by path, that send what the trip before made (`liveness_pipelined`): that, or None in the
        first trip.
      made: what they are to send in the next trip.
    """

    def __init__(self, *, mesh: Mapping[str, int] | None, platform: str) -> None:
        super().__init__(mesh=mesh, platform=platform)
        self.behind: dict[tuple[int, ...], int | None] = {}
        self.made: dict[tuple[int, ...], int] = {}
        self._path: tuple[int, ...] = ()

    def equations(self, jaxpr: Any, env: dict[Any, int]) -> None:
        """Adds every equation of `jaxpr`; `env` maps its variables to values and learns the new ones."""
        for equation in jaxpr.eqns:
            results = self._equation(equation, env)
            for var, value in zip(equation.outvars, results, strict=True):
                if not is_dropped(var):
                    env[var] = value

    def _inline(self, body: Any, reads: Sequence[int]) -> tuple[int, ...]:
        inner = open_jaxpr(body)
        env = dict(zip(inner.invars, reads, strict=True))
        for var, const in zip(inner.constvars, getattr(body, "consts", ()), strict=False):
            env[var] = self.emit(Kind.BROADCAST, "constant", (), [var.aval], key=("const", id(const)))[0]
        self.equations(inner, env)
        return tuple(self.read(env, atom) for atom in inner.outvars)

    def _equation(self, equation: Any, env: dict[Any, int]) -> tuple[int, ...]:
        name, params = equation.primitive.name, equation.params
        operands = [self.read(env, atom) for atom in equation.invars]
        avals = [var.aval for var in equation.outvars]
        if name == "shard_map":
            raise ValueError(
                "refused to predict memory · got a shard_map beside other operations · needed the whole step inside one"
                f" shard_map · where: {source_line(equation)} · try: move the other operations into it"
            )
        if name == "scan":
            return self._scan(equation, operands)
        if name == "while":
            return self._while(equation, operands)
        if name == "cond":
            bodies = tuple(
                program_of(branch, mesh=self.mesh, platform=self.platform, is_body=True)
                for branch in params["branches"]
            )
            return self.emit(Kind.BRANCH, name, operands, avals, bodies=bodies)
        if name == "ragged_dot_general" and self.platform == "cpu":
            return self._inline(products_of_all_groups(equation), operands)
        if (body := called_body(equation)) is not None:
            if params.get("differentiated") and params.get("prevent_cse"):
                operands = self.barrier(operands)  # the start of a recomputation
            self._path = (*self._path, id(equation))
            made = self._inline(body, operands)
            self._path = self._path[:-1]
            return made
        if name == "optimization_barrier":
            return tuple(self.barrier(operands))
        if self.behind and (path := (*self._path, id(equation))) in self.behind:
            return (self._behind(path, equation, *operands),)
        if name in COLLECTIVES:
            return tuple(add_collective(self, equation, position, value) for position, value in enumerate(operands))
        # A literal is folded into the kernel that reads it: no operand, but part of what makes operations equal.
        reads = [value for value, atom in zip(operands, equation.invars, strict=True) if not is_literal(atom)]
        literals = tuple(str(atom) if is_literal(atom) else None for atom in equation.invars)
        key = (_said(params), literals)
        if not reads:
            made = self.emit(Kind.BROADCAST, name, (), avals, key=None if equation.effects else key)
            if name == "broadcast_in_dim" and not np.any(equation.invars[0].val):
                self.zeros.update(made)
            return made
        return self._array_operation(equation, reads, avals, key)

    def _array_operation(self, equation: Any, reads: list[int], avals: list[Any], key: Any) -> tuple[int, ...]:
        name, params = equation.primitive.name, equation.params
        shape = tuple(getattr(avals[0], "shape", ())) if avals else ()
        if name in _VIEWS:
            return (self.reshaped(reads[0], shape),)
        if name == "dot_general" and len(reads) == 2:
            return self.dot(equation, reads, key)
        if name == "conv_general_dilated":
            return self.convolution(equation, reads, key)
        if name == "select_and_scatter_add" and len(reads) == 2:
            return self.pooling_gradient(equation, reads, key)
        if name == "convert_element_type" and (same := self.converted(reads[0], avals[0].dtype)) is not None:
            return (same,)
        if name == "broadcast_in_dim":
            return (self.spread(reads[0], shape, params["broadcast_dimensions"]),)
        if name == "transpose":
            turned = self.arranged(reads[0], params["permutation"])
            self.transposed.add(turned)
            return (turned,)
        if name == "split":
            parts = enumerate(avals)
            return tuple(self.emit(Kind.PERMUTE, "slice", reads, [aval], key=(key, rank))[0] for rank, aval in parts)
        if self.on_tpu and (found := self._picked(equation, reads, avals, key)) is not None:
            return found
        if name in _PERMUTES:
            return self.emit(Kind.PERMUTE, name, reads, avals, key=key, expensive=name == "gather")
        if name in _REDUCES:
            return self.reduction(name, reads[0], avals[0], key)
        if name == "dynamic_update_slice" or name.startswith("scatter"):
            if is_literal(equation.invars[0]):
                reads = [self.read({}, equation.invars[0]), *reads]  # what it writes into is no part of its kernel
            return self.emit(Kind.UPDATE, name, reads, avals, key=key)
        if name == "integer_pow":
            return self.arithmetic(name, reads, avals, key, expensive=params["y"] < 0, library=params["y"] == 2)
        if self._is_arithmetic(name, reads, avals):
            reads = [self.spread(value, shape) for value in reads]
            if (
                self.platform == "cpu"
                and name == "div"
                and len(reads) == 2
                and (product := self.divided(reads, avals)) is not None
            ):
                return product
            constant_divisor = name == "div" and is_literal(equation.invars[1])  # a multiplication, really
            expensive = name in _EXPENSIVE and not constant_divisor
            return self.arithmetic(name, reads, avals, key, expensive=expensive, library=name in _LIBRARY)
        if self.on_gpu and is_drawn_by_arithmetic(name):  # made in the kernel that compares them
            drawn = enumerate(avals)
            made = [self.emit(Kind.BROADCAST, name, reads, [one], key=(key, n), expensive=True) for n, one in drawn]
            return tuple(value for (value,) in made)
        scratch = scratch_of(equation, self.platform) if name in (FORWARD, BACKWARD) else []
        made = self.emit(Kind.OPAQUE, name, reads, [*avals, *scratch], key=None if equation.effects else key)
        return made[: len(avals)]

    def _picked(self, equation: Any, reads: list[int], avals: list[Any], key: Any) -> tuple[int, ...] | None:
        """Gathers and scatters as TPUs have them: those of one element of each row compare all with the index, others
        are kernels of their own. None where it is neither."""
        name, numbers = equation.primitive.name, equation.params.get("dimension_numbers")
        rows = len(getattr(numbers, "operand_batching_dims", ()))
        of_one = rows > 0 and rows == len(equation.invars[0].aval.shape) - 1
        if name == "gather":
            if of_one and all(size == 1 for size in equation.params["slice_sizes"]):
                return self.emit(Kind.REDUCE, name, reads, avals, key=key, expensive=True)
            return self.emit(Kind.OPAQUE, name, reads, avals, key=key)
        if name.startswith("scatter") and of_one and not numbers.update_window_dims:
            return self.emit(Kind.ELEMENTWISE, name, reads, avals, key=key)
        return None

    def _is_arithmetic(self, name: str, reads: Sequence[int], avals: Sequence[Any]) -> bool:
        """Whether a primitive works element by element: it gives one array, of the shape of its operands spread over
        each other's dims."""
        if name in OWN_KERNEL or len(avals) != 1:
            return False
        shape = tuple(getattr(avals[0], "shape", ()))
        if not {len(self.types[value][0]) for value in reads} <= {0, len(shape)}:
            return False
        try:
            return np.broadcast_shapes(*(self.types[value][0] for value in reads)) == shape
        except ValueError:
            return False

    def _scan(self, equation: Any, reads: list[int]) -> tuple[int, ...]:
        parts = scan_parts(equation)
        body, consts, carries = open_jaxpr(parts.body), parts.num_consts, parts.num_carry
        inner = _Reader(mesh=self.mesh, platform=self.platform)
        outer_avals = [var.aval for var in equation.outvars]
        arguments = [inner.value(var.aval) for var in body.invars[: consts + carries]]
        made_inside: dict[int, int] = {}
        whole = reads
        if self.platform != "cpu":
            nothing = self.emit(Kind.BROADCAST, "sunk", (), [jax.ShapeDtypeStruct((0,), np.int8)], key="sunk")[0]
            sunk = {rank: self._sunk(inner, value, {}) for rank, value in enumerate(reads[:consts])}
            made_inside = {rank: value for rank, value in sunk.items() if value is not None}
            reads = [nothing if rank in made_inside else value for rank, value in enumerate(reads)]
        if self.on_tpu:
            reads = [*reads[: consts + carries], *self._narrowed(body, reads[consts + carries :], consts + carries)]
        elif self.on_gpu:
            same = self._turned_before(body, reads[:consts])
            inner.given.update(arguments[rank] for rank in range(consts) if same[rank] != reads[rank])
            stacks = self._turned(body, reads[consts + carries :], consts + carries)
            reads = [*same, *reads[consts : consts + carries], *stacks]
        empty = [self.emit(Kind.BROADCAST, "zeros", (), [aval], key=("zeros", rank, id(equation)))[0]
                 for rank, aval in enumerate(outer_avals[carries:])]  # fmt: skip
        late = scatters_of_stacks(body, carries) if self.on_gpu and parts.length > 1 else {}
        if late:
            of_trip = [whole[rank] if rank in made_inside else value for rank, value in enumerate(reads)]
            carried, empty = self._first_trip(equation, of_trip, empty, late)
            reads = [*reads[:consts], *carried, *reads[consts + carries :]]
            inner.behind = {one.path: inner.value(one.equation.invars[0].aval) for one in late.values()}
        stacked = [inner.array(*self.types[value]) for value in reads[consts + carries :]]
        results = [inner.value(aval) for aval in outer_avals[carries:]]
        sliced = body.invars[consts + carries :]
        slices = [inner._row(value, var.aval.shape) for value, var in zip(stacked, sliced, strict=True)]
        inputs = [made_inside.get(rank, value) for rank, value in enumerate(arguments)]
        env = dict(zip(body.invars, [*inputs, *slices], strict=True))
        for var, const in zip(body.constvars, getattr(parts.body, "consts", ()), strict=False):
            env[var] = inner.emit(Kind.BROADCAST, "constant", (), [var.aval], key=("const", id(const)))[0]
        inner.equations(body, env)
        outs = [inner.read(env, atom) for atom in body.outvars]
        updated = [
            inner.emit(Kind.UPDATE, "dynamic_update_slice", [target, value], [aval])[0]
            for target, value, aval in zip(results, outs[carries:], outer_avals[carries:], strict=True)
        ]
        first_result = consts + carries + len(stacked)
        kept = [(consts + rank, rank) for rank in range(carries)]
        kept += [(first_result + rank, carries + rank) for rank in range(len(results))]
        moved = self._moved_out(inner, dict(zip(arguments[:consts], reads, strict=False))) if self.on_tpu else {}
        sending = [value for value in inner.behind.values() if value is not None]
        kept += [(first_result + len(results) + rank, len(outer_avals) + rank) for rank in range(len(sending))]
        program = inner.program(
            [*arguments, *stacked, *results, *sending, *moved],
            [*outs[:carries], *updated, *(inner.made[one] for one in inner.behind)], tuple(kept),
        )  # fmt: skip
        reads = [*reads, *empty, *(self.made.pop(one) for one in inner.behind), *moved.values()]
        avals = [*outer_avals, *(one.equation.invars[0].aval for one in late.values())]
        made = list(self.emit(Kind.LOOP, "scan", reads, avals, kept=tuple(kept), bodies=(program,)))
        for (rank, one), value in zip(late.items(), made[len(outer_avals) :], strict=True):
            sent = add_collective(self, one.equation, 0, value)
            made[rank] = self.emit(Kind.UPDATE, "dynamic_update_slice", [made[rank], sent], [outer_avals[rank]])[0]
        return tuple(made[: len(outer_avals)])

    def _first_trip(
        self, equation: Any, reads: list[int], empty: list[int], late: Mapping[int, Late]
    ) -> tuple[Sequence[int], list[int]]:
        """The first trip of a scan, before its loop: what it carries to the next, and the stacks of its results.

        Args:
          equation: the scan.
          reads: its operands.
          empty: the stacks of its results.
          late: collectives of which what they send is carried to the next trip, by result (`liveness_pipelined`).
        """
        parts = scan_parts(equation)
        body, given = open_jaxpr(parts.body), parts.num_consts + parts.num_carry
        slices = [
            self._row(value, var.aval.shape) for value, var in zip(reads[given:], body.invars[given:], strict=True)
        ]
        before = self.behind, self._path
        self.behind, self._path = dict.fromkeys(one.path for one in late.values()), ()
        outs = self._inline(parts.body, [*reads[:given], *slices])
        self.behind, self._path = before
        stacks = [
            empty[rank] if parts.num_carry + rank in late
            else self.emit(Kind.UPDATE, "dynamic_update_slice", [empty[rank], value], [self._aval(empty[rank])])[0]
            for rank, value in enumerate(outs[parts.num_carry :])
        ]  # fmt: skip
        return outs[: parts.num_carry], stacks

    def _row(self, stack: int, shape: tuple[int, ...]) -> int:
        aval = jax.ShapeDtypeStruct(shape, self.types[stack][1])
        return self.emit(Kind.PERMUTE, "dynamic_slice", [stack], [aval])[0]

    def _aval(self, value: int) -> jax.ShapeDtypeStruct:
        return jax.ShapeDtypeStruct(*self.types[value])

    def _behind(self, path: tuple[int, ...], equation: Any, value: int) -> int:
        """A collective that sends what the trip before made; in the first trip nothing."""
        self.made[path] = value
        sent = self.behind[path]
        if sent is None:
            return self.emit(Kind.BROADCAST, "zeros", (), [equation.outvars[0].aval])[0]
        return add_collective(self, equation, 0, sent)

    def _moved_out(self, inner: _Reader, outside: dict[int, int]) -> dict[int, int]:
        """Conversions to fewer bits of what a loop has from outside, moved out of its body: XLA makes what does not
        change once, before the loop, if it is no larger than what it is made of (casts of weights beside a loop over
        microbatches).

        Args:
          inner: the body.
          outside: of its values that do not change, those that they are outside; views of them are added.

        Returns:
          The values that are moved, which become arguments of the body, and what they are outside.
        """
        moved: dict[int, int] = {}
        for operation in inner.operations:
            if operation.kind is Kind.BARRIER:  # which XLA removes before it moves anything
                pairs = zip(operation.writes, operation.reads, strict=True)
                outside.update((new, outside[old]) for new, old in pairs if old in outside)
            source = outside.get(operation.reads[0]) if len(operation.reads) == 1 else None
            if source is None or len(operation.writes) != 1:
                continue
            (made,) = operation.writes
            shape, dtype = inner.types[made]
            if operation.kind is Kind.VIEW:
                outside[made] = self.reshaped(source, shape)
            elif operation.name == "convert_element_type" and dtype.itemsize < self.types[source][1].itemsize:
                aval = jax.ShapeDtypeStruct(shape, dtype)
                (moved[made],) = self.emit(Kind.ELEMENTWISE, operation.name, [source], [aval], key=str(dtype))
        inner.operations = [one for one in inner.operations if moved.keys().isdisjoint(one.writes)]
        return moved

    def _narrowed(self, body: Any, stacks: Sequence[int], first: int) -> list[int]:
        """What a loop takes slices of: narrow, where the body does nothing with a slice but to make it so.

        XLA moves the conversion out of the loop (weights of scanned layers as bfloat16, kept beside them).
        """
        found = []
        for var, stack in zip(body.invars[first:], stacks, strict=True):
            shape, dtype = self.types[stack]
            kinds = read_as(body, var)
            if len(kinds) == 1 and (target := next(iter(kinds))) is not None and target.itemsize < dtype.itemsize:
                aval = jax.ShapeDtypeStruct(shape, target)
                (stack,) = self.emit(Kind.ELEMENTWISE, "convert_element_type", [stack], [aval], key=str(target))
            found.append(stack)
        return found

    def _turned(self, body: Any, stacks: Sequence[int], first: int) -> list[int]:
        """What a loop takes slices of: copied before, where its body first moves another dim of a slice to the end, or
        gathers it along another dim than its first, which a gather wants to vary the slowest.

        XLA's GPU compiler lets the loop's readers choose how the stack lies, and whoever stacked it lays it otherwise.
        A stack that the program is given, as what a stage's forward pass kept for its backward pass, lies as it is
        given, and the slices are turned (docs/compilers.md: llama3-405b).
        """
        found = []
        for var, stack in zip(body.invars[first:], stacks, strict=True):
            if stack not in self.given and is_turned(body, var):
                aval = jax.ShapeDtypeStruct(*self.types[stack])
                (stack,) = self.emit(Kind.OPAQUE, "copy", [stack], [aval], key="turned")
            found.append(stack)
        return found

    def _turned_before(self, body: Any, constants: Sequence[int]) -> list[int]:
        """What a loop is given for all trips: copied before it where a loop inside takes slices that are turned. XLA
        gives it the copy in place of the stack, as long as it runs."""
        turned, found = turned_slices(body), list[int]()
        for var, value in zip(body.invars, constants, strict=False):
            if var in turned:
                aval = jax.ShapeDtypeStruct(*self.types[value])
                (value,) = self.emit(Kind.OPAQUE, "copy", [value], [aval], key="turned")
            found.append(value)
        return found

    def _sunk(self, inner: _Reader, value: int, known: dict[int, int | None]) -> int | None:
        """A constant of a loop that is a number spread out, on TPUs also arithmetic of such and of iotas, made again in
        the loop's body; None for others. XLA sinks such constants, so that no array of them is kept beside the loop.
        """
        if value not in known:
            known[value] = None
            source = self.source.get(value)
            kinds = (Kind.BROADCAST, Kind.ELEMENTWISE, Kind.VIEW) if self.on_tpu else (Kind.BROADCAST,)
            if source is not None and source.kind in kinds:
                reads = [self._sunk(inner, one, known) for one in source.reads]
                found = [one for one in reads if one is not None]
                if len(found) == len(reads):
                    shape, dtype = self.types[value]
                    aval = jax.ShapeDtypeStruct(shape, dtype)
                    (known[value],) = inner.emit(source.kind, source.name, found, [aval], expensive=source.expensive)
        return known[value]

    def _while(self, equation: Any, reads: list[int]) -> tuple[int, ...]:
        skipped, consts = equation.params["cond_nconsts"], equation.params["body_nconsts"]
        carries = len(equation.outvars)
        kept = tuple((consts + rank, rank) for rank in range(carries))
        jaxpr = equation.params["body_jaxpr"]
        body = program_of(jaxpr, mesh=self.mesh, platform=self.platform, is_body=True)
        body = replace(body, kept=kept)
        avals = [var.aval for var in equation.outvars]
        return self.emit(Kind.LOOP, "while", reads[skipped:], avals, kept=kept, bodies=(body,))
