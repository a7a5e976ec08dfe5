"""Reading data sets in the layouts that people download, and sampling from them."""

import json
import tracemalloc
from collections import Counter
from functools import cache

import apsw
import pytest

from sqlenv.config import DataConfig, SourceConfig
from sqlenv.data.loading import load, read_all
from sqlenv.errors import UserError
from sqlenv.schema.reading import read_schema
from sqlenv.schema.rendering import render_schema
from sqlenv.types import SqlError, Table

from .data_folders import bird, load_one, make_database, spider, write


class Runner:
    """Stands in for the executor."""

    def __init__(self):
        self.queries = []

    def gold_many(self, queries):
        self.queries += queries
        return [run(database, sql) for database, sql in queries]


def run(database, sql):
    try:
        return Table((), tuple(connect(database).execute(sql)))
    except apsw.Error as error:
        return SqlError(str(error))


@cache
def connect(database):
    return apsw.Connection(str(database), flags=apsw.SQLITE_OPEN_READONLY)


# Layouts.


def test_spider_train_is_both_files_and_keeps_their_order(spider_folder):
    write(spider_folder / "train_spider.json", [spider(), spider("SELECT id FROM band;\n")])
    write(spider_folder / "train_others.json", [spider("SELECT 1 FROM band")], encoding="utf-8-sig")
    examples = load_one(spider_folder).examples
    assert [e.id for e in examples] == [
        "spider/train_spider/0",
        "spider/train_spider/1",
        "spider/train_others/0",
    ]
    assert examples[1].gold_sql == "SELECT id FROM band;"
    assert examples[0].database == spider_folder / "database" / "band" / "band.sqlite"
    assert examples[0].source == "spider"


def test_natural_names_become_descriptions(spider_folder):
    write(spider_folder / "dev.json", [spider()])
    tables = {
        "db_id": "band",
        "table_names_original": ["band"],
        "column_names_original": [[-1, "*"], [0, "id"], [0, "name"]],
        "column_names": [[-1, "*"], [0, "id"], [0, "stage name"]],
        "primary_keys": [[1, 2]],
    }
    write(spider_folder / "tables.json", [tables, {"db_id": "unused"}])
    data = load_one(spider_folder, split="dev")
    database = data.examples[0].database
    schema = read_schema(database, descriptions=data.descriptions[database])
    assert "    name TEXT -- stage name, example: ['a']\n" in render_schema(schema)
    assert "-- id" not in render_schema(schema)


def test_bird_takes_the_newest_dev_folder_and_its_descriptions(tmp_path):
    for release, question in (("dev_20240627", "old"), ("dev_20251106", "new")):
        write(tmp_path / release / "dev.json", [bird(question=question)])
        database = make_database(tmp_path / release / "dev_databases")
        folder = database.parent / "database_description"
        folder.mkdir()
        (folder / "Band.csv").write_bytes(
            b"original_column_name,column_name,column_description,data_format,value_description\r\n"
            b' id ,identity,,integer,\r\nname,name,"caf\xe9\r\nname",text,"a: \x93b\x94"\r\n'
        )
    data = load_one(tmp_path, "bird", split="dev", comments="full")
    (example,) = data.examples
    assert (example.question, example.evidence, example.difficulty) == ("new", "E", "simple")
    assert data.descriptions[example.database] == {
        ("band", "id"): "identity",
        ("band", "name"): "café name; a: \u201cb\u201d",
    }
    schema = read_schema(example.database, descriptions=data.descriptions[example.database])
    assert "-- café name; a: \u201cb\u201d, example" in render_schema(schema)


def test_omnisql_root_holds_every_layout(tmp_path):
    make_database(tmp_path / "spider" / "database")
    make_database(tmp_path / "SynSQL-2.5M" / "databases")
    write(tmp_path / "spider" / "dev.json", [spider()])
    syn = {"db_id": "band", "SpiderSynQuestion": "synonym?", "SpiderQuestion": "?", "query": "Q"}
    write(tmp_path / "Spider-Syn" / "dev.json", [syn])
    synsql = {
        "db_id": "band", "question": "Q", "sql": "SELECT 1", "external_knowledge": "k",
        "sql_complexity": "Complex", "cot": "long",
    }  # fmt: skip
    write(tmp_path / "SynSQL-2.5M" / "data.json", [synsql])
    assert load_one(tmp_path, "spider", split="dev").examples[0].question == "Which names?"
    (example,) = load_one(tmp_path, "spider_syn", split="dev").examples
    assert (example.question, example.database.is_file()) == ("synonym?", True)
    (example,) = load_one(tmp_path, "synsql").examples
    assert (example.difficulty, example.evidence) == ("Complex", "k")


