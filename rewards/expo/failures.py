"""Which clauses make a query fail: SQLite's message, traced to its root (EXPO-SQL, 3.2.3, A.3).

The message names an element, looked for among the tokens of the text, or a place. A message of
another kind is traced to the place that SQLite names with it.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from rewards.execution import KnownColumns
from rewards.expo.attribution import with_items
from rewards.expo.clauses import WHOLE, Clause, clause_at, scan_clauses
from sqlenv.sql.extraction import sources
from sqlenv.sql.lexer import Token, tokenize
from sqlenv.types import Result, SqlError

ClauseNumbers = set[int]

# No clause ends with one of these words; with `*` one does, as in `SELECT *`.
_OPEN_ENDS = (
    *("and", "or", "not", "is", "like", "in", "between", "distinct"),
    *("case", "when", "then", "else"),
    *("select", "from", "join", "as", "using", "on", "where", "having", "by", "limit", "offset"),
)


@dataclass(frozen=True, slots=True)
class _Failure:
    """A query that failed: `place` is the character where SQLite stopped, where it says so, and
    `at` numbers its clause.
    """

    sql: str
    clauses: Sequence[Clause]
    place: int | None
    at: ClauseNumbers
    tables: Mapping[str, frozenset[str]]
    traced: bool

    def holding(self, places: Iterable[int]) -> ClauseNumbers:
        """Number the clauses that hold some characters."""
        return {clause_at(self.clauses, place) for place in places}

    @property
    def nested(self) -> ClauseNumbers:
        """Number the clauses that hold a nested query."""
        words = tokenize(self.sql)
        return self.holding(w.start for w in words if w.depth and w.is_word("select", "values"))

    def of_kinds(self, *kinds: str) -> ClauseNumbers:
        """Number the clauses of some kinds."""
        return {n for n, clause in enumerate(self.clauses) if clause.kind in kinds}

    def beside(self, numbers: ClauseNumbers, others: ClauseNumbers) -> ClauseNumbers:
        """Keep those of `others` that share a SELECT with one of `numbers`."""
        operands = {self.clauses[n].operand for n in numbers}
        return {n for n in others if WHOLE in operands or self.clauses[n].operand in operands}

    def mentioning(self, name: str, qualifier: str = "", *, calls: bool = False) -> ClauseNumbers:
        """Number the clauses that have a name with a qualifier, or without one."""
        none = Token("sign", "", 0, 0, 0)
        words = (none, none, *tokenize(self.sql), none)
        return self.holding(
            token.start
            for two, one, token, after in zip(words, words[1:], words[2:], words[3:], strict=False)
            if token.is_name(name) and after.is_sign("(") == calls
            if (two.is_name(qualifier) if one.is_sign(".") else not qualifier)
        )

    def using(self, qualifier: str, name: str) -> ClauseNumbers:
        """Number the clauses of the error's SELECT that use a column, and where SQLite stopped."""
        found = self.mentioning(name, qualifier)
        if not self.at:
            return found
        return self.at | (self.beside(self.at, found) if self.traced else set())

    def owners(self, name: str) -> set[str]:
        """Name the tables of the database that have a column, all in lower case."""
        return {table for table, columns in self.tables.items() if name in columns}


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
    place, at = None, set[int]()
    if result.offset >= 0:  # SQLite counts UTF-8 bytes
        place = len(sql.encode()[: result.offset].decode(errors="ignore"))
        at = {clause_at(clauses, place)}
    failure = _Failure(sql, clauses, place, at, columns.tables if columns else {}, traced)
    matches = ((pattern.fullmatch(result.message), find) for pattern, find in _FINDERS)
    found = next((find(failure, match["element"]) for match, find in matches if match), failure.at)
    return frozenset(found) or everything


def _no_column(failure: _Failure, element: str) -> ClauseNumbers:
    """Blame the clauses that use a column, and those that fail to provide it."""
    qualifier, name = _parts(element)
    using = failure.using(qualifier, name)
    if not failure.traced:
        return using
    reading = failure.beside(using, failure.of_kinds("FROM", "JOIN"))
    read = sources(failure.sql)
    if qualifier:
        places = failure.holding(source.start for source in read if source.alias == qualifier)
        defining = failure.beside(using, places) or reading
        return {*with_items(failure.sql, frozenset(using | defining))}
    owners = failure.owners(name)
    is_elsewhere = owners and owners.isdisjoint(source.table for source in read)
    return using | reading if is_elsewhere else using


