"""Tool-calling episodes: their evaluations, and a whole small run."""

import sqlite3
from dataclasses import replace
from typing import Any, Self
from unittest.mock import Mock

import pytest

from launch import job
from launch.config import TinyConfig, load_config
from launch.data.prompts import ReplyFormat, write_call
from launch.evaluation import sampling
from launch.evaluation.answers import GREEDY, AnswerFile, Decode
from launch.tiny import make_tiny
from minirl.config import SamplerConfig
from minirl.exchange import LostError, Message, UserError
from minirl.model.tokenizer import ChatTokenizer
from minirl.types import Reply
from sqlenv.config import AgenticConfig, ExecutorConfig
from sqlenv.envs.agentic import Agentic
from sqlenv.executor import Executor
from tests.minirl.test_rollout import Script
from tests.worlds import OVER_20

from .conftest import json_lines, loaded, succeed

CONFIG = AgenticConfig(calls=2)
REPLIES = (
    f"<think> singer </think> {write_call('SELECT names FROM singer', CONFIG)}",
    write_call(OVER_20, CONFIG),
    f"```sql\n{OVER_20}\n```",
)
SIZES: Any = {"hidden_size": 16, "intermediate_size": 16, "layers": 1, "heads": 1, "kv_heads": 1}
LIMITS = SamplerConfig(slots=1, max_prompt_tokens=200, max_response_tokens=900)


class Speaker(Script):
    """Says the same in every episode, but the answer alone in odd ones."""

    def __init__(self, tokenizer: ChatTokenizer) -> None:
        replies = [(*tokenizer.encode(reply), tokenizer.stop_ids[0]) for reply in REPLIES]
        super().__init__(replies, stop_ids=tokenizer.stop_ids)
        self._decode = tokenizer.decode

    def submit(self, request: Any) -> None:
        super().submit(request)
        if request.episode % 2:
            self.given[request.episode] = len(REPLIES) - 1

    def set_weights(self, weights: Any, *, version: int) -> None: ...

    send_weights = set_weights

    def free_memory(self) -> None: ...

    def numbers(self) -> dict[str, float]:
        return {}

    def apart(self) -> Self:
        return self

    def _reply(self, request: Any) -> Reply:
        reply = super()._reply(request)
        return replace(reply, text=self._decode(reply.ids[:-1]))

    @property
    def drawn(self) -> set[tuple[float, float]]:
        return {(request.temperature, request.top_p) for request in self.requests}


@pytest.fixture(scope="module")
def tokenizer(tmp_path_factory) -> ChatTokenizer:
    folder, shape = tmp_path_factory.mktemp("model") / "m", TinyConfig(vocab_size=600, **SIZES)
    marks = ReplyFormat("fence", CONFIG, brief=True).marks
    make_tiny(folder, [*REPLIES, ReplyFormat().answer(OVER_20)], shape, 0, marks=marks)
    return ChatTokenizer(folder)


@pytest.fixture(scope="module")
def env():
    with Executor(ExecutorConfig()) as executor:
        yield Agentic(
            CONFIG, executor=executor, first_prompt=lambda e: (Message("user", e.question),)
        )


@pytest.fixture
def script(tokenizer, monkeypatch):
    """A script in place of the sampler of an evaluation."""
    sampler = Speaker(tokenizer)
    monkeypatch.setattr(sampling, "make_sampler", lambda *_, **__: sampler)
    monkeypatch.setattr(sampling, "trained", lambda _model: None)
    return sampler


def evaluator(tokenizer: ChatTokenizer, env: Agentic, *settings: str):
    model: Any = None
    job = load_config("plain.yaml", settings)
    return sampling.Evaluator(model, tokenizer, env, LIMITS, job, max_turns=3)


