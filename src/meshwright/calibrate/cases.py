"""Which cases tell the constants of a cluster: products over sizes, shapes and dtypes, chains, collectives over groups.

Sizes go from what costs a start and nothing else to what costs bytes or FLOPs and nothing else; devices differ by five
orders of magnitude, so a series ends where a case takes too long (`measure`). Groups are the different axes of the
logical meshes of up to two axes that the cluster has: different by what they cross, not by where they lie.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..cluster import Axis, Cluster
from ..cost.collective import KINDS
from ..cost.kernels import Kernel
from .case import CHAINS, Case, Chain, Collective, Convolution, Product, Starts, item_bytes
from .traced_kernels import chain_kernels, convolution_kernels

_EDGES = (64, 256, 512, 1024, 2048, 4096, 8192)
# Shapes as tensor parallelism (thin) and large batches (tall) make them, scaled up by these.
_SCALES = (1, 4, 8, 16, 32)
_THIN = (32, 256, 256)
_TALL = (1024, 64, 64)
# Batch, edge, channels and features, as data parallelism has them, and as tensor parallelism.
_FEW_IMAGES = ((2, 8, 32, 32), (8, 8, 64, 64), (8, 16, 64, 64))
_FEW_FEATURES = ((32, 8, 32, 8), (64, 8, 64, 8), (64, 16, 64, 8))
# What starts a kernel, and what leaves the caches, of which the largest hold 50 to 130 MB (H100, B200): sizes in
# between tell how fast a cache is.
_CHAIN_BYTES = tuple(2**power for power in (17, 27, 28))
_CPU_CHAIN_BYTES = tuple(2**power for power in (16, 18, 20, 22))
# A program comes back to an array after it has touched many others, a loop over one finds it in the cache: on CPUs
# chains and products work on as many arrays as take about this much on each device (at most so many: each is compiled).
_COLD_BYTES = 2**23
_MOST_TOGETHER = 64
_MESSAGE_BYTES = tuple(2**power for power in (10, 16, 20, 24, 28))
# Virtual CPU devices share the caches of one machine, and the programs that run on them are small. Larger messages of
# eight devices leave the caches, where a byte takes several times as long: no one rate describes both.
_CPU_MESSAGE_BYTES = tuple(2**power for power in (10, 14, 17, 20))
# Gathered are parameters, and their gradients are scattered: there are many, and none waits for another. Sums of
# activations wait for what they sum, and those of gradients are one. On virtual CPU devices alone: elsewhere compilers
# may make one of several, and a device runs one at a time. Together they are no more than the largest message.
_TOGETHER = {"all_gather": 8, "reduce_scatter": 8}
# A quick calibration has few sizes: of messages what a start costs and what bytes do.
_QUICK_MESSAGE_BYTES = (2**10, 2**20, 2**26)


def cases_of(cluster: Cluster, *, quick: bool) -> list[list[Case]]:
    """All series of cases worth measuring on a cluster, the most telling first.

    Args:
      cluster: described as far as it is known.
      quick: fewer dtypes, groups and sizes.
    """
    dtypes = list(dtypes_of(cluster))
    virtual = cluster.device.platform == "cpu"
    step = 2 if quick else 1
    found: list[list[Case]] = [[Starts(kernels=8)]]
    for dtype in dtypes[:2] if quick else dtypes:
        found.append([_product(dtype, edge, edge, edge, cold=virtual) for edge in _EDGES[::step]])
        for m, k, n in (_THIN, _TALL) if dtype == dtypes[0] else ():
            found.append([_product(dtype, s * m, s * k, s * n, cold=virtual) for s in _SCALES[::step]])
    if cluster.device.transpose_bandwidth_bytes_per_second:
        for shapes in (_FEW_IMAGES, _FEW_FEATURES):
            found.append([_convolution(*shape) for shape in shapes[::step]])
    sizes = (_CPU_CHAIN_BYTES if virtual else _CHAIN_BYTES)[: 2 if quick else None]
    for name in CHAINS:
        found.append([_chain(name, size, chain_kernels(name, size), cold=virtual) for size in sizes])
    if cluster.device.transpose_bandwidth_bytes_per_second:
        # Not as the cost model sees it in this program, where what writes the result takes it in.
        kernels = {size: (Kernel("transpose", 0.0, float(size)),) for size in sizes}
        found.append([_chain("transpose", size, kernels[size], cold=virtual) for size in sizes])
    messages = _CPU_MESSAGE_BYTES if virtual else _MESSAGE_BYTES
    if quick:
        messages = _QUICK_MESSAGE_BYTES[: 2 if virtual else None]
    for number, (shape, axis, _) in enumerate(groups_of(cluster)):
        # What a step of a collective takes is seen in groups of two sizes.
        for kind in KINDS if not quick or number == 0 else KINDS[:1] if number == 1 else ():
            most = _TOGETHER.get(kind, 1) if virtual else 1
            counts = [min(most, messages[-1] // size) for size in messages]
            found.append([
                Collective(kind=kind, size_bytes=size, shape=shape, axis=axis, together=count)
                for size, count in zip(messages, counts, strict=True)
            ])  # fmt: skip
    return found


def _product(dtype: str, m: int, k: int, n: int, *, cold: bool) -> Product:
    together = _many(item_bytes(dtype) * (m * k + k * n)) if cold else 1
    return Product(dtype=dtype, m=m, k=k, n=n, together=together)


def _chain(name: str, size_bytes: int, kernels: tuple[Kernel, ...], *, cold: bool) -> Chain:
    return Chain(name=name, size_bytes=size_bytes, kernels=kernels, together=_many(size_bytes) if cold else 1)


def _many(size_bytes: int) -> int:
    """How many arrays of so many bytes leave the caches."""
    return min(-(-_COLD_BYTES // size_bytes), _MOST_TOGETHER)


def _convolution(batch: int, edge: int, channels: int, features: int) -> Convolution:
    kernels = convolution_kernels(batch, edge, channels, features)
    return Convolution(batch=batch, edge=edge, channels=channels, features=features, kernels=kernels)


def dtypes_of(cluster: Cluster) -> Iterable[str]:
    """Dtypes whose products are worth timing: float32 and what the description has peaks of and JAX can multiply."""
    wide = ("float32", "bfloat16", "float16")
    return (dtype for dtype in wide if dtype == "float32" or dtype in cluster.device.peak_flops)


def groups_of(cluster: Cluster) -> Iterable[tuple[tuple[int, ...], int, Axis]]:
    """Logical mesh, position of an axis in it, and the axis: each once of all that cross the same links."""
    seen = set()
    for shape in cluster.logical_shapes(max_axes=2):
        for position, axis in enumerate(cluster.logical_mesh(shape).axes):
            crossed = (axis.size, axis.bandwidth_bytes_per_second, axis.levels)
            if axis.size > 1 and crossed not in seen:
                seen.add(crossed)
                yield shape, position, axis
