"""Which table a column of a query belongs to."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from sqlglot import exp

from sqlenv.schema.reading import ColumnKey
from sqlenv.sql.extraction import parse

ColumnNames = Mapping[str, tuple[str, ...]]
"""Each table's columns, both in lower case."""


def read_tree(sql: str, columns: ColumnNames) -> exp.Expression | None:
    """Parse a query, into a tree of the caller's own; None for what `parse` does not read.

    A name in double quotes that is no column's is text, as SQLite takes it.
    """
    tree = parse(sql)
    if tree is None:
        return None
    tree = tree.copy()
    known = {name for names in columns.values() for name in names}
    known |= {alias.alias.lower() for alias in tree.find_all(exp.Alias)}
    for column in list(tree.find_all(exp.Column)):
        is_quoted = column.this.args.get("quoted") and not column.table
        if is_quoted and column.name.lower() not in known:
            column.replace(exp.Literal.string(column.name))
    return tree


def column_key(column: exp.Column, columns: ColumnNames) -> ColumnKey | None:
    """Find the column that a query means, in its own FROM clause or in one around it: its names in
    lower case, or None.
    """
    name, alias = column.name.lower(), column.text("table").lower()
    for table in _tables_around(column):
        own = table.name.lower()
        is_meant = alias in (table.alias.lower(), own) if alias else name in columns.get(own, ())
        if is_meant:
            return (own, name) if name in columns.get(own, ()) else None
    return None


def _tables_around(node: exp.Expression) -> Iterator[exp.Table]:
    """List the tables that the query around a node reads, from the inside out."""
    select = node.find_ancestor(exp.Select)
    while select is not None:
        yield from select.find_all(exp.Table)
        select = select.find_ancestor(exp.Select)
