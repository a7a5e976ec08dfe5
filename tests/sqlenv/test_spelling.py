"""Queries as a schema writes its names: the same results, whatever a data set's own spelling."""

from __future__ import annotations

import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from sqlenv.config import DemoConfig
from sqlenv.demo import generate
from sqlenv.schema.reading import Column, DatabaseSchema, TableSchema, read_schema
from sqlenv.schema.spelling import spelled

SCHEMA = DatabaseSchema((
    TableSchema("singer", (Column("Name"), Column("age"))),
    TableSchema("city", (Column("City"), Column("singer_id"))),
))  # fmt: skip


@pytest.mark.parametrize(
    ("sql", "written"),
    [
        ("select  NAME from SINGER\nwhere Age  >  10 ;", "select Name from singer where age > 10"),
        ('SELECT name FROM singer WHERE name = "Bo\'s"',
         "SELECT Name FROM singer WHERE Name = 'Bo''s'"),
        # In double quotes a column of a table that is mentioned; no other table's.
        ('SELECT "NAME" FROM singer', 'SELECT "Name" FROM singer'),
        ('SELECT Name FROM singer WHERE Name = "Singer_ID"',
         "SELECT Name FROM singer WHERE Name = 'Singer_ID'"),
        # A table and a column of one name; a function of a column's name; an alias.
        ("SELECT T1.city FROM CITY AS T1", "SELECT T1.City FROM city AS T1"),
        ("SELECT AGE(1), CITY.CITY FROM City, singer",
         "SELECT AGE(1), city.City FROM city, singer"),
        ('SELECT age AS "n" FROM singer ORDER BY "n"',
         'SELECT age AS "n" FROM singer ORDER BY "n"'),
        ("SELECT 'x", "SELECT 'x"),
        ("", ""),
    ],
)  # fmt: skip
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
