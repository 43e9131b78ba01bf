"""The watch over waits: it gives up on what does not come, and on nothing else."""

from __future__ import annotations

import json
import threading
import time
from dataclasses import dataclass, field
from typing import Any

import pytest

from meshwright.runtime.peers import unequal
from meshwright.runtime.watch import Call, Watch, behind, never_comes

LIMIT_SECONDS = 0.2
# Much longer than the limit, for a busy machine.
LONG_SECONDS = 10.0


@dataclass
class Seen:
    """What a watch has given up on."""

    what: list[str] = field(default_factory=list)
    happened: threading.Event = field(default_factory=threading.Event)

    def __call__(self, what: str, seconds: float) -> None:
        assert seconds >= LIMIT_SECONDS * 0.99
        self.what.append(what)
        self.happened.set()


@dataclass
class Computed:
    ready: bool

    def is_ready(self) -> bool:
        return self.ready


class Failed:
    def is_ready(self) -> bool:
        raise RuntimeError("deleted")


def test_a_wait_that_takes_too_long() -> None:
    seen = Seen()
    watch = Watch(LIMIT_SECONDS, seen)
    with watch.over(lambda: "the other process"):
        assert seen.happened.wait(LONG_SECONDS)
    assert seen.what == ["the other process"]


def test_many_short_waits_are_none() -> None:
    seen = Seen()
    watch = Watch(LIMIT_SECONDS, seen)
    for _ in range(50):
        with watch.over(lambda: "somebody"):
            time.sleep(LIMIT_SECONDS / 20)
    assert not seen.what


def test_no_wait_at_all_is_none() -> None:
    seen = Seen()
    watch = Watch(LIMIT_SECONDS, seen)
    with watch.over(lambda: "somebody"):
        pass
    assert not seen.happened.wait(LIMIT_SECONDS * 3)


def test_the_first_thing_that_is_not_computed_is_named() -> None:
    seen = Seen()
    watch = Watch(LIMIT_SECONDS, seen)
    tokens = [("first", Computed(True)), ("second", Failed()), ("third", Computed(False)), ("fourth", Computed(False))]
    for name, token in tokens:
        watch.follow(lambda name=name: name, token)
    assert seen.happened.wait(LONG_SECONDS)
    assert seen.what == ["third"]


def test_an_error_is_told_what_was_waited_for() -> None:
    watch = Watch(LONG_SECONDS, Seen())
    with pytest.raises(OSError, match="gone") as caught, watch.over(lambda: "process 3"):
        raise OSError("gone")
    assert caught.value.__notes__ == ["meshwright: while waiting for process 3"]


def test_at_exit_the_thread_ends_once_what_was_expected_is_there() -> None:
    seen, token = Seen(), Computed(False)
    watch = Watch(LONG_SECONDS, seen)
    watch.follow(lambda: "the last step", token)
    ending = threading.Thread(target=watch._end)
    ending.start()
    ending.join(0.1)
    assert ending.is_alive(), "still watched"
    token.ready = True
    ending.join(LONG_SECONDS)
    assert not ending.is_alive()
    assert not seen.what


def test_at_exit_too_what_does_not_come_is_given_up() -> None:
    seen = Seen()
    watch = Watch(LIMIT_SECONDS, seen)
    watch.follow(lambda: "process 1", Computed(False))
    watch._end()
    assert seen.what == ["process 1"]


# Calls that processes make together

_PAIR, _TRIO = (0, 1), (0, 1, 2)


def _names(*numbers: int) -> str:
    return " and ".join(f"process {number}" for number in numbers)


def _calls(*whats: str, among: tuple[int, ...] = _PAIR) -> dict[str, Any]:
    """What a process tells of the calls that it has made, as the others read it."""
    watch = Watch(LONG_SECONDS, Seen())
    for what in whats:
        with watch.call(what, among):
            pass
    return json.loads(json.dumps(watch.calls()))


def test_runs_of_the_same_call_are_told_as_one() -> None:
    told = _calls("plan", *["train"] * 100, "evaluate", *["train"] * 3)
    assert told["made"] == [[[0, 1], 105]]
    assert [rest for _, *rest in told["recent"]] == [
        [1, 1, "plan"], [2, 101, "train"], [102, 102, "evaluate"], [103, 105, "train"],
    ]  # fmt: skip


def test_a_call_of_one_process_is_none() -> None:
    assert _calls("train", among=(0,)) == {"made": [], "recent": []}


def test_one_that_has_left_before_a_call_never_comes() -> None:
    left = {1: {"how": "sys.exit(0)", **_calls("plan", "train")}}
    over = never_comes(_calls("plan", "train", "train"), 0, left, {}, _names)
    assert over is not None
    assert over.got == "the end of process 1, by sys.exit(0), while process 0 waits for it in train (call 3)"
    assert never_comes(_calls("plan", "train"), 0, left, {}, _names) is None
    # How many calls one has made that is gone without a word is not known.
    assert (
        never_comes(_calls("plan", "train", "train"), 0, {1: {"how": "", "made": None, "recent": []}}, {}, _names)
        is None
    )


@pytest.mark.parametrize("left", [False, True])
def test_one_in_another_call_of_the_same_number_never_comes(left: bool) -> None:
    its = {0: _calls("plan", "train", "train", "train")}
    mine = _calls("plan", "train", "plan anew")
    over = never_comes(mine, 1, its if left else {}, {} if left else its, _names)
    assert over is not None
    assert over.got == "process 0 in train (call 3), while process 1 waits for it in plan anew"
    assert over.by == 1


def test_processes_that_are_behind_or_ahead_in_the_same_calls_come() -> None:
    its = {0: _calls("plan", "train", "train", "train")}
    assert never_comes(_calls("plan", "train"), 1, {}, its, _names) is None
    assert never_comes(_calls("plan", *["train"] * 9), 1, {}, its, _names) is None


def test_calls_are_counted_for_each_group_of_processes() -> None:
    its = {0: _calls("move", "move", among=_TRIO)}
    assert never_comes(_calls("train", "train"), 1, {}, its, _names) is None


def test_who_is_behind_is_named_with_its_last_call() -> None:
    at = {1: _calls("plan", "train"), 2: _calls("plan", "train", "train")}
    trio = {n: _calls(*["train"] * n, among=_TRIO) for n in (1, 2)}
    [said] = behind(Call(_TRIO, 2, "train"), trio, _names)
    assert said == "process 1 has not come to call 2, its last is train (call 1)"
    assert behind(Call(_PAIR, 2, "train"), at, _names) == []


def test_all_that_leave_have_made_as_many_calls() -> None:
    left = {n: {"how": "the end", **_calls(*["train"] * calls)} for n, calls in enumerate((3, 3))}
    assert unequal(left, _names) is None
    left[1] |= _calls("train", "train")
    over = unequal(left, _names)
    assert over is not None
    assert over.got == "the end of process 1, by the end, while process 0 went on to train (call 3)"
