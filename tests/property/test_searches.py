"""Every search method on small spaces of known optimum: what it finds fits, what it proves holds, and it keeps time."""

from __future__ import annotations

from contextlib import suppress
from functools import cache
from itertools import pairwise, product

import numpy as np
import pytest
from small_spaces import PIPELINES, SPACES, STRUCTURES, every_choice_priced, optimum, space

from meshwright.errors import PlanError
from meshwright.search.rivals import SEARCH_NAMES, Budget, Found, Search, search_named
from meshwright.search.space.choice import Choice
from meshwright.search.space.moves import neighbour
from meshwright.search.space.space import Space

ROUNDING = 1e-9

# Most methods have found what they find on these spaces by then.
EVALUATIONS = 150

# These price the most plans, which takes longest in the spaces of whole models and where memory is tight. Each method
# has a space of one stage and one of several that are not here.
SLOW = {
    (method, name)
    for method in ("mcts", "reinforce")
    for name in ("gpt", "moe", "tight", "any stages", "any stages, tight")
} | {("ilp", "any stages"), ("ilp", "two stages")}

named = pytest.mark.parametrize("search", [*map(search_named, SEARCH_NAMES)], ids=SEARCH_NAMES)


def run(search: Search, of: Space, budget: Budget | None = None) -> list[Found]:
    """All that a method finds; nothing where it does not apply."""
    found: list[Found] = []
    with suppress(PlanError):
        found.extend(search.run(of, budget or Budget(evaluations=EVALUATIONS)))
    return found


@pytest.mark.parametrize(
    ("search", "name"),
    [
        pytest.param(search_named(method), name, id=f"{name}-{method}", marks=[pytest.mark.slow] * (one in SLOW))
        for one in product(SEARCH_NAMES, SPACES)
        for method, name in [one]
    ],
)
def test_what_is_found_fits_and_what_is_proven_holds(search: Search, name: str) -> None:
    of, best = space(name), optimum(name)
    if search.name == "exhaustive" and name == "whole":
        found = [*every_choice_priced()]
    else:
        found = run(search, of, Budget() if search.exact else None)
    for one in found:
        price = of.price(one.choice)
        assert price.fits
        assert price.seconds == one.seconds >= best * (1 - ROUNDING)
        assert one.lower_bound <= best * (1 + ROUNDING)
        assert len(price.bytes) == len(one.choice.stages)
    for before, after in pairwise(found):
        assert after.seconds <= before.seconds
        assert after.lower_bound >= before.lower_bound
        assert (after.seconds, -after.lower_bound) != (before.seconds, -before.lower_bound)
    if search.exact and found and of.stages.stage_counts == {1}:
        assert found[-1].seconds == pytest.approx(best, rel=1e-5)
        assert found[-1].lower_bound == pytest.approx(best, rel=1e-5)
    if search.name == "exhaustive":
        assert (name == "whole") == bool(found)


@cache
def structure_by_structure(name: str) -> Found:
    """The best of a space of which every structure is looked at."""
    return run(search_named("bfs"), space(name), Budget())[-1]


@pytest.mark.parametrize("name", STRUCTURES)
@pytest.mark.parametrize("search", [search_named("bfs"), search_named("hierarchical")], ids=["bfs", "hierarchical"])
def test_the_optimum_of_several_stages_is_found(search: Search, name: str) -> None:
    """By what looks at every structure, and by the default. What they prove of pipelines does not reach it."""
    found = structure_by_structure(name) if search.name == "bfs" else run(search, space(name), Budget())[-1]
    assert found.seconds == pytest.approx(optimum(name), rel=1e-5)


def test_the_best_of_any_stages_are_several() -> None:
    """In one or two microbatches, and in more where memory is tight."""
    found = [structure_by_structure(name).choice for name in STRUCTURES]
    assert [(len(one.stages), one.microbatches) for one in found] == [(2, 2), (2, 1), (2, 4)]


@named
def test_the_same_seed_finds_the_same_plan(search: Search) -> None:
    of = space("gpt")
    runs = [run(search, of, Budget(evaluations=60, seed=7)) for _ in range(2)]
    assert runs[0] == runs[1]


@named
@pytest.mark.parametrize("name", ["mlp", "whole"])
def test_the_time_limit_is_kept(search: Search, name: str) -> None:
    """By a clock that goes on by a second whenever it is asked."""
    ticks = iter(range(10**6))
    run(search, space(name), Budget(seconds=20.0, clock=lambda: float(next(ticks))))
    assert next(ticks) <= 40


