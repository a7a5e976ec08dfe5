"""Queries of MySQL and PostgreSQL, carried over to SQLite where they mean the same there.

sqlglot rewrites; it does not promise that a rewrite means the same, and passes on what it does not
know. So everything here is refused unless it is known to be the same in both engines or to become
so by a rewrite below. `tests/data/dialects.json` shows both kinds.

What is assumed, since the engine is not there to be asked:

- MySQL compares text in its default way (utf8mb4_0900_ai_ci: case does not count), PostgreSQL byte
  by byte and in the order of the code points (collation C).
- Letters beyond ASCII have no case, as in SQLite.
- Text is compared with text and numbers with numbers; dates are text such as 2026-11-21. Decimals
  are binary floats of full length. Columns have no collation of their own.

A query that the engine itself would refuse (for its types, say) may run here.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from itertools import pairwise
from pathlib import Path

import sqlglot
from sqlglot import exp
from sqlglot.errors import ErrorLevel, SqlglotError

from sqlenv.parse import Query, cached, is_within_limits, parse, strip_comments, tokens
from sqlenv.types import Dialect, Example, Result, SqlError

NAMES: Mapping[str, Dialect] = {
    "sqlite": "sqlite",
    "mysql": "mysql",
    "postgres": "postgres",
    "postgresql": "postgres",
}
"""How data sets spell the dialects, in lower case."""
_ENGINES = {"mysql": "MySQL", "postgres": "PostgreSQL"}


def run(ask: Callable[[Path, str], Result], example: Example, sql: str) -> Result:
    """Run a query that is written in an example's dialect.

    Args:
        ask: The executor's `execute` or `gold`.
        example: Names the dialect and the database.
        sql: A prediction, or the gold query.

    Returns:
        What the executor gives; an error where the query cannot be carried over.
    """
    text = carry_over(sql, example.dialect)
    return text if isinstance(text, SqlError) else ask(example.database, text)


@cached(maxsize=16384)
def carry_over(sql: str, dialect: str) -> str | SqlError:
    """Write a query for SQLite.

    Args:
        sql: Whatever a data set or a model wrote.
        dialect: `sqlite`, which is left alone, `mysql` or `postgres`.

    Returns:
        The query, or why it cannot be carried over without a change of meaning.
    """
    if dialect == "sqlite":
        return sql
    try:
        return _carried(sql, dialect)
    except _Refused as refusal:
        return SqlError(f"not carried over from {_ENGINES[dialect]}: {refusal}")


class _Refused(Exception):
    """A construct that has no equal in SQLite; the words name it."""


def _carried(sql: str, dialect: str) -> str:
    tree = _read(sql, dialect)
    for node in tree.walk():
        _check(node, dialect)
    for select in tree.find_all(exp.Select):
        _check_groups(select)
    rewrite = _REWRITES[dialect]
    for node in reversed(list(tree.walk())):  # children before their parents
        new = rewrite(node)
        if new is not node:
            node.replace(new)
    try:
        text = tree.sql(dialect="sqlite", unsupported_level=ErrorLevel.RAISE, comments=False)
    except _FAILURES as error:
        raise _Refused(_first_line(error)) from None
    text = _QUOTED.sub(lambda m: m[1] or "`{}`".format(m[2].replace("`", "``")), text)
    if parse(text) is None:
        raise _Refused("no query of SQLite comes of it")
    return text


# sqlglot raises its own errors, and slips of its own code on text that is no SQL.
_FAILURES = (SqlglotError, RecursionError, ValueError, TypeError, AttributeError, LookupError)
# A name in double quotes that SQLite does not find is a string to it, and no error: backticks.
_QUOTED = re.compile(r"""('(?:[^']|'')*')|"((?:[^"]|"")*)\"""")


# Reading.

