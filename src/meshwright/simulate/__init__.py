"""The predicted timeline and memory curve of a schedule, from given seconds and bytes.

Read `timing` (what is given), `simulate` (what is assumed), `timeline` (what comes out). Imports no JAX.
"""

from .period import steady_period_seconds as steady_period_seconds
from .simulate import simulate as simulate
from .timeline import Event as Event, Timeline as Timeline, TransferEvent as TransferEvent
from .timing import EdgeTiming as EdgeTiming, StageTiming as StageTiming, Timing as Timing
