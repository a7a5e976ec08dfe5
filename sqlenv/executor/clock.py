"""Who looks at the clock: whether what a query gives depends on when it runs.

No text says so for certain: `date(x)` reads the clock where x is 'now', and x may be a column, a
parameter of a view, or put together. SQLite itself asks the layer below it (its VFS) for the time,
once a statement that needs it, and for nothing else while a query runs.
"""

from __future__ import annotations

import threading
from functools import cache

import apsw

FUNCTIONS = frozenset(
    {
        *("date", "time", "datetime", "julianday", "unixepoch", "strftime", "timediff"),
        *("current_date", "current_time", "current_timestamp"),
    }
)
"""SQLite's functions that may ask for the time."""


class Clock(apsw.VFS):
    """SQLite's own layer, with a count of the times that a thread has asked what time it is.

    Files go through Python here, some 3 µs a page: only queries that call `FUNCTIONS` use it.
    """

    name = "sqlenv_clock"

    def __init__(self) -> None:
        super().__init__(self.name, base="")
        self._asked = threading.local()

    @property
    def asked(self) -> int:
        """Count what the calling thread has asked."""
        return getattr(self._asked, "count", 0)

    def xCurrentTimeInt64(self) -> int:  # noqa: N802 - SQLite's name
        """Tell the time, in milliseconds of the Julian day."""
        self._asked.count = self.asked + 1
        return super().xCurrentTimeInt64()


@cache
def clock() -> Clock:
    """Give the one of this process; connections that were opened with it need it to stay."""
    return Clock()
