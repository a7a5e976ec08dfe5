"""Ask questions of a database: fill the slots of a kind, and keep what an execution can tell right from wrong."""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from random import Random
from string import Formatter

import apsw

from sqlenv.demo.databases import Cell, Column, Database, Parent, Record, TableSchema, synonyms
from sqlenv.demo.kinds import KINDS, Difficulty, QuestionKind
from sqlenv.demo.vocabulary import CATEGORIES, NUMBERS

SHARES: dict[Difficulty, float] = {"easy": 0.45, "medium": 0.3, "hard": 0.15, "extra": 0.1}

_SYNONYM_RATE = 0.1
_TRIES_PER_TURN = 8
_TURNS_PER_QUESTION = 30
_BRACKETS = re.compile(r"\[([^\]]*)\]")


@dataclass(frozen=True, slots=True)
class Question:
    """A question that its gold query answers, and nothing weaker does."""

    text: str
    sql: str
    kind: str
    difficulty: Difficulty


def ask(database: Database, connection: apsw.Connection, count: int, rng: Random) -> list[Question]:
    """Draw different questions, mixed as `SHARES` says.

    Args:
        database: Schema and rows.
        connection: The same database, open.
        count: How many questions, at least 0.
        rng: Source of all choices.

    Returns:
        The questions in random order; fewer than `count` only if the database affords no more.
    """
    found: dict[str, Question] = {}
    quotas = {difficulty: round(count * share) for difficulty, share in SHARES.items()}
    quotas["easy"] += count - sum(quotas.values())
    for difficulty, quota in reversed(quotas.items()):
        kinds = [kind for kind in KINDS if kind.difficulty == difficulty]
        _ask_kinds(kinds, len(found) + quota, database, connection, rng, found)
    _ask_kinds(KINDS, count, database, connection, rng, found)
    questions = list(found.values())
    rng.shuffle(questions)
    return questions


def _ask_kinds(
    kinds: Sequence[QuestionKind],
    wanted: int,
    database: Database,
    connection: apsw.Connection,
    rng: Random,
    found: dict[str, Question],
) -> None:
    """Add questions of these kinds to `found`, by their SQL, until there are `wanted`."""
    texts = {question.text for question in found.values()}
    for kind in _turns(kinds, wanted * _TURNS_PER_QUESTION, rng):
        if len(found) >= wanted:
            return
        for _ in range(_TRIES_PER_TURN):
            question = _draw(kind, database, connection, rng)
            if question and question.sql not in found and question.text not in texts:
                found[question.sql] = question
                texts.add(question.text)
                break


def _turns(kinds: Sequence[QuestionKind], count: int, rng: Random) -> Iterator[QuestionKind]:
    """Deal the kinds like cards, so that rare ones have their turn in every database."""
    deck = [kind for kind in kinds for _ in range(kind.weight)]
    for turn in range(count):
        if turn % len(deck) == 0:
            rng.shuffle(deck)
        yield deck[turn % len(deck)]


class _Unfit(Exception):
    """The drawn tables lack a column that the kind needs."""


@dataclass(slots=True)
class _Draw:
    """The slots of one question while they are filled; tables count from 1."""

    tables: list[TableSchema]
    parents: list[Parent | None]
    witness: list[Record]
    rows: list[Sequence[Record]]
    rng: Random
    columns: dict[str, Column] = field(default_factory=dict)
    sql: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)


def _draw(
    kind: QuestionKind, database: Database, connection: apsw.Connection, rng: Random
) -> Question | None:
    try:
        draw = _scene(kind, database, rng)
        _fill_sql(draw, " ".join((kind.sql, kind.keys, *kind.weaker)))
    except _Unfit:
        return None
    if not _tells_apart(kind, draw, connection):
        return None
    text = _word(draw, rng.choice(kind.wordings))
    return Question(text, _gold(kind).format(**draw.sql), kind.name, kind.difficulty)


def _gold(kind: QuestionKind) -> str:
    return _BRACKETS.sub(r"\1", kind.sql)


