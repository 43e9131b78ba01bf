"""Garbage is collected seldom while a plan is searched, and as before afterwards."""

import gc

import pytest

from meshwright.garbage import kept, seldom_collected


def test_thresholds_are_raised_and_put_back() -> None:
    before = gc.get_threshold()
    with seldom_collected():
        assert all(now >= then for now, then in zip(gc.get_threshold(), before, strict=True))
        assert gc.get_threshold()[0] > before[0]
    assert gc.get_threshold() == before


@seldom_collected()
def fails() -> None:
    raise KeyError


def test_thresholds_are_put_back_after_an_error() -> None:
    before = gc.get_threshold()
    with pytest.raises(KeyError):
        fails()
    assert gc.get_threshold() == before


def test_who_has_turned_it_off_is_left_alone() -> None:
    before = gc.get_threshold()
    try:
        gc.set_threshold(0, 10, 10)
        with seldom_collected():
            assert gc.get_threshold() == (0, 10, 10)
        assert gc.get_threshold() == (0, 10, 10)
    finally:
        gc.set_threshold(*before)


def test_what_a_command_makes_is_not_looked_at_again() -> None:
    before = gc.get_freeze_count()
    try:
        with kept():
            made = [[] for _ in range(1000)]
        assert gc.get_freeze_count() >= before + len(made)
    finally:
        gc.unfreeze()