# Words that the scan of brackets, which knows SQLite's quotes and comments, would read otherwise
# than the dialect does; and what comments do in MySQL only.
_OWN_TEXT = re.compile(r"\\|/\*[!+]|\$\$|\$\w*\$")
_FOREIGN = {"mysql": frozenset("#$!["), "postgres": frozenset("#$![`")}
_MYSQL_DASHES = re.compile(r"--(?=\S)")


def _read(sql: str, dialect: str) -> Query:
    """Parse a query within the limits of `sqlenv.parse`."""
    if found := _OWN_TEXT.search(sql):
        raise _Refused(f"{found[0]} in the text")
    if dialect == "mysql" and _MYSQL_DASHES.search(sql):
        raise _Refused("-- without a blank after it")
    words = tokens(sql)
    if "\0" in sql or not is_within_limits(words) or _FOREIGN[dialect] & {w[0] for w in words}:
        raise _Refused("not one query, or too long, too deep, or with signs of its own")
    quoted = [word[0] == "'" or (dialect == "mysql" and word[0] == '"') for word in words]
    if any(one and two for one, two in pairwise(quoted)):
        raise _Refused("two strings side by side")
    try:
        text = strip_comments(sql).rstrip("; \t\r\n")
        tree = sqlglot.parse_one(text, read=dialect, error_level=ErrorLevel.RAISE)
    except _FAILURES as error:
        raise _Refused(_first_line(error)) from None
    if not isinstance(tree, Query):
        raise _Refused("not a query")
    return tree


def _first_line(error: Exception) -> str:
    return (str(error).splitlines() or [type(error).__name__])[0][:200]


# Checking: a node is refused unless it stands in one of the tables.

_ALWAYS_THE_SAME = (
    *(exp.Select, exp.From, exp.Where, exp.Having, exp.Order, exp.Ordered, exp.Offset),
    *(exp.Table, exp.TableAlias, exp.Alias, exp.Column, exp.Identifier, exp.Star, exp.Paren),
    *(exp.Null, exp.Boolean, exp.And, exp.Or, exp.Not, exp.EQ, exp.NEQ, exp.GT, exp.GTE),
    *(exp.LT, exp.LTE, exp.Between, exp.In, exp.Is, exp.Exists, exp.With, exp.CTE),
    *(exp.Add, exp.Sub, exp.Mul, exp.Neg, exp.Case, exp.If, exp.Coalesce, exp.Nullif),
    *(exp.Count, exp.Sum, exp.Avg, exp.Min, exp.Max, exp.Abs, exp.Upper, exp.Lower),
    *(exp.Window, exp.WindowSpec, exp.RowNumber, exp.Rank, exp.DenseRank, exp.Lag, exp.Lead),
    *(exp.Filter, exp.Group, exp.DataType, exp.DataTypeParam, exp.Var),
)

Check = Callable[[exp.Expr, str], str]
"""From a node and its dialect to what is wrong with it; empty where nothing is."""


def _check(node: exp.Expr, dialect: str) -> None:
    kind = type(node)
    if kind not in _ALWAYS_THE_SAME and kind not in _SOMETIMES:
        raise _Refused(f"{node.name}()" if kind is exp.Anonymous else kind.__name__)
    if extra := set(_arguments(node)) - _ARGUMENTS:
        raise _Refused(f"{kind.__name__} with {min(extra)}")
    if problem := _SOMETIMES.get(kind, lambda *_: "")(node, dialect):
        raise _Refused(problem)


def _arguments(node: exp.Expr) -> list[str]:
    return [name for name, value in node.args.items() if value]


_ARGUMENTS = frozenset(
    {"this", "expression", "expressions", "alias", "columns", "quoted", "is_string", "table"}
    | {"with_", "recursive", "materialized", "distinct", "from_", "joins", "where", "group"}
    | {"having", "order", "limit", "offset", "desc", "nulls_first", "windows"}
    | {"on", "side", "kind", "method", "using", "query", "low", "high", "negate"}
    | {"ifs", "true", "false", "default", "to", "safe", "coalesce", "is_nvl", "big_int"}
    | {"decimals", "start", "length", "binary", "typed"}
    | {"partition_by", "over", "spec", "start_side", "end", "end_side"}
)
"""What may be said of a node; sqlglot drops some of what it does not know, and keeps the rest."""