def _weaker(kind: QuestionKind) -> Iterator[str]:
    """Drop each bracket in turn, and flip the direction where only some rows are asked for."""
    for match in _BRACKETS.finditer(kind.sql):
        yield _BRACKETS.sub(r"\1", kind.sql[: match.start()]) + _BRACKETS.sub(
            r"\1", kind.sql[match.end() :]
        )
    yield from kind.weaker


def _tells_apart(kind: QuestionKind, draw: _Draw, connection: apsw.Connection) -> bool:
    """Check that the gold gives rows, in no arbitrary order, that no weaker query gives."""

    def run(sql: str) -> list[tuple]:
        return connection.execute(sql.format(**draw.sql)).fetchall()

    rows = run(_gold(kind))
    if all(cell is None for row in rows for cell in row) or rows == [(0,)]:
        return False
    if kind.unique and len(set(rows)) < len(rows):
        return False
    keys = run(kind.keys) if kind.keys else []
    if len(set(keys)) < len(keys):
        return False
    seen = rows if "ORDER BY" in kind.sql else sorted(rows, key=repr)
    for sql in _weaker(kind):
        other = run(sql)
        if seen == (other if "ORDER BY" in kind.sql else sorted(other, key=repr)):
            return False
    return True


# Scenes: which tables a question is about, and a row of each that belong together.


def _scene(kind: QuestionKind, database: Database, rng: Random) -> _Draw:
    tables, parents = _SCENES[kind.scene](database, rng)
    rows = [database.rows[table.name] for table in tables]
    witness = [rng.choice(rows[0])]
    for number, parent in enumerate(parents[1:], start=1):
        if parent is None:
            witness.append(rng.choice(rows[number]))
            continue
        child = next(row for row in reversed(witness) if parent.column in row)
        witness.append(next(row for row in rows[number] if row["id"] == child[parent.column]))
    return _Draw(tables, parents, witness, rows, rng)


_Tables = tuple[list[TableSchema], list[Parent | None]]


def _one(database: Database, rng: Random) -> _Tables:
    return [rng.choice(database.tables)], [None]


def _pair(database: Database, rng: Random) -> _Tables:
    child = rng.choice([table for table in database.tables if table.parents])
    parent = rng.choice(child.parents)
    return [child, database.table(parent.table)], [None, parent]


def _chain(database: Database, rng: Random) -> _Tables:
    tables, parents = _pair(database, rng)
    if not tables[1].parents:
        raise _Unfit
    parent = rng.choice(tables[1].parents)
    return [*tables, database.table(parent.table)], [*parents, parent]


def _link(database: Database, rng: Random) -> _Tables:
    links = [table for table in database.tables if len(table.parents) > 1]
    if not links:
        raise _Unfit
    child = rng.choice(links)
    first, second = rng.sample(child.parents, 2)
    tables = [child, database.table(first.table), database.table(second.table)]
    return tables, [None, first, second]


def _twins(database: Database, rng: Random) -> _Tables:
    tables = [table for table in database.tables if _category(table, "city", "country")]
    if len(tables) < 2:
        raise _Unfit
    return rng.sample(tables, 2), [None, None]


def _category(table: TableSchema, *concepts: str) -> set[str]:
    return {column.concept for column in table.columns if column.concept in concepts}


_SCENES: dict[str, Callable[[Database, Random], _Tables]] = {
    "one": _one,
    "pair": _pair,
    "chain": _chain,
    "link": _link,
    "twins": _twins,
}


# Slots of the SQL.


def _fill_sql(draw: _Draw, template: str) -> None:
    names = {name for _, name, _, _ in Formatter().parse(template) if name}
    for letter in _ORDER:
        for name in sorted(names):
            if name[0] == letter:
                draw.sql[name] = _FILL[letter](draw, name)


def _table(draw: _Draw, name: str) -> str:
    return draw.tables[int(name[1]) - 1].name


def _foreign_key(draw: _Draw, name: str) -> str:
    parent = draw.parents[int(name[1]) - 1]
    assert parent
    return parent.column


