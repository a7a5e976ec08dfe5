"""Which queries of MySQL and PostgreSQL mean the same in SQLite, or can be made to.

A node of sqlglot's tree is refused unless `_RULES` has its kind and finds nothing against it, and
so is whatever is said of it that `_ARGUMENTS` does not have.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping
from typing import Any

from sqlglot import exp

from sqlenv.sql import dates

# As text, 2026-1-2 comes after 2026-01-10.
_DATE = re.compile(r"\s*\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}(?!\d)")
_ISO_DAY = re.compile(r"\d{4}-\d\d-\d\d")
_ISO_DATE = re.compile(rf"{_ISO_DAY.pattern}( \d\d:\d\d:\d\d)?")
_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")


class NotPortableError(Exception):
    """A construct that has no equal in SQLite; the words name it."""


def check(tree: exp.Expr, dialect: str) -> None:
    """Look for what would change its meaning in a query of `mysql` or `postgres`.

    Raises:
        NotPortableError: There is something.
    """
    for node in tree.walk():
        _check(node, dialect)
    for select in tree.find_all(exp.Select):
        _check_groups(select)
    _check_texts_of_numbers(tree)


# Types, where the text alone tells them.

TYPE = exp.DataType.Type
_INTEGERS = (TYPE.INT, TYPE.BIGINT, TYPE.SMALLINT, TYPE.TINYINT, TYPE.UBIGINT, TYPE.UINT)
_KINDS: Mapping[object, str] = {
    **dict.fromkeys((*_INTEGERS, exp.Count, exp.Length), "int"),
    **dict.fromkeys((exp.RowNumber, exp.Rank, exp.DenseRank), "int"),
    **dict.fromkeys((exp.Year, exp.Month, exp.Day, exp.DayOfMonth, exp.DateDiff), "int"),
    **dict.fromkeys((TYPE.DOUBLE, TYPE.DECIMAL, TYPE.FLOAT, exp.Avg), "real"),
    **dict.fromkeys((TYPE.TEXT, TYPE.VARCHAR, TYPE.CHAR, exp.Concat, exp.DPipe), "text"),
    **dict.fromkeys((exp.Upper, exp.Lower, exp.Substring, exp.Trim, exp.TimeToStr), "text"),
    **dict.fromkeys((TYPE.DATE, *dates.WITHOUT_TIME), "date"),
}
"""Of types, and of what always has one."""


def kind_of(node: exp.Expr | None) -> str:
    """Tell `int`, `real`, `text` or `date` where the text alone tells it; else an empty word."""
    while isinstance(node, exp.Paren | exp.Neg | exp.Alias | exp.Abs):
        node = node.this
    match node:
        case exp.Literal():
            return "text" if node.is_string else "int" if node.this.isdigit() else "real"
        case exp.Cast():
            return _KINDS.get(node.to.this, "")
        case exp.Div() if not node.args.get("typed"):
            return "real"  # MySQL's
        case exp.Add() | exp.Sub() | exp.Mul() | exp.Div() | exp.Nullif() | exp.Coalesce():
            found = set(map(kind_of, _sides(node)))  # a fraction makes all of them fractions
            return "real" if "real" in found else found.pop() if len(found) == 1 else ""
        case exp.Sum() | exp.Min() | exp.Max() | exp.Filter() | exp.Subquery():
            return kind_of(node.this)
        case exp.Select():
            return kind_of(node.expressions[0]) if len(node.expressions) == 1 else ""
        case exp.Round():
            return kind_of(node.this) or "real"
    return _KINDS.get(type(node), "")


def _sides(node: exp.Expr) -> list[exp.Expr]:
    names = ("this", "expression", "low", "high", "query")
    sides = [value for name in names if isinstance(value := node.args.get(name), exp.Expr)]
    return [*sides, *node.expressions, *(branch.this for branch in node.args.get("ifs") or ())]


def branches(node: exp.Expr) -> list[exp.Expr]:
    """List the values that CASE, IF or COALESCE may have."""
    if isinstance(node, exp.Coalesce):
        return [node.this, *node.expressions]
    conditions = [node, *(node.args.get("ifs") or ())]
    found = [one.args.get(name) for one in conditions for name in ("true", "false", "default")]
    return [branch for branch in found if branch is not None]


def _number(node: exp.Expr | None) -> int | None:
    if isinstance(node, exp.Literal) and not node.is_string and node.this.isdigit():
        return int(node.this)
    return None


# What may be in a query.

_COMPARED = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Between, exp.In)
_TRUTHS = (*_COMPARED, exp.Is, exp.Like, exp.ILike, exp.And, exp.Or, exp.Not)
_DATES_STAND_IN = (
    *(*_COMPARED, exp.Is, exp.Select, exp.Group, exp.Ordered, exp.Distinct),
    *(exp.Count, exp.Min, exp.Max),
)
_SAME_EVERYWHERE = (
    *(exp.From, exp.Where, exp.Having, exp.Order, exp.Ordered, exp.Offset),
    *(exp.Table, exp.TableAlias, exp.Alias, exp.Column, exp.Identifier, exp.Star, exp.Paren),
    *(exp.Null, exp.Is, exp.Boolean, exp.And, exp.Or, exp.Not, exp.Exists, exp.With, exp.CTE),
    *(exp.Add, exp.Sub, exp.Mul, exp.Mod, exp.Neg, exp.Nullif),
    *(exp.Count, exp.Sum, exp.Avg, exp.Abs, exp.Upper, exp.Lower),
    *(exp.Window, exp.WindowSpec, exp.RowNumber, exp.Rank, exp.DenseRank, exp.Lag, exp.Lead),
    *(exp.Filter, exp.Group, exp.DataType, exp.DataTypeParam, exp.Var),
)
_ARGUMENTS = frozenset(
    {"this", "expression", "expressions", "alias", "columns", "quoted", "is_string", "table"}
    | {"with_", "recursive", "materialized", "distinct", "from_", "joins", "where", "group"}
    | {"having", "order", "limit", "offset", "desc", "nulls_first", "windows"}
    | {"on", "side", "kind", "method", "using", "query", "low", "high", "negate"}
    | {"ifs", "true", "false", "default", "to", "safe", "coalesce", "is_nvl", "big_int"}
    | {"decimals", "start", "length", "binary", "typed", "format", "date_part_boundary"}
    | {"partition_by", "over", "spec", "start_side", "end", "end_side"}
)
"""What may be said of a node; sqlglot drops some of what it does not know, and keeps the rest."""


def _check(node: exp.Expr, dialect: str) -> None:
    name = type(node).__name__
    rule = _RULES.get(type(node))
    if rule is None:
        raise NotPortableError(f"{node.name}()" if isinstance(node, exp.Anonymous) else name)
    if extra := {argument for argument, value in node.args.items() if value} - _ARGUMENTS:
        raise NotPortableError(f"{name} with {min(extra)}")
    if problem := rule(node, dialect):
        raise NotPortableError(str(problem))


def _division(node: exp.Expr, dialect: str) -> str:
    """MySQL divides exactly, which sqlglot writes out; PostgreSQL cuts whole numbers, by type."""
    kinds = [kind_of(node.this), kind_of(node.expression)]
    is_known = dialect == "mysql" or "real" in kinds or kinds == ["int", "int"]
    return "" if is_known else "/ of values whose types the query does not tell"


def _comparison(node: exp.Expr, _dialect: str) -> str:
    """Every engine has its own precedence of comparisons, and its own texts that are dates."""
    sides = [side.unnest() for side in _sides(node)]
    texts = [side for side in sides if kind_of(side) == "text"]
    are_dates = all(
        isinstance(text, exp.Literal) and _ISO_DAY.fullmatch(text.this) for text in texts
    )
    if "date" in map(kind_of, sides) and not are_dates:
        return "a date compared with a text that is not written as 2026-11-21"
    return "comparisons in a chain" if any(isinstance(s, _TRUTHS) for s in sides) else ""


def _date(node: exp.Expr, _dialect: str) -> str:
    """SQLite's dates are texts: without a time, they compare and are sorted alike."""
    place = node.parent
    while isinstance(place, exp.Paren | exp.Alias):
        place = place.parent
    is_fine = dates.is_read(node) or (dates.is_date(node) and isinstance(place, _DATES_STAND_IN))
    return "" if is_fine else f"{type(node).__name__} as a value"


