"""A local program as the memory model sees it: values with sizes, and operations with what fusing them would mean.

Pure data, no JAX: it lies here so that the package that reads jaxprs and the one that counts their memory can share it.
`liveness_adapter` builds it from a traced step; `meshwright.memory` fuses it into kernels (`fusion`), orders these
(`kernel_order`) and counts the bytes alive (`liveness`).
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum, IntEnum
from typing import NamedTuple

MEGACORE = "tpu megacore"
"""The platform of TPUs whose chips are two cores that run one program (v4, v5p)."""

WIDE = "gpu float32"
"""The platform of NVIDIA's GPUs from Ampere on and before Hopper, which have no arithmetic in bfloat16."""

WIDEST = "gpu float32 products"
"""The platform of those before Ampere, which have no products in bfloat16 either, and whose products are cuBLAS's, that
take nothing in. XLA orders their programs for little memory, those of later GPUs so that collectives run beside
compute (`_jax.compiler_options`)."""

SUMS = frozenset(("psum", "psum2", "psum_invariant", "pmax", "pmin"))
"""Names of operations that reduce over devices and leave the result on all of them."""

GATHERS = frozenset(("all_gather", "all_gather_invariant"))
"""Names of operations that gather the parts that devices have."""

COLLECTIVES = SUMS | GATHERS | {"reduce_scatter", "all_to_all", "ppermute"}
"""Names of operations between devices."""

OF_A_HOST = 8
"""GPUs of a host, each with a NIC, as XLA takes it (`gpus_per_node` of its sol_gpu_cost_model.cc)."""

CHEAP_ON_GPUS = frozenset({"div", "exp", "exp2", "rsqrt", "sqrt"})
"""Arithmetic that XLA's GPU compiler does again where it is read, dear as it is elsewhere."""

CHEAP_BEFORE_AMPERE = CHEAP_ON_GPUS | {"erf", "log", "logistic", "sin", "tanh"}
"""The same of GPUs before Ampere, whose memory is slower for their arithmetic (seen in what it compiles for V100)."""


class Kind(Enum):
    """How a compiler may treat an operation."""

    VIEW = "view"  # another name for its operand: a reshape
    BARRIER = "barrier"  # other names for its operands, usable only once all of them exist
    ELEMENTWISE = "elementwise"  # each result element from the same elements of the operands
    BROADCAST = "broadcast"  # reads operand elements several times; without operands: a constant or iota
    PERMUTE = "permute"  # moves elements: transpose, slice, pad, concatenate, gather
    REDUCE = "reduce"  # fewer elements out than in
    CONTRACT = "contract"  # matrix product
    OPAQUE = "opaque"  # own kernel, own result: convolution, sort, collective
    UPDATE = "update"  # writes a part of its first operand in place
    LOOP = "loop"  # runs `bodies[0]` many times on buffers it keeps
    BRANCH = "branch"  # runs one of `bodies`


class Use(IntEnum):
    """How a kernel reads an operand."""

    SAME = 1  # the element at the result's own index, so the result may overwrite it
    MOVED = 2  # each element about once, at another index
    REPEATED = 3  # elements more than once


@dataclass(frozen=True, slots=True, kw_only=True)
class Value:
    """An array: bytes on one device, elements, and rank without dims of size one."""

    size_bytes: int
    elements: int
    rank: int


class Spread(NamedTuple):
    """The devices of a collective: of each of its equal groups, how many groups there are, and how many devices of the
    first one are on its first host, of `OF_A_HOST` GPUs."""

    devices: int
    groups: int
    on_host: int


@dataclass(frozen=True, slots=True, kw_only=True)
class Operation:
    """One operation; `reads` and `writes` index the program's values.

    Attributes:
      kind: how a compiler may treat it.
      name: the primitive, for messages.
      expensive: computing it twice costs more than storing it (a transcendental, a gather).
      library: a kernel library can take it in beside a reduction.
      flops: of a matrix product or a convolution.
      group: of a collective: those of one name and group may be sent together.
      spread: of a collective: the devices that take part, where they are known.
      kept: for loops, pairs (position in `reads`, position in `writes`) that share one buffer.
      bodies: the programs of a loop or branch.
    """

    kind: Kind
    name: str
    reads: tuple[int, ...]
    writes: tuple[int, ...]
    expensive: bool = False
    library: bool = False
    flops: float = 0.0
    group: str = ""
    spread: Spread | None = None
    kept: tuple[tuple[int, int], ...] = ()
    bodies: tuple[Program, ...] = ()


@dataclass(frozen=True, slots=True, kw_only=True)
class Program:
    """Operations in a valid order.

    Attributes:
      values: every value, by index.
      operations: in program order; each value is written at most once, arguments never.
      arguments: values given from outside.
      outputs: values handed back.
      kept: pairs (position in `arguments`, position in `outputs`): the output takes over the argument's buffer, because
        it was donated or is carried by a loop.
      alike: a number for each value; values of one number are equal once barriers are forgotten. Kernels that compute
        such values from such values are merged. None where barriers hold, and equal operations are one already.
      platform: whose compiler fuses and orders it: "cpu", "gpu", `WIDE`, `WIDEST`, "tpu" or `MEGACORE`.
    """

    values: tuple[Value, ...]
    operations: tuple[Operation, ...]
    arguments: tuple[int, ...]
    outputs: tuple[int, ...]
    kept: tuple[tuple[int, int], ...] = ()
    alike: tuple[int, ...] | None = None
    platform: str = "cpu"