def _column(draw: _Draw, name: str) -> str:
    number = int(name[1]) - 1
    table = draw.tables[number]
    used = [column for slot, column in draw.columns.items() if slot[1] == name[1]]
    free = [column for column in _suitable(draw, table, name) if column not in used]
    if not free:
        raise _Unfit
    column = draw.rng.choice(free)
    draw.columns[name] = column
    return column.name


def _suitable(draw: _Draw, table: TableSchema, name: str) -> list[Column]:
    match name[0]:
        case "l":
            return table.of_kind("label")
        case "x" | "y":
            return [column for column in table.of_kind("category") if _same_twin(draw, column, name)]
        case "z":
            return table.of_kind("sparse")
        case "n":
            return table.of_kind("number")
        case "a":
            return [column for column in table.of_kind("number") if _can_average(column)]
        case _:
            labels = table.of_kind("label")
            return labels * 3 + table.of_kind("number", "category")


def _same_twin(draw: _Draw, column: Column, name: str) -> bool:
    """Let the category of a second table be the one of the first, where both are in the query."""
    first = draw.columns.get("x1")
    if name == "x2" and first:
        return column.concept == first.concept
    return True


def _can_average(column: Column) -> bool:
    return NUMBERS[column.concept].can_average


def _cell(draw: _Draw, name: str, slot: str) -> str:
    return _literal(draw.witness[int(name[1]) - 1][draw.columns[slot + name[1]].name])


def _literal(cell: Cell) -> str:
    return f"{cell:g}" if isinstance(cell, float) else str(cell)


def _values(draw: _Draw, name: str, slot: str) -> list[Cell]:
    """List the different values of a slot's column, in the order of the rows."""
    column = draw.columns[slot + name[1]]
    return list(dict.fromkeys(row[column.name] for row in draw.rows[int(name[1]) - 1]))


def _value(draw: _Draw, name: str) -> str:
    return _cell(draw, name, "x")


def _second_value(draw: _Draw, name: str) -> str:
    others = [value for value in _values(draw, name, "x") if value != draw.sql["v" + name[1]]]
    if not others:
        raise _Unfit
    return str(draw.rng.choice(others))


def _other_value(draw: _Draw, name: str) -> str:
    return _cell(draw, name, "y")


def _label_value(draw: _Draw, name: str) -> str:
    return _cell(draw, name, "l")


def _operator(draw: _Draw, name: str) -> str:
    return draw.rng.choice((">", ">", "<", "<", ">=", "<="))


def _threshold(draw: _Draw, name: str) -> str:
    """Give a value, and leave a greater one for slot j."""
    values = _values(draw, name, "n")
    if len(values) < 2:
        raise _Unfit
    low, high = sorted(draw.rng.sample(values, 2))  # ty: ignore[invalid-argument-type]
    draw.sql["j" + name[1]] = _literal(high)
    return _literal(low)


def _upper_threshold(draw: _Draw, name: str) -> str:
    return draw.sql[name]


def _pattern(draw: _Draw, name: str) -> str:
    label = _cell(draw, name, "l")
    letter = draw.rng.choice(label[1:-1])
    return draw.rng.choice((f"{label[0]}%", f"%{label[-1]}", f"%{letter}%"))


def _function(draw: _Draw, name: str) -> str:
    can_add = NUMBERS[draw.columns["a" + name[1]].concept].can_add
    return draw.rng.choice(("AVG", "AVG", "MAX", "MIN") + ("SUM", "SUM") * can_add)


def _direction(draw: _Draw, name: str) -> str:
    return draw.rng.choice(("DESC", "ASC"))


def _limit(draw: _Draw, name: str) -> str:
    return str(draw.rng.randint(2, 5))


