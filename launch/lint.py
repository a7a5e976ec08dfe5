"""Gold queries that teach something wrong: they fail, return nothing, are slow or unstable.

    python -m launch.score lint --data spider_data/dev.json

Every gold query runs twice alike, then on tables that are read from their ends, then with rows that
tie in its ORDER BY put in either order. An answer that changes is not decided by the query, and a
right prediction can look wrong.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from typing import Any, Literal

from rich.table import Column
from rich.table import Table as RichTable
from rich.text import Text

from launch.reporting.pair_view import clean
from rewards.expo.clauses import scan_clauses
from rewards.expo.differences import differences
from sqlenv.config import ExecutorConfig
from sqlenv.dialects import transpile
from sqlenv.envs.diagnosed import describe_failure
from sqlenv.evaluators.equality import is_ordered
from sqlenv.executor import Executor
from sqlenv.executor.gold import TRANSIENT
from sqlenv.types import Example, Result, Table

Flaw = Literal["fails", "empty", "slow", "varies", "row_order", "ties"]
FLAWS: dict[Flaw, str] = {
    "fails": "does not run",
    "empty": "returns no row",
    "slow": "takes longer than --slow-s",
    "varies": "gives another result the second time, or depends on the clock or on chance",
    "row_order": "depends on the order in which tables are read",
    "ties": "depends on the order of rows that its ORDER BY leaves open",
}


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
            yield lambda example: look([example], *both, slow_s=self.slow_s)[0].findings


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


def look(
    examples: Sequence[Example], plain: Executor, backwards: Executor, *, slow_s: float
) -> list[Look]:
    """Run gold queries in all ways, each way for all of them together."""
    results, together_s = _timed(examples, plain)
    seconds = [together_s] * len(examples)
    if together_s > slow_s:
        # Whose fault is it? Perhaps nobody's: the first one waits for the executor to start.
        alone = [_timed([example], plain) for example in examples]
        seconds = [min(together_s, alone_s) for _, alone_s in alone]
        results = [
            again[0] if result in TRANSIENT else result
            for result, (again, _) in zip(results, alone, strict=True)
        ]
    ran = [
        (example, result)
        for example, result in zip(examples, results, strict=True)
        if isinstance(result, Table)
    ]
    changes = iter(_changes(ran, plain, backwards))
    looks = []
    for example, result, taken_s in zip(examples, results, seconds, strict=True):
        flaws: list[tuple[Flaw, str]] = [("slow", f"{taken_s:.2f} s")] if taken_s > slow_s else []
        if not isinstance(result, Table):
            flaws.insert(0, ("fails", describe_failure(result)))
        else:
            flaws += [("empty", "")] if not result.rows else []
            flaws += next(changes)
        name = (example.id, example.db_id)
        findings = [Finding(*name, *flaw, example.gold_sql) for flaw in flaws]
        looks.append(Look(result, taken_s, findings))
    return looks


def _timed(examples: Sequence[Example], executor: Executor) -> tuple[list[Result], float]:
    start = time.perf_counter()
    return _run(examples, executor), time.perf_counter() - start


def _run(examples: Sequence[Example], executor: Executor) -> list[Result]:
    written = [transpile(example.gold_sql, example.dialect) for example in examples]
    pairs = zip(examples, written, strict=True)
    queries = [(example.database, sql) for example, sql in pairs if isinstance(sql, str)]
    results = iter(executor.execute_many(queries))
    return [next(results) if isinstance(sql, str) else sql for sql in written]


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
    ran: Sequence[tuple[Example, Table]], plain: Executor, backwards: Executor
) -> Iterator[list[tuple[Flaw, str]]]:
    """Yield how each result changes when its query runs again in some way; mostly, not at all."""
    examples = [example for example, _ in ran]
    again, reverse = _run(examples, plain), _run(examples, backwards)
    variants = [
        break_ties(example.gold_sql, first.width) if example.dialect == "sqlite" else []
        for example, first in ran
    ]
    ordered = iter(
        plain.execute_many(
            [(e.database, sql) for e, two in zip(examples, variants, strict=True) for sql in two]
        )
    )
    for (example, first), second, backward, two in zip(ran, again, reverse, variants, strict=True):
        sql = example.gold_sql
        changes: list[tuple[Flaw, str]] = [
            ("varies", "depends on the clock or on chance" if first.nondeterministic else ""),
            ("varies", _difference(first, second)),
            ("row_order", _difference(first, backward, in_order=is_ordered(sql))),
        ]
        match [next(ordered) for _ in two]:
            case [Table() as upwards, Table() as downwards]:
                changes.append(("ties", _difference(upwards, downwards)))
            case _:  # no ORDER BY, or one that its columns cannot be added to
                pass
        yield [change for change in changes if change[1]][:1]


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
