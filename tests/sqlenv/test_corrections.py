"""Golds that are corrected, golds that are made wrong, and what is damaged in files of either."""

from __future__ import annotations

import hashlib
import json
import sqlite3
from contextlib import closing
from pathlib import Path
from typing import Any

import pytest

from exchange import UserError
from sqlenv.config import SingleTurnConfig
from sqlenv.data.corrections import read_corrections
from sqlenv.data.corruptions import corrupt
from sqlenv.envs.single_turn import judge_reply
from tests.worlds import TABLES, bird, load_one, make_band, spider, write

ASKED = [
    bird(question_id=7, question="Which names?", SQL="SELECT name FROM band"),
    bird(question_id=9, question="How many?", SQL="SELECT count(*) FROM band"),
]


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    make_band(tmp_path / "dev_databases")
    write(tmp_path / "dev.json", ASKED)
    return tmp_path


def lay(folder: Path, *records: dict[str, Any], runner=None, pin: str = "") -> Any:
    write(folder / "fixed.json", list(records))
    corrections = f"{folder / 'fixed.json'}{pin}"
    return load_one(folder, "bird", runner, split="dev", corrections=corrections)


def test_published_forms_are_read(folder):
    """BIRD-Verified's (null where unchanged), Arcwise-Plat's, and the proposals' for Spider."""
    same = {"original_question": None, "original_evidence": None, "original_SQL": None}
    verified = {
        **same, "question_id": "7", "db_id": "band", "question": "Name 1 of them.", "evidence": "E",
        "SQL": "SELECT name FROM band WHERE id > 0", "grading_method": "subset,=,1",
        "original_question": "Which names?", "original_SQL": "select name\nfrom band;",
    }  # fmt: skip
    proposal = {
        "id": 9, "db_id": "band", "change_type": "x", "corrected_query": "SELECT 2",
        "original_query": "SELECT count(*) FROM band",
    }  # fmt: skip
    first, second = lay(folder, verified, proposal).examples
    assert (first.question, first.grading_method) == ("Name 1 of them.", "subset,=,1")
    assert first.gold_sql == "SELECT name FROM band WHERE id > 0"
    assert (second.question, second.gold_sql, second.evidence) == ("How many?", "SELECT 2", "E")
    arcwise = {
        "question_id": 9,
        "db_id": "band",
        "question": "?",
        "evidence": "",
        "SQL": "SELECT 3",
    }
    first, second = lay(folder, arcwise).examples
    assert first.gold_sql == ASKED[0]["SQL"]
    assert (second.question, second.gold_sql, second.evidence) == ("?", "SELECT 3", "")


GOOD: dict[str, Any] = {"question_id": 9, "db_id": "band", "gold_sql": "SELECT 3"}
DAMAGED = json.loads((Path(__file__).parents[1] / "data/damaged_corrections.json").read_text())


def test_a_file_is_pinned_by_its_hash(folder):
    own = hashlib.sha256(write(folder / "fixed.json", [GOOD]).read_bytes()).hexdigest()
    assert lay(folder, GOOD, pin=f"@{own[:8]}").examples[1].gold_sql == "SELECT 3"
    with pytest.raises(UserError, match=f"another copy, its sha256 is {own[:12]} and not abcdef0"):
        lay(folder, GOOD, pin="@abcdef0")
    with pytest.raises(UserError, match=r"@ab: after @ stand 6 to 64 digits"):
        lay(folder, GOOD, pin="@ab")


@pytest.mark.parametrize("name", DAMAGED)
def test_damaged_corrections_are_told_in_a_line(folder, runner, name):
    records, words = DAMAGED[name]
    with pytest.raises(UserError) as caught:
        lay(folder, *records, runner=runner)
    assert words in str(caught.value)
    assert str(folder / "fixed.json") in str(caught.value)
    assert "\n" not in str(caught.value)


