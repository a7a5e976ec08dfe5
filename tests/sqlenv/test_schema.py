"""A database's schema: read, written for prompts, its spelling, and values that questions name."""

from __future__ import annotations

import json
import sqlite3
import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path
from typing import Any

import apsw
import pytest

from minirl.exchange import UserError
from sqlenv.cache import DiskCache
from sqlenv.config import DemoConfig
from sqlenv.demo import generate
from sqlenv.executor.database import check_contents, connect
from sqlenv.schema import values
from sqlenv.schema.reading import (
    Column,
    DatabaseSchema,
    Described,
    ForeignKey,
    TableSchema,
    read_schema,
)
from sqlenv.schema.rendering import render_schema, sample_columns
from sqlenv.schema.spelling import spelled
from sqlenv.schema.values import SHOWN, build_index, named_values, share, with_matches
from sqlenv.types import Example
from tests.vectors import read, read_cases
from tests.worlds import make_file

CASES = read("schemas")
BAND_DDL = """
    CREATE TABLE band (id INTEGER PRIMARY KEY, name TEXT);
    CREATE TABLE singer (
        id INTEGER PRIMARY KEY, name TEXT, age INTEGER, band_id INTEGER REFERENCES band(id)
    );
    INSERT INTO band VALUES (1, 'Low'), (2, 'Air');
    INSERT INTO singer VALUES (1, 'Ann', 30, 1), (2, '', 20, 1), (3, 'Bo', NULL, 2),
        (4, 'Ann', 30, 2);
"""


@pytest.fixture
def make_database(tmp_path):
    return lambda script, name="db": make_file(tmp_path / f"{name}.sqlite", script)


@pytest.fixture
def bands(make_database):
    return make_database(BAND_DDL)


def test_an_index_does_not_change_what_is_seen(make_database, monkeypatch):
    monkeypatch.setattr("sqlenv.schema.reading.PROFILED_ROWS", 2)
    rows = (
        "CREATE TABLE t (a TEXT, b TEXT); INSERT INTO t VALUES ('z', '-'), ('y', '-'), ('x', '-');"
    )
    plain = make_database(rows, "plain")
    indexed = make_database(rows + "CREATE INDEX i ON t (a);", "indexed")
    assert read_schema(plain).tables[0].columns[0].examples == ("z", "y")
    assert read_schema(indexed) == read_schema(plain)
    # SQLite would count the first two rows of the narrower index.
    assert read_schema(plain, profile=True).tables[0].columns[0].examples == ("y", "z")
    assert read_schema(indexed, profile=True) == read_schema(plain, profile=True)


@pytest.mark.parametrize("case", CASES["databases"], ids=lambda case: case["what"])
def test_schemas_as_databases_have_them(tmp_path, case):
    path = tmp_path / "db.sqlite"
    connection = apsw.Connection(str(path))
    if name := case.get("collation"):
        connection.create_collation(name, lambda one, two: (one > two) - (one < two))
    connection.execute(case["script"])
    connection.close()
    check_contents(path)
    schema = read_schema(path, examples=1)
    assert render_schema(schema) == "\n".join(case["omnisql"])
    tables = [one for one in render_schema(schema).split("\n\n") if one.startswith("CREATE TABLE")]
    apsw.Connection(":memory:").execute("\n".join(tables))  # SQLite itself reads it
    profiled = read_schema(path, profile=True)
    assert profiled.column_names() == schema.column_names()
    build_index(path, tmp_path / "index.sqlite")


def test_a_line_of_a_prompt_is_not_cut_by_a_name(make_database):
    path = make_database("""
        CREATE TABLE "a
b" (id INTEGER PRIMARY KEY); CREATE TABLE u ("x
y" REFERENCES "a
b"(id));
    """)
    schema = read_schema(path)
    assert render_schema(schema, style="profile").startswith("a b\nCREATE TABLE `a\nb` (\n")
    assert "    CONSTRAINT fk_u_x_y FOREIGN KEY" in render_schema(schema, style="omnisql")


