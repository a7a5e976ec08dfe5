"""Reading data sets in the layouts that people download, and sampling from them."""

import json
import tracemalloc
from collections import Counter
from pathlib import Path

import pytest

from exchange import UserError
from sqlenv.config import DataConfig
from sqlenv.data import index as question_index
from sqlenv.data.layouts import SETS
from sqlenv.data.loading import load, read_all
from sqlenv.data.records import read_records
from sqlenv.schema.reading import Described, read_schema
from sqlenv.schema.rendering import render_schema
from tests.databases import write

from .data_folders import SYNSQL, TABLES, bird, load_one, make_database, make_source, spider

STATUS = Path("/proc/self/status")  # Linux has it


def mapped_bytes():
    """Return how much of files this process has in memory."""
    (line,) = [line for line in STATUS.read_text().splitlines() if line.startswith("RssFile")]
    return int(line.split()[1]) * 1024


def ids(data):
    return [example.id for example in data.examples]


# Layouts.


def test_spider_train_is_both_files_and_keeps_their_order(spider_folder):
    write(spider_folder / "train_spider.json", [spider(), spider("SELECT id FROM band;\n")])
    write(spider_folder / "train_others.json", [spider("SELECT 1 FROM band")], encoding="utf-8-sig")
    data = load_one(spider_folder)
    places = ("train_spider/0", "train_spider/1", "train_others/0")
    assert ids(data) == [f"spider/{place}" for place in places]
    second = data.examples[1]
    assert (second.gold_sql, second.source) == ("SELECT id FROM band;", "spider")
    assert second.database == spider_folder / "database" / "band" / "band.sqlite"


def test_natural_names_become_descriptions_and_omnisql_has_the_types(spider_folder):
    write(spider_folder / "dev.json", [spider()])
    for types, shown in ({}, "TEXT"), ({"column_types": ["text", "number", "text"]}, "text"):
        write(spider_folder / "tables.json", [TABLES | types, {"db_id": "unused"}])
        data = load_one(spider_folder, split="dev")
        database = data.examples[0].database
        schema = read_schema(database, descriptions=data.descriptions[database])
        assert f"    name {shown} -- stage name, example: ['a']\n" in render_schema(schema)
        assert "-- id" not in render_schema(schema)
        assert "name TEXT" in render_schema(schema, style="profile")  # the file's own


def test_bird_takes_the_newest_dev_folder_and_its_descriptions(tmp_path):
    for release, question in (("dev_20240627", "old"), ("dev_20251106", "new")):
        write(tmp_path / release / "dev.json", [bird(question=question)])
        made = make_database(tmp_path / release / "dev_databases")
        folder = made.with_name("database_description")
        folder.mkdir()
        (folder / "Band.csv").write_text(
            "original_column_name,column_name,column_description,data_format,value_description\n"
            f"name,name,{question} name,text,"
        )
    data = load_one(tmp_path, "bird", split="dev", comments="full")
    (example,) = data.examples
    assert (example.question, example.evidence, example.difficulty) == ("new", "E", "simple")
    assert data.descriptions[example.database] == {("band", "name"): Described("new name")}


def test_spider2_keeps_local_questions_and_reads_documents(tmp_path):
    document = tmp_path / "resource" / "documents" / "hint.md"
    document.parent.mkdir(parents=True)
    document.write_text("read me")
    made = make_database(tmp_path / "resource" / "databases")
    made.rename(tmp_path / "resource" / "databases" / "band.sqlite")
    records = [
        {"instance_id": "local1", "db": "band", "question": "Q", "external_knowledge": "hint.md"},
        {"instance_id": "bq1", "db": "cloud", "question": "Q", "external_knowledge": None},
    ]
    (tmp_path / "spider2-lite.jsonl").write_text("\n".join(map(json.dumps, records)))
    data = load_one(tmp_path, "spider2", split="test", data={"exclude": ()})
    (example,) = data.examples
    assert (example.id, example.evidence, example.gold_sql) == ("spider2/local1", "read me", "")
    assert data.pools[0].found == {"not for SQLite": 1, "blank": 1}


