"""Gold queries that are wrong in one place."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from functools import partial
from typing import Any

from sqlglot import exp

from sqlenv.witness.focus import ColumnNames, column_key, read_tree

Mutants = Iterator[exp.Expression]
"""What may stand in the place of a node."""

_CLAUSES = ("distinct", "where", "group", "having", "order", "limit")
_FUNCTIONS = (exp.Max, exp.Min, exp.Avg, exp.Sum, exp.Abs, exp.Lower)
_MOST_COLUMNS = 4  # of a table, that stand in for one
_AROUND_CONDITIONS = (exp.Where, exp.Having, exp.Join, exp.If, exp.And, exp.Or)
_TAKEN_FOR: dict[type[exp.Expression], tuple[type[exp.Expression], ...]] = {
    exp.EQ: (exp.NEQ, exp.LTE, exp.GTE),
    exp.NEQ: (exp.EQ,),
    exp.LT: (exp.GT, exp.LTE, exp.EQ),
    exp.LTE: (exp.GTE, exp.LT, exp.EQ),
    exp.GT: (exp.LT, exp.GTE, exp.EQ),
    exp.GTE: (exp.LTE, exp.GT, exp.EQ),
    exp.And: (exp.Or,),
    exp.Or: (exp.And,),
    exp.Max: (exp.Min, exp.Avg, exp.Count),
    exp.Min: (exp.Max, exp.Avg, exp.Count),
    exp.Avg: (exp.Sum, exp.Max, exp.Min),
    exp.Sum: (exp.Avg, exp.Max, exp.Count),
    exp.Union: (exp.Intersect, exp.Except),
    exp.Intersect: (exp.Union, exp.Except),
    exp.Except: (exp.Intersect, exp.Union),
}


def _with(node: exp.Expression, **given: Any) -> exp.Expression:
    other = node.copy()
    for name, value in given.items():
        other.set(name, value)
    return other


def _one_less(node: exp.Expression, name: str) -> Mutants:
    for at in range(len(node.args.get(name) or ())):
        other = node.copy()
        del other.args[name][at]
        yield other


def _another_kind(node: exp.Expression) -> Mutants:
    is_key = isinstance(node.args.get("expression"), exp.Column)
    if not (is_key and isinstance(node.find_ancestor(exp.Join, exp.Select), exp.Join)):
        for kind in _TAKEN_FOR.get(type(node), ()):
            yield kind(**node.copy().args)


def _negated(node: exp.Expression) -> Mutants:
    if isinstance(node, exp.Not):
        yield node.this.copy()
    elif isinstance(node, exp.Condition) and isinstance(node.parent, _AROUND_CONDITIONS):
        yield from () if type(node) in _TAKEN_FOR else (exp.Not(this=node.copy()),)


def _part(node: exp.Expression) -> Mutants:
    if isinstance(node, exp.And | exp.Or | exp.SetOperation):
        yield from (node.this.copy(), node.expression.copy())
    if isinstance(node, _FUNCTIONS) and not isinstance(node.this, exp.Star):
        yield node.this.copy()


def _of_select(node: exp.Select) -> Mutants:
    yield from (_with(node, **{name: None}) for name in _CLAUSES if node.args.get(name))
    if not node.args.get("distinct"):
        yield _with(node, distinct=exp.Distinct())
    if not node.is_star:
        yield _with(node, expressions=[exp.Star()])
    yield from _one_less(node, "joins")


def _of_join(node: exp.Join) -> Mutants:
    if node.args.get("on"):
        yield _with(node, on=None)
        yield _with(node, side=None if node.args.get("side") else "LEFT")


def _of_keys(node: exp.Group | exp.Order) -> Mutants:
    """Forget a key, or group by a column that is shown in place of the keys."""
    keys, select = node.expressions, node.parent
    if isinstance(node, exp.Group) and isinstance(select, exp.Select):
        shown = (one for one in select.selects if isinstance(one, exp.Column) and one not in keys)
        yield from (exp.Group(expressions=[one.copy()]) for one in shown)
    yield from _one_less(node, "expressions") if len(keys) > 1 else ()


def _of_count(node: exp.Count) -> Mutants:
    """Count values once or often, or rows; or add them up."""
    inside = node.this
    if isinstance(inside, exp.Distinct) and len(inside.expressions) == 1:
        yield exp.Count(this=inside.expressions[0].copy())
    elif isinstance(inside, exp.Column):
        yield exp.Count(this=exp.Distinct(expressions=[inside.copy()]))
        yield exp.Count(this=exp.Star())
        yield exp.Sum(this=inside.copy())


def _of_sum(node: exp.Sum | exp.Avg) -> Mutants:
    if isinstance(node.this, exp.Column):
        yield type(node)(this=exp.Distinct(expressions=[node.this.copy()]))


def _of_ordered(node: exp.Ordered) -> Mutants:
    is_down = bool(node.args.get("desc"))
    yield exp.Ordered(this=node.this.copy(), desc=not is_down, nulls_first=is_down)


def _of_literal(node: exp.Literal) -> Mutants:
    text = str(node.this)
    if node.is_string and isinstance(node.parent, exp.Like):
        core = text.strip("%")
        patterns = (f"%{core}%", f"{core}%", f"%{core}", core)
        yield from (exp.Literal.string(one) for one in patterns if one != text)
    elif node.is_string:
        yield exp.Literal.string(f"{text}x")
    elif text.isdigit():
        near = (int(text) + 1, int(text) - 1)
        yield from (exp.Literal.number(one) for one in near if one >= 0)
    else:
        yield exp.Literal.number(f"{text}1")


def _as_pattern(node: exp.EQ) -> Mutants:
    """Look for a text anywhere in place of the text."""
    text = node.expression
    if isinstance(text, exp.Literal) and text.is_string:
        yield exp.Like(this=node.this.copy(), expression=exp.Literal.string(f"%{text.this}%"))


def _other_column(node: exp.Column, columns: ColumnNames) -> Mutants:
    """Take other columns of the column's own table, the nearest first."""
    if (place := column_key(node, columns)) is None:
        return
    names = columns[place[0]]
    at = names.index(place[1])
    others = [name for name in names if name != place[1]]
    for name in sorted(others, key=lambda name: abs(names.index(name) - at))[:_MOST_COLUMNS]:
        yield _with(node, this=exp.to_identifier(name, quoted=True))


