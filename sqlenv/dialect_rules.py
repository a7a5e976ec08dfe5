"""Which queries of MySQL and PostgreSQL mean the same in SQLite, or can be made to.

A node of sqlglot's tree is refused unless one of the tables below has it, and so is whatever is
said of it that no table has.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Mapping

from sqlglot import exp

TYPE = exp.DataType.Type


class RefusedError(Exception):
    """A construct that has no equal in SQLite; the words name it."""


def check(tree: exp.Expr, dialect: str) -> None:
    """Look for what would change its meaning.

    Args:
        tree: A query.
        dialect: What it is written in, `mysql` or `postgres`.

    Raises:
        RefusedError: There is something.
    """
    for node in tree.walk():
        _check(node, dialect)
    for select in tree.find_all(exp.Select):
        _check_groups(select)
    _check_texts_of_numbers(tree)


_ALWAYS_THE_SAME = (
    *(exp.Select, exp.From, exp.Where, exp.Having, exp.Order, exp.Ordered, exp.Offset),
    *(exp.Table, exp.TableAlias, exp.Alias, exp.Column, exp.Identifier, exp.Star, exp.Paren),
    *(exp.Null, exp.Is, exp.Boolean, exp.And, exp.Or, exp.Not, exp.Exists, exp.With, exp.CTE),
    *(exp.Add, exp.Sub, exp.Mul, exp.Neg, exp.Nullif),
    *(exp.Count, exp.Sum, exp.Avg, exp.Abs, exp.Upper, exp.Lower),
    *(exp.Window, exp.WindowSpec, exp.RowNumber, exp.Rank, exp.DenseRank, exp.Lag, exp.Lead),
    *(exp.Filter, exp.Group, exp.DataType, exp.DataTypeParam, exp.Var),
)

Check = Callable[[exp.Expr, str], str]
"""From a node and its dialect to what is wrong with it; empty where nothing is."""


def _check(node: exp.Expr, dialect: str) -> None:
    kind = type(node)
    if kind not in _ALWAYS_THE_SAME and kind not in _SOMETIMES:
        raise RefusedError(f"{node.name}()" if kind is exp.Anonymous else kind.__name__)
    if extra := set(_arguments(node)) - _ARGUMENTS:
        raise RefusedError(f"{kind.__name__} with {min(extra)}")
    if problem := _SOMETIMES.get(kind, lambda *_: "")(node, dialect):
        raise RefusedError(problem)


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


def kind_of(node: exp.Expr | None) -> str:
    """Tell `int`, `real` or `text` where the text alone tells it; else an empty word."""
    while isinstance(node, exp.Paren | exp.Neg | exp.Alias | exp.Abs):
        node = node.this
    if isinstance(node, exp.Literal):
        return "text" if node.is_string else "int" if node.this.isdigit() else "real"
    if isinstance(node, exp.Cast):
        return next((kind for kind, types in _TYPES.items() if node.to.this in types), "")
    if isinstance(node, exp.Div) and not node.args.get("typed"):
        return "real"  # MySQL's
    if isinstance(node, exp.Add | exp.Sub | exp.Mul | exp.Div | exp.Nullif | exp.Coalesce):
        return _common_kind(kind_of(side) for side in _sides(node))
    if isinstance(node, exp.Sum | exp.Min | exp.Max | exp.Subquery):
        return kind_of(node.this)
    if isinstance(node, exp.Select):
        return kind_of(node.expressions[0]) if len(node.expressions) == 1 else ""
    if isinstance(node, exp.Round):
        return kind_of(node.this) or "real"
    return next((kind for kind, classes in _RETURNS.items() if isinstance(node, classes)), "")


def _common_kind(kinds: Iterable[str]) -> str:
    """Tell the kind of what is made of several values: a fraction makes all of them fractions."""
    found = set(kinds)
    return "real" if "real" in found else found.pop() if len(found) == 1 else ""


def _sides(node: exp.Expr) -> list[exp.Expr]:
    """List the values that a node puts side by side."""
    names = ("this", "expression", "low", "high", "query")
    sides = [value for name in names if isinstance(value := node.args.get(name), exp.Expr)]
    return [*sides, *node.expressions, *(branch.this for branch in node.args.get("ifs") or ())]


_TYPES = {
    "int": {TYPE.INT, TYPE.BIGINT, TYPE.SMALLINT, TYPE.TINYINT, TYPE.UBIGINT, TYPE.UINT},
    "real": {TYPE.DOUBLE, TYPE.DECIMAL},
    "text": {TYPE.TEXT, TYPE.VARCHAR, TYPE.CHAR},
}
_RETURNS = {
    "int": (exp.Count, exp.Length, exp.RowNumber, exp.Rank, exp.DenseRank),
    "real": (exp.Avg,),
    "text": (exp.Concat, exp.DPipe, exp.Upper, exp.Lower, exp.Substring, exp.Trim),
}


def _check_division(node: exp.Expr, dialect: str) -> str:
    """MySQL divides exactly, which sqlglot writes out; PostgreSQL cuts whole numbers, by type."""
    kinds = (kind_of(node.this), kind_of(node.expression))
    if dialect == "mysql" or "real" in kinds or kinds == ("int", "int"):
        return ""
    return "/ of values whose types the query does not tell"


def _check_whole_division(_node: exp.Expr, dialect: str) -> str:
    return "" if dialect == "mysql" else "whole division"


def _check_like(node: exp.Expr, dialect: str) -> str:
    pattern = node.expression
    if problem := _check_comparison(node, dialect):
        return problem
    written = isinstance(pattern, exp.Literal) and pattern.is_string and pattern.this.isascii()
    return "" if written else "LIKE with a pattern that is not written out in ASCII"


def _check_cast(node: exp.Expr, dialect: str) -> str:
    """Casts to whole numbers round there and cut here; numbers become other texts."""
    target = node.args["to"]
    if dialect == "postgres" and target.this is TYPE.CHAR:
        return "CAST to CHAR, which is one letter"
    wanted = next((kind for kind, types in _TYPES.items() if target.this in types), "")
    sized = bool(target.expressions)
    if wanted == "real" and (not sized or target.this is TYPE.DECIMAL):
        return ""
    fine = {"int": ("int",), "text": ("int", "text")}.get(wanted, ())
    if kind_of(node.this) in fine and not sized:
        return ""
    return f"CAST to {target.sql().upper()}"


def _check_concat(node: exp.Expr, _dialect: str) -> str:
    if any(isinstance(part, (*_TRUTHS, exp.Boolean)) for part in map(bare_value, _sides(node))):
        return "a truth value as text"
    return "a number with a fraction as text" if "real" in map(kind_of, _sides(node)) else ""


def bare_value(node: exp.Expr) -> exp.Expr:
    """Take the brackets off a value."""
    while isinstance(node, exp.Paren):
        node = node.this
    return node


def _check_comparison(node: exp.Expr, _dialect: str) -> str:
    """Every engine has its own precedence of comparisons."""
    return "comparisons in a chain" if any(isinstance(s, _TRUTHS) for s in _sides(node)) else ""


COMPARED = (exp.EQ, exp.NEQ, exp.GT, exp.GTE, exp.LT, exp.LTE, exp.Between, exp.In)
_TRUTHS = (*COMPARED, exp.Is, exp.Like, exp.ILike, exp.And, exp.Or, exp.Not)


def _check_extreme(node: exp.Expr, _dialect: str) -> str:
    return "MIN or MAX of several values" if node.expressions else ""


def _check_round(node: exp.Expr, dialect: str) -> str:
    digits = node.args.get("decimals")
    if digits is None and dialect == "postgres" and kind_of(node.this) != "int":
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
    if mixed:
        return "set operations of several kinds"
    columns = zip(node.this.selects, node.expression.selects, strict=False)
    return next(filter(None, (_mixture(map(kind_of, pair)) for pair in columns)), "")


def _mixture(kinds: Iterable[str]) -> str:
    """Other engines make all of them texts, or numbers."""
    found = set(kinds)
    return "numbers and texts in one place" if "text" in found and len(found - {""}) > 1 else ""


def _check_branches(node: exp.Expr, _dialect: str) -> str:
    return _mixture(kind_of(branch) for branch in branches(node))


def branches(node: exp.Expr) -> list[exp.Expr]:
    """List the values that CASE, IF or COALESCE may have."""
    if isinstance(node, exp.Coalesce):
        return [node.this, *node.expressions]
    conditions = [node, *(node.args.get("ifs") or ())]
    found = [one.args.get(name) for one in conditions for name in ("true", "false", "default")]
    return [branch for branch in found if branch is not None]


def _check_join(node: exp.Expr, dialect: str) -> str:
    words = {(node.args.get(name) or "").upper() for name in ("side", "kind", "method")}
    known = {"", "LEFT", "RIGHT", "FULL", "INNER", "CROSS", "OUTER"}
    if dialect == "mysql" and node.args.get("using"):
        return "USING, which compares capitals"
    return "" if words <= known else f"{' '.join(sorted(words - known))} JOIN"


def _check_literal(node: exp.Expr, dialect: str) -> str:
    """MySQL folds accents and the case of letters that SQLite's NOCASE leaves alone."""
    if not node.is_string:
        return ""
    if _DATE.match(node.this) and not _ISO_DATE.fullmatch(node.this):
        return "a date that is not written as 2026-11-21 or 2026-11-21 08:00:00"
    plain = node.this.isascii() or dialect != "mysql"
    return "" if plain else "a string with letters beyond ASCII"


