"""Work done ahead in a copy of the process: the same results, and nothing lost where the copy fails."""

from __future__ import annotations

import os
import time
from typing import Any

import pytest

from meshwright import stage_planning
from meshwright.planning import plan_for
from meshwright.search import ahead, pipeline
from meshwright.search.ahead import Ahead
from meshwright.zoo import gpt

ALONE = "one core, an accelerator that is open, or a run of several processes"
copies = pytest.mark.skipif(not ahead.can_copy(), reason=f"no copy is made: {ALONE}")


def slowly(key: int) -> int:
    time.sleep(0.05)
    return key * key


@copies
def test_what_a_copy_finds_out_arrives() -> None:
    with Ahead((3, 4, None), lambda key: slowly(key or 0)) as others:
        process = others._process
        time.sleep(0.02)  # it has begun the first
        assert others.take(3) == 9
        time.sleep(0.1)
        assert others.take(4) == 16
        assert others.take(4) is None
        assert others.take(None) == 0
        assert others.take(5) is None
    with pytest.raises(ProcessLookupError):
        os.kill(process, 0)


@copies
def test_what_it_has_not_begun_it_never_does() -> None:
    with Ahead((1, 2, 3), slowly) as others:
        time.sleep(0.02)
        assert others.take(2) is None
        assert others.take(1) == 1
        time.sleep(0.02)
        assert others.take(3) == 9
        assert others.take(2) is None


@copies
def test_nobody_waits_who_does_not_want_to() -> None:
    with Ahead((1,), slowly) as others:
        time.sleep(0.02)
        assert others.take(1, wait=False) is None
        time.sleep(0.1)
        assert others.take(1, wait=False) == 1


@copies
def test_all_so_far_is_taken_at_once_and_the_copy_let_go() -> None:
    with Ahead((1, 2, 3, 4, 5, 6), slowly) as others:
        process = others._process
        time.sleep(0.13)
        found = others.taken()
        assert found == [1, 4][: len(found)]
        with pytest.raises(ProcessLookupError):
            os.kill(process, 0)
        assert others.taken() == []


@copies
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
        time.sleep(0.05)
        assert others.take(1) is None
        assert others.take(2) is None
    assert time.perf_counter() - begun < 5


def test_without_a_copy_there_is_nothing_to_take(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ahead, "can_copy", lambda: False)
    with Ahead((1,), slowly) as others:
        assert others.take(1) is None


@copies
def test_plans_are_the_same_with_a_copy_and_without(monkeypatch: pytest.MonkeyPatch) -> None:
    """A scanned GPT, planned as large programs are: presets first, then numbers of microbatches."""
    monkeypatch.setattr(stage_planning, "_SMALL_PROGRAM", 0)
    monkeypatch.setattr(pipeline, "_LONG_PROGRAM", 0)
    learned: list[int] = []
    plain = Ahead.take

    def take(self: Ahead, key: Any, **options: Any) -> Any:
        time.sleep(0.1)  # so that something comes of it, however small the program
        found = plain(self, key, **options)
        learned.append(len(found or ()))
        return found

    monkeypatch.setattr(Ahead, "take", take)
    plans = []
    for allowed in (True, False):
        monkeypatch.setattr(ahead, "can_copy", lambda allowed=allowed: allowed)
        target = gpt.build(gpt.GPTConfig(
            name="gpt", hidden=256, layers=8, heads=8, sequence=128, global_batch=32, vocabulary=1024, scan=True,
        ))  # fmt: skip
        args = (target.example_state, target.example_batch)
        plans.append(plan_for(target.step, args, cluster="p3.16xlarge:2", stages=None).plan)
        assert bool(sum(learned)) == allowed
        learned.clear()
    assert plans[0] == plans[1]
