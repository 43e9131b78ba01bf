"""Ranges that hold several pieces of one scan, looked at as one scan."""

from __future__ import annotations

import dataclasses
from functools import cache

import pytest

from meshwright.program.staged import StagedProgram, merge_scans, staged_program
from meshwright.program.trace import trace_program
from meshwright.zoo import gpt, llama


@cache
def staged(family: str) -> StagedProgram:
    """A stack of eight layers, cut into eight."""
    if family == "gpt":
        target = gpt.build(dataclasses.replace(gpt.CONFIGS["gpt-tiny"], layers=8, scan=True))
    else:
        target = llama.build(dataclasses.replace(llama.CONFIGS["llama-tiny"], layers=8))
    program = trace_program(target.step, (target.example_state, target.example_batch), microbatches=2)
    return staged_program(program, layers=8)


@pytest.mark.parametrize("family", ["gpt", "llama"])
def test_a_folded_range_is_the_merged_program(family: str) -> None:
    program = staged(family)
    count = len(program.layers)
    assert count > 4
    for first, last in ((0, 3), (1, 3), (2, count - 1), (count - 3, count), (0, count)):
        starts = [program.layers[n][0] for n in (first, last) if 0 < n < count]
        merged = merge_scans(program, starts)
        assert merged is not None
        one = program.folding_cutter.cut(program.layers[first][0], program.layers[last - 1][1])
        other = merged.cutter.cut(*merged.layers[1 if first else 0])
        assert one.fingerprint == other.fingerprint
        # All rows of a stack are the whole of it.
        assert one.parameters == other.parameters or (first, last) == (0, count)
        apart = program.cutter.cut(program.layers[first][0], program.layers[last - 1][1])
        assert len(one.graph.operators) < len(apart.graph.operators)
        assert one.graph.flops == pytest.approx(apart.graph.flops)
