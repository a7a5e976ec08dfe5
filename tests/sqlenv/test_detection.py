"""Data sets told by where their files are and what these hold."""

from __future__ import annotations

import shutil
from pathlib import Path

import pytest

from sqlenv.data.detection import choose_sets, detect
from sqlenv.errors import UserError

from .data_folders import bird, make_database, spider, write

SYN = {"db_id": "band", "SpiderSynQuestion": "?", "SpiderQuestion": "?", "query": "SELECT 1"}
SYNSQL = {
    "db_id": "band", "question": "Q", "sql": "SELECT 1", "external_knowledge": "",
    "sql_complexity": "Simple", "question_style": "Formal", "cot": "",
}  # fmt: skip
SPIDER2 = {"instance_id": "local1", "db": "band", "question": "Q", "external_knowledge": None}


def make_single(root: Path, name: str) -> Path:
    """Make one download as it is unpacked."""
    folder = root / name
    files = {
        "spider_data": {"train_spider.json": spider(), "dev.json": spider(), "test.json": spider()},
        "Spider-Syn": {"train_spider.json": SYN, "dev.json": SYN},
        "Spider-DK": {"Spider-DK.json": spider(type="x")},
        "spider-realistic": {"spider-realistic.json": spider()},
        "bird": {"train/train.json": bird(), "dev_20240627/dev.json": bird()},
        "minidev": {"mini_dev_sqlite.json": bird()},
        "SynSQL-2.5M": {"data.json": SYNSQL},
        "spider2-lite": {"spider2-lite.jsonl": SPIDER2},
    }
    databases = {
        "bird": ("train/train_databases", "dev_20240627/dev_databases"),
        "minidev": ("dev_databases",),
        "SynSQL-2.5M": ("databases",),
        "spider2-lite": ("resource/databases/spider2-localdb",),
    }
    for file, record in files[name].items():
        write(folder / file, record if file.endswith("l") else [record])
    for place in databases.get(name, ("database",)):
        make_database(folder / place)
    return folder


SINGLE = {
    "spider_data": {"spider-train", "spider-dev", "spider-test"},
    "Spider-Syn": {"spider-syn-train", "spider-syn"},
    "Spider-DK": {"spider-dk"},
    "spider-realistic": {"spider-realistic"},
    "bird": {"bird-train", "bird-dev"},
    "minidev": {"bird-minidev"},
    "SynSQL-2.5M": {"synsql"},
    "spider2-lite": {"spider2-local"},
}


@pytest.mark.parametrize(("name", "sets"), SINGLE.items())
def test_a_single_download_is_recognised_as_it_is(tmp_path: Path, name: str, sets: set[str]):
    folder = make_single(tmp_path, name)
    for root in (folder, tmp_path):
        assert set(detect(root).sources) == sets


def test_downloads_side_by_side_do_not_take_each_others_files(tmp_path: Path):
    for name in SINGLE:
        make_single(tmp_path, name)
    found = detect(tmp_path)
    assert set(found.sources) == set().union(*SINGLE.values())
    assert {name: source.path.name for name, source in found.sources.items()} == {
        name: folder for folder, sets in SINGLE.items() for name in sets
    }


def test_two_copies_are_not_guessed(tmp_path: Path):
    shutil.copytree(make_single(tmp_path, "spider_data"), tmp_path / "copy")
    with pytest.raises(UserError, match=r"^spider-dev: is in .*copy and in .*spider_data; give"):
        choose_sets(tmp_path, ["spider-dev"])


WRONG = {
    "spider-dev": ("spider_data", "dev.json", bird(), "bird"),
    "spider2-local": ("spider2-lite", "spider2-lite.jsonl", bird(), "bird"),
    "spider-dk": (
        *("Spider-DK", "Spider-DK.json"),
        *({"input_seq": "", "output_seq": ""}, "OmniSQL's finished prompts"),
    ),
}


@pytest.mark.parametrize(("name", "case"), WRONG.items())
def test_the_file_of_another_data_set_is_named(tmp_path: Path, name: str, case: tuple):
    folder, file, record, expected = case
    make_single(tmp_path, folder)
    write(tmp_path / folder / file, record if file.endswith("l") else [record])
    with pytest.raises(UserError) as caught:
        choose_sets(tmp_path, [name])
    start = f"{name}: {tmp_path / folder / file}: its records are of {expected} "
    assert str(caught.value).startswith(start)
    assert name not in detect(tmp_path).sources


def test_a_file_of_a_set_that_is_there_is_not_said_to_be_in_the_way_of_another(tmp_path: Path):
    make_single(tmp_path, "bird")
    assert not detect(tmp_path).left
    with pytest.raises(
        UserError, match=r": no spider-dev; expected dev\.json .*; found bird-train"
    ):
        choose_sets(tmp_path, ["spider-dev"])


def test_what_was_expected_where_is_told(tmp_path: Path):
    make_single(tmp_path / "small", "minidev")
    (tmp_path / "empty").mkdir()
    for root, names, words in (
        (tmp_path / "empty", [], "nothing; expected such as train.json"),
        (
            tmp_path / "small",
            ["spider-dev"],
            "expected dev.json .*; found bird-minidev",
        ),
        (tmp_path / "nowhere", [], "does not exist"),
        (tmp_path / "small" / "minidev" / "mini_dev_sqlite.json", [], "is a file"),
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