def test_the_optimum_of_every_choice_is_no_less_than_its_bound() -> None:
    """Bounds of partial choices, in every structure of a space that is priced as a whole."""
    of = space("whole")

    def check(partial: Choice) -> list[float]:
        if of.structures.is_complete(partial):
            return [of.price(partial).seconds]
        steps = [seconds for child in of.structures.children(partial) for seconds in check(child)]
        assert steps  # no branch is a dead end
        assert of.bound(partial) <= min(steps) * (1 + ROUNDING)
        return steps

    assert len(check(Choice())) == of.structures.count() == len(list(of.structures.all()))


def test_a_walk_stays_in_the_space_and_above_every_bound() -> None:
    """Pipelines in all schedules, far more of them than can be enumerated."""
    of = space(PIPELINES)
    *_, searched = search_named("bfs").run(of, Budget(evaluations=100))
    rng, layers, devices = np.random.default_rng(0), of.stages.layers(2), of.cluster.num_devices
    choice, seen = of.start(2, 4), set()
    assert choice is not None
    for _ in range(400):
        choice = neighbour(of, choice, rng)
        stages = choice.stages
        assert [stages[0].first, *(stage.last for stage in stages)] == [*(stage.first for stage in stages), layers]
        places = [stage.submesh for stage in stages]
        assert [0, *(place.stop for place in places)] == [*(place.first for place in places), devices]
        price = of.price(choice)
        if price.fits:
            seen.add((len(stages), price.schedule))
            assert price.seconds >= searched.lower_bound * (1 - ROUNDING)
            for number in range(len(stages) + 1):
                assert price.seconds >= of.bound(Choice(choice.microbatches, stages[:number])) * (1 - ROUNDING)
    assert len({stages for stages, _ in seen}) >= 3


def with_layouts(of: Space, choice: Choice) -> Choice | None:
    """The same choice with the layouts that the integer program finds written into it; None where it finds none."""
    for number, stage in enumerate(choice.stages):
        if (found := of.stages.solved(choice, number)) is None:
            return None
        choice = choice.with_stages(number, stage._replace(layouts=found.chosen.solution.choices))
    return choice


def test_layouts_of_the_integer_program_are_a_choice_like_any_other() -> None:
    of = space("whole")
    for structure in of.structures.all():
        written = with_layouts(of, structure)
        assert written is not None
        assert written.structure == structure
        assert of.price(written) == of.price(structure)
        for number, stage in enumerate(written.stages):
            assert stage.layouts is not None
            known = of.stages.layouts(written, number)
            solved = of.stages.solved(written, number)
            assert solved is not None
            assert known.seconds(stage.layouts) == pytest.approx(solved.chosen.solution.objective)
            assert known.complete({}, gap=0.0) is not None


def test_what_is_over_memory_says_by_how_much() -> None:
    of = space("tight")
    free, tight = space("mlp"), of
    for structure in free.structures.all():
        written = with_layouts(free, structure)
        assert written is not None
        price = tight.price(written)
        limit = tight.stages.layouts(written, 0).limit_bytes
        assert price.fits == (price.bytes[0] <= limit)
        assert price.excess == pytest.approx(max(price.bytes[0] / limit - 1, 0.0))
        if price.fits:
            assert price == free.price(written)


def test_a_structure_in_layouts_that_cannot_be_together_is_no_plan() -> None:
    of = space("mlp")
    structure = next(of.structures.all())
    known = of.stages.layouts(structure, 0)
    (u, v), table = next((pair, table) for pair, table in known.numbers.edges.items() if not table.max() < float("inf"))
    row, column = divmod(int(table.argmax()), table.shape[1])
    written = with_layouts(of, structure)
    assert written is not None
    layouts = list(written.stages[0].layouts or ())
    layouts[u], layouts[v] = row, column
    broken = Choice(structure.microbatches, (written.stages[0]._replace(layouts=tuple(layouts)),))
    assert not of.price(broken).fits
    assert of.plan(broken) is None


def test_a_method_that_does_not_exist_is_refused() -> None:
    with pytest.raises(PlanError, match=r"one of .*mcmc"):
        search_named("annealing")


def test_names_are_distinct_and_papers_are_named() -> None:
    assert [search_named(name).name for name in SEARCH_NAMES] == list(SEARCH_NAMES)
    assert all(search_named(name).paper for name in SEARCH_NAMES)
