"""Databases that are held out of training, to choose checkpoints by."""

from __future__ import annotations

from collections import Counter

import pytest

from exchange import UserError
from sqlenv.config import DataConfig
from sqlenv.data.held_out import hold_out, validation_of
from sqlenv.data.loading import LoadedData, load
from sqlenv.data.sources import by_running
from sqlenv.executor import Executor

from .data_folders import make_source

RIGHT, WRONG = "SELECT name FROM band", "SELECT age FROM band"


def split(
    config: DataConfig, count: int, runner: Executor
) -> tuple[frozenset[str], LoadedData, LoadedData]:
    """Hold out, and load what is left and what is held out."""
    held = hold_out(config, count, by_running(runner))
    rest = load(config, check=by_running(runner), accept=lambda db_id: db_id not in held)
    validation = validation_of(config, count)
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
