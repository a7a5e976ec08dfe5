"""Expressions in normal form: what the diagnostic tree compares (Progress-SQL, appendix D)."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass

from sqlglot import exp

from rewards.execution import KnownColumns
from sqlenv.sql import extraction

Features = frozenset[str]
SUBQUERY = "<sub>"


@dataclass(frozen=True, slots=True)
class NameScope:
    """What names mean inside one SELECT.

    `sources` maps each alias to its base table, None for a CTE or derived table; `ctes` are those
    that this query may read.
    """

    parent: NameScope | None
    sources: Mapping[str, str | None]
    ctes: Features

    def outward(self) -> Iterator[NameScope]:
        """Yield this scope and those around it."""
        scope: NameScope | None = self
        while scope is not None:
            yield scope
            scope = scope.parent


class Writer:
    """Writes the expressions of one SELECT; subqueries are handed to `nest`.

    `aggregate` tells whether an aggregate was written so far, those of windows aside.
    """

    def __init__(
        self,
        scope: NameScope,
        schema: KnownColumns | None,
        nest: Callable[[exp.Expression], None],
    ) -> None:
        self.aggregate = False
        self._scope, self._nest = scope, nest
        self._known = schema.tables if schema else {}

    def text(self, node: exp.Expression) -> str:
        """Write an expression in normal form."""
        writer = _WRITERS.get(type(node))
        if writer is not None:
            return writer(self, node)
        if isinstance(node, exp.AggFunc):
            self.aggregate = True
        return f"{node.key}({self._arguments(node)})"

    def qualified(self, alias: str, name: str) -> str:
        """Write a column of one of the sources, as USING names it."""
        table = self._scope.sources.get(alias)
        return f"{table}.{name}" if table else name

    def nearest(self, name: str, right: str) -> str | None:
        """Find the last source before another that has such a column, by the schema."""
        aliases = list(self._scope.sources)
        before = aliases[: aliases.index(right)]
        return next((alias for alias in reversed(before) if name in self.columns(alias)), None)

    def columns(self, alias: str) -> Features:
        """Name the columns of a source; none where it is no table of the schema."""
        table = self._scope.sources.get(alias)
        return self._known.get(table, frozenset()) if table else frozenset()

    def owners(self, name: str) -> list[str]:
        """List the base tables with such a column in the nearest scope that has any."""
        for scope in self._scope.outward():
            tables = {table for table in scope.sources.values() if table}
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
        for scope in self._scope.outward():
            if alias in scope.sources:
                return scope.sources[alias]
        return None

    def _only_table(self, owners: list[str]) -> str | None:
        if owners or len(self._scope.sources) != 1:
            return None
        return next(iter(self._scope.sources.values()))

    def _knows_all_columns(self) -> bool:
        """Tell whether the schema has every source in reach, so that no other column can be."""
        return bool(self._known) and all(
            table in self._known
            for scope in self._scope.outward()
            for table in scope.sources.values()
        )

    def _arguments(self, node: exp.Expression) -> str:
        parts: list[str] = []
        for value in node.args.values():
            for one in value if isinstance(value, list) else (value,):
                if isinstance(one, exp.Expression):
                    parts.append(self.text(one))
                elif isinstance(one, str):
                    parts.append(one.lower())
        return ",".join(parts)

    def _subquery(self, node: exp.Expression) -> str:
        self._nest(node)
        return SUBQUERY

    def _negative(self, node: exp.Expression) -> str:
        inner = self.text(node.this)
        return "?" if inner == "?" else f"-{inner}"

    def _formatted(self, node: exp.Expression) -> str:
        text = _FORMS[type(node)].format(*map(self.text, node.iter_expressions()))
        return f"not ({text})" if node.args.get("negate") else text

    def _comparison(self, node: exp.Expression) -> str:
        sides, sign = (node.this, node.expression), _COMPARISONS[type(node)]
        first, second = map(self.text, sides)
        if first == "?" and second != "?":
            return f"{second}{_FLIPPED.get(sign, sign)}{first}"
        if sign in ("=", "!=") and all(isinstance(side, exp.Column) for side in sides):
            first, second = sorted((first, second), key=lambda text: (text == "?", text))
        return f"{first}{sign}{second}"

    def _in(self, node: exp.Expression) -> str:
        subject = self.text(node.this)
        query = node.args.get("query")
        if query is not None:
            return f"{subject} in {self.text(query)}"
        field = node.args.get("field")
        listed = {self.text(item) for item in ([field] if field else node.expressions)}
        return f"{subject} in ({','.join(sorted(listed))})"

    def _connected(self, node: exp.Expression) -> str:
        kind = exp.Or if isinstance(node, exp.Or) else exp.And
        arms = sorted(self.text(arm) for arm in extraction.split(node, kind))
        return f"({f' {node.key} '.join(arms)})"

    def _anonymous(self, node: exp.Expression) -> str:
        name = node.name.lower()
        self.aggregate |= name in _OTHER_AGGREGATES
        return f"{name}({','.join(self.text(item) for item in node.expressions)})"

    def _window(self, node: exp.Expression) -> str:
        outside = self.aggregate
        text = f"window({self._arguments(node)})"
        self.aggregate = outside
        return text

    def _order_item(self, node: exp.Expression) -> str:
        return f"{self.text(node.this)} {'desc' if node.args.get('desc') else 'asc'}"


_OTHER_AGGREGATES = frozenset({"total"})
_COMPARISONS: dict[type, str] = {
    exp.EQ: "=",
    exp.NEQ: "!=",
    exp.GT: ">",
    exp.GTE: ">=",
    exp.LT: "<",
    exp.LTE: "<=",
}
_FLIPPED = {">": "<", ">=": "<=", "<": ">", "<=": ">="}
_FORMS: dict[type, str] = {
    exp.Literal: "?",
    exp.Boolean: "?",
    exp.Null: "null",
    exp.Star: "*",
    exp.Paren: "{}",
    exp.Alias: "{}",
    exp.Exists: "exists {}",
    # NOT of all of a text: of `(NOT a) IN (1)` it is of `a` alone.
    exp.Not: "not ({})",
    exp.Is: "{} is {}",
    exp.NullSafeEQ: "{} is {}",
    exp.NullSafeNEQ: "not ({} is {})",
    exp.Between: "{} between {} and {}",
    exp.Like: "{} like {}",
    exp.Glob: "{} glob {}",
    exp.RegexpLike: "{} regexp {}",
    exp.Add: "({}+{})",
    exp.Sub: "({}-{})",
    exp.Mul: "({}*{})",
    exp.Div: "({}/{})",
    exp.Mod: "({}%{})",
    exp.DPipe: "({}||{})",
}
"""How the children of a node are written, in their order."""
_QUERIES = (exp.Select, exp.Union, exp.Except, exp.Intersect, exp.Subquery)
_WRITERS: dict[type, Callable[[Writer, exp.Expression], str]] = {
    exp.Column: Writer._column,
    exp.DataType: lambda _, node: str(node.this).rpartition(".")[2].lower(),
    exp.Neg: Writer._negative,
    exp.In: Writer._in,
    exp.And: Writer._connected,
    exp.Or: Writer._connected,
    exp.Anonymous: Writer._anonymous,
    exp.Window: Writer._window,
    exp.Ordered: Writer._order_item,
    **dict.fromkeys(_FORMS, Writer._formatted),
    **dict.fromkeys(_QUERIES, Writer._subquery),
    **dict.fromkeys(_COMPARISONS, Writer._comparison),
}
