"""Verbal RL and evaluation with real SGLang servers: by text, by tokens, and what is paid."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import yaml
from flax import nnx

from launch import eval as evaluation
from launch.build import SqlSide, serving
from launch.config import JobConfig, load_config
from launch.data.reply_format import write_call
from minirl.config import BatchingConfig, OptimizerConfig, SftConfig, TinyConfig
from minirl.model import huggingface
from minirl.model.lora import split
from minirl.model.tiny import make_tiny
from minirl.model.tokenizer import ChatTokenizer
from minirl.sample.rollout import flatten, rollout
from minirl.train.rollouts import make_sampler
from minirl.train.supervised import Demonstration, supervise
from minirl.types import Decoding, TokenRow
from sqlenv.config import AgenticConfig
from sqlenv.errors import UserError
from sqlenv.types import Message, Observation

from .chat_server import Chat, Failure
from .chat_server import serve as serve_chat
from .conftest import ROOT, TINY, verbal_folder
from .sglang_server import serve

QUESTIONS, JUDGEMENTS, KILL_AT = 3, 2, 12
ANSWERS = tuple(f"<sql>SELECT {number}</sql>" for number in range(4))
# A call until there is none left, then an answer.
CALL = f"{write_call('SELECT 1', AgenticConfig())}\n```sql\nSELECT 1\n```"


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a config that reads it, and a model that has learnt to write queries that run."""
    settings = {
        "candidates": 2, "attempts": 20, "judgements": JUDGEMENTS, "judge_retries": 1,
        "max_tokens": 24, "parallel": 1, "retries": 1, "timeout_s": 60,
    }  # fmt: skip
    folder = verbal_folder(tmp_path_factory.mktemp("sglang"), settings, questions=QUESTIONS)
    make_model(folder)
    return folder


def make_model(folder: Path) -> None:
    questions = [record["question"] for record in records(folder, "train_spider")]
    # Two answers to each: of some samples of a question, some are of each kind.
    shown = [
        ((Message("user", question),), ANSWERS[(n + other) % 4])
        for other in range(2)
        for n, question in enumerate(questions)
    ]
    teach(folder, shown, steps=120, together=12, learning_rate=0.01)


def teach(
    folder: Path,
    shown: Sequence[tuple[Observation, str]],
    *,
    steps: int,
    together: int,
    learning_rate: float = 0.02,
) -> None:
    """Make a model that answers prompts as it was shown, in `folder / "model"`."""
    shape = TinyConfig(**TINY["model"]["tiny"])
    texts = [text for prompt, answer in shown for text in (prompt[-1].content, answer)]
    make_tiny(folder / "raw", texts, shape, 0)
    model, tokenizer = huggingface.load(folder / "raw"), ChatTokenizer(folder / "raw")
    demonstrations = [Demonstration((prompt,), (), answer) for prompt, answer in shown]
    batching = BatchingConfig(groups_per_batch=together, prompt_multiple=64, answer_multiple=16)
    optimizer = OptimizerConfig(kind="muon", learning_rate=learning_rate, warmup_steps=2)
    config = SftConfig(
        steps=steps,
        groups_per_step=together,
        optimizer=optimizer,
        batching=batching,
        checkpoint_every=steps,
    )
    params = supervise(model, demonstrations, tokenizer, config, seed=0, folder=folder / "warm")
    nnx.update(model, params)
    huggingface.save(model, folder / "model", source=folder / "raw")


def records(folder: Path, name: str) -> list[dict]:
    return json.loads((folder / "data" / f"{name}.json").read_text(encoding="utf-8"))


