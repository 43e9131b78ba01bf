"""What a copy of a process needs in order to trace with JAX.

Threads do not survive in a copy, and lowering hands its passes to a pool of them, on which a copy would wait for good.
Used of `jax._src`, the same in JAX 0.10 to 0.12: that pool.
"""

from __future__ import annotations

from jax._src.interpreters import mlir
from jax._src.lib.mlir import ir

# Of the process that was copied: who let them go would wait for their threads.
_former: list[ir.ThreadPool] = []


def renew_threads() -> None:
    """Give this process, which is a copy, threads of its own to trace and lower with. Nothing may be run with them."""
    _former.append(mlir.global_thread_pool)
    mlir.global_thread_pool = ir.ThreadPool()
