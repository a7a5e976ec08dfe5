"""The demo data: what it promises to those who train and judge on it."""

import json
import sqlite3
import time
from collections import Counter, defaultdict
from itertools import pairwise
from pathlib import Path
from random import Random

import apsw
import pytest
import sqlglot

from sqlenv.config import DemoConfig
from sqlenv.demo import SPLIT_FILES, generate
from sqlenv.demo.databases import draw_schema, fill
from sqlenv.demo.questions import SHARES, tells_apart
from sqlenv.demo.vocabulary import (
    CATEGORIES,
    DOMAINS,
    KINDS,
    LABELS,
    NUMBERS,
    POOLS,
    SPARSE,
    plural,
)
from sqlenv.errors import UserError

CONFIG = DemoConfig(train_databases=48, validation_databases=6, test_databases=12)
TINY = DemoConfig(
    train_databases=2, validation_databases=1, test_databases=3, questions_per_database=10
)


@pytest.fixture(scope="module")
def root(tmp_path_factory):
    folder = tmp_path_factory.mktemp("demo") / "data"
    generate(folder, CONFIG)
    return folder


@pytest.fixture(scope="module")
def records(root):
    return {split: json.loads((root / name).read_text()) for split, name in SPLIT_FILES.items()}


@pytest.fixture(scope="module")
def questions(records):
    return [record for split in records.values() for record in split]


@pytest.fixture(scope="module")
def connections(root, questions):
    opened = {
        db_id: sqlite3.connect(f"file:{_database(root, db_id)}?mode=ro", uri=True)
        for db_id in {record["db_id"] for record in questions}
    }
    yield opened
    for connection in opened.values():
        connection.close()


def _database(root: Path, db_id: str) -> Path:
    return root / "database" / db_id / f"{db_id}.sqlite"


def _files(root: Path) -> dict[str, bytes]:
    return {
        str(path.relative_to(root)): path.read_bytes() for path in root.rglob("*") if path.is_file()
    }


# Files


def test_the_same_seed_gives_the_same_bytes_and_another_seed_others(tmp_path):
    for name in ("first", "second"):
        generate(tmp_path / name, TINY)
    generate(tmp_path / "other", TINY.model_copy(update={"seed": 1}))
    first, second, other = (_files(tmp_path / name) for name in ("first", "second", "other"))
    assert first == second
    assert first.keys() == other.keys()
    assert not [name for name in first if first[name] == other[name]]


def test_the_folder_has_spiders_layout_and_nothing_is_left_beside_it(tmp_path):
    generate(tmp_path / "data", TINY)
    assert [path.name for path in tmp_path.iterdir()] == ["data"]
    files = _files(tmp_path / "data")
    databases = [name for name in files if name.startswith("database/")]
    assert len(databases) == 2 + 1 + 3
    others = {"train_spider.json", "dev.json", "test.json", "tables.json", "demo.json"}
    assert files.keys() - set(databases) == others


def test_data_that_is_there_is_kept_and_other_settings_replace_it(tmp_path):
    folder = tmp_path / "data"
    generate(folder, TINY)
    before = (folder / "dev.json").stat().st_mtime_ns
    generate(folder, TINY)
    assert (folder / "dev.json").stat().st_mtime_ns == before
    generate(folder, TINY.model_copy(update={"questions_per_database": 5}))
    assert len(json.loads((folder / "dev.json").read_text())) == 5


def test_an_empty_folder_is_used(tmp_path):
    (tmp_path / "data").mkdir()
    generate(tmp_path / "data", TINY)
    assert (tmp_path / "data" / "dev.json").exists()


@pytest.mark.parametrize("name", ["thesis.txt", "dev.json"])
def test_a_folder_of_someone_else_is_refused_and_left_alone(tmp_path, name):
    folder = tmp_path / "data"
    folder.mkdir()
    (folder / name).write_text("mine")
    with pytest.raises(UserError, match="name another folder"):
        generate(folder, TINY)
    assert _files(folder) == {name: b"mine"}


def test_generation_is_quick(tmp_path):
    started = time.process_time()
    generate(tmp_path / "data", CONFIG.model_copy(update={"seed": 3}))
    per_database = (time.process_time() - started) / (48 + 6 + 12)
    assert per_database * 150 < 20


# Splits


def test_splits_share_no_database_and_have_the_size_asked_for(records):
    names = {split: {record["db_id"] for record in found} for split, found in records.items()}
    assert {split: len(found) for split, found in names.items()} == {
        "train": 48,
        "validation": 6,
        "test": 12,
    }
    assert len(set().union(*names.values())) == 48 + 6 + 12
    assert all(len(found) == 40 * len(names[split]) for split, found in records.items())


def test_no_two_databases_have_the_same_tables_and_columns(root):
    schemas = [
        tuple(sorted(map(tuple, schema["column_names_original"])))
        + tuple(schema["table_names_original"])
        for schema in json.loads((root / "tables.json").read_text())
    ]
    assert len(set(schemas)) == len(schemas)


