"""Many processes: starting them on this machine, joining them into one JAX run, and ending them together.

`run` starts local processes and waits for all of them (`meshwright launch` is its command line); `initialize`, called
at the top of a script, joins the processes that our launcher, SLURM, Kubernetes or MPI started. Only `initialize` uses
JAX, inside the call.
"""

from meshwright.launch.connect import initialize as initialize
from meshwright.launch.errors import LaunchError as LaunchError
from meshwright.launch.local import run as run
from meshwright.launch.result import ProcessResult as ProcessResult, Result as Result
