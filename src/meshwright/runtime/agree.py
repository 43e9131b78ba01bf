"""One process decides, all act on it: a text that process 0 makes and every other process reads.

It goes over the coordinator's key-value store, which every process of a run is connected to. If process 0 fails, the
others are told why; if it never answers, their wait ends.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Callable, Sequence

from ..errors import PlanError
from .watch import watch

# Every process asks for the same texts in the same order, so a count names them.
_count = itertools.count()
_exchanges: Counter[tuple[int, ...]] = Counter()

# To hear what a process has said already.
_AT_ONCE_SECONDS = 0.1


def agree(make: Callable[[], str], *, about: str, timeout_seconds: float) -> str:
    """The text that process 0 makes, in every process. Alone, a process makes its own.

    To be called by every process of a run, in the same order.

    Args:
      make: called in process 0 only. What it raises is raised there, and told to the others.
      about: what the text is, for errors.
      timeout_seconds: how long the others wait.

    Raises:
      PlanError: in the others, if `make` failed, or process 0 did not answer in time.

    >>> agree(lambda: "a plan", about="the plan", timeout_seconds=1)
    'a plan'
    """
    import jax

    from .._jax import distributed

    if jax.process_count() == 1:
        return make()
    key = f"meshwright/{next(_count)}"
    if jax.process_index() == 0:
        try:
            text = make()
        except BaseException as error:
            distributed.publish(key, f"!{error}")
            raise
        distributed.publish(key, f"={text}")
        return text
    try:
        answer = distributed.read(key, timeout_seconds)
    except TimeoutError as error:
        raise _refusal(about, f"no answer from process 0 within {timeout_seconds:g} s") from error
    if answer.startswith("!"):
        raise _refusal(about, f"from process 0: {answer[1:]}")
    return answer[1:]


def exchange_texts(text: str, *, among: Sequence[int], about: str, timeout_seconds: float) -> dict[int, str]:
    """What each of some processes says, by its number. To be called by all of them.

    Args:
      text: what this one says.
      among: numbers of the processes, this one's too.
      about: what it is about, for errors.
      timeout_seconds: how long to wait for them.

    Raises:
      PlanError: if one of them says nothing in time, or the coordinator is gone; it names all that were silent by then.

    >>> exchange_texts("a plan", among=[0], about="the plan", timeout_seconds=1)
    {0: 'a plan'}
    """
    import jax

    from .._jax import distributed

    me, those = jax.process_index(), tuple(sorted(among))
    if those == (me,):
        return {me: text}
    _exchanges[those] += 1
    key = f"meshwright/{'-'.join(map(str, those))}/{_exchanges[those]}"
    with watch.call("an agreement", those):
        distributed.publish(f"{key}/{me}", text)
        return {p: text if p == me else _said(key, p, me, those, about, timeout_seconds) for p in those}


def _said(key: str, other: int, me: int, those: Sequence[int], about: str, timeout_seconds: float) -> str:
    """What another process says."""
    from .._jax import distributed

    try:
        return distributed.read(f"{key}/{other}", timeout_seconds)
    except TimeoutError as error:
        silent = [p for p in those if p == other or (p != me and not _has_said(f"{key}/{p}"))]
        raise _silence(silent, me, those, about, timeout_seconds) from error
    except Exception as error:  # the coordinator's connection, whose errors are many
        raise PlanError(
            refused=f"to go on with {about}", got=f"no connection to the coordinator: {error}",
            needed="process 0, which holds it", where=f"process {me}", try_="looking at the log of process 0",
        ) from error  # fmt: skip


def _has_said(key: str) -> bool:
    from .._jax import distributed

    try:
        distributed.read(key, _AT_ONCE_SECONDS)
    except TimeoutError:
        return False
    return True


def _silence(silent: Sequence[int], me: int, those: Sequence[int], about: str, timeout_seconds: float) -> PlanError:
    """That some processes did not come. They may wait themselves, for others that this one was not to hear of."""
    heard = [p for p in those if p not in (me, *silent)]
    answered = f"; {_processes(heard)} answered" if heard else ""
    who = _processes(silent)
    return PlanError(
        refused=f"to go on with {about}", got=f"nothing from {who} within {timeout_seconds:g} s{answered}",
        needed=f"the same call in {_processes(those)}", where=f"process {me}",
        try_=f"looking at the log of {who}: it hangs, takes another way through the script, or waits for one that does",
    )  # fmt: skip


def _processes(numbers: Sequence[int]) -> str:
    return f"process{'' if len(numbers) == 1 else 'es'} {', '.join(map(str, numbers))}"


def _refusal(about: str, got: str) -> PlanError:
    return PlanError(
        refused=f"to go on without {about}", got=got, needed=f"{about}, which process 0 makes for all processes",
        where="meshwright.parallelize", try_="looking at the log of process 0",
    )  # fmt: skip
