"""Eight virtual CPU devices for every test, and a marker for each folder of tests."""

import os
from pathlib import Path

import pytest

# Read by JAX when it is first imported, which no test module does before this file has run. In XLA_FLAGS the last
# occurrence of a flag wins, so what the caller set stays in force apart from the number of devices.
os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} --xla_force_host_platform_device_count=8".strip()
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
