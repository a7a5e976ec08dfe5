"""Which clauses make a result wrong: clause-wise execution (EXPO-SQL, algorithm 1, appendix A.2).

A query is run clause by clause in logical order, each step a slice of its own text. A step whose
effect is among the differences between the gold result and the predicted one is blamed; or, without
types of difference, one that leads away from the gold result.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rewards.config import ExpoConfig
from rewards.expo.attributes import is_computed, select_aliases, with_attributes
from rewards.expo.clauses import WHOLE, Clause, ClauseKind
from rewards.expo.differences import (
    CANDIDATES,
    OF_COLUMNS,
    Differences,
    differences,
    leads_away,
    with_missing,
)
from rewards.expo.names import replace_names, sources
from sqlenv.types import Result, SqlError, Table

Effect = Literal["source", "filter", "limit", "project", "collapse", "order", "compound"]
Run = Callable[[str], Result]

MAX_STEP_ROWS = 200
"""Rows of an intermediate result that are compared; of larger ones filters are judged by counts,
other steps by the first rows."""
_ALL = sys.maxsize

_EVERY: Differences = frozenset(CANDIDATES)
_REMOVAL: Differences = frozenset({"row_subset", "row_emptied", "row_dedup"})
# What a step can do to the result before it; what it cannot do is not looked for.
_POSSIBLE: dict[Effect, Differences] = {
    "source": _EVERY,
    "filter": _REMOVAL,
    "limit": _REMOVAL,
    "project": _EVERY,
    "collapse": _EVERY,  # a SELECT with a HAVING of its own
    "order": frozenset({"row_order"}),
    "compound": frozenset(),
}
_NOTHING: Differences = frozenset()
_COLUMNS: Differences = frozenset({"col_count"})
_MISSING: Differences = frozenset({"row_subset"})


@dataclass(frozen=True, slots=True)
class Step:
    """A query that ends with one more clause than the step before.

    Attributes:
        effect: What the last clause does to rows.
        clauses: Those that answer for it.
        operand: The SELECT of a set operation that it is a step of.
        star: Where the text after `SELECT *` starts, in steps before the SELECT.
    """

    sql: str
    effect: Effect
    clauses: tuple[int, ...]
    operand: int = 0
    star: int = 0


def find_blamed(
    sql: str,
    clauses: Sequence[Clause],
    config: ExpoConfig,
    *,
    gold: Table,
    predicted: Table,
    sought: Differences,
    run: Run,
) -> frozenset[int]:
    """Number the clauses whose own effect is part of what is wrong with the result.

    Possibly none: several differences cannot arise in any single step. `gold` has its columns named
    by their attributes, `sought` is what sets the results apart (D*), `run` runs a step's query.
    """
    chains = plan_steps(sql, clauses)
    steps = _Steps(sql, run, config)
    if len(chains) == 1 or (chains and _is_outer(chains[-1])):
        steps.know(chains[-1], predicted)
    blamed: set[int] = set()
    for chain in chains:
        wanted = sought
        if config.setop_dstar == "operand" and len(chains) > 1 and not _is_outer(chain):
            own = steps.rows(chain[-1])
            wanted = steps.differences(gold, chain[-1], own, _EVERY) if own else _NOTHING
        source = _check_source(chain[0], steps, gold, config)
        if config.type_map == "none":
            blamed |= _blame_away(chain, steps, gold)
        else:
            blamed |= _blame_chain(chain, steps, wanted)
            source &= wanted
        if source:
            blamed.update(chain[0].clauses)
    return frozenset(blamed)


def _check_source(step: Step, steps: _Steps, gold: Table, config: ExpoConfig) -> Differences:
    """Compare FROM and its JOINs with the gold result (ambiguity E1)."""
    if step.effect != "source":
        return _NOTHING
    if config.from_check == "full":
        rows = steps.rows(step)
        return steps.differences(gold, step, rows, _EVERY) if rows else _NOTHING
    table = steps.probe(step)
    if table is None or table.width == gold.width:
        return _NOTHING
    is_wrong = config.from_check == "differs" or table.width < gold.width
    return _COLUMNS if is_wrong else _NOTHING


def _blame_chain(chain: Sequence[Step], steps: _Steps, wanted: Differences) -> set[int]:
    """Blame the steps that make a difference which is sought (algorithm 1)."""
    blamed: set[int] = set()
    for at in range(1, len(chain)):
        sought = steps.seek(chain[at], wanted)
        # Filters keep the columns, so that a row tells only whether any is left.
        is_removal = _POSSIBLE[chain[at].effect] == _REMOVAL and sought != {"row_emptied"}
        look = steps.rows if is_removal else steps.probe
        if not sought or look(chain[at]) is None:
            continue
        # A step that cannot run alone is one with the next that can.
        before = next((n for n in range(at - 1, -1, -1) if look(chain[n])), None)
        if before is not None and steps.change(chain[before], chain[at], sought) & sought:
            blamed.update(n for step in chain[before + 1 : at + 1] for n in step.clauses)
    return blamed


def _blame_away(chain: Sequence[Step], steps: _Steps, gold: Table) -> set[int]:
    """Blame the steps that lead away from the gold result, without types (table 5)."""
    blamed: set[int] = set()
    before: Table | None = None
    waiting: list[int] = []
    for step in chain:
        waiting += step.clauses
        after = steps.rows(step)
        if after is None:
            continue
        # Of large results a filter leaves the first rows, whatever it removes.
        is_cut = before is not None and len(before.rows) > MAX_STEP_ROWS and step.effect != "order"
        if before is not None and not (is_cut and after.rows) and leads_away(gold, before, after):
            blamed.update(waiting)
        before, waiting = after, []
    return blamed


class _Steps:
    """Runs steps when their results are asked for, each once."""

    def __init__(self, sql: str, run: Run, config: ExpoConfig) -> None:
        self._sql, self._run = sql, run
        self._computed_rule = config.row_partial == "computed"
        self._widths_apart = config.row_disjoint == "same_columns"
        self._empty: set[str] = set()
        self._seen: dict[str, tuple[int, Table | None]] = {}  # with the rows asked for

    def know(self, chain: Sequence[Step], result: Table) -> None:
        """Take the result of the last step; an empty one was so before SELECT and ORDER BY too."""
        self._seen[chain[-1].sql] = (_ALL, result)
        for step in reversed(chain) if not result.rows else ():
            self._empty.add(step.sql)
            if step.effect not in ("project", "order"):
                return

    def probe(self, step: Step) -> Table | None:
        """Return the columns of a step and at most one row; None where it does not run."""
        return self._fetch(step, 1)

    def rows(self, step: Step) -> Table | None:
        """Return the first rows of a step, one more than are compared."""
        return self._fetch(step, MAX_STEP_ROWS + 1)

    def seek(self, step: Step, wanted: Differences) -> Differences:
        """Name what a step is to be blamed for, of what sets the result apart.

        Rows all different, under the right columns, are rows missing that a filter took away (A.1).
        """
        if self._widths_apart and step.effect == "filter":
            wanted = with_missing(wanted)
        return wanted & _POSSIBLE[step.effect]

    def change(self, before: Step, after: Step, sought: Differences) -> Differences:
        """Name what a step changes, as far as it is sought."""
        first, second = self.probe(before), self.probe(after)
        assert first is not None
        assert second is not None
        if first.width != second.width or not (first.rows and second.rows):
            # A row each tells it all.
            found = self.differences(self._named(before, first, sought), after, second, sought)
            is_width = self._widths_apart and "col_count" in found and not sought & OF_COLUMNS
            return found - {"row_disjoint"} if is_width else found
        left, right = self.rows(before), self.rows(after)
        if left is None or right is None:
            return _NOTHING
        if _POSSIBLE[after.effect] == _REMOVAL and len(left.rows) > MAX_STEP_ROWS:
            counts = [self._count(step) for step in (before, after)] if sought & _MISSING else []
            return _MISSING if None not in counts and len(set(counts)) == 2 else _NOTHING
        left, right = _cut(left, MAX_STEP_ROWS), _cut(right, MAX_STEP_ROWS)
        if after.effect == "order":
            # The same rows in any case, of which the first ones may be all others.
            return _NOTHING if left.rows == right.rows else _POSSIBLE["order"]
        return self.differences(self._named(before, left, sought), after, right, sought)

    def differences(
        self, reference: Table, step: Step, table: Table, sought: Differences
    ) -> Differences:
        """Name what sets a step's result apart from another; what is not sought may be wrong."""
        computed = self._computed_rule and step.effect in ("project", "collapse")
        return differences(
            reference,
            self._named(step, table, sought),
            is_computed=computed and is_computed(self._sql, step.operand),
        )

    def _named(self, step: Step, table: Table, sought: Differences) -> Table:
        if "col_name" not in sought:
            return table
        return with_attributes(self._sql, table, operand=step.operand, is_star=bool(step.star))

    def _fetch(self, step: Step, limit: int) -> Table | None:
        asked, table = self._seen.get(step.sql, (-1, None))
        if asked < limit:
            rows = 0 if step.sql in self._empty else limit
            table = self._table(step, f"{{}}\nLIMIT {rows}")
            self._seen[step.sql] = (limit, table)
        return table and _cut(table, limit)

    def _count(self, step: Step) -> int | None:
        asked, table = self._seen[step.sql]
        if asked == _ALL and table:
            return len(table.rows)
        table = self._table(step, "SELECT count(*) FROM ({}\n)")
        return int(str(table.rows[0][0])) if table else None

    def _table(self, step: Step, form: str) -> Table | None:
        """Run a step; where `SELECT *` does not define an alias that it uses, written out."""
        result = self._run(form.replace("{}", step.sql, 1))
        if step.star and isinstance(result, SqlError):
            aliases = _aliases(self._sql, step.operand)
            plain = step.sql[: step.star] + replace_names(step.sql[step.star :], aliases)
            if plain != step.sql:
                result = self._run(form.replace("{}", plain, 1))
        return result if isinstance(result, Table) else None


