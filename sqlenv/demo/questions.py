"""Ask questions of a database, and keep those whose answer tells right queries from wrong ones."""

from __future__ import annotations

import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from random import Random

import apsw

from sqlenv.demo.databases import DemoDatabase
from sqlenv.demo.slots import UnfitError, draw_slots
from sqlenv.demo.vocabulary import KINDS, Difficulty, QuestionKind
from sqlenv.demo.words import put_in_words

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
        found += _ask_kinds(kinds, round(wanted) - len(found), database, connection, rng, found)
    found += _ask_kinds(KINDS, count - len(found), database, connection, rng, found)
    rng.shuffle(found)
    return found


def _ask_kinds(
    kinds: Sequence[QuestionKind],
    count: int,
    database: DemoDatabase,
    connection: apsw.Connection,
    rng: Random,
    before: Sequence[DemoQuestion],
) -> list[DemoQuestion]:
    found: list[DemoQuestion] = []
    taken = {text for question in before for text in (question.text, question.sql)}
    for kind in _turns(kinds, count * _TURNS_PER_QUESTION, rng):
        if len(found) == count:
            break
        for _ in range(_TRIES_PER_TURN):
            question = _draw_question(kind, database, connection, rng)
            if question and question.text not in taken and question.sql not in taken:
                found.append(question)
                taken |= {question.text, question.sql}
                break
    return found


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
    gold = _without_brackets(kind.sql).format(**draw.sql)
    weaker = [sql.format(**draw.sql) for sql in (*_bracket_dropped(kind.sql), *kind.weaker)]
    if "LIMIT" in gold:
        weaker += _turned_round(gold)
    keys = [sql.format(**draw.sql) for sql in kind.keys]
    if not tells_apart(connection, gold, weaker=weaker, keys=keys):
        return None
    return DemoQuestion(
        put_in_words(draw, rng.choice(kind.wordings)), gold, kind.name, kind.difficulty
    )


def tells_apart(
    connection: apsw.Connection, gold: str, *, weaker: Sequence[str], keys: Sequence[str]
) -> bool:
    """Check that a gold answer is neither void, nor arbitrary, nor a weaker query's."""
    rows = connection.execute(gold).fetchall()
    if rows == [(0,)] or all(cell is None for row in rows for cell in row):
        return False
    for sql in keys:
        found = connection.execute(sql).fetchall()
        if len(set(found)) < len(found):
            return False
    ordered = "ORDER BY" in gold
    answer = _comparable(rows, ordered=ordered)
    return all(
        _comparable(connection.execute(sql).fetchall(), ordered=ordered) != answer for sql in weaker
    )


def _comparable(rows: list[tuple], *, ordered: bool) -> list[tuple]:
    return rows if ordered else sorted(rows, key=repr)


def _without_brackets(sql: str) -> str:
    return _BRACKETS.sub(r"\1", sql)


def _bracket_dropped(sql: str) -> Iterator[str]:
    for match in _BRACKETS.finditer(sql):
        yield _without_brackets(sql[: match.start()] + sql[match.end() :])


def _turned_round(sql: str) -> list[str]:
    if " DESC " in sql:
        return [sql.replace(" DESC ", " ASC ")]
    return [sql.replace(" ASC ", " DESC ")]
