"""Queries as trees of clause profiles in normal form (Progress-SQL, appendix D)."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import partial
from typing import Literal

from sqlglot import exp

from rewards.execution import KnownColumns
from sqlenv.cache import cached
from sqlenv.sql import extraction

Features = frozenset[str]
SUBQUERY = "<sub>"


@dataclass(frozen=True, slots=True)
class Profile:
    """The clauses of one SELECT, as sets of normalised signatures."""

    joins: int
    items: int
    join: Features
    where: Features
    select: Features
    tables: Features
    group: Features
    having: Features
    order: Features
    distinct: bool
    aggregate: bool


@dataclass(frozen=True, slots=True)
class Node:
    """A node of the diagnostic tree; only a SELECT has a profile.

    `name` is that of a CTE or of a set operation's operator.
    """

    kind: Literal["ROOT", "SELECT", "SET_OP", "CTE", "SUBQUERY"]
    children: tuple[Node, ...]
    name: str = ""
    profile: Profile | None = None


@cached(maxsize=8192)
def build_tree(sql: str, schema: KnownColumns | None) -> Node | None:
    """Build the tree of a query: the ROOT node; None when the text does not parse as one query."""
    query = extraction.parse(sql)
    if query is None:
        return None
    return Node("ROOT", _nodes_of(query, None, {}, schema.tables if schema else {}))


def ctes(node: Node) -> Iterator[Node]:
    """Yield the WITH items of a tree."""
    for child in node.children:
        if child.kind == "CTE":
            yield child
        yield from ctes(child)


def renamed(node: Node, names: Mapping[str, str]) -> Node:
    """Give WITH items other names, also where they are read."""
    if not names:
        return node
    children = tuple(renamed(child, names) for child in node.children)
    profile = node.profile and replace(
        node.profile, tables=frozenset(names.get(table, table) for table in node.profile.tables)
    )
    name = names.get(node.name, node.name) if node.kind == "CTE" else node.name
    return Node(node.kind, children, name, profile)


def _nodes_of(
    query: exp.Expression,
    outer: _SelectReader | None,
    ctes: Mapping[str, Features],
    known: Mapping[str, Features],
) -> tuple[Node, ...]:
    """Build what hangs under the owner of a query: its main node, then one CTE node a WITH item.

    `outer` is the SELECT around it, `ctes` are the WITH items that it may read, with their columns,
    and `known` are those of the database's tables.
    """
    query = extraction.bare(query)
    items = query.ctes if isinstance(query, extraction.QueryTree) else []
    ctes = {**ctes, **{item.alias.lower(): _outputs(item) for item in items}}

    def nodes_of(inner: exp.Expression) -> tuple[Node, ...]:
        return _nodes_of(inner, outer, ctes, known)

    below = [Node("CTE", nodes_of(item.this), item.alias.lower()) for item in items]
    if isinstance(query, exp.Subquery):  # bracketed, with a WITH of its own
        return (*nodes_of(query.this), *below)
    if isinstance(query, exp.SetOperation):
        children = (*nodes_of(query.this), *nodes_of(query.expression))
        return (Node("SET_OP", children, query.key), *below)
    if isinstance(query, exp.Select):
        return (_SelectReader(query, outer, ctes, known).node(), *below)
    return (Node("SELECT", (), profile=_EMPTY), *below)  # VALUES


class _SelectReader:
    """Reads one SELECT, and writes its expressions as calls; its sources first, so that names are
    known.

    Nobody reads the texts: two are the same where the expressions are. `aggregate` tells whether an
    aggregate was written so far, those of windows aside; `sources` maps each alias to its base
    table, None for a CTE or derived table, and `columns` to its columns, as far as the schema or
    its query tells them; `outer` is the SELECT around.
    """

    def __init__(
        self,
        select: exp.Select,
        outer: _SelectReader | None,
        ctes: Mapping[str, Features],
        known: Mapping[str, Features],
    ) -> None:
        self.aggregate = False
        self.sources: dict[str, str | None] = {}
        self.columns: dict[str, Features] = {}
        self.outer = outer
        self._select, self._ctes, self._known = select, ctes, known
        self._children: list[Node] = []
        self._tables: set[str] = set()
        self._derived: list[exp.Expression] = []
        self._joins: list[tuple[exp.Join, str, str]] = []  # with the sources left and right of it
        first = extraction.clause(select, "from_")
        last = self._add(first[0]) if first else ""
        for join in select.args.get("joins") or ():
            last = self._join(join, last)

    def _add(self, source: exp.Expression) -> str:
        """Register a source and what it is joined with inside brackets; return its name."""
        alias, inner = source.alias.lower(), source
        joined: list[exp.Join] = []
        while isinstance(inner, exp.Subquery | exp.Paren):
            inner = inner.this
            if not isinstance(inner, exp.Select):
                joined = [*(inner.args.get("joins") or ()), *joined]
        if isinstance(inner, exp.Table):
            table = inner.this.name.lower()
            name = alias or inner.alias.lower() or table
            self.sources[name] = None if table in self._ctes else table
            self.columns[name] = self._ctes.get(table, self._known.get(table, frozenset()))
            self._tables.add(table)
        else:
            name = alias or f"{SUBQUERY}{len(self.sources)}"
            self.sources[name] = None
            self.columns[name] = _outputs(source)
            self._tables.add(SUBQUERY)
            self._derived.append(inner)
        for join in joined:
            name = self._join(join, name)
        return name

    def _join(self, join: exp.Join, left: str) -> str:
        at = len(self._joins)
        right = self._add(join.this)
        self._joins.insert(at, (join, left, right))
        return right

    def node(self) -> Node:
        """Read the clauses in the order they are written, as the children are."""
        select, text = self._select, self.text
        items = [text(item) for item in select.expressions]
        for derived in self._derived:
            self._add_child(derived, self.outer)
        clause = partial(extraction.clause, select)
        cut = {"limit"} if select.args.get("limit") or select.args.get("offset") else set[str]()
        profile = Profile(
            joins=len(self._joins),
            items=len(items),
            select=frozenset(items),
            tables=frozenset(self._tables),
            join=frozenset(atom for one in self._joins for atom in self._join_atoms(*one)),
            where=frozenset(map(text, _atoms(clause("where")))),
            group=frozenset(self._item(one, items, alias_first=False) for one in clause("group")),
            having=frozenset(map(text, _atoms(clause("having")))),
            order=frozenset(self._ordered(one, items) for one in clause("order")) | cut,
            distinct=bool(select.args.get("distinct")),
            aggregate=self.aggregate,
        )
        return Node("SELECT", tuple(self._children), profile=profile)

    def _join_atoms(self, join: exp.Join, left: str, right: str) -> Iterable[str]:
        condition = join.args.get("on")
        atoms = [
            self.text(atom)
            for atom in _atoms([condition] if condition else [])
            if not isinstance(atom, exp.Boolean)  # sqlglot writes ON TRUE where there is no ON
        ]
        shared = [column.name.lower() for column in join.args.get("using") or []]
        if join.method.upper() == "NATURAL":
            shared += [name for name in self.columns[right] if self.nearest(name, right)]
        for name in shared:
            pair = (self.nearest(name, right) or left, right)
            sides = sorted(self.qualified(alias, name) for alias in pair)
            atoms.append(f"eq({','.join(sides)})")
        return atoms

    def _item(self, node: exp.Expression, items: Sequence[str], *, alias_first: bool) -> str:
        """Write an item of GROUP BY or ORDER BY; a number or alias stands for a SELECT item."""
        node = extraction.bare(node)
        if isinstance(node, exp.Literal) and not node.is_string:
            places = {str(at): item for at, item in enumerate(items, start=1)}
            return places.get(node.this, "?")
        if isinstance(node, exp.Column) and not node.args.get("table"):
            name = node.name.lower()
            selected = self._select.expressions
            aliases = [i.alias.lower() if isinstance(i, exp.Alias) else "" for i in selected]
            named = dict(zip(aliases, items, strict=True))  # of several with one name the last
            if name in named and (alias_first or not self.owners(name)):
                return named[name]
        return self.text(node)

    def _ordered(self, node: exp.Expression, items: Sequence[str] | None = None) -> str:
        """Write an item of an ORDER BY; one of the SELECT's own may be a number or an alias."""
        is_own = items is not None
        text = self._item(node.this, items, alias_first=True) if is_own else self.text(node.this)
        return f"{text} {'desc' if node.args.get('desc') else 'asc'}"

    def _add_child(self, query: exp.Expression, outer: _SelectReader | None) -> None:
        nodes = _nodes_of(query, outer, self._ctes, self._known)
        self._children.append(Node("SUBQUERY", nodes))

    def _outward(self) -> Iterator[_SelectReader]:
        """Yield this SELECT and those around it."""
        one: _SelectReader | None = self
        while one is not None:
            yield one
            one = one.outer

    def text(self, node: exp.Expression) -> str:
        """Write an expression in normal form."""
        # SQLite's `total` is an aggregate that sqlglot does not know.
        is_total = isinstance(node, exp.Anonymous) and node.name.lower() == "total"
        self.aggregate |= is_total or isinstance(node, exp.AggFunc)
        text = _WRITERS.get(type(node), _SelectReader._call)(self, node)
        return f"not({text})" if node.args.get("negate") else text

    def qualified(self, alias: str, name: str) -> str:
        """Write a column of one of the sources, as USING names it."""
        table = self.sources.get(alias)
        return f"{table}.{name}" if table else name

    def nearest(self, name: str, right: str) -> str | None:
        """Find the last source before another that has such a column, by the schema."""
        aliases = list(self.sources)
        before = aliases[: aliases.index(right)]
        return next((alias for alias in reversed(before) if name in self.columns[alias]), None)

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
            alias = qualifier.name.lower()
            tables = [one.sources[alias] for one in self._outward() if alias in one.sources][:1]
        else:
            tables = self.owners(name)
            if not tables and column.this.args.get("quoted") and self._knows_all_columns():
                return "?"  # SQLite takes "x" for text where no column has that name
            tables = tables or [*self.sources.values()]
        return f"{tables[0]}.{name}" if len(tables) == 1 and tables[0] else name

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
        self._add_child(node, self)
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


