"""Schemes as the command line prints them: a table, formulas, symbols; or one JSON object."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from ..report.table import UNKNOWN, format_bytes, format_percent, format_ratio, format_table
from .analysis import Analysed
from .formulas import KINDS
from .quantities import MEANINGS

_HEADS = (
    "scheme", "devices", "sends: formula", "counted", "ratio", "holds: formula", "counted", "ratio", "fits",
    "bubble: formula", "simulated",
)  # fmt: skip

# Symbols that count devices, stages and microbatches; all others are bytes.
_COUNTS = ("n", "d", "t", "e", "p", "v", "m")


def schemes_text(analysed: Sequence[Analysed]) -> str:
    """A table of what devices send and hold, why schemes do not apply, the formulas and the values of their symbols."""
    shown = [one for one in analysed if not one.reason]
    lines = [format_table(_HEADS, [_row(one) for one in shown], left=2)]
    without = [f"  {one.scheme.title}: {one.reason}" for one in analysed if one.reason]
    lines += ["", "Not for this program:", *without] if without else []
    lines += ["", "Formulas, bytes of a device and step:", *(line for one in shown for line in _formulas(one))]
    lines += ["", "Symbols, bytes of a step on one device that has all of it:"]
    symbols = shown[0].symbols if shown else {}
    lines += [
        f"  {name:3} {format_bytes(symbols[name]):>10}  {MEANINGS[name]}" for name in MEANINGS
        if name in symbols and name not in (*_COUNTS, "X")
    ]  # fmt: skip
    lines.append("  X of a pipeline: " + MEANINGS["X"])
    lines.append("  " + ", ".join(f"{name}: {MEANINGS[name]}" for name in _COUNTS))
    return "\n".join(lines)


def _row(one: Analysed) -> tuple[str, ...]:
    sizes = " ".join(f"{name}={one.symbols[name]:g}" for name in _COUNTS[1:] if one.symbols[name] > 1)
    held, counted = sum(one.held_bytes.values()), one.counted_held_bytes
    bubble = (UNKNOWN, UNKNOWN) if one.bubble is None else tuple(map(format_percent, one.bubble))
    sent = one.sent_bytes
    return (
        one.scheme.title, sizes, format_bytes(sent[0]), format_bytes(sent[1]), format_ratio(_ratio(*sent)),
        format_bytes(held), format_bytes(counted), format_ratio(_ratio(held, counted)), "yes" if one.fits else "no",
        *bubble,
    )  # fmt: skip


def _ratio(formula: float, counted: float) -> float:
    return counted / formula if formula else float("nan")


def _formulas(one: Analysed) -> Iterator[str]:
    scheme = one.scheme
    yield f"  {scheme.title} ({scheme.source}): {scheme.splits}"
    yield f"    sends {' + '.join(move.formula for move in one.moves if move.formula)}"
    yield f"    holds {' + '.join(scheme.holds)}"
    if scheme.bubble:
        yield f"    bubble {scheme.bubble}"
    if scheme.note:
        yield f"    {scheme.note}"


def schemes_document(target: str, cluster: str, analysed: Sequence[Analysed]) -> dict[str, Any]:
    """What `meshwright schemes --json` prints.

    Args:
      target: as the user named it.
      cluster: likewise.
      analysed: from `analyse`.
    """
    return {
        "schema": 1, "target": target, "cluster": cluster, "symbols": dict(MEANINGS),
        "schemes": [_document(one) for one in analysed],
    }  # fmt: skip


def _document(one: Analysed) -> dict[str, Any]:
    scheme, memory = one.scheme, one.memory
    found: dict[str, Any] = {
        "name": scheme.name, "title": scheme.title, "source": scheme.source, "splits": scheme.splits,
        "note": scheme.note or None, "applies": memory is not None, "reason": one.reason or None,
    }  # fmt: skip
    if memory is None:
        return found
    return found | {
        "preset": one.preset,
        "values": dict(one.symbols),
        "sends": {
            "formula_bytes": one.sent_bytes[0], "counted_bytes": one.sent_bytes[1],
            "collectives": [
                {
                    "kind": move.key[0], "over": move.key[1], "when": move.key[2], "formula": move.formula or None,
                    "formula_buffer_bytes": move.buffer_bytes[0], "counted_buffer_bytes": move.buffer_bytes[1],
                }
                for move in one.moves
            ],
        },
        "holds": {
            kind: {"formula": text, "formula_bytes": one.held_bytes[kind], "counted_bytes": getattr(memory, kind)}
            for kind, text in zip(KINDS, scheme.holds, strict=True)
        },
        "workspace_bytes": memory.workspace,
        "memory_limit_bytes": one.limit_bytes,
        "fits": one.fits,
        "bubble": None if one.bubble is None else {
            "formula": scheme.bubble, "formula_fraction": one.bubble[0], "simulated_fraction": one.bubble[1],
        },
    }  # fmt: skip
