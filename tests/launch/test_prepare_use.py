"""What `launch.prepare` writes is what `launch.train` and `launch.eval` read."""

from __future__ import annotations

import json
import shutil
from collections import Counter
from pathlib import Path
from typing import Any

import pytest

from launch import prepare
from launch.config import PromptConfig, load_config
from launch.data.preflight import check_inputs, check_questions, held_out, load_split
from launch.data.prompts import Prompts
from launch.data.summary import describe_lengths
from launch.evaluation.testsets import SPLITS
from launch.tiny import train_tokenizer
from minirl.model.tokenizer import ChatTokenizer
from sqlenv.config import DataConfig, SingleTurnConfig
from sqlenv.data.layouts import SETS
from sqlenv.data.loading import LoadedData, load, read_all
from sqlenv.errors import UserError

from .conftest import json_lines
from .downloads import write
from .test_prepare import QUICK, run

EVERY = {"drop_failing_gold": False, "drop_empty_gold": False}


@pytest.fixture(scope="module")
def whole(downloads: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    place = tmp_path_factory.mktemp("out")
    shutil.copytree(downloads, place / "data")  # a test takes a database away
    (place / "mine.yaml").write_text("base: progress.yaml\nseed: 7\n")
    sets = ("spider-dev", "spider-train", "spider-test")
    with pytest.MonkeyPatch.context() as patch:
        patch.chdir(place)
        paths = ("--data-root", "data", "--out", "p", "--cfg", "mine.yaml")
        prepare.main([*paths, "--data", *sets, *QUICK])
    return place / "p"


@pytest.fixture
def prepared(whole: Path, tmp_path: Path) -> Path:
    """Copy the folder, to be damaged."""
    return shutil.copytree(whole, tmp_path / "p")


def load_dev(root: Path, **more: Any) -> LoadedData:
    return load(DataConfig(sources=(SETS["spider-dev"].at(root),), **more))


def test_job_yaml_names_what_was_prepared(whole: Path):
    """A run takes it with nothing added, from any folder."""
    config = load_config(str(whole / "job.yaml"), ["model.path=nowhere", "data.held_out=3"])
    assert config.seed == 7
    held = held_out(config, whole)
    assert held
    found = {split: load_split(config, split, whole, held=held).examples for split in SPLITS}
    assert {e.db_id for e in found["validation"]} == held
    assert {e.db_id for e in found["train"]} == {"farm", "shop", "bank"} - held
    assert {e.id.split("/")[1] for e in found["test"]} == {"dev"}
    # Spider's test set was prepared too, and chooses no checkpoint.
    default = load_config(str(whole / "job.yaml"), [])
    assert (default.data.validation, default.data.held_out) == (None, 200)
    check_questions(config)
    with pytest.raises(UserError, match=r"^model\.path: "):
        check_inputs(config)  # the data is all there


def test_prompts_show_value_matches_and_the_schema_is_not_read_again(
    whole: Path, monkeypatch: pytest.MonkeyPatch
):
    def read(*_arguments: Any, **_options: Any) -> None:
        raise AssertionError("the schema was read from the database")

    loaded = load_dev(whole)
    prompts = Prompts(PromptConfig(), SingleTurnConfig())
    prompts.add(loaded)
    with monkeypatch.context() as patch:
        patch.setattr("launch.data.prompts.read_schema", read)
        text = prompts.single_turn(loaded.examples[0])[-1].content
    assert "City text, -- example: ['New York', 'Oslo']\n" in text
    # In another form it is read, with what the data set says of its columns.
    other = Prompts(PromptConfig(example_values=1), SingleTurnConfig())
    other.add(loaded)
    assert "years of age, example: [30]" in other.single_turn(loaded.examples[0])[-1].content


def test_prompts_are_counted_as_a_run_counts_them(root: Path, tmp_path: Path):
    """With a tool, and a value that the schema alone does not show."""
    template = "{% for m in messages %}<|im_start|>{{ m.content }}<|im_end|>{% endfor %}"
    config = {"eos_token": "<|im_end|>", "chat_template": template}
    model = write(tmp_path / "model" / "tokenizer_config.json", config).parent
    train_tokenizer(["who lives in the city"], vocab_size=300).save(f"{model}/tokenizer.json")
    asked = json.loads((root / "spider" / "dev.json").read_text())
    asked[0]["question"] = "Who of Bern?"
    write(root / "spider" / "dev.json", asked)
    more = ("--cfg", "astra.yaml", "--tokenizer", str(model), "sampler.max_prompt_tokens=1000")
    job, tokenizer = load_config("astra.yaml", []), ChatTokenizer(model)
    tables = root / "spider" / "tables.json"
    for words in ("years of age", "years since the day of birth"):  # of a column, when run again
        tables.write_text(tables.read_text().replace("years of age", words))
        found = run(root, tmp_path / "p", "--data", "spider-dev", *more)["sets"]["spider-dev"]
        loaded, prompts = load_dev(tmp_path / "p", **EVERY), Prompts(job.prompt, job.env)
        prompts.add(loaded)
        first, second = map(prompts.schema_text, loaded.examples[:2])
        assert words in second
        assert ("'Bern'" in first, "'Bern'" in second) == (True, False)
        expected = [len(tokenizer.encode_chat(prompts.training(one))) for one in loaded.examples]
        told = [one["prompt_tokens"] for one in json_lines(tmp_path / "p" / "spider-dev.jsonl")]
        assert told == expected
        lengths = found["prompt_tokens"]
        assert (lengths["longest"], lengths["limit"], lengths["over_limit"]) == (max(told), 1000, 6)


def test_lengths_of_prompts_are_described():
    found = describe_lengths(Counter({10: 60, 20: 35, 30: 4, 40: 1}), 20)
    expected = {"median": 10, "p95": 20, "longest": 40, "limit": 20, "over_limit": 5}
    assert found is not None
    assert found.model_dump() == expected
    assert describe_lengths(Counter(), 20) is None


def test_any_reader_of_questions_takes_it(whole: Path):
    examples = read_all(SETS["spider-dev"].at(whole))
    assert [example.id for example in examples] == [f"spider/dev/{n}" for n in range(6)]
    assert len(load_dev(whole, **EVERY).examples) == 6
    assert len(load_dev(whole).examples) == 4
    with pytest.raises(UserError, match=r"bird-dev\.jsonl"):
        read_all(SETS["bird-dev"].at(whole))


def cut(path: Path) -> None:
    path.write_bytes(b"".join(path.read_bytes().splitlines(keepends=True)[:-1]))


def edit(path: Path) -> None:
    path.write_text(path.read_text().replace("'New York'", "'Old York'", 1))


def half_a_line(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-40])


@pytest.mark.parametrize(
    ("damage", "file"),
    [
        *((damage, "spider-dev.jsonl") for damage in (cut, edit, half_a_line, Path.unlink)),
        (Path.unlink, "prepared.json"),
    ],
)
def test_no_part_of_a_set_passes_for_the_whole(prepared: Path, damage: Any, file: str):
    damage(prepared / file)
    with pytest.raises(UserError, match=str(prepared)):
        load_dev(prepared)


def test_a_database_that_changed_or_went_is_told(whole: Path):
    database = load_dev(whole).examples[0].database
    content = database.read_bytes()
    for spoil in (lambda: database.write_bytes(content + bytes(4096)), database.unlink):
        spoil()
        with pytest.raises(UserError, match=r"club\.sqlite"):
            load_dev(whole)
    database.write_bytes(content)