def plan_steps(sql: str, clauses: Sequence[Clause]) -> list[list[Step]]:
    """List the steps of a query in logical order: a list an operand, then one for the whole.

    FROM and JOINs are the first step, with `SELECT *` until the SELECT itself. GROUP BY and SELECT
    are one step, as `SELECT *` cannot be grouped; so are SELECT and a HAVING without GROUP BY.
    """
    numbers = sorted({clause.operand for clause in clauses} - {WHOLE})
    chains = [list(_operand_steps(sql, clauses, number)) for number in numbers]
    if len(numbers) == 1:
        last = _of_kinds(clauses, numbers[0], "ORDER BY", "LIMIT")
        chains[0] += _last_steps(sql, clauses, last)
    elif numbers and (outer := _of_kinds(clauses, WHOLE, "ORDER BY", "LIMIT")):
        whole = Step(sql[: clauses[outer[0] - 1].stop], "compound", ())
        chains.append([whole, *_last_steps(sql, clauses, outer)])
    return chains


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
            yield Step(filtered, "filter", (*where,), operand, len(source))
    select, windows = selects[:1], selects[1:]
    body = [*select, *tables, *where, *group]
    if having and group:
        yield Step(head + text([*body, *windows]), "project", (*select, *windows, *group), operand)
        yield Step(head + text([*body, *having, *windows]), "filter", (*having,), operand)
    else:
        numbers = [*select, *windows, *group, *having]
        effect: Effect = "collapse" if having else "project"
        yield Step(head + text([*body, *having, *windows]), effect, tuple(numbers), operand)


def _last_steps(sql: str, clauses: Sequence[Clause], numbers: Sequence[int]) -> Iterator[Step]:
    for number in numbers:
        clause = clauses[number]
        effect: Effect = "order" if clause.kind == "ORDER BY" else "limit"
        yield Step(sql[: clause.stop], effect, (number,))


def _aliases(sql: str, operand: int) -> Mapping[str, str]:
    """Map the select aliases of an operand, but those that name a table too, to their text."""
    aliases = select_aliases(sql, operand)
    tables = {name for source in sources(sql) for name in (source.table, source.alias)}
    return {name: text for name, text in aliases.items() if name not in tables}


def _of_kinds(clauses: Sequence[Clause], operand: int, *kinds: ClauseKind) -> list[int]:
    return [n for n, c in enumerate(clauses) if c.operand == operand and c.kind in kinds]


def _is_outer(chain: Sequence[Step]) -> bool:
    return chain[0].effect == "compound"


def _cut(table: Table, limit: int) -> Table:
    return table if len(table.rows) <= limit else Table(table.columns, table.rows[:limit])
