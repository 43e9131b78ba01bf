"""The watch over waits: it gives up on what does not come, and on nothing else."""

from __future__ import annotations

import threading
import time
from dataclasses import dataclass, field

import pytest

from meshwright.runtime.watch import Watch

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
