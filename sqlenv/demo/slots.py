"""Fill the SQL slots of a question: choose tables, columns and values that belong together."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from random import Random
from string import Formatter

from sqlenv.demo.databases import Cell, DemoColumn, DemoDatabase, DemoTable, Parent, Record
from sqlenv.demo.vocabulary import NUMBERS, QuestionKind


class UnfitError(Exception):
    """The database, or the tables drawn, have not what the kind needs."""


@dataclass(slots=True)
class Draw:
    """One question in the making. Lists have one item for each table that it is about.

    Attributes:
        parents: The foreign key that leads to each table; None for the first.
        rows: All rows of each table.
        witness: One row of each table, joined to each other; values come from these rows, so that
            filters on several columns have an answer.
        columns: The column behind each slot that has one.
        sql: Text of each slot in SQL.
        words: Text of each slot in the question.
    """

    tables: list[DemoTable]
    parents: list[Parent | None]
    rows: list[Sequence[Record]]
    witness: list[Record]
    rng: Random
    columns: dict[str, DemoColumn] = field(default_factory=dict)
    sql: dict[str, str] = field(default_factory=dict)
    words: dict[str, str] = field(default_factory=dict)


def draw_slots(kind: QuestionKind, database: DemoDatabase, rng: Random) -> Draw:
    """Choose tables, and fill every slot of the queries of a kind; or raise `UnfitError`."""
    tables, parents = _SCENES[kind.scene](database, rng)
    rows = [database.rows[table.name] for table in tables]
    draw = Draw(tables, parents, rows, _joined_rows(parents, rows, rng), rng)
    names = slot_names(" ".join((kind.sql, *kind.keys, *kind.weaker)))
    for letter, fill in _FILL.items():
        for name in names:
            if name[0] == letter:
                draw.sql[name] = fill(draw, name)
    return draw


def slot_names(template: str) -> list[str]:
    """List the slots of a template, each once, in the order of the text."""
    return list(dict.fromkeys(name for _, name, _, _ in Formatter().parse(template) if name))


# Scenes


def _joined_rows(
    parents: Sequence[Parent | None], rows: Sequence[Sequence[Record]], rng: Random
) -> list[Record]:
    joined = [rng.choice(rows[0])]
    for parent, candidates in zip(parents[1:], rows[1:], strict=True):
        if parent is None:
            joined.append(rng.choice(candidates))
            continue
        child = next(row for row in reversed(joined) if parent.column in row)
        joined.append(next(row for row in candidates if row["id"] == child[parent.column]))
    return joined


_Tables = tuple[list[DemoTable], list[Parent | None]]


def _one(database: DemoDatabase, rng: Random) -> _Tables:
    return [rng.choice(database.tables)], [None]


def _pair(database: DemoDatabase, rng: Random) -> _Tables:
    child = rng.choice([table for table in database.tables if table.parents])
    parent = rng.choice(child.parents)
    return [child, database.table(parent.table)], [None, parent]


def _chain(database: DemoDatabase, rng: Random) -> _Tables:
    tables, parents = _pair(database, rng)
    if not tables[1].parents:
        raise UnfitError
    parent = rng.choice(tables[1].parents)
    return [*tables, database.table(parent.table)], [*parents, parent]


def _link(database: DemoDatabase, rng: Random) -> _Tables:
    links = [table for table in database.tables if len(table.parents) > 1]
    if not links:
        raise UnfitError
    child = rng.choice(links)
    first, second = rng.sample(child.parents, 2)
    tables = [child, database.table(first.table), database.table(second.table)]
    return tables, [None, first, second]


def _twins(database: DemoDatabase, rng: Random) -> _Tables:
    tables = [table for table in database.tables if table.of_kind("category")]
    return rng.sample(tables, 2), [None, None]


_SCENES: dict[str, Callable[[DemoDatabase, Random], _Tables]] = {
    "one": _one,
    "pair": _pair,
    "chain": _chain,
    "link": _link,
    "twins": _twins,
}


# Names


def _table(draw: Draw, name: str) -> str:
    return draw.tables[_place(name)].name


def _place(name: str) -> int:
    return int(name[-1]) - 1


def _foreign_key(draw: Draw, name: str) -> str:
    parent = draw.parents[_place(name)]
    assert parent
    return parent.column


def _column(draw: Draw, name: str) -> str:
    used = [column for slot, column in draw.columns.items() if slot[1] == name[1]]
    free = [column for column in _suitable(draw, name) if column not in used]
    if not free:
        raise UnfitError
    draw.columns[name] = draw.rng.choice(free)
    return draw.columns[name].name


def _suitable(draw: Draw, name: str) -> list[DemoColumn]:
    table = draw.tables[_place(name)]
    match name[0]:
        case "l":
            return table.of_kind("label")
        case "x" | "y":
            return [column for column in table.of_kind("category") if _is_twin(draw, column, name)]
        case "z":
            return table.of_kind("sparse")
        case "n":
            return table.of_kind("number")
        case "a":
            numbers = table.of_kind("number")
            return [column for column in numbers if NUMBERS[column.concept].can_average]
        case _:
            return table.of_kind("label") * 3 + table.of_kind("number", "category")


# What two tables may share; "level" of a course and of a nurse, say, are not the same thing.
_SHARED = ("city", "country", "language")


def _is_twin(draw: Draw, column: DemoColumn, name: str) -> bool:
    """Admit the second table's category only if it is that of the first, where both have a slot."""
    first = draw.columns.get("x1")
    if name != "x2" or first is None:
        return True
    return column.concept == first.concept and column.concept in _SHARED


# Values


def _cell(draw: Draw, name: str, letter: str) -> str:
    column = draw.columns[letter + name[1]]
    return _literal(draw.witness[_place(name)][column.name])


def _literal(cell: Cell) -> str:
    return f"{cell:g}" if isinstance(cell, float) else str(cell)


def _values(draw: Draw, name: str, letter: str) -> list[Cell]:
    column = draw.columns[letter + name[1]]
    return list(dict.fromkeys(row[column.name] for row in draw.rows[_place(name)]))


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
    can_add = NUMBERS[draw.columns["a" + name[1]].concept].can_add
    return draw.rng.choice(("AVG", "AVG", "MAX", "MIN") + ("SUM", "SUM") * can_add)


# In the order of filling. Columns that filter go first: what is shown takes from the rest.
_FILL: dict[str, Callable[[Draw, str], str]] = {
    "t": _table,
    "f": _foreign_key,
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
    "q": lambda draw, name: str(draw.rng.randint(2, 5)),
    "h": lambda draw, name: str(draw.rng.randint(2, 5)),
}
