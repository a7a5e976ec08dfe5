"""Data sets in the layouts that people download: found, read, sampled, split."""

from __future__ import annotations

import contextlib
import json
import re
import shutil
import tracemalloc
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from minirl.exchange import UserError
from sqlenv.config import DataConfig
from sqlenv.data import questions
from sqlenv.data.descriptions import full_descriptions
from sqlenv.data.layouts import SETS, AbsentError, locate
from sqlenv.data.loading import LoadedData, hold_out, load
from sqlenv.data.sources import by_running
from sqlenv.executor import Executor
from sqlenv.schema.reading import Described, described_key, read_schema
from sqlenv.schema.rendering import render_schema
from tests.worlds import (
    SYNSQL,
    TABLES,
    bird,
    load_one,
    make_database,
    make_set,
    make_source,
    read_all,
    spider,
    write,
)


def ids(data):
    return [example.id for example in data.examples]


# Layouts.


def test_spider_train_is_both_files_and_keeps_their_order(spider_folder):
    write(spider_folder / "train_spider.json", [spider(), spider("SELECT id FROM band;\n")])
    line = json.dumps(spider("SELECT 1 FROM band")) + "\r\n"  # JSON lines have that name too
    (spider_folder / "train_others.json").write_text(line, encoding="utf-8-sig")
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
        databases = tmp_path / release / "dev_databases"
        make_set(tmp_path / release / "dev.json", databases, [bird(question=question)])
        write(
            databases / "band" / "database_description" / "Band.csv",
            "original_column_name,column_name,column_description,data_format,value_description\n"
            f"name,name,{question} name,text,",
        )
    data = load_one(tmp_path, "bird", split="dev", comments="full")
    (example,) = data.examples
    assert (example.question, example.evidence, example.difficulty) == ("new", "E", "simple")
    assert data.descriptions[example.database] == {("band", "name"): Described("new name")}


def test_spider2_keeps_local_questions_and_reads_documents(tmp_path):
    write(tmp_path / "resource" / "documents" / "hint.md", "read me")
    made = make_database(tmp_path / "resource" / "databases", "band")
    made.rename(tmp_path / "resource" / "databases" / "band.sqlite")
    records = [
        {"instance_id": "local1", "db": "band", "question": "Q", "external_knowledge": "hint.md"},
        {"instance_id": "bq1", "db": "cloud", "question": "Q", "external_knowledge": None},
    ]
    write(tmp_path / "spider2-lite.jsonl", records)
    data = load_one(tmp_path, "spider2", split="test", data={"exclude": ()})
    (example,) = data.examples
    assert (example.id, example.evidence, example.gold_sql) == ("spider2/local1", "read me", "")
    assert data.pools[0].found == {"not for SQLite": 1, "blank": 1}


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_names_that_no_file_can_have_are_names_of_no_file(tmp_path, name):
    make_database(tmp_path / "databases", "band")
    record = spider(instance_id="local1", external_knowledge=name)
    gone = spider(db_id=name, external_knowledge=None, instance_id="local2")
    write(tmp_path / "test.json", [record, gone])
    data = load_one(tmp_path, "spider2", split="test", data={"drop_missing_database": True})
    assert [example.evidence for example in data.examples] == [name]


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
    assert (pool.total, pool.checked, pool.kept) == (5, 4, len(kept))
    assert "spider/dev/1: no such column: nme" in data.lines()[0]


def test_a_missing_database_stops_the_run_unless_it_may_be_left_out(spider_folder):
    write(spider_folder / "dev.json", [spider(), spider(db_id="gone"), spider(db_id="gone")])
    needed = rf"{re.escape(str(spider_folder))}/database/gone/gone\.sqlite is not there, but .*"
    needed += r"dev\.json: record 1 needs it; unpack it, or leave such questions out "
    needed += r"\(drop_missing_database=true beside the source, or another question file\)$"
    with pytest.raises(UserError, match=rf"^{needed}"):
        load_one(spider_folder, split="dev")
    with pytest.raises(UserError, match=rf"^{needed}"):
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
    assert counts(load(DataConfig(sources=sources))) == [3, 100, 100]
    lines = load(DataConfig(sources=sources, total=300)).lines()
    assert lines[-1].startswith("only 203 of the 300")


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
    with pytest.raises(UserError, match=r"spider/part0/0 comes twice"):
        load(DataConfig(sources=mixture(tmp_path, 2) * 2))


