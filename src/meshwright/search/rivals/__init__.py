"""The search methods of the literature on one space (docs/searches.md): a new one is a file here and a line below."""

from __future__ import annotations

from ...errors import PlanError
from .bfs import BreadthFirst
from .dynamic_programming import DynamicProgramming
from .exhaustive import Exhaustive
from .hierarchical import Hierarchical
from .ilp import ILP
from .mcmc import MCMC
from .mcts import MCTS
from .recursive import Recursive
from .search import Budget as Budget, Found as Found, Search as Search

SEARCHES: tuple[Search, ...] = (
    Hierarchical(),
    Exhaustive(),
    BreadthFirst(),
    Recursive(),
    DynamicProgramming(),
    ILP(),
    MCMC(),
    MCTS(),
)


def search_named(name: str) -> Search:
    """The search of this name.

    Raises:
      PlanError: if there is none, with the names that there are.
    """
    for search in SEARCHES:
        if search.name == name:
            return search
    known = ", ".join(search.name for search in SEARCHES)
    raise PlanError(
        refused="the search method", got=repr(name), needed=f"one of {known}", where="method=",
        try_='method="hierarchical", or leaving it out',
    )  # fmt: skip
