"""What a run learns from and chooses checkpoints by is not what a published test set has."""

from __future__ import annotations

import json
import logging
import shlex
import shutil
import sqlite3
from importlib import resources
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch import prepare, train
from launch.config import JobConfig, dump, load_config
from launch.evaluation.digests import of_sources
from launch.evaluation.testsets import SPLITS, TEST_SETS
from launch.inputs import check_inputs, check_questions, held_out, load_split, rooted
from launch.layers import packaged
from launch.overlap import check_overlap
from sqlenv.data.layouts import SETS
from sqlenv.errors import UserError

from .downloads import make_downloads
from .test_prepare import QUICK

PAPERS = ("progress.yaml", "expo.yaml", "paverl.yaml", "astra.yaml")
DERIVED = ("progress-gspo.yaml", "astra-fig2.yaml")


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_downloads(tmp_path_factory.mktemp("data"))


@pytest.fixture
def root(whole: Path, tmp_path: Path) -> Path:
    return shutil.copytree(whole, tmp_path / "data")


def job(root: Path, *overrides: str, cfg: str = "progress.yaml") -> JobConfig:
    small = ["data.held_out=4", "data.train.total=20", f"data.root={root}"]
    return load_config(cfg, [*small, *overrides])


def message(root: Path, *overrides: str, cfg: str = "progress.yaml") -> str:
    with pytest.raises(UserError) as caught:
        check_questions(job(root, *overrides, cfg=cfg))
    text = str(caught.value)
    assert "\n" not in text
    return text


def bird(root: Path, split: str) -> Path:
    return root / "bird" / {"train": "train", "dev": "dev_20240627"}[split]


def edit(path: Path, number: int, **changes: str) -> None:
    records = json.loads(path.read_text())
    records[number] |= changes
    path.write_text(json.dumps(records))


# The configs.


@pytest.mark.parametrize("name", [*PAPERS, *DERIVED, "verbal.yaml"])
def test_no_config_of_a_paper_chooses_checkpoints_by_a_test_set(name):
    data = load_config(name, []).data
    tests = {(SETS[one].layout, SETS[one].split) for one in TEST_SETS}
    for split in ("train", "validation"):
        for source in data.of(split).sources:
            assert (source.layout, source.split) not in tests, split
    assert data.held_out
    assert data.of("validation").total == data.held_out
    assert data.overlap == "refuse"


@pytest.mark.parametrize("name", PAPERS)
def test_a_papers_run_holds_out_databases_of_each_source(whole, name):
    """All of its sources, on small data in OmniSQL's layout."""
    config = job(whole, "data.held_out=3", cfg=name)
    held = held_out(config, whole)
    assert held
    found = {split: load_split(config, split, whole, held=held).examples for split in SPLITS}
    assert {e.db_id for e in found["validation"]} <= held
    assert len(found["validation"]) == 3
    sources = {source.layout for source in config.data.train.sources}
    assert {e.source for e in found["validation"]} == sources
    assert not {e.db_id for e in found["train"]} & held
    check_questions(config)
    # An evaluation of the questions held out is known by what they are drawn from.
    validation = rooted(config.data.of("validation"), whole)
    assert len(of_sources(validation)) == len(sources)


@pytest.mark.parametrize(
    ("overrides", "counts", "steps"),
    [
        ([], (8_600, 429), 84),
        (["data.train.total=8000", "data.held_out=648"], (8_000, 648), 78),
        (["data.train.total=10000", "data.held_out=175"], (10_000, 175), 98),
        (["train.epochs=1"], (8_600, 429), 8),
        (["data.train.sources.0.limit=1024"], (8_600, 429), 10),
        (["train.steps=20"], (8_600, 429), 20),
    ],
)
def test_steps_of_paverl_follow_the_number_of_questions(overrides, counts, steps, tmp_path):
    """Ten epochs in batches of 1,024 (84 = 10 * 8600 / 1024), and as many in the second stage."""
    config = load_config("paverl.yaml", overrides)
    assert (config.data.train.total, config.data.held_out) == counts
    # The checkpoint and the second stage are chosen by all of them.
    assert config.evaluation.validation_questions is None
    assert config.train.steps == steps
    assert config.train.all_steps == 2 * steps
    # A run's own config has the number of steps, whatever is said of epochs.
    (tmp_path / "config.yaml").write_text(dump(config))
    saved = yaml.safe_load((tmp_path / "config.yaml").read_text())["train"]
    assert (saved["steps"], saved["epochs"]) == (steps, None)
    assert load_config(str(tmp_path / "config.yaml"), []) == config


