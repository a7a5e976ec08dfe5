"""Ask questions of a database, and keep those whose answer tells right queries from wrong ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import apsw

from sqlenv.demo.databases import DemoDatabase
from sqlenv.demo.slots import UnfitError, draw_slots, put_in_words
from sqlenv.demo.vocabulary import KINDS, Difficulty, QuestionKind

SHARES: dict[Difficulty, float] = {"easy": 0.45, "medium": 0.3, "hard": 0.15, "extra": 0.1}

# Enough for a small schema to fill its quota; a kind that a schema lacks costs this many misses.
_TRIES_PER_TURN = 10
_TURNS_PER_QUESTION = 30
_BRACKETS = re.compile(r"\[([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class DemoQuestion:
    """A question with its gold query."""

    text: str
    sql: str
    kind: str
    difficulty: Difficulty


def ask(
    database: DemoDatabase, connection: apsw.Connection, count: int, rng: Random
) -> list[DemoQuestion]:
    """Draw different questions with different queries, mixed as `SHARES` says, in random order.

    There are fewer than `count` only where the database affords no more.
    """
    found: list[DemoQuestion] = []
    wanted = 0.0
    for difficulty, share in SHARES.items():
        wanted += share * count
        kinds = [kind for kind in KINDS if kind.difficulty == difficulty]
        _ask_kinds(found, kinds, round(wanted), database, connection, rng)
    _ask_kinds(found, KINDS, count, database, connection, rng)
    rng.shuffle(found)
    return found


def _ask_kinds(
    found: list[DemoQuestion],
    kinds: Sequence[QuestionKind],
    count: int,
    database: DemoDatabase,
    connection: apsw.Connection,
    rng: Random,
) -> None:
    """Add questions until there are so many."""
    taken = {text for question in found for text in (question.text, question.sql)}
    for kind in _turns(kinds, (count - len(found)) * _TURNS_PER_QUESTION, rng):
        if len(found) == count:
            break
        for _ in range(_TRIES_PER_TURN):
            question = _draw_question(kind, database, connection, rng)
            if question and question.text not in taken and question.sql not in taken:
                found.append(question)
                taken |= {question.text, question.sql}
                break


def _turns(kinds: Sequence[QuestionKind], count: int, rng: Random) -> Iterator[QuestionKind]:
    """Deal the kinds like cards, so that rare ones have their turn in every database."""
    deck = [kind for kind in kinds for _ in range(kind.weight)]
    for turn in range(count):
        if turn % len(deck) == 0:
            rng.shuffle(deck)
        yield deck[turn % len(deck)]


def _draw_question(
    kind: QuestionKind, database: DemoDatabase, connection: apsw.Connection, rng: Random
) -> DemoQuestion | None:
    try:
        draw = draw_slots(kind, database, rng)
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
    return DemoQuestion(text, gold, kind.name, kind.difficulty)


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
