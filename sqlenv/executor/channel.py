"""What parent and workers say to each other: plain values, each sent as a whole over a socket.

Values are MessagePack's: numbers, text, bytes, None, tuples and dicts of these. Whatever comes,
reading it makes nothing else and runs nothing.
"""

from __future__ import annotations

import os
import select
import socket
from collections.abc import Sequence
from contextlib import suppress
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgpack

from sqlenv.evaluators.comparators import Case, Judgement
from sqlenv.evaluators.spider2 import Reference
from sqlenv.evaluators.votes import Ballot
from sqlenv.types import Denied, Result, SqlError, Table, TimedOut, TooLarge

Encoded = tuple[Any, ...]
Answer = Result | Judgement | Ballot

_KINDS = {
    kind.__name__: kind for kind in (Table, SqlError, TimedOut, TooLarge, Denied, Judgement, Ballot)
}
_FIELDS = {name: [field.name for field in fields(kind)] for name, kind in _KINDS.items()}
_SIZE_BYTES = 8
_SMALL_BYTES = 65_536
_SOON_MS = 20


class Channel:
    """One end, which waits or not as its socket does; `most_bytes` bounds what is received."""

    def __init__(self, end: socket.socket, *, most_bytes: int = 2**40) -> None:
        self._end = end
        self._most_bytes = most_bytes
        self._packer = _make_packer()
        self._poll = select.poll()
        self._poll.register(end, select.POLLIN)
        self.expected_bytes = 0
        """Size of the message of which a part has come; 0 as long as nothing says it."""
        self._expect(_SIZE_BYTES)

    def fileno(self) -> int:
        """Name the descriptor to wait on."""
        return self._end.fileno()

    def send(self, value: Any, *, timeout_s: float | None = None) -> None:
        """Send a value; OSError where the other end is closed, or did not read it in time."""
        data = self._packer.pack(value)
        if len(data) > _SMALL_BYTES:
            self._packer = _make_packer()  # which keeps the memory of its largest message
        left = memoryview(len(data).to_bytes(_SIZE_BYTES, "big") + data)
        with suppress(BlockingIOError):
            left = left[self._end.send(left) :]
        if left:
            before = self._end.gettimeout()
            self._end.settimeout(timeout_s)
            try:
                self._end.sendall(left)
            finally:
                self._end.settimeout(before)

    def receive(self) -> Any:
        """Give the next value; None where the socket does not wait and the rest is not coming.

        Raises:
            EOFError: The other end is closed.
            OSError: It was closed with values under way.
            ValueError: What came is no value, or more than expected.
        """
        while True:
            while self._left:
                try:
                    count = self._end.recv_into(self._left)
                except BlockingIOError:
                    if self.expected_bytes and self._poll.poll(_SOON_MS):  # mostly on its way
                        continue
                    return None
                if not count:
                    raise EOFError
                self._left = self._left[count:]
            data = self._data
            if self.expected_bytes:
                self.expected_bytes = 0
                self._expect(_SIZE_BYTES)
                return self._unpack(data)
            self.expected_bytes = int.from_bytes(data, "big")
            if not 0 < self.expected_bytes <= self._most_bytes:
                raise ValueError(f"a message of {self.expected_bytes:,} bytes")
            self._expect(self.expected_bytes)

    def close(self) -> None:
        """Close this end."""
        self._end.close()

    @staticmethod
    def _unpack(data: bytes | bytearray) -> Any:
        return msgpack.unpackb(data, use_list=False, unicode_errors="surrogatepass")

    def _expect(self, size: int) -> None:
        self._data = bytearray(size)
        self._left = memoryview(self._data)


def _make_packer() -> msgpack.Packer:
    return msgpack.Packer(unicode_errors="surrogatepass", buf_size=_SMALL_BYTES)


def encode(result: Answer) -> Encoded:
    """Write an answer as the name of its kind and its fields."""
    kind = type(result).__name__
    return (kind, *[getattr(result, name) for name in _FIELDS[kind]])


def decode(encoded: Encoded) -> Answer:
    """Read what `encode` wrote."""
    name, *values = encoded
    return _KINDS[name](*values)


def encode_case(case: Case, names: Sequence[str]) -> Encoded:
    """Write a case, and the comparators to ask about it; paths become absolute."""
    database, *suite = [os.path.abspath(path) for path in (case.database, *case.suite)]  # noqa: PTH100
    reference = case.reference and (case.reference.golds, case.reference.ignore_order)
    return (database, case.predicted, case.gold, suite, reference, list(names))


def decode_case(encoded: Encoded) -> tuple[Case, list[str]]:
    """Read what `encode_case` wrote."""
    database, predicted, gold, suite, reference, names = encoded
    files = tuple([_path(name) for name in suite])
    golds = reference and Reference(*reference)
    return Case(predicted, gold, _path(database), files, golds), names


_path = lru_cache(maxsize=4096)(Path)  # whose hash, and its text, each path keeps
