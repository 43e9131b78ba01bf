"""What loops stack, as XLA's TPU compiler stores it."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace

from meshwright._jax.dataflow import Kind, Operation, Program


def with_stacks_as_read(program: Program) -> Program:
    """A stack that a loop writes and that nothing but a conversion to fewer bytes reads: the loop stores what that
    makes of each row, and the conversion is gone (the keys and values of Qwen3 8B, which rotary embeddings leave in
    float32)."""
    read = Counter(v for operation in program.operations for v in operation.reads)
    read.update(program.outputs)
    maker = {value: operation for operation in program.operations for value in operation.writes}
    values, instead = list(program.values), dict[int, int]()
    for operation in program.operations:
        if operation.name != "convert_element_type" or operation.kind is not Kind.ELEMENTWISE:
            continue
        (made,) = operation.writes
        stack = operation.reads[0] if len(operation.reads) == 1 else made
        loop = maker.get(stack)
        if loop is None or loop.kind is not Kind.LOOP or read[stack] != 1:
            continue
        first = next((loop.reads[a] for a, b in loop.kept if loop.writes[b] == stack), None)
        smaller = values[made].size_bytes < values[stack].size_bytes
        # What a loop carries from trip to trip it reads; what it stacks was made of nothing.
        if first is None or not smaller or read[first] != 1 or first not in maker or maker[first].reads:
            continue
        values[first] = values[stack] = values[made]
        instead[made] = stack
    if not instead:
        return program

    def renamed(operation: Operation) -> Operation:
        return replace(operation, reads=tuple(instead.get(v, v) for v in operation.reads))

    left = tuple(renamed(one) for one in program.operations if not (set(one.writes) & instead.keys()))
    outputs = tuple(instead.get(v, v) for v in program.outputs)
    return replace(program, values=tuple(values), operations=left, outputs=outputs)
