"""What can be wrong with a question, and the question as a check has left it."""

from __future__ import annotations

from dataclasses import dataclass

from sqlenv.types import Example

MISSING_DATABASE = "missing database"
BLANK_GOLD = "blank gold"
FAILING_GOLD = "failing gold"
EMPTY_GOLD = "empty gold"
SLOW_GOLD = "slow gold"
UNSTABLE_GOLD = "non-deterministic gold"
OTHER_ENGINE = "not for SQLite"
OTHER_KIND = "of other levels or styles"
NOT_TRANSPILED = "not transpiled to SQLite"
EXCLUDED_DATABASE = "in exclude_databases"


@dataclass(frozen=True, slots=True)
class Checked:
    """A question and what was found of it.

    `note` says why the gold query fails, `rows` counts its result (None where it was not run),
    `style` is SynSQL's. Not final is what a machine with less to do might find otherwise.
    """

    example: Example
    issues: tuple[str, ...] = ()
    note: str = ""
    style: str = ""
    rows: int | None = None
    prompt_tokens: int | None = None
    is_final: bool = True