_FILL: dict[str, Callable[[_Draw, str], str]] = {
    "t": _table,
    "f": _foreign_key,
    **dict.fromkeys("lxyznacd", _column),
    "v": _value,
    "w": _second_value,
    "u": _other_value,
    "b": _label_value,
    "o": _operator,
    "k": _threshold,
    "j": _upper_threshold,
    "m": _pattern,
    "g": _function,
    "r": _direction,
    "q": _limit,
    "h": _limit,
}
# Columns that filter go first: what is shown takes from the rest.
_ORDER = "tfxyznalcdvwubokjmgrqh"


# Words of the question.

_SHOW = ("Show", "List", "Give", "Find")
_FUNCTIONS = {
    "AVG": ("average", "mean"),
    "MAX": ("maximum", "highest"),
    "MIN": ("minimum", "lowest"),
    "SUM": ("total",),
}
_COMPARE = {
    ">": ("with {n} above {k}", "with {n} greater than {k}", "whose {n} is more than {k}"),
    "<": ("with {n} below {k}", "with {n} smaller than {k}", "whose {n} is less than {k}"),
    ">=": ("with {n} of at least {k}", "whose {n} is at least {k}"),
    "<=": ("with {n} of at most {k}", "whose {n} is at most {k}"),
}
_SORTED = {
    "DESC": (
        "sorted by {n} in descending order",
        "ordered by {n} from high to low",
        "from the highest to the lowest {n}",
    ),
    "ASC": (
        "sorted by {n} in ascending order",
        "ordered by {n} from low to high",
        "from the lowest to the highest {n}",
    ),
}
_EXTREME = {"DESC": ("highest", "largest"), "ASC": ("lowest", "smallest")}


def _word(draw: _Draw, wording: str) -> str:
    """Fill a wording; the first letter of every sentence stays as the wording has it."""
    for _, name, _, _ in Formatter().parse(wording):
        if name and name not in draw.words:
            draw.words[name] = _phrase(draw, name)
    return wording.format(**draw.words)


def _phrase(draw: _Draw, name: str) -> str:
    if name in ("show", "lowshow"):
        show = draw.rng.choice(_SHOW)
        return show if name == "show" else show.lower()
    stem, number = name[:-1], name[-1]
    if stem in ("T", "S"):
        words = _table_words(draw, number)
        return plural(words) if stem == "T" else words
    if stem == "P":
        parent = draw.parents[int(number) - 1]
        assert parent
        return parent.preposition
    if stem in _PHRASES:
        return draw.rng.choice(_PHRASES[stem](draw, number))
    if stem in ("cs", "ds", "ls", "xs"):
        return plural(_noun(draw, stem[0] + number))
    return _noun(draw, name)


def _noun(draw: _Draw, name: str) -> str:
    """Name a column in words, or copy a value; the same words for the whole question."""
    if name not in draw.words:
        column = draw.columns.get(name)
        draw.words[name] = _column_words(draw, column) if column else draw.sql[name]
    return draw.words[name]


def _column_words(draw: _Draw, column: Column) -> str:
    names = [name for name in (column.concept, *synonyms(column.concept)) if name != column.name]
    spoken = draw.rng.choice(names) if names and draw.rng.random() < _SYNONYM_RATE else column.name
    return spoken.replace("_", " ")


def _table_words(draw: _Draw, number: str) -> str:
    if "S" + number not in draw.words:
        names = draw.tables[int(number) - 1].names
        swap = len(names) > 1 and draw.rng.random() < _SYNONYM_RATE
        draw.words["S" + number] = names[int(swap)].replace("_", " ")
    return draw.words["S" + number]


def plural(words: str) -> str:
    """Write the plural of an English noun that is regular."""
    if words.endswith("y") and words[-2] not in "aeou":
        return words[:-1] + "ies"
    if words in _UNCHANGED:
        return words
    return words + ("es" if words.endswith(("s", "x", "ch", "sh")) else "s")


_UNCHANGED = ("series", "sales", "seats", "points", "goals", "wins", "visitors", "pages", "hours")
_UNCHANGED += ("credits", "floors", "rooms", "votes", "minutes", "victories", "funds", "guests")
_UNCHANGED += ("aircraft",)