def _number(node: exp.Expr | None) -> int | None:
    """Read a whole number that is written out; None for anything else."""
    if isinstance(node, exp.Literal) and not node.is_string and node.this.isdigit():
        return int(node.this)
    return None


def _kind(node: exp.Expr | None) -> str:
    """Tell `int`, `real` or `text` where the text alone tells it; else an empty word."""
    while isinstance(node, exp.Paren | exp.Neg | exp.Alias | exp.Abs):
        node = node.this
    if isinstance(node, exp.Literal):
        return "text" if node.is_string else "int" if node.this.isdigit() else "real"
    if isinstance(node, exp.Cast):
        return next((kind for kind, types in _TYPES.items() if node.to.this in types), "")
    if isinstance(node, exp.Add | exp.Sub | exp.Mul | exp.Div):
        kinds = {_kind(node.this), _kind(node.expression)}
        return "real" if "real" in kinds else "int" if kinds == {"int"} else ""
    if isinstance(node, exp.Sum | exp.Nullif | exp.Coalesce | exp.Min | exp.Max):
        return _kind(node.this)
    return next((kind for kind, classes in _RETURNS.items() if isinstance(node, classes)), "")


_T = exp.DataType.Type
_TYPES = {
    "int": {_T.INT, _T.BIGINT, _T.SMALLINT, _T.TINYINT, _T.UBIGINT, _T.UINT},
    "real": {_T.DOUBLE, _T.DECIMAL},
    "text": {_T.TEXT, _T.VARCHAR, _T.CHAR},
}
_RETURNS = {
    "int": (exp.Count, exp.Length, exp.RowNumber, exp.Rank, exp.DenseRank),
    "real": (exp.Avg,),
    "text": (exp.Concat, exp.DPipe, exp.Upper, exp.Lower, exp.Substring, exp.Trim),
}


def _check_division(node: exp.Expr, dialect: str) -> str:
    """MySQL divides exactly, which sqlglot writes out; PostgreSQL cuts whole numbers, by type."""
    kinds = (_kind(node.this), _kind(node.expression))
    if dialect == "mysql" or "real" in kinds or kinds == ("int", "int"):
        return ""
    return "/ of values whose types the query does not tell"


def _check_whole_division(_node: exp.Expr, dialect: str) -> str:
    return "" if dialect == "mysql" else "whole division"


def _check_like(node: exp.Expr, _dialect: str) -> str:
    pattern = node.expression
    written = isinstance(pattern, exp.Literal) and pattern.is_string and pattern.this.isascii()
    return "" if written else "LIKE with a pattern that is not written out in ASCII"


def _check_cast(node: exp.Expr, _dialect: str) -> str:
    """Casts to whole numbers round there and cut here; numbers become other texts."""
    target = node.args["to"]
    wanted = next((kind for kind, types in _TYPES.items() if target.this in types), "")
    sized = bool(target.expressions)
    if wanted == "real" and (not sized or target.this is _T.DECIMAL):
        return ""
    fine = {"int": ("int",), "text": ("int", "text")}.get(wanted, ())
    if _kind(node.this) in fine and not sized:
        return ""
    return f"CAST to {target.sql().upper()}"


def _check_concat(node: exp.Expr, _dialect: str) -> str:
    parts = [node.this, node.expression] if isinstance(node, exp.DPipe) else node.expressions
    return "a number with a fraction as text" if "real" in map(_kind, parts) else ""


def _check_round(node: exp.Expr, dialect: str) -> str:
    digits = node.args.get("decimals")
    if digits is None and dialect == "postgres" and _kind(node.this) != "int":
        return "ROUND to a whole number, which rounds halves by type"
    return (
        "" if digits is None or _number(digits) is not None else "ROUND to digits not written out"
    )