def test_an_evaluation_tells_the_turns_of_each_answer(tokenizer, example, env, script, tmp_path):
    """SQL-ASTRA, table 3 and figure 5: a turn is a call; an answer without any is one too."""
    asked = [replace(example, id=str(number)) for number in range(4)]
    cache = AnswerFile(tmp_path)
    asks = evaluator(tokenizer, env)
    found = asks.answers(asked, GREEDY, cache, lambda *_: None, stops=True)
    assert [one.turns for one in found] == [(2,), (1,), (2,), (1,)]
    assert cache.read(asked) == found
    with pytest.raises(UserError, match=r"answers\.jsonl: has an answer to 1, and 2 is asked"):
        cache.read([asked[0], *asked[2:]])
    # After a kill before the last was kept whole: that question is asked again, no other one is.
    file = tmp_path / "answers.jsonl"
    file.write_bytes(file.read_bytes()[:-9])
    script.requests.clear()
    assert asks.answers(asked, GREEDY, cache, lambda *_: None, stops=True) == found
    assert len(script.drawn) == 1
    (sampled,) = asks.sample([example], Decode(2, 0.8, top_p=0.95), first=0)
    assert sampled.turns == (2, 1)
    assert len(sampled.queries) == 2


def test_an_environment_that_fails_ends_a_validation_after_which_the_run_is_saved(
    tokenizer, example, env, script, monkeypatch
):
    for error, words in (
        (sqlite3.OperationalError("database is locked"), "an environment has .*locked"),
        (UserError("a.sqlite: no such file; check the path"), "^a.sqlite: no such"),
    ):

        def step(*_, error=error):
            raise error

        monkeypatch.setattr(env, "step", step)
        with pytest.raises(LostError, match=words):
            evaluator(tokenizer, env).accuracy([example])


def test_validations_are_sampled_as_the_settings_say(tokenizer, example, env, script):
    """SQL-ASTRA, table 2: temperature 0.6, top-p 0.95."""
    drawn = ("evaluation.validation_temperature=0.6", "evaluation.top_p=0.95")
    asks = evaluator(tokenizer, env, *drawn)
    assert asks.accuracy([example]) == 1
    assert script.requests[0].episode == sampling.FIRST_EPISODE
    assert script.drawn == {(0.6, 0.95)}


def test_a_run_validates_as_its_settings_say(tiny, monkeypatch):
    drawn = ["evaluation.validation_temperature=0.6", "evaluation.top_p=0.95"]
    config, anything = load_config(str(tiny), drawn), Mock()
    monkeypatch.setattr(job, "Evaluator", lambda *given, **_: given[-1])
    made: Any = job._evaluator(config, anything, (anything, anything), None)
    assert made == config


# A whole run.


@pytest.mark.timeout(400)
def test_a_run_with_a_tool_and_adapters_is_measured(command, tiny, tmp_path):
    episode = [
        *("env={kind: agentic, calls: 2, response_chars: 80}", "evaluation.episode=agentic"),
        *("reward={kind: astra}", "sampler.max_response_tokens=300"),
        *("sampler.max_reply_tokens=160", "warm_start=null"),
    ]
    adapters = [
        *("train.lora.rank=4", "train.lora.targets=[q, v, down]"),
        # In so many episodes some call by chance, and a call costs: rewards differ within groups.
        *("train.steps=2", "train.prompts_per_step=4", "train.group_size=8"),
    ]
    line = ["--cfg", tiny, "run.dir=run", *episode]
    succeed(
        command,
        ["launch.train", *line, *adapters],
        ["launch.eval", "--checkpoint", "run", "--out", "out"],
        cwd=tmp_path,
    )
    metrics = json_lines(tmp_path / "run" / "metrics.jsonl")
    promised = {"reward/atr", "step_score/last", "rollout/calls"}
    for numbers in metrics:
        assert promised | {"rollout/bad_calls"} <= numbers.keys()
        shapes = [share for name, share in numbers.items() if name.startswith("shape/")]
        assert sum(shapes) == pytest.approx(1)
    assert metrics[0]["update/kl"] == pytest.approx(0, abs=1e-6)
    assert metrics[-1]["update/kl"] > 0.01
    parts = loaded(tmp_path / "out")["parts"]["turns"]
    assert sum(part["questions"] for part in parts.values()) == 6
    assert {int(turns) for turns in parts} <= {1, 2, 3}
    # Training measures the episode with the tool.
    ours, theirs = tmp_path / "out", tmp_path / "run" / "after"
    assert (ours / "predictions.jsonl").read_text() == (theirs / "predictions.jsonl").read_text()
