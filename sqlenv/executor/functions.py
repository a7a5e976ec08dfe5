"""SQL functions in place of SQLite's own, and the clock that queries see.

Some of SQLite's take a time with the square of a text's length, and one call is one step, which
neither the step budget nor the deadline can end. Those here give the same answers, in linear time.
Of text that is not valid they raise `UnicodeDecodeError`, as all of Python's do.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from datetime import datetime
from functools import cache, partial
from typing import Any

import apsw

CLOCK_FUNCTIONS = frozenset(
    {"date", "time", "datetime", "julianday", "unixepoch", "strftime", "timediff"}
    | {"current_date", "current_time", "current_timestamp"}
)
"""SQLite's functions that may ask for the time."""


def add_functions(connection: apsw.Connection) -> None:
    """Replace `trim`, `ltrim` and `rtrim` of two arguments."""
    plain = cache(partial(apsw.Connection, ":memory:"))  # 70 kB, which few queries need
    for name, ends in (("trim", {}), ("ltrim", {"end": False}), ("rtrim", {"start": False})):
        connection.create_scalar_function(
            name,
            partial(_trim_values, plain, **ends),
            2,
            deterministic=True,
            flags=apsw.SQLITE_INNOCUOUS,  # as SQLite's own: views and generated columns may call it
        )


def trim(text: str, characters: str, *, start: bool = True, end: bool = True) -> str:
    """Drop characters from the ends of a text."""
    # Python's own strip looks through all the characters for each place; SQLite reads up to a NUL.
    dropped = set(characters.partition("\0")[0])
    first, last = 0, len(text)
    while start and first < last and text[first] in dropped:
        first += 1
    while end and first < last and text[last - 1] in dropped:
        last -= 1
    return text[first:last]


def _trim_values(plain: Callable[[], apsw.Connection], *values: Any, **ends: bool) -> str | None:
    """Trim as SQLite does, which reads any value as a text."""
    if not all(isinstance(value, str) for value in values):
        values = plain().execute("SELECT CAST(? AS TEXT), CAST(? AS TEXT)", values).get
    return None if None in values else trim(*values, **ends)


_EPOCH_MS = 210_866_760_000_000  # 1970 in milliseconds of the Julian day


class Clock(apsw.VFS):
    """SQLite's own layer below, with a clock that stands still, or one that counts who looks at it.

    `date(x)` reads the clock where x is 'now', which no text of a query tells for certain; SQLite
    asks this layer, once a statement that needs it. Files go through Python here, some 3 µs a page:
    only queries that call `CLOCK_FUNCTIONS` use it.
    """

    def __init__(self, now: datetime | None) -> None:
        self.name = f"sqlenv_clock_{now}"
        super().__init__(self.name, base="")
        self._now_ms = None if now is None else round(now.timestamp() * 1000) + _EPOCH_MS
        self._asked = threading.local()

    @property
    def reads(self) -> int:
        """Count how often the calling thread has asked a clock that runs."""
        return getattr(self._asked, "count", 0)

    def xCurrentTimeInt64(self) -> int:  # noqa: N802 - SQLite's name
        """Tell the time, in milliseconds of the Julian day."""
        if self._now_ms is not None:
            return self._now_ms
        self._asked.count = self.reads + 1
        return super().xCurrentTimeInt64()


clock = cache(Clock)
"""The process's clock that shows an instant, or one that runs; connections that were opened with it
need it to stay.
"""