def _is(draw: _Draw, number: str, *, column: str = "x", value: str = "v") -> Sequence[str]:
    spoken, literal = _noun(draw, column + number), draw.sql[value + number]
    meaning = CATEGORIES[draw.columns[column + number].concept]
    short = tuple(f"{before} {literal}" for before in meaning.before)
    return (f"with {spoken} {literal}", f"whose {spoken} is {literal}", *short)


def _is_also(draw: _Draw, number: str) -> Sequence[str]:
    return _is(draw, number, column="y", value="u")


def _is_or(draw: _Draw, number: str) -> Sequence[str]:
    return [f"{phrase} or {draw.sql['w' + number]}" for phrase in _is(draw, number)]


def _compare(draw: _Draw, number: str) -> Sequence[str]:
    sign, threshold = draw.sql["o" + number], draw.sql["k" + number]
    meaning = NUMBERS[draw.columns["n" + number].concept]
    plain = [text.format(n=_noun(draw, "n" + number), k=threshold) for text in _COMPARE[sign]]
    special = {">": meaning.more, "<": meaning.less}.get(sign, ())
    return [*plain, *(f"{before} {threshold}" for before in special * 3)]


def _sorted(draw: _Draw, number: str) -> Sequence[str]:
    return [
        text.format(n=_noun(draw, "n" + number)) for text in _SORTED[draw.sql["r" + number]]
    ]


def _adjectives(draw: _Draw, number: str) -> Sequence[str]:
    """List the superlatives that mean this column and no other of the table."""
    column, ascending = draw.columns["n" + number], draw.sql["r" + number] == "ASC"

    def of(concept: str) -> tuple[str, ...]:
        meaning = NUMBERS[concept]
        return meaning.least if ascending else meaning.most

    others = [other for other in draw.tables[int(number) - 1].of_kind("number") if other != column]
    taken = {word for other in others for word in of(other.concept)}
    return [word for word in of(column.concept) if word not in taken]


def _best(draw: _Draw, number: str) -> Sequence[str]:
    noun, spoken = _table_words(draw, number), _noun(draw, "n" + number)
    extreme = _EXTREME[draw.sql["r" + number]]
    plain = [f"the {noun} with the {word} {spoken}" for word in extreme]
    return [*plain, *(f"the {word} {noun}" for word in _adjectives(draw, number) for _ in plain)]


def _top(draw: _Draw, number: str) -> Sequence[str]:
    noun, spoken = plural(_table_words(draw, number)), _noun(draw, "n" + number)
    limit, extreme = draw.sql["q" + number], _EXTREME[draw.sql["r" + number]]
    plain = [f"the {limit} {noun} with the {word} {spoken}" for word in extreme]
    special = [f"the {limit} {word} {noun}" for word in _adjectives(draw, number)]
    return [*plain, *special, *special]


def _like(draw: _Draw, number: str) -> Sequence[str]:
    pattern = draw.sql["m" + number]
    letter = pattern.strip("%")
    if not pattern.startswith("%"):
        return (f"starts with {letter}", f"begins with {letter}")
    if not pattern.endswith("%"):
        return (f"ends with {letter}",)
    return (f"contains {letter}", f"contains the letter {letter}")


def _beyond(draw: _Draw, number: str) -> Sequence[str]:
    return ("above", "greater than") if ">" in draw.sql["o" + number] else ("below", "less than")


def _most(draw: _Draw, number: str) -> Sequence[str]:
    return ("most",) if draw.sql["r" + number] == "DESC" else ("fewest",)


def _function_words(draw: _Draw, number: str) -> Sequence[str]:
    return _FUNCTIONS[draw.sql["g" + number]]


_PHRASES: dict[str, Callable[[_Draw, str], Sequence[str]]] = {
    "is": _is,
    "also": _is_also,
    "isor": _is_or,
    "cmp": _compare,
    "sorted": _sorted,
    "best": _best,
    "top": _top,
    "like": _like,
    "beyond": _beyond,
    "fewest": _most,
    "g": _function_words,
}
