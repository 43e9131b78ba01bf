"""What a plan that somebody states would take: no search, but the costs of one.

A paper says "tensor 8, pipeline 16 of 3 chunks, data 32, microbatch 2, full recompute". That is a restriction so tight
that little is left: each mesh axis has a role, stages are equal, the schedule is known. `solve_stated` cuts the program
into such stages and solves the layouts that the roles leave, one small problem for each kind of stage (the first, an
inner one, the last); `work` and `memory` list what a solution does and keeps. `price_stated` prices the lists
(`cost.kernels`, `cost.collective`) under an efficiency profile and simulates the schedule. Graph, rules, problem,
collectives, schedule and simulator are those of every plan.

Equal stages are solved once, whatever their number, so a plan of 3,072 devices costs as much as one of 8: tenths of a
second once the step is traced. `Traces` are shared by the caller.

Known limits: stages are equal in layers of one scan; one logical mesh for all stages; the first and the last stage's
exchange of shared parameters is priced between neighbours.
"""

from .memory import KeptBytes as KeptBytes
from .plan import Recompute as Recompute, StatedPlan as StatedPlan
from .price import Evaluation as Evaluation, MemoryLayout as MemoryLayout, price_stated as price_stated
from .solved import SolvedKind as SolvedKind, SolvedPlan as SolvedPlan, solve_stated as solve_stated
from .work import Movement as Movement, Runs as Runs, StageWork as StageWork, stage_work as stage_work
