"""Random training steps by random plans: results, state and effects of one device, or a refusal in words."""

from __future__ import annotations

from collections.abc import Sequence

import jax
import pytest
from random_steps import OPTIONS, options_of, outcome, random_step

# Branches run whole on every device, which is said and is no fault.
pytestmark = pytest.mark.filterwarnings("ignore::meshwright.program.rules.ReplicationWarning")

# Few that together draw all that there is; the first take the longest.
SEEDS = ((64, 5, 45, 1, 4, 38), (0, 39, 34, 91))


def drawn(seed: int) -> set[str | int]:
    """The words of a seed's step, and which options it has."""
    return {*random_step(seed).words, OPTIONS.index(options_of(seed))}


def test_all_that_there_is_is_drawn() -> None:
    assert set.union(*(drawn(seed) for seeds in SEEDS for seed in seeds)) == set.union(*map(drawn, range(100)))


def assert_as_on_one_device(seeds: Sequence[int]) -> None:
    """Hold each seed's step and plan against one device; most have to be planned and not refused."""
    ends = []
    for seed in seeds:
        ends.append(outcome(seed))
    refused = [end for end in ends if end != "equal"]
    assert len(refused) <= len(ends) // 4, refused


@pytest.mark.parametrize(
    "seeds", [pytest.param(SEEDS[0], marks=pytest.mark.slow), SEEDS[1]], ids=lambda seeds: f"from {seeds[0]}"
)
def test_a_random_step(seeds: Sequence[int]) -> None:
    assert_as_on_one_device(seeds)


@pytest.mark.slow
@pytest.mark.parametrize("first", range(0, 400, 20))
def test_more_random_steps(first: int) -> None:
    assert_as_on_one_device(range(first, first + 20))
    jax.clear_caches()  # what this many programs have left
