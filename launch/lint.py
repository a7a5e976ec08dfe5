"""Gold queries that teach something wrong: they fail, return nothing, are slow or unstable.

    python -m launch.score lint --data spider_data/dev.json

Every gold query runs twice alike, then on tables that are read from their ends, then with rows that
tie in its ORDER BY put in either order. An answer that changes is not decided by the query, and a
right prediction can look wrong.
"""

from __future__ import annotations

import re
import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from launch.page import clean
from rewards.clauses import scan_clauses
from rewards.differences import differences
from sqlenv.compare import is_ordered
from sqlenv.config import ExecutorConfig
from sqlenv.dialects import run
from sqlenv.envs.diagnosed import describe_failure
from sqlenv.executor import Executor
from sqlenv.types import Example, Result, Table

Flaw = Literal["fails", "empty", "slow", "varies", "row_order", "ties"]
FLAWS: dict[Flaw, str] = {
    "fails": "does not run",
    "empty": "returns no row",
    "slow": "takes longer than --slow-s",
    "varies": "gives another result the second time, or reads the clock",
    "row_order": "depends on the order in which tables are read",
    "ties": "depends on the order of rows that its ORDER BY leaves open",
}

# The time of day as SQLite reads it: a second later it is another one.
_CLOCK = re.compile(
    r"\bcurrent_(date|time|timestamp)\b"
    r"|\b(date|time|datetime|julianday|unixepoch)\s*\(\s*(\)|'now')"
    r"|\bstrftime\s*\(\s*'[^']*'\s*(\)|,\s*'now')",
    re.IGNORECASE,
)


@dataclass(frozen=True, slots=True)
class Finding:
    """What is wrong with one gold query.

    Attributes:
        detail: SQLite's message, the seconds, or how the results differ.
    """

    id: str
    db_id: str
    flaw: Flaw
    detail: str
    gold: str

    def record(self) -> dict[str, Any]:
        """Write it for programs."""
        return asdict(self)


@dataclass(frozen=True, slots=True)
class Linter:
    """Makes what looks at one question's gold query, in each process of the crew.

    Attributes:
        slow_s: A query that takes longer is slow.
    """

    slow_s: float

    @contextmanager
    def __call__(self, config: ExecutorConfig) -> Generator[Callable[[Example], list[Finding]]]:
        """Open the two executors, the second of which reads tables from their ends."""
        with open_both(config) as both:
            yield lambda example: look(example, *both, slow_s=self.slow_s).findings


@dataclass(frozen=True, slots=True)
class Look:
    """What a gold query gave, how long it took, and what is wrong with it."""

    result: Result
    seconds: float
    findings: list[Finding]


@contextmanager
def open_both(config: ExecutorConfig) -> Generator[tuple[Executor, Executor]]:
    """Open an executor, and one that reads tables from their ends."""
    reverse = config.model_copy(update={"reverse_unordered": True})
    with Executor(config) as plain, Executor(reverse) as backwards:
        yield plain, backwards


def look(example: Example, plain: Executor, backwards: Executor, *, slow_s: float) -> Look:
    """Run a question's gold query in all ways."""

    def found(flaw: Flaw, detail: str = "") -> Finding:
        return Finding(example.id, example.db_id, flaw, detail, example.gold_sql)

    first, seconds = _timed(example, plain)
    if seconds > slow_s:
        # Not the query's fault, perhaps: the first one of all waits for the executor to start.
        seconds = min(seconds, _timed(example, plain)[1])
    findings = [found("slow", f"{seconds:.2f} s")] if seconds > slow_s else []
    if not isinstance(first, Table):
        return Look(first, seconds, [found("fails", describe_failure(first)), *findings])
    if not first.rows:
        findings.append(found("empty"))
    changes = _changes(example, first, plain, backwards)
    unstable = next((change for change in changes if change[1]), None)
    return Look(first, seconds, [*findings, found(*unstable)] if unstable else findings)


def _timed(example: Example, executor: Executor) -> tuple[Result, float]:
    start = time.perf_counter()
    result = run(executor.execute, example, example.gold_sql)
    return result, time.perf_counter() - start


def render(findings: Sequence[Finding], questions: int) -> RichTable:
    """Lay findings out, the flaws in the order of `FLAWS`."""
    counts = Counter(finding.flaw for finding in findings)
    summary = ", ".join(f"{counts[flaw]:,} {flaw}" for flaw in FLAWS)
    table = RichTable(
        Column("question", no_wrap=True),  # a name that is cut names nothing
        Column("database", overflow="fold"),
        "flaw",
        "detail",
        "gold query",
        title=f"{questions:,} gold queries: {summary}",
    )
    order = list(FLAWS)
    for finding in sorted(findings, key=lambda finding: order.index(finding.flaw)):
        cells = (finding.id, finding.db_id, finding.flaw, finding.detail, finding.gold)
        table.add_row(*(Text(clean(cell)) for cell in cells))
    return table


def _changes(
    example: Example, first: Table, plain: Executor, backwards: Executor
) -> Iterator[tuple[Flaw, str]]:
    """Yield how the result changes in each way of running the query again; mostly, not at all."""
    sql = example.gold_sql
    yield "varies", "reads the clock" if _CLOCK.search(sql) else ""
    yield "varies", _difference(first, run(plain.execute, example, sql))
    reverse = run(backwards.execute, example, sql)
    yield "row_order", _difference(first, reverse, in_order=is_ordered(sql))
    variants = break_ties(sql, first.width) if example.dialect == "sqlite" else []
    ordered = [plain.execute(example.database, variant) for variant in variants]
    match ordered:
        case [Table() as upwards, Table() as downwards]:
            yield "ties", _difference(upwards, downwards)
        case _:  # no ORDER BY, or one that its columns cannot be added to
            return


def break_ties(sql: str, width: int) -> list[str]:
    """Order the rows that a query's own ORDER BY leaves open, by its columns: upwards, downwards.

    Returns:
        Two queries; none where the query has no ORDER BY of its own.
    """
    clauses = scan_clauses(sql)
    order = next((one for one in reversed(clauses) if one.kind == "ORDER BY"), None)
    if order is None or not is_ordered(sql):
        return []
    head, tail = sql[: order.stop], sql[order.stop :]
    columns = range(1, width + 1)
    return [
        f"{head}, {', '.join(f'{column} {direction}' for column in columns)}{tail}"
        for direction in ("ASC", "DESC")
    ]


def _difference(first: Table, second: Result, *, in_order: bool = True) -> str:
    """Name how a result differs from the first one; empty where it does not.

    Floats are compared to 6 decimals: a sum in another order is the same sum.
    """
    if not isinstance(second, Table):
        return describe_failure(second)
    found = differences(first, second)
    return " ".join(sorted(found if in_order else found - {"row_order"}))
