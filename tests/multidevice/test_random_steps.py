"""Random training steps by random plans: results, state and effects of one device, or a refusal in words."""

from __future__ import annotations

import jax
import pytest
from random_steps import outcome

# Branches run whole on every device, which is said and is no fault.
pytestmark = pytest.mark.filterwarnings("ignore::meshwright.program.rules.ReplicationWarning")


def assert_as_on_one_device(seeds: range) -> None:
    """Hold each seed's step and plan against one device; most have to be planned and not refused."""
    ends = []
    for seed in seeds:
        ends.append(outcome(seed))
        jax.clear_caches()
    refused = [end for end in ends if end != "equal"]
    assert len(refused) <= len(ends) // 4, refused


@pytest.mark.parametrize("first", [0, 4, 8, 12])
def test_a_random_step(first: int) -> None:
    assert_as_on_one_device(range(first, first + 4))


@pytest.mark.slow
@pytest.mark.parametrize("first", range(100, 400, 20))
def test_more_random_steps(first: int) -> None:
    assert_as_on_one_device(range(first, first + 20))
