"""Convolutions in groups of channels (depthwise ones have a group for each channel), split by whole groups.

With `feature_group_count` a group is a range of the operand's channels; with `batch_group_count`, which gradients of
grouped kernels have, it is a range of the operand's batch. In both the kernel's and the result's channels are cut into
as many ranges, and no group reads another. The index of the group is one factor of Shardy's rule, the major one of
these three dims: a device that has some of the groups has blocks of all three, and computes a convolution of fewer
groups.

Known limit: the number of groups cannot be padded.
"""

from __future__ import annotations

from collections.abc import Mapping

from .._jax.jaxpr import Equation
from .factors import Rule
from .split import Split

_COUNTS = ("batch_group_count", "feature_group_count")  # of the operand's first dim, and of its second


def group_factor(equation: Equation, rule: Rule) -> int | None:
    """The factor that counts the groups of a convolution; None if there is one group only, or another operator."""
    if equation.primitive.name != "conv_general_dilated":
        return None
    numbers = equation.params["dimension_numbers"]
    for count, grouped in zip(_COUNTS, numbers.lhs_spec[:2], strict=True):
        dims = (
            rule.operands[0][grouped], rule.operands[1][numbers.rhs_spec[0]], rule.results[0][numbers.out_spec[1]],
        )  # fmt: skip
        major = {dim[:1] for dim in dims}
        if equation.params[count] > 1 and len(major) == 1:
            (factor,) = major.pop()
            if rule.factors[factor].size == equation.params[count]:
                return factor
    return None


def local_groups(equation: Equation, split: Split) -> Mapping[str, int]:
    """The parameters of a convolution that count groups, for the groups of one device."""
    factor = group_factor(equation, split.rule)
    blocks = 1 if factor is None else split.blocks((factor,))
    return {count: equation.params[count] // blocks for count in _COUNTS if equation.params.get(count, 1) > 1}
