"""Verbal RL and evaluation with real SGLang servers: by text, by tokens, and what is paid."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import yaml
from flax import nnx

from launch import eval as evaluation
from launch import verbal
from launch.forms import write_call
from minirl import weights
from minirl.config import BatchingConfig, OptimizerConfig, SftConfig, TinyConfig
from minirl.sft import Demonstration, supervise
from minirl.tiny import make_tiny
from minirl.tokenizer import ChatTokenizer
from sqlenv.config import AgenticConfig
from sqlenv.errors import UserError
from sqlenv.types import Message

from .chat_server import Chat, Failure
from .chat_server import serve as serve_chat
from .conftest import ROOT, TINY, verbal_folder
from .sglang_server import OPTIONS, VARIABLES, serve

QUESTIONS, JUDGEMENTS, KILL_AT = 3, 2, 12
ANSWERS = tuple(f"<sql>SELECT {number}</sql>" for number in range(4))
# Each is a call until there is none left, then an answer.
CALLS = tuple(
    f"{write_call(f'SELECT {number}', AgenticConfig())}\n```sql\nSELECT {number}\n```"
    for number in range(2)
)


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


def make_model(folder: Path, answers: tuple[str, ...] = ANSWERS) -> None:
    shape = TinyConfig(**TINY["model"]["tiny"])
    questions = [record["question"] for record in records(folder, "train_spider")]
    make_tiny(folder / "raw", [*questions, *answers], shape, 0)
    model, tokenizer = weights.load(folder / "raw"), ChatTokenizer(folder / "raw")
    shown = [
        Demonstration(((Message("user", question),),), (), answers[number % len(answers)])
        for number, question in enumerate(questions)
    ]
    batching = BatchingConfig(groups_per_batch=12, prompt_multiple=64, answer_multiple=16)
    optimizer = OptimizerConfig(kind="muon", learning_rate=0.02, warmup_steps=2)
    config = SftConfig(
        steps=60, groups_per_step=12, optimizer=optimizer, batching=batching, checkpoint_every=60
    )
    params = supervise(model, shown, tokenizer, config, seed=0, folder=folder / "warm")
    nnx.update(model, params)
    weights.save(model, folder / "model", source=folder / "raw")


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


@pytest.mark.timeout(600)
def test_a_real_server_writes_candidates_and_is_paid_once(sglang_python, place, tmp_path):
    out = tmp_path / "out"
    named = ["--cfg", str(place / "verbal.yaml"), "--model", "tiny", "--out", str(out)]
    with serve(sglang_python, place / "model", tmp_path / "sglang.log") as server:
        proxy = Proxy(server)
        with serve_chat(Chat(proxy.answer, proxy.before)) as chat:
            line = [*named, "--endpoint", chat.url]
            proxy.client = subprocess.Popen(
                [sys.executable, "-m", "launch.verbal", *line],
                env=os.environ | {"PYTHONPATH": str(ROOT)},
            )
            assert proxy.client.wait(120) != 0
            verbal.main(line)
            result = json.loads((out / "result.json").read_text(encoding="utf-8"))
            assert chat.requests == sum(proxy.paid.values()) + 1  # the one that it died of
    assert set(proxy.paid.values()) == {1}
    costs = result["cost"].values()
    assert sum(cost["calls"] for cost in costs) == sum(proxy.paid.values())
    for name, tokens in proxy.usage.items():
        assert sum(cost[name] for cost in costs) == tokens > 0
    choices = [json.loads(line) for line in (out / "choices.jsonl").read_text().splitlines()]
    assert len(choices) == QUESTIONS == result["questions"]
    assert result["executable"] >= sum(len(choice["candidates"]) for choice in choices) > 0
    # Judging is beyond a model this small: its judgements are left out, and counted.
    sets = [choice for choice in choices if len(choice["candidates"]) == 2]
    assert sets
    assert all(choice["judged"] + choice["left_out"] == JUDGEMENTS for choice in sets)
    assert result["left_out"] > 0
    assert all(choice["sql"] in choice["candidates"] for choice in sets)
    with pytest.raises(UserError, match="still failing after 2 tries"):
        verbal.main([*named[:-1], str(tmp_path / "gone"), "--endpoint", f"{server}/v1"])


@pytest.mark.timeout(600)
def test_an_evaluation_asks_a_real_server_by_text(sglang_python, place, tmp_path):
    named = ["--cfg", str(place / "verbal.yaml"), "--model", "tiny", "--out", str(tmp_path / "out")]
    with serve(sglang_python, place / "model", tmp_path / "sglang.log") as server:
        evaluation.main([*named, "--endpoint", f"{server}/v1", "--decode", "vote@2"])
    result = json.loads((tmp_path / "out" / "result.json").read_text(encoding="utf-8"))
    assert (result["questions"], result["calls"]) == (QUESTIONS, 2 * QUESTIONS)
    assert result["refused"] == 0
    lines = (tmp_path / "out" / "predictions.jsonl").read_text(encoding="utf-8").splitlines()
    samples = [sample for line in lines for sample in json.loads(line)["samples"]]
    assert sum(sample.startswith("SELECT") for sample in samples) >= QUESTIONS


@pytest.mark.timeout(900)
def test_tool_calling_episodes_are_those_of_the_native_sampler(sglang_python, tmp_path):
    """Two servers are launched; the greedy episodes of both samplers are the same."""
    settings = {"candidates": 2, "attempts": 2, "judgements": 1, "max_tokens": 80}
    place = verbal_folder(tmp_path, settings, questions=8)
    make_model(place, CALLS)
    config = yaml.safe_load((place / "verbal.yaml").read_text(encoding="utf-8"))
    config["env"] = {"kind": "agentic", "calls": 2, "response_chars": 80}
    config["reward"] = {"kind": "astra"}
    config["evaluation"]["episode"] = "agentic"
    config["sampler"] |= {"max_prompt_tokens": 3000, "max_response_tokens": 500}
    config["sampler"]["max_reply_tokens"] = 80
    config["rollout"] = {
        "sglang": {
            "launch": 2, "python": sglang_python, "variables": VARIABLES,
            "arguments": {name: value for name, value in OPTIONS.items() if name != "dtype"},
        }
    }  # fmt: skip
    (place / "agentic.yaml").write_text(yaml.safe_dump(config), encoding="utf-8")

    def run(command: Any, out: str, *more: str) -> dict[str, Any]:
        line = ["--cfg", str(place / "agentic.yaml"), "--checkpoint", str(place / "model")]
        command.main([*line, "--accel", "cpu", "--out", str(tmp_path / out), *more])
        return json.loads((tmp_path / out / "result.json").read_text(encoding="utf-8"))

    assert run(evaluation, "native")["sampler"] == "native"
    assert run(evaluation, "served", "rollout.backend=sglang")["sampler"] == "sglang"
    native, served = (tmp_path / name / "predictions.jsonl" for name in ("native", "served"))
    assert native.read_bytes() == served.read_bytes()
    answers = {json.loads(line)["sql"] for line in native.read_text().splitlines()}
    assert answers & {"SELECT 0", "SELECT 1"}
    logs = [(tmp_path / "served" / f"sglang-{n}.log").read_text() for n in range(2)]
    # Besides what each is asked at the start: episodes of three turns.
    assert all(log.count("POST /generate") > 3 * 3 for log in logs)
    assert sum(log.count("POST /generate") for log in logs) >= 3 * 8
    cost = run(verbal, "verbal", "rollout.backend=sglang")["cost"]
    assert cost["generate"]["calls"] >= 2 * 8
