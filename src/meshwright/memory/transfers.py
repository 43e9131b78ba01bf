"""What moving values between stages needs on a device beside the values themselves.

The runtime moves them in these sizes (`runtime.resharding`, `runtime.pipeline.transport`); they stand here, so that the
count of a stage's memory and its execution share them.
"""

from __future__ import annotations

CHUNK_BYTES = 32 * 2**20
"""The most that one device sends another in one go, where nobody says; also what a buffer holds."""

KEPT_BYTES = CHUNK_BYTES // 8
"""Blocks that are only there because programs ask for them are kept up to this size together, on each device, and
others made anew for each move: an eighth of a chunk."""


def workspace_bytes(here: float, there: float) -> float:
    """What a transfer needs at most on a device beside the values themselves, however they are laid out.

    On the sender a block like the receiver's that nobody reads, on the receiver one like the sender's, and the messages
    (`runtime.resharding.one_program`); beyond two chunks, these.

    Args:
      here: bytes of the values on the device, before or after.
      there: the same on a device of the other side.
    """
    return min(there + 2.5 * max(here, there), 2 * CHUNK_BYTES)


def kept_bytes(blocks: float) -> float:
    """What stays on a device from one transfer to the next: blocks that take the place of those it has none of.

    Args:
      blocks: bytes of all that it receives, as the senders hold them.
    """
    return min(blocks, KEPT_BYTES)