# As text, 2026-1-2 comes after 2026-01-10.
_DATE = re.compile(r"\s*\d{1,4}[-/.]\d{1,2}[-/.]\d{1,4}(?!\d)")
_ISO_DATE = re.compile(r"\d{4}-\d\d-\d\d( \d\d:\d\d:\d\d)?")


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
    exp.Min: _check_extreme,
    exp.Max: _check_extreme,
    **dict.fromkeys((exp.Case, exp.If, exp.Coalesce), _check_branches),
    **dict.fromkeys(COMPARED, _check_comparison),
}


_NUMBER = re.compile(r"\s*[-+]?(\d+\.?\d*|\.\d+)([eE][-+]?\d+)?\s*")


def _check_texts_of_numbers(tree: exp.Expr) -> None:
    """Refuse `COUNT(*) > '3'`: MySQL and PostgreSQL compare numbers, SQLite a number with a text.

    A column's own type makes a number of the text in SQLite too.
    """
    computed = _computed_names(tree)
    for node in tree.find_all(*COMPARED, exp.Nullif, exp.Case):
        sides = [bare_value(side) for side in _sides(node)]
        if isinstance(node, exp.Case) and node.this is None:
            continue
        texts = [s for s in sides if isinstance(s, exp.Literal) and s.is_string]
        kinds = {kind_of(side) for side in sides}
        like_numbers = any(_NUMBER.fullmatch(text.this) for text in texts)
        unknown = any(not kind_of(s) and not _is_stored(s, computed) for s in sides)
        if _mixture(kinds) or (like_numbers and unknown):
            raise RefusedError("a number compared with a text")


def _is_stored(node: exp.Expr, computed: set[str]) -> bool:
    """Tell whether a value is a column of a table, or NULL."""
    if isinstance(node, exp.Column):
        return node.name.lower() not in computed
    return isinstance(node, exp.Null)


def _computed_names(tree: exp.Expr) -> set[str]:
    """List the names that queries give to what is not a column of a table."""
    aliases = [(alias.alias.lower(), alias.this) for alias in tree.find_all(exp.Alias)]
    aliases = [(name, value) for name, value in aliases if kind_of(value) != "text"]
    found = {name.name.lower() for t in tree.find_all(exp.TableAlias) for name in t.columns}
    found |= {name for name, value in aliases if not isinstance(value, exp.Column)}
    while more := {
        name
        for name, value in aliases
        if isinstance(value, exp.Column) and name not in found and value.name.lower() in found
    }:
        found |= more
    return found


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
                raise RefusedError("a column that is neither grouped nor aggregated")


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