def test_domains_take_turns_and_the_test_split_has_none_that_training_lacks(records):
    domains = {
        split: {record["db_id"]: record["domain"] for record in found}
        for split, found in records.items()
    }
    counts = Counter(domain for found in domains.values() for domain in found.values())
    assert max(counts.values()) - min(counts.values()) <= 1
    assert set(domains["train"].values()) == set(DOMAINS)


# Databases


def test_tables_rows_and_keys(connections):
    for connection in connections.values():
        names = [name for (name,) in connection.execute("SELECT name FROM sqlite_schema")]
        assert 3 <= len(names) <= 6
        assert not connection.execute("PRAGMA foreign_key_check").fetchall()
        assert connection.execute("PRAGMA integrity_check").fetchall() == [("ok",)]
        links = [
            key for name in names for key in connection.execute(f"PRAGMA foreign_key_list({name})")
        ]
        assert len(links) >= len(names) - 1
        for name in names:
            (count,) = connection.execute(f"SELECT COUNT(*) FROM {name}").fetchone()
            assert 8 <= count <= 30
            columns = connection.execute(f"PRAGMA table_info({name})").fetchall()
            assert [column[1] for column in columns if column[5]] == ["id"]


def test_countries_fit_their_cities(connections):
    pairs = set()
    for connection in connections.values():
        for (name,) in connection.execute("SELECT name FROM sqlite_schema").fetchall():
            columns = {row[1] for row in connection.execute(f"PRAGMA table_info({name})")}
            if {"city", "country"} <= columns:
                pairs |= set(connection.execute(f"SELECT city, country FROM {name}"))
    assert len(pairs) >= 10
    assert len({city for city, _ in pairs}) == len(pairs)


def test_tables_json_describes_the_databases(root, connections):
    for schema in json.loads((root / "tables.json").read_text()):
        connection = connections[schema["db_id"]]
        described = defaultdict(list)
        for place, (table, column) in enumerate(schema["column_names_original"][1:], start=1):
            described[schema["table_names_original"][table]].append(
                (column, schema["column_types"][place], place in schema["primary_keys"])
            )
        for name, columns in described.items():
            assert columns == [
                (column, "text" if kind == "TEXT" else "number", bool(key))
                for _, column, kind, _, _, key in connection.execute(f"PRAGMA table_info({name})")
            ]
        keys = Counter()
        for place, target in schema["foreign_keys"]:
            table, column = schema["column_names_original"][place]
            parent, _ = schema["column_names_original"][target]
            names = schema["table_names_original"]
            keys[names[table], column, names[parent]] += 1
        assert keys == Counter(
            (name, key[3], key[2])
            for name in described
            for key in connection.execute(f"PRAGMA foreign_key_list({name})")
        )


# Questions


def test_every_gold_runs_and_says_something(connections, questions):
    for record in questions:
        rows = connections[record["db_id"]].execute(record["query"]).fetchall()
        assert rows, record
        assert rows != [(0,)], record
        assert any(cell is not None for row in rows for cell in row), record


def test_every_gold_parses(questions):
    for query in {record["query"] for record in questions}:
        assert isinstance(sqlglot.parse_one(query, dialect="sqlite"), sqlglot.exp.Query), query


def test_all_kinds_are_there_in_the_promised_mix(records, questions):
    assert {record["tags"][0] for record in records["train"]} == {kind.name for kind in KINDS}
    counts = Counter(record["difficulty"] for record in questions)
    for difficulty, share in SHARES.items():
        assert counts[difficulty] / len(questions) == pytest.approx(share, abs=0.01)


def test_no_question_or_query_comes_twice_in_a_database(questions):
    for part in ("question", "query"):
        counts = Counter((record["db_id"], record[part]) for record in questions)
        assert max(counts.values()) == 1


def test_questions_are_short_and_whole(questions):
    lengths = [len(record["question"].split()) for record in questions]
    assert max(lengths) <= 25
    assert 8 <= sum(lengths) / len(lengths) <= 14
    for record in questions:
        assert record["question"][0].isupper()
        assert record["question"][-1] in ".?"
        assert not set(record["question"]) & set("_{}[]")
        assert not set(record["query"]) & set("{}[]")


def test_values_of_a_query_stand_in_its_question(questions):
    with_text = [record for record in questions if "'" in record["query"]]
    assert len(with_text) > len(questions) / 5
    for record in with_text:
        for value in record["query"].split("'")[1::2]:
            assert value.strip("%") in record["question"]


def test_the_vocabulary_is_small(questions):
    text = " ".join(record["question"] + " " + record["query"] for record in questions)
    words = set("".join(c if c.isalpha() else " " for c in text).split())
    assert len(words) < 1300