def test_bytes_that_are_not_utf8_and_blobs_do_no_harm(make_database):
    path = make_database("""
        CREATE TABLE t (a TEXT, b BLOB, c TEXT);
        INSERT INTO t VALUES (CAST(x'636166e9' AS TEXT), x'00ff', 'two
lines');
    """)
    shown = [("caf\ufffd",), (), ("two\nlines",)]
    assert [c.examples for c in read_schema(path).tables[0].columns] == shown
    profiled = read_schema(path, profile=True)
    assert [c.examples for c in profiled.tables[0].columns] == shown
    for style in ("omnisql", "profile"):
        assert "two\nlines" not in render_schema(profiled, style=style)


def test_omnisql_style(bands):
    descriptions = {
        ("singer", "age"): Described("age in years", "number"),
        ("singer", "band_id"): Described("Band ID"),
    }
    schema = read_schema(bands, descriptions=descriptions)
    assert render_schema(schema).split("\n\n")[1] == (
        "CREATE TABLE singer (\n"
        "    id INTEGER, -- example: [1, 2]\n"
        "    name TEXT, -- example: ['Ann', 'Bo']\n"
        "    age number, -- age in years, example: [30, 20]\n"
        "    band_id INTEGER, -- example: [1, 2]\n"
        "    PRIMARY KEY (id),\n"
        "    CONSTRAINT fk_singer_band_id FOREIGN KEY (band_id) REFERENCES band (id)\n"
        ");"
    )


@pytest.mark.parametrize("case", CASES["styles"], ids=lambda case: case["style"])
def test_styles(bands, case):
    schema = read_schema(bands, **case["read"])
    assert render_schema(schema, style=case["style"]).splitlines() == case["lines"]


def test_keep_drops_columns_tables_and_broken_keys(bands):
    schema = read_schema(bands, examples=0)
    keep = {("singer", "name"), ("singer", "band_id")}
    text = render_schema(schema.only(keep), style="bare")
    assert text == "CREATE TABLE singer (name, band_id);"


def test_a_reference_names_its_column_unless_that_is_the_key(make_database):
    script = [
        "CREATE TABLE country (id INTEGER PRIMARY KEY, code TEXT UNIQUE)",
        "CREATE TABLE city (name, cc REFERENCES country (code), at REFERENCES country)",
    ]
    lines = render_schema(read_schema(make_database("; ".join(script))), style="bare").splitlines()
    assert lines[1] == (
        "CREATE TABLE city (name, cc REFERENCES country (code), at REFERENCES country);"
    )


@pytest.mark.parametrize("profile", [False, True])
@pytest.mark.parametrize("rows", ["('{\"kind\": \"a\"}'), ('none')", "('none'), ('{}')"])
def test_a_table_whose_generated_column_fails_shows_no_values(
    make_database, tmp_path, profile, rows
):
    script = [
        "CREATE TABLE log (data TEXT)",
        f"INSERT INTO log (data) VALUES {rows}",
        "ALTER TABLE log ADD COLUMN kind AS (json_extract(data, '$.kind'))",
        "CREATE TABLE other (name TEXT)",
        "INSERT INTO other VALUES ('x')",
    ]
    database = make_database("; ".join(script))
    log, other = read_schema(database, profile=profile).tables
    assert [column.examples for column in log.columns] == [(), ()]
    assert other.columns[0].examples == ("x",)
    build_index(database, tmp_path / "index")


def wide_schema():
    tables = tuple(
        TableSchema(
            table,
            (Column("id", "INT", primary_key=1), *(Column(f"{table}{i}") for i in range(20))),
        )
        for table in ("t", "u")
    )
    return DatabaseSchema(tables, (ForeignKey("u", ("u0",), "t", ("id",)),))


def test_sampled_columns_are_keys_gold_and_as_many_others_as_fit():
    schema = wide_schema()
    needed = {"t": {"id", "t7"}, "u": {"id", "u0"}}

    def fits(cut):
        return len(render_schema(cut, style="bare")) <= 200

    sampled = sample_columns(schema, 'SELECT "T7" FROM t', seed=3, fits=fits)
    names = {table: set(columns) for table, columns in sampled.column_names().items()}
    assert all(needed[table] <= names[table] for table in needed)
    assert 190 <= len(render_schema(sampled, style="bare")) <= 200
    again = sample_columns(schema, 'SELECT "T7" FROM t', seed=3, fits=fits)
    other = sample_columns(schema, 'SELECT "T7" FROM t', seed=4, fits=fits)
    assert again == sampled != other