def _check_substring(node: exp.Expr, _dialect: str) -> str:
    start, length = node.args.get("start"), node.args.get("length")
    fine = (_number(start) or 0) >= 1 and (length is None or _number(length) is not None)
    return "" if fine else "SUBSTRING from a place that is not a number from 1"


def _check_length(node: exp.Expr, dialect: str) -> str:
    """MySQL's LENGTH counts bytes."""
    return "LENGTH in bytes" if dialect == "mysql" and node.args.get("binary") else ""


def _check_trim(node: exp.Expr, _dialect: str) -> str:
    return "" if _arguments(node) == ["this"] else "TRIM of other signs than blanks"


def _check_distinct(node: exp.Expr, _dialect: str) -> str:
    if node.args.get("on"):
        return "DISTINCT ON"
    counted = isinstance(node.parent, exp.AggFunc)
    return "DISTINCT of several values" if counted and len(node.expressions) != 1 else ""


def _check_limit(node: exp.Expr, _dialect: str) -> str:
    return "" if _number(node.expression) is not None else "LIMIT that is not a number"


def _check_set_operation(node: exp.Expr, _dialect: str) -> str:
    """SQLite has no ALL but for UNION, no brackets around operands, and one precedence."""
    if not isinstance(node, exp.Union) and not node.args.get("distinct"):
        return f"{type(node).__name__.upper()} ALL"
    sides = (node.this, node.expression)
    if any(isinstance(side, exp.Subquery) for side in sides):
        return "brackets around the side of a set operation"
    mixed = any(
        isinstance(side, exp.SetOperation) and type(side) is not type(node) for side in sides
    )
    return "set operations of several kinds" if mixed else ""


def _check_join(node: exp.Expr, dialect: str) -> str:
    words = {(node.args.get(name) or "").upper() for name in ("side", "kind", "method")}
    known = {"", "LEFT", "RIGHT", "FULL", "INNER", "CROSS", "OUTER"}
    if dialect == "mysql" and node.args.get("using"):
        return "USING, which compares capitals"
    return "" if words <= known else f"{' '.join(sorted(words - known))} JOIN"


def _check_literal(node: exp.Expr, dialect: str) -> str:
    """MySQL folds accents and the case of letters that SQLite's NOCASE leaves alone."""
    plain = node.this.isascii() or dialect != "mysql" or not node.is_string
    return "" if plain else "a string with letters beyond ASCII"


def _check_subquery(node: exp.Expr, _dialect: str) -> str:
    return "" if isinstance(node.this, exp.Select | exp.SetOperation) else "brackets around tables"


_SOMETIMES: Mapping[type[exp.Expr], Check] = {
    exp.Div: _check_division,
    exp.IntDiv: _check_whole_division,
    exp.Mod: lambda *_: "",
    exp.Concat: _check_concat,
    exp.DPipe: _check_concat,
    exp.Like: _check_like,
    exp.ILike: _check_like,
    exp.Cast: _check_cast,
    exp.Round: _check_round,
    exp.Substring: _check_substring,
    exp.Length: _check_length,
    exp.Trim: _check_trim,
    exp.Distinct: _check_distinct,
    exp.Limit: _check_limit,
    exp.Union: _check_set_operation,
    exp.Except: _check_set_operation,
    exp.Intersect: _check_set_operation,
    exp.Join: _check_join,
    exp.Literal: _check_literal,
    exp.Subquery: _check_subquery,
}


