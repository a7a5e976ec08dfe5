"""The steps of a query: clause by clause in logical order, each a slice of its own text.

They are run when their results are asked for (EXPO-SQL, algorithm 1, appendix A.2).
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from typing import Literal

from rewards.expo.attributes import is_computed, with_attributes
from rewards.expo.clauses import WHOLE, Clause, ClauseKind, scan_clauses
from rewards.expo.differences import Differences, differences
from sqlenv.evaluators.equality import like_gold
from sqlenv.sql.extraction import parse
from sqlenv.types import Numbers, Result, Table

Part = Literal["source", "where", "select", "having", "order", "limit", "compound"]
_ENDS: dict[ClauseKind, Part] = {"ORDER BY": "order", "LIMIT": "limit"}

MAX_STEP_ROWS = 200
"""Rows of an intermediate result that are compared with the step after it; of larger ones filters
are judged by counts, other steps by the first rows."""


@dataclass(frozen=True, slots=True)
class Step:
    """A query that ends with one more clause than the step before.

    Attributes:
        part: What the last clause is, or the last ones that are run together.
        clauses: Those that are blamed for it.
        operand: The SELECT of a set operation that it is a step of.
        star: Where the text after `SELECT *` starts, in steps before the SELECT.
    """

    sql: str
    part: Part
    clauses: tuple[int, ...]
    operand: int = 0
    star: int = 0


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The steps of a query in logical order.

    Attributes:
        operands: Those of each SELECT of a set operation; of another query a single list.
        body: The query before its last ORDER BY and LIMIT.
        order, limit: Those, where there are any.
    """

    operands: tuple[tuple[Step, ...], ...]
    body: Step
    order: Step | None
    limit: Step | None

    @property
    def tail(self) -> list[Step]:
        """List the last ORDER BY and LIMIT."""
        return [step for step in (self.order, self.limit) if step]


def plan_steps(sql: str) -> StepPlan:
    """List the steps of a query.

    FROM and JOINs are the first step, with `SELECT *` until the SELECT itself. GROUP BY and SELECT
    are one step, as `SELECT *` cannot be grouped; so are SELECT and a HAVING without GROUP BY.
    """
    clauses = scan_clauses(sql)
    numbers = sorted({clause.operand for clause in clauses} - {WHOLE}) or [0]
    operands = tuple(tuple(_operand_steps(sql, clauses, number)) for number in numbers)
    owner = WHOLE if len(numbers) > 1 else numbers[0]
    tail = _of_kinds(clauses, owner, *_ENDS)
    body = operands[0][-1]
    if len(numbers) > 1:
        end = tail[0] - 1 if tail else len(clauses) - 1
        body = Step(sql[: clauses[end].stop], "compound", ())
    ends = {
        clauses[n].kind: Step(sql[: clauses[n].stop], _ENDS[clauses[n].kind], (n,)) for n in tail
    }
    return StepPlan(operands, body, ends.get("ORDER BY"), ends.get("LIMIT"))


def _operand_steps(sql: str, clauses: Sequence[Clause], operand: int) -> Iterator[Step]:

    def text(numbers: Sequence[int]) -> str:
        return "\n".join(clauses[n].text(sql) for n in numbers)

    items = _of_kinds(clauses, WHOLE, "WITH")
    head = sql[: clauses[items[-1]].stop] + "\n" if items else ""
    selects = _of_kinds(clauses, operand, "SELECT")
    tables = _of_kinds(clauses, operand, "FROM", "JOIN")
    where, group, having = (
        _of_kinds(clauses, operand, kind) for kind in ("WHERE", "GROUP BY", "HAVING")
    )
    if tables:
        source = f"{head}SELECT *\n"
        yield Step(source + text(tables), "source", (*items, *tables), operand, len(source))
        if where:
            filtered = source + text([*tables, *where])
            yield Step(filtered, "where", (*where,), operand, len(source))
    select, windows = selects[:1], selects[1:]
    body = [*select, *tables, *where, *group]
    at_once, later = ([], having) if group else (having, [])
    numbers = (*select, *windows, *group, *at_once)
    yield Step(head + text([*body, *at_once, *windows]), "select", numbers, operand)
    if later:
        yield Step(head + text([*body, *later, *windows]), "having", (*later,), operand)


class Steps:
    """Runs the steps of a query when their results are asked for, each once."""

    def __init__(
        self, sql: str, result: Table, run: Callable[[str], Result], numbers: Numbers
    ) -> None:
        self.sql, self.clauses, self.plan = sql, scan_clauses(sql), plan_steps(sql)
        self._last = [self.plan.body, *self.plan.tail][-1]
        self.result, self._run, self._numbers = result, cache(run), numbers

    def rows(self, step: Step) -> Table | None:
        """Return a step's rows, at most one more than are compared; None if it does not run."""
        limit = MAX_STEP_ROWS + 1
        if step.sql == self._last.sql:
            return first_rows(self.result, limit)
        return self._table(step, f"{{}}\nLIMIT {limit}")

    @property
    def window(self) -> list[str]:
        """Return how many rows the last LIMIT keeps, and how many it skips before."""
        query = parse(self.sql)
        parts = (query and query.args.get(name) for name in ("limit", "offset"))
        # FETCH FIRST, which other dialects have, has a count.
        shown = (part and (part.expression or part.args.get("count")) for part in parts)
        return [one.sql("sqlite") if one else "0" for one in shown]

    def count(self, step: Step) -> int | None:
        """Count the rows of a step; None where it does not run."""
        if step.sql == self._last.sql:
            return len(self.result.rows)
        table = self.rows(step)
        if table and len(table.rows) <= MAX_STEP_ROWS:
            return len(table.rows)
        table = self._table(step, "SELECT count(*) FROM ({}\n)")
        return int(str(table.rows[0][0])) if table else None

    def differences(self, reference: Table, step: Step, table: Table) -> Differences:
        """Name what sets a step's result, its columns named, apart from another."""
        computed = step.part == "select" and is_computed(self.sql, step.operand)
        return differences(reference, self.like(table, reference), is_computed=computed)

    def like(self, table: Table, reference: Table) -> Table:
        """Write numbers as another result has them, where they are the same."""
        found = like_gold(table, reference, self._numbers)
        assert isinstance(found, Table)
        return found

    def named(self, step: Step, table: Table) -> Table:
        """Name the columns of a step's result by their attributes."""
        return with_attributes(self.sql, table, operand=step.operand, is_star=bool(step.star))

    def _table(self, step: Step, form: str) -> Table | None:
        result = self._run(form.replace("{}", step.sql, 1))
        return result if isinstance(result, Table) else None


def _of_kinds(clauses: Sequence[Clause], operand: int, *kinds: ClauseKind) -> list[int]:
    return [n for n, c in enumerate(clauses) if c.operand == operand and c.kind in kinds]


def first_rows(table: Table, limit: int) -> Table:
    """Keep the first rows of a table."""
    return table if len(table.rows) <= limit else Table(table.columns, table.rows[:limit])
