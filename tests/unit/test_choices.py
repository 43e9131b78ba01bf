"""What operators may choose from follows from how sizes are divided, and from nothing else of them."""

from __future__ import annotations

from itertools import product

import pytest

from meshwright.program.factors import Factor, Rule
from meshwright.search.choices import Choices, OperatorChoice, _divided
from meshwright.sharding import algorithms

MESHES = ({"x": 8}, {"x": 2, "y": 4}, {"x": 3, "y": 2}, {"x": 4, "y": 6})


def matmul(m: int, n: int, k: int) -> Rule:
    factors = (Factor(m, "parallel"), Factor(n, "parallel"), Factor(k, "reduction"))
    return Rule(operands=(((0,), (2,)), ((2,), (1,))), results=(((0,), (1,)),), factors=factors)


def joined(major: int, minor: int) -> Rule:
    """A reshape of two dims into one: the minor factor leads no dim unless the major one is of size 1."""
    factors = (Factor(major, "parallel"), Factor(minor, "parallel"))
    return Rule(operands=(((0,), (1,)),), results=(((0, 1),),), factors=factors)


@pytest.mark.parametrize("sizes", MESHES, ids=str)
def test_sizes_that_are_divided_alike_have_the_same_algorithms(sizes: dict[str, int]) -> None:
    devices = 1
    for size in sizes.values():
        devices *= size
    rules = [matmul(*one) for one in product((1, 2, 3, 4, 6, 7, 8, 12, 48, 1024), repeat=3)]
    rules += [joined(*one) for one in product((1, 2, 3, 5, 8, 24), repeat=2)]
    for rule in rules:
        moving = (True,) * len(rule.operands)
        assert algorithms(_divided(rule, devices), sizes, moving) == algorithms(rule, sizes, moving)
    assert len({_divided(rule, devices) for rule in rules}) < len(rules)


def test_rows_are_found_once_for_choices() -> None:
    choices = Choices(OperatorChoice(one) for one in algorithms(matmul(8, 8, 8), {"x": 2}, (True, True)))
    assert choices.operands is choices.operands
    assert [row[1] for row in choices.operands] == list(choices[1].algorithm.operands)
    assert [row[2] for row in choices.results] == list(choices[2].algorithm.results)
