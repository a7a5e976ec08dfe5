"""Fill the slots of a question, in SQL and in words.

In SQL: tables, columns and values that belong together. In words: nouns and their synonyms, phrases
for conditions and orders.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from string import Formatter

from sqlenv.demo.databases import Cell, DemoRow, DemoTable, Parent, Tables
from sqlenv.demo.vocabulary import PLURALS, WORDS, ColumnKind, Concept, QuestionKind, plural

_SYNONYM_RATE = 0.1
# What two tables may share; "level" of a course and of a nurse, say, are not the same thing.
_SHARED = ("city", "country", "language")


class UnfitError(Exception):
    """The database, or the tables drawn, have not what the kind needs."""


@dataclass(slots=True)
class Draw:
    """One question in the making. Lists have one item for each table that it is about.

    Attributes:
        parents: The foreign key that leads to each table after the first; none between twins.
        witness: One row of each table, joined to each other; values come from these rows, so that
            filters on several columns have an answer.
        columns: The column behind each slot that has one.
        sql, words: Text of each slot in SQL, and in the question.
    """

    tables: list[DemoTable]
    parents: list[Parent]
    witness: list[DemoRow]
    rng: Random
    columns: dict[str, Concept] = field(default_factory=dict)
    sql: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)


def draw_slots(kind: QuestionKind, database: Tables, rng: Random) -> Draw:
    """Choose tables, and fill every slot of the queries of a kind; or raise `UnfitError`."""
    tables, parents = _scene(kind.scene, database, rng)
    draw = Draw(tables, parents, _joined_rows(tables, parents, rng), rng)
    names = _slot_names(" ".join((kind.sql, *kind.keys, *kind.weaker)))
    for letter, fill in _FILL.items():
        for name in names:
            if name[0] == letter:
                draw.sql[name] = fill(draw, name)
    return draw


def put_in_words(draw: Draw, wording: str) -> str:
    """Fill the slots of a wording; every slot keeps its words throughout the question."""
    for name in _slot_names(wording):
        if name not in draw.words:
            draw.words[name] = _phrase(draw, name)
    return wording.format(**draw.words)


def _slot_names(template: str) -> list[str]:
    """List the slots of a template, each once, in the order of the text."""
    return list(dict.fromkeys(name for _, name, _, _ in Formatter().parse(template) if name))


# Tables and rows


def _scene(scene: str, database: Tables, rng: Random) -> tuple[list[DemoTable], list[Parent]]:
    tables = [*database.values()]
    if scene == "one":
        return [rng.choice(tables)], []
    if scene == "twins":
        return rng.sample([table for table in tables if table.of_kind("category")], 2), []
    least = 2 if scene == "link" else 1
    children = [table for table in tables if len(table.parents) >= least]
    if not children:
        raise UnfitError
    child = rng.choice(children)
    parents = rng.sample(child.parents, 2) if scene == "link" else [rng.choice(child.parents)]
    if scene == "chain":
        above = database[parents[0].table].parents
        if not above:
            raise UnfitError
        parents.append(rng.choice(above))
    return [child, *(database[parent.table] for parent in parents)], parents


def _joined_rows(
    tables: Sequence[DemoTable], parents: Sequence[Parent], rng: Random
) -> list[DemoRow]:
    joined = [rng.choice(table.rows) for table in tables[: len(tables) - len(parents)]]
    for table, parent in zip(tables[1:], parents, strict=False):
        child = next(row for row in reversed(joined) if parent.column in row)
        joined.append(next(row for row in table.rows if row["id"] == child[parent.column]))
    return joined


def _place(name: str) -> int:
    return int(name[-1]) - 1


# Columns and values

_KINDS: dict[str, ColumnKind] = {
    "l": "label",
    "n": "number",
    "x": "category",
    "y": "category",
    "z": "sparse",
}


def _column(draw: Draw, name: str) -> str:
    used = [column for slot, column in draw.columns.items() if slot[1] == name[1]]
    free = [column for column in _suitable(draw, name) if column not in used]
    if not free:
        raise UnfitError
    draw.columns[name] = draw.rng.choice(free)
    return draw.columns[name].name


def _suitable(draw: Draw, name: str) -> list[Concept]:
    table, first = draw.tables[_place(name)], draw.columns.get("x1")
    match name[0]:
        case "c" | "d":
            return table.of_kind("label") * 3 + table.of_kind("number", "category")
        case "a":
            return [one for one in table.of_kind("number") if one.can_average]
        case _ if name == "x2" and first:
            shared = {first.pool} & {*_SHARED}
            return [one for one in table.of_kind("category") if one.pool in shared]
    return table.of_kind(_KINDS[name[0]])


def _cell(draw: Draw, name: str, letter: str) -> str:
    return _literal(draw.witness[_place(name)][draw.columns[letter + name[1]].name])


def _literal(cell: Cell) -> str:
    return f"{cell:g}" if isinstance(cell, float) else str(cell)


def _values(draw: Draw, name: str, letter: str) -> list[Cell]:
    column = draw.columns[letter + name[1]].name
    return list(dict.fromkeys(row[column] for row in draw.tables[_place(name)].rows))


def _second_value(draw: Draw, name: str) -> str:
    others = [value for value in _values(draw, name, "x") if value != draw.sql["v" + name[1]]]
    if not others:
        raise UnfitError
    return str(draw.rng.choice(others))


def _lower_threshold(draw: Draw, name: str) -> str:
    """Give a value, and leave a greater one for slot j."""
    values = [value for value in _values(draw, name, "n") if isinstance(value, int | float)]
    if len(values) < 2:
        raise UnfitError
    low, high = sorted(draw.rng.sample(values, 2))
    draw.sql["j" + name[1]] = _literal(high)
    return _literal(low)


def _pattern(draw: Draw, name: str) -> str:
    label = _cell(draw, name, "l")
    letter = draw.rng.choice(label[1:-1])
    return draw.rng.choice((f"{label[0]}%", f"%{label[-1]}", f"%{letter}%"))


def _function(draw: Draw, name: str) -> str:
    can_add = draw.columns["a" + name[1]].can_add
    return draw.rng.choice(("AVG", "AVG", "MAX", "MIN") + ("SUM", "SUM") * can_add)


# In the order of filling. Columns that filter go first: what is shown takes from the rest.
_FILL: dict[str, Callable[[Draw, str], str]] = {
    "t": lambda draw, name: draw.tables[_place(name)].name,
    "f": lambda draw, name: draw.parents[_place(name) - 1].column,
    **dict.fromkeys("xyznalcd", _column),
    "v": lambda draw, name: _cell(draw, name, "x"),
    "w": _second_value,
    "u": lambda draw, name: _cell(draw, name, "y"),
    "b": lambda draw, name: _cell(draw, name, "l"),
    "o": lambda draw, name: draw.rng.choice((">", ">", "<", "<", ">=", "<=")),
    "e": lambda draw, name: draw.rng.choice((">", "<")),
    "k": _lower_threshold,
    "j": lambda draw, name: draw.sql[name],
    "m": _pattern,
    "g": _function,
    "r": lambda draw, name: draw.rng.choice(("DESC", "ASC")),
    **dict.fromkeys("qh", lambda draw, name: str(draw.rng.randint(2, 5))),
}


# Words


def _phrase(draw: Draw, name: str) -> str:
    if name in ("show", "lowshow"):
        show = draw.rng.choice(WORDS["show"])
        return show if name == "show" else show.lower()
    stem, number = name[:-1], name[-1]
    if stem in _PHRASES:
        return draw.rng.choice(_PHRASES[stem](draw, number))
    return plural(_noun(draw, stem[0] + number)) if len(stem) > 1 else _noun(draw, name)


def _noun(draw: Draw, name: str) -> str:
    """Name the table S1, or a column; other slots say what they are in SQL."""
    if name in draw.words:
        return draw.words[name]
    column = draw.columns.get(name)
    if name[0] == "S":
        own, *others = draw.tables[_place(name)].names
    elif column:
        own, *others = column.names
    else:
        own, others = draw.sql[name], []
    if others and draw.rng.random() < _SYNONYM_RATE:
        own = others[0] if name[0] == "S" else draw.rng.choice(others)
    draw.words[name] = own.replace("_", " ") if column or name[0] == "S" else own
    return draw.words[name]


def _is(draw: Draw, number: str, *, column: str = "x", value: str = "v") -> list[str]:
    noun, literal = _noun(draw, column + number), draw.sql[value + number]
    before = draw.columns[column + number].before
    short = [f"{words} {literal}" for words in before]
    return [f"with {noun} {literal}", f"whose {noun} is {literal}", *short]


def _compare(draw: Draw, number: str) -> list[str]:
    sign, threshold = draw.sql["o" + number], draw.sql["k" + number]
    noun, meaning = _noun(draw, "n" + number), draw.columns["n" + number]
    be = "are" if noun in PLURALS else "is"
    plain = [text.format(n=noun, be=be, k=threshold) for text in WORDS["compare"][sign]]
    special = dict(zip("><", meaning.comparisons, strict=True)).get(sign)
    return [*plain, *[f"{special} {threshold}"] * len(plain)] if special else plain


def _sorted(draw: Draw, number: str) -> list[str]:
    noun = _noun(draw, "n" + number)
    return [text.format(n=noun) for text in WORDS["sorted"][draw.sql["r" + number]]]


def _extremes(draw: Draw, number: str, the: str, noun: str) -> list[str]:
    """Say it by the column, or by its superlative unless another column has the same."""
    spoken, direction = _noun(draw, "n" + number), draw.sql["r" + number]
    plain = [f"{the} {noun} with the {word} {spoken}" for word in WORDS["extreme"][direction]]
    own = draw.columns["n" + number]
    found = {
        column.name: column.extremes[direction == "ASC"]
        for column in draw.tables[_place(number)].of_kind("number")
    }
    adjective = found.pop(own.name)
    is_told = adjective and adjective not in found.values()
    return [*plain, *[f"{the} {adjective} {noun}"] * len(plain)] if is_told else plain


def _like(draw: Draw, number: str) -> list[str]:
    pattern = draw.sql["m" + number]
    letter = pattern.strip("%")
    if not pattern.startswith("%"):
        return [f"starts with {letter}", f"begins with {letter}"]
    if not pattern.endswith("%"):
        return [f"ends with {letter}"]
    return [f"contains {letter}", f"contains the letter {letter}"]


# All the ways to say one thing.
_PHRASES: dict[str, Callable[[Draw, str], Sequence[str]]] = {
    "S": lambda draw, number: [_noun(draw, "S" + number)],
    "T": lambda draw, number: [plural(_noun(draw, "S" + number))],
    "P": lambda draw, number: [draw.parents[_place(number) - 1].preposition],
    "is": _is,
    "also": lambda draw, number: _is(draw, number, column="y", value="u"),
    "isor": lambda draw, number: [
        f"{words} or {draw.sql['w' + number]}" for words in _is(draw, number)
    ],
    "cmp": _compare,
    "beyond": lambda draw, number: WORDS["beyond"][draw.sql["e" + number]],
    "sorted": _sorted,
    "best": lambda draw, number: _extremes(draw, number, "the", _noun(draw, "S" + number)),
    "top": lambda draw, number: _extremes(
        draw, number, f"the {draw.sql['q' + number]}", plural(_noun(draw, "S" + number))
    ),
    "like": _like,
    "g": lambda draw, number: WORDS["functions"][draw.sql["g" + number]],
}
