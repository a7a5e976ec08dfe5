"""Data sets that are not as their layout says: one line each, naming file, record and field."""

import json

import pytest

from exchange import UserError
from tests.databases import write

from .data_folders import TABLES, bird, load_one, make_database, spider


def message(path, layout="spider", **source):
    with pytest.raises(UserError, match=r"^[^\n]*\Z") as caught:
        load_one(path, layout, **source)
    return str(caught.value)


def test_folders_that_hold_nothing(tmp_path):
    right = tmp_path / "download" / "spider_data"
    make_database(right / "database")
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
        make_database(tmp_path / name)
    good = spider(SpiderSynQuestion="?", SQL="SELECT 1", sql=None, sql_complexity="Simple")
    write(tmp_path / file, [good | {field: 7}])
    assert f"record 0: {field}: " in message(tmp_path, layout, split=split)


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_names_that_no_file_can_have_are_names_of_no_file(tmp_path, name):
    make_database(tmp_path / "databases")
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