def head_overrides(name: str, after: str) -> list[str]:
    """Read overrides from the head of a config: what follows some words, up to its end."""
    text = (resources.files("launch") / "configs" / name).read_text()
    lines = text[text.index(after) :].split("\nrun:")[0].splitlines()
    return [one for one in shlex.split(" ".join(line.lstrip("# ") for line in lines)) if "=" in one]


def test_the_other_data_of_paverl_are_the_overrides_of_its_head():
    spider = load_config("paverl.yaml", head_overrides("paverl.yaml", "data.train.sources.0")[:5])
    assert [source.layout for source in spider.data.train.sources] == ["spider"]
    assert (spider.data.train.total, spider.data.held_out, spider.train.steps) == (8_000, 648, 78)
    synsql = load_config("paverl.yaml", head_overrides("paverl.yaml", "data.train.total=10000"))
    assert (synsql.data.train.total, synsql.data.held_out, synsql.train.steps) == (10_000, 175, 98)
    levels = [source.levels for source in synsql.data.train.sources]
    assert levels == [("Simple",), ("Moderate",), ("Complex",), ("Highly Complex",)]


@pytest.mark.parametrize(
    ("name", "steps"), [("progress.yaml", 312), ("expo.yaml", 391), ("astra.yaml", 342)]
)
def test_steps_of_the_other_papers_are_passes_over_their_questions(name, steps):
    assert load_config(name, []).train.steps == steps


def test_verbal_shows_three_values_and_full_descriptions():
    config = load_config("verbal.yaml", ["data.test.sources.0.layout=bird"])
    assert config.prompt.example_values == 3
    assert config.data.test.sources[0].comments == "full"


def test_of_rival_settings_the_later_layer_counts(tmp_path):
    (tmp_path / "own.yaml").write_text(
        "base: progress.yaml\n"
        "data: {validation: {sources: [{layout: spider, path: ., split: dev}]}}\n"
        "train: {steps: 5}\n"
    )
    config = load_config(str(tmp_path / "own.yaml"), [])
    assert config.data.held_out is None
    assert config.train.steps == 5
    again = load_config(str(tmp_path / "own.yaml"), ["data.held_out=7", "train.epochs=2"])
    assert (again.data.validation, again.data.held_out) == (None, 7)
    assert again.train.steps == 2 * 20_000 // 64
    with pytest.raises(UserError, match=r"^data: give one of data.validation .* and data.held_out"):
        load_config("progress.yaml", ["data.held_out=null"])
    with pytest.raises(UserError, match=r"^train.epochs: counts passes over data.train.total"):
        load_config("progress.yaml", ["data.train.total=null"])
    (tmp_path / "both.yaml").write_text("base: progress.yaml\ntrain: {steps: 5, epochs: 2}\n")
    with pytest.raises(UserError, match=r"^train: give one of train.steps and train.epochs"):
        load_config(str(tmp_path / "both.yaml"), [])


def test_every_config_has_one_of_the_two():
    for name in packaged():
        data = load_config(name, []).data
        assert (data.validation is None) != (data.held_out is None)


# The check.


