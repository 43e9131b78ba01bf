"""Attention over positions that are split over devices, on the blocks of one of them.

Each device has a block of the queries. Of keys and values it has all (*gathered keys*), or the same block, which then
travel round a ring while it works on what it has (*ring attention*: Liu, Zaharia and Abbeel 2023). What a device finds
for some of the keys is merged by log-sum-exp; backward the gradients of keys and values travel behind
these, and add up.

Under a causal mask blocks that lie early see few keys. So positions are brought into *zigzag order* first: of 2n chunks
device i of n works on i and 2n - 1 - i (Brandon et al. 2023, *striped attention*, for the problem; Llama 3, section
3.3.2, and Megatron's context parallelism for this order). Then in each step of the ring every device has two full
products of a chunk of queries and one of keys. With a window all blocks see as many keys, and stay in their order: keys
come from the few blocks before.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import nullcontext
from functools import partial
from math import prod
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax._src.core import extend_axis_env_nd  # 0.10 to 0.12
from jax.interpreters import mlir

from .attention_blocks import Mask

_ALL = Mask()


class Ring(NamedTuple):
    """How positions are split.

    Args:
      axes: mesh axes, the major one first.
      order: the same in the order of the mesh.
      sizes: of `axes`.
      circulates: whether keys and values are split too; else each device has all of them.
    """

    axes: tuple[str, ...]
    order: tuple[str, ...]
    sizes: tuple[int, ...]
    circulates: bool

    @property
    def devices(self) -> int:
        """Devices on the ring."""
        return prod(self.sizes)


class Pieces(NamedTuple):
    """Attention of some keys, forward and backward, as `attention_blocks` has them, and the mask of it all."""

    forward: Callable[..., Any]
    backward: Callable[..., Any]
    mask: Mask


State = tuple[jax.Array, jax.Array]
"""Of queries what they mix of the keys so far, in float32, and its log-sum-exp."""


def lowering(function: Callable[..., Any]) -> Callable[..., Any]:
    """The lowering rule of a primitive with `options`, from what it does on one device."""

    def rule(ctx: Any, *operands: Any, **params: Any) -> Any:
        ring: Ring | None = params["options"].ring
        named = nullcontext() if ring is None else extend_axis_env_nd(list(zip(ring.axes, ring.sizes, strict=True)))
        with named:
            return mlir.lower_fun(partial(function, **params), multiple_results=True)(ctx, *operands)

    return rule


def permuted(
    x: Any, pairs: Sequence[tuple[int, int]], axes: Sequence[str], sizes: Mapping[str, int], order: Any
) -> Any:
    """`lax.ppermute` between positions counted with the first of `axes` major.

    `ppermute` alone among the collectives counts positions in the order of the mesh, whatever the order of its axes.

    Args:
      x: what is sent.
      pairs: from and to.
      axes: major first.
      sizes: of these.
      order: the axes in the order of the mesh.
    """
    shape = [sizes[axis] for axis in axes]
    ours = np.arange(prod(shape)).reshape(shape).transpose([axes.index(axis) for axis in order]).ravel()
    theirs = np.argsort(ours)
    return lax.ppermute(x, tuple(order), [(int(theirs[a]), int(theirs[b])) for a, b in pairs])


def _sent(x: jax.Array, pairs: Sequence[tuple[int, int]], ring: Ring) -> jax.Array:
    return permuted(x, pairs, ring.axes, dict(zip(ring.axes, ring.sizes, strict=True)), ring.order)


def _onwards(tree: Any, ring: Ring) -> Any:
    """What the device before has."""
    pairs = [(i, (i + 1) % ring.devices) for i in range(ring.devices)]
    return jax.tree.map(lambda x: _sent(x, pairs, ring), tree)


def _zigzag(x: jax.Array, ring: Ring, dim: int = 1) -> jax.Array:
    """This device's chunks in zigzag order, from those of its block."""
    first, second = jnp.split(x, 2, dim)
    (even, odd), is_even = _exchanges(ring), lax.axis_index(ring.axes) % 2 == 0
    a, b = _sent(first, even, ring), _sent(second, odd, ring)
    return jnp.concatenate([jnp.where(is_even, a, b), jnp.where(is_even, b, a)], dim)


