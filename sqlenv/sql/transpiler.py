"""Queries of MySQL and PostgreSQL, written for SQLite where they mean the same there.

sqlglot rewrites; it does not promise that a rewrite means the same, and passes on what it does not
know. So a query is refused unless `portable.py` knows all of it, and
`_for_mysql` and `_for_postgres` rewrite what sqlglot leaves alone although it means something else.
`tests/data/dialects.json` shows what runs and what is refused.

The engine is not there to be asked, so this is assumed:

- MySQL compares text in its default way (utf8mb4_0900_ai_ci: case does not count) and orders signs
  as their codes are, PostgreSQL byte by byte and in the order of the code points (collation C).
- Letters beyond ASCII have neither case, as in SQLite, nor accents that could be left out.
- Columns have the type of their values, hence text is compared with text and numbers with numbers.
  They have no collation of their own. Dates are text such as 2026-11-21, and are compared with
  text that is as long.
- Decimals are binary floats of full length, and numbers with a fraction are decimals in MySQL, of
  which ROUND takes halves away from 0.

What only the data can tell (a date in a subtraction, a fraction as text, a divisor of 0) makes the
query fail while it runs (`_guard`). A query that its own engine would refuse may run here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator
from itertools import pairwise

import sqlglot
from sqlglot import exp
from sqlglot.dialects.sqlite import SQLite
from sqlglot.errors import ErrorLevel

from sqlenv.sql.cache import cached
from sqlenv.sql.extraction import (
    MAX_CHARS,
    MAX_TREE_DEPTH,
    PARSE_FAILURES,
    Query,
    depth,
    is_within_limits,
    parse,
    strip_comments,
    tokens,
)
from sqlenv.sql.portable import (
    COMPARED,
    TYPE,
    NotPortableError,
    branches,
    check,
    kind_of,
)
from sqlenv.types import SqlError

_ENGINES = {"mysql": "MySQL", "postgres": "PostgreSQL"}
# Text that SQLite's lexer reads otherwise than the dialect's, and signs outside of quotes.
_MARKS = re.compile(r"\\|/\*[!+]|\$\$|\$\w*\$|\b\d+_\d")
_SIGNS = {"mysql": frozenset("#$!["), "postgres": frozenset("#$![`")}
_DASHES = re.compile(r"--(?=\S)")  # no comment in MySQL


class _Backticks(SQLite):
    """SQLite, names in backticks: one in double quotes that is not found is a string to it."""

    Tokenizer = type("BacktickTokenizer", (SQLite.Tokenizer,), {"IDENTIFIERS": ["`"]})


@cached(maxsize=16384)
def transpiled(sql: str, dialect: str) -> str | SqlError:
    """Write a query of MySQL or PostgreSQL for SQLite; see `sqlenv.dialects.transpile`."""
    try:
        return _transpiled(sql, dialect)
    except NotPortableError as refusal:
        why = str(refusal)
    except RecursionError:  # long chains are deep trees
        why = "too deep"
    except PARSE_FAILURES as error:
        why = (str(error).splitlines() or [type(error).__name__])[0][:200]
    return SqlError(f"not transpiled from {_ENGINES[dialect]}: {why}")


def _transpiled(sql: str, dialect: str) -> str:
    tree = _read(sql, dialect)
    check(tree, dialect)
    for node in _from_leaves(tree):
        _guard(node, dialect)
    rewrite = _for_mysql if dialect == "mysql" else _for_postgres
    for node in _from_leaves(tree):
        if (new := rewrite(node)) is not node:
            node.replace(new)
    text = tree.sql(dialect=_Backticks, unsupported_level=ErrorLevel.RAISE, comments=False)
    if parse(text) is None:
        raise NotPortableError("no query of SQLite comes of it")
    return text


def _from_leaves(tree: exp.Expr) -> Iterator[exp.Expr]:
    return reversed(list(tree.walk()))


def _read(sql: str, dialect: str) -> Query:
    if len(sql) > MAX_CHARS:
        raise NotPortableError("too long")
    if found := _MARKS.search(sql):
        raise NotPortableError(f"{found[0]} in the text")
    if dialect == "mysql" and _DASHES.search(sql):
        raise NotPortableError("-- without a blank after it")
    words = tokens(sql)
    signs = {word[0] for word in words if word != "!="}
    if "\0" in sql or not is_within_limits(words) or _SIGNS[dialect] & signs:
        raise NotPortableError("not one query, or too long, too deep, or with signs of its own")
    quoted = [word[0] == "'" or (dialect == "mysql" and word[0] == '"') for word in words]
    if any(one and two for one, two in pairwise(quoted)):
        raise NotPortableError("two strings side by side")
    text = strip_comments(sql).rstrip("; \t\r\n")
    tree = sqlglot.parse_one(text, read=dialect, error_level=ErrorLevel.RAISE)
    if not isinstance(tree, Query):
        raise NotPortableError("not a query")
    if depth(tree) > MAX_TREE_DEPTH:  # the time that checks and guards take grows with its square
        raise NotPortableError("too deep")
    return tree


# Guards: values that could be of the wrong type, which only the data can tell.

_MOST_NESTED = 8  # a guard repeats its value: more guards than these inside of one are refused
_TEXTS = (
    *(exp.Concat, exp.DPipe, exp.Like, exp.ILike, exp.Length, exp.Upper, exp.Lower),
    *(exp.Substring, exp.Trim),
)
_NUMBERS = (
    *(exp.Add, exp.Sub, exp.Mul, exp.Div, exp.IntDiv, exp.Mod, exp.Neg, exp.Abs, exp.Sum),
    exp.Null,
)


def _guard(node: exp.Expr, dialect: str) -> None:
    """Write `CASE WHEN a value is of the wrong type THEN an error ELSE the value END`.

    Raises:
        NotPortableError: Guards would stand in one another too often.
    """
    for value, is_wrong, words in _doubts(node, dialect):
        if sum("guard" in case.meta for case in value.find_all(exp.Case)) > _MOST_NESTED:
            raise NotPortableError("arithmetic within arithmetic too often")
        texts = [exp.Literal.string("{}"), exp.Literal.string(words)]
        error = exp.Anonymous(this="JSON_EXTRACT", expressions=texts)
        branch = exp.If(this=is_wrong(value.copy()), true=error)
        guarded = exp.Case(ifs=[branch], default=value.copy())
        guarded.meta["guard"] = True
        value.replace(guarded)


_Test = Callable[[exp.Expr], exp.Expr]


def _doubts(node: exp.Expr, dialect: str) -> Iterator[tuple[exp.Expr, _Test, str]]:
    """Yield the values of a node that may be wrong, how that is seen, and what to say then."""
    if isinstance(node, exp.Add | exp.Sub):
        for side in (node.this, node.expression):
            if not _is_number(side):
                yield side, _is_date, "a date or a time in arithmetic"
    elif isinstance(node, _TEXTS):
        sides = node.expressions if isinstance(node, exp.Concat) else [node.this]
        for side in (*sides, node.expression) if isinstance(node, exp.DPipe) else sides:
            if not kind_of(side) and not isinstance(side, exp.Null):
                yield side, _is_fraction, "a number with a fraction as text"
    divides = dialect == "postgres" and isinstance(node, exp.Div | exp.Mod)
    if divides and not _is_never_zero(node.expression):
        yield node.expression, _is_zero, "division by zero"


def _is_date(value: exp.Expr) -> exp.Expr:
    """SQLite would count with the year of a date alone."""
    return exp.Glob(this=value, expression=exp.Literal.string("*[0-9][0-9][-:][0-9][0-9]*"))


def _is_fraction(value: exp.Expr) -> exp.Expr:
    kind = exp.Anonymous(this="TYPEOF", expressions=[value])
    return exp.Glob(this=kind, expression=exp.Literal.string("real"))


def _is_zero(value: exp.Expr) -> exp.Expr:
    return exp.EQ(this=exp.Paren(this=value), expression=exp.Literal.number(0))


def _is_number(node: exp.Expr) -> bool:
    node = node.unnest()
    if isinstance(node, exp.Case | exp.If | exp.Coalesce):
        return any(map(_is_number, branches(node)))
    return kind_of(node) in ("int", "real") or isinstance(node, _NUMBERS)


def _is_never_zero(node: exp.Expr) -> bool:
    node = node.unnest()
    number = node.expression if isinstance(node, exp.Nullif) else node
    is_zero = isinstance(number, exp.Literal) and not number.this.strip("0.")
    return (
        is_zero if isinstance(node, exp.Nullif) else isinstance(node, exp.Literal) and not is_zero
    )


# Rewriting: what sqlglot leaves as it is although it means something else.


def _for_both(node: exp.Expr) -> exp.Expr:
    if isinstance(node, exp.Mod):  # SQLite's % cuts its operands
        sides = [node.this.unnest(), node.expression.unnest()]
        return exp.Anonymous(this="MOD", expressions=sides)
    if isinstance(node, exp.Cast) and node.to.this is TYPE.DECIMAL:
        return _decimal(node)
    if isinstance(node, exp.Concat | exp.DPipe):  # SQLite's || binds closer than anything
        for part in (node.this, node.args.get("expression"), *node.expressions):
            if isinstance(part, exp.Binary) and not isinstance(part, exp.DPipe):
                part.replace(exp.Paren(this=part.copy()))
    return node


def _decimal(node: exp.Cast) -> exp.Expr:
    """Write DECIMAL(p, s) as a rounded float; without p PostgreSQL does not round."""
    real = exp.cast(node.this, "double")
    sizes = node.to.expressions
    if not sizes:
        return real
    digits = sizes[1].this if len(sizes) > 1 else exp.Literal.number(0)
    return exp.Round(this=real, decimals=digits)


def _for_postgres(node: exp.Expr) -> exp.Expr:
    """LIKE tells capitals from small letters, as SQLite's GLOB does; ILIKE does not, as LIKE."""
    if isinstance(node, exp.Like):
        pattern = re.sub(r"[*?\[]", r"[\g<0>]", node.expression.this)
        pattern = pattern.replace("%", "*").replace("_", "?")
        glob = exp.Glob(this=node.this, expression=exp.Literal.string(pattern))
        return exp.paren(exp.not_(glob)) if node.args.get("negate") else glob
    if isinstance(node, exp.ILike):
        return exp.Like(**node.args)
    return _for_both(node)


