"""What a copy of the process looks at ahead of a stage search, and when it writes out the best plan instead."""

from __future__ import annotations

import sys
import time
from types import SimpleNamespace
from typing import Any

import pytest

from meshwright.ahead import Ahead, copied
from meshwright.search.best_known import BestKnown
from meshwright.search.look_ahead import SOME_LEFT, Exchange, LookAhead, News, shared_news
from meshwright.search.part_rows import OutOfTime
from meshwright.search.scout import Scout

COUNTS = (2, 4, 8, 16, 32)


def looked_at(
    news: News, *, too_slow: Any = (), meanwhile: Any = lambda count: None, bound: Any = lambda count: None,
    late: list[Any] | None = None,
) -> list[int]:  # fmt: skip
    """The numbers of microbatches whose programs are asked for, in order, after 8; `late` is given what says whether
    to break off."""
    asked: list[int] = []
    bounds = SimpleNamespace(
        floor=0.0, searched={8}, of=lambda count, best: bound(count) or (99.0 if count in too_slow else 1.0),
        with_split=lambda count, best: 0.0, closer=lambda count, best, worth: meanwhile(count) or 0.0,
        answers={}, promising=lambda left, *given, **named: left[0],
    )  # fmt: skip

    class Costs:
        def __init__(self) -> None:
            self.known_parts: Any = {}
            self.refined: set[int] = set()
            self.late: Any = None
            self.base = SimpleNamespace(least=lambda place: None)

        def __call__(self, count: int) -> int:
            asked.append(count)
            return count

        def known(self, since: Any) -> Any:
            return {}

    search: Any = SimpleNamespace(
        costs=Costs(), bounds=bounds, best=BestKnown(10.0), problems_of=lambda *count: (), places=()
    )
    exchange = Exchange(search, lambda found: None, list)
    if late is not None:
        late.append(lambda: search.costs.late())
    LookAhead(search, [count for count in COUNTS if count != 8], news, exchange).run()
    return asked


def told() -> News:
    news = shared_news()
    news.near, news.best_seconds = 8, 10.0
    return news


def test_the_nearest_numbers_come_first() -> None:
    assert looked_at(told()) == [16, 4, 32, 2]


def test_numbers_that_are_too_slow_are_not_traced() -> None:
    assert looked_at(told(), too_slow=(4, 32)) == [16, 2]


def test_a_number_that_the_search_looks_at_is_left_to_it() -> None:
    news = told()
    news.search_at = 4
    assert looked_at(news) == [16, 32, 2]


def test_what_the_search_finds_out_now_is_waited_for() -> None:
    """Finer numbers than the one that the search looks at are bounded by it."""
    news = told()
    news.at = news.search_at = 16
    assert looked_at(news) == [4, 2]
    assert news.copy_at == SOME_LEFT


def test_a_better_plan_that_is_found_meanwhile_counts() -> None:
    news = told()

    def meanwhile(count: int) -> None:
        news.best_seconds = 0.5

    assert looked_at(news, meanwhile=meanwhile) == []


def test_what_was_looked_at_is_looked_at_again_when_a_better_plan_is_known() -> None:
    """By its seconds the other search asks; but not what it has passed."""
    for at, expected in ((0, [16, 4, 16, 4, 32, 2]), (16, [16, 4, 4, 32, 2])):
        news = told()
        news.at = at

        def meanwhile(count: int, news: News = news) -> None:
            news.best_seconds = 9.0 if count == 4 else news.best_seconds

        assert looked_at(news, meanwhile=meanwhile) == expected


@pytest.mark.parametrize(("better", "goes_on"), [(9.9, True), (9.0, False)])
def test_a_much_better_plan_breaks_off_what_was_begun_with_a_worse_one(better: float, goes_on: bool) -> None:
    news = told()
    went_on: list[bool] = []
    late: list[Any] = []

    def meanwhile(count: int) -> None:
        if not went_on:
            went_on.append(not late[0]())
            news.best_seconds = better
            went_on.append(not late[0]())
            if not went_on[-1]:
                raise OutOfTime

    looked_at(news, meanwhile=meanwhile, late=late)
    assert went_on == [True, goes_on]


def test_what_was_broken_off_is_asked_anew() -> None:
    news = told()
    late: list[Any] = []
    asked: list[int] = []

    def of(count: int) -> None:
        asked.append(count)
        if count == 16 and news.best_seconds == 10.0:
            news.best_seconds = 9.0
            assert late[0]()
            raise OutOfTime

    looked_at(news, bound=of, late=late)
    assert asked == [16, 16, 4, 32, 2]


def test_a_guess_is_not_broken_off_when_the_first_plan_is_known() -> None:
    news = shared_news()
    late: list[Any] = []

    def of(count: int) -> None:
        news.best_seconds = 10.0
        assert not late[0]()

    assert sorted(looked_at(news, bound=of, late=late)) == [2, 4, 16, 32]


