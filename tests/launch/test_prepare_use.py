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
from sqlenv.config import DataConfig, SingleTurnConfig
from sqlenv.data.loading import LoadedData, load, read_all
from sqlenv.demo import generate
from sqlenv.errors import UserError

from .conftest import TINY, Command
from .downloads import make_downloads
from .test_prepare import QUICK, lines

SPIDER = {"layout": "spider", "path": ".", "split": "dev"}


@pytest.fixture(scope="module")
def whole(tmp_path_factory: pytest.TempPathFactory) -> Path:
    root = make_downloads(tmp_path_factory.mktemp("data"))
    out = tmp_path_factory.mktemp("out") / "p"
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


@pytest.mark.timeout(300)  # three commands, each of which may take 110 seconds
def test_a_run_learns_and_is_measured_on_it(tmp_path: Path, command: Command):
    """Download, prepare, train, evaluate: each command reads what the one before has written."""
    sizes = TINY["data"]["demo"]
    config = load_config("progress-demo.yaml", [f"data.demo.{k}={v}" for k, v in sizes.items()])
    assert config.data.demo is not None
    generate(tmp_path / "download", config.data.demo)
    settings = {**TINY, "data": {**TINY["data"], "demo": None, "root": "download"}}
    settings["data"]["overlap"] = "tell"  # Spider's names, and none of its questions
    (tmp_path / "mine.yaml").write_text(yaml.safe_dump(settings))

    done = command(
        "launch.prepare", "--data-root", "download", "--cfg", "mine.yaml", "--out", "prepared",
        cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    done = command(
        "launch.train", "--cfg", "prepared/job.yaml", "run.dir=run", "train.steps=1",
        "warm_start.steps=1", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    noted = json.loads((tmp_path / "run" / "data.json").read_text())
    summary = json.loads((tmp_path / "prepared" / "prepared.json").read_text())["sets"]
    assert noted["test"]["fingerprint"]
    assert "golds executed" not in done.stderr
    done = command(
        "launch.eval", "--cfg", "prepared/job.yaml", "run.dir=run", "--checkpoint", "run",
        "--data", "test", "--out", "measured", "evaluation.questions=null",
        "data.test.drop_empty_gold=false", "data.test.drop_failing_gold=false", cwd=tmp_path,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    predictions = lines(tmp_path / "measured" / "predictions.jsonl")
    tests = lines(tmp_path / "prepared" / "spider-test.jsonl")
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
    with pytest.raises(UserError, match=r"^model.path: no config.json in .*nowhere"):
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
    with pytest.raises(UserError, match=r"no prepared.json with bird-dev.jsonl in it, but"):
        load(DataConfig.model_validate({"sources": [{**source, "layout": "bird"}]}))


# Damage.


def cut(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def double(path: Path) -> None:
    path.write_bytes(path.read_bytes() * 2)


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace("'New York'", "'Old York'", 1))


def half_a_line(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("damage", "expected"),
    [
        (cut, r"spider-dev\.jsonl: 5 questions, but 6 were prepared; it is cut off or was added"),
        (double, r"spider-dev\.jsonl: 12 questions, but 6 were prepared"),
        (edit, r"spider-dev\.jsonl: line 1 was changed after it was prepared; run launch.prep"),
        (half_a_line, r"spider-dev\.jsonl: broken JSON after 5 whole records"),
        (Path.unlink, r"no prepared.json with spider-dev.jsonl in it, but .*spider-test.jsonl"),
    ],
)
def test_no_part_of_a_set_passes_for_the_whole(prepared: Path, damage: Any, expected: str):
    damage(prepared / "spider-dev.jsonl")
    with pytest.raises(UserError, match=expected):
        load_dev(prepared)


def test_without_its_summary_a_folder_is_not_prepared(prepared: Path):
    (prepared / "prepared.json").unlink()
    for source in (SPIDER, {"layout": "prepared", "file": "spider-dev.jsonl"}):
        with pytest.raises(UserError, match="in it"):
            load(DataConfig.model_validate({"sources": [{**source, "path": prepared}]}))


def test_a_database_that_changed_or_went_is_told(prepared: Path):
    database = load_dev(prepared).examples[0].database
    content = database.read_bytes()
    database.write_bytes(content + bytes(4096))
    with pytest.raises(
        UserError, match=r"club.sqlite has 16,384 bytes now, but question spider/dev"
    ):
        load_dev(prepared)
    database.unlink()
    with pytest.raises(UserError, match=r"club.sqlite is not there any more, but question"):
        load_dev(prepared)
