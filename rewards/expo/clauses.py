"""The clauses of a query as slices of its text (EXPO-SQL, section 3.1 and appendix A.4).

A scan over tokens at bracket depth 0, so that text which no parser accepts has clauses too.
"""

from __future__ import annotations

from bisect import bisect_left, bisect_right
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from sqlenv.cache import cached
from sqlenv.sql.lexer import MAX_QUERY_CHARS, Token, tokenize

ClauseKind = Literal[
    "WITH", "SELECT", "FROM", "JOIN", "WHERE", "GROUP BY", "HAVING", "ORDER BY", "LIMIT"
]
KINDS: tuple[ClauseKind, ...] = get_args(ClauseKind)
WHOLE = -1  # operand number of what belongs to a set operation as a whole, and of WITH items

_OPENERS: dict[str, ClauseKind] = {
    "select": "SELECT",
    "values": "SELECT",
    "from": "FROM",
    "where": "WHERE",
    "group": "GROUP BY",
    "having": "HAVING",
    # Named windows serve the select list.
    "window": "SELECT",
    "order": "ORDER BY",
    "limit": "LIMIT",
}
_JOIN_TYPES = ("natural", "left", "right", "full", "inner", "outer", "cross")
OPERATORS = ("union", "intersect", "except")  # the words between the operands of a set operation
_MARKS = frozenset({*_OPENERS, "with", "join", ",", *OPERATORS})
"""Tokens without which no clause starts or ends."""
_OUTER: tuple[ClauseKind, ...] = ("ORDER BY", "LIMIT")


@dataclass(frozen=True, slots=True)
class Clause:
    """One clause: characters [start, end) of the query.

    Attributes:
        stop: End of its last token; what follows it up to `end` is only counted as its own.
        operand: Which SELECT of a set operation it belongs to, from 0, or `WHOLE`.
    """

    kind: ClauseKind
    start: int
    end: int
    stop: int
    operand: int = 0

    def text(self, sql: str) -> str:
        """Return its own text."""
        return sql[self.start : self.stop]


@cached(maxsize=2048)
def scan_clauses(sql: str) -> tuple[Clause, ...]:
    """Divide a query into clauses that cover its text exactly once, in the text's order.

    One SELECT clause where no keyword is found, or the text is too long to run; nothing for
    empty text. What stands before the first keyword belongs to the first clause.
    """
    if not sql:
        return ()
    if len(sql) > MAX_QUERY_CHARS:
        return (Clause("SELECT", 0, len(sql), len(sql)),)
    flat = [token for token in tokenize(sql) if token.depth == 0]
    places: dict[int, tuple[ClauseKind, int]] = {}
    operand, in_with = 0, False
    for at, token in enumerate(flat):
        if token.text not in _MARKS or (at and flat[at - 1].is_sign(".")):
            continue
        operand += token.is_word(*OPERATORS)
        found = _opening(flat, at, in_with=in_with)
        if found:
            places[found[0]] = (found[1], operand)
            in_with = found[1] == "WITH"
    starts = [0, *sorted(places)[1:], len(sql)]
    found = [places[start] for start in sorted(places)] or [("SELECT", 0)]
    at = [token.start for token in flat]
    return tuple(
        Clause(kind, start, end, _stop(flat, at, start, end), _owner(kind, number, operand))
        for (kind, number), start, end in zip(found, starts, starts[1:], strict=False)
    )


def item_name(text: str) -> str:
    """Return the name of a WITH item from its own text, in lower case and without quotes."""
    words = tokenize(text)
    return next((word.text for word in words if not word.is_word("with", "recursive")), "")


def clause_at(clauses: Sequence[Clause], place: int) -> int:
    """Number the clause that holds a character; the last one for places beyond the text."""
    return min(bisect_right(clauses, place, key=lambda clause: clause.end), len(clauses) - 1)


def _opening(flat: Sequence[Token], at: int, *, in_with: bool) -> tuple[int, ClauseKind] | None:
    """Return where the clause starts that a token opens, and its kind."""
    token = flat[at]
    if in_with and token.is_sign(",") and at + 1 < len(flat):
        return flat[at + 1].start, "WITH"
    if token.kind != "word" or (at and flat[at - 1].is_word("distinct")):  # IS DISTINCT FROM
        return None
    if token.text == "with":
        return (token.start, "WITH") if at == 0 else None
    if token.text == "join":
        while at and flat[at - 1].is_word(*_JOIN_TYPES):
            at -= 1
        return flat[at].start, "JOIN"
    if token.text == "window" and not (at + 2 < len(flat) and flat[at + 2].is_word("as")):
        return None
    kind = _OPENERS.get(token.text)
    return (token.start, kind) if kind else None


def _stop(flat: Sequence[Token], starts: Sequence[int], start: int, end: int) -> int:
    first, last = bisect_left(starts, start), bisect_left(starts, end)
    while last > first and (
        flat[last - 1].is_sign(";") or flat[last - 1].is_word(*OPERATORS, "all")
    ):
        last -= 1
    # After a bracket that never closes no token is at depth 0.
    return flat[last - 1].end if last > first and not flat[last - 1].is_sign("(") else end


def _owner(kind: ClauseKind, operand: int, last: int) -> int:
    is_outer = kind in _OUTER and operand == last and last > 0
    return WHOLE if kind == "WITH" or is_outer else operand