def test_spider2_keeps_local_questions_and_reads_documents(tmp_path):
    write(tmp_path / "resource" / "documents" / "hint.md", "x")
    (tmp_path / "resource" / "documents" / "hint.md").write_text("read me")
    make_database(tmp_path / "resource" / "databases").rename(
        tmp_path / "resource" / "databases" / "band.sqlite"
    )
    records = [
        {"instance_id": "local1", "db": "band", "question": "Q", "external_knowledge": "hint.md"},
        {"instance_id": "bq1", "db": "cloud", "question": "Q", "external_knowledge": None},
    ]
    (tmp_path / "spider2-lite.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = load_one(tmp_path, "spider2", split="test", data={"drop_failing_gold": False})
    (example,) = data.examples
    assert (example.id, example.evidence, example.gold_sql) == ("spider2/local1", "read me", "")
    assert data.reports[0].found == {"not for SQLite": 1, "blank gold": 1}


# Gold queries.

GOLDS = ["SELECT name FROM band", "SELECT nme FROM band", "SELECT id FROM band WHERE id = 2", None]


@pytest.mark.parametrize(
    ("drops", "kept"),
    [
        ({}, [0]),
        ({"drop_failing_gold": False}, [0, 1, 3]),
        ({"drop_empty_gold": False}, [0, 2]),
        ({"drop_failing_gold": False, "drop_empty_gold": False}, [0, 1, 2, 3]),
    ],
)
def test_bad_golds_are_counted_and_dropped_by_name(spider_folder, drops, kept):
    write(spider_folder / "dev.json", [spider(query) for query in GOLDS])
    runner = Runner()
    data = load_one(spider_folder, split="dev", executor=runner, data=drops)
    assert [e.id for e in data.examples] == [f"spider/dev/{index}" for index in kept]
    report = data.reports[0]
    assert report.found == {"failing gold": 1, "empty gold": 1, "blank gold": 1}
    assert (report.read, report.checked, report.kept) == (4, 3, len(kept))
    assert len(runner.queries) == 3  # The blank one is never executed.
    assert "spider/dev/1: no such column: nme" in data.lines()[0]


def test_a_missing_database_stops_the_run_unless_it_may_be_left_out(spider_folder):
    write(spider_folder / "dev.json", [spider(), spider(db_id="gone"), spider(db_id="gone")])
    with pytest.raises(UserError, match=r"gone\.sqlite is not there.*set drop_missing_database"):
        load_one(spider_folder, split="dev")
    source = SourceConfig(layout="spider", path=spider_folder, split="dev")
    with pytest.raises(UserError, match=r"gone\.sqlite.*unpack it, or take such questions out"):
        read_all(source)
    data = load_one(spider_folder, split="dev", data={"drop_missing_database": True})
    assert [e.id for e in data.examples] == ["spider/dev/0"]
    assert data.lines() == ["spider/dev: 1 of 3 questions, 2 missing database"]
    # Nor has any folder such a name.
    write(spider_folder / "dev.json", [spider(db_id="gone" * 100)])
    with pytest.raises(UserError, match=r"gone\.sqlite is not there"):
        load_one(spider_folder, split="dev")


# Mixtures.


@pytest.fixture
def mixture(tmp_path):
    def make(*sizes):
        sources = []
        for index, size in enumerate(sizes):
            make_database(tmp_path / str(index) / "database")
            name = f"part{index}.json"
            write(tmp_path / str(index) / name, [spider(f"SELECT {i}") for i in range(size)])
            sources.append({"layout": "spider", "path": tmp_path / str(index), "file": name})
        return sources

    return make


def counts(data):
    return [source.kept for source in data.reports]


def test_a_mixture_follows_the_weights(mixture):
    sources = mixture(100, 100, 100)
    for source, weight in zip(sources, (1, 2, 0.5), strict=True):
        source["weight"] = weight
    assert counts(load(DataConfig(sources=sources, total=70))) == [20, 40, 10]


def test_a_short_source_is_made_up_for(mixture):
    sources = mixture(3, 100, 100)
    assert counts(load(DataConfig(sources=sources, total=30))) == [3, 14, 13]
    sources[1]["limit"] = 5
    assert counts(load(DataConfig(sources=sources, total=30))) == [3, 5, 22]


def test_the_seed_decides_the_sample_and_a_larger_one_contains_it(mixture):
    sources = mixture(200)

    def positions_of(total, seed):
        data = load(DataConfig(sources=sources, total=total, seed=seed))
        return [int(e.id.rsplit("/", 1)[1]) for e in data.examples]

    positions = positions_of(20, 1)
    assert positions_of(20, 1) == positions != positions_of(20, 2)
    assert set(positions) < set(positions_of(40, 1))
    assert positions == sorted(positions)
    assert positions != list(range(20))


def test_a_sample_makes_up_for_failing_golds_and_checks_no_more_than_it_must(spider_folder):
    golds = ["SELECT name FROM band", "SELECT nme FROM band"] * 100
    write(spider_folder / "dev.json", [spider(query) for query in golds])
    runner = Runner()
    data = load_one(spider_folder, split="dev", executor=runner, limit=30)
    assert {e.gold_sql for e in data.examples} == {golds[0]}
    assert len(data.examples) == 30
    assert 30 < len(runner.queries) < 94


def test_a_large_file_is_sampled_in_little_memory(tmp_path):
    make_database(tmp_path / "databases")
    record = {
        "db_id": "band", "sql_complexity": "Simple", "question_style": "Formal",
        "external_knowledge": "", "cot": "c" * 500, "sql": "SELECT 1",
    }  # fmt: skip
    with (tmp_path / "data.json").open("w") as file:
        lines = (json.dumps({**record, "question": f"Question {i}"}) for i in range(20_000))
        file.write("[" + next(lines))
        file.writelines(",\n" + line for line in lines)
        file.write("]")
    assert (tmp_path / "data.json").stat().st_size > 12_000_000
    tracemalloc.start()
    try:
        data = load_one(tmp_path, "synsql", limit=100)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert data.reports[0].read == 20_000
    assert len({e.question for e in data.examples}) == 100
    assert peak_bytes < 1_000_000
    # An even sample: its mean position is within four standard errors of the middle.
    positions = [int(e.id.rsplit("/", 1)[1]) for e in data.examples]
    assert abs(sum(positions) / 100 - 10_000) < 4 * 20_000 / 12**0.5 / 10


# The real files.


def test_real_spider_train_counts(shared):
    options = {"drop_missing_database": True, "drop_empty_gold": False, "drop_failing_gold": False}
    data = load_one(shared / "data" / "spider_data", executor=Runner(), data=options)
    report = data.reports[0]
    assert (report.read, report.kept) == (7_000, 4_632)
    assert report.found == {"missing database": 2_368, "failing gold": 2, "empty gold": 118}
    assert len(data.descriptions) == 60


def test_real_dev_counts(shared):
    options = {"drop_empty_gold": False}
    spider_dev = load_one(
        shared / "data" / "spider_data", file="dev_visible.json", executor=Runner(), data=options
    )
    assert spider_dev.reports[0].found == {"empty gold": 37}
    assert Counter(e.difficulty for e in spider_dev.examples) == {
        "easy": 98, "medium": 154, "hard": 58, "extra": 102,
    }  # fmt: skip
    bird_dev = load_one(shared / "data" / "bird_dev", "bird", split="dev", executor=Runner())
    assert Counter(e.difficulty for e in bird_dev.examples) == {
        "simple": 55, "moderate": 20, "challenging": 11,
    }  # fmt: skip


def test_a_source_listed_twice_is_refused(mixture):
    with pytest.raises(UserError, match=r"come twice.*spider/part0/0"):
        load(DataConfig(sources=mixture(2) * 2))
