"""Ask questions of a database, and keep those whose answer tells right queries from wrong ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from itertools import accumulate
from random import Random
from typing import Any

import apsw

from sqlenv.demo.databases import Tables
from sqlenv.demo.slots import UnfitError, draw_slots, put_in_words
from sqlenv.demo.vocabulary import KINDS, Difficulty, QuestionKind

SHARES: dict[Difficulty, float] = {"easy": 0.45, "medium": 0.3, "hard": 0.15, "extra": 0.1}

# Enough for a small schema to fill its quota; a kind that a schema lacks costs this many misses.
_TRIES_PER_TURN = 10
_TURNS_PER_QUESTION = 30
_TEXTS = ("question", "query")
_BRACKETS = re.compile(r"\[([^\]]*)\]")


Asked = dict[str, Any]
"""What a question file says of a question: its text and gold query, its difficulty and its kind."""


def draw_questions(
    tables: Tables, connection: apsw.Connection, count: int, rng: Random
) -> list[Asked]:
    """Draw different questions with different queries, mixed as `SHARES` says, in random order.

    There are fewer than `count` only where the database affords no more.
    """
    found, taken = list[Asked](), set[str]()
    groups = ([kind for kind in KINDS if kind.difficulty == one] for one in SHARES)
    sizes = map(round, accumulate(share * count for share in SHARES.values()))
    # What one difficulty lacks is made up for by all kinds.
    for kinds, size in (*zip(groups, sizes, strict=True), (KINDS, count)):
        for kind in _turns(kinds, (size - len(found)) * _TURNS_PER_QUESTION, rng):
            if len(found) == size:
                break
            for _ in range(_TRIES_PER_TURN):
                asked = _draw_question(kind, tables, connection, rng)
                if asked and taken.isdisjoint(asked[name] for name in _TEXTS):
                    found.append(asked)
                    taken |= {asked[name] for name in _TEXTS}
                    break
    rng.shuffle(found)
    return found


def _turns(kinds: Sequence[QuestionKind], count: int, rng: Random) -> Iterator[QuestionKind]:
    """Deal the kinds like cards, so that rare ones have their turn in every database."""
    deck = [kind for kind in kinds for _ in range(kind.weight)]
    for turn in range(count):
        if turn % len(deck) == 0:
            rng.shuffle(deck)
        yield deck[turn % len(deck)]


def _draw_question(
    kind: QuestionKind, tables: Tables, connection: apsw.Connection, rng: Random
) -> Asked | None:
    try:
        draw = draw_slots(kind, tables, rng)
    except UnfitError:
        return None
    parts = _BRACKETS.split(kind.sql)  # every second one is a condition
    gold = "".join(parts).format(**draw.sql)
    dropped = ["".join((*parts[:at], *parts[at + 1 :])) for at in range(1, len(parts), 2)]
    weaker = [sql.format(**draw.sql) for sql in (*dropped, *kind.weaker)]
    if "LIMIT" in gold:
        turned = (" DESC ", " ASC ") if " DESC " in gold else (" ASC ", " DESC ")
        weaker.append(gold.replace(*turned))
    keys = [sql.format(**draw.sql) for sql in kind.keys]
    if not tells_apart(connection, gold, weaker=weaker, keys=keys):
        return None
    text = put_in_words(draw, rng.choice(kind.wordings))
    return {"question": text, "query": gold, "difficulty": kind.difficulty, "tags": [kind.name]}


def tells_apart(
    connection: apsw.Connection, gold: str, *, weaker: Sequence[str], keys: Sequence[str]
) -> bool:
    """Check that a gold answer is neither void, nor arbitrary, nor a weaker query's."""

    def answer(sql: str) -> list[tuple]:
        rows = connection.execute(sql).fetchall()
        return rows if "ORDER BY" in gold else sorted(rows, key=repr)

    found = answer(gold)
    if found == [(0,)] or all(cell is None for row in found for cell in row):
        return False
    known = [connection.execute(sql).fetchall() for sql in keys]
    if any(len(set(rows)) < len(rows) for rows in known):
        return False
    return all(answer(sql) != found for sql in weaker)
