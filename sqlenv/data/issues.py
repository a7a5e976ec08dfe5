"""What can be wrong with a question, and the question as a check has left it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from sqlenv.config import GoldIssue
from sqlenv.types import Example

MISSING_DATABASE = "missing database"
OTHER_ENGINE = "not for SQLite"
OTHER_KIND = "of other levels or styles"
NOT_TRANSPILED = "not transpiled to SQLite"
EXCLUDED_DATABASE = "in exclude_databases"

GOLD_ISSUES: Mapping[GoldIssue, str] = {
    "blank": "there is no gold query",
    "failing": "the gold query does not run",
    "empty": "it returns no rows",
    "varying": "its result changes from run to run, or with the order in which tables are read",
    "tied": "rows that tie in its ORDER BY come in any order, and change the result",
    "scalar": "its result is a single value",
    "duplicate": "the same question about the same database came before",
}
"""What `data.exclude` may name."""


@dataclass(frozen=True, slots=True)
class Checked:
    """A question, what is wrong with it, and why; where ties leave its gold query undecided,
    `correction` accepts every answer that they allow (`sqlenv.data.corrections`).
    """

    example: Example
    issues: tuple[str, ...] = ()
    note: str = ""
    correction: Mapping[str, str] | None = None
