"""Presets worth pricing on a cluster: every shape of each family that makes sense for its devices."""

from __future__ import annotations

from collections import Counter

from ..cluster import Cluster
from . import families
from .preset import Preset

# More stages are not tried. Chosen, not measured.
_MOST_STAGES = 8


def candidates_for(cluster: Cluster) -> tuple[Preset, ...]:
    """Presets worth pricing on a cluster: the first shape of each family, then the second of each, and so on. Shapes
    that split the model least come first, as is the custom: whoever has no time for all has tried these.

    >>> from meshwright import load_cluster
    >>> [str(preset) for preset in candidates_for(load_cluster("rtx4090-4"))][:3]
    ['data_parallel()', 'parameter_server()', 'zero(stage=1)']
    """
    devices = cluster.num_devices
    powers = [2**i for i in range(devices.bit_length()) if devices % 2**i == 0]
    inside = [n for n in powers if n <= min(host.devices for host in cluster.hosts)]
    staged = [n for n in powers if n <= _MOST_STAGES]
    found = [
        families.data_parallel(),
        families.parameter_server(),
        *(families.zero(stage=stage) for stage in (1, 2, 3)),
    ]
    shapes = [(tp, pp) for pp in staged for tp in inside if tp * pp > 1 and devices % (tp * pp) == 0]
    shapes.sort(key=lambda shape: shape[0] * shape[1])
    found += [families.megatron(tp=tp, pp=pp) for tp, pp in shapes]
    found += [families.megatron(tp=tp, pp=pp, sequence_parallel=True) for tp, pp in shapes if tp > 1]
    found += [families.megatron(tp=tp, pp=pp, chunks=2, sequence_parallel=tp > 1) for tp, pp in shapes if pp > 1]
    found += [families.deepspeed_3d(tp=tp, pp=pp) for tp, pp in shapes if devices // (tp * pp) > 1]
    found += [families.fsdp_tp(tp=tp) for tp in inside if 1 < tp < devices]
    found += [family(n) for n in staged if n > 1 for family in (families.gpipe, families.pipedream)]
    found += [families.expert_parallel(ep=n, dp=None) for n in powers if n > 1]
    ranks: Counter[str] = Counter()
    ranked = []
    for preset in found if devices > 1 else ():
        ranked.append((ranks[preset.family], preset.on(devices)))
        ranks[preset.family] += 1
    return tuple(preset for _, preset in sorted(ranked, key=lambda one: one[0]))
