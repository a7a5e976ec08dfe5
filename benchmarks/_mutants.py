"""Queries that are wrong in one place: every way in which one part of a query can be changed."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any

from sqlglot import exp

from sqlenv.sql.extraction import parse

Change = Callable[[exp.Expression], Iterator[None]]
"""Changes a tree in place, a place at a time: each step is one mutant, and undoes the last one."""

_AGGREGATES = {exp.Max: exp.Min, exp.Min: exp.Max, exp.Avg: exp.Sum, exp.Sum: exp.Avg}
_COMPARISONS = {
    exp.GT: exp.GTE,
    exp.GTE: exp.GT,
    exp.LT: exp.LTE,
    exp.LTE: exp.LT,
    exp.EQ: exp.NEQ,
    exp.NEQ: exp.EQ,
    exp.And: exp.Or,
    exp.Or: exp.And,
}
_SETS = {exp.Union: exp.Intersect, exp.Intersect: exp.Except, exp.Except: exp.Intersect}
_ORDER_BY = re.compile("order by", re.IGNORECASE)


def exchange(taken_for: Mapping[type[Any], type[Any]]) -> Change:
    """Take a node for another one over the same arguments."""

    def change(tree: exp.Expression) -> Iterator[None]:
        for node in list(tree.find_all(*taken_for)):
            other = taken_for[type(node)](**node.args)
            node.replace(other)
            yield
            other.replace(node)

    return change


def set_argument(
    kind: type[exp.Expression], name: str, other: Callable[[exp.Expression], object]
) -> Change:
    """Give an argument of every node of a kind another value, where `other` has one."""

    def change(tree: exp.Expression) -> Iterator[None]:
        for node in list(tree.find_all(kind)):
            before, after = node.args.get(name), other(node)
            if after == before:
                continue
            node.set(name, after)
            yield
            node.set(name, before)

    return change


def drop(name: str) -> Change:
    return set_argument(exp.Select, name, lambda _: None)


def other_literal(node: exp.Expression) -> str:
    text = str(node.this)
    if node.args["is_string"]:
        return f"{text}x"
    return str(int(text) + 1) if text.isdigit() else f"{text}1"


def left(node: exp.Expression) -> str | None:
    return node.args.get("side") if node.args.get("kind") == "CROSS" else "LEFT"


def flipped(node: exp.Expression) -> bool:
    # SQLite's own place of NULLs, so that none is written out.
    node.set("nulls_first", bool(node.args.get("desc")))
    return not node.args.get("desc")


def without_distinct(tree: exp.Expression) -> Iterator[None]:
    yield from drop("distinct")(tree)
    for node in list(tree.find_all(exp.Distinct)):
        if isinstance(node.parent, exp.Count) and len(node.expressions) == 1:
            inside = node.expressions[0].copy()
            node.replace(inside)
            yield
            inside.replace(node)


CHANGES: Mapping[str, Change] = {
    "DISTINCT dropped": without_distinct,
    "DISTINCT added": set_argument(
        exp.Select, "distinct", lambda node: node.args.get("distinct") or exp.Distinct()
    ),
    "order flipped": set_argument(exp.Ordered, "desc", flipped),
    "ORDER BY dropped": drop("order"),
    "LIMIT dropped": drop("limit"),
    "aggregate changed": exchange(_AGGREGATES),
    "comparison or connector changed": exchange(_COMPARISONS),
    "set operation changed": exchange(_SETS),
    "join made LEFT": set_argument(exp.Join, "side", left),
    "join condition dropped": set_argument(exp.Join, "on", lambda _: None),
    "constant changed": set_argument(exp.Literal, "this", other_literal),
    "WHERE dropped": drop("where"),
    "GROUP BY dropped": drop("group"),
    "HAVING dropped": drop("having"),
    "columns reversed": set_argument(
        exp.Select, "expressions", lambda node: list(reversed(node.expressions))
    ),
    "column dropped": set_argument(
        exp.Select, "expressions", lambda node: node.expressions[:-1] or node.expressions
    ),
    "column added": set_argument(
        exp.Select, "expressions", lambda node: [*node.expressions, exp.Literal.number(1)]
    ),
}
"""Changes of what a query means."""

SPELLINGS: Mapping[str, Callable[[str], str]] = {
    "semicolon": lambda sql: f"{sql.rstrip('; ')};",
    "two semicolons": lambda sql: f"{sql.rstrip('; ')};;",
    "a second query": lambda sql: f"{sql.rstrip('; ')}; SELECT 1",
    "comment behind": lambda sql: f"{sql.rstrip('; ')} -- distinct",
    "block comment before": lambda sql: f"/* it's DISTINCT */ {sql}",
    "comment alone": lambda _: "-- nothing",
    "upper case": lambda sql: sql.upper(),
    "blanks in ORDER BY": lambda sql: _ORDER_BY.sub("ORDER  BY", sql),
    "operators apart": lambda sql: re.sub("(>|<|!)=", r"\1 =", sql),
    "other quotes": lambda sql: sql.replace("'", '"'),
    "unknown column": lambda sql: re.sub("(?i)select", "SELECT no_such_column,", sql, count=1),
    "values as blobs": lambda sql: f"SELECT CAST(1 AS BLOB) FROM ({sql.rstrip('; ')})",
    "integers as floats": lambda sql: f"SELECT x.*, 1.0 FROM ({sql.rstrip('; ')}) AS x",
    "write": lambda sql: f"DELETE FROM sqlite_sequence WHERE 0; {sql}",
}
"""Other texts, many of the same meaning."""


def mutants(sql: str) -> Iterator[tuple[str, str]]:
    """Yield every mutant of a query, each text once, with what was changed."""
    seen = {sql}
    for name, text in every_change(sql):
        if text not in seen:
            seen.add(text)
            yield name, text


def every_change(sql: str) -> Iterator[tuple[str, str]]:
    if (tree := parse(sql)) is not None:
        holder = exp.Paren(this=tree.copy())  # whose child can be exchanged like any other node
        for name, change in CHANGES.items():
            for _ in change(holder):
                yield name, holder.this.sql(dialect="sqlite", normalize_functions=False)
    for name, write in SPELLINGS.items():
        yield name, write(sql)
