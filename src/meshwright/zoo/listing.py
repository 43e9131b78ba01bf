"""The reference models as a table for each family, or as JSON."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import asdict
from itertools import groupby

from ..report.table import format_count, format_flops, format_table
from .registry import Entry


def show_models(entries: Sequence[Entry], *, as_json: bool = False) -> None:
    """Print them.

    Args:
      entries: in groups of one family.
      as_json: whether as one JSON object, of the families' lists.
    """
    families = {family: list(of) for family, of in groupby(entries, key=lambda entry: entry.family)}
    if as_json:
        print(json.dumps({family: [asdict(entry) for entry in of] for family, of in families.items()}, indent=2))
        return
    blocks = []
    for family, of in families.items():
        rows = [
            (entry.name, format_count(entry.parameters), f"{format_flops(entry.flops)}/{entry.unit}") for entry in of
        ]
        sources = "\n".join(f"shapes: {source}" for source in dict.fromkeys(entry.source for entry in of))
        blocks.append(f"{format_table((family, 'parameters', 'FLOPs, forward and backward'), rows)}\n{sources}")
    print("\n\n".join(blocks))
