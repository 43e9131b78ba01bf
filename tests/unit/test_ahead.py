"""Work done ahead in a copy of the process: the same results, and nothing lost where the copy fails."""

from __future__ import annotations

import os
import signal
import sys
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from contradicting import contradicting

from meshwright import stage_planning, value_and_grad
from meshwright.ahead import Ahead, Begun, Post, copied as ahead, in_two
from meshwright.cluster import load_cluster
from meshwright.planning import plan_for
from meshwright.program.traces import traces_of
from meshwright.search.microbatch_costs import MicrobatchCosts
from meshwright.search.parameters import parameter_infos
from meshwright.search.part_rows import KnownParts
from meshwright.search.pins import Pins
from meshwright.search.scout import Scout
from meshwright.search.shared_work import estimates_found
from meshwright.search.stage_costs import StageCosts
from meshwright.search.submeshes import Submesh, Submeshes
from meshwright.zoo import gpt

CAN_COPY = ahead.can_copy
linux = pytest.mark.skipif(sys.platform != "linux", reason="copies are made on Linux alone")


@pytest.fixture(autouse=True)
def on_two_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """These tests are not passed over where there is but one."""
    monkeypatch.setattr(ahead, "can_copy", lambda: not ahead.is_copy())


def heard(others: Ahead, count: int) -> list[Any]:
    """What a copy says, until it has said so much."""
    found: list[Any] = []
    end = time.perf_counter() + 30
    while len(found) < count:
        assert time.perf_counter() < end, "the copy says nothing"
        found += others.heard(wait_seconds=1.0)
    return found


@linux
def test_a_copy_hears_what_is_sent_to_it_and_who_sends_never_waits() -> None:
    post = Post()
    large = b"x" * (3 << 20)  # more than waits in a pipe

    def work(send: Callable[[Any], None]) -> None:
        found: list[Any] = []
        while len(found) < 3:
            found += post.heard()
        send([one if isinstance(one, str) else len(one) for one in found])

    begun = time.perf_counter()
    for one in ("first", large):
        post.send(one)
    assert time.perf_counter() - begun < 10
    with Ahead(work) as others:
        end = time.perf_counter() + 60
        post.send("last")
        while not (found := others.heard(wait_seconds=0.05)):
            assert time.perf_counter() < end, "the copy says nothing"
            post.flush()
    post.close()
    assert found == [["first", len(large), "last"]]


@linux
def test_what_a_copy_finds_out_arrives_and_at_the_end_it_is_gone() -> None:
    def work(send: Callable[[Any], None]) -> None:
        for key in (3, 4, None):
            send((key, os.getpid()))
        time.sleep(60)

    with Ahead(work) as others:
        process = others._process
        assert heard(others, 3) == [(3, process), (4, process), (None, process)]
        assert others.heard() == []
        assert others.at_work
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)
    assert others.heard() == []
    assert not others.at_work


@linux
def test_a_copy_at_its_end_has_been_heard_and_is_at_work_no_more() -> None:
    with Ahead(lambda send: send(1)) as others:
        assert heard(others, 1) == [1]
        end = time.perf_counter() + 30
        while others.at_work:
            assert time.perf_counter() < end
            time.sleep(0.005)
        assert others.heard() == []


@linux
def test_there_is_one_copy_at_a_time() -> None:
    with Ahead(lambda send: time.sleep(60)) as first:
        assert first.at_work
        with Ahead(lambda send: send(1)) as second:
            assert not second.at_work
            assert second.heard(wait_seconds=0.2) == []
        assert first.at_work
    with Ahead(lambda send: send(1)) as third:
        assert heard(third, 1) == [1]


