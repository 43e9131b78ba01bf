"""What processes hear of one another, the coordinator's store played by a dictionary."""

from __future__ import annotations

import jax
import pytest

from meshwright._jax import distributed
from meshwright.errors import PlanError
from meshwright.runtime.agree import agree, exchange_texts


@pytest.fixture
def store(monkeypatch: pytest.MonkeyPatch) -> dict[str, str]:
    """This is process 1 of four."""
    texts: dict[str, str] = {}

    def read(key: str, timeout_seconds: float) -> str:
        if key not in texts:
            raise TimeoutError(key)
        return texts[key]

    monkeypatch.setattr(jax, "process_count", lambda: 4)
    monkeypatch.setattr(jax, "process_index", lambda: 1)
    monkeypatch.setattr(distributed, "publish", texts.__setitem__)
    monkeypatch.setattr(distributed, "read", read)
    return texts


def said(store: dict[str, str], monkeypatch: pytest.MonkeyPatch, *others: int) -> None:
    """What others say as soon as this process has said its own."""

    def publish(key: str, text: str) -> None:
        where, _ = key.rsplit("/", 1)
        store.update({f"{where}/{process}": f"of {process}" for process in others}, **{key: text})

    monkeypatch.setattr(distributed, "publish", publish)


def test_texts_are_exchanged(store: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    said(store, monkeypatch, 0, 3)
    found = exchange_texts("mine", among=(3, 1, 0), about="the plan", timeout_seconds=5)
    assert found == {0: "of 0", 1: "mine", 3: "of 3"}


def test_all_silent_processes_are_named(store: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Those that come after the first silent one too; what did arrive is said."""
    said(store, monkeypatch, 2)
    with pytest.raises(PlanError) as caught:
        exchange_texts("mine", among=range(4), about="the plan", timeout_seconds=5)
    text = str(caught.value)
    assert "got nothing from processes 0, 3 within 5 s; process 2 answered" in text
    assert "where: process 1" in text
    assert "log of processes 0, 3" in text


def test_a_coordinator_that_is_gone(store: dict[str, str], monkeypatch: pytest.MonkeyPatch) -> None:
    def read(key: str, timeout_seconds: float) -> str:
        raise RuntimeError("UNAVAILABLE: connection reset")

    monkeypatch.setattr(distributed, "read", read)
    with pytest.raises(PlanError, match=r"no connection to the coordinator: UNAVAILABLE.*log of process 0"):
        exchange_texts("mine", among=range(4), about="the plan", timeout_seconds=5)


def test_a_plan_that_never_comes(store: dict[str, str]) -> None:
    with pytest.raises(PlanError, match="no answer from process 0 within 5 s"):
        agree(lambda: "never called", about="the plan", timeout_seconds=5)
