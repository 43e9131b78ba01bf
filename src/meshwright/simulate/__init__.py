"""The predicted timeline and memory curve of a schedule, from given seconds and bytes.

Read `timing` (what is given), `simulate` (what is assumed), `timeline` (what comes out), `step_seconds` (its end
alone), `of_plan` (what a plan gives).
Imports no JAX.
"""

from .of_plan import plan_schedule as plan_schedule, plan_timing as plan_timing, simulate_plan as simulate_plan
from .period import steady_period_seconds as steady_period_seconds
from .simulate import simulate as simulate
from .step_seconds import step_seconds as step_seconds
from .timeline import Event as Event, Timeline as Timeline, TransferEvent as TransferEvent
from .timing import EdgeTiming as EdgeTiming, StageTiming as StageTiming, Timing as Timing
