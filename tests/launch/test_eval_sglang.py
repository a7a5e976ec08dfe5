"""Evaluation and verbal RL of a policy that servers sample: what they are asked and told."""

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from launch import eval as evaluation
from launch.config import TinyConfig
from launch.tiny import make_tiny
from minirl.exchange import UserError
from minirl.model.tokenizer import ChatTokenizer
from tests.minirl.fake_sglang import Fake

from .conftest import TINY, json_lines, loaded, verbal_folder

QUESTIONS = 3
REPLY = "<sql>SELECT 1</sql>"
LONG = "sampler.max_prompt_tokens=2000"  # the tokenizer has seen no schema


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a config that reads it, and a model."""
    settings = {"candidates": 2, "attempts": 2, "judgements": 1, "max_tokens": 24}
    folder = verbal_folder(tmp_path_factory.mktemp("sglang"), settings, questions=QUESTIONS)
    shape = TinyConfig(**TINY["model"]["tiny"])
    make_tiny(folder / "model", [REPLY, "which name has the largest salary?"] * 40, shape, 0)
    return folder


@pytest.fixture
def fake(place: Path) -> Iterator[Fake]:
    tokenizer = ChatTokenizer(place / "model")
    ids = [*tokenizer.encode(REPLY), tokenizer.stop_ids[0]]
    shape = json.loads((place / "model" / "config.json").read_text())
    server = Fake(architectures=shape["architectures"], reply=ids)
    yield server
    server.close()


OUT = Path("evals", "model-sglang-spider-test-vote@2-seed0")
"""The folder of results that nobody names: its name has the sampler."""


def run(place: Path, fake: Fake, *more: str) -> dict[str, Any]:
    evaluation.main(
        [
            *("--cfg", str(place / "verbal.yaml"), "--checkpoint", str(place / "model")),
            *("--accel", "cpu", "--decode", "vote@2"),
            *(f"rollout.sglang.urls=[{fake.url}]", LONG, *more),
        ]
    )
    report = loaded(OUT)
    return {"questions": len(report["questions"]), **report["notes"]}


def test_votes_of_a_checkpoint_are_sampled_by_the_servers(place, fake, tmp_path, monkeypatch):
    monkeypatch.chdir(tmp_path)
    result = run(place, fake)
    assert (result["sampler"], result["questions"]) == ("sglang", QUESTIONS)
    assert len(fake.bodies) == 2 * QUESTIONS
    assert result["servers"] == {"sglang/requests": 2 * QUESTIONS}
    assert {body["sampling_params"]["temperature"] for body in fake.bodies} == {0.8}
    # The checkpoint's weights came before the first of them, once, and their copy is gone.
    assert fake.order.count("/update_weights_from_disk") == 1
    assert not list((OUT / "weights").iterdir())
    verdicts = json_lines(OUT / "predictions.jsonl")
    assert {verdict["sql"].replace(" ", "") for verdict in verdicts} == {"SELECT1"}
    run(place, fake)  # nobody is asked
    assert len(fake.bodies) == 2 * QUESTIONS
    with pytest.raises(UserError, match="--out"):
        run(place, fake, "--out", str(OUT), "rollout.backend=native")
