"""Which clauses make a query fail: SQLite's message, traced to its root (EXPO-SQL, 3.2.3, A.3).

The message names an element or a place; a table of patterns says who is to blame. Where SQLite
tells no place (an offset of -1), every clause that mentions the element is taken.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass
from itertools import pairwise

from rewards.execution import KnownColumns
from rewards.expo.attributes import select_aliases
from rewards.expo.clauses import (
    OPERATORS,
    WHOLE,
    Clause,
    ClauseKind,
    clause_at,
    item_name,
    scan_clauses,
)
from rewards.expo.names import (
    is_query_start,
    is_unfinished,
    nested,
    references,
    row_values,
    sources,
)
from sqlenv.sql.lexer import tokenize
from sqlenv.types import Result, SqlError

ClauseNumbers = set[int]


@dataclass(frozen=True, slots=True)
class _Failure:
    """A query that failed: `place` is the character where SQLite stopped, where it says so."""

    sql: str
    clauses: Sequence[Clause]
    place: int | None
    columns: KnownColumns | None
    traced: bool

    @property
    def at(self) -> int | None:
        """Number the clause where SQLite stopped."""
        return None if self.place is None else clause_at(self.clauses, self.place)

    def holding(self, places: Iterable[int]) -> ClauseNumbers:
        """Number the clauses that hold some characters."""
        return {clause_at(self.clauses, place) for place in places}

    def of_kinds(self, *kinds: str) -> ClauseNumbers:
        """Number the clauses of some kinds."""
        return {n for n, clause in enumerate(self.clauses) if clause.kind in kinds}

    def near(self, numbers: ClauseNumbers) -> ClauseNumbers:
        """Keep the clauses of the error's SELECT: operands may use the same aliases."""
        if self.at is None:
            return numbers
        here = self.clauses[self.at].operand
        return {n for n in numbers if here in (WHOLE, self.clauses[n].operand)} | {self.at}

    def beside(self, numbers: ClauseNumbers, others: ClauseNumbers) -> ClauseNumbers:
        """Keep those of `others` that share a SELECT with one of `numbers`."""
        operands = {self.clauses[n].operand for n in numbers}
        if WHOLE in operands:
            return others
        return {n for n in others if self.clauses[n].operand in operands}

    def owners(self, name: str) -> set[str]:
        """Name the tables of the database that have a column, all in lower case."""
        tables = self.columns.tables if self.columns else {}
        return {table for table, columns in tables.items() if name in columns}

    def place_or(self, numbers: ClauseNumbers) -> ClauseNumbers:
        """Number the clause where SQLite stopped, else those given."""
        return numbers if self.at is None else {self.at}


Finder = Callable[[_Failure, str], ClauseNumbers]
"""Numbers the clauses to blame, from the element that the message names."""


def trace_error(
    sql: str, result: Result, *, columns: KnownColumns | None = None, traced: bool = True
) -> frozenset[int]:
    """Number the clauses to blame for a query that gave no table.

    All of them where the message is of no known kind, or points at nothing.
    """
    clauses = scan_clauses(sql)
    everything = frozenset(range(len(clauses)))
    if not isinstance(result, SqlError) or not clauses:
        return everything
    failure = _Failure(sql, clauses, _locate(sql, result.offset), columns, traced)
    for pattern, find in _FINDERS:
        match = pattern.fullmatch(result.message)
        if match:
            return frozenset(find(failure, match.groupdict().get("element", ""))) or everything
    return everything


def _locate(sql: str, offset: int) -> int | None:
    """Find the character at a byte offset; SQLite counts UTF-8 bytes."""
    return None if offset < 0 else len(sql.encode()[:offset].decode(errors="ignore"))


def _no_column(failure: _Failure, element: str) -> ClauseNumbers:
    """Blame the clauses that use a column, and those that fail to provide it."""
    *_, qualifier, name = ["", *_parts(element)]
    using = failure.near(_using(failure, qualifier, name))
    if not failure.traced:
        return failure.place_or(using)
    return using | (
        _defining(failure, qualifier, using) if qualifier else _lacking(failure, name, using)
    )


