"""What `launch.prepare` writes is what `launch.train` and `launch.eval` read."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import yaml

from launch import prepare
from launch.config import PromptConfig, load_config
from launch.data.preflight import check_inputs, held_out, load_split
from launch.data.prompts import Prompts
from launch.evaluation.testsets import SPLITS
from sqlenv.config import DataConfig, DemoConfig, SingleTurnConfig
from sqlenv.data.loading import LoadedData, load, read_all
from sqlenv.demo import generate
from sqlenv.errors import UserError

from .conftest import TINY, Command, json_lines
from .test_prepare import QUICK

SPIDER = {"layout": "spider", "path": ".", "split": "dev"}


@pytest.fixture(scope="module")
def whole(downloads: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    out = tmp_path_factory.mktemp("out") / "p"
    root = shutil.copytree(downloads, out.with_name("data"))  # a test takes a database away
    arguments = ["--data-root", str(root), "--out", str(out), "--data", "spider-dev"]
    prepare.main([*arguments, "spider-train", "spider-test", *QUICK])
    return out


@pytest.fixture
def prepared(whole: Path, tmp_path: Path) -> Path:
    """Copy the folder, to be damaged."""
    return shutil.copytree(whole, tmp_path / "p")


def load_dev(root: Path, **more: Any) -> LoadedData:
    source = {**SPIDER, "path": root}
    return load(DataConfig.model_validate({"sources": [source], **more}))


def test_a_policy_learns_and_is_measured_on_it(place: Path, tmp_path: Path, command: Command):
    """Download, prepare, train, evaluate: each command reads what the one before has written."""
    generate(tmp_path / "download", DemoConfig(**TINY["data"]["demo"]))
    settings = {**TINY, "data": {**TINY["data"], "demo": None, "root": "download"}}
    settings["data"]["overlap"] = "tell"  # Spider's names, and none of its questions
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))

    def run(module: str, *more: str) -> None:
        done = command(f"launch.{module}", *more, cwd=tmp_path)
        assert done.returncode == 0, done.stderr

    run("prepare", "--data-root", "download", "--cfg", "mine.yaml", "--out", "prepared")
    job = ("--cfg", "prepared/job.yaml", "run.dir=run")
    run("train", *job, "--dry-run")
    whole = (f"data.test.drop_{flaw}_gold=false" for flaw in ("empty", "failing"))
    measured = ("--checkpoint", str(place / "finished"), "--data", "test", "--out", "measured")
    run("eval", *job, *measured, "evaluation.questions=null", *whole)
    summary = json.loads((tmp_path / "prepared" / "prepared.json").read_text())["sets"]
    predictions = json_lines(tmp_path / "measured" / "predictions.jsonl")
    tests = json_lines(tmp_path / "prepared" / "spider-test.jsonl")
    assert [one["id"] for one in predictions] == [one["id"] for one in tests]
    assert len(tests) == summary["spider-test"]["questions"]


def test_job_yaml_names_what_was_prepared(prepared: Path):
    config = load_config(str(prepared / "job.yaml"), ["model.path=nowhere", "data.held_out=3"])
    training = {"train_spider", "train_others"}
    held = held_out(config, prepared)
    assert held
    found = {split: load_split(config, split, prepared, held=held).examples for split in SPLITS}
    for split, examples in found.items():
        files = {"dev"} if split == "test" else training
        assert {e.id.split("/")[1] for e in examples} <= files
    assert {e.db_id for e in found["validation"]} == held
    assert {e.db_id for e in found["train"]} == {"farm", "shop", "bank"} - held
    # Spider's test set was prepared too, and chooses no checkpoint.
    default = load_config(str(prepared / "job.yaml"), [])
    assert (default.data.validation, default.data.held_out) == (None, 200)
    with pytest.raises(UserError, match=r"^model\.path: "):
        check_inputs(config)  # the data is all there


def test_prompts_show_the_hints_and_the_schema_is_not_read_again(
    prepared: Path, monkeypatch: pytest.MonkeyPatch
):
    def read(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("the schema was read from the database")

    loaded = load_dev(prepared)
    prompts = Prompts(PromptConfig(), SingleTurnConfig())
    prompts.add(loaded)
    with monkeypatch.context() as patch:
        patch.setattr("launch.data.prompts.read_schema", read)
        text = prompts.single_turn(loaded.examples[0])[-1].content
    assert "City TEXT, -- example: ['New York', 'Oslo']\n" in text
    # In another form it is read, with what the data set says of its columns.
    other = Prompts(PromptConfig(example_values=1), SingleTurnConfig())
    other.add(loaded)
    assert "years of age, example: [30]" in other.single_turn(loaded.examples[0])[-1].content


def test_any_reader_of_questions_takes_it(prepared: Path):
    source = {**SPIDER, "path": prepared}
    (checked,) = DataConfig.model_validate({"sources": [source]}).sources
    examples = read_all(checked)
    assert [example.id for example in examples] == [f"spider/dev/{n}" for n in range(6)]
    assert len(load_dev(prepared, drop_failing_gold=False, drop_empty_gold=False).examples) == 6
    assert len(load_dev(prepared).examples) == 4
    with pytest.raises(UserError, match=r"bird-dev\.jsonl"):
        load(DataConfig.model_validate({"sources": [{**source, "layout": "bird"}]}))


# Damage.


def cut(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace("'New York'", "'Old York'", 1))


def half_a_line(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize("damage", [cut, edit, half_a_line, Path.unlink])
def test_no_part_of_a_set_passes_for_the_whole(prepared: Path, damage: Any):
    damage(prepared / "spider-dev.jsonl")
    with pytest.raises(UserError, match=r"spider-dev\.jsonl"):
        load_dev(prepared)


def test_without_its_summary_a_folder_is_not_prepared(prepared: Path):
    (prepared / "prepared.json").unlink()
    for source in (SPIDER, {"layout": "prepared", "file": "spider-dev.jsonl"}):
        with pytest.raises(UserError):
            load(DataConfig.model_validate({"sources": [{**source, "path": prepared}]}))


def test_a_database_that_changed_or_went_is_told(prepared: Path):
    database = load_dev(prepared).examples[0].database
    database.write_bytes(database.read_bytes() + bytes(4096))
    with pytest.raises(UserError, match=r"club\.sqlite"):
        load_dev(prepared)
    database.unlink()
    with pytest.raises(UserError, match=r"club\.sqlite"):
        load_dev(prepared)