def test_a_sample_makes_up_for_failing_golds_and_checks_no_more_than_it_must(spider_folder, runner):
    golds = ["SELECT name FROM band", "SELECT nme FROM band"] * 100
    write(spider_folder / "dev.json", [spider(query) for query in golds])
    data = load_one(spider_folder, split="dev", executor=runner, data={"total": 30})
    assert [e.gold_sql for e in data.examples] == [golds[0]] * 30
    assert 30 < data.pools[0].checked < 94


def test_a_large_file_is_sampled_in_little_memory(tmp_path):
    records = [SYNSQL | {"cot": "c" * 8_000, "number": number} for number in range(4_000)]
    file = make_set(tmp_path / "data.json", tmp_path / "databases", records)
    size_bytes = file.stat().st_size
    tracemalloc.start()
    try:
        data = load_one(tmp_path, "synsql", data={"total": 100})
        peak_bytes = tracemalloc.get_traced_memory()[1]
    finally:
        tracemalloc.stop()
    assert data.pools[0].total == 4_000
    assert peak_bytes < 6_000_000 < size_bytes / 4  # 4 MB to copy the table into the cache
    # An even sample: its mean position is within four standard errors of the middle.
    positions = [int(name.rsplit("/", 1)[1]) for name in ids(data)]
    assert len(set(positions)) == 100
    assert abs(sum(positions) / 100 - 2_000) < 4 * 4_000 / 12**0.5 / 10


def test_the_second_start_reads_only_the_records_that_it_uses(tmp_path, monkeypatch):
    make_database(tmp_path / "databases", "band")
    records = [
        SYNSQL | {"cot": "\u00e9 \u4e2d" * number, "number": number} for number in range(400)
    ]
    path = tmp_path / "data.json"
    path.write_text(json.dumps(records, ensure_ascii=False), encoding="utf-8")
    first = load_one(tmp_path, "synsql", data={"total": 20})
    read, own = [], questions.read_question

    def counting(layout, file, number, record):
        read.append(record["number"])
        return own(layout, file, number, record)

    with monkeypatch.context() as patch:
        patch.setattr(questions, "placed_records", None)
        patch.setattr(questions, "read_question", counting)
        second = load_one(tmp_path, "synsql", data={"total": 20})
    assert second.examples == first.examples
    assert ids(first) == [f"synsql/data/{number}" for number in sorted(read)]
    assert len(read) == 20
    # Another file of the same name is another one.
    path.write_text(json.dumps(records[:30]), encoding="utf-8")
    assert load_one(tmp_path, "synsql").pools[0].total == 30


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


# BIRD's description files, as they come.

HEAD = "original_column_name,column_name,column_description,data_format,value_description\r\n"
FOLDER = "database_description"
CAFE = HEAD + "Name,full name,the café,text,\r\n"
LINES = HEAD.replace("\r\n", ",,\r\n") + 'Name,,"one\r\ntwo\0",text,"x: ""y""",,\r\nb,bee\r\n'


@pytest.mark.parametrize(
    ("content", "file", "expected"),
    [
        *((CAFE.encode(name), "town.csv", ["the café"]) for name in ("utf-8", "cp1252", "utf-16")),
        (CAFE.encode("utf-8-sig"), "town.csv", ["the café"]),
        # A mark before bytes that are not UTF-8.
        (b"\xef\xbb\xbf" + CAFE.encode("cp1252"), "town.csv", ["the café"]),
        ((HEAD.upper() + " NAME ,,the name,text,\r\n").encode(), "TOWN.CSV", ["the name"]),
        # Cells of several lines, spare cells and zero bytes.
        (LINES.encode(), " Town .csv", ['one two; x: "y"', "bee"]),
    ],
)
def test_files_as_they_come(tmp_path: Path, content: bytes, file: str, expected: list[str]):
    place = tmp_path / (FOLDER if file.islower() else FOLDER.title())
    place.mkdir()
    (place / file).write_bytes(content)
    (place / "._town.csv").write_text(CAFE)  # macOS leaves such
    columns = (("town", "name"), ("town", "b"))
    assert full_descriptions(tmp_path) == dict(zip(columns, expected, strict=False))
    assert described_key("Town", " NAME\n") == columns[0]


