"""The demo shows what it says: a plan, its timeline where there are stages, and losses that agree."""

from __future__ import annotations

import pytest

from meshwright.demo import run_demo


@pytest.mark.slow
@pytest.mark.parametrize("pipeline", [False, True])
def test_the_demo_agrees_with_one_device(pipeline: bool, capsys: pytest.CaptureFixture[str]) -> None:
    assert run_demo(steps=2, pipeline=pipeline)
    shown = capsys.readouterr().out
    assert "they agree" in shown
    assert ("stages: 4" in shown) == pipeline
    assert ("rank 2  " in shown) == pipeline