def _defining(failure: _Failure, qualifier: str, using: ClauseNumbers) -> ClauseNumbers:
    """Number the clauses that define an alias, else all that could; a CTE's own item too."""
    found = [source for source in sources(failure.sql) if source.alias == qualifier]
    defining = failure.beside(using, failure.holding(source.start for source in found))
    if not defining:
        return failure.beside(using, failure.of_kinds("FROM", "JOIN"))
    tables = {source.table for source in found}
    items = {n: failure.clauses[n].text(failure.sql) for n in failure.of_kinds("WITH")}
    return defining | {number for number, text in items.items() if item_name(text) in tables}


def _lacking(failure: _Failure, name: str, using: ClauseNumbers) -> ClauseNumbers:
    """Number FROM and JOINs where some table has the column, and no table of the query does."""
    owners = failure.owners(name)
    read = {source.table for source in sources(failure.sql)}
    if not owners or owners & read:
        return set()
    return failure.beside(using, failure.of_kinds("FROM", "JOIN"))


def _ambiguous(failure: _Failure, element: str) -> ClauseNumbers:
    """Blame the clauses that use a column bare, and the JOINs that bring it in again."""
    *_, qualifier, name = ["", *_parts(element)]
    using = failure.near(_using(failure, qualifier, name))
    if not failure.traced:
        return failure.place_or(using)
    owners = failure.owners(name)
    bringing = failure.holding(s.start for s in sources(failure.sql) if s.table in owners)
    mentioning = failure.holding(r.start for r in references(failure.sql) if r.name == name)
    joins = failure.of_kinds("JOIN") & (bringing | mentioning)
    return using | failure.beside(using, joins)


def _no_table(failure: _Failure, element: str) -> ClauseNumbers:
    """Blame the clauses that read a table; of `t.*` without `t`, that and those to define it."""
    *_, name = _parts(element)
    reading = failure.holding(s.start for s in sources(failure.sql) if s.table == name)
    if reading:
        return reading
    using = failure.holding(t.start for t in tokenize(failure.sql) if t.is_name(name))
    return using | _defining(failure, name, using) if failure.traced else using


def _function(failure: _Failure, element: str) -> ClauseNumbers:
    name = element.lower()
    calls = (r.start for r in references(failure.sql) if r.is_call and r.name == name)
    return failure.place_or(failure.holding(calls))


def _aggregate(failure: _Failure, element: str) -> ClauseNumbers:
    """Blame the clause that calls an aggregate, or uses the alias of one, where none may stand."""
    found = _function(failure, element)
    for number in found & failure.of_kinds("SELECT") if failure.traced else ():
        aliases = select_aliases(failure.sql, failure.clauses[number].operand)
        bare = (r for r in references(failure.sql) if not r.qualifier and not r.is_call)
        using = failure.holding(r.start for r in bare if r.name in aliases)
        using &= failure.of_kinds("FROM", "JOIN", "WHERE", "GROUP BY")
        found = failure.beside({number}, using) or found
    return found


def _alias(failure: _Failure, element: str, *legal: ClauseKind) -> ClauseNumbers:
    """Blame the clauses that use an alias where it may not stand."""
    using = _using(failure, "", element.lower())
    return failure.place_or(using - failure.of_kinds("SELECT", *legal) or using)


def _syntax(failure: _Failure, element: str) -> ClauseNumbers:
    """Blame the clause where the text stops making sense, or the one before that is unfinished.

    A comma, an operator or `WHERE` in front of the next clause is the fault of the clause that it
    stands in.
    """
    at = failure.place
    if at is None:
        at = failure.sql.rfind(element)
    if at < 0:
        return set()
    before = next((t for t in reversed(tokenize(failure.sql)) if t.end <= at), None)
    return failure.holding([before.start if before and is_unfinished(before) else at])


def _named_kind(failure: _Failure, element: str) -> ClauseNumbers:
    return failure.place_or(failure.of_kinds(element) | _with_nested(failure, element))