@pytest.mark.parametrize(
    ("source", "name"),
    [
        ("{layout: spider, path: ., split: test}", "spider-test"),
        ("{layout: spider, path: ., split: dev}", "spider-dev"),
        ("{layout: spider, path: ., split: train, file: test.json}", "spider-test"),
        ("{layout: bird, path: ., split: dev}", "bird-dev"),
        ("{layout: spider_syn, path: ., split: dev}", "spider-syn"),
    ],
)
def test_a_test_set_neither_validates_nor_is_learned_from(root, source, name):
    for split in ("validation", "train"):
        config = job(root, f"data.{split}={{sources: [{source}]}}", "train.steps=1")
        with pytest.raises(UserError) as caught:
            check_inputs(config)
        line = str(caught.value)
        assert line.startswith(f"data.{split}.sources.0: is the test set {name}; ")
        assert ("data.held_out=200" in line) == (split == "validation")
        told = config.model_copy(
            update={"data": config.data.model_copy(update={"overlap": "tell"})}
        )
        with pytest.raises(UserError, match=r"model\.path"):
            check_inputs(told)


def test_a_run_is_refused_with_status_2_before_anything_is_made(root, tmp_path, monkeypatch):
    """The whole command, with a config as people had them."""
    monkeypatch.chdir(tmp_path)
    split = "data.validation={sources: [{layout: spider, path: ., split: test}]}"
    with pytest.raises(UserError, match="is the test set spider-test"):
        train.main(["--cfg", "progress.yaml", "--accel", "cpu", f"data.root={root}", split])
    assert not (tmp_path / "runs").exists()


def test_clean_data_pass(root, caplog):
    with caplog.at_level(logging.WARNING):
        check_questions(job(root))
    assert not caplog.records


def test_a_database_name_of_a_test_set_is_refused(root):
    """Spider's test set has a training database of BIRD, though the run tests on BIRD."""
    edit(root / "spider" / "test.json", 0, db_id="mine")
    line = message(root, "data.train.total=40")
    assert "data.train and spider-test share 1 x database name (such as mine)" in line
    assert "data.train.exclude_databases='[formula_1, mine]'" in line
    assert "data.overlap=tell" in line
    config = job(root, "data.train.total=40", "data.train.exclude_databases=[mine]")
    check_questions(config)


def test_a_held_out_database_of_a_test_set_is_refused_too(root):
    edit(bird(root, "dev") / "dev.json", 0, db_id="mill")
    shutil.copytree(
        bird(root, "train") / "train_databases" / "mill",
        bird(root, "dev") / "dev_databases" / "mill",
    )
    only = "data.train.sources=[{layout: bird, path: ., split: train}]"
    lines = {message(root, only, f"data.train.seed={seed}") for seed in range(6)}
    sides = {line.split(" and ")[0] for line in lines}
    assert sides == {"data.train", "data.validation"}
    assert all("bird-dev share 1 x database name (such as mill)" in line for line in lines)


def test_a_database_file_of_a_test_set_is_refused_whatever_its_name(root):
    pub = bird(root, "dev") / "dev_databases" / "pub" / "pub.sqlite"
    pub.write_bytes((bird(root, "train") / "train_databases" / "mine" / "mine.sqlite").read_bytes())
    line = message(root, "data.train.total=40")
    assert "data.train and bird-dev share 1 x database file (such as pub)" in line
    assert "[formula_1, mine]" in line


def test_a_question_of_a_test_set_is_refused_about_the_same_tables_only(root, caplog):
    path = bird(root, "dev") / "dev.json"
    edit(path, 4, question=" who of DATABASE mine lives in new york, number 4? ")
    # About other tables it is one that anybody may ask: told.
    with caplog.at_level(logging.INFO, "launch.overlap"):
        check_questions(job(root, "data.train.total=40"))
    (line,) = [one.message for one in caplog.records if "share" in one.message]
    assert line == ("data.train and bird-dev share 1 x wording of a question (such as bird/dev/4)")
    # A database with the same tables and other rows is the same one.
    mine = bird(root, "train") / "train_databases" / "mine" / "mine.sqlite"
    pub = bird(root, "dev") / "dev_databases" / "pub" / "pub.sqlite"
    shutil.copy(mine, pub)
    with sqlite3.connect(pub) as db:
        db.execute("DELETE FROM person WHERE id = 4")
    db.close()
    assert "bird-dev share 1 x question (such as bird/dev/4)" in message(
        root, "data.train.total=40"
    )


