"""Queries of MySQL and PostgreSQL, written for SQLite where they mean the same there.

sqlglot rewrites; it does not promise that a rewrite means the same, and passes on what it does not
know. So a query is refused unless `portable.py` knows all of it, and
`_rewritten` changes what sqlglot leaves alone although it means something else.
`tests/data/dialects.json` shows what runs and what is refused.

The engine is not there to be asked, so this is assumed:

- MySQL compares text in its default way (utf8mb4_0900_ai_ci: case does not count) and orders signs
  as their codes are, PostgreSQL byte by byte and in the order of the code points (collation C).
- Letters beyond ASCII have neither case, as in SQLite, nor accents that could be left out.
- Columns have the type of their values, hence text is compared with text and numbers with numbers.
  They have no collation of their own. Dates are text such as 2026-11-21, and are compared with
  text that is as long.
- Decimals are binary floats of full length, and numbers with a fraction are decimals in MySQL, of
  which ROUND takes halves away from 0, here too (`_rounded`).
- The clock is UTC's. Of dates only the day and its parts are read, in `dates.py`.

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

from sqlenv.sql import dates
from sqlenv.sql.cache import cached
from sqlenv.sql.extraction import (
    MAX_CHARS,
    MAX_TREE_DEPTH,
    PARSE_FAILURES,
    QueryTree,
    depth,
    is_within_limits,
    parse,
    strip_comments,
    tokens,
)
from sqlenv.sql.portable import TYPE, NotPortableError, branches, check, kind_of
from sqlenv.types import ENGINES, SqlError

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
    return SqlError(f"not transpiled from {ENGINES[dialect]}: {why}")


def _transpiled(sql: str, dialect: str) -> str:
    tree = _read(sql, dialect)
    check(tree, dialect)
    for node in _from_leaves(tree):
        _guard(node, dialect)
    for node in _from_leaves(tree):
        if (new := _rewritten(node, dialect)) is not node:
            node.replace(new)
    text = tree.sql(dialect=_Backticks, unsupported_level=ErrorLevel.RAISE, comments=False)
    if parse(text) is None:
        raise NotPortableError("no query of SQLite comes of it")
    return text


def _from_leaves(tree: exp.Expr) -> Iterator[exp.Expr]:
    return reversed(list(tree.walk()))


def _read(sql: str, dialect: str) -> QueryTree:
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
    if not isinstance(tree, QueryTree):
        raise NotPortableError("not a query")
    _rename_calls(tree, dialect)
    if depth(tree) > MAX_TREE_DEPTH:  # the time that checks and guards take grows with its square
        raise NotPortableError("too deep")
    return tree


def _rename_calls(tree: exp.Expr, dialect: str) -> None:
    """Write `NOW()` and `LEFT(x, n)` as what `portable.py` knows."""
    for call in list(tree.find_all(exp.Anonymous, exp.Left)):
        if isinstance(call, exp.Left):
            first = {"start": exp.Literal.number(1), "length": call.expression}
            call.replace(exp.Substring(this=call.this, **first))
        elif dialect == "mysql" and call.name.upper() == "NOW" and not call.expressions:
            call.replace(exp.CurrentTimestamp())


_HALVES = "1.000000000000001"

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
    elif dates.is_call(node):
        for date in filter(dates.is_in_doubt, dates.dates(node)):
            yield date, dates.is_no_date, "a date that is not written as 2026-11-21"
    elif _divides(node, dialect):
        yield node.expression, _is_zero, "division by zero"


def _divides(node: exp.Expr, dialect: str) -> bool:
    """Tell a division whose divisor may be 0, at which PostgreSQL fails."""
    is_division = dialect == "postgres" and isinstance(node, exp.Div | exp.Mod)
    return is_division and not _is_never_zero(node.expression)


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


def _rewritten(node: exp.Expr, dialect: str) -> exp.Expr:
    match node:
        case exp.Mod():  # SQLite's % cuts its operands
            sides = [node.this.unnest(), node.expression.unnest()]
            return exp.Anonymous(this="MOD", expressions=sides)
        case exp.Cast() if node.to.this is TYPE.DECIMAL:
            return _decimal(node, dialect)
        case exp.Round() if kind_of(node.this) != "int":
            return _rounded(node.this, node.args.get("decimals"))
        case _ if dates.is_call(node):
            return dates.rewritten(node)
        case exp.Concat() | exp.DPipe():  # SQLite's || binds closer than anything
            for part in (node.this, node.args.get("expression"), *node.expressions):
                if isinstance(part, exp.Binary) and not isinstance(part, exp.DPipe):
                    part.replace(exp.Paren(this=part.copy()))
        case exp.Like() if dialect == "postgres":
            return _glob(node)
        case exp.ILike():
            return exp.Like(**node.args)
    return _folded(node) if dialect == "mysql" else node


def _decimal(node: exp.Cast, dialect: str) -> exp.Expr:
    """Write DECIMAL(p, s) as a rounded float; without p PostgreSQL does not round."""
    real, sizes = exp.cast(node.this, "double"), node.to.expressions
    if not sizes and dialect == "postgres":
        return real
    digits = sizes[1].this if len(sizes) > 1 else exp.Literal.number(0)
    return _rounded(real, digits)


def _rounded(value: exp.Expr, digits: exp.Expr | None) -> exp.Expr:
    """Round as a decimal: 2.675 is a half there, and a little less as a binary float.

    Five units in the last place bring a half over, and no number of 15 digits to another one.
    """
    moved = exp.Mul(this=exp.Paren(this=value.copy()), expression=exp.Literal.number(_HALVES))
    return exp.Round(this=moved, decimals=digits and digits.copy())


def _glob(node: exp.Like) -> exp.Expr:
    """PostgreSQL's LIKE tells capitals from small letters, as SQLite's GLOB does."""
    pattern = re.sub(r"[*?\[]", r"[\g<0>]", node.expression.this)
    pattern = pattern.replace("%", "*").replace("_", "?")
    glob = exp.Glob(this=node.this, expression=exp.Literal.string(pattern))
    return exp.paren(exp.not_(glob)) if node.args.get("negate") else glob


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