def _in_order(x: jax.Array, ring: Ring, dim: int = 1) -> jax.Array:
    """The inverse of `_zigzag`."""
    low, high = jnp.split(x, 2, dim)
    is_even = lax.axis_index(ring.axes) % 2 == 0
    even, odd = ([(b, a) for a, b in pairs] for pairs in _exchanges(ring))
    a, b = jnp.where(is_even, low, high), jnp.where(is_even, high, low)
    return jnp.concatenate([_sent(a, even, ring), _sent(b, odd, ring)], dim)


def _exchanges(ring: Ring) -> list[list[tuple[int, int]]]:
    """Where the first and the second chunk of each block goes."""
    count = ring.devices
    return [[(i, min(2 * i + second, 2 * count - 1 - 2 * i - second)) for i in range(count)] for second in (0, 1)]


def _merged(state: State, piece: State) -> State:
    """Both together; the first has a finite log-sum-exp."""
    (out, sums), (more, its_sums) = state, piece
    both = jnp.logaddexp(sums, its_sums)

    def share(of: jax.Array) -> jax.Array:
        return jnp.moveaxis(jnp.exp(of - both), 3, 1)[..., None]

    return out * share(sums) + more * share(its_sums), both


def _wide(piece: Sequence[jax.Array]) -> State:
    out, sums = piece
    return out.astype(jnp.float32), sums


def _added(a: Any, b: Any) -> Any:
    return jax.tree.map(lambda x, y: x + y.astype(x.dtype), a, b)


def _wider(tree: Any) -> Any:
    return jax.tree.map(lambda x: x.astype(jnp.float32), tree)


def _chunks(x: jax.Array, source: Any, ring: Ring, *, halves: bool) -> jax.Array:
    """Of all keys those that a device has: its block, or its chunks in zigzag order."""
    if not halves:
        size = x.shape[1] // ring.devices
        return lax.dynamic_slice_in_dim(x, source * size, size, 1)
    size = x.shape[1] // (2 * ring.devices)
    starts = source * size, (2 * ring.devices - 1 - source) * size
    return jnp.concatenate([lax.dynamic_slice_in_dim(x, start, size, 1) for start in starts], 1)


def _put(x: jax.Array, piece: jax.Array, source: Any, ring: Ring, *, halves: bool) -> jax.Array:
    """A piece of `_chunks` added to all."""
    size = x.shape[1] // (ring.devices * (1 + halves))
    starts = [source * size, (2 * ring.devices - 1 - source) * size][: 1 + halves]
    for start, part in zip(starts, jnp.split(piece, len(starts), 1), strict=True):
        before = lax.dynamic_slice_in_dim(x, start, size, 1)
        x = lax.dynamic_update_slice_in_dim(x, before + part.astype(x.dtype), start, 1)
    return x