def test_training_pays_for_every_gold_and_by_the_questions_own_rule(folder, runner):
    fixed = [
        {**GOOD, "alternatives": ["SELECT count(DISTINCT id) + 1 FROM band"]},
        {"question_id": 7, "db_id": "band", "SQL": "SELECT 'x' UNION SELECT 'y'",
         "grading_method": "subset,=,1"},
    ]  # fmt: skip
    first, second = lay(folder, *fixed, runner=runner).examples
    bits = lay(folder, {**GOOD, "alternatives": ["SELECT 0.3"]}, runner=runner).examples[1]
    config = SingleTurnConfig(match="bag_ordered")

    def is_right(example: Any, sql: str) -> bool:
        return judge_reply(example, f"<sql>{sql}</sql>", runner, config).correct

    # Numbers are as close to any of the golds as to the first.
    assert is_right(bits, "SELECT 0.1 + 0.2")
    assert [is_right(second, sql) for sql in ("SELECT 3", "SELECT 2", "SELECT 1")] == [1, 1, 0]
    rows = ("SELECT 'y'", "SELECT 'x'", "SELECT 'x' UNION SELECT 'y'", "SELECT 'z'")
    assert [is_right(first, sql) for sql in rows] == [1, 1, 0, 0]


def test_published_files_are_read(shared: Path):
    folder = shared / "data" / "corrected"
    counts = {"bird-verified-train": 2064, "bird-verified-val": 398, "arcwise_plat_full": 33}
    counts |= {"arcwise_plat_sql": 33, "spider_corrections": 148}
    for name, count in counts.items():
        assert len(read_corrections(f"{folder / name}.json").by_id) == count
    corrections = str(folder / "arcwise_plat_full.json")
    plain = load_one(shared / "data" / "bird_dev", "bird", split="dev")
    data = load_one(shared / "data" / "bird_dev", "bird", split="dev", corrections=corrections)
    pairs = list(zip(plain.examples, data.examples, strict=True))
    assert sum(old.gold_sql != new.gold_sql for old, new in pairs) == 9
    assert sum(old.question != new.question for old, new in pairs) == 4
    # The records that are corrected can be a question file of their own.
    file = str(folder / "bird-verified-train.json")
    alone: dict[str, Any] = {"file": file, "split": "train"}
    more = {"drop_missing_database": True}
    with pytest.raises(UserError, match=r"no question is left.*2,064 missing database"):
        load_one(shared / "data" / "bird_dev", "bird", data=more, **alone)


# The mistakes of a weak annotator: one part confused or forgotten, the rest left alone.

DATA = Path(__file__).parents[1] / "data"
CASES = dict(json.loads((DATA / "corruptions.json").read_text()))


@pytest.mark.parametrize(("sql", "wrong"), CASES.items())
def test_one_part_is_wrong(sql, wrong):
    found = corrupt(sql)
    assert found is not None
    assert found.replace(" ASC", "") == wrong


NO_MISTAKE = ("", "DROP TABLE t", "SELECT FROM", "(" * 5000, "SELECT * FROM t", "SELECT 1")


@pytest.mark.parametrize("sql", NO_MISTAKE)
def test_what_does_not_parse_or_has_nothing_to_get_wrong_has_no_mistake(sql):
    assert corrupt(sql) is None


def test_a_mistake_runs():
    with closing(sqlite3.connect(":memory:")) as db:
        db.executescript("CREATE TABLE t (a, b, c, d); CREATE TABLE u (b, d);")
        for sql in CASES:
            wrong = corrupt(sql)
            assert wrong is not None
            db.execute(wrong)


# Data sets that are not as their layout says: one line each, naming file, record and field.


def message(path, layout="spider", **source):
    with pytest.raises(UserError, match=r"^[^\n]*\Z") as caught:
        load_one(path, layout, **source)
    return str(caught.value)


