"""Which attributes a query puts out: its columns, aliases resolved (EXPO-SQL, tables 12 and 15).

An alias says nothing of what is right: `name AS n` is the attribute `name`, also where a subquery
or a WITH item gave the alias. A query that does not parse keeps the names of its result.
"""

from __future__ import annotations

from collections.abc import Iterator
from functools import lru_cache

from sqlglot import exp
from sqlglot.optimizer.scope import Scope, build_scope

from sqlenv.cache import cached
from sqlenv.sql.extraction import PARSE_FAILURES, bare, parse
from sqlenv.types import Table

COMPUTED = "()"
"""The attribute of every output that is no column: aggregates, arithmetic, constants."""

_MAX_DEPTH = 16  # subqueries within subqueries that aliases are followed into


def with_attributes(sql: str, table: Table, *, operand: int = 0, is_star: bool = False) -> Table:
    """Name the columns of a query's result by their attributes, in lower case.

    They are those of one operand of a set operation (`is_star`: as if it selected `*`).
    """
    names = [name.lower() for name in table.columns]
    scope = next(iter(_operands(sql)[operand : operand + 1]), None)
    if scope is None or not isinstance(scope.expression, exp.Select):
        return Table(tuple(names), table.rows)
    outputs = [exp.Star()] if is_star else scope.expression.expressions
    given = [_attribute(scope, item) for item in outputs]
    stars = [at for at, name in enumerate(given) if name == "*"]
    head, tail = (given[: stars[0]], given[stars[-1] + 1 :]) if stars else (given, [])
    # Columns between two stars have no known place: they are looked up by name.
    starred = names[len(head) : len(names) - len(tail)]
    if len(head) + len(starred) + len(tail) == len(names) and bool(starred) <= bool(stars):
        starred = [_origin(scope, ("", name)) or name for name in starred]
        names = [*head, *starred, *tail]
    return Table(tuple(names), table.rows)


def is_computed(sql: str, operand: int | None = None) -> bool:
    """Tell whether an operand of a query, or each of them, computes all of its outputs."""
    operands = _operands(sql) if operand is None else _operands(sql)[operand : operand + 1]
    return bool(operands) and all(
        isinstance(one.expression, exp.Select) and not any(map(_column, one.expression.expressions))
        for one in operands
    )


def is_distinct(sql: str, operand: int) -> bool:
    """Tell whether an operand of a query is a SELECT DISTINCT."""
    return any(one.expression.args.get("distinct") for one in _operands(sql)[operand : operand + 1])


@cached(maxsize=512)
def _operands(sql: str) -> tuple[Scope, ...]:
    """List what names mean in each operand, in the text's order; empty if it does not parse."""
    query = parse(sql)
    try:
        root = build_scope(query) if query else None
    except PARSE_FAILURES:  # an alias that stands for two things
        root = None
    return tuple(_leaves(root)) if root else ()


def _leaves(scope: Scope) -> Iterator[Scope]:
    for part in scope.set_operation_scopes:
        yield from _leaves(part)
    if not scope.set_operation_scopes:
        yield scope


def _column(output: exp.Expression) -> tuple[str, str] | None:
    """Return the qualifier and the name of an output that is a column, `*` for all."""
    node = bare(output.this if isinstance(output, exp.Alias) else output)
    if isinstance(node, exp.Star):
        return "", "*"
    return (node.table.lower(), node.name.lower()) if isinstance(node, exp.Column) else None


def _attribute(scope: Scope, output: exp.Expression, depth: int = 0) -> str:
    """Return what an output stands for; `*` for all columns."""
    column = _column(output)
    if column is None or column[1] == "*":
        return "*" if column else COMPUTED
    return _origin(scope, column, depth) or column[1]


@lru_cache(maxsize=1024)  # many chains of `*` may lead to one column
def _origin(scope: Scope, column: tuple[str, str], depth: int = 0) -> str:
    """Return what a column of a subquery or WITH item stands for; "" for one of a table."""
    qualifier, name = column
    for alias, source in scope.sources.items() if depth < _MAX_DEPTH else ():
        if not isinstance(source, Scope) or qualifier not in ("", alias.lower()):
            continue
        inner, given = source, [str(one).lower() for one in source.outer_columns]
        while inner.set_operation_scopes:
            inner = inner.set_operation_scopes[0]
        query = inner.expression
        for at, output in enumerate(query.expressions if isinstance(query, exp.Select) else ()):
            own, found = _column(output), ""
            if own and own[1] == "*":
                found = _origin(inner, (own[0], name), depth + 1)
            elif name == (given[at] if at < len(given) else output.alias_or_name.lower()):
                found = _attribute(inner, output, depth + 1)
            if found:
                return found
    return ""
