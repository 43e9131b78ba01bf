"""The parallelisms of the literature as restrictions of the search: `plan_for(step, args, preset=megatron(tp=2))`.

A preset says what the mesh axes are for (`search.restrictions.roles`), how many equal stages there are, their schedule
and the ZeRO stage. What it leaves open (layouts inside these limits, where stages begin, microbatches,
rematerialisation) is searched as ever, and what comes out is a plan like any other, which says in its notes what it was
held to. The search alone can find each of these plans; `meshwright compare` shows by how much it does better.

A size that is not given follows from the number of devices, if the others are given. Tensor axes lie inside: their
devices are neighbours.

`docs/presets.md` says what each restricts, and the communication it shows.
"""

from .families import (
    FAMILIES as FAMILIES,
    data_parallel as data_parallel,
    deepspeed_3d as deepspeed_3d,
    expert_parallel as expert_parallel,
    fsdp_tp as fsdp_tp,
    gpipe as gpipe,
    megatron as megatron,
    parameter_server as parameter_server,
    parse_preset as parse_preset,
    pipedream as pipedream,
    zero as zero,
)
from .leaner import leaner as leaner
from .preset import Preset as Preset, PresetAxis as PresetAxis, check_free as check_free
