"""Names in the text of a query: references, and the sources of FROM.

Text that does not parse has none; what else is looked for are tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple

from sqlglot import exp

from sqlenv.sql.cache import cached
from sqlenv.sql.extraction import parse
from sqlenv.sql.lexer import Token, tokenize

# Words that take a value, or several in brackets.
_TAKES_VALUES = frozenset(
    {"and", "or", "not", "is", "like", "glob", "match", "regexp", "between", "escape"}
    | {"distinct", "all", "case", "when", "then", "else"}
    | {"select", "on", "where", "having", "by", "limit", "offset"}
)


class Mention(NamedTuple):
    """A name as it stands in the text, `qualifier.name` or alone."""

    qualifier: str
    name: str
    start: int
    end: int
    is_call: bool


class Relation(NamedTuple):
    """What a FROM or JOIN reads, at any depth: a table (empty for a subquery) and its alias."""

    table: str
    alias: str
    start: int


@cached(maxsize=512)
def references(sql: str) -> tuple[Mention, ...]:
    """List the names of a query, each with its qualifier; of `a.b.c` the last two parts."""
    found = []
    for node in _find(sql, exp.Identifier, exp.Func):
        place = node.meta
        if "start" not in place or (isinstance(node.parent, exp.Column) and node.arg_key != "this"):
            continue  # written by sqlglot, or a qualifier
        qualifier = node.parent.args.get("table") if isinstance(node.parent, exp.Column) else None
        start, end = (qualifier or node).meta["start"], place["end"] + 1
        if isinstance(node, exp.Identifier):
            name = qualifier.name.lower() if qualifier else ""
            found.append(Mention(name, node.name.lower(), start, end, is_call=False))
        else:
            found.append(Mention("", sql[start:end].lower(), start, end, is_call=True))
    return tuple(sorted(found, key=attrgetter("start")))


@cached(maxsize=512)
def sources(sql: str) -> tuple[Relation, ...]:
    """List what the FROMs and JOINs of a query read, those of nested queries too."""
    found = []
    for node in _find(sql, exp.Table, exp.Subquery):
        table = node.name.lower() if isinstance(node, exp.Table) else ""
        named = node.find(exp.Identifier, exp.Func) if table else node.args.get("alias")
        if named is not None:
            start = named.this.meta if isinstance(named, exp.TableAlias) else named.meta
            found.append(Relation(table, node.alias.lower() or table, start.get("start", 0)))
    return tuple(sorted(found, key=attrgetter("start")))


def _find(sql: str, *kinds: type[exp.Expr]) -> Iterable[exp.Expr]:
    tree = parse(sql)
    return tree.find_all(*kinds) if tree else ()


def replace_names(sql: str, start: int, texts: Mapping[str, str]) -> str:
    """Replace unqualified names, from some place on, by bracketed texts."""
    parts, at = [], 0
    for found in references(sql):
        is_bare = not found.qualifier and not found.is_call
        if is_bare and found.start >= start and found.name in texts:
            parts += [sql[at : found.start], f"({texts[found.name]})"]
            at = found.end
    return "".join([*parts, sql[at:]])


def row_values(sql: str) -> list[int]:
    """List where row values start, such as `(a, b)`: bracketed lists that no call or IN has."""
    words = tokenize(sql)
    return [
        words[opening].start
        for opening, closing in sorted(_closings(words).items())
        if opening
        and _takes_values(words[opening - 1])
        and not is_query_start(words[opening + 1])
        and any(
            word.is_sign(",") and word.depth == words[opening].depth + 1
            for word in words[opening:closing]
        )
    ]


def nested(sql: str, word: str) -> list[int]:
    """List where a keyword stands that is a nested query's own, not a window's or a call's."""
    words = tokenize(sql)
    return [
        token.start
        for opening, closing in _closings(words).items()
        if is_query_start(words[opening + 1])
        for token in words[opening:closing]
        if token.depth == words[opening].depth + 1 and token.is_word(word)
    ]


def is_unfinished(token: Token) -> bool:
    """Tell a token that nothing can end with, such as a comma, an operator or `AND`.

    `*` is one: SQLite reads on behind `SELECT *`, and stops behind a product of nothing.
    """
    if token.kind == "sign":
        return token.text != ")"
    return token.is_word(*_TAKES_VALUES, "from", "join", "as", "in", "using")


def is_query_start(token: Token) -> bool:
    """Tell the first word of a nested query."""
    return token.is_word("select", "with", "values")


def _takes_values(before: Token) -> bool:
    if before.kind == "sign":
        return before.text not in (")", ".", "]")
    return before.is_word(*_TAKES_VALUES)


def _closings(words: Sequence[Token]) -> Mapping[int, int]:
    """Map the index of every opening bracket to that of the bracket which closes it."""
    opened: list[int] = []
    closings = {}
    for at, token in enumerate(words):
        if token.is_sign("("):
            opened.append(at)
        elif token.is_sign(")") and opened:
            closings[opened.pop()] = at
    return closings