def _for_mysql(node: exp.Expr) -> exp.Expr:
    """Let case not count wherever values are compared: the left side decides in SQLite."""
    match node:
        case exp.Ordered():
            node.set("this", _folded(node.this, is_key=True))
        case exp.Cast() if node.to.this is TYPE.DECIMAL and not node.to.expressions:
            return exp.Round(this=exp.cast(node.this, "double"), decimals=exp.Literal.number(0))
        case exp.Group() | exp.Distinct():
            node.set("expressions", [_folded(item, is_key=True) for item in node.expressions])
        case exp.Window():
            node.set("partition_by", [_folded(key) for key in node.args.get("partition_by") or []])
        case exp.Select() if node.args.get("distinct") or _is_operand(node):
            node.set("expressions", [_folded_item(item) for item in node.expressions])
    if isinstance(node, _COMPARING) and node.this is not None:
        node.set("this", _folded(node.this))
    return _for_both(node)


_COMPARING = (*COMPARED, exp.Min, exp.Max, exp.Nullif, exp.Case)


def _is_operand(node: exp.Expr) -> bool:
    above = node.parent
    while isinstance(above, exp.SetOperation):
        if above.args.get("distinct"):
            return True
        above = above.parent
    return False


def _folded(node: exp.Expr, *, is_key: bool = False) -> exp.Expr:
    """Compare a text without case; a number is a column as a key of ORDER BY or GROUP BY."""
    is_column = is_key and isinstance(node, exp.Literal)
    is_number = kind_of(node) in ("int", "real") and not is_column
    if is_number or isinstance(node, exp.Star | exp.Distinct | exp.Tuple):
        return node
    inner = exp.Paren(this=node) if isinstance(node, exp.Binary | exp.Not) else node
    return exp.Collate(this=inner, expression=exp.Var(this="NOCASE"))


def _folded_item(item: exp.Expr) -> exp.Expr:
    if item.is_star:
        raise NotPortableError("* where rows are compared")
    if isinstance(item, exp.Alias):
        item.set("this", _folded(item.this))
        return item
    folded = _folded(item)
    is_named = isinstance(item, exp.Column) and folded is not item
    return exp.alias_(folded, item.name, quoted=True) if is_named else folded
