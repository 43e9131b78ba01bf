"""`check="compile"` on devices that are here: the plan that is run has been compiled for them, and fits."""

from __future__ import annotations

import jax
import numpy as np
import pytest

import meshwright as mw
from meshwright.planning.plan_for import plan_for
from meshwright.targets import load_target

pytestmark = pytest.mark.compiled


@pytest.mark.parametrize(
    ("name", "stages"),
    # One stage is that of the step below.
    [
        ("mlp-tiny", 2),
        *(pytest.param(*one, marks=pytest.mark.slow) for one in (("mlp-tiny", 1), ("gpt-tiny", 1), ("gpt-tiny", 2))),
    ],
)
def test_a_plan_for_devices_at_hand_is_compiled_for_them(name: str, stages: int) -> None:
    target = load_target(name)
    found = plan_for(target.step, target.example_args, cluster="local", stages=stages, check="compile")
    assert any(note.startswith("compiled for cpu: ") and "fits" in note for note in found.plan.notes)
    assert [one.what for one in found.considered][-1] == "compiled"


def test_a_step_that_is_run_can_be_checked() -> None:
    target = load_target("mlp-tiny")
    args = target.make_args()
    step = mw.parallelize(target.step, devices=jax.devices()[:4], check="compile")
    wanted = jax.jit(target.step)(*target.make_args())
    got = step(*args)
    assert any(note.startswith("compiled for cpu: ") for note in step.plan(*target.make_args()).notes)
    for mine, theirs in zip(jax.tree.leaves(got), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(mine, theirs, rtol=1e-4, atol=1e-5)
