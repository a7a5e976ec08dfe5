"""What parent and workers say to each other: plain values, each sent as a whole over a socket.

Values are MessagePack's: numbers, text, bytes, None, tuples and dicts of these. Whatever comes,
reading it makes nothing else and runs nothing.
"""

from __future__ import annotations

import os
import socket
from collections.abc import Sequence
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


class Channel:
    """One end, which waits as long as its socket does; `most_bytes` bounds what is received."""

    def __init__(self, end: socket.socket, *, most_bytes: int = 2**40) -> None:
        self._end = end
        self._most_bytes = most_bytes

    def send(self, value: Any) -> None:
        """Send a value; OSError where the other end is closed, or did not read it in time."""
        data = pack(value)
        self._end.sendall(len(data).to_bytes(_SIZE_BYTES, "big") + data)

    def receive(self) -> Any:
        """Wait for the next value.

        Raises:
            EOFError: The other end is closed.
            OSError: It was closed with values under way, or nothing came in time.
            ValueError: What came is no value, or more than expected.
        """
        size = int.from_bytes(self._read(_SIZE_BYTES), "big")
        if not 0 < size <= self._most_bytes:
            raise ValueError(f"a message of {size:,} bytes")
        return unpack(self._read(size))

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


def pack(value: Any) -> bytes:
    """Write a plain value."""
    return msgpack.packb(value, unicode_errors="surrogatepass", buf_size=_SMALL_BYTES)


def unpack(data: bytes | bytearray) -> Any:
    """Read a plain value; ValueError where the bytes are none."""
    return msgpack.unpackb(data, use_list=False, unicode_errors="surrogatepass")


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