def _early(failure: _Failure, element: str) -> ClauseNumbers:
    """Number the clauses of a kind that a set operator follows; nested ones as their holders."""
    operators = [t.start for t in tokenize(failure.sql) if not t.depth and t.is_word(*OPERATORS)]
    last = operators[-1] if operators else 0
    followed = {n for n in failure.of_kinds(element) if failure.clauses[n].start < last}
    return followed | _with_nested(failure, element)


def _with_nested(failure: _Failure, element: str) -> ClauseNumbers:
    opener, *_ = element.lower().split()
    return failure.holding(nested(failure.sql, opener))


def _operands(failure: _Failure, element: str) -> ClauseNumbers:
    """Number the SELECTs of a set operation; of a nested one the clauses that hold it."""
    operator = element.lower().split()[0]
    words = [token for token in tokenize(failure.sql) if token.is_word(operator)]
    own = failure.of_kinds("SELECT") if any(not word.depth for word in words) else set()
    return own | failure.holding(word.start for word in words if word.depth)


def _subqueries(failure: _Failure, _element: str) -> ClauseNumbers:
    starts = (t.start for t in tokenize(failure.sql) if t.depth and is_query_start(t))
    return failure.place_or(failure.holding(starts))


def _mismatch(failure: _Failure, _element: str) -> ClauseNumbers:
    """Blame a LIMIT that is no number, of which SQLite says so in queries; else WHERE and JOINs."""
    words = tokenize(failure.sql)
    odd = failure.holding(
        a.start for a, b in pairwise(words) if a.is_word("limit", "offset") and b.kind != "number"
    )
    return odd or failure.of_kinds("WHERE", "JOIN")


def _using(failure: _Failure, qualifier: str, name: str) -> ClauseNumbers:
    meant = (qualifier, name, False)
    mentions = references(failure.sql)
    return failure.holding(m.start for m in mentions if (m.qualifier, m.name, m.is_call) == meant)


def _parts(element: str) -> list[str]:
    return [part.strip('"`[]') for part in element.lower().split(".")][-2:]


_ALIASED = "misuse of aliased"
_CLAUSE = r"(?P<element>ORDER BY|GROUP BY|HAVING|LIMIT)"
_FINDERS: tuple[tuple[re.Pattern[str], Finder], ...] = tuple(
    (re.compile(pattern, re.DOTALL), find)
    for pattern, find in (
        # `"x"` where strings in double quotes are off comes with advice.
        (r"no such column: (?P<element>.+?)(?: - should this be .*)?", _no_column),
        (r"ambiguous column name: (?P<element>.+)", _ambiguous),
        (r"no such table: (?P<element>.+)", _no_table),
        (r"misuse of aggregate(?: function|:) (?P<element>.+?)\(\)", _aggregate),
        (
            r"(?:misuse of window function|no such function:|wrong number of arguments to function)"
            r" (?P<element>.+?)(?:\(\))?",
            _function,
        ),
        (rf"{_ALIASED} (?:aggregate|identifier) (?P<element>.+)", _alias),
        (
            rf"{_ALIASED} window function (?P<element>.+)",
            lambda failure, alias: _alias(failure, alias, "ORDER BY"),
        ),
        (r'(?:near|unrecognized token:) "(?P<element>.*)"(?:: syntax error)?', _syntax),
        (r"incomplete input", lambda failure, _: {len(failure.clauses) - 1}),
        (rf"{_CLAUSE} clause should come after .*", _early),
        (
            r"(?:\d+\w+ |too many terms in |aggregate functions are not allowed in the )?"
            rf"{_CLAUSE} (?:term|clause).*",
            _named_kind,
        ),
        (r"SELECTs to the left and right of (?P<element>.+) do not have the same.*", _operands),
        (r"sub-select returns \d+ columns.*", _subqueries),
        (
            r"row value misused",  # several values in brackets stand for one
            lambda failure, _: failure.place_or(failure.holding(row_values(failure.sql))),
        ),
        (r"datatype mismatch", _mismatch),
        (r".* constraint failed.*", lambda failure, _: failure.of_kinds("WHERE", "JOIN")),
    )
)
