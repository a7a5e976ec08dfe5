"""Queries as trees of clause profiles (Progress-SQL, appendix D): building and normalising."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Literal

from sqlglot import exp

from rewards.config import TreeConfig
from sqlenv import parse

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
    """A node of the diagnostic tree.

    Attributes:
        name: Of a CTE its name, of a set operation its operator, else empty.
        profile: Of a SELECT only.
    """

    kind: Literal["ROOT", "SELECT", "SET_OP", "CTE", "SUBQUERY"]
    children: tuple[Node, ...]
    name: str = ""
    profile: Profile | None = None


@dataclass(frozen=True, slots=True, eq=False)
class Schema:
    """Column names by table, lower-cased; hashed by identity."""

    columns: Mapping[str, Features]


@lru_cache(maxsize=1024)
def _schema(key: tuple[tuple[str, tuple[str, ...]], ...]) -> Schema:
    return Schema({table.lower(): frozenset(map(str.lower, names)) for table, names in key})


def schema_of(columns: Mapping[str, Sequence[str]] | None) -> Schema | None:
    """Intern a schema: equal ones give the same object, so that caches can use it as a key."""
    if columns is None:
        return None
    return _schema(tuple((table, tuple(names)) for table, names in columns.items()))


@lru_cache(maxsize=8192)
def build_tree(sql: str, schema: Schema | None, config: TreeConfig) -> Node | None:
    """Build the tree of a query.

    Returns:
        The ROOT node; None when the text does not parse as one query.
    """
    query = parse.parse(sql)
    if query is None:
        return None
    return Node("ROOT", _nodes_of(query, _Scope(None, {}, frozenset()), schema, config))


@dataclass(frozen=True, slots=True)
class _Scope:
    """What names mean inside one SELECT.

    Attributes:
        sources: Alias of each source, with its base table, or None for a CTE or derived table.
        ctes: Names of the CTEs that this query may read.
    """

    parent: _Scope | None
    sources: Mapping[str, str | None]
    ctes: Features


def _nodes_of(
    query: exp.Expression, scope: _Scope, schema: Schema | None, config: TreeConfig
) -> tuple[Node, ...]:
    """Build what hangs under the owner of a query: its main node, then one CTE node a WITH item."""
    query = parse.bare(query)
    items = parse.ctes(query) if isinstance(query, parse.Query) else []
    scope = _Scope(scope.parent, scope.sources, scope.ctes | {item.alias.lower() for item in items})
    below = [
        Node("CTE", _nodes_of(item.this, scope, schema, config), item.alias.lower())
        for item in items
    ]
    if isinstance(query, exp.Subquery):  # bracketed, with a WITH of its own
        return (*_nodes_of(query.this, scope, schema, config), *below)
    if isinstance(query, exp.SetOperation):
        operands = (query.this, query.expression)
        children = [n for side in operands for n in _nodes_of(side, scope, schema, config)]
        return (Node("SET_OP", tuple(children), query.key), *below)
    if isinstance(query, exp.Select):
        return (_Reader(query, scope, schema, config).node(), *below)
    return (Node("SELECT", (), profile=_EMPTY), *below)  # VALUES


class _Reader:
    """Reads one SELECT: writes its clauses as signatures, collects its nested queries."""

    def __init__(
        self, select: exp.Select, outer: _Scope, schema: Schema | None, config: TreeConfig
    ) -> None:
        self._select = select
        self._schema = schema
        self._config = config
        self._tables: set[str] = set()
        self._derived: list[exp.Expression] = []
        self._joins: list[tuple[exp.Join, str, str]] = []  # with the sources left and right of it
        self._sources: dict[str, str | None] = {}
        self._ctes = outer.ctes
        first = parse.from_table(select)
        last = self._add_source(first) if first is not None else ""
        for join in parse.joins(select):
            last = self._add_join(join, last)
        self._outer = outer
        self._scope = _Scope(outer, self._sources, outer.ctes)
        self._children: list[Node] = []
        self._aggregate = False

    def node(self) -> Node:
        """Read the clauses in the order they are written, as the children are."""
        select = self._select
        items = [self.text(_unalias(item)) for item in select.expressions]
        for derived in self._derived:
            self._nest(derived, self._outer)
        join = {atom for one in self._joins for atom in self._join_atoms(*one)}
        where: set[str] = set()
        for atom in self._atoms(parse.clause(select, "where")):
            lifted = self._config.lift_implicit and _links_tables(atom)
            (join if lifted else where).add(self.text(atom))
        names = {
            item.alias.lower(): text
            for item, text in zip(select.expressions, items, strict=True)
            if isinstance(item, exp.Alias)
        }
        group = {
            self._item(expression, items, names, alias_first=False)
            for expression in parse.clause(select, "group")
        }
        having = {self.text(atom) for atom in self._atoms(parse.clause(select, "having"))}
        order = {self._ordered(item, items, names) for item in parse.clause(select, "order")}
        profile = Profile(
            joins=len(self._joins),
            items=len(items),
            join=frozenset(join),
            where=frozenset(where),
            select=frozenset(items),
            tables=frozenset(self._tables),
            group=frozenset(group),
            having=frozenset(having),
            order=frozenset(order | {"limit"}) if parse.has_limit(select) else frozenset(order),
            distinct=parse.is_distinct(select),
            aggregate=self._aggregate,
        )
        return Node("SELECT", tuple(self._children), profile=profile)

    # Sources

    def _add_source(self, source: exp.Expression) -> str:
        """Register a source and what it is joined with inside brackets; return its name."""
        alias, inner = source.alias.lower(), source
        joined: list[exp.Join] = []
        while isinstance(inner, exp.Subquery | exp.Paren):
            inner = inner.this
            if not isinstance(inner, exp.Select):
                joined = [*parse.joins(inner), *joined]
        if isinstance(inner, exp.Table):
            table = inner.this.name.lower()
            name = alias or inner.alias.lower() or table
            self._sources[name] = None if table in self._ctes else table
            self._tables.add(table)
        else:
            name = alias or f"{SUBQUERY}{len(self._sources)}"
            self._sources[name] = None
            self._tables.add(SUBQUERY)
            self._derived.append(inner)
        for join in joined:
            name = self._add_join(join, name)
        return name

    def _add_join(self, join: exp.Join, left: str) -> str:
        at = len(self._joins)
        right = self._add_source(join.this)
        self._joins.insert(at, (join, left, right))
        return right

    def _join_atoms(self, join: exp.Join, left: str, right: str) -> Iterable[str]:
        condition = join.args.get("on")
        atoms = [
            self.text(atom)
            for atom in self._atoms([condition] if condition else [])
            if not isinstance(atom, exp.Boolean)  # sqlglot writes ON TRUE where there is no ON
        ]
        for column in join.args.get("using") or []:
            name = column.name.lower()
            atoms.append("=".join(sorted(self._qualified(side, name) for side in (left, right))))
        if self._config.join_type == "included":
            kind = " ".join(filter(None, (join.side, join.kind))).lower()
            return [f"{kind} {atom}" for atom in atoms]
        return atoms

    def _qualified(self, alias: str, name: str) -> str:
        if self._config.qualify != "resolve":
            return name
        table = self._sources.get(alias)
        return f"{table}.{name}" if table else name

    # Columns

    def _column(self, column: exp.Expression) -> str:
        name = column.name.lower() if not isinstance(column.this, exp.Star) else "*"
        qualifier = column.args.get("table")
        mode = self._config.qualify
        if mode == "raw" and qualifier is not None:
            return f"{qualifier.name.lower()}.{name}"
        table = self._base_table(qualifier.name.lower()) if qualifier is not None else None
        if qualifier is None:
            owners = self._owners(name)
            if not owners and self._schema and column.this.args.get("quoted") and self._is_text():
                return "?"
            table = owners[0] if len(owners) == 1 else self._only_table(owners)
        return f"{table}.{name}" if table and mode == "resolve" else name

    def _base_table(self, alias: str) -> str | None:
        scope: _Scope | None = self._scope
        while scope is not None:
            if alias in scope.sources:
                return scope.sources[alias]
            scope = scope.parent
        return None

    def _owners(self, name: str) -> list[str]:
        """List the base tables with such a column in the nearest scope that has any."""
        scope: _Scope | None = self._scope
        while scope is not None and self._schema is not None:
            tables = {table for table in scope.sources.values() if table}
            owners = [t for t in tables if name in self._schema.columns.get(t, ())]
            if owners:
                return owners
            scope = scope.parent
        return []

    def _only_table(self, owners: list[str]) -> str | None:
        if owners or len(self._sources) != 1:
            return None
        return next(iter(self._sources.values()))

    def _is_text(self) -> bool:
        """Tell whether "x" that names no column is text: SQLite's rule, knowable without CTEs."""
        scope: _Scope | None = self._scope
        while scope is not None:
            if None in scope.sources.values():
                return False
            scope = scope.parent
        return True

    # Clauses

    def _atoms(self, conditions: Iterable[exp.Expression]) -> list[exp.Expression]:
        return [atom for condition in conditions for atom in parse.split(condition, exp.And)]

    def _item(
        self,
        node: exp.Expression,
        items: Sequence[str],
        names: Mapping[str, str],
        *,
        alias_first: bool,
    ) -> str:
        """Write an item of GROUP BY or ORDER BY; a number or alias stands for a SELECT item."""
        node = parse.bare(node)
        if isinstance(node, exp.Literal) and not node.is_string:
            at = int(node.this) - 1 if node.this.isdecimal() else -1
            return items[at] if 0 <= at < len(items) else "?"
        if isinstance(node, exp.Column) and not node.args.get("table"):
            name = node.name.lower()
            if name in names and (alias_first or not self._owners(name)):
                return names[name]
        return self.text(node)

    def _ordered(self, node: exp.Expression, items: Sequence[str], names: Mapping[str, str]) -> str:
        target = node.this if isinstance(node, exp.Ordered) else node
        direction = "desc" if node.args.get("desc") else "asc"
        return f"{self._item(target, items, names, alias_first=True)} {direction}"

    # Expressions

    def text(self, node: exp.Expression) -> str:
        """Write an expression in normal form."""
        writer = _WRITERS.get(type(node))
        if writer is not None:
            return writer(self, node)
        if isinstance(node, exp.AggFunc):
            self._aggregate = True
        return f"{node.key}({self._arguments(node)})"

    def _arguments(self, node: exp.Expression) -> str:
        parts: list[str] = []
        for value in node.args.values():
            for one in value if isinstance(value, list) else (value,):
                if isinstance(one, exp.Expression):
                    parts.append(self.text(one))
                elif isinstance(one, str):
                    parts.append(one.lower())
        return ",".join(parts)

    def _nest(self, query: exp.Expression, scope: _Scope) -> None:
        nodes = _nodes_of(query, scope, self._schema, self._config)
        self._children.append(Node("SUBQUERY", nodes))

    def _subquery(self, node: exp.Expression) -> str:
        self._nest(node, self._scope)
        return SUBQUERY

    def _exists(self, node: exp.Expression) -> str:
        return f"exists {self.text(node.this)}"

    def _literal(self, node: exp.Expression) -> str:
        return "?"

    def _null(self, node: exp.Expression) -> str:
        return "null"

    def _inside(self, node: exp.Expression) -> str:
        return self.text(node.this)

    def _negative(self, node: exp.Expression) -> str:
        inner = self.text(node.this)
        return "?" if inner == "?" else f"-{inner}"

    def _not(self, node: exp.Expression) -> str:
        inner = parse.bare(node.this) if isinstance(node.this, exp.Paren) else node.this
        if isinstance(inner, exp.Is):
            return f"{self.text(inner.this)} is not {self.text(inner.expression)}"
        if isinstance(inner, exp.In):
            return self._in(inner, "not in")
        if isinstance(inner, exp.Between):
            return self._between(inner, "not between")
        if type(inner) in _LIKES:
            return self._like(inner, negate=True)
        return f"not {self.text(inner)}"

    def _comparison(self, node: exp.Expression) -> str:
        left, right = node.this, node.expression
        sign = _COMPARISONS[type(node)]
        first, second = self.text(left), self.text(right)
        if first == "?" and second != "?":
            return f"{second}{_FLIPPED[sign]}{first}"
        both_columns = isinstance(left, exp.Column) and isinstance(right, exp.Column)
        if sign in ("=", "!=") and both_columns and "?" != second < first:
            first, second = second, first
        return f"{first}{sign}{second}"

    def _binary(self, node: exp.Expression) -> str:
        return f"({self.text(node.this)}{_OPERATORS[type(node)]}{self.text(node.expression)})"

    def _is(self, node: exp.Expression) -> str:
        word = "is not" if isinstance(node, exp.NullSafeNEQ) else "is"
        return f"{self.text(node.this)} {word} {self.text(node.expression)}"

    def _in(self, node: exp.Expression, word: str = "in") -> str:
        subject = self.text(node.this)
        query = node.args.get("query")
        if query is not None:
            return f"{subject} {word} {self.text(query)}"
        field = node.args.get("field")
        listed = {self.text(item) for item in ([field] if field else node.expressions)}
        return f"{subject} {word} ({','.join(sorted(listed))})"

    def _between(self, node: exp.Expression, word: str = "between") -> str:
        low, high = self.text(node.args["low"]), self.text(node.args["high"])
        return f"{self.text(node.this)} {word} {low} and {high}"

    def _like(self, node: exp.Expression, *, negate: bool = False) -> str:
        word = _LIKES[type(node)]
        negate = negate != bool(node.args.get("negate"))
        subject, pattern = self.text(node.this), self.text(node.expression)
        return f"{subject} {'not ' if negate else ''}{word} {pattern}"

    def _or(self, node: exp.Expression) -> str:
        return f"({' or '.join(sorted(self.text(arm) for arm in parse.split(node, exp.Or)))})"

    def _and(self, node: exp.Expression) -> str:
        return f"({' and '.join(sorted(self.text(arm) for arm in parse.split(node, exp.And)))})"

    def _distinct(self, node: exp.Expression) -> str:
        return f"distinct {','.join(self.text(item) for item in node.expressions)}"

    def _anonymous(self, node: exp.Expression) -> str:
        name = node.name.lower()
        self._aggregate |= name in _OTHER_AGGREGATES
        return f"{name}({','.join(self.text(item) for item in node.expressions)})"

    def _window(self, node: exp.Expression) -> str:
        outside = self._aggregate
        text = f"window({self._arguments(node)})"
        self._aggregate = outside
        return text

    def _order_item(self, node: exp.Expression) -> str:
        return f"{self.text(node.this)} {'desc' if node.args.get('desc') else 'asc'}"

    def _star(self, node: exp.Expression) -> str:
        return "*"

    def _type(self, node: exp.Expression) -> str:
        return str(node.this).rpartition(".")[2].lower()