@linux
def test_half_a_message_is_not_waited_for() -> None:
    def work(send: Callable[[Any], None]) -> None:
        send("whole")
        os.kill(os.getpid(), signal.SIGSTOP)

    def halves(send: Callable[[Any], None]) -> None:
        written, write = [0], os.write

        def stopping(file: int, data: bytes) -> int:
            count = write(file, data[: len(data) // 2])
            os.kill(os.getpid(), signal.SIGSTOP)
            return count

        os.write = stopping
        send(written)

    for one, expected in ((work, ["whole"]), (halves, [])):
        begun = time.perf_counter()
        with Ahead(one) as others:
            assert others.heard(wait_seconds=1.0) == expected
            assert others.heard() == []
        assert time.perf_counter() - begun < 20


@linux
def test_a_copy_that_somebody_else_waited_for_is_gone() -> None:
    with Ahead(lambda send: send(1)) as others:
        process = others._process
        os.waitpid(process, 0)
        assert not others.at_work
        assert others.heard() == [1]
    assert ahead._at_work is None


@linux
def test_another_copy_takes_nothing_of_what_was_sent() -> None:
    with Ahead(lambda send: send(1)) as first:
        while first.at_work:
            time.sleep(0.005)

        def work(send: Callable[[Any], None]) -> None:
            send((first.heard(), first.at_work, first.end()))
            time.sleep(60)  # it is not over when it has been heard

        with Ahead(work) as second:
            assert heard(second, 1) == [([], False, None)]
            assert first.heard() == [1]
            assert first._process == 0, "it came to its end"
            assert ahead._at_work is second


@linux
@pytest.mark.parametrize("fault", ["raises", "exits", "hangs", "sends what cannot be sent"])
def test_a_copy_that_fails_is_as_none(fault: str) -> None:
    def work(send: Callable[[Any], None]) -> None:
        match fault:
            case "raises":
                raise ValueError
            case "exits":
                os._exit(1)
            case "hangs":
                time.sleep(60)
        send(lambda: 1)

    begun = time.perf_counter()
    with Ahead(work) as others:
        assert others.heard(wait_seconds=0.3) == []
    assert time.perf_counter() - begun < 30


def test_without_a_copy_there_is_nothing_to_hear(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "can_copy", lambda: False)
    with Ahead(lambda send: send(1)) as others:
        assert not others.at_work
        assert others.heard(wait_seconds=0.1) == []


@linux
def test_a_copy_makes_no_copies_and_says_nothing(monkeypatch: pytest.MonkeyPatch, capfd: Any) -> None:
    def work(send: Callable[[Any], None]) -> None:
        os.write(1, b"said")
        os.write(2, b"said")
        send((CAN_COPY(), ahead.is_copy()))

    with Ahead(work) as others:
        assert heard(others, 1) == [(False, True)]
    assert capfd.readouterr() == ("", "")
    assert not ahead.is_copy()


@linux
def test_a_copy_can_trace_and_lower() -> None:
    """Whose threads it has not: JAX has lowered something before, with a pool of them."""
    program = jax.jit(lambda x: jnp.sin(x) @ x)
    program.lower(jnp.zeros((4, 4)))

    def work(send: Callable[[Any], None]) -> None:
        send(len(trace_of(8).graph.operators))

    expected = len(trace_of(4).graph.operators)
    with Ahead(work) as others:
        assert heard(others, 1) == [expected]


def trace_of(size: int) -> Any:
    """A program that was not traced before, so that its sharding rules have to be found out."""

    def step(state: Any, batch: Any) -> Any:
        loss, gradients = value_and_grad(lambda w, x: jnp.mean(jnp.cumsum(jnp.tanh(x @ w), axis=1)))(state, batch)
        return state - gradients, loss

    shapes = jax.ShapeDtypeStruct((size, size), "float32"), jax.ShapeDtypeStruct((2, size), "float32")
    return traces_of(step).program(shapes)


@linux
@pytest.mark.parametrize("fault", [None, "exits", "raises", "hangs"])
def test_pieces_of_work_are_done_once_each_by_either(fault: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("meshwright.ahead.shared._MOST_SECONDS", 0.3)
    here = os.getpid()
    learned: list[int] = []

    def work(key: int) -> tuple[int, int]:
        time.sleep(0.02)
        if os.getpid() != here and fault == "exits":
            os._exit(1)
        if os.getpid() != here and fault == "raises":
            raise ValueError(key)
        if os.getpid() != here and fault == "hangs":
            time.sleep(60)
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


@linux
@pytest.mark.parametrize("ended", [False, True])
def test_what_a_copy_has_begun_with_is_not_done_again(ended: bool) -> None:
    """It begins before this process comes to the work, and knows of pieces that need not be done by then."""
    here, learned, others = os.getpid(), [], []

    def work(key: int) -> tuple[int, int]:
        if os.getpid() == here:
            learned.append(key)
        return key, os.getpid()

    def learn(found: tuple[int, int]) -> None:
        assert found[1] != here
        others.append(found[0])

    begun = Begun(9, lambda: (range(2, 9), work))
    while begun.copy.at_work:
        time.sleep(0.01)
    if ended:
        begun.copy.end()
    begun.finish([8, 3, 5], work, learn)
    assert (learned, others) == (([8, 3, 5], []) if ended else ([], [8, 3, 5]))
    assert not begun.copy.is_there


@pytest.mark.parametrize("count", [0, 1])
def test_for_a_single_piece_of_work_no_copy_is_made(count: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a copy was made"))
    done: list[int] = []
    in_two(range(count), done.append, done.append)
    assert done == list(range(count))


def test_where_there_is_nothing_to_find_out_no_copy_is_made(monkeypatch: pytest.MonkeyPatch) -> None:
    program, places = contradicting(), [Submesh(0, 8), Submesh(0, 4), Submesh(0, 2)]
    costs = StageCosts(
        program, parameters=parameter_infos(program.source), submeshes=Submeshes(load_cluster("cpu")), pins=Pins(),
        remat=None,
    )  # fmt: skip
    asked: list[Submesh] = []

    def fastest(submesh: Submesh, in_flight: Any) -> None:
        asked.append(submesh)
        costs.fastest(submesh, in_flight)

    problem: Any = SimpleNamespace(fastest=fastest, submeshes=places, in_flight=lambda place: place, most_places=2)
    estimates_found(problem, costs)
    asked.clear()
    monkeypatch.setattr(os, "fork", lambda: pytest.fail("a copy was made"))
    estimates_found(problem, costs)
    assert sorted(asked) == sorted(places)


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
    plain = MicrobatchCosts.learn

    def learn(self: MicrobatchCosts, found: Mapping[int, KnownParts]) -> None:
        learned.append(sum(len(parts.rows) for parts in found.values()))
        plain(self, found)

    monkeypatch.setattr(MicrobatchCosts, "learn", learn)
    plain_send = Scout.send

    def send(self: Scout, *args: Any, **options: Any) -> None:
        plain_send(self, *args, **options)
        if self._copy is not None:  # so that something comes of it, however small the program
            while self._copy.at_work:
                time.sleep(0.01)

    monkeypatch.setattr(Scout, "send", send)
    written: list[int] = []
    plain_finish = Begun.finish

    def finish(self: Begun, keys: Any, work: Any, learn: Any) -> None:
        def learn_too(found: Any) -> None:
            written.append(1)
            learn(found)

        plain_finish(self, keys, work, learn_too)

    monkeypatch.setattr(Begun, "finish", finish)
    plans = []
    for allowed in (True, False):
        monkeypatch.setattr(ahead, "can_copy", lambda allowed=allowed: allowed and not ahead.is_copy())
        target = gpt.build(gpt.GPTConfig(
            name="gpt", hidden=256, layers=2, heads=8, sequence=128, global_batch=4, vocabulary=1024, scan=scan,
        ))  # fmt: skip
        args = (target.example_state, target.example_batch)
        found = plan_for(target.step, args, cluster="p3.16xlarge", stages=None)
        plans.append((found.plan, found.considered, found.alternatives))
        assert bool(sum(learned)) == allowed
        assert bool(written) == (allowed and not scan)  # the best of a scan is a preset
        learned.clear()
        written.clear()
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
