"""Data sets that are not as their layout says: one line each, naming the path."""

import json

import pytest

from sqlenv.errors import UserError

from .data_folders import bird, load_one, make_database, spider, write

TABLES = {
    "db_id": "band",
    "table_names_original": ["band"],
    "column_names_original": [[-1, "*"], [0, "id"]],
    "column_names": [[-1, "*"], [0, "number"]],
}


def message(path, layout="spider", **source):
    with pytest.raises(UserError) as caught:
        load_one(path, layout, **source)
    text = str(caught.value)
    assert "\n" not in text
    return text


def test_a_folder_too_shallow_or_too_deep_names_the_right_one(tmp_path):
    right = tmp_path / "download" / "spider_data"
    make_database(right / "database")
    write(right / "dev.json", [spider()])
    for wrong in (tmp_path, tmp_path / "download", right / "database"):
        text = message(wrong, split="dev")
        assert text.startswith(f"{wrong}: no dev.json or val.json in it")
        assert f"use {right}, which has it" in text


def test_a_missing_folder_a_file_and_an_unknown_split(tmp_path, spider_folder):
    assert "nowhere does not exist" in message(tmp_path / "nowhere")
    write(spider_folder / "dev.json", [spider()])
    assert "is a file" in message(spider_folder / "dev.json")
    assert "no mine.json in it" in message(spider_folder, file="mine.json")
    assert message(tmp_path, "synsql", split="dev") == "synsql has no split dev; it has train"


def test_databases_still_in_their_archive(tmp_path):
    write(tmp_path / "train" / "train.json", [bird()])
    (tmp_path / "train" / "train_databases.zip").write_bytes(b"PK")
    assert f"unpack {tmp_path / 'train' / 'train_databases.zip'}" in message(tmp_path, "bird")


@pytest.mark.parametrize("name", ["dev.json", "dev.jsonl"])
def test_a_truncated_file_names_file_record_and_byte(spider_folder, name):
    path = spider_folder / name
    records = [json.dumps(spider()) for _ in range(3)]
    text = "\n".join(records) if name.endswith("l") else f"[{', '.join(records)}]"
    path.write_text(text[:-20])
    found = message(spider_folder, file=name)
    assert found.startswith(f"{path}: broken JSON after 2 whole records, before byte")
    assert str(len(text) - 20) in found


@pytest.mark.parametrize(
    ("content", "expected"),
    [
        ({"db_id": "band"}, "expected a list of records"),
        ([], "expected a list of records"),
        (["SELECT 1"], "record 0 is not an object"),
        ([spider(), {"db_id": "band"}], "record 1 has no field 'question'"),
        ([spider("")], "no question is left"),
        ([bird()], "record 0 is of bird, not of spider (it has db_id, question, evidence"),
        ([{"input_seq": "", "output_seq": ""}], "is of OmniSQL's finished prompts, not of spider"),
        ([{**TABLES, "table_names": []}], "is of a list of schemas, such as tables.json, not of"),
    ],
)
def test_a_file_of_another_kind(spider_folder, content, expected):
    write(spider_folder / "dev.json", content)
    assert expected in message(spider_folder, split="dev")


PARSE = {
    "select": [False, []],
    "where": [],
    "groupBy": [],
    "having": [],
    "orderBy": [],
    "limit": None,
    "intersect": None,
    "union": None,
    "except": None,
    "from": {"table_units": [], "conds": []},
}


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"db_id": 5}, "db_id should be text, not 5;"),
        ({"db_id": ""}, "db_id should name a database, not '';"),
        ({"question": None}, "question should be text, not None;"),
        ({"question": "\ud800"}, r"question should be valid Unicode text, not '\ud800'"),
        ({"query": ["SELECT 1"]}, "query should be text, not ['SELECT 1'];"),
        ({"evidence": {}}, "evidence should be text, not {};"),
        ({"instance_id": 7}, "instance_id should be text, not 7;"),
        ({"difficulty": 3}, "difficulty should be text, not 3;"),
        ({"dialect": ["mysql"]}, "dialect should be text, not ['mysql'];"),
        ({"sql": {"select": 5}}, "sql is not a query as Spider's parser writes it,"),
        ({"sql": {**PARSE, "where": [1]}}, "sql is not a query as Spider's parser writes it,"),
        ({"sql": {**PARSE, "from": []}}, "sql is not a query as Spider's parser writes it,"),
    ],
)
def test_a_field_of_a_wrong_type_names_file_record_and_field(spider_folder, fields, expected):
    path = spider_folder / "dev.jsonl"
    records = [spider(sql=PARSE), spider() | fields]
    path.write_text("\n".join(map(json.dumps, records)))
    found = message(spider_folder, file="dev.jsonl")
    assert found.startswith(f"{path}: record 1 has a wrong field: {expected}")
    assert found.endswith("; correct it if the layout is really spider")


