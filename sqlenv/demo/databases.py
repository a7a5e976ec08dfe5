"""Draw a database: a domain, some of its tables and columns, and plausible rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from random import Random
from typing import Literal

import apsw

from sqlenv.demo.vocabulary import (
    CATEGORIES,
    COUNTRY_OF_CITY,
    DOMAINS,
    LABELS,
    NUMBERS,
    POOLS,
    SPARSE,
    Entity,
    synonyms,
)

Kind = Literal["key", "label", "number", "category", "sparse"]
Cell = int | float | str | None
Record = dict[str, Cell]

TABLES_MIN, TABLES_MAX = 3, 6
ROWS_MIN, ROWS_MAX = 8, 30
_LABELLED_ROWS_MAX = 18
_SYNONYM_RATE = 0.25
_GAP_RATE = 0.3
_PARENTS_USED = 0.8


@dataclass(frozen=True, slots=True)
class DemoColumn:
    """A column of one database; `concept` is its name in the vocabulary.

    `override` is the pool or range that replaces the concept's own, or "".
    """

    name: str
    concept: str
    kind: Kind
    override: str = ""


@dataclass(frozen=True, slots=True)
class Parent:
    """A foreign key: its column, the table it refers to, and the word that leads there."""

    column: str
    table: str
    preposition: str


@dataclass(frozen=True, slots=True)
class DemoTable:
    """A table of one database; `names` starts with the one in SQL, then come its synonyms."""

    names: tuple[str, ...]
    columns: tuple[DemoColumn, ...]
    parents: tuple[Parent, ...]

    @property
    def name(self) -> str:
        """Give the name in SQL."""
        return self.names[0]

    def of_kind(self, *kinds: Kind) -> list[DemoColumn]:
        """List the columns of these kinds."""
        return [column for column in self.columns if column.kind in kinds]


@dataclass(frozen=True, slots=True)
class DemoDatabase:
    """A schema with its rows, parents before children."""

    db_id: str
    domain: str
    tables: tuple[DemoTable, ...]
    rows: Mapping[str, Sequence[Record]]

    def table(self, name: str) -> DemoTable:
        """Find a table by its name in SQL."""
        return next(table for table in self.tables if table.name == name)


def draw_schema(domain: str, rng: Random) -> tuple[DemoTable, ...]:
    """Draw tables that foreign keys connect, and columns and names for each."""
    entities = _connected_entities(DOMAINS[domain], rng)
    names = {entity.names[0]: _own_name_first(entity.names, rng) for entity in entities}
    return tuple(_draw_table(entity, names, rng) for entity in entities)


def fill(db_id: str, domain: str, tables: tuple[DemoTable, ...], rng: Random) -> DemoDatabase:
    """Draw rows for a schema."""
    cities = rng.sample(POOLS["city"], 7)
    rows: dict[str, list[Record]] = {}
    for table in tables:
        labelled = bool(table.of_kind("label"))
        low, high = (ROWS_MIN, _LABELLED_ROWS_MAX) if labelled else (15, ROWS_MAX)
        rows[table.name] = _draw_rows(table, rng.randint(low, high), rows, cities, rng)
    return DemoDatabase(db_id, domain, tables, rows)


def build(database: DemoDatabase) -> apsw.Connection:
    """Make the database in memory; the same database gives the same bytes."""
    connection = apsw.Connection(":memory:")
    connection.execute("PRAGMA page_size = 1024")
    connection.execute("BEGIN")
    for table in database.tables:
        connection.execute(create_statement(table))
        marks = ", ".join("?" * len(table.columns))
        rows = [tuple(row.values()) for row in database.rows[table.name]]
        connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", rows)
    connection.execute("COMMIT")
    return connection


def create_statement(table: DemoTable) -> str:
    """Write the CREATE TABLE statement of a table."""
    lines = [f"{column.name} {sql_type(column)}" for column in table.columns]
    lines[0] += " PRIMARY KEY"
    lines += [
        f"FOREIGN KEY ({parent.column}) REFERENCES {parent.table}(id)" for parent in table.parents
    ]
    return f"CREATE TABLE {table.name} (\n  " + ",\n  ".join(lines) + "\n)"


def sql_type(column: DemoColumn) -> str:
    """Name the SQLite type of a column."""
    if column.kind == "key":
        return "INTEGER"
    if column.kind == "number":
        return "REAL" if NUMBERS[column.concept].step == 0.5 else "INTEGER"
    return "TEXT"


def _connected_entities(entities: Sequence[Entity], rng: Random) -> list[Entity]:
    wanted = rng.randint(TABLES_MIN, min(TABLES_MAX, len(entities)))
    chosen = [rng.choice(entities)]
    while len(chosen) < wanted:
        near = [entity for entity in entities if _touches(entity, chosen)]
        chosen.append(rng.choice(near))
    return [entity for entity in entities if entity in chosen]


def _touches(entity: Entity, chosen: Sequence[Entity]) -> bool:
    if entity in chosen:
        return False
    return any(
        other.names[0] in entity.parents or entity.names[0] in other.parents for other in chosen
    )


def _own_name_first(names: tuple[str, ...], rng: Random) -> tuple[str, ...]:
    if len(names) > 1 and rng.random() < _SYNONYM_RATE:
        return (names[1], names[0], *names[2:])
    return names


def _draw_table(entity: Entity, names: Mapping[str, tuple[str, ...]], rng: Random) -> DemoTable:
    described = [
        _draw_column(concept, override or "", rng) for concept, override in entity.columns.items()
    ]
    label = [column for column in described if column.kind == "label"]
    kept = _keep_columns([column for column in described if column.kind != "label"], rng)
    parents = tuple(
        Parent(f"{names[table][0]}_id", names[table][0], preposition)
        for table, preposition in entity.parents.items()
        if table in names
    )
    keys = [DemoColumn(parent.column, parent.column, "key") for parent in parents]
    own = names[entity.names[0]]
    return DemoTable(own, (DemoColumn("id", "id", "key"), *label, *kept, *keys), parents)


def _keep_columns(columns: list[DemoColumn], rng: Random) -> list[DemoColumn]:
    rng.shuffle(columns)
    first = [
        next((column for column in columns if column.kind == kind), None)
        for kind in ("number", "category")
    ]
    kept = [column for column in first if column]
    rest = [column for column in columns if column not in kept]
    kept += rest[: rng.randint(0, min(3, len(rest)))]
    rng.shuffle(kept)
    return kept


def _draw_column(concept: str, override: str, rng: Random) -> DemoColumn:
    if concept in LABELS:
        return DemoColumn(concept, concept, "label", override)
    if concept in SPARSE:
        return DemoColumn(concept, concept, "sparse")
    kind: Kind = "number" if concept in NUMBERS else "category"
    name = _own_name_first((concept, *synonyms(concept)), rng)[0]
    return DemoColumn(name, concept, kind, override)


def _draw_rows(
    table: DemoTable,
    count: int,
    rows: Mapping[str, Sequence[Record]],
    cities: Sequence[str],
    rng: Random,
) -> list[Record]:
    columns: dict[str, Sequence[Cell]] = {}
    for column in table.columns:
        columns[column.name] = _draw_cells(column, count, cities, rng)
    for parent in table.parents:
        ids = [row["id"] for row in rows[parent.table]]
        used = rng.sample(ids, max(2, round(len(ids) * _PARENTS_USED)))
        columns[parent.column] = [rng.choice(used) for _ in range(count)]
    _agree_on_country(table, columns)
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def _draw_cells(
    column: DemoColumn, count: int, cities: Sequence[str], rng: Random
) -> Sequence[Cell]:
    match column.kind:
        case "key":
            return range(1, count + 1)
        case "label":
            return rng.sample(POOLS[column.override], count)
        case "number":
            return _draw_numbers(column, count, rng)
        case "category":
            pool = _pool(column, cities)
            some = rng.sample(pool, min(len(pool), rng.randint(3, 5)))
            return [rng.choice(some) for _ in range(count)]
        case "sparse":
            return [
                None if rng.random() < _GAP_RATE else _contact(column, rng) for _ in range(count)
            ]


def _pool(column: DemoColumn, cities: Sequence[str]) -> Sequence[str]:
    if column.concept == "city":
        return cities
    if column.concept == "country":
        return tuple(dict.fromkeys(COUNTRY_OF_CITY[city] for city in cities))
    return POOLS[column.override or CATEGORIES[column.concept].pool]


def _draw_numbers(column: DemoColumn, count: int, rng: Random) -> Sequence[Cell]:
    """Draw different values where the range has enough of them, so that few superlatives tie."""
    number = NUMBERS[column.concept]
    low, high = number.low, number.high
    if column.override:
        low, high = map(int, column.override.split("-"))
    steps = int((high - low) / number.step) + 1
    picks = rng.sample(range(steps), count) if steps >= 2 * count else None
    values = picks or [rng.randrange(steps) for _ in range(count)]
    return [low + pick * number.step for pick in values]


def _contact(column: DemoColumn, rng: Random) -> str:
    if SPARSE[column.concept] == "number":
        return str(rng.randint(1000, 9999))
    return rng.choice(POOLS[SPARSE[column.concept]])


def _agree_on_country(table: DemoTable, columns: dict[str, Sequence[Cell]]) -> None:
    names = {column.concept: column.name for column in table.columns}
    if "city" in names and "country" in names:
        cities = columns[names["city"]]
        columns[names["country"]] = [COUNTRY_OF_CITY[str(city)] for city in cities]