def _outputs(item: exp.Expression) -> Features:
    """Name the columns of a WITH item or derived table, as far as its query spells them."""
    is_query = isinstance(item, exp.DerivedTable)
    names = item.alias_column_names or (item.named_selects if is_query else [])
    return frozenset(map(str.lower, names)) - {"", "*"}


def _atoms(conditions: Iterable[exp.Expression]) -> list[exp.Expression]:
    return [atom for condition in conditions for atom in extraction.split(condition, exp.And)]


_EMPTY = Profile(0, 0, *[frozenset[str]()] * 7, distinct=False, aggregate=False)


_FLIPPED = {"eq": "eq", "neq": "neq", "gt": "lt", "gte": "lte", "lt": "gt", "lte": "gte"}
"""Each comparison, and what it is with its sides exchanged."""
_COMPARISONS = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE)
_QUERIES = (exp.Select, exp.Union, exp.Except, exp.Intersect, exp.Subquery)
_WRITERS: dict[type, Callable[[_SelectReader, exp.Expression], str]] = {
    exp.Column: _SelectReader._column,
    exp.DataType: lambda _, node: str(node.this).rpartition(".")[2].lower(),
    exp.Neg: _SelectReader._negative,
    exp.In: _SelectReader._in,
    exp.And: _SelectReader._connected,
    exp.Or: _SelectReader._connected,
    exp.Window: _SelectReader._window,
    exp.Ordered: _SelectReader._ordered,
    exp.NullSafeEQ: lambda writer, node: writer._call(node, "is"),
    exp.NullSafeNEQ: lambda writer, node: f"not({writer._call(node, 'is')})",
    **dict.fromkeys((exp.Literal, exp.Boolean), lambda _writer, _node: "?"),
    **dict.fromkeys((exp.Paren, exp.Alias), lambda writer, node: writer.text(node.this)),
    **dict.fromkeys(_QUERIES, _SelectReader._subquery),
    **dict.fromkeys(_COMPARISONS, _SelectReader._comparison),
}
