"""SQL functions in place of SQLite's own, and who looks at the clock.

Some of SQLite's take a time with the square of a text's length, and one call is one step, which
neither the step budget nor the deadline can end. Those here give the same answers, in a time with
the length. Of text that is not valid they raise `UnicodeDecodeError`, as all of Python's do.

No text says for certain whether a query reads the clock: `date(x)` does where x is 'now', and x may
be a column, a parameter of a view, or put together. SQLite itself asks the layer below it (its VFS)
for the time, once a statement that needs it, and for nothing else while a query runs.
"""

from __future__ import annotations

import re
import threading
from collections.abc import Callable
from functools import cache, partial

import apsw

from sqlenv.types import Value

_HEX = re.compile("[0-9A-Fa-f]+")
_NOT_HEX = re.compile("[^0-9A-Fa-f]")
CLOCK_FUNCTIONS = frozenset(
    {
        *("date", "time", "datetime", "julianday", "unixepoch", "strftime", "timediff"),
        *("current_date", "current_time", "current_timestamp"),
    }
)
"""SQLite's functions that may ask for the time."""


def add_functions(connection: apsw.Connection) -> None:
    """Replace `trim`, `ltrim`, `rtrim` and `unhex` of two arguments."""
    floats = cache(partial(apsw.Connection, ":memory:"))  # 70 kB, which few queries need
    for name, function in REPLACED.items():
        replacement = _of_texts(function, floats)
        connection.create_scalar_function(
            name,
            replacement,
            2,
            deterministic=True,
            flags=apsw.SQLITE_INNOCUOUS,  # as SQLite's own: views and generated columns may call it
        )


def add_chance(connection: apsw.Connection, note: Callable[[], int]) -> None:
    """Replace `random` and `randomblob` by functions that note when they are called.

    That a query names one says less: SQLite also names those of the defaults of columns.

    Args:
        connection: To a database.
        note: Called first; gives the length that a blob may have.
    """
    numbers = cache(partial(apsw.Connection, ":memory:"))

    def random(*_nothing: Value) -> Value:
        note()
        return int.from_bytes(apsw.randomness(8), "little", signed=True)

    def randomblob(*sizes: Value) -> Value:
        longest, (size,) = note(), sizes
        if not isinstance(size, int):
            size = numbers().execute("SELECT CAST(? AS INTEGER)", (size,)).get or 0
        if size > longest:
            raise apsw.TooBigError("string or blob too big")
        return apsw.randomness(max(size, 1))

    for function, count in ((random, 0), (randomblob, 1)):
        connection.create_scalar_function(
            function.__name__, function, count, flags=apsw.SQLITE_INNOCUOUS
        )


def ltrim(text: str, characters: str) -> str:
    """Drop the characters from the start of a text."""
    # Python's own lstrip looks through all the characters for each place.
    dropped = _characters(characters)
    start = 0
    while start < len(text) and text[start] in dropped:
        start += 1
    return text[start:]


def rtrim(text: str, characters: str) -> str:
    """Drop the characters from the end of a text."""
    dropped = _characters(characters)
    end = len(text)
    while end and text[end - 1] in dropped:
        end -= 1
    return text[:end]


def trim(text: str, characters: str) -> str:
    """Drop the characters from both ends of a text."""
    return rtrim(ltrim(text, characters), characters)


def unhex(text: str, ignored: str) -> bytes | None:
    """Read pairs of hexadecimal digits, with ignored characters around pairs but not in them.

    Returns:
        The bytes; None where the text is anything else.
    """
    text = text.partition("\0")[0]
    runs = _HEX.findall(text)
    if any(len(run) % 2 for run in runs) or not set(_NOT_HEX.findall(text)) <= set(ignored):
        return None
    return bytes.fromhex("".join(runs))


def _characters(text: str) -> set[str]:
    """Tell the characters apart; SQLite reads them up to a NUL."""
    return set(text.partition("\0")[0])


def _of_texts(
    function: Callable[[str, str], str | bytes | None], floats: Callable[[], apsw.Connection]
) -> Callable[..., str | bytes | None]:
    """Make a SQL function of one that takes two texts: SQLite reads any value as a text.

    Args:
        function: Python's.
        floats: Gives a connection whose SQLite writes floats; each version does it its own way.
    """

    def text(value: Value) -> str:
        if isinstance(value, bytes):
            return value.decode()
        if isinstance(value, float):
            value = floats().execute("SELECT CAST(? AS TEXT)", (value,)).get
        return str(value)

    def call(*values: Value) -> str | bytes | None:
        first, second = values
        if first is None or second is None:
            return None
        return function(text(first), text(second))

    return call


REPLACED: dict[str, Callable[[str, str], str | bytes | None]] = {
    "trim": trim,
    "ltrim": ltrim,
    "rtrim": rtrim,
    "unhex": unhex,
}


class Clock(apsw.VFS):
    """SQLite's own layer, with a count of the times that a thread has asked what time it is.

    Files go through Python here, some 3 µs a page: only queries that call `CLOCK_FUNCTIONS` use it.
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
