"""How much arithmetic the operators of chains are, beside one that adds or multiplies.

It matters where arithmetic that is no product is not much faster than memory (`Device.vector_flops`). Measured on
virtual CPU devices (`benchmarks/cpu_costs.py`) what is computed by polynomials takes as long as 20 to 50 additions,
sums and maxima along rows, whose operations wait for each other, as 10 (rows of 256) to 80 (of 64). By what chains of
both take (`meshwright calibrate`) both are 30.
"""

from __future__ import annotations

_POLYNOMIALS = """
    acos acosh asin asinh atan atan2 atanh cbrt cos cosh digamma erf erf_inv erfc exp exp2 expm1 lgamma log log1p
    logistic pow rsqrt sin sinh tan tanh
"""
_REDUCTIONS = """
    argmax argmin cumlogsumexp cummax cummin cumprod cumsum reduce_max reduce_min reduce_prod reduce_sum
"""
_WORK: dict[str, float] = dict.fromkeys((*_POLYNOMIALS.split(), *_REDUCTIONS.split()), 30.0)


def chain_work(name: str) -> float:
    """Additions that one element of an operator takes: of what it makes, or of what it reduces.

    >>> chain_work("tanh") > chain_work("add")
    True
    """
    return _WORK.get(name, 1.0)
