"""Queries of MySQL and PostgreSQL, carried over to SQLite where they mean the same there.

sqlglot rewrites; it does not promise that a rewrite means the same, and passes on what it does not
know. So everything here is refused unless it is known to be the same in both engines or to become
so by a rewrite below. `tests/data/dialects.json` shows both kinds.

What is assumed, since the engine is not there to be asked:

- MySQL compares text in its default way (utf8mb4_0900_ai_ci: case does not count) and orders signs
  as their codes are, PostgreSQL byte by byte and in the order of the code points (collation C).
- Letters beyond ASCII have neither case, as in SQLite, nor accents that could be left out.
- Columns have the type of their values, hence text is compared with text and numbers with numbers.
  They have no collation of their own. Dates are text such as 2026-11-21, and are compared with
  text that is as long.
- Decimals are binary floats of full length, and numbers with a fraction are decimals in MySQL, of
  which ROUND takes halves away from 0.

What only the data can tell (a date in a subtraction, a fraction as text, a divisor of 0) makes the
query fail while it runs: `sqlenv.dialect_guards`. Otherwise a query that the engine itself would
refuse (for its types, say) may run here.
"""

from __future__ import annotations

import re
from itertools import pairwise

import sqlglot
from sqlglot import exp
from sqlglot.errors import ErrorLevel, SqlglotError

from sqlenv.dialect_guards import guard
from sqlenv.dialect_rules import COMPARED, TYPE, RefusedError, bare_value, check, kind_of
from sqlenv.sql.cache import cached
from sqlenv.sql.extraction import MAX_TREE_DEPTH, Query, depth, is_within_limits, parse
from sqlenv.sql.lexer import MAX_CHARS, strip_comments, tokens
from sqlenv.types import SqlError

_ENGINES = {"mysql": "MySQL", "postgres": "PostgreSQL"}


@cached(maxsize=16384)
def carried(sql: str, dialect: str) -> str | SqlError:
    """Write a query of MySQL or PostgreSQL for SQLite; see `sqlenv.dialects.carry_over`."""
    try:
        return _carried(sql, dialect)
    except RefusedError as refusal:
        why = str(refusal)
    except RecursionError:  # long chains are deep trees
        why = "too deep"
    return SqlError(f"not carried over from {_ENGINES[dialect]}: {why}")


def _carried(sql: str, dialect: str) -> str:
    if len(sql) > MAX_CHARS:
        raise RefusedError("too long")
    tree = _read(sql, dialect)
    check(tree, dialect)
    guard(tree, dialect)
    rewrite = _REWRITES[dialect]
    for node in reversed(list(tree.walk())):  # children before their parents
        new = rewrite(node)
        if new is not node:
            node.replace(new)
    try:
        text = tree.sql(dialect="sqlite", unsupported_level=ErrorLevel.RAISE, comments=False)
    except _FAILURES as error:
        raise RefusedError(_first_line(error)) from None
    text = _QUOTED.sub(_in_backticks, text)
    if parse(text) is None:
        raise RefusedError("no query of SQLite comes of it")
    return text


# sqlglot raises its own errors, and slips of its own code on text that is no SQL.
_FAILURES = (SqlglotError, RecursionError, ValueError, TypeError, AttributeError, LookupError)
# A name in double quotes that SQLite does not find is a string to it, and no error: backticks.
_QUOTED = re.compile(r"""('(?:[^']|'')*')|"((?:[^"]|"")*)\"""")


def _in_backticks(match: re.Match[str]) -> str:
    text, name = match.groups()
    return text or "`{}`".format(name.replace('""', '"').replace("`", "``"))


# Reading.

# Words that the scan of brackets, which knows SQLite's quotes and comments, would read otherwise
# than the dialect does; and what comments do in MySQL only.
_OWN_TEXT = re.compile(r"\\|/\*[!+]|\$\$|\$\w*\$|\b\d+_\d")
_FOREIGN = {"mysql": frozenset("#$!["), "postgres": frozenset("#$![`")}
_MYSQL_DASHES = re.compile(r"--(?=\S)")


