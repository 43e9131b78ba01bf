"""Eight virtual CPU devices for every test, programs compiled in a hurry, and a marker for each folder of tests."""

import atexit
import gc
import os
import time
from collections.abc import Callable
from importlib.metadata import version
from pathlib import Path

import numpy as np
import pytest

# Most of a test's time is compilation of what runs once or twice. Machine code that is not optimised takes two thirds
# of it; XLA's own passes, which decide on collectives and buffers, are the same. Fusions that are not emitted by way of
# MLIR, where XLA still can, save as much again on programs of many small operations; but XLA then fuses a little
# differently and keeps other temporaries, so what is marked `compiled` is tested by itself without that.
_HURRIED = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"
if version("jax").startswith("0.10."):
    _HURRIED += " --xla_cpu_use_fusion_emitters=false"

# Read by JAX when it is first imported, which no test module does before this file has run. In XLA_FLAGS the last
# occurrence of a flag wins, so what the caller set stays in force apart from the number of devices:
# XLA_FLAGS="--xla_backend_optimization_level=3 --xla_cpu_use_fusion_emitters=true" tests what users run (with JAX 0.10;
# newer ones do not know the second). Processes that tests start inherit all of it, unless a test says otherwise.
os.environ["XLA_FLAGS"] = " ".join(
    [_HURRIED, os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
)
os.environ["JAX_PLATFORMS"] = "cpu"

# Traces are millions of small objects that are no garbage: looking for some less often takes a twentieth off all tests.
gc.set_threshold(40_000, 20, 100)
# Nor is garbage looked for when a process of tests ends, which takes 2 s for a million objects.
atexit.register(gc.freeze)

_TESTS = Path(__file__).parent
_FOLDER_MARKERS = frozenset({"unit", "property", "multidevice", "multiprocess"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the name of its folder: `pytest -m unit` is then the same as `pytest tests/unit`."""
    for item in items:
        if item.path.is_relative_to(_TESTS):
            folder = item.path.relative_to(_TESTS).parts[0]
            if folder in _FOLDER_MARKERS:
                item.add_marker(folder)


# CPU seconds of `_fixed_work` on a core for which limits are stated, with nothing else on the machine.
_USUAL_SECONDS = 0.18


def _fixed_work() -> None:
    """Dictionaries, integers, a sort, and many small objects in no order: what planning is made of. The last is what
    suffers most where others use the same caches, or memory is slow."""
    sums: dict[int, int] = {}
    for i in range(200_000):
        sums[i % 1000] = sums.get(i % 1000, 0) + i
    random = np.random.default_rng(0)
    np.argsort(random.random(200_000), kind="stable")
    objects = [(i,) for i in range(200_000)]
    sum(objects[i][0] for i in random.permutation(200_000).tolist())


@pytest.fixture
def usual_seconds() -> Callable[[Callable[[], object]], float]:
    """CPU seconds of a call as a core at its usual speed would take them.

    Machines are shared: the same work takes 2.5 times as long at some hours. So fixed work is timed just before and
    just after the call, and where it is slower than usual by some factor, up to four, the call was too.
    """

    def timed(call: Callable[[], object]) -> float:
        start = time.process_time()
        call()
        return time.process_time() - start

    def usual(call: Callable[[], object]) -> float:
        before = min(timed(_fixed_work) for _ in range(2))
        seconds = timed(call)
        after = min(timed(_fixed_work) for _ in range(2))
        return seconds / min(max(1.0, (before + after) / 2 / _USUAL_SECONDS), 4.0)

    return usual