_OF_KINDS: dict[type[exp.Expression], Sequence[Callable[[Any], Mutants]]] = {
    exp.Select: [_of_select],
    exp.Join: [_of_join],
    exp.Group: [_of_keys],
    exp.Order: [_of_keys],
    exp.Count: [_of_count],
    exp.Sum: [_of_sum],
    exp.Avg: [_of_sum],
    exp.Ordered: [_of_ordered],
    exp.Literal: [_of_literal],
    exp.EQ: [_as_pattern],
}


def neighbours(sql: str, columns: ColumnNames) -> list[str]:
    """Return every query that differs from one in one place, each text once; none of what does not
    parse.
    """
    tree = read_tree(sql, columns)
    if tree is None:
        return []
    holder = exp.Paren(this=tree)  # whose child can be replaced like any other node
    found = {(own := _written(holder.this)): None}
    for node in list(holder.this.walk()):
        changes = [_another_kind, _negated, _part, *_OF_KINDS.get(type(node), ())]
        if isinstance(node, exp.Column):
            changes.append(partial(_other_column, columns=columns))
        for other in [other for change in changes for other in change(node)]:
            node.replace(other)
            found.setdefault(_written(holder.this))
            other.replace(node)
    return [text for text in found if text != own]


def _written(tree: exp.Expression) -> str:
    return tree.sql(dialect="sqlite", normalize_functions=False)