def test_a_query_without_its_condition_has_another_result(connections, questions):
    """Undo the condition by text, apart from the generator's own brackets."""
    checked = 0
    for record in questions:
        query = record["query"]
        if "(SELECT" in query or "UNION" in query or "INTERSECT" in query or "EXCEPT" in query:
            continue
        weaker = query.replace("DISTINCT ", "").split(" HAVING ")[0].split(" LIMIT ")[0]
        head, condition, rest = weaker.partition(" WHERE ")
        if condition:
            weaker = head
            assert "GROUP BY" not in rest
        if weaker == query:
            continue
        run = connections[record["db_id"]].execute
        assert sorted(run(query), key=repr) != sorted(run(weaker), key=repr), record
        checked += 1
    assert checked > len(questions) / 3


def test_superlatives_have_no_ties(connections, questions):
    checked = 0
    for record in questions:
        head, limit, count = record["query"].partition(" LIMIT ")
        if not limit or "GROUP BY" in head or "JOIN" in head:
            continue
        _, _, order = head.partition(" ORDER BY ")
        column, table = order.split()[0], head.split(" FROM ")[1].split()[0]
        keys = f"SELECT {column} FROM {table} ORDER BY {order} LIMIT {int(count) + 1}"
        found = connections[record["db_id"]].execute(keys).fetchall()
        assert all(a != b for a, b in pairwise(found)), record
        checked += 1
    assert checked > 50


@pytest.mark.parametrize(
    ("gold", "weaker", "keys", "kept"),
    [
        ("SELECT a FROM t WHERE b = 1", "SELECT a FROM t", "", True),
        ("SELECT a FROM t WHERE b >= 1", "SELECT a FROM t", "", False),
        ("SELECT COUNT(*) FROM t WHERE b = 9", "SELECT a FROM t", "", False),
        ("SELECT AVG(b) FROM t WHERE b = 9", "SELECT a FROM t", "", False),
        ("SELECT a FROM t WHERE b = 9", "SELECT a FROM t", "", False),
        ("SELECT a FROM t ORDER BY b DESC", "SELECT a FROM t", "SELECT b FROM t", False),
        ("SELECT a FROM t ORDER BY a DESC", "SELECT a FROM t", "SELECT a FROM t", True),
        ("SELECT a FROM t ORDER BY a ASC", "SELECT a FROM t", "SELECT a FROM t", False),
    ],
)
def test_questions_that_tell_nothing_are_dropped(gold, weaker, keys, kept):
    connection = apsw.Connection(":memory:")
    connection.execute("CREATE TABLE t (a, b); INSERT INTO t VALUES (1, 1), (2, 2), (3, 2)")
    assert tells_apart(connection, gold, weaker=[weaker], keys=[keys] if keys else []) == kept


# Text tables


def test_the_domains_use_only_words_that_the_vocabulary_explains():
    assert len(DOMAINS) >= 14
    known = {*LABELS, *NUMBERS, *CATEGORIES, *SPARSE}
    for domain, entities in DOMAINS.items():
        before = set()
        for entity in entities:
            assert set(entity.parents) <= before, (domain, entity)
            before.add(entity.names[0])
            for name, override in entity.columns.items():
                assert name in known, (domain, name)
                ok = not override or override in POOLS or override.replace("-", "").isdigit()
                assert ok, (domain, name)


def test_no_synonym_means_two_things_in_a_domain():
    for domain, entities in DOMAINS.items():
        tables = [plural(name) for entity in entities for name in entity.names]
        assert len(set(tables)) == len(tables), domain
        for entity in entities:
            columns = []
            for name in entity.columns:
                meaning = NUMBERS.get(name) or CATEGORIES.get(name)
                columns += [name, meaning.synonym] if meaning and meaning.synonym else [name]
            assert len(set(columns)) == len(columns), (domain, entity)


def test_kinds_have_wordings_enough():
    names = [kind.name for kind in KINDS]
    assert len(set(names)) == len(names)
    for kind in KINDS:
        assert 3 <= len(set(kind.wordings)) <= 6


@pytest.mark.parametrize(
    ("noun", "many"),
    [("city", "cities"), ("day", "days"), ("class", "classes"), ("dish", "dishes"), ("goals",) * 2],
)
def test_plural(noun, many):
    assert plural(noun) == many


def test_some_parents_have_no_children():
    """Or questions for what has none could not be asked."""
    rng = Random(5)
    database = fill("school_1", "school", draw_schema("school", rng), rng)
    child = next(table for table in database.tables if table.parents)
    parent = child.parents[0]
    used = {row[parent.column] for row in database.rows[child.name]}
    assert used < {row["id"] for row in database.rows[parent.table]}


def test_every_word_of_the_vocabulary_is_used():
    columns = [
        column
        for tables in DOMAINS.values()
        for table in tables
        for column in table.columns.items()
    ]
    assert {*NUMBERS, *CATEGORIES, *SPARSE, *LABELS} == {name for name, _ in columns}
    usual = {
        CATEGORIES[name].pool for name, override in columns if name in CATEGORIES and not override
    }
    assert set(POOLS) <= usual | {override for _, override in columns} | set(SPARSE.values())
