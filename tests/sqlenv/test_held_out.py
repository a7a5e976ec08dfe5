"""Databases that are held out of training, to choose checkpoints by."""

from __future__ import annotations

import json
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from sqlenv.config import DataConfig, ExecutorConfig
from sqlenv.data.held_out import hold_out, validation_of
from sqlenv.data.loading import LoadedData, load
from sqlenv.data.sources import by_running
from sqlenv.errors import UserError
from sqlenv.executor import Executor

from .data_folders import make_database

RIGHT, WRONG = "SELECT name FROM band", "SELECT age FROM band"


def make(folder: Path, layout: str, golds: dict[str, list[str]]) -> dict[str, Any]:
    """Write a data set with some golds on each database; return its source."""
    names = {"bird": ("train.json", "SQL", "train_databases"), "spider": ("train_spider.json",
             "query", "database"), "synsql": ("data.json", "sql", "databases")}  # fmt: skip
    file, gold, databases = names[layout]
    more = {"sql_complexity": "Simple"} if layout == "synsql" else {}
    asked = [
        {"db_id": name, "question": f"{name} {number}?", gold: sql, **more}
        for name, queries in golds.items()
        for number, sql in enumerate(queries)
    ]
    for name in golds:
        make_database(folder / databases, name)
    (folder / file).write_text(json.dumps(asked))
    return {"layout": layout, "path": folder, "split": "train"}


def split(config: DataConfig, count: int) -> tuple[frozenset[str], LoadedData, LoadedData]:
    """Hold out, and load what is left and what is held out."""
    with Executor(ExecutorConfig(isolation="thread", workers=1)) as executor:
        held = hold_out(config, count, by_running(executor))
        rest = load(config, executor=executor, accept=lambda e: e.db_id not in held)
        own = load(
            validation_of(config, count), executor=executor, accept=lambda e: e.db_id in held
        )
    return held, rest, own


def databases(data: LoadedData) -> set[str]:
    return {example.db_id for example in data.examples}


def test_counts_are_met_exactly_and_no_database_is_on_both_sides(tmp_path):
    """30 databases of 10 questions, of which one fails: 270 may stay, 200 and 23 are asked for."""
    golds = {f"d{number}": [RIGHT] * 9 + [WRONG] for number in range(30)}
    source = make(tmp_path, "bird", golds)
    for seed in range(3):
        config = DataConfig(sources=(source,), total=200, seed=seed)
        held, rest, own = split(config, 23)
        assert (len(rest.examples), len(own.examples)) == (200, 23)
        # 300 * 23 / 223 = 30.9 questions: the fourth database is the one that exceeds it least.
        assert len(held) == 4
        assert databases(own) <= held
        assert not databases(rest) & held


def test_a_database_without_a_sound_gold_validates_nothing_alone(tmp_path):
    """Three databases of four cannot be judged by: enough are held out until one is that can."""
    golds = {f"d{number}": [RIGHT if number % 4 == 0 else WRONG] * 6 for number in range(20)}
    source = make(tmp_path, "bird", golds)
    for seed in range(4):
        config = DataConfig(sources=(source,), seed=seed)
        held, rest, own = split(config, 5)
        assert len(own.examples) == 5
        assert len(rest.examples) == 30 - 6 * len({name for name in held if name in databases(own)})


def test_of_a_mixture_every_source_gives_its_share(tmp_path):
    sizes = {"bird": 8, "spider": 6, "synsql": 60}
    sources = []
    for layout, count in sizes.items():
        folder = tmp_path / layout
        folder.mkdir()
        golds = {f"{layout}{number}": [RIGHT] * 5 for number in range(count)}
        sources.append(make(folder, layout, golds) | {"weight": 2 if layout == "synsql" else 1})
    config = DataConfig(sources=tuple(sources), total=40)
    held, rest, own = split(config, 12)
    assert Counter(e.source for e in own.examples) == {"bird": 3, "spider": 3, "synsql": 6}
    assert Counter(e.source for e in rest.examples) == {"bird": 10, "spider": 10, "synsql": 20}
    # A share of 6 in 26 of SynSQL's 300 questions are 70: questions come from many databases.
    assert Counter(name[:4] for name in held)["syns"] == 14
    assert not databases(rest) & held


def test_more_than_there_is_is_refused(tmp_path):
    config = DataConfig(sources=(make(tmp_path, "bird", {"a": [RIGHT] * 3, "b": [WRONG] * 3}),))
    with Executor(ExecutorConfig(isolation="thread", workers=1)) as executor:
        check = by_running(executor)
        with pytest.raises(UserError, match=r"^4 are too many: there are 6 questions of 2 databas"):
            hold_out(config, 4, check)
        assert hold_out(config, 3, check) == {"a"}


def test_excluded_databases_are_left_out_and_counted(tmp_path):
    source = make(tmp_path, "bird", {"a": [RIGHT] * 3, "b": [RIGHT] * 2, "c": [WRONG]})
    config = DataConfig(sources=(source,), exclude_databases=("a",))
    data = load(config)
    assert databases(data) == {"b", "c"}
    assert data.lines() == ["bird/train: 3 of 6 questions, 3 in exclude_databases"]
    assert hold_out(config, 2) <= {"b", "c"}