def forward(pieces: Pieces, query: jax.Array, key: jax.Array, value: jax.Array, ring: Ring) -> State:
    """Result, in the type of the queries, and log-sum-exp of this device's queries."""
    if pieces.mask.window is not None:
        out, sums = _windowed(pieces, query, key, value, ring)
        return out.astype(query.dtype), sums
    turned, here = pieces.mask.causal, lax.axis_index(ring.axes)
    if turned:
        query = _zigzag(query, ring)
        key, value = (_zigzag(x, ring) for x in (key, value)) if ring.circulates else (key, value)
    if not ring.circulates:
        own: Any = tuple(_chunks(x, here, ring, halves=turned) for x in (key, value))
    else:
        own = key, value
    visit = _visit_causal(pieces, query, here, ring) if turned else _visit_all(pieces, query)
    held = _onwards(own, ring) if ring.circulates else None
    state = _wide(pieces.forward(query, *own, mask=pieces.mask))

    def step(carried: Any, number: Any) -> Any:
        state, held = carried
        if ring.circulates:
            return (visit(state, held, number), _onwards(held, ring)), None
        source = (here - number) % ring.devices
        held = tuple(_chunks(x, source, ring, halves=turned) for x in (key, value))
        return (visit(state, held, number), None), None

    # The last keys are not sent on.
    stop = ring.devices - ring.circulates
    if stop > 1:
        (state, held), _ = lax.scan(step, (state, held), jnp.arange(1, stop))
    if ring.circulates and ring.devices > 1:
        state = visit(state, held, ring.devices - 1)
    out, sums = state
    out = out.astype(query.dtype)
    return (_in_order(out, ring), _in_order(sums, ring, 3)) if turned else (out, sums)


def _visit_all(pieces: Pieces, query: jax.Array) -> Callable[..., State]:
    def visit(state: State, held: Any, number: Any) -> State:
        del number
        return _merged(state, _wide(pieces.forward(query, *held, mask=_ALL)))

    return visit


def _visit_causal(pieces: Pieces, query: jax.Array, here: Any, ring: Ring) -> Callable[..., State]:
    """A step of the ring: late queries see the early keys that are held, and either early queries see these too, or
    late queries the late keys, as the keys come from a device before or after."""
    low, high = jnp.split(query, 2, 1)

    def visit(state: State, held: Any, number: Any) -> State:
        early, late = zip(*(jnp.split(x, 2, 1) for x in held), strict=True)
        is_before = (here - number) % ring.devices < here
        always = _wide(pieces.forward(high, *early, mask=_ALL))
        keys = (jnp.where(is_before, a, b) for a, b in zip(early, late, strict=True))
        out, sums = _wide(pieces.forward(jnp.where(is_before, low, high), *keys, mask=_ALL))
        none = jnp.full_like(sums, -jnp.inf)
        (low_out, high_out), (low_sums, high_sums) = jnp.split(state[0], 2, 1), jnp.split(state[1], 2, 3)
        lower = _merged((low_out, low_sums), (out, jnp.where(is_before, sums, none)))
        higher = _merged((high_out, high_sums), always)
        higher = _merged(higher, (out, jnp.where(is_before, none, sums)))
        return jnp.concatenate([lower[0], higher[0]], 1), jnp.concatenate([lower[1], higher[1]], 3)

    return visit


