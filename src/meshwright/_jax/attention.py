"""`meshwright.attention`: softmax attention as one operator of a plan, without scores in memory.

Two primitives, forward and backward (`attention_kernels` has their kernels, `attention_ring` what they are over a split
sequence), and a third that stands for the tangent between them: it is linear, is transposed into the backward pass and
never runs. The forward pass keeps its operands, its result and for each query the logarithm of the sum of exponentials
of its scores.
"""

from __future__ import annotations

from collections.abc import Sequence
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax._src import source_info_util  # the line of user code an equation came from; no public form up to 0.12
from jax.extend import core as jex_core
from jax.interpreters import ad, batching, mlir

from ..errors import PlanError
from . import attention_ring
from .attention_blocks import Mask, block_of
from .attention_kernels import lowering
from .attention_ring import Ring
from .jaxpr import Equation

# A call of attention is at the user's line, not at ours.
source_info_util.register_exclusion(__file__)

# The names of the primitives, as a plan has them.
FORWARD, TANGENT, BACKWARD = "attention", "attention_tangent", "attention_backward"

# Of operands and results, what each dim is: batch, queries, key heads, queries' heads of each, their size; keys, the
# size of values.
QUERY, KEY, VALUE, SINKS, OUT, SUMS = "bqkgd", "btkd", "btke", "kg", "bqkge", "bkgq"


class Options(NamedTuple):
    """The parameters of all three primitives.

    Args:
      mask: which keys a query sees.
      scale: of the scores.
      sinks: whether the operands have sinks.
      ring: how positions are split over devices, on blocks of one of them.
    """

    mask: Mask
    scale: float
    sinks: bool = False
    ring: Ring | None = None


def is_attention(equation: Equation) -> bool:
    """Whether an equation is `meshwright.attention` or a part of its derivative."""
    return equation.primitive.name in (FORWARD, TANGENT, BACKWARD)


def tensors_of(equation: Equation) -> tuple[list[str], list[str]]:
    """What each dim of each operand and of each result is, in the letters of `QUERY` and the others."""
    options: Options = equation.params["options"]
    given = [QUERY, KEY, VALUE, *[SINKS] * options.sinks]
    if equation.primitive.name == FORWARD:
        return given, [OUT, SUMS]
    if equation.primitive.name == BACKWARD:
        return [*given, OUT, SUMS, OUT], given
    moved = [one for one, moving in zip(given, equation.params["moving"], strict=True) if moving]
    return [*moved, *given, OUT, SUMS], [OUT]


def attention_flops(equation: Equation) -> float:
    """FLOPs of all scores within the window, also those that a causal mask hides: two products forward, five back."""
    given, _ = tensors_of(equation)
    at = given.index(QUERY) if equation.primitive.name != TANGENT else sum(equation.params["moving"])
    query, key, value = (atom.aval.shape for atom in equation.invars[at : at + 3])
    window = equation.params["options"].mask.window
    scores = prod(query[:-1]) * (key[1] if window is None else min(window, key[1]))
    products = (1, 1) if equation.primitive.name == FORWARD else (3, 2)
    return 2.0 * scores * (products[0] * query[-1] + products[1] * value[-1])


