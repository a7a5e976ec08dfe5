"""Which attributes a query puts out: its columns, aliases resolved (EXPO-SQL, tables 12 and 15).

An alias says nothing of what is right: `name AS n` is the attribute `name`, also where a subquery
or a WITH item gave the alias. A query that does not parse keeps the names of its result.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sqlglot import exp

from rewards.expo.clauses import scan_clauses
from sqlenv.sql.extraction import Query, bare, ctes, from_table, joins, parse
from sqlenv.types import Table

COMPUTED = "()"
"""The attribute of every output that is no column: aggregates, arithmetic, constants."""

_MAX_DEPTH = 16  # subqueries within subqueries that aliases are followed into
_READ = ("SELECT", "FROM", "JOIN")  # the clauses that names are read from
_Items = Mapping[str, exp.Expression]


def with_attributes(sql: str, table: Table, *, operand: int = 0, is_star: bool = False) -> Table:
    """Name the columns of a query's result by their attributes, in lower case.

    They are those of one operand of a set operation (`is_star`: as if it selected `*`).
    """
    names = [name.lower() for name in table.columns]
    select = _select(sql, operand)
    if select is None:
        return Table(tuple(names), table.rows)
    finder, items = _Finder(), _items(select)
    outputs = [exp.Star()] if is_star else select.expressions
    given = [finder.attribute(select, item, items, 0) for item in outputs]
    stars = [at for at, name in enumerate(given) if name == "*"]
    head, tail = (given[: stars[0]], given[stars[-1] + 1 :]) if stars else (given, [])
    # Between two stars no place is known: names are looked up there.
    starred = names[len(head) : len(names) - len(tail)]
    if len(head) + len(starred) + len(tail) == len(names) and bool(starred) <= bool(stars):
        starred = [finder.origin(select, ("", name), items, 0) or name for name in starred]
        names = [*head, *starred, *tail]
    return Table(tuple(names), table.rows)


def is_computed(sql: str, operand: int | None = None) -> bool:
    """Tell whether an operand of a query, or each of them, computes all of its outputs."""
    every = {clause.operand for clause in scan_clauses(sql) if clause.kind == "SELECT"}
    selects = [_select(sql, number) for number in (every if operand is None else {operand})]
    return bool(selects) and all(
        select and not any(map(_column, select.expressions)) for select in selects
    )


def select_aliases(sql: str, operand: int) -> Mapping[str, str]:
    """Map the aliases that a SELECT gives to the text of their expressions."""
    select = _select(sql, operand)
    return {
        item.alias.lower(): item.this.sql("sqlite")
        for item in (select.expressions if select else ())
        if isinstance(item, exp.Alias)
    }


def _select(sql: str, operand: int) -> exp.Select | None:
    """Parse a SELECT of a query, and of its other clauses only those that can rename columns.

    To parse a new text is most of what a reward costs: this one is short, and queries that differ
    in a condition share it.
    """
    clauses = scan_clauses(sql)
    own = [
        clause.text(sql) for clause in clauses if clause.operand == operand and clause.kind in _READ
    ]
    items = [clause.stop for clause in clauses if clause.kind == "WITH"]
    head = sql[: items[-1]] if items else ""
    if not head and not any("(" in text for text in own[1:]):
        own = own[:1]
    query = parse("\n".join([head, *own]))
    return query if isinstance(query, exp.Select) else None


def _first(query: exp.Expression) -> exp.Expression:
    """Return the first operand of a set operation; the query itself of another."""
    node = bare(query)
    while isinstance(node, exp.SetOperation):
        node = bare(node.this)
    return node


def _items(query: exp.Expression) -> _Items:
    return {one.alias.lower(): one for one in ctes(query)} if isinstance(query, Query) else {}


def _column(output: exp.Expression) -> tuple[str, str] | None:
    """Return the qualifier and the name of an output that is a column, `*` for all."""
    node = bare(output.this if isinstance(output, exp.Alias) else output)
    if isinstance(node, exp.Star):
        return "", "*"
    return (node.table.lower(), node.name.lower()) if isinstance(node, exp.Column) else None


class _Finder:
    """Follows names into subqueries and WITH items, each query and name once."""

    def __init__(self) -> None:
        self._found: dict[tuple[int, str], str] = {}

    def attribute(
        self, select: exp.Select, output: exp.Expression, items: _Items, depth: int
    ) -> str:
        """Return what an output stands for; `*` for all columns."""
        column = _column(output)
        if column is None or column[1] == "*":
            return "*" if column else COMPUTED
        return self.origin(select, column, items, depth) or column[1]

    def origin(self, select: exp.Select, column: tuple[str, str], items: _Items, depth: int) -> str:
        """Return what a column of a subquery or WITH item stands for; "" for one of a table."""
        qualifier, name = column
        for source in _sources(select):
            query = source if isinstance(source, exp.Subquery) else items.get(source.name.lower())
            if query and qualifier in ("", source.alias_or_name.lower()) and depth < _MAX_DEPTH:
                found = self._inside(query, name, items, depth + 1)
                if found:
                    return found
        return ""

    def _inside(self, query: exp.Expression, name: str, items: _Items, depth: int) -> str:
        key = (id(query), name)
        if key in self._found:
            return self._found[key]
        self._found[key] = ""  # for a WITH item that reads itself
        select = _first(query.this)
        if not isinstance(select, exp.Select):
            return ""
        items, given = {**items, **_items(bare(query.this))}, query.alias_column_names
        for at, output in enumerate(select.expressions):
            called = given[at] if at < len(given) else output.alias_or_name
            found, column = "", _column(output)
            if column and column[1] == "*":
                found = self.origin(select, (column[0], name), items, depth)
            elif called.lower() == name:
                found = self.attribute(select, output, items, depth)
            if found:
                self._found[key] = found
                break
        return self._found[key]


def _sources(select: exp.Select) -> Iterator[exp.Expression]:
    """Yield the tables and subqueries of FROM and JOINs, also those joined inside brackets."""
    found = [from_table(select), *(join.this for join in joins(select))]
    for source in found:  # which grows
        while isinstance(source, exp.Subquery | exp.Paren) and isinstance(source.this, exp.Table):
            source = source.this
            found += [join.this for join in joins(source)]
        if source is not None:
            yield source
