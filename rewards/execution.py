"""What execution says of an episode, shared by the families that reward it."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Protocol

from sqlenv.dialects import run
from sqlenv.types import Attempt, Episode, Example, Result, Table

_FORMAT = re.compile(r"\s*<think>.*</think>\s*<sql>.*</sql>\s*", re.DOTALL)
_TAGS = ("<think>", "</think>", "<sql>", "</sql>")


class GoldResults(Protocol):
    """What a reward needs of the executor."""

    def gold(self, database: Path, sql: str, /) -> Result:
        """Run a gold query, or return its cached result."""
        ...


def gold_result(executor: GoldResults, example: Example) -> Result:
    """Return what the gold query gives, also where it is of another dialect."""
    return run(executor.gold, example, example.gold_sql)


def is_executable(attempt: Attempt) -> bool:
    """Tell whether the query ran: it gave a table, if an empty one."""
    return isinstance(attempt.result, Table)


def is_correct(episode: Episode) -> bool:
    """Tell whether the answer, the last attempt, matches the gold result."""
    return episode.answer is not None and episode.answer.correct


def first_match(episode: Episode) -> int | None:
    """Return the turn of the first match, counted from 1 (k* of Progress-SQL)."""
    return next((t for t, attempt in enumerate(episode.attempts, 1) if attempt.correct), None)


def follows_format(reply: str) -> bool:
    """Tell whether a reply is one think block, then one sql block, and blanks (Progress-SQL)."""
    return all(reply.count(tag) == 1 for tag in _TAGS) and bool(_FORMAT.fullmatch(reply))
