"""What only the data can tell: values on which a query of another engine must not go on.

MySQL and PostgreSQL know the types of columns; here the query alone is there to be read. So each
value that could be of the wrong type is looked at while the query runs: where one is, the query
fails and says why. A gold query that fails is left out and counted, as ever.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator

from sqlglot import exp

from sqlenv.dialect_rules import RefusedError, bare_value, branches, kind_of

Place = tuple[exp.Expr, str]
"""A value, and what must not be true of it: one of `_TESTS`."""

_MOST_NESTED = 8
"""A guard repeats its value: more guards than these inside of one are refused."""


def guard(tree: exp.Expr, dialect: str) -> None:
    """Write guards into a query, in place.

    Args:
        tree: A query that `check` has let pass.
        dialect: What it is written in, `mysql` or `postgres`.

    Raises:
        RefusedError: Guards would stand in one another too often.
    """
    for node in reversed(list(tree.walk())):  # children before their parents
        for value, test in _places(node, dialect):
            if _count(value) > _MOST_NESTED:
                raise RefusedError("arithmetic within arithmetic too often")
            value.replace(_guarded(value, test))


def _places(node: exp.Expr, dialect: str) -> Iterator[Place]:
    if isinstance(node, exp.Add | exp.Sub):
        yield from ((side, "date") for side in _operands(node) if not _is_number(side))
    elif isinstance(node, _TEXTS):
        yield from ((side, "fraction") for side in _texts(node) if not kind_of(side))
    elif dialect == "postgres" and isinstance(node, exp.Div | exp.Mod):
        divisor = node.expression
        yield from () if _is_never_zero(divisor) else ((divisor, "zero"),)


_TEXTS = (
    *(exp.Concat, exp.DPipe, exp.Like, exp.ILike, exp.Length, exp.Upper, exp.Lower),
    *(exp.Substring, exp.Trim),
)


def _texts(node: exp.Expr) -> list[exp.Expr]:
    """List what a node takes for text."""
    if isinstance(node, exp.Concat):
        return [side for side in node.expressions if not isinstance(side, exp.Null)]
    sides = _operands(node) if isinstance(node, exp.DPipe) else [node.this]
    return [side for side in sides if not isinstance(side, exp.Null | exp.Concat | exp.DPipe)]


def _operands(node: exp.Expr) -> list[exp.Expr]:
    return [node.this, node.expression]


def _is_number(node: exp.Expr) -> bool:
    """Tell whether a value is a number in any case, or NULL."""
    node = bare_value(node)
    if isinstance(node, exp.Case | exp.If | exp.Coalesce):
        return any(map(_is_number, branches(node)))
    numbers = (exp.Add, exp.Sub, exp.Mul, exp.Div, exp.IntDiv, exp.Mod, exp.Neg, exp.Abs)
    return kind_of(node) in ("int", "real") or isinstance(node, (*numbers, exp.Sum, exp.Null))


def _is_never_zero(node: exp.Expr) -> bool:
    node = bare_value(node)
    if isinstance(node, exp.Nullif):
        return _is_zero(node.expression)
    return isinstance(node, exp.Literal) and not _is_zero(node)


def _is_zero(node: exp.Expr) -> bool:
    return isinstance(node, exp.Literal) and not node.this.strip("0.")


def _guarded(value: exp.Expr, test: str) -> exp.Expr:
    """Write `CASE WHEN a test of the value THEN an error ELSE the value END`."""
    condition, words = _TESTS[test]
    error = exp.Anonymous(
        this="JSON_EXTRACT", expressions=[exp.Literal.string("{}"), exp.Literal.string(words)]
    )
    found = exp.Case(ifs=[exp.If(this=condition(value.copy()), true=error)], default=value.copy())
    found.meta["guard"] = True
    return found


def _count(value: exp.Expr) -> int:
    return sum("guard" in node.meta for node in value.find_all(exp.Case))


def _is_date(value: exp.Expr) -> exp.Expr:
    """SQLite would count with the year of a date alone."""
    return exp.Glob(this=value, expression=exp.Literal.string("*[0-9][0-9][-:][0-9][0-9]*"))


def _is_fraction(value: exp.Expr) -> exp.Expr:
    kind = exp.Anonymous(this="TYPEOF", expressions=[value])
    return exp.Glob(this=kind, expression=exp.Literal.string("real"))


def _equals_zero(value: exp.Expr) -> exp.Expr:
    return exp.EQ(this=exp.Paren(this=value), expression=exp.Literal.number(0))


_TESTS: dict[str, tuple[Callable[[exp.Expr], exp.Expr], str]] = {
    "date": (_is_date, "a date or a time in arithmetic"),
    "fraction": (_is_fraction, "a number with a fraction as text"),
    "zero": (_equals_zero, "division by zero"),
}
