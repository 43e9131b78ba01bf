"""What traced peaks teach the stage search about the memory it does not count."""

import pytest

from meshwright.search.stages.reserve import MissedMemory

USABLE = 16e9


def learned(microbatches: int, counted: float, peak: float, *, plain: bool = False) -> MissedMemory:
    missed = MissedMemory(1.04)
    missed.learn(microbatches, [counted, 1e9], [peak, 1e9], [USABLE, USABLE], [plain, True])
    return missed


def test_ranks_that_fit_teach_nothing():
    assert learned(8, 15e9, USABLE / 1.05)(8).limit(USABLE, last=False) == USABLE / 1.04


def test_as_many_microbatches_may_count_so_much_that_the_same_plan_fits_or_is_not_found_again():
    limit = learned(8, 10e9, 20e9)(8).limit(USABLE, last=False)
    assert limit < 10e9
    assert limit / 10e9 * 20e9 <= USABLE / 1.04 * (1 + 1e-9)


def test_a_plan_that_is_barely_too_large_leaves_nearly_all_of_the_memory():
    """Plans are as good as the memory they may use: of one that is too large by a thousandth not much more is taken."""
    counted, most = 14e9, USABLE / 1.04
    for over, least, largest in (
        (1e-9, 0.002, 0.002),
        (0.001, 0.002, 0.002),
        (0.005, 0.005, 0.01),
        (0.015, 0.015, 0.02),
        (0.05, 0.055, 0.062),
        (0.09, 0.099, 0.1),
    ):
        limit = learned(8, counted, most * (1 + over))(8).limit(USABLE, last=False)
        assert counted * (1 - largest) * (1 - 1e-9) <= limit <= counted * (1 - least) * (1 + 1e-9), over


def test_a_dozen_plans_that_are_too_large_whatever_is_counted_leave_a_tenth_less():
    missed, counted = MissedMemory(1.04), 14e9
    for _ in range(11):
        missed.learn(8, [counted, 1e9], [1.0005 * USABLE / 1.04, 1e9], [USABLE, USABLE], [False, True])
        left = missed(8).limit(USABLE, last=False)
        assert 0.89 * counted < left < counted
        counted = left
    assert counted < 0.9 * 14e9


def test_what_is_missed_shrinks_with_the_microbatch_and_is_not_scaled_up():
    missed = learned(64, 12e9, 22e9)
    same, finer, coarser = (missed(count).limit(USABLE, last=False) for count in (64, 128, 16))
    assert finer > same
    # A plan in larger microbatches may keep less of them: as much as in these ones may be counted, not nothing.
    assert coarser == pytest.approx(max(USABLE / 1.04 - 10e9, USABLE / 1.04 * 12 / 22))


def test_the_last_stage_is_learned_of_apart():
    missed = MissedMemory(1.04)
    missed.learn(8, [10e9, 10e9], [10e9, 20e9], [USABLE, USABLE], [True, True])
    assert missed(8).limit(USABLE, last=False) > 15e9
    assert missed(8).limit(USABLE, last=True) < 10e9


def test_stages_that_rematerialise_nothing_are_learned_of_apart():
    missed = learned(8, 10e9, 20e9, plain=True)
    assert missed(8).limit(USABLE, last=False) == USABLE / 1.04
    assert missed(8).limit(USABLE, last=False, again=False) < 10e9
    both = learned(8, 10e9, 20e9)
    assert both(8).limit(USABLE, last=False) == both(8).limit(USABLE, last=False, again=False) < 10e9


def test_what_was_counted_in_vain_may_be_counted_beyond_what_there_is():
    missed = MissedMemory(1.04)
    missed.learn(8, [15e9, 14e9], [12e9, 13e9], [USABLE, USABLE], [False, False])
    most = USABLE / 1.04
    for known in (missed, missed.known):
        assert known(8).limit(USABLE, last=False) == pytest.approx(most + 3e9)
        assert known(8).limit(USABLE, last=False, again=False) == pytest.approx(most + 3e9)
        assert known(8).limit(USABLE, last=True) == pytest.approx(most + 1e9)
        assert known.limit_of_rank(8, 0, USABLE) == pytest.approx(most + 3e9)
    assert missed(4).limit(USABLE, last=False) == most, "a guess, which may make a plan too large"
    assert missed.known(4).limit(USABLE, last=False) == pytest.approx(most + 3e9)
    assert missed.known(16).limit(USABLE, last=False) == pytest.approx(most + 1.5e9)
    assert missed.limit_of_rank(8, 1, USABLE) >= USABLE


def test_a_rank_that_fits_with_nothing_counted_in_vain_may_still_count_all():
    missed = MissedMemory(1.04)
    missed.learn(8, [12e9], [13e9], [USABLE], [False])
    assert missed.limit_of_rank(8, 0, USABLE) == USABLE
    missed.learn(8, [15.5e9], [15.9e9], [USABLE], [False])
    assert missed.limit_of_rank(8, 0, USABLE) < 15.5e9, "or the same plan is found again"


def test_a_plan_that_is_too_large_counts_for_more_than_one_that_fits():
    missed, most = MissedMemory(1.04), USABLE / 1.04
    missed.learn(8, [15e9], [12e9], [USABLE], [False])
    missed.learn(8, [18e9], [15.5e9], [USABLE], [False])
    assert most < missed.known(8).limit(USABLE, last=True) < 18e9
    missed.learn(8, [17e9], [15e9], [USABLE], [False])
    assert missed.known(8).limit(USABLE, last=True) < 18e9, "of those that fit the last one counts, of the others all"