@pytest.mark.parametrize("content", [None, b"not a database, but long enough to look at" * 20])
def test_a_file_that_is_no_database_is_the_users_mistake(tmp_path, content):
    path = tmp_path / "x.sqlite"
    if content:
        path.write_bytes(content)
    with pytest.raises(UserError, match=r"x\.sqlite"):
        read_schema(path)


def test_a_changed_file_is_read_again(make_database):
    path = make_database("CREATE TABLE t (a);")
    assert read_schema(path).column_names() == {"t": ("a",)}
    make_database("CREATE TABLE u (b);")
    assert read_schema(path).column_names() == {"t": ("a",), "u": ("b",)}


# Queries as a schema writes its names: the same results, whatever a data set's own spelling.

SCHEMA = DatabaseSchema((
    TableSchema("singer", (Column("Name"), Column("age"))),
    TableSchema("city", (Column("City"), Column("singer_id"))),
))  # fmt: skip


@pytest.mark.parametrize(("sql", "written"), read_cases("spelled as a schema"))
def test_a_query_is_spelled_as_the_schema_writes_names(sql, written):
    assert spelled(sql, SCHEMA) == written


def answers(path: Path, sql: str) -> Any:
    with closing(sqlite3.connect(f"file:{path}?mode=ro", uri=True)) as connection:
        connection.text_factory = bytes
        try:
            return connection.execute(sql).fetchall()
        except sqlite3.OperationalError:
            return "fails"


def same_results(questions: list[dict[str, str]], databases: Path) -> int:
    """Check that no result differs; return how many queries are written anew."""
    schemas, changed = {}, 0
    for one in questions:
        path = databases / one["db_id"] / f"{one['db_id']}.sqlite"
        if not path.exists():
            continue
        schema = schemas.setdefault(path, None) or read_schema(path, examples=0)
        schemas[path] = schema
        new = spelled(one["query"], schema)
        assert answers(path, new) == answers(path, one["query"])
        changed += new != one["query"]
    return changed


def test_the_demos_queries_stay_as_they_are(tmp_path):
    generate(tmp_path, DemoConfig(train_databases=8, validation_databases=1, test_databases=1))
    questions = json.loads((tmp_path / "train_spider.json").read_text())
    assert questions
    assert same_results(questions, tmp_path / "database") == 0


def test_no_result_of_spiders_training_queries_changes(shared):
    root = shared / "data" / "spider_data"
    questions = json.loads((root / "train_spider.json").read_text())
    assert same_results(questions[::10], root / "database") > 400


# Values that questions name: found with FTS5, shown as OmniSQL shows them.

TOWNS = """
CREATE TABLE town (id INTEGER PRIMARY KEY, Name TEXT, note TEXT, code);
INSERT INTO town VALUES
  (1, 'New York', 'the big one', '12'), (2, 'Oslo', 'to be', x'4f736c6f'),
  (3, 'New Delhi', 'x' || printf('%.*c', 60, 'y'), '3.5e2'), (4, 'Bern', '', 7),
  (5, 'O''Fallon "West"', CAST(x'4d616cff6d' AS TEXT), NULL);
"""


@pytest.fixture
def towns(tmp_path: Path) -> Path:
    return make_file(tmp_path / "town ?.sqlite", TOWNS)


@pytest.fixture
def index(towns: Path, tmp_path: Path) -> apsw.Connection:
    build_index(towns, tmp_path / "i.sqlite")
    return connect(tmp_path / "i.sqlite")


def ask(index: apsw.Connection, question: str, evidence: str = "") -> list[tuple[str, str, str]]:
    return list(named_values(index, f"{evidence}\n{question}"))


@pytest.mark.parametrize(
    ("question", "evidence", "values"),
    read_cases("values that a question names"),
)
def test_values_that_a_question_names(index: apsw.Connection, question, evidence, values):
    assert tuple(value for *_, value in ask(index, question, evidence)) == values


