"""Names in the text of a query: references, the sources of FROM, the outputs of SELECT.

Read from tokens, so that text which no parser accepts has names too.
"""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Iterator, Mapping, Sequence
from operator import attrgetter
from typing import NamedTuple, TypeVar

from sqlenv.sql.cache import cached
from sqlenv.sql.lexer import Token, tokenize

_NAMES = ("word", "name")
# Words that end a list of tables, and words that cannot be the alias of a table.
_ENDS = frozenset(
    {"where", "group", "having", "order", "limit", "window", "select", "values"}
    | {"union", "intersect", "except"}
)
_NO_ALIAS = _ENDS | {
    *("on", "using", "join", "left", "right", "inner", "outer", "full", "cross", "natural"),
    *("indexed", "not", "set"),
}
# Words that take a value, or several in brackets; words after which an expression goes on, and
# words that end one: neither makes an alias.
_OPERATORS = frozenset(
    {"and", "or", "not", "is", "like", "glob", "match", "regexp", "between", "escape"}
    | {"distinct", "all", "case", "when", "then", "else"}
)
_TAKES_VALUES = _OPERATORS | {"select", "on", "where", "having", "by", "limit", "offset"}
_GOES_ON = _OPERATORS | {"in", "collate", "over", "exists", "from"}
_NO_COLUMN = frozenset(
    {"null", "true", "false", "current_date", "current_time", "current_timestamp"}
)
_LAST = _NO_COLUMN | {"end", "isnull", "notnull"}


class Mention(NamedTuple):
    """A name as it stands in the text, `qualifier.name` or alone; keywords are among them."""

    qualifier: str
    name: str
    start: int
    is_call: bool


class Relation(NamedTuple):
    """What a FROM or JOIN reads, at any depth: a table (empty for a subquery) and its alias.

    [start, end) in characters, a subquery's brackets included, the alias not.
    """

    table: str
    alias: str
    start: int
    end: int


class SelectItem(NamedTuple):
    """One expression of a select list: [start, end) in characters, and what it is called.

    `column` is that of the expression `qualifier.column`, `*` for all, empty for anything computed;
    `alias` is empty where none is given.
    """

    qualifier: str
    column: str
    alias: str
    start: int
    end: int


Placed = TypeVar("Placed", Token, Mention)


@cached(maxsize=512)
def references(sql: str) -> tuple[Mention, ...]:
    """List the names of a query, each with its qualifier; of `a.b.c` the last two parts."""
    words = tokenize(sql)
    found = []
    for at, token in enumerate(words):
        after = words[at + 1] if at + 1 < len(words) else None
        if token.kind not in _NAMES or (after and after.is_sign(".")):
            continue
        qualified = at > 1 and words[at - 1].is_sign(".")
        first = words[at - 2] if qualified else token
        qualifier = first.text if qualified else ""
        is_call = after is not None and after.is_sign("(")
        found.append(Mention(qualifier, token.text, first.start, is_call))
    return tuple(found)


@cached(maxsize=512)
def sources(sql: str) -> tuple[Relation, ...]:
    """List what the FROMs and JOINs of a query read, those of nested queries too."""
    words = tokenize(sql)
    closings = _closings(words)
    read = (_read_source(words, at, closings) for at in _source_places(words))
    return tuple(source for source in read if source)


@cached(maxsize=2048)
def select_items(sql: str, start: int, end: int) -> tuple[SelectItem, ...]:
    """Divide a SELECT clause, [start, end) of a query, into its expressions."""
    words = _within(tokenize(sql), start, end)
    if not words:
        return ()
    depth = words[0].depth
    first = 2 if len(words) > 1 and words[1].is_word("distinct", "all") else 1
    commas = [n for n, word in enumerate(words) if word.depth == depth and word.text == ","]
    starts = [first, *(comma + 1 for comma in commas)]
    parts = [words[a:b] for a, b in zip(starts, [*commas, len(words)], strict=True)]
    return tuple(_read_item(part) for part in parts if part)


def select_aliases(sql: str, start: int, end: int) -> Mapping[str, str]:
    """Map the aliases that a SELECT clause gives to the text of their expressions."""
    items = select_items(sql, start, end)
    return {item.alias: sql[item.start : item.end] for item in items if item.alias}


