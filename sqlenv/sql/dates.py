"""Dates and their parts in queries of MySQL and PostgreSQL: what SQLite can say, and how.

Of text such as 2026-11-21, with or without a time after it: the date alone, its year, month and
day. What is no such text makes the query fail while it runs, so that nothing hangs on how an engine
reads it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping

from sqlglot import exp

_TYPES = (exp.DataType.Type.DATE, exp.DataType.Type.DATETIME, exp.DataType.Type.TIMESTAMP)
_FORMATS: Mapping[type[exp.Expr], str] = {
    exp.Year: "%Y",
    exp.Month: "%m",
    exp.Day: "%d",
    exp.DayOfMonth: "%d",
}
_UNITS = {"YEAR": "%Y", "MONTH": "%m", "DAY": "%d"}
_WRITTEN = re.compile(r"(?:%[Ymd]|[-/. ])+")
PARTS = (*_FORMATS, exp.Extract, exp.TimeToStr, exp.DateDiff)
"""The calls that take dates apart, or count the days between two."""
_CUT = (exp.Date, exp.TsOrDsToDate)
WITHOUT_TIME = (*_CUT, exp.CurrentDate)
"""The calls that give a date alone."""
READERS = (*_CUT, exp.TsOrDsToTimestamp)
"""What sqlglot writes around a date."""


def is_read(node: exp.Expr) -> bool:
    """Tell a value of which a date or a part is taken, so that its type does not show."""
    parent = node.parent
    while isinstance(parent, exp.Paren):
        parent = parent.parent
    return parent is not None and (isinstance(parent, (*READERS, *PARTS)) or is_cast(parent))


def is_cast(node: exp.Expr) -> bool:
    """Tell a cast to a date or a time without a time zone."""
    return isinstance(node, exp.Cast) and node.to.this in _TYPES and not node.to.expressions


def is_date(node: exp.Expr) -> bool:
    """Tell a date without a time."""
    is_cast_to_one = is_cast(node) and node.args["to"].this is exp.DataType.Type.DATE
    return is_cast_to_one or isinstance(node, WITHOUT_TIME)


def is_call(node: exp.Expr) -> bool:
    """Tell what is written otherwise for SQLite: a part, or a date that is a value of its own."""
    return isinstance(node, PARTS) or (is_date(node) and not is_read(node))


def check_part(node: exp.Expr) -> str:
    """Say what is wrong with a call: a unit or a format that SQLite writes otherwise."""
    if isinstance(node, exp.DateDiff):
        return "days between dates in another unit" if node.args.get("unit") else ""
    return "" if _format(node) else "a part of a date that is no year, month or day"


def dates(node: exp.Expr) -> list[exp.Expr]:
    """List the dates that a call reads."""
    if isinstance(node, exp.DateDiff):
        found = [node.this, node.expression]
    elif is_date(node):
        found = [node]
    else:
        found = [node.expression if isinstance(node, exp.Extract) else node.this]
    return [_bare(one) for one in found]


def is_in_doubt(date: exp.Expr) -> bool:
    """Tell what may be no date, as the time of the clock always is one."""
    return not isinstance(date, exp.CurrentDate | exp.CurrentTimestamp)


def is_no_date(value: exp.Expr) -> exp.Expr:
    """Write the test for what SQLite reads as another date than it is written, or as none."""
    start = exp.Anonymous(
        this="SUBSTR",
        expressions=[value.copy(), exp.Literal.number(1), exp.Literal.number(10)],
    )
    return exp.Not(this=exp.Is(this=_call("DATE", value), expression=start))


def rewritten(node: exp.Expr) -> exp.Expr:
    """Write a call for SQLite."""
    if isinstance(node, exp.DateDiff):
        later, earlier = (_call("JULIANDAY", _call("DATE", one)) for one in dates(node))
        return exp.cast(exp.Paren(this=exp.Sub(this=later, expression=earlier)), "int")
    (date,) = dates(node)
    if is_date(node):
        return _call("DATE", date) if is_in_doubt(date) else node
    text = exp.Anonymous(
        this="STRFTIME", expressions=[exp.Literal.string(_format(node)), date.copy()]
    )
    return text if isinstance(node, exp.TimeToStr) else exp.cast(text, "int")


def _format(node: exp.Expr) -> str:
    if isinstance(node, exp.Extract):
        return _UNITS.get(node.this.name.upper(), "")
    if not isinstance(node, exp.TimeToStr):
        return _FORMATS[type(node)]
    written = node.args["format"]
    while isinstance(written, exp.Collate):  # as MySQL's texts are by now
        written = written.this
    is_known = isinstance(written, exp.Literal) and _WRITTEN.fullmatch(written.this)
    return written.this if is_known else ""


def _bare(node: exp.Expr) -> exp.Expr:
    while isinstance(node, (*READERS, exp.Paren)) or is_cast(node):
        node = node.this
    return node


def _call(name: str, value: exp.Expr) -> exp.Expr:
    return exp.Anonymous(this=name, expressions=[value.copy()])