def _like(node: exp.Expr, dialect: str) -> str:
    pattern = node.expression
    is_written = isinstance(pattern, exp.Literal) and pattern.is_string and pattern.this.isascii()
    words = "" if is_written else "LIKE with a pattern that is not written out in ASCII"
    return _comparison(node, dialect) or words


def _cast(node: exp.Expr, dialect: str) -> str:
    """Casts to whole numbers round there and cut here; numbers become other texts."""
    target, wanted = node.args["to"], kind_of(node)
    if dialect == "postgres" and target.this is TYPE.CHAR:
        return "CAST to CHAR, which is one letter"
    if dates.is_cast(node):
        return _date(node, dialect) and f"CAST to {target.sql().upper()}"
    if target.this is TYPE.FLOAT and not (dialect == "postgres" and _meets_double(node)):
        return "CAST to single precision"
    fine = {"int": ("int",), "text": ("int", "text")}.get(wanted, ())
    is_same = kind_of(node.this) in fine and not target.expressions
    is_real = wanted == "real" and (not target.expressions or target.this is TYPE.DECIMAL)
    is_real = is_real and kind_of(node.this) != "date"  # 20261121 in MySQL
    return "" if is_same or is_real else f"CAST to {target.sql().upper()}"


def _meets_double(node: exp.Expr) -> bool:
    """Tell a whole number that PostgreSQL makes a `real` and, beside another number, a double.

    Counts are exact in single precision, up to 16 million.
    """
    side, parent = node, node.parent
    while isinstance(parent, exp.Paren):
        side, parent = parent, parent.parent
    if kind_of(node.this) != "int" or not isinstance(parent, exp.Mul | exp.Div | exp.Add | exp.Sub):
        return False
    other = (parent.expression if parent.this is side else parent.this).unnest()
    is_single = isinstance(other, exp.Cast) and other.to.this is TYPE.FLOAT
    return kind_of(other) in ("int", "real") and not is_single


