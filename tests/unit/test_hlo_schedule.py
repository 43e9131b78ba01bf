"""Schedules of compiled programs: kernels by class with the compiler's cycles, and what runs beside collectives."""

from __future__ import annotations

import pytest

from meshwright._jax.hlo import read_text
from meshwright._jax.hlo_schedule import in_turn, read_schedule

CYCLES = 'backend_config={{"window_config":{{"estimated_cycles":"{}"}}}}'

PAIR = f"""
HloModule pair, is_scheduled=true, num_partitions=4

%product (p: f32[8,16], q: f32[16,8]) -> f32[8,8] {{
  %p = f32[8,16] parameter(0)
  %q = f32[16,8] parameter(1)
  ROOT %conv = f32[8,8] convolution(%p, %q), dim_labels=bf_io->bf, metadata={{op_name="jit(f)/dot_general"}}
}}

%doubled (p: f32[8,8]) -> f32[8,8] {{
  %p = f32[8,8] parameter(0)
  ROOT %twice = f32[8,8] add(%p, %p)
}}

ENTRY %main (a: f32[8,16], b: f32[16,8], w: f32[2,8]) -> f32[8,8] {{
  %a = f32[8,16] parameter(0)
  %b = f32[16,8] parameter(1)
  %w = f32[2,8] parameter(2)
  %start = (f32[2,8], f32[8,8]) all-gather-start(%w), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, metadata={{op_name="jit(f)/all_gather"}}
  %made = f32[8,8] fusion(%a, %b), kind=kOutput, calls=%product, {CYCLES.format(1000)}
  %sum = f32[8,8] fusion(%made), kind=kLoop, calls=%doubled, {CYCLES.format(30)}
  %done = f32[8,8] all-gather-done(%start)
  %later = f32[8,8] fusion(%done), kind=kLoop, calls=%doubled, {CYCLES.format(5)}
  ROOT %all = f32[8,8] all-reduce(%later), replica_groups={{{{0,1,2,3}}}}, to_apply=%doubled
}}
"""  # noqa: E501 (a line for each instruction, as XLA prints them)

# As the TPU compiler writes a gather whose steps are in the kernels beside it, in a loop of three trips.
FUSED = f"""
HloModule fused, is_scheduled=true, num_partitions=4

%begin (p: f32[2,8]) -> (f32[2,8], f32[8,8]) {{
  %p = f32[2,8] parameter(0)
  %g = f32[8,8] all-gather(%p), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, frontend_attributes={{chain_id="7"}}
  ROOT %c = (f32[2,8], f32[8,8]) custom-call(%g), custom_call_target="AsyncCollectiveStart"
}}

%beside (p: f32[2,8], q: f32[8,8]) -> f32[8,8] {{
  %p = f32[2,8] parameter(0)
  %q = f32[8,8] parameter(1)
  %g = f32[8,8] all-gather(%p), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, frontend_attributes={{chain_id="7"}}
  ROOT %c = f32[8,8] convolution(%q, %q), dim_labels=bf_io->bf
}}

%end (p: f32[2,8]) -> f32[8,8] {{
  %p = f32[2,8] parameter(0)
  %g = f32[8,8] all-gather(%p), replica_groups={{{{0,1,2,3}}}}, dimensions={{0}}, frontend_attributes={{chain_id="7"}}
  ROOT %c = f32[8,8] custom-call(%g), custom_call_target="AsyncCollectiveDone"
}}

%body (s: (s32[], f32[2,8], f32[8,8])) -> (s32[], f32[2,8], f32[8,8]) {{
  %s = (s32[], f32[2,8], f32[8,8]) parameter(0)
  %n = s32[] get-tuple-element(%s), index=0
  %w = f32[2,8] get-tuple-element(%s), index=1
  %x = f32[8,8] get-tuple-element(%s), index=2
  %start = (f32[2,8], f32[8,8]) fusion(%w), kind=kCustom, calls=%begin
  %made = f32[8,8] fusion(%w, %x), kind=kOutput, calls=%beside, {CYCLES.format(400)}
  %done = f32[8,8] fusion(%w), kind=kCustom, calls=%end
  ROOT %t = (s32[], f32[2,8], f32[8,8]) tuple(%n, %w, %done)
}}

%while (s: (s32[], f32[2,8], f32[8,8])) -> pred[] {{
  %s = (s32[], f32[2,8], f32[8,8]) parameter(0)
  ROOT %yes = pred[] constant(true)
}}

ENTRY %main (s: (s32[], f32[2,8], f32[8,8])) -> (s32[], f32[2,8], f32[8,8]) {{
  %s = (s32[], f32[2,8], f32[8,8]) parameter(0)
  ROOT %loop = (s32[], f32[2,8], f32[8,8]) while(%s), condition=%while, body=%body, backend_config={{"known_trip_count":{{"n":"3"}}}}
}}
"""  # noqa: E501


def test_what_stands_between_start_and_done_runs_beside_a_collective() -> None:
    found = read_schedule(PAIR)
    gather, reduce = found.collectives
    assert (gather.kind, gather.bytes, gather.is_asynchronous, gather.kernels, gather.cycles) == (
        "all_gather", 8 * 8 * 4, True, 2, 1030.0,
    )  # fmt: skip
    assert (gather.flops, gather.written_bytes) == (2 * 8 * 16 * 8, 2 * 8 * 8 * 4)
    assert gather.source == "jit(f)/all_gather"
    assert (reduce.kind, reduce.is_asynchronous, reduce.kernels) == ("all_reduce", False, 0)
    assert found.kernels["products"].cycles == 1000
    assert found.kernels["products"].flops == 2 * 8 * 16 * 8
    assert (found.kernels["elementwise"].count, found.kernels["elementwise"].cycles) == (2, 35)
    assert found.cycles == 1035


def test_a_collective_that_is_spread_over_kernels_counts_once_a_trip() -> None:
    (gather,) = read_schedule(FUSED).collectives
    assert (gather.kind, gather.count, gather.kernels, gather.cycles) == ("all_gather", 3, 1, 400.0)
    assert read_schedule(FUSED).kernels["products"].cycles == 3 * 400
    (compiled,), flops, _ = read_text(FUSED)
    assert (compiled.kind, compiled.count, compiled.bytes) == ("all_gather", 3, 8 * 8 * 4)
    assert flops == 3 * 2 * 8 * 8 * 8


def test_schedules_that_run_in_turn_add_up() -> None:
    one = read_schedule(PAIR)
    both = in_turn([(one, 2), (read_schedule(FUSED), 1)])
    assert both.cycles == 2 * 1035 + 1200
    assert [collective.count for collective in both.collectives] == [2, 2, 3]


def test_text_that_is_no_program_is_refused() -> None:
    with pytest.raises(ValueError, match="refused to read a compiled program"):
        read_schedule("no program")
