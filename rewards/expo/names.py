"""Names in the text of a query: references, and the sources of FROM.

Read from tokens, so that text which no parser accepts has names too.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import NamedTuple

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
# Words that take a value, or several in brackets.
_TAKES_VALUES = frozenset(
    {"and", "or", "not", "is", "like", "glob", "match", "regexp", "between", "escape"}
    | {"distinct", "all", "case", "when", "then", "else"}
    | {"select", "on", "where", "having", "by", "limit", "offset"}
)


class Mention(NamedTuple):
    """A name as it stands in the text, `qualifier.name` or alone; keywords are among them."""

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
        found.append(Mention(qualifier, token.text, first.start, token.end, is_call))
    return tuple(found)


@cached(maxsize=512)
def sources(sql: str) -> tuple[Relation, ...]:
    """List what the FROMs and JOINs of a query read, those of nested queries too."""
    words = tokenize(sql)
    closings = _closings(words)
    read = (_read_source(words, at, closings) for at in _source_places(words))
    return tuple(source for source in read if source)


def replace_names(text: str, texts: Mapping[str, str]) -> str:
    """Replace unqualified names by bracketed texts."""
    parts, at = [], 0
    for found in references(text):
        if not found.qualifier and not found.is_call and found.name in texts:
            parts += [text[at : found.start], f"({texts[found.name]})"]
            at = found.end
    return "".join([*parts, text[at:]])


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
    """Tell a token that nothing can end with, such as a comma, an operator or `AND`."""
    if token.kind == "sign":
        return token.text not in (")", "*")
    return token.is_word(*_TAKES_VALUES, "from", "join", "as", "in", "using")


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
    return Relation(table, _read_alias(words, at + 1) or table, first.start)


def _read_alias(words: Sequence[Token], at: int) -> str:
    at += at < len(words) and words[at].is_word("as")
    if at >= len(words) or words[at].kind not in _NAMES or words[at].is_word(*_NO_ALIAS):
        return ""
    return words[at].text
