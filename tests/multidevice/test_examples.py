"""Every script in examples/ runs as it is: the first as a user would start it, the others in this process."""

from __future__ import annotations

import os
import runpy
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
EXAMPLES = sorted((ROOT / "examples").glob("*.py"))


def test_there_are_examples() -> None:
    assert EXAMPLES


@pytest.mark.parametrize(
    "example",
    # Flax's other interface always runs.
    [pytest.param(path, marks=[pytest.mark.slow] if path.stem == "flax_linen" else []) for path in EXAMPLES],
    ids=lambda path: path.stem,
)
def test_an_example_runs(example: Path, capsys: pytest.CaptureFixture[str]) -> None:
    if example.stem == "quickstart":
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src")}
        del environment["XLA_FLAGS"]
        ran = subprocess.run(
            [sys.executable, str(example)], env=environment, capture_output=True, text=True, timeout=300
        )
        assert ran.returncode == 0, ran.stderr
        assert ran.stdout.strip()
    else:
        runpy.run_path(str(example), run_name="__main__")
        assert capsys.readouterr().out.strip()
