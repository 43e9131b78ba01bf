"""Work done ahead in a copy of the process: the same results, and nothing lost where the copy fails."""

from __future__ import annotations

import os
import sys
import time
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
from contradicting import contradicting

from meshwright import stage_planning
from meshwright.cluster import load_cluster
from meshwright.planning import plan_for
from meshwright.search import ahead
from meshwright.search.ahead import Ahead
from meshwright.search.in_two import in_two
from meshwright.search.parameters import parameter_infos
from meshwright.search.pins import Pins
from meshwright.search.stage_costs import StageCosts
from meshwright.search.submeshes import Submesh, Submeshes
from meshwright.zoo import gpt

CAN_COPY = ahead.can_copy
linux = pytest.mark.skipif(sys.platform != "linux", reason="copies are made on Linux alone")


@pytest.fixture(autouse=True)
def on_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are not passed over where there is but one."""
    monkeypatch.setattr(ahead, "can_copy", lambda: True)


class Gate:
    """Work that waits until it is let through, so that tests know what has begun."""

    def __init__(self) -> None:
        self._read, self._write = os.pipe()

    def work(self, key: int | None) -> int:
        os.read(self._read, 1)
        return (key or 0) ** 2

    def let_through(self, count: int = 1) -> None:
        os.write(self._write, b"." * count)


def wait_until(others: Ahead, known: Callable[[], bool]) -> None:
    """Until the copy has said something."""
    end = time.perf_counter() + 30
    while not known():
        assert time.perf_counter() < end, "the copy says nothing"
        others._listen(0.0)
        time.sleep(0.005)


@linux
def test_what_a_copy_finds_out_arrives() -> None:
    gate = Gate()
    with Ahead((3, 4, None), gate.work) as others:
        process = others._process
        wait_until(others, lambda: 3 in others._begun)
        gate.let_through(3)
        assert others.take(3) == 9
        wait_until(others, lambda: None in others._found)
        assert others.take(4) == 16
        assert others.take(None) == 0
        assert others.take(4) is None, "it is given once, and nobody waits for it again"
        assert others.take(5) is None
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@linux
def test_what_it_has_not_begun_it_never_does() -> None:
    gate = Gate()
    with Ahead((1, 2, 3), gate.work) as others:
        wait_until(others, lambda: 1 in others._begun)
        assert others.take(2) is None
        gate.let_through(3)
        assert others.take(1) == 1
        wait_until(others, lambda: 3 in others._found)
        assert others.take(2) is None
        assert 2 not in others._begun


@linux
def test_nobody_waits_who_does_not_want_to() -> None:
    gate = Gate()
    with Ahead((1,), gate.work) as others:
        wait_until(others, lambda: 1 in others._begun)
        assert others.take(1, wait_seconds=0.0) is None
        gate.let_through()
        wait_until(others, lambda: 1 in others._found)
        assert others.take(1, wait_seconds=0.0) == 1


@linux
def test_all_so_far_is_taken_at_once_and_the_copy_let_go() -> None:
    gate = Gate()
    with Ahead((1, 2, 3), gate.work) as others:
        process = others._process
        gate.let_through(2)
        wait_until(others, lambda: 2 in others._found)
        assert others.taken() == [1, 4]
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
        assert others.taken() == []


@linux
@pytest.mark.parametrize("fault", ["raises", "exits", "hangs", "sends what cannot be sent"])
def test_a_copy_that_fails_is_as_none(fault: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "_MOST_SECONDS", 0.3)

    def work(key: int) -> Any:
        match fault:
            case "raises":
                raise ValueError(key)
            case "exits":
                os._exit(1)
            case "hangs":
                time.sleep(60)
        return lambda: key

    begun = time.perf_counter()
    with Ahead((1, 2), work) as others:
        wait_until(others, lambda: 1 in others._begun or not others._process)
        assert others.take(1) is None
        assert others.take(2) is None
    assert time.perf_counter() - begun < 30


def test_without_a_copy_there_is_nothing_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "can_copy", lambda: False)
    with Ahead((1,), Gate().work) as others:
        assert others.take(1) is None


@linux
def test_a_copy_makes_no_copies(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "can_copy", CAN_COPY)
    with Ahead((1,), lambda key: ahead.can_copy()) as others:
        if others._process:  # there is a second core
            wait_until(others, lambda: 1 in others._begun)
            assert others.take(1) is False


@linux
@pytest.mark.parametrize("fault", [None, "exits", "raises"])
def test_pieces_of_work_are_done_once_each_by_either(fault: str | None) -> None:
    here = os.getpid()
    learned: list[int] = []

    def work(key: int) -> tuple[int, int]:
        time.sleep(0.02)
        if os.getpid() != here and fault == "exits":
            os._exit(1)
        if os.getpid() != here and fault == "raises":
            raise ValueError(key)
        if os.getpid() == here:
            learned.append(key)
        return key, os.getpid()

    others: list[int] = []

    def learn(found: tuple[int, int]) -> None:
        assert found[1] != here
        others.append(found[0])

    in_two(range(8), work, learn)
    assert sorted(learned + others) == list(range(8))
    assert bool(others) == (fault is None)
    assert learned == sorted(learned)
    assert not set(learned) & set(others)


def test_where_there_is_nothing_to_find_out_no_copy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a copy was made"))
    done: list[int] = []
    in_two(range(5), done.append, done.append)
    assert done == list(range(5))


@linux
def test_where_no_copy_can_be_made_nothing_is_lost(monkeypatch: pytest.MonkeyPatch) -> None:
    def fork() -> int:
        raise BlockingIOError("no more processes")

    monkeypatch.setattr(os, "fork", fork)
    done: list[int] = []

    def work(key: int) -> bool:
        done.append(key)
        return True

    in_two(range(5), work, lambda found: pytest.fail("there was no copy"))
    assert done == list(range(5))


@pytest.mark.parametrize("usable", [60e3, 80e3, 110e3])
def test_a_copy_tells_what_could_not_be_had_strictly(usable: float) -> None:
    """A ZeRO stage that a program contradicts is asked for less strictly where the copy was first to see it, too."""
    program, cluster = contradicting(), load_cluster("cpu")
    device = replace(cluster.device, memory_bytes=usable / cluster.device.usable_memory_fraction)
    cluster = replace(cluster, hosts=tuple(replace(host, device=device) for host in cluster.hosts))
    here, there = (
        StageCosts(
            program, parameters=parameter_infos(program.source), submeshes=Submeshes(cluster), pins=Pins(zero=1),
            remat=None,
        )
        for _ in range(2)
    )  # fmt: skip
    places = [Submesh(0, 8), Submesh(0, 4)]
    for place in places:
        assert here.solver.kind_of[place] == there.solver.kind_of[place]
    before = there.estimates.known_parts
    for place in places:
        there.fastest(place, [1, 2])
    assert there.estimates.solver.lenient
    here.estimates.learn(there.estimates.known(since=before))
    assert here.estimates.solver.lenient == there.estimates.solver.lenient
    for place in places:
        for mine, theirs in zip(here.fastest(place, [1, 2]), there.fastest(place, [1, 2]), strict=True):
            np.testing.assert_array_equal(mine, theirs)


@linux
@pytest.mark.parametrize("scan", [True, pytest.param(False, marks=pytest.mark.slow)])
def test_plans_are_the_same_with_a_copy_and_without(scan: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """A GPT, planned as large programs are: where it is a scan presets first, else one number of microbatches; then the
    others."""
    monkeypatch.setattr(stage_planning, "_SMALL_PROGRAM", 0)
    learned: list[int] = []
    plain = Ahead.take

    def take(self: Ahead, key: Any, **options: Any) -> Any:
        if self._process and key in self._keys:  # so that something comes of it, however small the program
            wait_until(self, lambda: key in self._begun or not self._process)
            options["wait_seconds"] = 60.0
        found = plain(self, key, **options)
        learned.append(len(found or ()))
        return found

    monkeypatch.setattr(Ahead, "take", take)
    plans = []
    for allowed in (True, False):
        monkeypatch.setattr(ahead, "can_copy", lambda allowed=allowed: allowed)
        target = gpt.build(gpt.GPTConfig(
            name="gpt", hidden=256, layers=2, heads=8, sequence=128, global_batch=4, vocabulary=1024, scan=scan,
        ))  # fmt: skip
        args = (target.example_state, target.example_batch)
        plans.append(plan_for(target.step, args, cluster="p3.16xlarge", stages=None).plan)
        assert bool(sum(learned)) == allowed
        learned.clear()
    assert plans[0] == plans[1]


@linux
@pytest.mark.parametrize(
    ("changed", "allowed"),
    [
        ({}, True), ({"cores": {0}}, False), ({"platform": "darwin"}, False), ({"is_connected": True}, False),
        ({"accelerators_are_in_use": True}, False),
    ],
    ids=str,
)  # fmt: skip
def test_where_a_copy_is_made(changed: dict[str, Any], allowed: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda process: changed.get("cores", {0, 1}))
    monkeypatch.setattr(sys, "platform", changed.get("platform", "linux"))
    for name in ("is_connected", "accelerators_are_in_use"):
        monkeypatch.setattr(ahead, name, lambda name=name: changed.get(name, False))
    assert CAN_COPY() == allowed