@pytest.mark.parametrize("encoding", ["UTF-8", "UTF-16le", "UTF-16be"])
def test_values_in_any_script_and_encoding(tmp_path: Path, encoding: str):
    """Each question names one value: with other accents, or amid letters without blanks."""
    cases = read("values")
    path = make_file(tmp_path / "names.sqlite", f"PRAGMA encoding = '{encoding}'")
    words = ", ".join(f"('{value}')" for _, value in cases)
    make_file(path, f"CREATE TABLE word (text); INSERT INTO word VALUES {words}")
    build_index(path, tmp_path / "i.sqlite")
    index = connect(tmp_path / "i.sqlite")
    for question, value in cases:
        assert [found for *_, found in ask(index, question)] == [value], question


@pytest.mark.parametrize(
    "question", ['O\'Fallon "West"?', '"', "'", "AND OR NOT NEAR * ^", "", "\0"]
)
def test_no_question_breaks_the_search(index: apsw.Connection, question: str):
    found = [value for *_, value in ask(index, question)]
    assert found == (['O\'Fallon "West"'] if "West" in question else [])


def test_a_damaged_database_is_told(towns: Path, tmp_path: Path):
    content = bytearray(towns.read_bytes())
    content[4096:8192] = bytes(4096)
    towns.write_bytes(content)
    with pytest.raises(UserError, match=r"the database file is damaged"):
        build_index(towns, tmp_path / "i.sqlite")


@pytest.mark.parametrize(
    ("value", "asked", "expected"),
    read_cases("the share of a value in a question"),
)
def test_the_share_of_a_value_in_a_question(value: str, asked: str, expected: float):
    assert share(value, asked) == pytest.approx(expected)


def test_hints_stand_before_sampled_values_and_never_push_a_span(towns: Path):
    schema = read_schema(towns)
    hints = [("TOWN", "name", "Bern"), ("town", "Name", "Oslo"), ("gone", "x", "y")]
    text = render_schema(with_matches(schema, hints))
    assert "Name TEXT, -- example: ['Bern', 'Oslo', 'New York']\n" in text
    many = [("town", "name", f"v{number}") for number in range(9)]
    (table,) = with_matches(schema, many).tables
    assert table.columns[1].examples == tuple(f"v{number}" for number in range(SHOWN))
    assert with_matches(schema, ()) == schema


def test_open_indexes_leave_executors_their_memory(tmp_path: Path):
    """SQLite's heap is the process's: pages of an index that has answered are given back."""
    rows = "WITH r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r LIMIT 20000)"
    texts = "'town of ' || (x * x) || ' ' || hex(x * 7919)"
    large = f"CREATE TABLE t (a TEXT); {rows} INSERT INTO t SELECT {texts} FROM r"
    path = make_file(tmp_path / "large.sqlite", large)
    build_index(path, tmp_path / "large.index")
    indexes = []
    for _ in range(4):
        used = apsw.memory_used()
        indexes.append(connect(tmp_path / "large.index"))
        ask(indexes[-1], " ".join(f"town {number**2}" for number in range(1, 20_000, 97)))
        assert apsw.memory_used() - used < 500_000


def test_a_small_database_waits_for_no_large_one(towns: Path, tmp_path: Path, monkeypatch):
    other = make_file(
        tmp_path / "large.sqlite", "CREATE TABLE t (a); INSERT INTO t VALUES ('Bern')"
    )
    begun, may_end = threading.Event(), threading.Event()

    def build(database: Path, index: Path) -> None:
        if database == other:
            begun.set()
            assert may_end.wait(20)
        build_index(database, index)

    monkeypatch.setattr(values, "build_index", build)
    with closing(DiskCache(tmp_path / "cache")) as disk, ThreadPoolExecutor(3) as threads:
        matcher = values.ValueMatcher(disk)
        large, again = (
            threads.submit(matcher.matches, Example(name, "Bern?", "large", other, ""))
            for name in ("one", "two")
        )
        assert begun.wait(20)
        small = threads.submit(matcher.matches, Example("1", "Oslo?", "town", towns, ""))
        assert small.result(timeout=20) == (("town", "Name", "Oslo"),)
        assert not large.done()
        may_end.set()
        assert large.result(20) == again.result(20) == (("t", "a", "Bern"),)
