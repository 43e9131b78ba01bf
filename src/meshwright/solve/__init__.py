"""Optimisation problems as numbers: one choice per node, least seconds, within a limit of bytes.

`solve` picks the method; each method is also there by itself, with the signature of `solve` plus a known assignment.
"""

from meshwright.solve.brute_force import solve_by_brute_force as solve_by_brute_force
from meshwright.solve.eliminate import solve_by_elimination as solve_by_elimination
from meshwright.solve.labels import solve_by_labels as solve_by_labels
from meshwright.solve.lagrange import solve_by_multiplier as solve_by_multiplier
from meshwright.solve.milp import solve_by_milp as solve_by_milp
from meshwright.solve.portfolio import solve as solve
from meshwright.solve.presolve import Reduction as Reduction, presolve as presolve
from meshwright.solve.problem import (
    Infeasible as Infeasible,
    OutOfTime as OutOfTime,
    Problem as Problem,
    Solution as Solution,
    Unsolved as Unsolved,
)