# Gold queries.

GOLDS = [
    "SELECT id, name FROM band", "SELECT nme FROM band", "SELECT id FROM band WHERE id = 2", None,
    "SELECT count(*) FROM band",
]  # fmt: skip


@pytest.mark.parametrize(
    ("drops", "kept"),
    [
        ({}, [0, 4]),
        ({"exclude": ["empty"]}, [0, 1, 3, 4]),
        ({"exclude": ["blank", "failing"]}, [0, 2, 4]),
        ({"exclude": []}, [0, 1, 2, 3, 4]),
        ({"exclude": ["scalar"]}, [0, 1, 2, 3]),
    ],
)
def test_bad_golds_are_counted_and_dropped_by_name(spider_folder, runner, drops, kept):
    write(spider_folder / "dev.json", [spider(query) for query in GOLDS])
    data = load_one(spider_folder, split="dev", executor=runner, data=drops)
    assert ids(data) == [f"spider/dev/{index}" for index in kept]
    pool = data.pools[0]
    assert pool.found == {"failing": 1, "empty": 1, "blank": 1, "scalar": 1}
    # The blank one is never executed.
    assert (len(pool.index), pool.checked, pool.kept) == (5, 4, len(kept))
    assert "spider/dev/1: no such column: nme" in data.lines()[0]


def test_a_missing_database_stops_the_run_unless_it_may_be_left_out(spider_folder):
    write(spider_folder / "dev.json", [spider(), spider(db_id="gone"), spider(db_id="gone")])
    with pytest.raises(UserError, match=r"gone\.sqlite is not there.*set drop_missing_database"):
        load_one(spider_folder, split="dev")
    with pytest.raises(UserError, match=r"gone\.sqlite.*unpack it, or take such questions out"):
        read_all(SETS["spider-dev"].at(spider_folder))
    data = load_one(spider_folder, split="dev", data={"drop_missing_database": True})
    assert ids(data) == ["spider/dev/0"]
    assert data.lines() == ["spider/dev: 1 of 3 questions, 2 missing database"]


# Mixtures.


def mixture(folder, *sizes):
    """Ask questions about one database, in files of these sizes."""
    golds = ([f"SELECT {number}" for number in range(size)] for size in sizes)
    return [make_source(folder, f"part{n}", {"band": part}) for n, part in enumerate(golds)]


def counts(data):
    return [pool.kept for pool in data.pools]


def test_a_mixture_follows_the_weights(tmp_path):
    sources = mixture(tmp_path, 100, 100, 100)
    for source, weight in zip(sources, (1, 2, 0.5), strict=True):
        source["weight"] = weight
    assert counts(load(DataConfig(sources=sources, total=70))) == [20, 40, 10]


def test_a_short_source_is_made_up_for(tmp_path):
    sources = mixture(tmp_path, 3, 100, 100)
    assert counts(load(DataConfig(sources=sources, total=30))) == [3, 14, 13]
    sources[1]["limit"] = 5
    assert counts(load(DataConfig(sources=sources, total=30))) == [3, 5, 22]
    assert counts(load(DataConfig(sources=sources))) == [3, 5, 100]
    lines = load(DataConfig(sources=sources, total=200)).lines()
    assert lines[-1].startswith("only 108 of the 200")


def test_the_seed_decides_the_sample_and_a_larger_one_contains_it(tmp_path):
    sources = mixture(tmp_path, 200)

    def positions_of(total, seed):
        data = load(DataConfig(sources=sources, total=total, seed=seed))
        return [int(name.rsplit("/", 1)[1]) for name in ids(data)]

    positions = positions_of(20, 1)
    assert positions_of(20, 1) == positions != positions_of(20, 2)
    assert set(positions) < set(positions_of(40, 1))
    assert positions == sorted(positions)
    assert positions != list(range(20))


