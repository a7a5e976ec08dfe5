"""What is remembered, in memory, of what was worked out from the text of a query."""

from __future__ import annotations

from collections.abc import Callable
from functools import lru_cache, wraps
from typing import TypeVar, TypeVarTuple

MAX_CACHED_CHARS = 4_000  # of longer texts only the last one is remembered

Rest = TypeVarTuple("Rest")
R = TypeVar("R")


def cached(maxsize: int) -> Callable[[Callable[[str, *Rest], R]], Callable[[str, *Rest], R]]:
    """Cache a pure function of a query; of long ones the last, for a rambling policy fills memory.

    An entry costs some 100 times the length of the query.
    """

    def decorate(function: Callable[[str, *Rest], R]) -> Callable[[str, *Rest], R]:
        remembered, last = lru_cache(maxsize)(function), lru_cache(1)(function)

        @wraps(function)
        def call(sql: str, *rest: *Rest) -> R:
            return (last if len(sql) > MAX_CACHED_CHARS else remembered)(sql, *rest)

        return call

    return decorate
