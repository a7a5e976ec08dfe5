"""What a run learns from and chooses checkpoints by is not what a published test set has."""

import json
import logging
import shutil
from functools import partial
from pathlib import Path

import pytest

from launch.config import JobConfig, load_config
from launch.data.preflight import check_questions
from sqlenv.data.layouts import TEST_SETS, set_name
from tests.worlds import edit, write

from .conftest import mistake


def job(root: Path, *overrides: str) -> JobConfig:
    small = ["data.held_out=4", "data.train.total=20", f"data.root={root}"]
    return load_config("progress.yaml", [*small, *overrides])


def message(root: Path, *overrides: str) -> str:
    return mistake(check_questions, job(root, *overrides))


# The configs.


@pytest.mark.parametrize(
    "name", ["progress.yaml", "expo.yaml", "paverl.yaml", "astra.yaml", "verbal.yaml"]
)
def test_no_config_of_a_paper_chooses_checkpoints_by_a_test_set(name):
    data = load_config(name, []).data
    sources = {
        set_name(source) for one in ("train", "validation") for source in data.of(one).sources
    }
    assert not sources & TEST_SETS.keys()
    assert data.of("validation").total == data.held_out
    assert data.overlap == "refuse"


# The check.

TOTAL = "data.train.total=40"
MINE = "bird/train/train_databases/mine"
ALIKE = " who of DATABASE mine lives in new york, number 4? "
OWN = "{layout: bird, path: ., split: train, file: train/mine.json}"
AWAY = "{layout: spider, path: ../spider, split: test}"
ONLY = "data.train.sources=[{layout: bird, path: ., split: train}]"
TRAIN, DEV = "bird/train/train.json", "bird/dev_20240627/dev.json"
PUB = "bird/dev_20240627/dev_databases/pub/pub.sqlite"
CLEAN = "data.validation={total: 3, sources: [{layout: bird, path: ., split: train}]}"


def share(root: Path, file: str, databases: str, **changes: str) -> None:
    """Let a question of a test set be about a training database of BIRD."""
    edit(root / file, 4, db_id="mine", **changes)
    shutil.copytree(root / MINE, root / databases / "mine")


rename = partial(share, file="spider/test.json", databases="spider/test_database")
ask_about_it = partial(share, file=DEV, databases=PUB.partition("/pub/")[0], question="What else?")


def rename_what_is_asked(root: Path) -> None:
    """Let Spider's test set ask what a training set does, about a database of another name."""
    asked = [one for one in json.loads((root / TRAIN).read_text()) if one["db_id"] == "mine"]
    for number, one in enumerate(asked[:3]):
        edit(root / "spider" / "test.json", number, question=f" {one['question'].upper()} ")


def own_test_set(root: Path) -> None:
    asked = json.loads((root / TRAIN).read_text())
    write(root / "bird/train/mine.json", [one for one in asked if one["db_id"] == "mine"])


@pytest.mark.parametrize(
    ("split", "source", "name"),
    [
        ("validation", "{layout: spider, path: ., split: test}", "spider-test"),
        ("train", "{layout: spider, path: ., split: train, file: test.json}", "spider-test"),
        ("train", "{layout: spider-syn, path: ., split: dev}", "spider-syn"),
    ],
)
def test_a_test_set_neither_validates_nor_is_learned_from(downloads, split, source, name):
    own = [CLEAN, f"data.{split}={{sources: [{source}]}}", "train.steps=1"]
    line = message(downloads, *own)
    assert f"data.{split}" in line
    assert name in line
    check_questions(job(downloads, *own, "data.overlap=tell"))


@pytest.mark.parametrize(
    ("spoil", "below", "overrides", "shared"),
    [
        (rename, "", (), ("spider-test", "mine")),
        (ask_about_it, "", (), ("bird-dev", "mine")),
        (rename_what_is_asked, "", (), ("spider-test", "mine")),
        # The run's own test questions, which need not be a published set's or below the root.
        (own_test_set, "", (f"data.test.sources=[{OWN}]",), ("data.test", "mine")),
        (rename, "bird", (ONLY, f"data.test.sources=[{AWAY}]"), ("data.test", "mine")),
    ],
)
def test_what_a_test_set_has_is_refused(root, caplog, spoil, below, overrides, shared):
    spoil(root)
    line = message(root / below, TOTAL, *overrides)
    assert all(words in line for words in ("data.train", "data.overlap=tell", *shared))
    assert "data.train.exclude_databases='[formula_1, mine]'" in line
    check_questions(job(root / below, TOTAL, *overrides, "data.train.exclude_databases=[mine]"))
    with caplog.at_level(logging.WARNING):
        check_questions(job(root / below, TOTAL, *overrides, "data.overlap=tell"))
    assert all(words in caplog.text for words in shared)


def test_clean_data_pass_and_what_may_be_alike_is_told(root, caplog):
    caplog.set_level(logging.INFO, "launch.data.preflight")
    # Spider-Syn's training questions are Spider's in other words; neither is measured on.
    both = "[{layout: spider, path: ., split: train}, {layout: spider-syn, path: ., split: train}]"
    check_questions(job(root, f"data.train.sources={both}", TOTAL))
    assert not caplog.records
    # A question about other tables is one that anybody may ask.
    edit(root / DEV, 4, question=ALIKE)
    check_questions(job(root, TOTAL, CLEAN))
    assert "bird-dev" not in caplog.text
    assert "data.train and data.validation share" in caplog.text


def test_a_held_out_database_of_a_test_set_is_refused_too(root):
    edit(root / DEV, 0, db_id="mill")
    shutil.copytree(root / MINE / "../mill", (root / PUB).parents[1] / "mill")
    lines = {message(root, ONLY, f"data.train.seed={seed}") for seed in range(6)}
    assert {line.split(" and ")[0] for line in lines} == {"data.train", "data.validation"}


def test_a_test_set_that_cannot_be_read_is_told(root, caplog):
    (root / "spider" / "test.json").write_text("[{")
    shutil.copytree(root / "Spider-DK", root / "a")
    shutil.move(root / "Spider-DK", root / "b")
    with caplog.at_level(logging.WARNING):
        check_questions(job(root))
    assert [one.message.split()[0] for one in caplog.records] == ["spider-test", "spider-dk"]