def test_a_file_without_the_columns_is_named_and_passed_over(tmp_path: Path, caplog):
    (tmp_path / FOLDER).mkdir()
    (tmp_path / FOLDER / "town.csv").write_bytes(b"a;b;c\r\n1;2;3\r\n")
    assert full_descriptions(tmp_path) == {}
    assert "town.csv: line 1 has no column original_column_name, but a;b;c" in caplog.text


# Data sets are found by where their files are and what these hold, wherever a folder is given.

SYN = {"db_id": "band", "SpiderSynQuestion": "synonym?", "SpiderQuestion": "?", "query": "SELECT 1"}
SPIDER2 = {"instance_id": "local1", "db": "band", "question": "Q", "external_knowledge": None}

# Each download as it is unpacked: its question files by set, a record, its folders of databases.
SPIDER = {"spider-train": "train_spider.json", "spider-dev": "dev.json", "spider-test": "test.json"}
SYNS = {"spider-syn-train": "train_spider.json", "spider-syn": "dev.json"}
BIRD = {"bird-train": "train/train.json", "bird-dev": "dev_20240627/dev.json"}
BIRDS = ["train/train_databases", "dev_20240627/dev_databases"]
SINGLE: dict[str, tuple[dict[str, str], Any, list[str]]] = {
    "spider_data": (SPIDER, spider(), ["database"]),
    "Spider-Syn": (SYNS, SYN, ["database"]),
    "Spider-DK": ({"spider-dk": "Spider-DK.json"}, spider(type="x"), ["database"]),
    "realistic": ({"spider-realistic": "spider-realistic.json"}, spider(), ["database"]),
    "bird": (BIRD, bird(), BIRDS),
    "minidev": ({"bird-minidev": "mini_dev_sqlite.json"}, bird(), ["dev_databases"]),
    "SynSQL-2.5M": ({"synsql": "data.json"}, SYNSQL, ["databases"]),
    "spider2-lite": ({"spider2-local": "spider2-lite.jsonl"}, SPIDER2, ["spider2-localdb"]),
}
# What questions say in other layouts than Spider's: the text, the evidence, the difficulty.
TOLD = {
    "spider-syn": ("synonym?", "", "easy"),
    "bird": ("Q", "E", "simple"),
    "synsql": ("Which names?", "k", "Simple"),
    "spider2": ("Q", "", ""),
}


def make_single(root: Path, name: str) -> Path:
    files, record, databases = SINGLE[name]
    for file in files.values():
        write(root / name / file, [record])
    for place in databases:
        make_database(root / name / place, "band")
    return root / name


def found(root: Path) -> dict[str, str]:
    """Find every set in a folder, by the folder that it lies in."""
    places = {}
    for name, one in SETS.items():
        with contextlib.suppress(AbsentError):
            places[name] = locate(one.at(root)).root.name
    return places


@pytest.mark.parametrize("name", SINGLE)
def test_a_single_download_is_found_as_it_is(tmp_path: Path, name: str):
    folder = make_single(tmp_path, name)
    for root in (folder, tmp_path):
        assert set(found(root)) == set(SINGLE[name][0])
        for one in SINGLE[name][0]:
            (example,) = read_all(SETS[one].at(root))
            told = (example.question, example.evidence, example.difficulty)
            assert told == TOLD.get(SETS[one].layout, ("Which names?", "", "easy"))


def test_downloads_side_by_side_do_not_take_each_others_files(tmp_path: Path):
    for name in SINGLE:
        make_single(tmp_path, name)
    assert found(tmp_path) == {
        name: folder for folder, (files, *_) in SINGLE.items() for name in files
    }


def test_what_is_there_twice_or_packed_is_told(tmp_path: Path):
    shutil.copytree(make_single(tmp_path / "two", "spider_data"), tmp_path / "two" / "copy")
    with pytest.raises(UserError, match=r"^is in .*copy and in .*spider_data; give"):
        locate(SETS["spider-dev"].at(tmp_path / "two"))
    folder = make_single(tmp_path, "bird") / "train"
    shutil.rmtree(folder / "train_databases")
    (folder / "train_databases.zip").touch()
    with pytest.raises(UserError, match=r"unpack .*train_databases\.zip$"):
        locate(SETS["bird-train"].at(tmp_path))