@pytest.mark.parametrize(
    ("layout", "file", "field"),
    [
        ("spider_syn", "dev.json", "SpiderSynQuestion"),
        ("spider_dk", "Spider-DK.json", "query"),
        ("spider2", "test.json", "external_knowledge"),
        ("bird", "dev.json", "SQL"),
        ("synsql", "data.json", "sql"),
        ("synsql", "data.json", "sql_complexity"),
    ],
)
def test_wrong_fields_of_every_layout(tmp_path, layout, file, field):
    for name in ("database", "databases", "dev_databases"):
        make_database(tmp_path / name)
    good = spider(SpiderSynQuestion="?", SQL="SELECT 1", sql=None, sql_complexity="Simple")
    write(tmp_path / file, [good | {field: 7}])
    split = "dev" if "dev" in file.lower() or "DK" in file else ("test", "train")["data" in file]
    found = message(tmp_path, layout, split=split)
    assert f"{file}: record 0 has a wrong field: {field} should be text, not 7" in found


@pytest.mark.parametrize("name", ["x" * 5000, "a\0b"])
def test_names_that_no_file_can_have_are_names_of_no_file(tmp_path, name):
    make_database(tmp_path / "databases")
    record = spider(instance_id="local1", external_knowledge=name)
    write(
        tmp_path / "test.json",
        [record, spider(db_id=name, external_knowledge=None, instance_id="local2")],
    )
    data = load_one(tmp_path, "spider2", split="test", data={"drop_missing_database": True})
    assert [example.evidence for example in data.examples] == [name]


@pytest.mark.parametrize(
    ("change", "expected"),
    [
        ({"db_id": ["band"]}, "has a wrong field: db_id should be text, not ['band']"),
        ({"table_names_original": None}, "table_names_original should be a valid list, not None"),
        ({"table_names_original": ["band", 3]}, "table_names_original.1 should be text, not 3"),
        ({"column_names": [[-1, "*"], [0]]}, "column_names.1"),
        ({"column_names": [[-1, "*"], [0, None]]}, "column_names.1.1 should be text, not None"),
        ({"column_names": [[-1, "*"]]}, "column_names has 1 items, column_names_original 2"),
        ({"column_names_original": [[-1, "*"], [4, "id"]]}, "there is no table 4"),
        ({"column_names_original": [[-1, "*"], ["x", "id"]]}, "column_names_original.1.0"),
    ],
)
def test_a_wrong_tables_json_names_file_record_and_field(spider_folder, change, expected):
    write(spider_folder / "dev.json", [spider()])
    path = spider_folder / "tables.json"
    write(path, [{"db_id": "another"}, TABLES | change])
    found = message(spider_folder, split="dev")
    assert found.startswith(f"{path}: record 1 ")
    assert expected in found
    assert found.endswith("; correct it or fetch it again")


def test_a_tables_json_without_a_field_says_which(spider_folder):
    write(spider_folder / "dev.json", [spider()])
    entry = {key: value for key, value in TABLES.items() if key != "table_names_original"}
    write(spider_folder / "tables.json", [entry])
    assert "record 0 has no field 'table_names_original'" in message(spider_folder, split="dev")
