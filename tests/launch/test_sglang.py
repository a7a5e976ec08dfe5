"""Verbal RL against a real SGLang server, with a proxy before it that counts what it is paid."""

from __future__ import annotations

import importlib.util
import json
import os
import subprocess
import sys
import urllib.request
from collections import Counter
from pathlib import Path

import pytest
from flax import nnx

from launch import verbal
from minirl import weights
from minirl.config import BatchingConfig, OptimizerConfig, SftConfig, TinyConfig
from minirl.sft import Demonstration, supervise
from minirl.tiny import make_tiny
from minirl.tokenizer import ChatTokenizer
from sqlenv.errors import UserError
from sqlenv.types import Message

from .chat_server import Chat, Failure
from .chat_server import serve as serve_chat
from .conftest import ROOT, TINY, verbal_folder
from .sglang_server import serve

QUESTIONS, JUDGEMENTS, KILL_AT = 3, 2, 12
ANSWERS = tuple(f"<sql>SELECT {number}</sql>" for number in range(4))


@pytest.fixture(scope="module")
def python() -> str:
    """Return the interpreter of an environment with SGLang, or skip."""
    named = os.environ.get("MINIRL_SGLANG_PYTHON")
    if not named and importlib.util.find_spec("sglang") is None:
        pytest.skip(
            "sglang is not installed here: set MINIRL_SGLANG_PYTHON to the interpreter of an "
            "environment that has it"
        )
    return named or sys.executable


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
    shape = TinyConfig(**TINY["model"]["tiny"])
    questions = [record["question"] for record in records(folder, "train_spider")]
    make_tiny(folder / "raw", [*questions, *ANSWERS], shape, 0)
    model, tokenizer = weights.load(folder / "raw"), ChatTokenizer(folder / "raw")
    shown = [
        Demonstration(((Message("user", question),),), (), ANSWERS[number % len(ANSWERS)])
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
def test_a_real_server_writes_candidates_and_is_paid_once(python, place, tmp_path):
    out = tmp_path / "out"
    named = ["--cfg", str(place / "verbal.yaml"), "--model", "tiny", "--out", str(out)]
    with serve(python, place / "model", tmp_path / "sglang.log") as server:
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
