"""Reading a database's schema and writing it for prompts."""

import apsw
import pytest

from exchange import UserError
from sqlenv.executor.database import check_contents
from sqlenv.schema.reading import (
    Column,
    DatabaseSchema,
    Described,
    ForeignKey,
    TableSchema,
    read_schema,
)
from sqlenv.schema.rendering import render_schema, sample_columns
from sqlenv.schema.values import build_index
from tests.sqlenv.conftest import make_file
from tests.vectors import read

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
    build_index(path, schema, tmp_path / "index.sqlite")


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


def test_names_that_are_not_utf8_are_read_and_what_no_query_can_name_is_left_alone(
    make_database, tmp_path
):
    path = make_database("""
        CREATE TABLE t (id INTEGER PRIMARY KEY, nQQme TEXT, up INT REFERENCES t(nQQme));
        INSERT INTO t VALUES (1, 'x', NULL);
        CREATE TABLE tQQble (a INT);
        CREATE TABLE u (b TEXT, t INT REFERENCES t(id));
        INSERT INTO u VALUES ('y', 1);
    """)
    path.write_bytes(path.read_bytes().replace(b"QQ", b"\xe4\xff"))
    for profile in (False, True):
        schema = read_schema(path, profile=profile)
        assert schema.column_names() == {"t": ("id", "n\ufffd\ufffdme", "up"), "u": ("b", "t")}
        assert schema.tables[0].columns[1].examples == ()
        assert schema.tables[1].columns[0].examples == ("y",)
        assert ForeignKey("u", ("t",), "t", ("id",)) in schema.foreign_keys
    index = tmp_path / "index.sqlite"
    assert build_index(path, schema, index) == 1  # y alone


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
    text = render_schema(schema, style="bare", keep=keep)
    assert text == "CREATE TABLE singer (name, band_id);"


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

    def fits(text):
        return len(text) <= 200

    sampled = sample_columns(schema, 'SELECT "T7" FROM t', seed=3, fits=fits, style="bare")
    names = {table: set(columns) for table, columns in sampled.column_names().items()}
    assert all(needed[table] <= names[table] for table in needed)
    assert 190 <= len(render_schema(sampled, style="bare")) <= 200
    again = sample_columns(schema, 'SELECT "T7" FROM t', seed=3, fits=fits, style="bare")
    other = sample_columns(schema, 'SELECT "T7" FROM t', seed=4, fits=fits, style="bare")
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
