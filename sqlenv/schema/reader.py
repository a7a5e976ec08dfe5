"""An open file, whose tables are read as they are, and whose views run within bounds.

A view runs code of whoever made the file: for ever, by chance, by the clock. Here the clock stands
still, and a view that runs for long, or that depends on chance, has no rows.
"""

from __future__ import annotations

import time
from collections.abc import Generator, Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Literal

import apsw

from sqlenv.config import STILL
from sqlenv.executor.allowed import CHANCE
from sqlenv.executor.database import codec_of, reading
from sqlenv.executor.functions import clock
from sqlenv.types import Row, Value

TableKind = Literal["TABLE", "VIEW", "VIRTUAL TABLE"]

# What the views of a file may take together: steps of SQLite's machine, some 0.2 s, and where steps
# are slow on purpose processor time. One look takes half of the steps that are left, at most.
_VIEW_STEPS, _STRIDE, _VIEW_S = 20_000_000, 100, 1.0


class Reader:
    """Runs statements of ours; `connection` is the one for tables."""

    def __init__(self, connection: apsw.Connection, views: apsw.Connection) -> None:
        self.connection = connection
        self.codec = codec_of(connection)
        self._views = views
        views.authorizer = _refuse_chance
        self._steps_left = _VIEW_STEPS
        self._end_s = time.thread_time() + _VIEW_S
        self._failed: set[str] = set()

    def rows(self, table: str, kind: TableKind, sql: str) -> Iterable[Row]:
        """Run a statement about a table; what cannot be read of the others has no rows."""
        if kind == "TABLE":
            return self.connection.execute(sql)
        try:
            if table not in self._failed:
                return list((self._look() if kind == "VIEW" else self.connection).execute(sql))
        except apsw.Error:
            self._failed.add(table)
        return ()

    def _look(self) -> apsw.Connection:
        """Return the connection for views, with the steps of one look ahead."""
        end = self._steps_left // 2

        def is_over() -> bool:
            self._steps_left -= _STRIDE
            return self._steps_left <= end or time.thread_time() > self._end_s

        self._views.set_progress_handler(is_over, _STRIDE)
        return self._views

    def shown(self, row: Row) -> Iterator[Value]:
        """Read the bytes of texts; what is no text in them becomes U+FFFD."""
        return (v.decode(self.codec, "replace") if isinstance(v, bytes) else v for v in row)


def _refuse_chance(action: int, _first: str | None, function: str | None, *_: str | None) -> int:
    is_chance = action == apsw.SQLITE_FUNCTION and str(function).lower() in CHANCE
    return apsw.SQLITE_DENY if is_chance else apsw.SQLITE_OK


@contextmanager
def open_reader(database: Path) -> Generator[Reader]:
    """Open a file.

    Raises:
        UserError: Reading takes more time or memory than any honest file of that size.
    """
    with reading(database) as connection, reading(database, vfs=clock(STILL).name) as views:
        yield Reader(connection, views)