def _read(sql: str, dialect: str) -> Query:
    """Parse a query within the limits of `sqlenv.sql.extraction`."""
    if found := _OWN_TEXT.search(sql):
        raise RefusedError(f"{found[0]} in the text")
    if dialect == "mysql" and _MYSQL_DASHES.search(sql):
        raise RefusedError("-- without a blank after it")
    words = tokens(sql)
    if (
        "\0" in sql
        or not is_within_limits(words)
        or _FOREIGN[dialect] & {w[0] for w in words if w != "!="}
    ):
        raise RefusedError("not one query, or too long, too deep, or with signs of its own")
    quoted = [word[0] == "'" or (dialect == "mysql" and word[0] == '"') for word in words]
    if any(one and two for one, two in pairwise(quoted)):
        raise RefusedError("two strings side by side")
    try:
        text = strip_comments(sql).rstrip("; \t\r\n")
        tree = sqlglot.parse_one(text, read=dialect, error_level=ErrorLevel.RAISE)
    except _FAILURES as error:
        raise RefusedError(_first_line(error)) from None
    if not isinstance(tree, Query):
        raise RefusedError("not a query")
    if depth(tree) > MAX_TREE_DEPTH:  # the time that checks and guards take grows with its square
        raise RefusedError("too deep")
    return tree


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


# Rewriting: what sqlglot leaves as it is although it means something else.


def _for_both(node: exp.Expr) -> exp.Expr:
    if isinstance(node, exp.Mod):  # SQLite's % cuts its operands
        sides = [bare_value(node.this), bare_value(node.expression)]
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


_COMPARISONS = (*COMPARED, exp.Min, exp.Max, exp.Nullif, exp.Case)


def _for_mysql(node: exp.Expr) -> exp.Expr:
    """Let case not count wherever values are compared: the left side decides in SQLite."""
    if isinstance(node, exp.Ordered):
        node.set("this", _folded_key(node.this))
    elif isinstance(node, _COMPARISONS) and node.this is not None:
        node.set("this", _folded(node.this))
    elif isinstance(node, exp.Cast) and node.to.this is TYPE.DECIMAL and not node.to.expressions:
        return exp.Round(this=exp.cast(node.this, "double"), decimals=exp.Literal.number(0))
    elif isinstance(node, exp.Group | exp.Distinct):
        node.set("expressions", [_folded_key(item) for item in node.expressions])
    elif isinstance(node, exp.Window):
        node.set("partition_by", [_folded(item) for item in node.args.get("partition_by") or []])
    elif isinstance(node, exp.Select) and (node.args.get("distinct") or _is_operand(node)):
        node.set("expressions", [_folded_item(item) for item in node.expressions])
    return _for_both(node)


def _is_operand(node: exp.Expr) -> bool:
    """Tell whether a SELECT is a side of a set operation that compares rows."""
    above = node.parent
    while isinstance(above, exp.SetOperation):
        if above.args.get("distinct"):
            return True
        above = above.parent
    return False


def _folded(node: exp.Expr) -> exp.Expr:
    if kind_of(node) in ("int", "real") or isinstance(node, exp.Star | exp.Distinct | exp.Tuple):
        return node
    inner = exp.Paren(this=node) if isinstance(node, exp.Binary | exp.Not) else node
    return exp.Collate(this=inner, expression=exp.Var(this="NOCASE"))


def _folded_key(node: exp.Expr) -> exp.Expr:
    """Fold a key of ORDER BY or GROUP BY; a number is a column there."""
    if isinstance(node, exp.Literal):
        return exp.Collate(this=node, expression=exp.Var(this="NOCASE"))
    return _folded(node)


def _folded_item(item: exp.Expr) -> exp.Expr:
    """Fold a value of the SELECT list, and keep its name."""
    if item.is_star:
        raise RefusedError("* where rows are compared")
    if isinstance(item, exp.Alias):
        item.set("this", _folded(item.this))
        return item
    folded = _folded(item)
    named = isinstance(item, exp.Column) and folded is not item
    return exp.alias_(folded, item.name, quoted=True) if named else folded


_REWRITES = {"mysql": _for_mysql, "postgres": _for_postgres}