class Finding:
    """A search that has found out something of parts, and answers."""

    def __init__(self) -> None:
        self.rows: list[str] = []
        self.costs = self
        self.bounds = SimpleNamespace(answers={})

    @property
    def known_parts(self) -> Any:
        return {1: len(self.rows)}

    def known(self, since: Any) -> Any:
        new = self.rows[since[1] :]
        return {1: new} if new else {}

    def learn(self, found: Any) -> None:
        parts, answers = found
        self.rows += parts.get(1, [])
        self.bounds.answers.update(answers)


def test_two_searches_tell_each_other_what_is_new_once() -> None:
    one, other = Finding(), Finding()
    sent: dict[str, list[Any]] = {"there": [], "back": []}

    def arrived(way: str) -> Any:
        def take() -> list[Any]:
            found, sent[way] = sent[way], []
            return found

        return take

    search: Any = one
    copy: Any = other
    here = Exchange(search, lambda found: sent["there"].append(found), arrived("back"))
    there = Exchange(copy, lambda found: sent["back"].append(found), arrived("there"))
    one.rows.append("a")
    one.bounds.answers["question"] = "answer"
    other.rows.append("b")
    here.now()
    there.now()
    here.now()
    assert (one.rows, other.rows) == (["a", "b"], ["b", "a"])
    assert one.bounds.answers == other.bounds.answers == {"question": "answer"}
    there.now()
    here.now()
    assert sent == {"there": [], "back": []}  # nothing comes back to who has found it
    assert (one.rows, other.rows) == (["a", "b"], ["b", "a"])


@pytest.mark.parametrize("name", ["near", "at", "copy_at", "search_at", "best_seconds"])
def test_news_are_each_of_their_own(name: str) -> None:
    news = shared_news()
    before = {one: getattr(news, one) for one in ("near", "at", "copy_at", "search_at", "best_seconds")}
    setattr(news, name, 7)
    assert {one: getattr(news, one) for one in before} == {**before, name: 7}


def candidate() -> Any:
    return SimpleNamespace(plan=lambda gap: "plan", costs=SimpleNamespace(program="program"))


@pytest.fixture
def scout(monkeypatch: pytest.MonkeyPatch) -> Any:
    """One that is at work, and counts what it is to write out."""
    monkeypatch.setattr(copied, "can_copy", lambda: not copied.is_copy())
    with Scout() as made:
        begun: list[Any] = []

        def write(plan: Any, program: Any) -> Ahead:
            begun.append((plan, program))
            return Ahead(lambda tell: time.sleep(60))

        made.write = write
        made._copy = Ahead(lambda tell: time.sleep(60))
        yield SimpleNamespace(made=made, begun=begun)


linux = pytest.mark.skipif(sys.platform != "linux", reason="copies are made on Linux alone")


@linux
def test_a_plan_is_begun_when_nothing_is_left_to_look_at(scout: Any) -> None:
    search: Any = SimpleNamespace(best_candidate=candidate(), merged=lambda best: best)
    scout.made.begin(search)
    assert not scout.begun
    scout.made.begin(search, now=True)
    assert scout.begun == [("plan", "program")]
    scout.made.begin(search, now=True)  # it goes on
    assert len(scout.begun) == 1
    assert scout.made._at_work
    search.best_candidate = candidate()
    scout.made.begin(search, now=True)
    assert len(scout.begun) == 2


@linux
def test_the_plan_that_was_found_before_is_begun_where_there_is_no_faster_one(scout: Any) -> None:
    search: Any = SimpleNamespace(best_candidate=None)
    scout.made.kept = "kept", "its program"
    scout.made.begin(search, now=True)
    scout.made.begin(search, now=True)  # it goes on
    assert scout.begun == [("kept", "its program")]
    search = SimpleNamespace(best_candidate=candidate(), merged=lambda best: best)
    scout.made.begin(search, now=True)
    assert scout.begun[1:] == [("plan", "program")]


@linux
def test_where_there_is_no_plan_the_copy_is_recalled_all_the_same(scout: Any) -> None:
    scout.made.begin(SimpleNamespace(best_candidate=None), now=True)
    assert not scout.made._at_work
    assert not scout.begun


@linux
def test_what_was_recalled_can_be_begun_again(scout: Any) -> None:
    search: Any = SimpleNamespace(best_candidate=candidate(), merged=lambda best: best)
    scout.made.begin(search, now=True)
    scout.made.recall(writing=False)
    assert scout.made._at_work
    scout.made.recall()
    assert not scout.made._at_work
    scout.made.begin(search, now=True)
    assert len(scout.begun) == 2


def test_without_a_second_core_nothing_is_begun(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(copied, "can_copy", lambda: False)
    scout = Scout()
    scout.write = lambda plan, program: pytest.fail("it was")
    search: Any = SimpleNamespace(best_candidate=candidate(), merged=lambda best: best)
    scout.begin(search, now=True)
