"""What a search may not count on a device: for the stage that has the last layers apart.

Searches count memory by layouts; what the programs then hold is found by tracing them. The head of a model is where
the two differ most: of its scores, the largest array there is, several copies live at once.
"""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class MemoryReserve:
    """Bytes of a device that are left for what a search does not see.

    >>> MemoryReserve(1e9, 2e9).limit(8e9, last=True)
    6000000000.0

    Args:
      inner: of any stage but the last.
      final: of the stage with the last layer.
    """

    inner: float = 0.0
    final: float = 0.0

    def limit(self, usable_bytes: float, *, last: bool) -> float:
        """Bytes that may be counted on a device.

        Args:
          usable_bytes: of the device.
          last: whether the stage on it has the last layer.
        """
        return max(usable_bytes - (self.final if last else self.inner), 1.0)