# Databases that are held out of training, to choose checkpoints by.

RIGHT, WRONG = "SELECT name FROM person", "SELECT nme FROM person"


def split(
    config: DataConfig, count: int, runner: Executor
) -> tuple[frozenset[str], LoadedData, LoadedData]:
    """Hold out, and load what is left and what is held out."""
    held = hold_out(config, count, by_running(runner))
    rest = load(config, check=by_running(runner), accept=lambda db_id: db_id not in held)
    validation = config.model_copy(update={"total": count})
    own = load(validation, check=by_running(runner), accept=lambda db_id: db_id in held)
    assert databases(own) <= held
    assert not databases(rest) & held
    return held, rest, own


def databases(data: LoadedData) -> set[str]:
    return {example.db_id for example in data.examples}


def test_counts_are_met_exactly_and_no_database_is_on_both_sides(tmp_path, runner):
    """30 databases of 10 questions, of which one fails: 270 may stay, 200 and 23 are asked for."""
    golds = {f"d{number}": [RIGHT] * 9 + [WRONG] for number in range(30)}
    source = make_source(tmp_path, "own", golds)
    for seed in range(3):
        config = DataConfig(sources=(source,), total=200, seed=seed)
        held, rest, own = split(config, 23, runner)
        assert (len(rest.examples), len(own.examples)) == (200, 23)
        # 300 * 23 / 223 = 30.9 questions: the fourth database is the one that exceeds it least.
        assert len(held) == 4


def test_a_database_without_a_sound_gold_validates_nothing_alone(tmp_path, runner):
    """Three databases of four cannot be judged by: enough are held out until one is that can."""
    golds = {f"d{number}": [RIGHT if number % 4 == 0 else WRONG] * 6 for number in range(20)}
    source = make_source(tmp_path, "own", golds)
    for seed in range(4):
        _, rest, own = split(DataConfig(sources=(source,), seed=seed), 5, runner)
        assert len(own.examples) == 5
        assert len(rest.examples) == 30 - 6 * len(databases(own))


def test_of_a_mixture_every_source_gives_its_share(tmp_path, runner):
    sources = []
    for name, count, weight in (("a", 8, 1), ("b", 6, 1), ("large", 60, 2)):
        golds = {f"{name}{number}": [RIGHT] * 5 for number in range(count)}
        sources.append(make_source(tmp_path, name, golds) | {"weight": weight})
    held, rest, own = split(DataConfig(sources=tuple(sources), total=40), 12, runner)
    assert Counter(e.id.split("/")[1] for e in own.examples) == {"a": 3, "b": 3, "large": 6}
    assert Counter(e.id.split("/")[1] for e in rest.examples) == {"a": 10, "b": 10, "large": 20}
    # A share of 6 in 26 of the last one's 300 questions are 70: they come from many databases.
    assert sum(name.startswith("large") for name in held) == 14


def test_more_than_there_is_is_refused(tmp_path, runner):
    source = make_source(tmp_path, "own", {"a": [RIGHT] * 3, "b": [WRONG] * 3})
    config = DataConfig(sources=(source,))
    with pytest.raises(UserError, match=r"^4 are too many: there are 6 questions of 2 databas"):
        hold_out(config, 4, by_running(runner))
    assert hold_out(config, 3, by_running(runner)) == {"a"}
    # Of several sources the one that has too few is named.
    large = make_source(tmp_path, "large", {f"s{number}": [RIGHT] * 9 for number in range(9)})
    both = config.model_validate({"sources": [large, config.sources[0]]})
    with pytest.raises(UserError, match=r": there are 6 questions of 2 .* in spider/own.json; "):
        hold_out(both, 8, by_running(runner))


def test_excluded_databases_are_left_out_and_counted(tmp_path):
    source = make_source(tmp_path, "own", {"a": [RIGHT] * 3, "b": [RIGHT] * 2, "c": [WRONG]})
    config = DataConfig(sources=(source,), exclude_databases=("a",))
    data = load(config)
    assert databases(data) == {"b", "c"}
    assert data.lines() == ["spider/own.json: 3 of 6 questions, 3 in exclude_databases"]
    assert hold_out(config, 2) <= {"b", "c"}
