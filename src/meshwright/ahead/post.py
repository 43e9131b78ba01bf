"""What one process sends to another through a pipe: pickled, each with its length before it."""

from __future__ import annotations

import os
import pickle
import struct
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

# Of what waits to be read; and what stands before each.
PIPE_BYTES = 1 << 20
_LENGTH = struct.Struct("=Q")


def packed(found: Any) -> bytes:
    """As it is sent."""
    data = pickle.dumps(found)
    return _LENGTH.pack(len(data)) + data


class Unpacked:
    """What has been sent, as it arrives.

    >>> unpacked = Unpacked()
    >>> data = packed("one") + packed("two")
    >>> [[*unpacked.whole(data[:9])], [*unpacked.whole(data[9:])]]
    [[], ['one', 'two']]
    """

    def __init__(self) -> None:
        self._read = b""

    def whole(self, data: bytes) -> Iterator[Any]:
        """What has come to its end with these bytes."""
        self._read += data
        while len(self._read) >= _LENGTH.size:
            (size,) = _LENGTH.unpack_from(self._read)
            if len(self._read) < _LENGTH.size + size:
                return
            one, self._read = self._read[_LENGTH.size : _LENGTH.size + size], self._read[_LENGTH.size + size :]
            yield pickle.loads(one)


class Post:
    """What this process sends to a copy of it that is made later. Nobody waits: neither for room nor for something to
    arrive."""

    def __init__(self) -> None:
        self._reader, self._writer = os.pipe()
        self._unpacked = Unpacked()
        self._waiting = b""
        os.set_blocking(self._reader, False)
        os.set_blocking(self._writer, False)
        widen(self._writer)

    def send(self, found: Any) -> None:
        """Send something, after what has had to wait."""
        self._waiting += packed(found)
        self.flush()

    def flush(self) -> None:
        """Send what has had to wait, as far as there is room."""
        with suppress(BlockingIOError):
            while self._waiting:
                self._waiting = self._waiting[os.write(self._writer, self._waiting) :]

    def heard(self) -> list[Any]:
        """What has arrived since this was asked last; asked by the copy."""
        found: list[Any] = []
        with suppress(BlockingIOError):
            while data := os.read(self._reader, PIPE_BYTES):
                found += self._unpacked.whole(data)
        return found

    def close(self) -> None:
        """Nothing is sent any more."""
        os.close(self._reader)
        os.close(self._writer)


def widen(sender: int) -> None:
    """Let what is sent wait until somebody listens, rather than who sends it."""
    import fcntl  # not on every system; copies are made on Linux alone

    with suppress(OSError):  # where so much is not allowed
        fcntl.fcntl(sender, fcntl.F_SETPIPE_SZ, PIPE_BYTES)