def test_folders_that_hold_nothing(tmp_path):
    right = tmp_path / "download" / "spider_data"
    make_band(right / "database")
    write(right / "dev.json", [spider()])
    for path, source, named in (
        (right / "database", {"split": "dev"}, f"use {right}"),
        (tmp_path / "nowhere", {}, "nowhere"),
        (right / "dev.json", {}, "dev.json"),
        (right, {"file": "mine.json"}, "mine.json"),
        (tmp_path, {"layout": "synsql", "split": "dev"}, "split dev"),
    ):
        assert named in message(path, **source)


@pytest.mark.parametrize("name", ["dev.json", "dev.jsonl"])
def test_a_truncated_file_names_file_record_and_byte(spider_folder, name):
    path = spider_folder / name
    records = [json.dumps(spider()) for _ in range(3)]
    text = "\n".join(records) if name.endswith("l") else f"[{', '.join(records)}]"
    path.write_text(text[:-20])
    found = message(spider_folder, file=name)
    assert found.startswith(f"{path}: broken JSON after 2 whole records")
    end = text.rindex("}", 0, text.rindex("{")) + 1 + name.endswith("l")
    assert f"which end at byte {end};" in found


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"db_id": "band"}, "list of records"),
        ([], "list of records"),
        (["SELECT 1"], "record 0"),
        ([7, 8], "record 0"),
        ([spider(), {"db_id": "band"}], "record 1: question"),
        ([spider(), bird()], "record 1 is of bird"),
        ([spider("")], "no question is left"),
        ([bird()], "its records are of bird"),
        ([{"input_seq": "", "output_seq": ""}], "OmniSQL's finished prompts"),
        ([{**TABLES, "table_names": []}], "tables.json"),
        *(
            ([spider(), spider() | {field: value}], f"record 1: {field}: ")
            for field, value in (
                *(("db_id", 5), ("db_id", ""), ("question", "\ud800")),
                *(("query", ["SELECT 1"]), ("dialect", ["mysql"])),
            )
        ),
    ],
)
def test_a_file_of_another_kind_or_a_field_of_a_wrong_type(spider_folder, content, expected):
    write(spider_folder / "dev.json", content)
    found = message(spider_folder, split="dev")
    assert expected in found
    assert str(spider_folder / "dev.json") in found or "no question" in found


@pytest.mark.parametrize(
    ("layout", "file", "split", "field"),
    [
        ("spider-syn", "dev.json", "dev", "SpiderSynQuestion"),
        ("spider2", "test.json", "test", "external_knowledge"),
        ("bird", "dev.json", "dev", "SQL"),
        ("synsql", "data.json", "train", "sql_complexity"),
    ],
)
def test_fields_have_their_layouts_names(tmp_path, layout, file, split, field):
    for name in ("database", "databases", "dev_databases"):
        make_band(tmp_path / name)
    good = spider(SpiderSynQuestion="?", SQL="SELECT 1", sql=None, sql_complexity="Simple")
    write(tmp_path / file, [good | {field: 7}])
    assert f"record 0: {field}: " in message(tmp_path, layout, split=split)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_names_that_no_file_can_have_are_names_of_no_file(tmp_path, name):
    make_band(tmp_path / "databases")
    record = spider(instance_id="local1", external_knowledge=name)
    gone = spider(db_id=name, external_knowledge=None, instance_id="local2")
    write(tmp_path / "test.json", [record, gone])
    data = load_one(tmp_path, "spider2", split="test", data={"drop_missing_database": True})
    assert [example.evidence for example in data.examples] == [name]


@pytest.mark.parametrize(
    "change",
    [
        {"table_names_original": ["band", 3]},
        {"column_names": [[-1, "*"], [0, None], [0, "name"]]},
        {"column_names": [[-1, "*"]]},
        {"column_names_original": [[-1, "*"], [4, "id"]]},
        {"column_names_original": None},
        {"column_types": ["text"]},
    ],
)
def test_a_wrong_tables_json_names_file_and_record(spider_folder, change):
    write(spider_folder / "dev.json", [spider()])
    path = spider_folder / "tables.json"
    write(path, [{"db_id": "another"}, TABLES | change])
    assert message(spider_folder, split="dev").startswith(f"{path}: record 1: ")