def _unalias(item: exp.Expression) -> exp.Expression:
    return item.this if isinstance(item, exp.Alias) else item


def _links_tables(atom: exp.Expression) -> bool:
    sides = (atom.this, atom.args.get("expression"))
    return (
        isinstance(atom, exp.EQ)
        and all(isinstance(side, exp.Column) for side in sides)
        and atom.this.table.lower() != atom.expression.table.lower()
    )


_EMPTY = Profile(0, 0, *[frozenset[str]()] * 7, distinct=False, aggregate=False)
_OTHER_AGGREGATES = frozenset({"total"})
_COMPARISONS: dict[type, str] = {
    exp.EQ: "=",
    exp.NEQ: "!=",
    exp.GT: ">",
    exp.GTE: ">=",
    exp.LT: "<",
    exp.LTE: "<=",
}
_FLIPPED = {"=": "=", "!=": "!=", ">": "<", ">=": "<=", "<": ">", "<=": ">="}
_OPERATORS: dict[type, str] = {
    exp.Add: "+",
    exp.Sub: "-",
    exp.Mul: "*",
    exp.Div: "/",
    exp.Mod: "%",
    exp.DPipe: "||",
}
_LIKES: dict[type, str] = {exp.Like: "like", exp.Glob: "glob", exp.RegexpLike: "regexp"}
_WRITERS: dict[type, Callable[[_Reader, exp.Expression], str]] = {
    exp.Column: _Reader._column,
    exp.Literal: _Reader._literal,
    exp.Boolean: _Reader._literal,
    exp.Null: _Reader._null,
    exp.Star: _Reader._star,
    exp.Paren: _Reader._inside,
    exp.Alias: _Reader._inside,
    exp.Neg: _Reader._negative,
    exp.Not: _Reader._not,
    exp.Is: _Reader._is,
    exp.NullSafeEQ: _Reader._is,
    exp.NullSafeNEQ: _Reader._is,
    exp.In: _Reader._in,
    exp.Between: _Reader._between,
    exp.Exists: _Reader._exists,
    exp.And: _Reader._and,
    exp.Or: _Reader._or,
    exp.Distinct: _Reader._distinct,
    exp.Anonymous: _Reader._anonymous,
    exp.Window: _Reader._window,
    exp.Ordered: _Reader._order_item,
    exp.DataType: _Reader._type,
    exp.Select: _Reader._subquery,
    exp.Union: _Reader._subquery,
    exp.Except: _Reader._subquery,
    exp.Intersect: _Reader._subquery,
    exp.Subquery: _Reader._subquery,
    **dict.fromkeys(_COMPARISONS, _Reader._comparison),
    **dict.fromkeys(_OPERATORS, _Reader._binary),
    **dict.fromkeys(_LIKES, _Reader._like),
}
