"""Values that questions name: found with FTS5, shown as OmniSQL shows them."""

from __future__ import annotations

import threading
from concurrent.futures import ThreadPoolExecutor
from contextlib import closing
from pathlib import Path

import apsw
import pytest

from exchange import UserError
from sqlenv.cache import DiskCache
from sqlenv.executor.database import open_new
from sqlenv.schema import values
from sqlenv.schema.reading import read_schema
from sqlenv.schema.rendering import render_schema
from sqlenv.schema.values import SHOWN, ValueIndex, build_index, share, with_matches
from sqlenv.types import Example
from tests.sqlenv.cases import read_cases
from tests.sqlenv.conftest import make_file
from tests.vectors import read

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
def index(towns: Path, tmp_path: Path) -> ValueIndex:
    assert build_index(towns, read_schema(towns), tmp_path / "i.sqlite") == 8
    return ValueIndex(tmp_path / "i.sqlite")


def ask(index: ValueIndex, question: str, evidence: str = "") -> list[tuple[str, str, str]]:
    return list(index.matches(f"{evidence}\n{question}"))


@pytest.mark.parametrize(
    ("question", "evidence", "values"),
    read_cases("values that a question names"),
)
def test_values_that_a_question_names(index: ValueIndex, question, evidence, values):
    assert tuple(value for *_, value in ask(index, question, evidence)) == values


@pytest.mark.parametrize("encoding", ["UTF-8", "UTF-16le", "UTF-16be"])
def test_values_in_any_script_and_encoding(tmp_path: Path, encoding: str):
    """Each question names one value: with other accents, or amid letters without blanks."""
    cases = read("values")
    path = make_file(tmp_path / "names.sqlite", f"PRAGMA encoding = '{encoding}'")
    words = ", ".join(f"('{value}')" for _, value in cases)
    make_file(path, f"CREATE TABLE word (text); INSERT INTO word VALUES {words}")
    build_index(path, read_schema(path), tmp_path / "i.sqlite")
    index = ValueIndex(tmp_path / "i.sqlite")
    for question, value in cases:
        assert [found for *_, found in ask(index, question)] == [value], question


def test_values_of_views_and_virtual_tables(tmp_path: Path):
    path = make_file(
        tmp_path / "views.sqlite",
        """
        CREATE TABLE town (name); INSERT INTO town VALUES ('Oslo');
        CREATE VIEW loud AS SELECT upper(name) || '!' AS cry FROM town;
        CREATE VIEW endless AS
            WITH r(x) AS (SELECT 1 UNION ALL SELECT x + 1 FROM r) SELECT 'Oslo' || x AS x FROM r;
        CREATE VIRTUAL TABLE note USING fts5(body); INSERT INTO note VALUES ('Bergen');
        """,
    )
    build_index(path, read_schema(path), tmp_path / "i.sqlite")
    index = ValueIndex(tmp_path / "i.sqlite")
    assert ask(index, "Oslo! and Bergen") == [
        ("note", "body", "Bergen"), ("loud", "cry", "OSLO!"), ("town", "name", "Oslo"),
    ]  # fmt: skip


def test_a_full_disk_is_no_fault_of_the_database(towns, tmp_path, monkeypatch):
    def open_small(path: Path) -> apsw.Connection:
        connection = open_new(path)
        connection.execute("PRAGMA max_page_count = 3")
        return connection

    monkeypatch.setattr("sqlenv.schema.values.open_new", open_small)
    with pytest.raises(OSError, match=r"No space left on device: '.*i\.sqlite'"):
        build_index(towns, read_schema(towns), tmp_path / "i.sqlite")


@pytest.mark.parametrize(
    "question", ['O\'Fallon "West"?', '"', "'", "AND OR NOT NEAR * ^", "", "\0"]
)
def test_no_question_breaks_the_search(index: ValueIndex, question: str):
    found = [value for *_, value in ask(index, question)]
    assert found == (['O\'Fallon "West"'] if "West" in question else [])


def test_a_damaged_database_is_told(towns: Path, tmp_path: Path):
    schema = read_schema(towns)
    content = bytearray(towns.read_bytes())
    content[4096:8192] = bytes(4096)
    towns.write_bytes(content)
    with pytest.raises(UserError, match=r"the database file is damaged"):
        build_index(towns, schema, tmp_path / "i.sqlite")


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
    build_index(path, read_schema(path), tmp_path / "large.index")
    indexes = []
    for _ in range(4):
        used = apsw.memory_used()
        indexes.append(ValueIndex(tmp_path / "large.index"))
        ask(indexes[-1], " ".join(f"town {number**2}" for number in range(1, 20_000, 97)))
        assert apsw.memory_used() - used < 500_000


def test_a_small_database_waits_for_no_large_one(towns: Path, tmp_path: Path, monkeypatch):
    other = make_file(
        tmp_path / "large.sqlite", "CREATE TABLE t (a); INSERT INTO t VALUES ('Bern')"
    )
    begun, may_end = threading.Event(), threading.Event()

    def build(database: Path, *rest) -> int:
        if database == other:
            begun.set()
            assert may_end.wait(20)
        return build_index(database, *rest)

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
