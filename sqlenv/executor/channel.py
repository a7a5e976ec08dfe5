"""What parent and workers say to each other: records, each sent as a whole over a socket.

Values are MessagePack's (numbers, text, bytes, None, tuples, dicts) and the records listed here.
Whatever comes, reading it makes nothing else and runs nothing.
"""

from __future__ import annotations

import os
import socket
from dataclasses import fields
from functools import lru_cache
from pathlib import Path
from typing import Any

import msgpack

from sqlenv.errors import UserError
from sqlenv.evaluators.comparators import Case, Judgement
from sqlenv.evaluators.spider2 import Reference
from sqlenv.evaluators.votes import Ballot
from sqlenv.executor.engine import Execution, Trial
from sqlenv.types import Denied, SqlError, Table, TimedOut, TooLarge

RESULTS = (Table, SqlError, TimedOut, TooLarge, Denied)
ANSWERS = (*RESULTS, Judgement, Ballot, UserError)

# Of each kind of record the number that it is written under, and its fields.
_KINDS = dict(enumerate((*ANSWERS, Execution, Trial, Case, Reference)))
_NUMBERS = {kind: number for number, kind in _KINDS.items()}
_FIELDS = {
    kind: tuple(field.name for field in fields(kind)) for kind in _NUMBERS if kind is not UserError
}
_PATH = len(_KINDS)
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
    """Write a value; paths become absolute."""
    return msgpack.packb(
        value, default=_pack_record, unicode_errors="surrogatepass", buf_size=_SMALL_BYTES
    )


def unpack(data: bytes | bytearray) -> Any:
    """Read a value; ValueError, TypeError or LookupError where the bytes are none."""
    return msgpack.unpackb(
        data, ext_hook=_unpack_record, use_list=False, unicode_errors="surrogatepass"
    )


def _pack_record(value: Any) -> msgpack.ExtType:
    if isinstance(value, Path):
        return msgpack.ExtType(_PATH, os.fsencode(os.path.abspath(value)))  # noqa: PTH100
    kind = type(value)
    is_error = kind is UserError
    values = value.args if is_error else [getattr(value, name) for name in _FIELDS[kind]]
    return msgpack.ExtType(_NUMBERS[kind], pack(values))


def _unpack_record(number: int, data: bytes) -> Any:
    return _path(data) if number == _PATH else _KINDS[number](*unpack(data))


@lru_cache(maxsize=4096)  # each path keeps its hash and its text
def _path(name: bytes) -> Path:
    return Path(os.fsdecode(name))
