"""What a search may count on a device: for the stage that has the last layers apart.

Searches count memory by layouts; what the programs then hold is found by tracing them. The head of a model is where
the two differ most: of its scores, the largest array there is, several copies live at once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryLimit:
    """Bytes that may be counted on a device.

    >>> MemoryLimit(8e9, 6e9).of(last=True)
    6000000000.0

    Args:
      inner: of any stage but the last.
      final: of the stage with the last layer.
    """

    inner: float
    final: float

    def of(self, *, last: bool) -> float:
        """Of a stage, which has the last layer or not."""
        return self.final if last else self.inner
