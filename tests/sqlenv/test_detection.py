"""Data sets told by where their files are and what these hold."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import pytest

from sqlenv.data.detection import choose_sets, detect
from sqlenv.errors import UserError

from .data_folders import bird, make_database, spider, write

SYN = {"db_id": "band", "SpiderSynQuestion": "?", "SpiderQuestion": "?", "query": "SELECT 1"}
SYNSQL = spider(sql="SELECT 1", external_knowledge="", sql_complexity="Simple", cot="")
SPIDER2 = {"instance_id": "local1", "db": "band", "question": "Q", "external_knowledge": None}
PROMPT = {"input_seq": "", "output_seq": ""}

# Each download as it is unpacked: its question files by set, a record, its folders of databases.
SINGLE: dict[str, tuple[dict[str, str], Any, tuple[str, ...]]] = {
    "spider_data": (
        {"spider-train": "train_spider.json", "spider-dev": "dev.json", "spider-test": "test.json"},
        *(spider(), ("database",)),
    ),
    "Spider-Syn": (
        {"spider-syn-train": "train_spider.json", "spider-syn": "dev.json"},
        *(SYN, ("database",)),
    ),
    "Spider-DK": ({"spider-dk": "Spider-DK.json"}, spider(type="x"), ("database",)),
    "spider-realistic": (
        {"spider-realistic": "spider-realistic.json"},
        *(spider(), ("database",)),
    ),
    "bird": (
        {"bird-train": "train/train.json", "bird-dev": "dev_20240627/dev.json"},
        *(bird(), ("train/train_databases", "dev_20240627/dev_databases")),
    ),
    "minidev": ({"bird-minidev": "mini_dev_sqlite.json"}, bird(), ("dev_databases",)),
    "SynSQL-2.5M": ({"synsql": "data.json"}, SYNSQL, ("databases",)),
    "spider2-lite": (
        {"spider2-local": "spider2-lite.jsonl"},
        *(SPIDER2, ("resource/databases/spider2-localdb",)),
    ),
}


def make_single(root: Path, name: str) -> Path:
    files, record, databases = SINGLE[name]
    for file in files.values():
        write(root / name / file, record if file.endswith("l") else [record])
    for place in databases:
        make_database(root / name / place)
    return root / name


@pytest.mark.parametrize("name", SINGLE)
def test_a_single_download_is_recognised_as_it_is(tmp_path: Path, name: str):
    folder = make_single(tmp_path, name)
    for root in (folder, tmp_path):
        found = detect(root)
        assert set(found.sources) == set(SINGLE[name][0])
        assert not found.left


def test_downloads_side_by_side_do_not_take_each_others_files(tmp_path: Path):
    for name in SINGLE:
        make_single(tmp_path, name)
    expected = {name: folder for folder, (files, *_) in SINGLE.items() for name in files}
    found = {name: source.path.name for name, source in detect(tmp_path).sources.items()}
    assert found == expected


@pytest.mark.parametrize(
    ("folder", "name", "record", "expected"),
    [
        ("spider_data", "spider-dev", bird(), "bird"),
        ("spider2-lite", "spider2-local", bird(), "bird"),
        ("Spider-DK", "spider-dk", PROMPT, "OmniSQL's finished prompts"),
    ],
)
def test_the_file_of_another_data_set_is_named(tmp_path: Path, folder, name, record, expected):
    path = make_single(tmp_path, folder) / SINGLE[folder][0][name]
    write(path, record if path.suffix == ".jsonl" else [record])
    with pytest.raises(UserError) as caught:
        choose_sets(tmp_path, [name])
    assert str(caught.value).startswith(f"{name}: {path}: its records are of {expected} ")
    assert name not in detect(tmp_path).sources


def test_what_was_expected_where_is_told(tmp_path: Path):
    make_single(tmp_path / "small", "minidev")
    (tmp_path / "empty").mkdir()
    shutil.copytree(make_single(tmp_path / "two", "spider_data"), tmp_path / "two" / "copy")
    small, two = tmp_path / "small", tmp_path / "two"
    for root, names, words in (
        (tmp_path / "empty", [], "nothing; expected such as train.json"),
        (small, ["spider-dev"], r"no spider-dev; expected dev\.json .*; found bird-minidev"),
        (tmp_path / "nowhere", [], "does not exist"),
        (small / "minidev" / "mini_dev_sqlite.json", [], "is a file"),
        (two, ["spider-dev"], r"^spider-dev: is in .*copy and in .*spider_data; give"),
    ):
        with pytest.raises(UserError, match=words):
            choose_sets(root, names)


def test_a_download_whose_databases_are_packed_is_told(tmp_path: Path):
    folder = make_single(tmp_path, "bird") / "train"
    shutil.rmtree(folder / "train_databases")
    (folder / "train_databases.zip").touch()
    with pytest.raises(UserError, match=r"^bird-train: .*unpack .*train_databases\.zip$"):
        choose_sets(tmp_path, ["bird-train"])
    assert set(choose_sets(tmp_path, [])) == {"bird-dev"}


def test_a_data_set_without_its_databases_is_left_out_of_all_and_told(tmp_path: Path, caplog):
    """Spider 2's databases are a download of their own."""
    folder = make_single(tmp_path, "spider2-lite")
    make_single(tmp_path, "minidev")
    assert set(choose_sets(tmp_path, [])) == {"spider2-local", "bird-minidev"}
    for database in folder.rglob("*.sqlite"):
        database.unlink()
    assert set(choose_sets(tmp_path, [])) == {"bird-minidev"}
    assert "left out: spider2-local: " in caplog.text
    assert "spider2-localdb" in caplog.text  # where they belong
    assert set(choose_sets(tmp_path, ["spider2-local"])) == {"spider2-local"}  # who asks is told
    with pytest.raises(UserError, match="no data set is whole; spider2-local: "):
        choose_sets(folder, [])