def test_with_overlap_tell_a_run_goes_on_and_says_so(root, caplog):
    edit(root / "spider" / "test.json", 0, db_id="mine")
    with caplog.at_level(logging.WARNING):
        check_questions(job(root, "data.train.total=40", "data.overlap=tell"))
    assert "data.train and spider-test share 1 x database name (such as mine)" in caplog.text


def test_the_runs_own_test_questions_are_compared_with_too(root):
    """They need not be a published set's."""
    own = "data.test.sources=[{layout: bird, path: ., split: train, file: train/mine.json}]"
    records = json.loads((bird(root, "train") / "train.json").read_text())
    mine = [record for record in records if record["db_id"] == "mine"]
    (bird(root, "train") / "mine.json").write_text(json.dumps(mine))
    line = message(root, own, "data.train.total=40")
    assert "data.test share 1 x database name (such as mine)" in line
    beside = own.replace("[", "[{layout: spider, path: ., split: dev}, ")
    line = message(root, beside, "data.train.total=40")
    assert "data.test share 1 x database name (such as mine)" in line


def test_a_published_test_set_that_is_not_below_the_root_is_compared_with_too(root):
    edit(root / "spider" / "test.json", 0, db_id="mine")
    databases = bird(root, "train") / "train_databases"
    shutil.copytree(databases / "mine", root / "spider" / "test_database" / "mine")
    learn = "data.train.sources=[{layout: bird, path: ., split: train}]"
    test = "data.test.sources=[{layout: spider, path: ../spider, split: test}]"
    line = message(root / "bird", learn, test, "data.train.total=40")
    assert "data.train and data.test share 1 x database name (such as mine)" in line


def test_a_test_set_that_cannot_be_read_is_told(root, caplog):
    (root / "spider" / "test.json").write_text("{")
    shutil.copytree(root / "Spider-DK", root / "a" / "Spider-DK")
    shutil.copytree(root / "Spider-DK", root / "b" / "Spider-DK")
    shutil.rmtree(root / "Spider-DK")
    with caplog.at_level(logging.WARNING):
        check_questions(job(root))
    first, second = (record.message for record in caplog.records)
    assert first.startswith("spider-test is not compared with: ")
    assert "broken JSON" in first
    assert second.startswith("spider-dk is not compared with: is in ")


def test_validation_that_shares_databases_with_training_is_told(root, caplog):
    own = "data.validation={sources: [{layout: bird, path: ., split: train, limit: 3}]}"
    with caplog.at_level(logging.WARNING):
        check_questions(job(root, own))
    assert "data.train and data.validation share" in caplog.text


def test_the_check_reads_prepared_folders(root, tmp_path):
    edit(root / "spider" / "test.json", 0, db_id="mine")
    databases = bird(root, "train") / "train_databases"
    shutil.copytree(databases / "mine", root / "spider" / "test_database" / "mine")
    out = tmp_path / "prepared"
    arguments = ["--data-root", str(root), "--out", str(out), *QUICK, "data.overlap=tell"]
    prepare.main(arguments)
    line = message(out, "data.train.total=40")
    assert "data.train and spider-test share 1 x database name (such as mine)" in line
    named = "data.validation={sources: [{layout: prepared, path: ., file: spider-test.jsonl}]}"
    with pytest.raises(UserError, match="is the test set spider-test"):
        check_inputs(job(out, named))
    # Without a word of going on the folder is not made, though it is there.
    with pytest.raises(UserError, match="spider-test share 1 x database name"):
        prepare.main(arguments[:-1])


def test_generated_data_are_no_test_set(tmp_path):
    config: Any = load_config("progress-demo.yaml", [])
    check_overlap(config, {"train": (), "validation": (), "test": ()})


def test_spider_syn_as_published_is_learned_from(root):
    """Its training questions are Spider's in other words; neither is measured on."""
    both = "[{layout: spider, path: ., split: train}, {layout: spider_syn, path: ., split: train}]"
    check_questions(job(root, f"data.train.sources={both}", "data.train.total=40"))