def scratch_of(equation: Equation, platform: str) -> list[jax.ShapeDtypeStruct]:
    """What attention or its backward pass needs beside operands and results while it runs, on one device.

    Backward gradients of queries are summed in float32. Over split positions there are also the result so far, or
    gradients of keys and values so far, in float32; keys and values that are sent while others are used; and copies of
    all in zigzag order. On CPUs there are scores of a block, in float32: of 1,024 positions of eight heads the compiled
    backward pass has four, and around a ring two kernels of a step run at a time.

    Args:
      equation: the forward or the backward pass.
      platform: of the devices, as `Device.compiler`.
    """
    options: Options = equation.params["options"]
    is_backward, ring = equation.primitive.name == BACKWARD, options.ring
    query, key, value = (atom.aval for atom in equation.invars[:3])
    out = jax.ShapeDtypeStruct((*query.shape[:-1], value.shape[-1]), query.dtype)

    def wide(*arrays: Any) -> list[jax.ShapeDtypeStruct]:
        return [jax.ShapeDtypeStruct(x.shape, jnp.float32) for x in arrays]

    found = wide(query) if is_backward else []
    turned = options.mask.causal and options.mask.window is None
    if platform == "cpu":
        rows, columns = query.shape[1], key.shape[1]
        if ring is not None and not ring.circulates:
            columns //= ring.devices
        blocks = block_of(rows) * block_of(columns)
        if ring is not None and turned:
            blocks = max(blocks, 2 * block_of(rows // 2) ** 2)
        scores = jax.ShapeDtypeStruct((query.shape[0], *query.shape[2:4], blocks), jnp.float32)
        found += [scores] * (4 if is_backward else 2)
    if ring is None:
        return found
    found += wide(key, value) if is_backward else wide(out)
    if ring.circulates:
        found += [key, value, key, value, *(wide(key, value) if is_backward else [])]
    if turned:
        found += [query, out, out] if is_backward else [query, out]
    return [jax.ShapeDtypeStruct(x.shape, x.dtype) for x in found]


def attention(
    query: jax.Array, key: jax.Array, value: jax.Array, *, causal: bool = False, window: int | None = None,
    sinks: jax.Array | None = None, scale: float | None = None,
) -> jax.Array:  # fmt: skip
    """Softmax attention that keeps no scores in memory, and that a plan may split over batch, heads and positions.

    The kernel is that of the devices: cuDNN's on NVIDIA GPUs since Ampere in half precision, splash attention on TPUs
    for heads of a multiple of 128, else blocks in plain XLA operations. Over split positions keys and values are
    gathered, or travel round a ring (docs/kernels.md).

    >>> x = jax.numpy.ones((1, 4, 2, 8))
    >>> attention(x, x, x, causal=True).shape
    (1, 4, 2, 8)

    Args:
      query: (batch, positions, heads, size), or with heads as two dims (key heads, heads of each).
      key: (batch, key positions, key heads, size); heads are a multiple of key heads, and query head h reads key head
        h // (heads / key heads) (Ainslie et al. 2023).
      value: (batch, key positions, key heads, size of values).
      causal: whether a query sees no key later than itself.
      window: with `causal`, how many positions back a query sees, itself included; None for all.
      sinks: a number for each head, of the shape of the queries' heads, that takes part in its softmax and has no value
        (Agarwal et al. 2025, gpt-oss).
      scale: of the scores; None for 1 / sqrt(size).

    Returns:
      What each query mixes of the values, of the shape of the queries with the size of the values, in their type.

    Raises:
      PlanError: for shapes that do not suit each other; and when it is differentiated in forward mode or twice.
    """
    wanted = _shape_error(query, key, value, sinks)
    if wanted:
        shown = ", ".join(str(tuple(x.shape)) for x in (query, key, value, *([] if sinks is None else [sinks])))
        raise PlanError(
            refused="attention", got=f"arrays of {shown}", needed=wanted, where="meshwright.attention",
            try_="query (batch, positions, heads, size), key and value (batch, positions, key heads, size)",
        )  # fmt: skip
    if window is not None and (not causal or not isinstance(window, int) or window < 1):
        raise PlanError(
            refused="the window of attention", got=f"window={window!r} with causal={causal}",
            needed="a number of positions with causal=True", where="meshwright.attention(window=)",
            try_="causal=True, window=1024",
        )  # fmt: skip
    if isinstance(scale, jax.core.Tracer):
        raise PlanError(
            refused="the scale of attention", got="a traced value", needed="a number",
            where="meshwright.attention(scale=)", try_="multiply the queries by it, with scale=1.0",
        )  # fmt: skip
    key_heads, size = key.shape[2:]
    grouped = query.reshape(*query.shape[:2], key_heads, -1, size)
    operands = [grouped, key.astype(query.dtype), value.astype(query.dtype)]
    if sinks is not None:
        operands.append(sinks.astype(jnp.float32).reshape(key_heads, -1))
    options = Options(Mask(causal, window), size**-0.5 if scale is None else float(scale), sinks is not None)
    out, _ = attention_p.bind(*operands, options=options)
    return out.reshape(*query.shape[:-1], value.shape[-1])


def _shape_error(query: Any, key: Any, value: Any, sinks: Any) -> str:
    """What shapes have to be, where they are not; "" where they are."""
    if query.ndim not in (4, 5) or key.ndim != 4 or value.ndim != 4:
        return "queries of four or five dims, keys and values of four"
    if key.shape[:3] != value.shape[:3] or query.shape[0] != key.shape[0] or query.shape[-1] != key.shape[-1]:
        return "one batch, one size of queries and keys, as many keys as values"
    if not all((*query.shape, *key.shape, *value.shape)):
        return "at least one of everything"
    if not jnp.issubdtype(query.dtype, jnp.floating):
        return f"queries of a floating type, not {query.dtype}"
    heads = query.shape[2:-1]
    if heads[0] % key.shape[2] if len(heads) == 1 else heads[0] != key.shape[2]:
        return "heads that are a multiple of the key heads"
    if sinks is not None and tuple(sinks.shape) != heads:
        return f"sinks of shape {heads}, one for each head"
    return ""


def _parts(operands: Sequence[Any], options: Options) -> tuple[Sequence[Any], Any, Sequence[Any]]:
    """Queries, keys and values; sinks or None; the rest."""
    count = 3 + options.sinks
    return operands[:3], operands[3] if options.sinks else None, operands[count:]


def _with_sinks(out: jax.Array, sums: jax.Array, sinks: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Result and log-sum-exp of softmax with sinks from those without."""
    both = jnp.logaddexp(sums, sinks[None, :, :, None])
    share = jnp.moveaxis(jnp.exp(sums - both), 3, 1)[..., None]
    return (out * share).astype(out.dtype), both


def _forward(*operands: jax.Array, options: Options) -> tuple[jax.Array, jax.Array]:
    (query, key, value), sinks, _ = _parts(operands, options)
    plain = {"mask": options.mask, "scale": options.scale}
    if options.ring is None:
        out, sums = bare_forward_p.bind(query, key, value, **plain)
    else:
        out, sums = attention_ring.forward(_pieces(options), query, key, value, options.ring)
    return (out, sums) if sinks is None else _with_sinks(out, sums, sinks)


def _backward(*operands: jax.Array, options: Options) -> Sequence[jax.Array]:
    (query, key, value), sinks, (out, sums, cotangent) = _parts(operands, options)
    plain = {"mask": options.mask, "scale": options.scale}
    if options.ring is None:
        found = bare_backward_p.bind(query, key, value, out, sums, cotangent, **plain)
    else:
        found = attention_ring.backward(
            _pieces(options), query, key, value, out, sums, cotangent, options.ring
        )  # fmt: skip
    if sinks is None:
        return found
    inner = jnp.einsum("bqkge,bqkge->bkgq", out, cotangent, preferred_element_type=jnp.float32)
    return [*found, -jnp.sum(jnp.exp(sinks[None, :, :, None] - sums) * inner, (0, 3))]


def _pieces(options: Options) -> attention_ring.Pieces:
    """What attention of some keys is made by."""

    def forward(*operands: jax.Array, mask: Mask) -> Any:
        return bare_forward_p.bind(*operands, mask=mask, scale=options.scale)

    def backward(*operands: jax.Array, mask: Mask) -> Any:
        return bare_backward_p.bind(*operands, mask=mask, scale=options.scale)

    return attention_ring.Pieces(forward, backward, options.mask)


def _out_shapes(query: Any, value: Any) -> list[Any]:
    batch, queries, key_heads, group, _ = query.shape
    shapes = (*query.shape[:-1], value.shape[-1]), (batch, key_heads, group, queries)
    return [jax.core.ShapedArray(shape, dtype) for shape, dtype in zip(shapes, (query.dtype, jnp.float32), strict=True)]


def _primitive(name: str) -> Any:
    made = jex_core.Primitive(name)
    made.multiple_results = True
    return made


attention_p, attention_tangent_p, attention_backward_p = map(_primitive, (FORWARD, TANGENT, BACKWARD))
# One kernel on what one device has, keys and values of some positions: what the others are lowered to.
bare_forward_p, bare_backward_p = _primitive("attention_kernel"), _primitive("attention_kernel_backward")

attention_p.def_abstract_eval(lambda query, key, value, *sinks, options: _out_shapes(query, value))
attention_backward_p.def_abstract_eval(
    lambda *given, options: [jax.core.ShapedArray(x.shape, x.dtype) for x in given[: 3 + options.sinks]]
)
attention_tangent_p.def_abstract_eval(
    lambda *given, options, moving: [jax.core.ShapedArray(given[-2].shape, given[-2].dtype)]
)
bare_forward_p.def_abstract_eval(lambda query, key, value, mask, scale: _out_shapes(query, value))
bare_backward_p.def_abstract_eval(
    lambda *given, mask, scale: [jax.core.ShapedArray(x.shape, x.dtype) for x in given[:3]]
)

for _bare, _is_backward in ((bare_forward_p, False), (bare_backward_p, True)):
    mlir.register_lowering(_bare, lowering("cpu", backward=_is_backward))
    for _platform in ("cuda", "tpu"):
        mlir.register_lowering(_bare, lowering(_platform, backward=_is_backward), platform=_platform)
for _primitive_p, _function in ((attention_p, _forward), (attention_backward_p, _backward)):
    mlir.register_lowering(_primitive_p, attention_ring.lowering(_function))


def _run(primitive: Any) -> None:
    """Let a primitive be called outside of any trace."""
    primitive.def_impl(lambda *operands, **params: jax.jit(lambda *given: primitive.bind(*given, **params))(*operands))


for _one in (attention_p, attention_backward_p, bare_forward_p, bare_backward_p):
    _run(_one)


def _jvp(primals: Sequence[Any], tangents: Sequence[Any], *, options: Options) -> tuple[Sequence[Any], Sequence[Any]]:
    out, sums = attention_p.bind(*primals, options=options)
    moving = tuple(type(one) is not ad.Zero for one in tangents)
    moved = [one for one, moves in zip(tangents, moving, strict=True) if moves]
    no_sums = ad.Zero(jax.typeof(sums).to_tangent_aval())
    if not moved:
        return (out, sums), (ad.Zero(jax.typeof(out).to_tangent_aval()), no_sums)
    (change,) = attention_tangent_p.bind(*moved, *primals, out, sums, options=options, moving=moving)
    return (out, sums), (change, no_sums)


def _transposed(cotangents: Sequence[Any], *operands: Any, options: Options, moving: tuple[bool, ...]) -> Sequence[Any]:
    (cotangent,) = cotangents
    kept = operands[sum(moving) :]
    if type(cotangent) is ad.Zero:
        return [None] * len(operands)
    found = attention_backward_p.bind(*kept, cotangent, options=options)
    moved = [one for one, moves in zip(found, moving, strict=True) if moves]
    return [*moved, *[None] * len(kept)]


def _refused(*_: Any, **__: Any) -> Any:
    raise PlanError(
        refused="a derivative of attention", got="forward mode, or a second derivative",
        needed="reverse mode and a first derivative: jax.grad, jax.vjp, meshwright.value_and_grad",
        where="meshwright.attention", try_="jax.nn.dot_product_attention",
    )  # fmt: skip


attention_tangent_p.def_impl(_refused)
mlir.register_lowering(attention_tangent_p, _refused)
for _one in (attention_tangent_p, attention_backward_p):
    ad.primitive_jvps[_one] = _refused
ad.primitive_jvps[attention_p] = _jvp
ad.primitive_transposes[attention_tangent_p] = _transposed


def _batched(primitive: Any) -> None:
    """Let a primitive be mapped: the mapped dim becomes one with the batch, or with the key heads where sinks are
    mapped too, which have no batch."""

    def rule(operands: Sequence[Any], dims: Sequence[Any], **params: Any) -> Any:
        options: Options = params["options"]
        count = next(x.shape[d] for x, d in zip(operands, dims, strict=True) if d is not None)
        given, made = _letters(primitive, options, params.get("moving", ()))
        sinks = [d for letters, d in zip(given, dims, strict=True) if letters == SINKS]
        along = "k" if any(d is not None for d in sinks) else "b"
        if primitive is attention_backward_p and options.sinks:
            along = "k"  # their gradient is of each of the mapped ones
        folded = []
        for x, d, letters in zip(operands, dims, given, strict=True):
            if along not in letters:
                folded.append(x)
                continue
            whole = jnp.broadcast_to(x[None], (count, *x.shape)) if d is None else jnp.moveaxis(x, d, 0)
            at = letters.index(along)
            whole = jnp.moveaxis(whole, 0, at)
            folded.append(whole.reshape(*whole.shape[:at], -1, *whole.shape[at + 2 :]))
        results, places = [], []
        for x, letters in zip(primitive.bind(*folded, **params), made, strict=True):
            at = letters.index(along)
            results.append(x.reshape(*x.shape[:at], count, -1, *x.shape[at + 1 :]))
            places.append(at)
        return results, places

    batching.primitive_batchers[primitive] = rule


def _letters(primitive: Any, options: Options, moving: tuple[bool, ...]) -> tuple[list[str], list[str]]:
    given = [QUERY, KEY, VALUE, *[SINKS] * options.sinks]
    if primitive is attention_p:
        return given, [OUT, SUMS]
    if primitive is attention_backward_p:
        return [*given, OUT, SUMS, OUT], given
    return [*(one for one, moves in zip(given, moving, strict=True) if moves), *given, OUT, SUMS], [OUT]


for _one in (attention_p, attention_tangent_p, attention_backward_p):
    _batched(_one)