def _ambiguous(failure: _Failure, element: str) -> ClauseNumbers:
    """Blame the clauses that use a column without its table, and the JOINs that add another one."""
    qualifier, name = _parts(element)
    using = failure.using(qualifier, name)
    if not failure.traced:
        return using
    owners = failure.owners(name)
    bringing = failure.holding(s.start for s in sources(failure.sql) if s.table in owners)
    words = [token.start for token in tokenize(failure.sql) if token.is_name(name)]
    joins = failure.of_kinds("JOIN") & (bringing | failure.holding(words))
    return using | failure.beside(using, joins)


def _no_table(failure: _Failure, element: str) -> ClauseNumbers:
    """Blame the clauses that read a table, else those that have its name."""
    _, name = _parts(element)
    reading = failure.holding(s.start for s in sources(failure.sql) if s.table == name)
    return reading or failure.holding(t.start for t in tokenize(failure.sql) if t.is_name(name))


def _alias(failure: _Failure, element: str) -> ClauseNumbers:
    """Blame the clauses that use an alias where it may not stand."""
    using = failure.mentioning(element.lower())
    return failure.at or using - failure.of_kinds("SELECT", "ORDER BY") or using


def _syntax(failure: _Failure, element: str) -> ClauseNumbers:
    """Blame the clause where the text stops making sense, or the one before that is unfinished.

    A comma, an operator or `WHERE` in front of the next clause is the fault of the clause that it
    stands in.
    """
    at = failure.sql.rfind(element) if failure.place is None else failure.place
    if at < 0:
        return set()
    before = next((token for token in reversed(tokenize(failure.sql)) if token.end <= at), None)
    if before and (before.text != ")" if before.kind == "sign" else before.is_word(*_OPEN_ENDS)):
        at = before.start
    return failure.holding([at])


def _parts(element: str) -> tuple[str, str]:
    """Take an element apart: its qualifier and its name."""
    *_, qualifier, name = ["", *(part.strip('"`[]') for part in element.lower().split("."))]
    return qualifier, name


Finder = Callable[[_Failure, str], ClauseNumbers]
"""Numbers the clauses to blame, from the element that the message names."""
_FINDERS: tuple[tuple[re.Pattern[str], Finder], ...] = tuple(
    (re.compile(pattern, re.DOTALL), find)
    for pattern, find in (
        # `"x"` where strings in double quotes are off comes with advice.
        (r"no such column: (?P<element>.+?)(?: - should this be .*)?", _no_column),
        (r"ambiguous column name: (?P<element>.+)", _ambiguous),
        (r"no such table: (?P<element>.+)", _no_table),
        (r"misuse of aliased (?:aggregate|identifier|window function) (?P<element>.+)", _alias),
        (
            r"(?:misuse of (?:aggregate(?: function|:)|window function)|no such function:"
            r"|wrong number of arguments to function) (?P<element>.+?)(?:\(\))?",
            lambda failure, name: failure.at or failure.mentioning(name.lower(), calls=True),
        ),
        (r'(?:near|unrecognized token:) "(?P<element>.*)"(?:: syntax error)?', _syntax),
        (r"(?P<element>incomplete input)", lambda failure, _: {len(failure.clauses) - 1}),
        (
            r"(?:\d+\w+ |too many terms in |aggregate functions are not allowed in the )?"
            r"(?P<element>ORDER BY|GROUP BY|HAVING|LIMIT) (?:term|clause).*",
            lambda failure, kind: failure.at or failure.of_kinds(kind) or failure.nested,
        ),
        (r"(?P<element>sub-select) returns .*", lambda failure, _: failure.at or failure.nested),
        (
            r"(?P<element>SELECT)s to the left and right of .+ do not have the same.*",
            lambda failure, kind: failure.of_kinds(kind),
        ),
    )
)
