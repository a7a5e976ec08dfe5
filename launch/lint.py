"""Gold queries that teach something wrong: they fail, return nothing, are slow or unstable.

    python -m launch.score lint --data-root spider_data --data dev.json

Every gold query runs three times: twice alike, and once on tables that are read from their ends.
An answer that changes then is not decided by the question, and a right prediction can look wrong.
"""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal

from rich.table import Table as RichTable

from rewards.differences import differences
from sqlenv.compare import is_ordered
from sqlenv.config import ExecutorConfig
from sqlenv.dialects import run
from sqlenv.envs.diagnosed import describe_failure
from sqlenv.executor import Executor
from sqlenv.types import Example, Result, Table

Flaw = Literal["fails", "empty", "slow", "varies", "row_order"]
FLAWS: dict[Flaw, str] = {
    "fails": "does not run",
    "empty": "returns no row",
    "slow": "takes longer than --slow-s",
    "varies": "gives another result the second time",
    "row_order": "depends on the order in which tables are read",
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
        return {name: getattr(self, name) for name in ("id", "db_id", "flaw", "detail", "gold")}


@dataclass(frozen=True, slots=True)
class Linter:
    """Makes what looks at one question's gold query, in each process of the crew.

    Attributes:
        slow_s: A query that takes longer is slow.
    """

    slow_s: float

    def __call__(self, config: ExecutorConfig) -> Callable[[Example], list[Finding]]:
        """Open the two executors, the second of which reads tables from their ends."""
        plain = Executor(config)
        backwards = Executor(config.model_copy(update={"reverse_unordered": True}))
        return lambda example: self._look(example, plain, backwards)

    def _look(self, example: Example, plain: Executor, backwards: Executor) -> list[Finding]:
        def found(flaw: Flaw, detail: str = "") -> Finding:
            return Finding(example.id, example.db_id, flaw, detail, example.gold_sql)

        def ask(executor: Executor) -> tuple[Result, float]:
            start = time.perf_counter()
            result = run(executor.execute, example, example.gold_sql)
            return result, time.perf_counter() - start

        first, seconds = ask(plain)
        slow = [found("slow", f"{seconds:.2f} s")] if seconds > self.slow_s else []
        if not isinstance(first, Table):
            return [found("fails", describe_failure(first)), *slow]
        empty = [] if first.rows else [found("empty")]
        again, reverse = ask(plain)[0], ask(backwards)[0]
        in_order = is_ordered(example.gold_sql)
        if detail := _changes(first, again, in_order=True):
            return [*empty, *slow, found("varies", detail)]
        if detail := _changes(first, reverse, in_order=in_order):
            return [*empty, *slow, found("row_order", detail)]
        return [*empty, *slow]


def render(findings: Sequence[Finding], questions: int) -> RichTable:
    """Lay findings out, the flaws in the order of `FLAWS`."""
    counts = Counter(finding.flaw for finding in findings)
    summary = ", ".join(f"{counts[flaw]:,} {flaw}" for flaw in FLAWS)
    table = RichTable(
        "question",
        "database",
        "flaw",
        "detail",
        "gold query",
        title=f"{questions:,} gold queries: {summary}",
    )
    order = list(FLAWS)
    for finding in sorted(findings, key=lambda finding: order.index(finding.flaw)):
        table.add_row(finding.id, finding.db_id, finding.flaw, finding.detail, finding.gold)
    return table


def _changes(first: Table, second: Result, *, in_order: bool) -> str:
    """Name how a result differs from the first one; empty where it does not.

    Floats are compared to 6 decimals: a sum in another order is the same sum.
    """
    if not isinstance(second, Table):
        return describe_failure(second)
    found = differences(first, second)
    return " ".join(sorted(found if in_order else found - {"row_order"}))