def backward(
    pieces: Pieces, query: jax.Array, key: jax.Array, value: jax.Array, out: jax.Array, sums: jax.Array,
    cotangent: jax.Array, ring: Ring,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    """Gradients of this device's queries, and of its keys and values: of all of them, partial, where it has all."""
    if pieces.mask.window is not None:
        return _windowed_backward(pieces, query, key, value, out, sums, cotangent, ring)
    turned, here = pieces.mask.causal, lax.axis_index(ring.axes)
    if turned:
        query, out, cotangent = (_zigzag(x, ring) for x in (query, out, cotangent))
        sums = _zigzag(sums, ring, 3)
        key, value = (_zigzag(x, ring) for x in (key, value)) if ring.circulates else (key, value)
    rows = query, out, cotangent, sums
    if turned:
        visit = _visit_back_causal(pieces, rows, here, ring)
    else:
        visit = _visit_back_all(pieces, rows)
    if not ring.circulates:
        own: Any = tuple(_chunks(x, here, ring, halves=turned) for x in (key, value))
    else:
        own = key, value
    held = _onwards(own, ring) if ring.circulates else None
    to_query, *to_own = pieces.backward(query, *own, out, sums, cotangent, mask=pieces.mask)
    to_query, found = to_query.astype(jnp.float32), tuple(_wider(to_own))
    if not ring.circulates:
        found = tuple(
            _put(jnp.zeros(x.shape, jnp.float32), one, here, ring, halves=turned)
            for x, one in zip((key, value), found, strict=True)
        )

    def step(carried: Any, number: Any) -> Any:
        to_query, found, held = carried
        if ring.circulates:
            # The gradients of what is held arrive while it is used.
            arrived, following = _onwards(found, ring), _onwards(held, ring)
            to_query, more = visit(to_query, held, number)
            return (to_query, _added(arrived, more), following), None
        source = (here - number) % ring.devices
        held = tuple(_chunks(x, source, ring, halves=turned) for x in (key, value))
        to_query, more = visit(to_query, held, number)
        put = (_put(x, one, source, ring, halves=turned) for x, one in zip(found, more, strict=True))
        return (to_query, tuple(put), None), None

    stop = ring.devices - ring.circulates
    if stop > 1:
        (to_query, found, held), _ = lax.scan(step, (to_query, found, held), jnp.arange(1, stop))
    if ring.circulates and ring.devices > 1:
        arrived = _onwards(found, ring)
        to_query, more = visit(to_query, held, ring.devices - 1)
        found = _onwards(_added(arrived, more), ring)  # home
    to_query = to_query.astype(query.dtype)
    to_key, to_value = (one.astype(x.dtype) for one, x in zip(found, (key, value), strict=True))
    if turned:
        to_query = _in_order(to_query, ring)
        if ring.circulates:
            to_key, to_value = _in_order(to_key, ring), _in_order(to_value, ring)
    return to_query, to_key, to_value


def _visit_back_all(pieces: Pieces, rows: Sequence[jax.Array]) -> Callable[..., Any]:
    query, out, cotangent, sums = rows

    def visit(to_query: jax.Array, held: Any, number: Any) -> Any:
        del number
        more, *to_held = pieces.backward(query, *held, out, sums, cotangent, mask=_ALL)
        return to_query + more, tuple(_wider(to_held))

    return visit


def _visit_back_causal(pieces: Pieces, rows: Sequence[jax.Array], here: Any, ring: Ring) -> Callable[..., Any]:
    halves = [jnp.split(x, 2, 3 if i == 3 else 1) for i, x in enumerate(rows)]
    low, high = zip(*halves, strict=True)

    def visit(to_query: jax.Array, held: Any, number: Any) -> Any:
        early, late = zip(*(jnp.split(x, 2, 1) for x in held), strict=True)
        is_before = (here - number) % ring.devices < here

        def piece(rows: Sequence[jax.Array], keys: Sequence[jax.Array]) -> Any:
            query, out, cotangent, sums = rows
            to_rows, *to_keys = pieces.backward(query, *keys, out, sums, cotangent, mask=_ALL)
            return to_rows, to_keys

        to_high, to_early = piece(high, early)
        either = [jnp.where(is_before, a, b) for a, b in zip(low, high, strict=True)]
        to_either, to_keys = piece(either, [jnp.where(is_before, a, b) for a, b in zip(early, late, strict=True)])
        zero = jnp.zeros_like(to_either)
        more = [jnp.where(is_before, to_either, zero), to_high + jnp.where(is_before, zero, to_either)]
        to_held = []
        for always, one in zip(_wider(to_early), _wider(to_keys), strict=True):
            nothing = jnp.zeros_like(one)
            both = always + jnp.where(is_before, one, nothing), jnp.where(is_before, nothing, one)
            to_held.append(jnp.concatenate(both, 1))
        return to_query + jnp.concatenate(more, 1), tuple(to_held)

    return visit


class _Hop(NamedTuple):
    """Keys of a block before that queries of this one see: from `first` on, by the queries up to `last`."""

    back: int
    first: int
    last: int
    mask: Mask


def _hops(mask: Mask, extent: int, count: int) -> list[_Hop]:
    assert mask.window is not None
    found = []
    for back in range(1, count):
        last = min(extent, mask.window - 1 - (back - 1) * extent)
        if last <= 0:
            break
        first = max(0, back * extent - mask.window + 1)
        found.append(_Hop(back, first, last, mask._replace(offset=back * extent - first)))
    return found


def _from_before(x: jax.Array, hop: _Hop, here: Any, extent: int, ring: Ring) -> jax.Array:
    """Keys or values of a hop."""
    if ring.circulates:
        pairs = [(i, i + hop.back) for i in range(ring.devices - hop.back)]
        return _sent(x[:, hop.first :], pairs, ring)
    return lax.dynamic_slice_in_dim(x, (here - hop.back) * extent + hop.first, extent - hop.first, 1)


def _own(x: jax.Array, here: Any, ring: Ring) -> jax.Array:
    return x if ring.circulates else _chunks(x, here, ring, halves=False)


def _windowed(pieces: Pieces, query: jax.Array, key: jax.Array, value: jax.Array, ring: Ring) -> State:
    here, extent = lax.axis_index(ring.axes), query.shape[1]
    state = _wide(pieces.forward(query, *(_own(x, here, ring) for x in (key, value)), mask=pieces.mask))
    for hop in _hops(pieces.mask, extent, ring.devices):
        keys = (_from_before(x, hop, here, extent, ring) for x in (key, value))
        out, sums = _wide(pieces.forward(query[:, : hop.last], *keys, mask=hop.mask))
        sums = jnp.where(here >= hop.back, sums, -jnp.inf)
        first = _merged((state[0][:, : hop.last], state[1][..., : hop.last]), (out, sums))
        state = (
            jnp.concatenate([first[0], state[0][:, hop.last :]], 1),
            jnp.concatenate([first[1], state[1][..., hop.last :]], 3),
        )
    return state


def _windowed_backward(
    pieces: Pieces, query: jax.Array, key: jax.Array, value: jax.Array, out: jax.Array, sums: jax.Array,
    cotangent: jax.Array, ring: Ring,
) -> tuple[jax.Array, jax.Array, jax.Array]:  # fmt: skip
    here, extent = lax.axis_index(ring.axes), query.shape[1]
    own = [_own(x, here, ring) for x in (key, value)]
    to_query, *to_own = pieces.backward(query, *own, out, sums, cotangent, mask=pieces.mask)
    to_query, found = to_query.astype(jnp.float32), list(_wider(to_own))
    if not ring.circulates:
        zeros = (jnp.zeros(x.shape, jnp.float32) for x in (key, value))
        found = [_put(x, one, here, ring, halves=False) for x, one in zip(zeros, found, strict=True)]
    for hop in _hops(pieces.mask, extent, ring.devices):
        keys = [_from_before(x, hop, here, extent, ring) for x in (key, value)]
        rows = slice(0, hop.last)
        more, *to_keys = pieces.backward(
            query[:, rows], *keys, out[:, rows], sums[..., rows], cotangent[:, rows], mask=hop.mask
        )
        more, *to_keys = (jnp.where(here >= hop.back, x, 0).astype(jnp.float32) for x in (more, *to_keys))
        to_query = to_query.at[:, rows].add(more)
        for i, one in enumerate(to_keys):
            if ring.circulates:
                pairs = [(j + hop.back, j) for j in range(ring.devices - hop.back)]
                found[i] = found[i].at[:, hop.first :].add(_sent(one, pairs, ring))
            else:
                start = (here - hop.back) * extent + hop.first
                before = lax.dynamic_slice_in_dim(found[i], start, one.shape[1], 1)
                found[i] = lax.dynamic_update_slice_in_dim(found[i], before + one, start, 1)
    to_key, to_value = (one.astype(x.dtype) for one, x in zip(found, (key, value), strict=True))
    return to_query.astype(query.dtype), to_key, to_value