def _concatenation(node: exp.Expr, _dialect: str) -> str:
    if any(isinstance(part.unnest(), (*_TRUTHS, exp.Boolean)) for part in _sides(node)):
        return "a truth value as text"
    return "a number with a fraction as text" if "real" in map(kind_of, _sides(node)) else ""


def _round(node: exp.Expr, dialect: str) -> str:
    digits = node.args.get("decimals")
    if digits is None and dialect == "postgres" and kind_of(node.this) != "int":
        return "ROUND to a whole number, which rounds halves by type"
    is_fine = digits is None or _number(digits) is not None
    return "" if is_fine else "ROUND to digits not written out"


def _substring(node: exp.Expr, _dialect: str) -> str:
    start, length = node.args.get("start"), node.args.get("length")
    is_fine = (_number(start) or 0) >= 1 and (length is None or _number(length) is not None)
    return "" if is_fine else "SUBSTRING from a place that is not a number from 1"


def _distinct(node: exp.Expr, _dialect: str) -> str:
    if node.args.get("on"):
        return "DISTINCT ON"
    counts = isinstance(node.parent, exp.AggFunc)
    return "DISTINCT of several values" if counts and len(node.expressions) != 1 else ""


def _select(node: exp.Expr, dialect: str) -> str:
    """Columns of `*` cannot be given the collation that MySQL compares rows in."""
    is_compared = dialect == "mysql" and node.args.get("distinct") and node.is_star
    return "* where rows are compared" if is_compared else ""


def _set_operation(node: exp.Expr, dialect: str) -> str:
    """SQLite has no ALL but for UNION, no brackets around operands, and one precedence."""
    sides = (node.this, node.expression)
    if not isinstance(node, exp.Union) and not node.args.get("distinct"):
        return f"{type(node).__name__.upper()} ALL"
    if any(isinstance(side, exp.Subquery) for side in sides):
        return "brackets around the side of a set operation"
    if any(isinstance(s, exp.SetOperation) and type(s) is not type(node) for s in sides):
        return "set operations of several kinds"
    columns = zip(node.this.selects, node.expression.selects, strict=False)
    return _select(node, dialect) or next(filter(None, map(_mixture, columns)), "")


def _mixture(values: Iterable[exp.Expr]) -> str:
    """Other engines make all of them texts, or numbers."""
    kinds = {kind_of(value).replace("date", "text") for value in values}
    return "numbers and texts in one place" if "text" in kinds and len(kinds - {""}) > 1 else ""


def _join(node: exp.Expr, dialect: str) -> str:
    words = {(node.args.get(name) or "").upper() for name in ("side", "kind", "method")}
    words -= {"", "LEFT", "RIGHT", "FULL", "INNER", "CROSS", "OUTER"}
    if dialect == "mysql" and node.args.get("using"):
        return "USING, which compares capitals"
    return f"{' '.join(sorted(words))} JOIN" if words else ""


def _literal(node: exp.Expr, dialect: str) -> str:
    """MySQL folds accents and the case of letters that SQLite's NOCASE leaves alone."""
    if not node.is_string:
        return ""
    if _DATE.match(node.this) and not _ISO_DATE.fullmatch(node.this):
        return "a date that is not written as 2026-11-21 or 2026-11-21 08:00:00"
    is_plain = node.this.isascii() or dialect != "mysql"
    return "" if is_plain else "a string with letters beyond ASCII"


