"""Pipeline schedules as data: who runs what, in which order, and one order of transfers that cannot deadlock.

A schedule is a function of stages and microbatches that yields a frozen `Schedule`; the simulator walks it with
predicted times, the runtime with real buffers. Read `instruction`, `schedule`, then `one_f_one_b`. Imports no JAX.
"""

from .adaptive import (
    adaptive as adaptive,
    adaptive_warm_up as adaptive_warm_up,
    filling_warm_up as filling_warm_up,
)
from .by_name import SCHEDULES as SCHEDULES, make_schedule as make_schedule
from .check import check_schedule as check_schedule
from .eager import eager_one_f_one_b as eager_one_f_one_b
from .errors import ScheduleError as ScheduleError
from .gpipe import gpipe as gpipe
from .inference import inference as inference
from .instruction import (
    Direction as Direction,
    Edge as Edge,
    Instruction as Instruction,
    Kind as Kind,
    Transfer as Transfer,
)
from .interleaved import interleaved_one_f_one_b as interleaved_one_f_one_b
from .one_f_one_b import one_f_one_b as one_f_one_b
from .order import (
    Step as Step,
    global_order as global_order,
    rank_programs as rank_programs,
    transfer_order as transfer_order,
)
from .pipedream import pipedream as pipedream
from .replicas import replicas as replicas
from .schedule import (
    WORTH_SPLITTING as WORTH_SPLITTING,
    Mode as Mode,
    Schedule as Schedule,
    neighbours as neighbours,
)
from .zero_bubble import zero_bubble as zero_bubble
