"""A line between two processes, on which plain values go as a whole.

In place of `multiprocessing`'s, whose import takes a fifth of a worker's start.
"""

from __future__ import annotations

import marshal
import socket
from typing import Any

_SIZE_BYTES = 8


class Line:
    """One end; values are those of `marshal`."""

    def __init__(self, end: socket.socket) -> None:
        self._end = end

    def fileno(self) -> int:
        """Name the descriptor to wait on."""
        return self._end.fileno()

    def send(self, value: Any) -> None:
        """Send a value.

        Raises:
            OSError: The other end is closed.
        """
        data = marshal.dumps(value)
        self._end.sendall(len(data).to_bytes(_SIZE_BYTES, "big") + data)

    def receive(self) -> Any:
        """Wait for a value.

        Raises:
            EOFError: The other end is closed.
            OSError: It was closed with values under way.
        """
        size = int.from_bytes(self._read(_SIZE_BYTES), "big")
        return marshal.loads(self._read(size))

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    def _read(self, size: int) -> bytearray:
        data = bytearray(size)
        left = memoryview(data)
        while left:
            count = self._end.recv_into(left)
            if not count:
                raise EOFError
            left = left[count:]
        return data