_RULES: Mapping[type[exp.Expr], Callable[[Any, str], str | bool]] = {
    **dict.fromkeys(_SAME_EVERYWHERE, lambda _node, _dialect: ""),
    **dict.fromkeys(_COMPARED, _comparison),
    **dict.fromkeys((exp.Like, exp.ILike), _like),
    **dict.fromkeys((exp.Concat, exp.DPipe), _concatenation),
    **dict.fromkeys((exp.Union, exp.Except, exp.Intersect), _set_operation),
    **dict.fromkeys((exp.Case, exp.If, exp.Coalesce), lambda node, _: _mixture(branches(node))),
    **dict.fromkeys(
        (exp.Min, exp.Max), lambda node, _: node.expressions and "MIN or MAX of several values"
    ),
    exp.Select: _select,
    exp.Div: _division,
    exp.IntDiv: lambda _, dialect: dialect != "mysql" and "whole division",
    exp.Cast: _cast,
    exp.Round: _round,
    **dict.fromkeys(dates.PARTS, lambda node, _: dates.check_part(node)),
    **dict.fromkeys((*dates.READERS, exp.CurrentDate, exp.CurrentTimestamp), _date),
    exp.Substring: _substring,
    exp.Trim: lambda node, _: node.expression and "TRIM of other signs than blanks",
    exp.Length: lambda node, dialect: (
        dialect == "mysql" and node.args.get("binary") and "LENGTH in bytes"
    ),
    exp.Distinct: _distinct,
    exp.Limit: lambda node, _: _number(node.expression) is None and "LIMIT that is not a number",
    exp.Join: _join,
    exp.Literal: _literal,
    exp.Subquery: lambda node, _: (
        not isinstance(node.this, exp.Select | exp.SetOperation) and "brackets around tables"
    ),
}
"""From the kind of a node to what is wrong with one; nodes of other kinds are refused."""


def _check_texts_of_numbers(tree: exp.Expr) -> None:
    """Refuse `COUNT(*) > '3'`: MySQL and PostgreSQL compare numbers, SQLite a number with a text.

    A column's own type makes a number of the text in SQLite too.
    """
    computed = _computed_names(tree)

    def is_stored(node: exp.Expr) -> bool:
        is_column = isinstance(node, exp.Column) and node.name.lower() not in computed
        return is_column or isinstance(node, exp.Null)

    for node in tree.find_all(*_COMPARED, exp.Nullif, exp.Case):
        if isinstance(node, exp.Case) and node.this is None:
            continue
        sides = [side.unnest() for side in _sides(node)]
        texts = [s.this for s in sides if isinstance(s, exp.Literal) and s.is_string]
        is_unknown = any(not kind_of(side) and not is_stored(side) for side in sides)
        if _mixture(sides) or (is_unknown and any(map(_NUMBER.fullmatch, texts))):
            raise NotPortableError("a number compared with a text")


def _computed_names(tree: exp.Expr) -> set[str]:
    """List the names that queries give to what is not a column of a table."""
    aliases = [(alias.alias.lower(), alias.this) for alias in tree.find_all(exp.Alias)]
    aliases = [(name, value) for name, value in aliases if kind_of(value) != "text"]
    found = {name.name.lower() for t in tree.find_all(exp.TableAlias) for name in t.columns}
    found |= {name for name, value in aliases if not isinstance(value, exp.Column)}
    renamed = [(name, value.name.lower()) for name, value in aliases if name not in found]
    while more := {name for name, column in renamed if column in found} - found:
        found |= more
    return found


def _check_groups(select: exp.Select) -> None:
    """Refuse columns that are neither grouped nor aggregated: SQLite takes them of any row."""
    group = select.args.get("group")
    clauses = (select.args.get(name) for name in ("having", "order"))
    parts = [*select.expressions, *filter(None, clauses)]
    if group is None and not any(map(_aggregates, parts)):
        return
    names = {item.alias: item.this for item in select.expressions if isinstance(item, exp.Alias)}
    keys = set()
    for key in group.expressions if group else ():
        number = _number(key)
        if number is not None and 1 <= number <= len(select.expressions):
            key = select.expressions[number - 1].unalias()
        keys |= {key, names.get(key.name, key) if isinstance(key, exp.Column) else key}
    columns = {key.name.lower() for key in keys if isinstance(key, exp.Column)}

    def is_closed(node: exp.Expr) -> bool:
        return node in keys or _is_aggregate(node) or isinstance(node, exp.Query | exp.Subquery)

    for node in (node for part in parts for node in part.walk(prune=is_closed)):
        is_column = isinstance(node, exp.Column | exp.Star) and not is_closed(node)
        if is_column and node.name not in names and node.name.lower() not in columns:
            raise NotPortableError("a column that is neither grouped nor aggregated")


def _aggregates(part: exp.Expr) -> bool:
    """Tell whether a clause has an aggregate of its own, outside windows and subqueries."""
    nodes = part.walk(prune=lambda node: isinstance(node, exp.Subquery | exp.Window | exp.Query))
    return any(isinstance(node, exp.AggFunc) and _is_aggregate(node) for node in nodes)


def _is_aggregate(node: exp.Expr) -> bool:
    return isinstance(node, exp.AggFunc | exp.Filter) and not isinstance(node.parent, exp.Window)
