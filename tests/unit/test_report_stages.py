"""Many stages on a page: what is equal is printed once, every stage once, and nothing is false of any of a group."""

from __future__ import annotations

import re
from dataclasses import replace

import pytest
from hypothesis import example, given, settings, strategies as st
from test_plan_explain import BATCH, BY_BATCH, BY_COLUMN, COLUMN, MIB, SUMMED, parameter, pipeline_of, stage_of

from meshwright.plan import Plan, Stage
from meshwright.plan.words import number_words
from meshwright.report.considered import considered_lines
from meshwright.report.explain import explain_plan
from meshwright.report.groups import grouped
from meshwright.report.memory import rank_memory
from meshwright.report.stages import stage_table
from meshwright.report.table import format_seconds, format_table
from meshwright.search.alternative import Alternative
from meshwright.search.considered import Considered

WIDE = 10_000

DATA = stage_of(
    tuple(parameter(f"{name}", SUMMED) for name in "abc"), products=(BATCH,), batch=BY_BATCH, forward_seconds=0.1,
    backward_seconds=0.2,
)  # fmt: skip
TENSOR = stage_of(
    (parameter("w", BY_COLUMN),), products=(COLUMN,), forward_seconds=0.15, backward_seconds=0.2,
    rematerialised=(((), ((0, 3),)),),
)  # fmt: skip
SLOW = replace(DATA, forward_seconds=0.3)
KINDS = (DATA, TENSOR, SLOW)


def many(*kinds: Stage, layers: int = 1) -> Plan:
    """A pipeline of stages that hold less and less, as under 1F1B, on four devices each."""
    plan = pipeline_of(*kinds)
    stages = tuple(
        replace(
            one, layers=(layers * n, layers * (n + 1)), devices=tuple(range(4 * n, 4 * n + 4)), mesh=(("x", 4),),
            in_flight=len(kinds) - n, memory=replace(one.memory, activations=(len(kinds) - n) * MIB / 8),
        )
        for n, one in enumerate(kinds)
    )  # fmt: skip
    return replace(plan, stages=stages)


def numbers_of(words: str) -> list[int]:
    """The numbers that `number_words` was given."""
    if found := re.fullmatch(r"every second of (\d+) to (\d+)", words):
        return list(range(int(found[1]) - 1, int(found[2]), 2))
    numbers: list[int] = []
    for part in words.split(", "):
        first, _, last = part.partition(" to ")
        numbers += range(int(first) - 1, int(last or first))
    return numbers


def rows_of(text: str, title: str) -> list[list[str]]:
    """The cells of the table under a title."""
    lines = text.split(f"{title}\n", 1)[1].split("\n\n", 1)[0].splitlines()[2:]
    return [re.split(r" {2,}", line.strip()) for line in lines]


STAGES = "Stages: memory of each on a device, seconds of one microbatch and once a step"


def test_a_plan_of_13_stages_fits_two_screens() -> None:
    plan = many(SLOW, *[DATA] * 10, TENSOR, SLOW)
    schedules = ("one_f_one_b", "eager_one_f_one_b", "gpipe", "zero_bubble")
    considered = [
        Considered(2**k, f"with layers x devices {'1x4 ' * 13}", schedule=schedule, seconds=k + 0.5)
        for k in range(2, 8) for schedule in schedules
    ] + [Considered(2**k, searched=False, least_seconds=k) for k in range(8, 14)]  # fmt: skip
    others = [Alternative(what=f"{n} microbatches, gpipe", step_seconds=0.02 + n / 1000) for n in range(1, 7)]
    text = explain_plan(plan, considered=considered, alternatives=others)
    lines = text.splitlines()
    assert len(lines) <= 100
    assert max(map(len, lines)) <= 120
    assert [row[0] for row in rows_of(text, STAGES)] == ["1, 13", "2 to 11", "12"]
    assert "STAGES 1 to 11, 13 of 13" in lines  # the first and the last differ from the rest in their seconds only


@settings(deadline=None, max_examples=60)
@given(kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=16), layers=st.integers(1, 3))
def test_every_stage_is_in_one_row_that_is_true_of_it(kinds: list[Stage], layers: int) -> None:
    plan = many(*kinds, layers=layers)
    text = explain_plan(plan, width=WIDE)
    for title in (STAGES, "Where a step of each device goes"):
        covered = [number for row in rows_of(text, title) for number in numbers_of(row[0])]
        assert sorted(covered) == list(range(len(kinds)))
    titles = re.findall(r"^STAGES? (.*) of \d+$", text, flags=re.MULTILINE)
    assert sorted(number for words in titles for number in numbers_of(words)) == list(range(len(kinds)))
    for row in rows_of(text, STAGES):
        members = numbers_of(row[0])
        flight = numbers_of(row[4])
        most = max(plan.stages[number].memory.total for number in members)
        assert row[5].startswith(f"{most / MIB:,.1f} MiB")
        for number in members:
            stage = plan.stages[number]
            assert row[3] == "x=4"
            assert stage.in_flight - 1 in flight
            assert row[6:9] == [
                "1" if stage.rematerialised else "none",
                format_seconds(stage.forward_seconds),
                format_seconds(stage.backward_seconds),
            ]  # fmt: skip
    edges = [number for row in rows_of(text, "Between stages, for one microbatch") for number in numbers_of(row[0])]
    assert sorted(edges) == list(range(len(kinds) - 1))


