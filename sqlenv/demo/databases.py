"""Draw a database: a domain, some of its tables and columns, and plausible rows."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from random import Random
from typing import NamedTuple

import apsw

from sqlenv.demo.vocabulary import COUNTRY_OF_CITY, DOMAINS, POOLS, ColumnKind, Concept, Entity

Cell = int | float | str | None
DemoRow = dict[str, Cell]
Pools = Mapping[str, Sequence[str]]

_TABLES = (3, 6)
_ROWS, _LABELLED_ROWS = (15, 30), (8, 18)
_SYNONYM_RATE = 0.25
_GAP_RATE = 0.3
_PARENTS_USED = 0.8


class Parent(NamedTuple):
    """A foreign key: its column, the table it refers to, and the word that leads there."""

    column: str
    table: str
    preposition: str


class DemoTable(NamedTuple):
    """A table of one database and its rows; names start with the one in SQL, then come synonyms."""

    names: tuple[str, ...]
    columns: tuple[Concept, ...]
    parents: tuple[Parent, ...]
    rows: Sequence[DemoRow] = ()

    @property
    def name(self) -> str:
        """Give the name in SQL."""
        return self.names[0]

    def of_kind(self, *kinds: ColumnKind) -> list[Concept]:
        """List the columns of these kinds."""
        return [column for column in self.columns if column.kind in kinds]


Tables = Mapping[str, DemoTable]
"""A database: tables by their names in SQL, parents before children."""


def draw_schema(domain: str, rng: Random) -> tuple[DemoTable, ...]:
    """Draw tables that foreign keys connect, and columns and names for each."""
    entities, chosen = DOMAINS[domain], list[Entity]()
    for _ in range(rng.randint(_TABLES[0], min(_TABLES[1], len(entities)))):
        names, above = {one.names[0] for one in chosen}, {t for one in chosen for t in one.parents}
        near = [
            entity
            for entity in entities
            if entity.names[0] not in names
            and (entity.names[0] in above or not names.isdisjoint(entity.parents))
        ]
        chosen.append(rng.choice(near if chosen else entities))
    drawn = [entity for entity in entities if entity in chosen]
    called = {entity.names[0]: _own_name_first(entity.names, rng) for entity in drawn}
    return tuple(_draw_table(entity, called, rng) for entity in drawn)


def fill(tables: Sequence[DemoTable], rng: Random) -> Tables:
    """Draw rows for a schema."""
    cities = rng.sample(POOLS["city"], 7)
    countries = list(dict.fromkeys(COUNTRY_OF_CITY[city] for city in cities))
    pools = POOLS | {"city": cities, "country": countries}
    filled: dict[str, DemoTable] = {}
    for table in tables:
        rows = _draw_rows(table, filled, pools, rng)
        filled[table.name] = table._replace(rows=rows)
    return filled


def build(tables: Tables) -> apsw.Connection:
    """Make the database in memory; the same database gives the same bytes."""
    connection = apsw.Connection(":memory:")
    connection.execute("PRAGMA page_size = 1024; BEGIN")
    for table in tables.values():
        lines = [f"{column.name} {column.type}" for column in table.columns]
        lines[0] += " PRIMARY KEY"
        lines += [f"FOREIGN KEY ({key.column}) REFERENCES {key.table}(id)" for key in table.parents]
        connection.execute(f"CREATE TABLE {table.name} (\n  " + ",\n  ".join(lines) + "\n)")
        marks = ", ".join("?" * len(table.columns))
        rows = [tuple(row.values()) for row in table.rows]
        connection.executemany(f"INSERT INTO {table.name} VALUES ({marks})", rows)
    connection.execute("COMMIT")
    return connection


def _own_name_first(names: Sequence[str], rng: Random) -> tuple[str, ...]:
    if len(names) > 1 and rng.random() < _SYNONYM_RATE:
        return (names[1], names[0], *names[2:])
    return tuple(names)


def _draw_table(entity: Entity, names: Mapping[str, tuple[str, ...]], rng: Random) -> DemoTable:
    drawn = [one._replace(names=_own_name_first(one.names, rng)) for one in entity.columns]
    label = [column for column in drawn if column.kind == "label"]
    kept = _keep_columns([column for column in drawn if column not in label], rng)
    parents = tuple(
        Parent(f"{names[table][0]}_id", names[table][0], preposition)
        for table, preposition in entity.parents.items()
        if table in names
    )
    names_of_keys = ("id", *(key.column for key in parents))
    keys = [Concept((name,), "key") for name in names_of_keys]
    return DemoTable(names[entity.names[0]], (keys[0], *label, *kept, *keys[1:]), parents)


def _keep_columns(columns: list[Concept], rng: Random) -> list[Concept]:
    """Keep a column of numbers and one of categories, where there are any, and some others."""
    rng.shuffle(columns)
    first = [[c for c in columns if c.kind == kind][:1] for kind in ("number", "category")]
    kept = [*first[0], *first[1]]
    rest = [column for column in columns if column not in kept]
    kept += rest[: rng.randint(0, min(3, len(rest)))]
    rng.shuffle(kept)
    return kept


def _draw_rows(table: DemoTable, above: Tables, pools: Pools, rng: Random) -> list[DemoRow]:
    count = rng.randint(*(_LABELLED_ROWS if table.of_kind("label") else _ROWS))
    columns = {c.name: _draw_cells(c, count, pools, rng) for c in table.columns}
    for parent in table.parents:
        ids = [row["id"] for row in above[parent.table].rows]
        used = rng.sample(ids, max(2, round(len(ids) * _PARENTS_USED)))
        columns[parent.column] = [rng.choice(used) for _ in range(count)]
    named = {column.pool: column.name for column in table.columns}
    if "city" in named and "country" in named:
        of_city = [COUNTRY_OF_CITY[str(city)] for city in columns[named["city"]]]
        columns[named["country"]] = of_city
    return [dict(zip(columns, cells, strict=True)) for cells in zip(*columns.values(), strict=True)]


def _draw_cells(concept: Concept, count: int, pools: Pools, rng: Random) -> Sequence[Cell]:
    match concept.kind:
        case "key":
            return range(1, count + 1)
        case "label":
            return rng.sample(pools[concept.pool], count)
        case "number":
            return _draw_numbers(concept, count, rng)
        case "category":
            pool = pools[concept.pool]
            some = rng.sample(pool, min(len(pool), rng.randint(3, 5)))
            return [rng.choice(some) for _ in range(count)]
        case "sparse":
            gaps = (rng.random() < _GAP_RATE for _ in range(count))
            return [None if is_gap else rng.choice(pools[concept.pool]) for is_gap in gaps]


def _draw_numbers(number: Concept, count: int, rng: Random) -> Sequence[Cell]:
    """Draw different values where the range has enough of them, so that few superlatives tie."""
    steps = int((number.high - number.low) / number.step) + 1
    if steps >= 2 * count:
        picks = rng.sample(range(steps), count)
    else:
        picks = [rng.randrange(steps) for _ in range(count)]
    return [number.low + pick * number.step for pick in picks]