def test_a_source_listed_twice_is_refused(tmp_path):
    with pytest.raises(UserError, match=r"come twice.*spider/part0/0"):
        load(DataConfig(sources=mixture(tmp_path, 2) * 2))


def test_a_sample_makes_up_for_failing_golds_and_checks_no_more_than_it_must(spider_folder, runner):
    golds = ["SELECT name FROM band", "SELECT nme FROM band"] * 100
    write(spider_folder / "dev.json", [spider(query) for query in golds])
    data = load_one(spider_folder, split="dev", executor=runner, limit=30)
    assert [e.gold_sql for e in data.examples] == [golds[0]] * 30
    assert 30 < data.pools[0].checked < 94


def test_a_large_file_is_sampled_in_little_memory(tmp_path):
    make_database(tmp_path / "databases")
    records = (SYNSQL | {"cot": "c" * 8_000, "number": number} for number in range(4_000))
    size_bytes = write(tmp_path / "data.json", [*records]).stat().st_size
    tracemalloc.start()
    try:
        data = load_one(tmp_path, "synsql", limit=100)
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert len(data.pools[0].index) == 4_000
    assert peak_bytes < 1_000_000 < size_bytes / 4
    if STATUS.exists():  # tracemalloc does not see the mapped file
        held = [mapped_bytes() for _ in read_records(tmp_path / "data.json")]
        assert max(held) - min(held) < size_bytes / 4
    # An even sample: its mean position is within four standard errors of the middle.
    positions = [int(name.rsplit("/", 1)[1]) for name in ids(data)]
    assert len(set(positions)) == 100
    assert abs(sum(positions) / 100 - 2_000) < 4 * 4_000 / 12**0.5 / 10


def test_the_second_start_reads_only_the_records_that_it_uses(tmp_path, monkeypatch):
    make_database(tmp_path / "databases")
    records = [
        SYNSQL | {"cot": "\u00e9 \u4e2d" * number, "number": number} for number in range(400)
    ]
    path = tmp_path / "data.json"
    path.write_text(json.dumps(records, ensure_ascii=False), encoding="utf-8")
    first = load_one(tmp_path, "synsql", limit=20)
    question_index._index_of.cache_clear()  # as another process
    read, own = [], question_index.read_question

    def counting(layout, file, number, record):
        read.append(record["number"])
        return own(layout, file, number, record)

    with monkeypatch.context() as patch:
        patch.setattr(question_index, "placed_records", None)
        patch.setattr(question_index, "read_question", counting)
        second = load_one(tmp_path, "synsql", limit=20)
    assert second.examples == first.examples
    assert ids(first) == [f"synsql/data/{number}" for number in sorted(read)]
    assert len(read) == 20
    # Another file of the same name is another one.
    path.write_text(json.dumps(records[:30]), encoding="utf-8")
    assert len(load_one(tmp_path, "synsql").pools[0].index) == 30


# The real files.

LEVELS = {
    "dev_visible.json": {"easy": 98, "medium": 154, "hard": 58, "extra": 102},
    "dev.json": {"simple": 55, "moderate": 20, "challenging": 11},
}


def test_real_spider_train_counts(shared):
    data = load_one(shared / "data" / "spider_data", data={"drop_missing_database": True})
    assert data.lines() == ["spider/train: 6,642 of 7,000 questions, 358 missing database"]
    assert len(data.descriptions) == 135


@pytest.mark.parametrize(
    ("layout", "file", "empty"), [("spider", "dev_visible.json", 37), ("bird", "dev.json", 0)]
)
def test_real_dev_counts(shared, runner, layout, file, empty):
    folder = shared / "data" / {"spider": "spider_data", "bird": "bird_dev"}[layout]
    data = load_one(folder, layout, runner, {"exclude": ["failing"]}, file=file)
    assert data.pools[0].found["empty"] == empty
    assert not data.pools[0].found["failing"]
    assert Counter(example.difficulty for example in data.examples) == LEVELS[file]
