"""An evaluation is known by what it measured: other weights or data are another one, another place
is not.
"""

from __future__ import annotations

import os
import shutil
from pathlib import Path

import pytest

from exchange import UserError
from launch import cli
from launch import eval as command
from launch.config import load_config
from launch.evaluation.checkpoint import CheckpointSource
from launch.evaluation.replies import GREEDY
from launch.evaluation.responses import Sampled
from launch.evaluation.sources import SourceOutput
from launch.policy import policy_in

from .conftest import write_job
from .small_sets import make_pets, make_spider


@pytest.fixture
def place(tmp_path: Path) -> Path:
    """A folder of data, and one that looks like a model."""
    make_spider(tmp_path / "data")
    model = tmp_path / "model"
    model.mkdir()
    (model / "config.json").write_text("{}")
    (model / "tokenizer.json").write_text("{}")
    (model / "model.safetensors").write_bytes(b"weights")
    write_job(tmp_path / "job.yaml", tmp_path / "data")
    return tmp_path


@pytest.fixture
def measure(place, monkeypatch, capsys):
    """Return `measure(folder)`: what an evaluation of it does, sampling left out."""
    monkeypatch.setattr(cli, "use_accelerator", lambda _name: "cpu")
    asked = []

    def sampled(_source, examples, _sql, out, _show) -> SourceOutput:
        if not (out / "sampled").exists():
            asked.append(out)
            (out / "sampled").mkdir()
        return [Sampled(("SELECT 1",)) for _ in examples], {}

    monkeypatch.setattr(CheckpointSource, "answers", sampled)

    def run(folder: Path, *, data: str = "data") -> str:
        before = len(asked)
        line = ["--cfg", str(place / "job.yaml"), "--checkpoint", str(folder)]
        where = ["--data", "validation", f"data.root={place / data}", "--out", str(place / "out")]
        command.main([*line, *where])
        told = capsys.readouterr().out
        assert ("This evaluation is complete" in told) == (before == len(asked))
        return "measured" if before < len(asked) else "complete"

    return run


def test_other_weights_at_the_same_place_are_another_evaluation(place, measure):
    model = place / "model"
    assert measure(model) == "measured"
    assert measure(model) == "complete"
    (model / "model.safetensors").write_bytes(b"WEIGHTS")
    with pytest.raises(UserError, match=r"weights is '.*' there and '.*' here"):
        measure(model)
    (model / "model.safetensors").write_bytes(b"weights")
    assert measure(model) == "complete"


def test_the_same_weights_and_data_elsewhere_are_the_same_evaluation(place, measure):
    assert measure(place / "model") == "measured"
    (place / "model").rename(place / "moved")
    os.utime(place / "moved" / "model.safetensors", (1, 1))
    shutil.copytree(place / "data", place / "elsewhere")
    assert measure(place / "moved", data="elsewhere") == "complete"


@pytest.mark.parametrize("what", ["questions", "database"])
def test_other_data_at_the_same_place_is_another_evaluation(place, measure, what):
    assert measure(place / "model") == "measured"
    if what == "questions":
        path = place / "data" / "dev.json"
        path.write_text(path.read_text().replace("Who is there?", "Who is here?"))
    else:
        (place / "data" / "database" / "pets" / "pets.sqlite").unlink()
        make_pets(place / "data" / "database" / "pets" / "pets.sqlite", [("ann", 4)])
    with pytest.raises(UserError, match="holds results of other settings"):
        measure(place / "model")


def test_a_checkpoint_is_told_by_its_files(place):
    run = place / "run"
    shutil.copytree(place / "model", run / "model")
    shutil.copy(place / "job.yaml", run / "config.yaml")
    config = load_config(str(place / "job.yaml"), ())
    found = []
    for content in (b"one", b"two", b"one"):
        for number in "12":
            (run / "checkpoints" / number / "tree").mkdir(parents=True, exist_ok=True)
            (run / "checkpoints" / number / "tree" / "manifest").write_bytes(content)
        found += [
            CheckpointSource.of(
                config, GREEDY, policy_in(run / "checkpoints" / number), "cpu"
            ).identity
            for number in "12"
        ]
    assert found[0] == found[1] == found[4] != found[2]
    assert policy_in(run / "checkpoints" / "1").model == run / "model"


@pytest.mark.parametrize(
    ("setting", "of_the_run", "of_the_model"),
    [("null", "sql_tag", "any"), ("fence", "fence", "fence")],
)
def test_a_checkpoint_has_learned_where_its_query_is_and_a_model_has_not(
    place, setting, of_the_run, of_the_model
):
    run = place / "run"
    (run / "checkpoints" / "1").mkdir(parents=True)
    shutil.copytree(place / "model", run / "model")
    shutil.copy(place / "job.yaml", run / "config.yaml")
    config = load_config(str(place / "job.yaml"), (f"evaluation.wrapping={setting}",))
    for folder, wrapping in (
        (run / "checkpoints" / "1", of_the_run),
        (place / "model", of_the_model),
    ):
        found = CheckpointSource.of(config, GREEDY, policy_in(folder), "cpu")
        assert found.config.answer_wrapping == wrapping