def replace_names(sql: str, start: int, end: int, texts: Mapping[str, str]) -> str:
    """Write [start, end) of a query with unqualified names replaced by bracketed texts."""
    parts, at = [], start
    ends = {token.start: token.end for token in _within(tokenize(sql), start, end)}
    for found in _within(references(sql), start, end):
        if not found.qualifier and not found.is_call and found.name in texts:
            parts += [sql[at : found.start], f"({texts[found.name]})"]
            at = ends[found.start]
    return "".join([*parts, sql[at:end]])


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


def is_query_start(token: Token) -> bool:
    """Tell the first word of a nested query."""
    return token.is_word("select", "with", "values")


def is_distinct_from(words: Sequence[Token], at: int) -> bool:
    """Tell the FROM of the comparison `a IS [NOT] DISTINCT FROM b`."""
    return (
        at > 1
        and words[at].is_word("from")
        and words[at - 1].is_word("distinct")
        and words[at - 2].is_word("is", "not")
    )


def _within(found: Sequence[Placed], start: int, end: int) -> Sequence[Placed]:
    """Take those that start in [start, end) of a text; they are in its order."""
    place = attrgetter("start")
    return found[bisect_left(found, start, key=place) : bisect_left(found, end, key=place)]


def _read_item(words: Sequence[Token]) -> SelectItem:
    alias, body = "", words
    if _has_alias(words):
        alias, body = words[-1].text.strip("'").lower(), words[:-1]
        if body[-1].is_word("as"):
            body = body[:-1]
    start, end = words[0].start, body[-1].end
    while len(body) > 2 and body[0].is_sign("(") and body[-1].is_sign(")"):
        body = body[1:-1]
    *qualifiers, last = body[::2]
    is_column = (
        len(body) % 2 == 1
        and all(dot.is_sign(".") for dot in body[1::2])
        and all(map(_is_column_name, qualifiers))
        and (last.is_sign("*") or _is_column_name(last))
    )
    if not is_column:
        return SelectItem("", "", alias, start, end)
    return SelectItem(qualifiers[-1].text if qualifiers else "", last.text, alias, start, end)


def _is_column_name(token: Token) -> bool:
    return token.kind in _NAMES and not token.is_word(*_NO_COLUMN)


def _has_alias(words: Sequence[Token]) -> bool:
    """Tell whether the last token of an expression is a name for it, with AS or without."""
    if len(words) < 2 or words[-1].depth != words[0].depth:
        return False
    before, last = words[-2:]
    if last.kind not in (*_NAMES, "text"):
        return False
    if before.is_word("as"):
        return len(words) > 2
    ends = before.is_sign(")") if before.kind == "sign" else not before.is_word(*_GOES_ON)
    return ends and not last.is_word(*_LAST)


def _source_places(words: Sequence[Token]) -> Iterator[int]:
    """Yield the index after every FROM, JOIN, and comma between tables."""
    listing: set[int] = set()  # depths at which a list of tables is open
    for at, token in enumerate(words):
        if token.is_word("from", "join") and not is_distinct_from(words, at):
            listing.add(token.depth)
            yield at + 1
        elif token.is_word(*_ENDS):
            listing.discard(token.depth)
        elif token.is_sign(")"):
            listing.discard(token.depth + 1)
        elif token.is_sign(",") and token.depth in listing:
            yield at + 1


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


def _read_source(words: Sequence[Token], at: int, closings: Mapping[int, int]) -> Relation | None:
    while at + 1 < len(words) and words[at].is_sign("(") and not is_query_start(words[at + 1]):
        at += 1
    if at >= len(words):
        return None
    first, table = words[at], ""
    if first.is_sign("("):
        at = closings.get(at, len(words) - 1)
    elif first.kind in _NAMES:
        if at + 2 < len(words) and words[at + 1].is_sign("."):
            at += 2
        table = words[at].text
    else:
        return None
    return Relation(table, _read_alias(words, at + 1) or table, first.start, words[at].end)


def _read_alias(words: Sequence[Token], at: int) -> str:
    at += at < len(words) and words[at].is_word("as")
    if at >= len(words) or words[at].kind not in _NAMES or words[at].is_word(*_NO_ALIAS):
        return ""
    return words[at].text