def _check_groups(select: exp.Expr) -> None:
    """Refuse columns that are neither grouped nor aggregated: SQLite takes them of any row."""
    group = select.args.get("group")
    parts = [*select.expressions, *_clauses(select, ("having", "order"))]
    aggregates = any(_own(part, exp.AggFunc) for part in parts)
    if group is None and not aggregates:
        return
    names = {item.alias: item.this for item in select.expressions if isinstance(item, exp.Alias)}
    keys = set()
    for key in group.expressions if group else ():
        number = _number(key)
        if number is not None and 1 <= number <= len(select.expressions):
            key = select.expressions[number - 1].unalias()
        keys |= {key, names.get(key.name, key) if isinstance(key, exp.Column) else key}
    columns = {key.name.lower() for key in keys if isinstance(key, exp.Column)}
    for part in parts:
        for column in _bare(part, keys):
            if column.name not in names and column.name.lower() not in columns:
                raise _Refused("a column that is neither grouped nor aggregated")


def _clauses(select: exp.Expr, names: tuple[str, ...]) -> list[exp.Expr]:
    return [clause for name in names if (clause := select.args.get(name)) is not None]


def _is_aggregate(node: exp.Expr) -> bool:
    return isinstance(node, exp.AggFunc | exp.Filter) and not isinstance(node.parent, exp.Window)


def _own(part: exp.Expr, kind: type[exp.Expr]) -> bool:
    """Tell whether a node of a kind stands in a clause itself, outside windows and subqueries."""
    nodes = part.walk(prune=lambda node: isinstance(node, exp.Subquery | exp.Window | exp.Query))
    return any(isinstance(node, kind) and _is_aggregate(node) for node in nodes)


def _bare(part: exp.Expr, keys: set[exp.Expr]) -> list[exp.Expr]:
    """List the columns of a clause outside aggregates, subqueries and grouping expressions."""

    def closed(node: exp.Expr) -> bool:
        return node in keys or _is_aggregate(node) or isinstance(node, exp.Query | exp.Subquery)

    nodes = (node for node in part.walk(prune=closed) if not closed(node))
    return [node for node in nodes if isinstance(node, exp.Column | exp.Star)]


# Rewriting: what sqlglot leaves as it is although it means something else.


def _for_both(node: exp.Expr) -> exp.Expr:
    if isinstance(node, exp.Mod):  # SQLite's % cuts its operands
        return exp.Anonymous(
            this="MOD", expressions=[_unwrapped(node.this), _unwrapped(node.expression)]
        )
    if isinstance(node, exp.Cast) and node.to.this is _T.DECIMAL:
        return _decimal(node)
    return node


def _decimal(node: exp.Cast) -> exp.Expr:
    """Write DECIMAL(p, s) as a rounded float; without p PostgreSQL does not round."""
    real = exp.cast(node.this, "double")
    sizes = node.to.expressions
    if not sizes:
        return real
    digits = sizes[1].this if len(sizes) > 1 else exp.Literal.number(0)
    return exp.Round(this=real, decimals=digits)


def _unwrapped(node: exp.Expr) -> exp.Expr:
    return node.this if isinstance(node, exp.Paren) else node


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


_COMPARISONS = (
    *(exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Between, exp.In),
    *(exp.Min, exp.Max, exp.Nullif, exp.Case),
)


def _for_mysql(node: exp.Expr) -> exp.Expr:
    """Let case not count wherever values are compared: the left side decides in SQLite."""
    if isinstance(node, exp.Ordered):
        node.set("this", _folded_key(node.this))
    elif isinstance(node, _COMPARISONS) and node.this is not None:
        node.set("this", _folded(node.this))
    elif isinstance(node, exp.Cast) and node.to.this is _T.DECIMAL and not node.to.expressions:
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
    if _kind(node) in ("int", "real") or isinstance(node, exp.Star | exp.Distinct | exp.Tuple):
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
        raise _Refused("* where rows are compared")
    if isinstance(item, exp.Alias):
        item.set("this", _folded(item.this))
        return item
    folded = _folded(item)
    named = isinstance(item, exp.Column) and folded is not item
    return exp.alias_(folded, item.name, quoted=True) if named else folded


_REWRITES = {"mysql": _for_mysql, "postgres": _for_postgres}
