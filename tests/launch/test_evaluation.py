"""What an evaluation is by, its record in files, and where it goes on."""

import json
import re
import shutil
from pathlib import Path

import pytest

from launch import cli
from launch import eval as command
from launch.config import dump, load_config
from launch.evaluation.answers import GREEDY, Sampled
from launch.evaluation.results import read_report, write_result
from launch.evaluation.sampling import CheckpointSource
from launch.policy import policy_in
from launch.records import answer_line, write_answers
from minirl.exchange import UserError
from sqlenv.evaluators.comparators import CaseVerdict
from sqlenv.types import Example
from tests.worlds import make_spider

from .conftest import look_like_a_model, mistake, write_job
from .report_cases import summary, verdict


@pytest.mark.parametrize("content", [b'{"pred": "SELECT 1"}\n', b"[1]\n", b"{\n", b"\xff\n"])
def test_a_damaged_or_older_result_is_refused(tmp_path, content):
    write_result(tmp_path, summary(verdict(0)))
    with (tmp_path / "predictions.jsonl").open("ab") as file:
        file.write(content)
    with pytest.raises(UserError, match=r"predictions\.jsonl: line 2: .*repeat the command"):
        read_report(tmp_path)


def test_what_is_recorded_agrees_with_the_verdicts(tmp_path, database):
    """Also where the environment judged by its own rule."""
    sql = "SELECT name FROM emp"
    turns = [{"sql": "", "kind": "call", "correct": False}]
    turns.append({"sql": sql, "kind": "answer", "correct": False})
    line = {"id": "1", "trajectories": [{"turns": turns}]}
    example = Example("1", "?", "emp", database, sql)
    seen = {"status": "ok", "rows": [["ann"]]}
    outcome = CaseVerdict({"set": 1.0}, seen, seen)
    judged = [
        answer_line(example, Sampled((sql,), line=one), verdict(1, sql=sql), [outcome])
        for one in (line, None)
    ]
    write_answers(tmp_path, judged, [(), ()])
    lines = (tmp_path / "trajectories.jsonl").read_text().splitlines()[1:]
    episode, answer = (json.loads(one)["trajectories"][0] for one in lines)
    assert [turn["correct"] for turn in episode["turns"]] == [False, True]
    assert episode["correct"]
    assert [(turn["correct"], turn["result"]) for turn in answer["turns"]] == [(True, seen)]


# An evaluation goes on where settings and questions are the same.


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder of data, and one that looks like a model."""
    make_spider(tmp_path / "data")
    look_like_a_model(tmp_path / "model")
    write_job(tmp_path / "job.yaml", tmp_path / "data")
    return tmp_path


def test_answers_that_are_there_are_judged_again_and_not_sampled(place, monkeypatch):
    """Of other settings, questions or weights they are refused."""
    asked = []

    def sampled(_source, examples, file, *_):
        asked.append(len(examples))
        found = [Sampled(("SELECT 1",)) for _ in examples]
        file.write(examples, found)
        return found, {}

    def measure(*words: str) -> int:
        """Evaluate, and count how often anything was sampled."""
        line = ["--cfg", str(place / "job.yaml"), "--checkpoint", str(place / "model")]
        where = ["--data", "validation", f"data.root={place / 'data'}", "--out", str(place / "out")]
        command.main([*line, *where, *words])
        return len(asked)

    monkeypatch.setattr(cli, "use_accelerator", lambda _name: "cpu")
    monkeypatch.setattr(CheckpointSource, "_sample", sampled)
    assert measure() == measure() == 1
    assert measure("--by", "database", "--official") == 1
    for words in (
        ["sampler.temperature=0.5"], ["--decode", "vote@2"], ["prompt.example_values=1"], ["seed=3"]
    ):  # fmt: skip
        name = words[0].partition("=")[0].strip("-")
        told = mistake(measure, *words)
        assert re.search(rf"other settings \({name} is .* there and .* here\)", told)
    for file, old, new, key in (
        ("data/dev.json", "Who is there?", "Who is here?", "data.validation"),
        ("model/model-1.safetensors", "weights", "WEIGHTS", "model.path"),
    ):
        path = place / file
        content = path.read_text()
        path.write_text(content.replace(old, new))
        assert f"{key}: the files are others than when" in mistake(measure)
        path.write_text(content)
    assert measure() == 1
    (place / "out" / "answers.jsonl").unlink()
    assert measure() == 2


def trained(place: Path, *settings: str) -> tuple[Path, Path]:
    """Make a run of the job that has a checkpoint; return the folders of both."""
    run = place / "run"
    shutil.copytree(place / "model", run / "model")
    (run / "checkpoints" / "1").mkdir(parents=True)
    (run / "config.yaml").write_text(dump(load_config(str(place / "job.yaml"), settings)))
    return run, run / "checkpoints" / "1"


@pytest.mark.parametrize(
    ("setting", "of_the_run", "of_the_model"),
    [("null", "sql_tag", "any"), ("fence", "fence", "fence")],
)
def test_a_checkpoint_has_learned_where_its_query_is_and_a_model_has_not(
    place, setting, of_the_run, of_the_model
):
    _, checkpoint = trained(place)
    config = load_config(str(place / "job.yaml"), (f"evaluation.wrapping={setting}",))
    for folder, wrapping in ((checkpoint, of_the_run), (place / "model", of_the_model)):
        found = CheckpointSource.of(config, GREEDY, policy_in(folder), "cpu")
        assert found.config.answer_wrapping == wrapping


def test_the_model_of_a_run_is_where_the_command_says_that_it_is_now(place):
    _, checkpoint = trained(place, "model.tiny=null", f"model.path={place / 'gone'}")
    # Commands without settings are told where it is looked for.
    assert re.search(r"config\.yaml: model\.path: .*gone", mistake(policy_in, checkpoint))
    found = policy_in(checkpoint, [f"model.path={place / 'model'}"])
    assert found.model == place / "model"


def test_adapters_belong_to_the_model_that_the_warm_start_made(place):
    adapters = ("model.tiny=null", f"model.path={place / 'model'}", "train.lora.rank=2")
    run, checkpoint = trained(place, *adapters, "warm_start.steps=1")
    told = mistake(policy_in, checkpoint)
    assert told == f"{run}/warm/model: the adapters are of this model; bring it back"
    shutil.copytree(place / "model", run / "warm" / "model")
    assert policy_in(checkpoint).model == run / "warm" / "model"
