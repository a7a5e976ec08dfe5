"""Queries of MySQL and PostgreSQL, written for SQLite by sqlglot.

The result is approximate: sqlglot writes what it knows in SQLite's words and passes on the rest.
`_REWRITES` changes a few things that it leaves alone and that common queries have: MySQL's text
without case, parts of dates, MOD, operands of CONCAT. A gold query and its prediction pass through
the same writer. `tests/data/dialects.json` shows what is equal.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping

from sqlglot import exp
from sqlglot.dialects import Dialect
from sqlglot.dialects.sqlite import SQLite
from sqlglot.errors import ErrorLevel
from sqlglot.tokens import Token, TokenType

from sqlenv.cache import cached
from sqlenv.sql.extraction import (
    MAX_CHARS,
    MAX_TREE_DEPTH,
    PARSE_FAILURES,
    QueryTree,
    depth,
    is_within_limits,
    parse,
)
from sqlenv.types import ENGINES, SqlError

_QUOTED = (TokenType.STRING, TokenType.IDENTIFIER, TokenType.HEREDOC_STRING)
_PARTS = {"year": "%Y", "month": "%m", "day": "%d", "dayofmonth": "%d"}
_MARKS = re.compile("%[deFfGgHIjJklmMpPRsSTuUVwWY%]")  # of SQLite's strftime
_STEPS = frozenset({"DAY", "MONTH", "YEAR"})
_DATES = (exp.DType.DATE, exp.DType.DATETIME, exp.DType.TIMESTAMP, exp.DType.TIMESTAMPTZ)
_TODAY = (exp.CurrentDate, exp.CurrentTimestamp, exp.Date, exp.TsOrDsToDate)


class _Backticks(SQLite):
    """SQLite, names in backticks: one in double quotes that is not found is a string to it."""

    Tokenizer = type("BacktickTokenizer", (SQLite.Tokenizer,), {"IDENTIFIERS": ["`"]})


@cached(maxsize=16384)
def transpiled(sql: str, dialect: str) -> str | SqlError:
    """Write a query of MySQL or PostgreSQL for SQLite; see `sqlenv.dialects.transpile`."""
    try:
        tree = _read(sql, Dialect.get_or_raise(dialect))
        for node in reversed(list(tree.walk())):  # from the leaves
            _check(node, dialect)
            rewrite = _REWRITES.get(type(node))
            new = rewrite(node) if rewrite else node
            new = _folded(new) if dialect == "mysql" else new
            if new is not node:
                node.replace(new)
        # What is left out would make different queries equal.
        text = tree.sql(dialect=_Backticks, comments=False, unsupported_level=ErrorLevel.RAISE)
        if parse(text) is not None:
            return text
        why = "no query of SQLite comes of it"
    except PARSE_FAILURES as error:
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return SqlError(f"not transpiled from {ENGINES[dialect]}: {why}")


def _read(sql: str, dialect: Dialect) -> QueryTree:
    if len(sql) > MAX_CHARS or "\0" in sql:
        raise ValueError("too long, or with a NUL")
    tokens = dialect.tokenize(sql)
    while tokens and tokens[-1].token_type is TokenType.SEMICOLON:
        tokens.pop()
    # The dialect's own tokens: what is a string or a comment in it is none for our lexer.
    if not is_within_limits(tuple(_words(tokens))):
        raise ValueError("not one query, or too deep")
    tree, *more = dialect.parser(error_level=ErrorLevel.RAISE).parse(tokens, sql)
    if more or not isinstance(tree, QueryTree) or depth(tree) > MAX_TREE_DEPTH:
        raise ValueError("not one query, or too deep")
    return tree


def _words(tokens: list[Token]) -> Iterator[str]:
    """Write tokens as our lexer does: a keyword of two words is two, quoted text is its mark."""
    for token in tokens:
        if token.token_type in _QUOTED:
            yield "'"
        else:
            yield from token.text.lower().split()


def _check(node: exp.Expr, dialect: str) -> None:
    """Refuse what SQLite would leave out, or take for a text, another number or NULL."""
    is_lost: object = False
    match node:
        case exp.TimeToStr():
            rest, marks = _MARKS.subn("", node.args["format"].name)
            unknown = "[%A-Za-z]" if dialect == "postgres" else "%"
            is_lost = not marks or re.search(unknown, rest)  # also a format of numbers
        case exp.DateAdd() | exp.DateSub():
            is_lost = (node.text("unit").upper() or "DAY") not in _STEPS
        case exp.Add() | exp.Sub():
            is_lost = any(map(_is_date, (node.this, node.expression)))
        case exp.Cast():  # as bytes, which equal no text
            is_lost = node.to.this in (exp.DType.BINARY, exp.DType.VARBINARY)
        case exp.Extract():
            is_lost = isinstance(node.expression.unnest(), exp.Add | exp.Sub)
        case exp.Substring():  # of a pattern
            is_lost = getattr(node.args.get("start"), "is_string", False)
        case exp.LimitOptions():
            is_lost = node.args.get("with_ties") or node.args.get("percent")
        case exp.Distinct():  # sqlglot would cut before it leaves rows out
            is_lost = node.args.get("on") and (node.parent or node).args.get("limit")
    if is_lost:
        raise ValueError(f"SQLite has nothing like {node.sql(dialect).strip()}")


def _is_date(node: exp.Expr) -> bool:
    """Tell a date or a time, or the first or last of some."""
    while isinstance(node, exp.Paren | exp.Max | exp.Min):
        node = node.this
    return isinstance(node, _TODAY) or (isinstance(node, exp.Cast) and node.to.this in _DATES)


def _part(node: exp.Expr) -> exp.Expr:
    is_extract = isinstance(node, exp.Extract)
    name, date = (node.this.name, node.expression) if is_extract else (node.key, node.this)
    if (form := _PARTS.get(name.lower())) is None:
        return node
    return exp.cast(_call("STRFTIME", exp.Literal.string(form), _date(date)), "int")


def _date_diff(node: exp.Expr) -> exp.Expr:
    if node.args.get("unit"):
        return node
    both = (_call("DATE", _date(one)) for one in (node.this, node.expression))
    later, earlier = (_call("JULIANDAY", one) for one in both)
    return exp.cast(exp.Paren(this=exp.Sub(this=later, expression=earlier)), "int")


def _cast(node: exp.Expr) -> exp.Expr:
    """Name the functions of dates, and keep to the size of a type: SQLite's CAST does neither."""
    kind, size = node.args["to"].this, [one.this for one in node.args["to"].expressions]
    if kind is exp.DType.DATE:
        return exp.Date(this=_date(node).copy())
    if kind is exp.DType.TIMESTAMPTZ:
        return _call("DATETIME", _date(node))
    if size and kind in exp.DataType.TEXT_TYPES:
        return _call("SUBSTR", exp.cast(node.this, "text"), exp.Literal.number(1), size[0])
    if size and kind is exp.DType.DECIMAL:
        return _call("ROUND", exp.cast(node.this, "double"), (*size, exp.Literal.number(0))[1])
    return node


