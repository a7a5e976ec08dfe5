"""Expressions in normal form: what the diagnostic tree compares (Progress-SQL, appendix D)."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sqlglot import exp

from rewards.execution import KnownColumns
from sqlenv.sql import extraction

Features = frozenset[str]
SUBQUERY = "<sub>"


class Writer:
    """Writes the expressions of one SELECT as calls; subqueries are handed to `nest`.

    Nobody reads the texts: two are the same where the expressions are. `aggregate` tells whether an
    aggregate was written so far, those of windows aside; `sources` maps each alias to its base
    table, None for a CTE or derived table; `outer` is the SELECT around.
    """

    def __init__(self, outer: Writer | None, schema: KnownColumns | None) -> None:
        self.aggregate = False
        self.sources: dict[str, str | None] = {}
        self.outer, self.schema = outer, schema
        self._known = schema.tables if schema else {}

    def nest(self, query: exp.Expression) -> None:
        """Take a subquery."""
        raise NotImplementedError

    def _outward(self) -> Iterator[Writer]:
        """Yield this SELECT and those around it."""
        one: Writer | None = self
        while one is not None:
            yield one
            one = one.outer

    def text(self, node: exp.Expression) -> str:
        """Write an expression in normal form."""
        self.aggregate |= isinstance(node, exp.AggFunc) or _is_total(node)
        text = _WRITERS.get(type(node), Writer._call)(self, node)
        return f"not({text})" if node.args.get("negate") else text

    def qualified(self, alias: str, name: str) -> str:
        """Write a column of one of the sources, as USING names it."""
        table = self.sources.get(alias)
        return f"{table}.{name}" if table else name

    def nearest(self, name: str, right: str) -> str | None:
        """Find the last source before another that has such a column, by the schema."""
        aliases = list(self.sources)
        before = aliases[: aliases.index(right)]
        return next((alias for alias in reversed(before) if name in self.columns(alias)), None)

    def columns(self, alias: str) -> Features:
        """Name the columns of a source; none where it is no table of the schema."""
        table = self.sources.get(alias)
        return self._known.get(table, frozenset()) if table else frozenset()

    def owners(self, name: str) -> list[str]:
        """List the base tables with such a column in the nearest SELECT that has any."""
        for one in self._outward():
            tables = {table for table in one.sources.values() if table}
            owners = [t for t in tables if name in self._known.get(t, ())]
            if owners:
                return owners
        return []

    def _column(self, column: exp.Expression) -> str:
        name = "*" if isinstance(column.this, exp.Star) else column.name.lower()
        qualifier = column.args.get("table")
        if qualifier is not None:
            table = self._base_table(qualifier.name.lower())
        else:
            owners = self.owners(name)
            if not owners and column.this.args.get("quoted") and self._knows_all_columns():
                return "?"  # SQLite takes "x" for text where no column has that name
            table = owners[0] if len(owners) == 1 else self._only_table(owners)
        return f"{table}.{name}" if table else name

    def _base_table(self, alias: str) -> str | None:
        return next((one.sources[alias] for one in self._outward() if alias in one.sources), None)

    def _only_table(self, owners: list[str]) -> str | None:
        if owners or len(self.sources) != 1:
            return None
        return next(iter(self.sources.values()))

    def _knows_all_columns(self) -> bool:
        """Tell whether the schema has every source in reach, so that no other column can be."""
        return bool(self._known) and all(
            table in self._known for one in self._outward() for table in one.sources.values()
        )

    def _call(self, node: exp.Expression, key: str = "") -> str:
        parts: list[str] = []
        for value in node.args.values():
            for one in value if isinstance(value, list) else (value,):
                if isinstance(one, exp.Expression):
                    parts.append(self.text(one))
                elif isinstance(one, str):
                    parts.append(one.lower())
        return f"{key or node.key}({','.join(parts)})"

    def _subquery(self, node: exp.Expression) -> str:
        self.nest(node)
        return SUBQUERY

    def _negative(self, node: exp.Expression) -> str:
        inner = self.text(node.this)
        return "?" if inner == "?" else f"-{inner}"

    def _comparison(self, node: exp.Expression) -> str:
        sides, key = (node.this, node.expression), node.key
        first, second = map(self.text, sides)
        if first == "?" and second != "?":
            return f"{_FLIPPED[key]}({second},{first})"
        if _FLIPPED[key] == key and all(isinstance(side, exp.Column) for side in sides):
            first, second = sorted((first, second), key=lambda text: (text == "?", text))
        return f"{key}({first},{second})"

    def _in(self, node: exp.Expression) -> str:
        subject = self.text(node.this)
        query = node.args.get("query")
        if query is not None:
            return f"in({subject},{self.text(query)})"
        field = node.args.get("field")
        listed = {self.text(item) for item in ([field] if field else node.expressions)}
        return f"in({subject},({','.join(sorted(listed))}))"

    def _connected(self, node: exp.Expression) -> str:
        kind = exp.Or if isinstance(node, exp.Or) else exp.And
        arms = sorted(self.text(arm) for arm in extraction.split(node, kind))
        return f"{node.key}({','.join(arms)})"

    def _window(self, node: exp.Expression) -> str:
        outside = self.aggregate
        text = self._call(node)
        self.aggregate = outside
        return text

    def _order_item(self, node: exp.Expression) -> str:
        return f"{self.text(node.this)} {'desc' if node.args.get('desc') else 'asc'}"


def _is_total(node: exp.Expression) -> bool:
    """Tell the aggregate of SQLite that sqlglot does not know."""
    return isinstance(node, exp.Anonymous) and node.name.lower() == "total"


_FLIPPED = {"eq": "eq", "neq": "neq", "gt": "lt", "gte": "lte", "lt": "gt", "lte": "gte"}
"""Each comparison, and what it is with its sides exchanged."""
_COMPARISONS = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE)
_QUERIES = (exp.Select, exp.Union, exp.Except, exp.Intersect, exp.Subquery)
_WRITERS: dict[type, Callable[[Writer, exp.Expression], str]] = {
    exp.Column: Writer._column,
    exp.DataType: lambda _, node: str(node.this).rpartition(".")[2].lower(),
    exp.Neg: Writer._negative,
    exp.In: Writer._in,
    exp.And: Writer._connected,
    exp.Or: Writer._connected,
    exp.Window: Writer._window,
    exp.Ordered: Writer._order_item,
    exp.NullSafeEQ: lambda writer, node: writer._call(node, "is"),
    exp.NullSafeNEQ: lambda writer, node: f"not({writer._call(node, 'is')})",
    **dict.fromkeys((exp.Literal, exp.Boolean), lambda _writer, _node: "?"),
    **dict.fromkeys((exp.Paren, exp.Alias), lambda writer, node: writer.text(node.this)),
    **dict.fromkeys(_QUERIES, Writer._subquery),
    **dict.fromkeys(_COMPARISONS, Writer._comparison),
}
