"""What operators may choose from follows from how sizes are divided, and from nothing else of them."""

from __future__ import annotations

from itertools import product

import pytest

from meshwright.program.factors import Factor, Rule
from meshwright.search.prices.choices import Choices, OperatorChoice
from meshwright.sharding import algorithms, splits_of

MESHES = ({"x": 8}, {"x": 2, "y": 4}, {"x": 3, "y": 2}, {"x": 4, "y": 6})


def matmul(m: int, n: int, k: int) -> Rule:
    factors = (Factor(m, "parallel"), Factor(n, "parallel"), Factor(k, "reduction"))
    return Rule(operands=(((0,), (2,)), ((2,), (1,))), results=(((0,), (1,)),), factors=factors)


def joined(major: int, minor: int) -> Rule:
    """A reshape of two dims into one: the minor factor leads no dim unless the major one is of size 1."""
    factors = (Factor(major, "parallel"), Factor(minor, "parallel"))
    return Rule(operands=(((0,), (1,)),), results=(((0, 1),),), factors=factors)


def assignments(rule: Rule, sizes: dict[str, int]) -> set[tuple[tuple[str, ...], ...]]:
    """Every way to give each axis to a factor or to none, so that what is left of the factor is divided each time."""
    found = set()
    for choice in product((None, *rule.splittable), repeat=len(sizes)):
        axes: list[tuple[str, ...]] = [()] * len(rule.factors)
        left = [factor.size for factor in rule.factors]
        whole = True
        for (axis, size), factor in zip(sizes.items(), choice, strict=True):
            if factor is not None:
                whole = whole and left[factor] % size == 0
                left[factor] //= size
                axes[factor] = (*axes[factor], axis)
        if whole:
            found.add(tuple(axes))
    return found


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_algorithms_follow_from_how_sizes_are_divided(sizes: dict[str, int]) -> None:
    rules = [matmul(*one) for one in product((1, 2, 3, 4, 6, 7, 8, 12, 48, 1024), repeat=3)]
    rules += [joined(*one) for one in product((1, 2, 3, 5, 8, 24), repeat=2)]
    for rule in rules:
        found = algorithms(rule, sizes, (True,) * len(rule.operands))
        assert {one.axes for one in found} == assignments(rule, sizes)
        assert len({one.axes for one in found}) == len(found)
        assert not any(found[0].axes)
    assert len({splits_of(rule, tuple(sizes.items())) for rule in rules}) < len(rules)


def test_what_is_divided_alike_is_one_object() -> None:
    of = splits_of(matmul(8, 8, 8), (("x", 2), ("y", 4)))
    assert splits_of(matmul(64, 128, 32), (("x", 4), ("y", 8))) is of
    assert splits_of(matmul(4, 128, 32), (("x", 4), ("y", 8))) is not of  # 4 is not divided by 8
    assert splits_of(matmul(8, 8, 8), (("x", 4), ("y", 2))) is of
    assert splits_of(matmul(8, 8, 8), (("x", 4), ("y", 4))) is not of  # not by both


def test_rows_are_found_once_for_choices() -> None:
    choices = Choices(OperatorChoice(one) for one in algorithms(matmul(8, 8, 8), {"x": 2}, (True, True)))
    assert choices.operands is choices.operands
    assert [row[1] for row in choices.operands] == list(choices[1].algorithm.operands)
    assert [row[2] for row in choices.results] == list(choices[2].algorithm.results)
