"""Data sets are found by where their files are and what these hold, wherever a folder is given."""

from __future__ import annotations

import contextlib
import shutil
from pathlib import Path
from typing import Any

import pytest

from exchange import UserError
from sqlenv.data.layouts import SETS, AbsentError, locate
from sqlenv.data.loading import read_all
from tests.databases import write

from .data_folders import SYNSQL, bird, make_database, spider

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
        write(root / name / file, record if file.endswith("l") else [record])
    for place in databases:
        make_database(root / name / place)
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