@settings(deadline=None, max_examples=30)
@given(kinds=st.lists(st.sampled_from(KINDS), min_size=2, max_size=10))
def test_what_is_said_of_every_stage_and_of_a_group_is_what_a_stage_alone_is_said_to_be(kinds: list[Stage]) -> None:
    text = explain_plan(many(*kinds), width=WIDE)
    parts = {head: body.splitlines() for head, *rest in [p.split("\n", 1) for p in text.split("\n\n")] for body in rest}
    every = parts.get("EVERY STAGE", [])
    for number, kind in enumerate(kinds):
        (mine,) = [
            body for head, body in parts.items()
            if (found := re.fullmatch(r"STAGES? (.*) of \d+", head)) and number in numbers_of(found[1])
        ]  # fmt: skip
        alone = explain_plan(many(kind, kind), width=WIDE).split("STAGES 1 to 2 of 2\n")[1].split("\n\n")[0]
        assert sorted([*every, *mine]) == sorted(alone.splitlines())


def test_a_narrow_page_has_no_wide_line() -> None:
    text = explain_plan(many(SLOW, *[DATA] * 10, TENSOR, SLOW), width=80)
    assert max(map(len, text.splitlines())) <= 80


def test_stages_that_differ_in_more_than_their_memory_have_their_own_rows() -> None:
    plan = many(DATA, DATA, DATA, DATA)
    stages = list(plan.stages)
    stages[1] = replace(stages[1], layers=(1, 4))
    stages[2] = replace(stages[2], memory_limit_bytes=20 * MIB)
    rows = stage_table(replace(plan, stages=tuple(stages))).splitlines()[2:]
    assert [row.split("  ")[0] for row in rows] == ["1, 4", "2", "3"]


def test_stages_on_the_same_devices_add_up() -> None:
    """4 MiB of state and 1/4 to 1 MiB of activations each, and one workspace of 1 MiB for two stages."""
    plan = many(DATA, DATA, DATA, DATA)
    stages = tuple(
        replace(one, devices=plan.stages[n % 2].devices, memory=replace(one.memory, workspace=MIB))
        for n, one in enumerate(plan.stages)
    )
    plan = replace(plan, stages=stages, schedule="interleaved_one_f_one_b", schedule_options=(("chunks", 2),))
    first, second = rank_memory(plan)
    assert (first.stages, second.stages) == ((0, 2), (1, 3))
    assert first.held_bytes == pytest.approx((2 * 4 + 4 / 8 + 2 / 8 + 1) * MIB)
    assert first.share == pytest.approx(first.held_bytes / (10 * MIB))
    text = explain_plan(plan)
    assert "stages: 4 on 2 ranks, in turn, schedule interleaved_one_f_one_b" in text
    assert "predicted memory: 9.8 MiB (97.5 % of the limit) on the fullest devices, of rank 1" in text


@given(st.lists(st.sampled_from("abc"), max_size=40))
def test_groups_hold_every_position_once(letters: list[str]) -> None:
    groups = grouped(letters)
    assert sorted(position for positions, _ in groups for position in positions) == list(range(len(letters)))
    assert all(letters[position] == one for positions, one in groups for position in positions)
    assert all(number_words(positions).count(",") <= 6 for positions, _ in groups)


@given(st.sets(st.integers(0, 40), min_size=1))
@example({0, 2, 4, 6})
@example({0, 2, 4, 6, 7})
@example({0, 1, 3, 5, 7})
def test_number_words_can_be_read_back(numbers: set[int]) -> None:
    assert numbers_of(number_words(numbers)) == sorted(numbers)


@given(st.lists(st.integers(1, 30), min_size=2, max_size=10), st.integers(1, 120))
def test_a_wide_table_goes_on_below(widths: list[int], width: int) -> None:
    heads = [chr(ord("a") + n) * size for n, size in enumerate(widths)]
    lines = format_table(heads, [heads], width=width).splitlines()
    shown = [cell for line in lines[::3] for cell in line.split()[1:]]
    assert shown == heads[1:]
    assert all(line.startswith(heads[0]) for line in lines[::3])
    least = widths[0] + 2 + max(widths[1:])
    assert max(map(len, lines)) <= max(width, least)


def test_what_was_considered() -> None:
    lines = [*considered_lines([
        Considered(8, "with layers x devices 1x4 1x4", schedule="gpipe", seconds=3),
        Considered(8, "with 2 ranks", schedule="zero_bubble", seconds=2),
        Considered(8, "with layers x devices 1x8", schedule="zero_bubble", seconds=1.5),
        Considered(8, "nothing that fits", schedule="zero_bubble"),
        Considered(16, "nothing that fits", schedule="gpipe"), Considered(32, "nothing that fits", schedule="gpipe"),
        Considered(64, "2 s by estimates, out of time", schedule="gpipe"),
        Considered(4, searched=False, least_seconds=4), Considered(2, searched=False, least_seconds=5),
        Considered(128, "out of time", searched=False), Considered(256, "out of time", searched=False),
        Considered("mesh x=8", "out of time", searched=False, least_seconds=7), Considered("8 x slow alone", "9 s"),
    ])]  # fmt: skip
    assert lines == [
        "8 microbatches: zero_bubble 1.5 s, gpipe 3.0 s",
        "16, 32 microbatches: gpipe nothing that fits",
        "64 microbatches: gpipe 2 s by estimates, out of time",
        "128, 256 microbatches: not searched, out of time",
        "not searched, at least 4.0 s: 4, 2 microbatches",
        "not searched, out of time, at least 7.0 s: mesh x=8",
        "8 x slow alone: 9 s",
    ]
