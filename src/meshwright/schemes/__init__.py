"""The parallelisms of the literature as closed forms, beside what the planner's own rules say of a program.

For every *scheme* (data parallelism, ZeRO, tensor parallelism, a pipeline under a schedule, ...) `analyse` gives the
bytes a device sends in a step and the bytes it holds, twice:

* by the formula of the literature (`formulas`), in symbols that are measured on the traced program (`quantities`):
  bytes of parameters, of kept activations, of what products with weights read and make;
* counted (`counted`) on the layouts that the planner's problem finds under the preset of the scheme: the collectives
  of `search.intra.account` and the memory of `search.intra.solved_plan`, the same ones that a plan shows.

Where the two differ, the formula is an idealisation (equal stages, widths that divide) or the planner does otherwise
than the paper; `Scheme.note` says which.
"""

from .analysis import Analysed as Analysed, analyse as analyse
from .formulas import SCHEMES as SCHEMES, Scheme as Scheme
from .report import schemes_document as schemes_document, schemes_text as schemes_text
