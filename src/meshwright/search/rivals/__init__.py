"""The search methods of the literature on one space (docs/searches.md): a new one is a file here and a line below."""

from __future__ import annotations

from functools import cache
from importlib import import_module

from ...errors import PlanError
from .protocol import Budget as Budget, Found as Found, Search as Search

# By name: the class, imported when it is asked for.
_CLASSES = {
    "hierarchical": "hierarchical.Hierarchical",
    "exhaustive": "exhaustive.Exhaustive",
    "bfs": "bfs.BreadthFirst",
    "recursive": "recursive.Recursive",
    "dynamic_programming": "dynamic_programming.DynamicProgramming",
    "ilp": "ilp.ILP",
    "mcmc": "mcmc.MCMC",
    "mcts": "mcts.MCTS",
    "reinforce": "reinforce.Reinforce",
}

SEARCH_NAMES: tuple[str, ...] = tuple(_CLASSES)


@cache
def search_named(name: str) -> Search:
    """The search of this name.

    Raises:
      PlanError: if there is none, with the names that there are.
    """
    if name not in _CLASSES:
        raise PlanError(
            refused="the search method", got=repr(name), needed=f"one of {', '.join(_CLASSES)}", where="method=",
            try_='method="hierarchical", or leaving it out',
        )  # fmt: skip
    module, found = _CLASSES[name].split(".")
    return getattr(import_module(f".{module}", __name__), found)()
