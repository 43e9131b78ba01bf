"""Presets worth pricing on a cluster: every shape of each family that makes sense for its devices."""

from __future__ import annotations

from collections import Counter

from ..cluster import Cluster
from .families import (
    data_parallel,
    deepspeed_3d,
    expert_parallel,
    fsdp_tp,
    gpipe,
    megatron,
    parameter_server,
    pipedream,
    zero,
)
from .preset import Preset

# More stages are not tried; or more than so many times those that a model needs to fit.
_MOST_STAGES, _TIMES_NEEDED = 8, 4

# Stages of each group of devices that are tried, beside one for each layer.
_CHUNKS = (1, 2, 4)


def candidates_for(cluster: Cluster) -> tuple[Preset, ...]:
    """Presets worth pricing on a cluster: the first shape of each family, then the second of each, and so on. Shapes
    that split the model least come first, as is the custom: whoever has no time for all has tried these.

    >>> from meshwright import load_cluster
    >>> [str(preset) for preset in candidates_for(load_cluster("rtx4090-4"))][:3]
    ['data_parallel()', 'parameter_server()', 'zero(stage=1)']

    Args:
      cluster: where the plans are to run.
    """
    devices = cluster.num_devices
    host = min(host.devices for host in cluster.hosts)
    inside = [n for n in _powers(host) if devices % n == 0]
    staged = [n for n in _powers(min(devices, _MOST_STAGES)) if devices % n == 0]
    found = [data_parallel(), parameter_server(), *(zero(stage=stage) for stage in (1, 2, 3))]
    shapes = [(tp, pp) for pp in staged for tp in inside if tp * pp > 1 and devices % (tp * pp) == 0]
    shapes.sort(key=lambda shape: shape[0] * shape[1])
    found += [megatron(tp=tp, pp=pp) for tp, pp in shapes]
    found += [megatron(tp=tp, pp=pp, sequence_parallel=True) for tp, pp in shapes if tp > 1]
    found += [megatron(tp=tp, pp=pp, chunks=2, sequence_parallel=tp > 1) for tp, pp in shapes if pp > 1]
    found += [deepspeed_3d(tp=tp, pp=pp) for tp, pp in shapes if devices // (tp * pp) > 1]
    found += [fsdp_tp(tp=tp) for tp in inside if 1 < tp < devices]
    found += [family(n) for n in staged if n > 1 for family in (gpipe, pipedream)]
    found += [expert_parallel(ep=n, dp=None) for n in _powers(devices) if n > 1 and devices % n == 0]
    ranks: Counter[str] = Counter()
    ranked = []
    for preset in found if devices > 1 else ():
        ranked.append((ranks[preset.family], preset.on(devices)))
        ranks[preset.family] += 1
    return tuple(preset for _, preset in sorted(ranked, key=lambda one: one[0]))


def settings_for(cluster: Cluster, needed: int, layers: int) -> tuple[Preset, ...]:
    """Settings of Megatron-LM for models that need many stages, with all that it has for them: sequence parallelism, a
    distributed optimizer, interleaved stages.

    >>> from meshwright import load_cluster
    >>> [str(preset) for preset in settings_for(load_cluster("p3.16xlarge:2"), 2, 8)][:2]
    ['megatron(tp=1, pp=2, dp=8, zero=1)', 'megatron(tp=1, pp=2, dp=8, zero=1, chunks=2)']

    Args:
      cluster: where the plans are to run.
      needed: stages, that a device can hold its share of one.
      layers: of the model.
    """
    devices, host = cluster.num_devices, min(host.devices for host in cluster.hosts)
    most = min(devices, max(_MOST_STAGES, _TIMES_NEEDED * needed))
    found = []
    for stages in [n for n in range(2, min(most, layers) + 1) if devices % n == 0]:
        each = sorted({chunks for chunks in (*_CHUNKS, layers // stages) if chunks * stages <= layers})
        for tensor in [n for n in _powers(host) if devices % (stages * n) == 0]:
            zero = int(stages * tensor < devices)
            found += [
                megatron(tp=tensor, pp=stages, zero=zero, chunks=chunks, sequence_parallel=tensor > 1)
                for chunks in each
            ]
    return tuple(preset.on(devices) for preset in found)


def _powers(most: int) -> list[int]:
    return [2**i for i in range(most.bit_length()) if 2**i <= most]
