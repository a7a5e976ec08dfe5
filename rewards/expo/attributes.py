"""Which attributes a query puts out: its columns, aliases resolved (EXPO-SQL, tables 12 and 15).

An alias says nothing of what is right: `name AS n` is the attribute `name`, also where a subquery
or a WITH item gave the alias.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Literal

from rewards.expo.clauses import Clause, item_name, scan_clauses
from rewards.expo.names import Relation, SelectItem, select_items, sources
from sqlenv.sql.cache import cached
from sqlenv.sql.lexer import tokenize
from sqlenv.types import Table

COMPUTED = "()"
"""The attribute of every output that is no column: aggregates, arithmetic, constants."""

_MAX_DEPTH = 16  # subqueries within subqueries that aliases are followed into


@dataclass(frozen=True, slots=True)
class _NamedQuery:
    """A query that has a name in another one, and the names that it gives to its columns."""

    sql: str
    columns: tuple[str, ...] = ()


@dataclass(frozen=True, slots=True)
class _Select:
    """The first SELECT of a query.

    `sources` are what it reads, with the text of each subquery, or nothing where it reads tables
    alone; `is_computed` tells whether all SELECTs of the query compute all outputs.
    """

    outputs: tuple[SelectItem, ...]
    sources: tuple[tuple[Relation, _NamedQuery | None], ...]
    items: Mapping[str, _NamedQuery]
    is_computed: bool


def with_attributes(sql: str, table: Table) -> Table:
    """Name the columns of a query's result by their attributes; of a set operation by the first's.

    Columns are in lower case, those computed `COMPUTED`; where the select list cannot be told apart
    they keep their names.
    """
    names = [name.lower() for name in table.columns]
    return Table(tuple(_attributes(_read(sql, "outer"), names)), table.rows)


def is_computed(sql: str) -> bool:
    """Tell whether a query computes each of its outputs, in all of its SELECTs."""
    return _read(sql, "outer").is_computed


def _attributes(select: _Select, names: Sequence[str]) -> list[str]:
    outputs = select.outputs
    stars = [at for at, item in enumerate(outputs) if item.column == "*"]
    head = outputs[: stars[0]] if stars else outputs
    tail = outputs[stars[-1] + 1 :] if stars else ()
    # Between two stars no place is known: names are looked up there.
    starred = names[len(head) : len(names) - len(tail)]
    if len(head) + len(starred) + len(tail) != len(names) or bool(starred) > bool(stars):
        return list(names)
    finder = _Finder()
    items = select.items
    return [
        *(finder.attribute(select, item, items, 0) for item in head),
        *(finder.source_of(select, "", name, items, 0) or name for name in starred),
        *(finder.attribute(select, item, items, 0) for item in tail),
    ]


class _Finder:
    """Follows names into subqueries, each query and name once."""

    def __init__(self) -> None:
        self._found: dict[tuple[str, str], str] = {}

    def attribute(
        self, select: _Select, item: SelectItem, items: Mapping[str, _NamedQuery], depth: int
    ) -> str:
        """Return what an output stands for."""
        if not item.column:
            return COMPUTED
        return self.source_of(select, item.qualifier, item.column, items, depth) or item.column

    def source_of(
        self,
        select: _Select,
        qualifier: str,
        name: str,
        items: Mapping[str, _NamedQuery],
        depth: int,
    ) -> str:
        """Return what a column of a subquery or WITH item stands for; "" for one of a table."""
        for source, subquery in select.sources:
            query = subquery or items.get(source.table)
            if query and qualifier in ("", source.alias) and depth < _MAX_DEPTH:
                found = self._inside(query, name, items, depth + 1)
                if found:
                    return found
        return ""

    def _inside(
        self, query: _NamedQuery, name: str, items: Mapping[str, _NamedQuery], depth: int
    ) -> str:
        key = (query.sql, name)
        if key in self._found:
            return self._found[key]
        self._found[key] = ""  # for a WITH item that reads itself
        select = _read(query.sql, "inner")
        items = {**items, **select.items}
        for at, item in enumerate(select.outputs):
            given = query.columns[at] if at < len(query.columns) else item.alias or item.column
            found = ""
            if item.column == "*":
                found = self.source_of(select, item.qualifier, name, items, depth)
            elif given == name:
                found = self.attribute(select, item, items, depth)
            if found:
                self._found[key] = found
                break
        return self._found[key]


@cached(maxsize=1024)
def _read(sql: str, place: Literal["outer", "inner"]) -> _Select:
    clauses = scan_clauses(sql)
    selects = [clause for clause in clauses if _is_select(sql, clause)]
    if not selects:
        return _Select((), (), {}, is_computed=False)
    lists = [select_items(sql, clause.start, clause.stop) for clause in selects]
    return _Select(
        lists[0],
        tuple(_read_sources(sql, clauses, selects[0].operand, is_inner=place == "inner")),
        dict(_read_item(clause.text(sql)) for clause in clauses if clause.kind == "WITH"),
        is_computed=not any(item.column for items in lists for item in items),
    )


def _is_select(sql: str, clause: Clause) -> bool:
    is_window = sql[clause.start : clause.start + 6].lower() == "window"
    return clause.kind == "SELECT" and not is_window


def _read_sources(
    sql: str, clauses: Sequence[Clause], operand: int, *, is_inner: bool
) -> Iterator[tuple[Relation, _NamedQuery | None]]:
    """Yield what one SELECT reads, unless it can read nothing but tables."""
    own = [c for c in clauses if c.operand == operand and c.kind in ("FROM", "JOIN")]
    reads_items = is_inner or clauses[0].kind == "WITH"
    if not reads_items and all("(" not in clause.text(sql) for clause in own):
        return
    for source in sources(sql):
        if any(clause.start <= source.start < clause.stop for clause in own):
            inner = _NamedQuery(sql[source.start + 1 : source.end - 1])
            yield source, None if source.table else inner


def _read_item(text: str) -> tuple[str, _NamedQuery]:
    """Read `name (columns) AS (query)`, after WITH or a comma."""
    words = tokenize(text)
    opening = max((w.end for w in words if w.is_sign("(") and not w.depth), default=len(text))
    names = [w.text for w in words if w.depth == 1 and w.end < opening and w.kind != "sign"]
    closing = max((w.start for w in words if w.is_sign(")") and not w.depth), default=len(text))
    return item_name(text), _NamedQuery(text[opening:closing], tuple(names))
