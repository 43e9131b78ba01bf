"""Eight virtual CPU devices for every test, programs compiled in a hurry, and a marker for each folder of tests."""

import os
from pathlib import Path

import pytest

# Most of a test's time is compilation of what runs once or twice. Machine code that is not optimised takes two thirds
# of it; XLA's own passes, which decide on collectives and buffers, are the same.
_HURRIED = "--xla_backend_optimization_level=0 --xla_cpu_parallel_codegen_split_count=1"

# Read by JAX when it is first imported, which no test module does before this file has run. In XLA_FLAGS the last
# occurrence of a flag wins, so what the caller set stays in force apart from the number of devices:
# XLA_FLAGS=--xla_backend_optimization_level=3 tests what users run. Processes that tests start inherit all of it.
os.environ["XLA_FLAGS"] = " ".join(
    [_HURRIED, os.environ.get("XLA_FLAGS", ""), "--xla_force_host_platform_device_count=8"]
)
os.environ["JAX_PLATFORMS"] = "cpu"

_TESTS = Path(__file__).parent
_FOLDER_MARKERS = frozenset({"unit", "property", "multidevice", "multiprocess"})


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Mark each test with the name of its folder: `pytest -m unit` is then the same as `pytest tests/unit`."""
    for item in items:
        if item.path.is_relative_to(_TESTS):
            folder = item.path.relative_to(_TESTS).parts[0]
            if folder in _FOLDER_MARKERS:
                item.add_marker(folder)