class Proxy:
    """Passes requests on, adds up what the server says they cost, and kills a client once."""

    def __init__(self, server: str) -> None:
        self.server, self.client = server, None
        self.usage, self.paid = Counter(), Counter()

    def before(self, count: int) -> None:
        if count == KILL_AT and self.client is not None:
            self.client.kill()
            self.client.wait(20)

    def answer(self, body, earlier) -> Failure:
        if self.client is not None and self.client.poll() is not None:
            self.client = None
            return Failure(hang_up=True)
        request = urllib.request.Request(
            f"{self.server}/v1/chat/completions",
            json.dumps(body).encode(),
            {"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=60) as response:
            text = response.read().decode()
        usage = json.loads(text)["usage"]
        self.usage.update({name: usage[name] for name in ("prompt_tokens", "completion_tokens")})
        self.paid[json.dumps(body, sort_keys=True)] += 1
        return Failure(200, text)


def notes_of(out: Path) -> dict[str, Any]:
    return json.loads((out / "verdicts.json").read_text(encoding="utf-8"))["notes"]


@pytest.mark.timeout(600)
def test_a_real_server_writes_candidates_and_is_paid_once(sglang_python, place, tmp_path):
    out = tmp_path / "out"
    named = ["--cfg", str(place / "verbal.yaml"), "--model", "tiny", "--decode", "judge"]
    named += ["--out", str(out)]
    with serve(sglang_python, place / "model", tmp_path / "sglang.log") as server:
        proxy = Proxy(server)
        with serve_chat(Chat(proxy.answer, proxy.before)) as chat:
            line = [*named, "--endpoint", chat.url]
            proxy.client = subprocess.Popen(
                [sys.executable, "-m", "launch.eval", *line],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
            assert proxy.client.wait(120) != 0
            evaluation.main(line)
            result = notes_of(out)
            assert chat.requests == sum(proxy.paid.values()) + 1  # the one that it died of
    assert set(proxy.paid.values()) == {1}
    costs = result["cost"].values()
    assert sum(cost["calls"] for cost in costs) == sum(proxy.paid.values())
    for name, tokens in proxy.usage.items():
        assert sum(cost[name] for cost in costs) == tokens > 0
    choices = [json.loads(line) for line in (out / "choices.jsonl").read_text().splitlines()]
    assert len(choices) == QUESTIONS
    assert result["executable"] >= sum(len(choice["candidates"]) for choice in choices) > 0
    # Judging is beyond a model this small: its judgements are left out, and counted.
    sets = [choice for choice in choices if len(choice["candidates"]) == 2]
    assert sets
    assert all(choice["judged"] + choice["left_out"] == JUDGEMENTS for choice in sets)
    assert result["left_out"] > 0
    assert all(choice["sql"] in choice["candidates"] for choice in sets)
    with pytest.raises(UserError, match="still failing after 2 tries"):
        evaluation.main([*named[:-1], str(tmp_path / "gone"), "--endpoint", f"{server}/v1"])


@pytest.mark.timeout(600)
def test_an_evaluation_asks_a_real_server_by_text(sglang_python, place, tmp_path):
    named = ["--cfg", str(place / "verbal.yaml"), "--model", "tiny", "--out", str(tmp_path / "out")]
    with serve(sglang_python, place / "model", tmp_path / "sglang.log") as server:
        evaluation.main([*named, "--endpoint", f"{server}/v1", "--decode", "vote@2"])
    result = notes_of(tmp_path / "out")
    assert result["calls"] == 2 * QUESTIONS
    assert result["refused"] == 0
    lines = (tmp_path / "out" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [sample for line in lines for sample in json.loads(line)["samples"]]
    assert sum(sample.startswith("SELECT") for sample in samples) >= QUESTIONS


def agentic_config(place: Path) -> Path:
    config = yaml.safe_load((place / "verbal.yaml").read_text(encoding="utf-8"))
    config["env"] = {"kind": "agentic", "calls": 2, "response_chars": 80}
    config["reward"] = {"kind": "astra"}
    config["evaluation"]["episode"] = "agentic"
    limits = {"max_prompt_tokens": 2000, "max_response_tokens": 500, "max_reply_tokens": 80}
    config["sampler"] |= limits
    path = place / "agentic.yaml"
    path.write_text(yaml.safe_dump(config), encoding="utf-8")
    return path


def tokens(config: JobConfig, folder: Path, policy: Path) -> list[TokenRow]:
    """Play tool-calling episodes greedily with the sampler of a job."""
    model, tokenizer = huggingface.load(policy), ChatTokenizer(policy)
    with serving(config, policy, folder) as servers, SqlSide(config, folder) as sql:
        sampler = make_sampler(
            model, config.sampler, tokenizer, group_size=1, seed=0, servers=servers
        )
        sampler.set_weights(split(model)[1], version=7)
        groups = rollout(
            sampler,
            tokenizer,
            sql.evaluation_environment(),
            sql.examples("test", limit=8),
            config=config.sampler,
            group_size=1,
            first_episode=0,
            decoding=Decoding(0.0),
            max_turns=sql.evaluation_turns,
        )
    assert all(len(episode.turns) > 1 for (episode,) in groups)
    return [flatten(episode) for (episode,) in groups]


@pytest.mark.timeout(900)
def test_tool_calling_episodes_are_those_of_the_native_sampler(sglang_python, tmp_path):
    settings = {"candidates": 2, "attempts": 2, "judgements": 1, "max_tokens": 80}
    place = verbal_folder(tmp_path, settings, questions=8)
    path = agentic_config(place)
    asked = load_config(str(path), [])
    with SqlSide(asked, tmp_path / "shown") as sql:
        examples = sql.examples("train", limit=24)
        teach(place, [(sql.evaluation_prompt(one), CALL) for one in examples], steps=40, together=4)
    with serve(sglang_python, place / "model", tmp_path / "sglang.log") as server:
        there = ["rollout.backend=sglang", f"rollout.sglang.urls=[{server}]"]
        native, served = (
            tokens(load_config(str(path), more), tmp_path / f"tokens{len(more)}", place / "model")
            for more in ([], there)
        )
        for ours, theirs in zip(native, served, strict=True):
            assert ours.ids.tolist() == theirs.ids.tolist()
            np.testing.assert_allclose(ours.logprobs, theirs.logprobs, atol=1e-4)

        def run(command: Any, out: str, *more: str) -> dict[str, Any]:
            line = ["--cfg", str(path), "--checkpoint", str(place / "model"), "--accel", "cpu"]
            command.main([*line, "--out", str(tmp_path / out), *more])
            return notes_of(tmp_path / out)

        assert run(evaluation, "here")["sampler"] == "native"
        assert run(evaluation, "there", *there)["sampler"] == "sglang"
        result = run(evaluation, "verbal", "--decode", "judge", *there)
    ours, theirs = (tmp_path / name / "predictions.jsonl" for name in ("here", "there"))
    assert ours.read_bytes() == theirs.read_bytes()
    assert result["sampler"] == "sglang"
    assert result["cost"]["generate"]["calls"] >= 2 * 8
    assert result["cost"]["generate"]["completion_tokens"] > 0