def _concat(node: exp.Expr) -> exp.Expr:
    """SQLite's || binds closer than anything."""
    for part in (node.this, node.args.get("expression"), *node.expressions):
        if isinstance(part, exp.Binary) and not isinstance(part, exp.DPipe):
            part.replace(exp.Paren(this=part.copy()))
    return node


_REWRITES: Mapping[type[exp.Expr], Callable[[exp.Expr], exp.Expr]] = {
    # SQLite's % cuts its operands.
    exp.Mod: lambda node: _call("MOD", node.this.unnest(), node.expression.unnest()),
    exp.Left: lambda node: _call("SUBSTR", node.this, exp.Literal.number(1), node.expression),
    **dict.fromkeys((exp.Extract, exp.Year, exp.Month, exp.Day, exp.DayOfMonth), _part),
    exp.DateDiff: _date_diff,
    exp.Cast: _cast,
    exp.TimeToStr: lambda node: _call("STRFTIME", node.args["format"], _date(node.this)),
    exp.Anonymous: lambda node: exp.CurrentTimestamp() if node.name.upper() == "NOW" else node,
    exp.Concat: _concat,
    exp.DPipe: _concat,
}
"""What sqlglot leaves as it is although SQLite does not know it, or means another thing."""


def _date(node: exp.Expr) -> exp.Expr:
    """Take off what sqlglot, or a query, writes around a date: here it is a text."""
    while isinstance(node, exp.TsOrDsToDate | exp.TsOrDsToTimestamp | exp.Paren) or (
        isinstance(node, exp.Cast) and node.to.this in _DATES
    ):
        node = node.this
    return node


def _call(name: str, *values: exp.Expr) -> exp.Expr:
    return exp.Anonymous(this=name, expressions=[value.copy() for value in values])


def _folded(node: exp.Expr) -> exp.Expr:
    """Let case not count to MySQL: a COLLATE anywhere in an operand decides a comparison."""
    match node:
        case exp.Column():
            can_be_text = not node.is_star
        case exp.Literal():  # a number is a column as a key
            can_be_text = node.is_string or isinstance(node.parent, exp.Ordered | exp.Group)
        case exp.Subquery():
            is_table = isinstance(node.parent, exp.From | exp.Join | exp.Subquery | None)
            can_be_text = not is_table and node.arg_key != "query"
        case _:
            can_be_text = False
    if not can_be_text:
        return node
    folded = exp.Collate(this=node.copy(), expression=exp.Var(this="NOCASE"))
    is_named = isinstance(node, exp.Column) and isinstance(node.parent, exp.Select)
    return exp.alias_(folded, node.name, quoted=True) if is_named else folded
