"""With real SGLang servers: evaluation and rollouts, by text and under changing weights; runs."""

import json
import os
import re
import shlex
import shutil
import signal
import subprocess
import sys
import urllib.request
from collections.abc import Callable, Generator, Mapping
from contextlib import suppress
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest
from flax import nnx

from launch import config as configs
from launch import eval as evaluation
from launch.config import TinyConfig
from launch.tiny import make_tiny
from minirl.config import (
    BatchingConfig,
    LoraConfig,
    SamplerConfig,
    SftConfig,
    SftOptimizerConfig,
    SglangConfig,
)
from minirl.exchange import Message
from minirl.model import huggingface
from minirl.model.lora import add_adapters, split, trained
from minirl.model.sharding import make_mesh
from minirl.model.tokenizer import ChatTokenizer
from minirl.sglang.sampler import Servers, SglangSampler
from minirl.train.rollouts import make_sampler
from minirl.train.supervised import Demonstration, Lessons, supervise
from minirl.types import Reply, Request, Sampler
from tests.forked import Copy
from tests.minirl import toy
from tests.waiting import wait_until
from tests.worlds import make_demo

from .conftest import ROOT, TINY, json_lines, loaded, write_job
from .sglang_server import ARGUMENTS, VARIABLES, serve

QUESTIONS, JUDGEMENTS = 3, 2
ANSWERS = tuple(f"<sql>SELECT {number}</sql>" for number in range(4))


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Data, a config that reads it, and a model that has learnt to write queries that run."""
    settings = {
        "candidates": 2, "attempts": 20, "judgements": JUDGEMENTS, "judge_retries": 1,
        "max_tokens": 24, "parallel": 1, "retries": 1, "timeout_s": 60,
    }  # fmt: skip
    folder = tmp_path_factory.mktemp("sglang")
    data, asked = make_demo(folder / "data", 12), {**TINY["evaluation"], "questions": QUESTIONS}
    write_job(folder / "verbal.yaml", data, evaluation=asked, endpoint=settings)
    records = json.loads((folder / "data" / "train_spider.json").read_text(encoding="utf-8"))
    # Two answers to each: of some samples of a question, some are of each kind.
    shown = [
        (record["question"], ANSWERS[(n + other) % 4])
        for other in range(2)
        for n, record in enumerate(records)
    ]
    raw, shape = folder / "raw", TinyConfig(**TINY["model"]["tiny"])
    make_tiny(raw, [text for each in shown for text in each], shape, 0)
    model, tokenizer = huggingface.load(raw), ChatTokenizer(raw)
    batching = BatchingConfig(prompt_multiple=64, answer_multiple=16)
    optimizer = SftOptimizerConfig(
        kind="muon", learning_rate=0.01, warmup_steps=2, schedule="constant"
    )
    config = SftConfig(
        steps=120, groups_per_step=12, checkpoint_every=120, optimizer=optimizer, batching=batching
    )
    demonstrations = [
        Demonstration(((Message("user", question),),), (answer,)) for question, answer in shown
    ]
    lessons = Lessons.of(demonstrations, tokenizer, config, seed=0)
    nnx.update(model, supervise(model, lessons, config, folder=folder / "warm"))
    huggingface.save(model, folder / "model", source=raw)
    return folder


@pytest.mark.timeout(600)
def test_a_real_server_writes_candidates_and_judges_them_by_text(sglang_python, place, tmp_path):
    out = tmp_path / "out"
    named = ["--cfg", str(place / "verbal.yaml"), "--model", "tiny", "--decode", "judge"]
    with serve(sglang_python, place / "model", tmp_path) as (url,):
        evaluation.main([*named, "--out", str(out), "--endpoint", f"{url}/v1"])
    result = loaded(out)["notes"]
    for cost in result["cost"].values():
        assert min(cost[name] for name in ("calls", "prompt_tokens", "completion_tokens")) > 0
    choices = [one["choice"] for one in loaded(out)["questions"]]
    assert len(choices) == QUESTIONS
    assert result["executable"] >= sum(len(choice["candidates"]) for choice in choices) > 0
    # Judging is beyond a model this small: its judgements are left out, and counted.
    sets = [choice for choice in choices if len(choice["candidates"]) == 2]
    assert sets
    assert all(choice["judged"] + choice["left_out"] == JUDGEMENTS for choice in sets)
    assert result["left_out"] > 0
    assert all(choice["sql"] in choice["candidates"] for choice in sets)


# Weights that change while a server writes: tokens know which ones sampled them.

LONGEST, EPISODES = 1000, 8


def logprobs_of(model, ids):
    """Return the log-probability of each id but the first."""
    return toy.next_logprobs(model, ids)[np.arange(len(ids) - 1), ids[1:]]


def running(url):
    with urllib.request.urlopen(f"{url}/v1/loads", timeout=30) as answer:
        return sum(one["num_running_reqs"] for one in json.load(answer)["loads"])


@pytest.mark.timeout(900)
def test_a_reply_of_two_weights_has_the_log_probabilities_of_both(sglang_python, tmp_path):
    folder = tmp_path / "model"
    make_tiny(folder, ["How many students are there?"], TinyConfig(**TINY["model"]["tiny"]), 0)
    model, tokenizer = huggingface.load(folder), ChatTokenizer(folder)
    graph, old = nnx.split(model)
    key = jax.random.key(0)
    new = jax.tree.map(lambda leaf: leaf + 0.05 * jax.random.normal(key, leaf.shape), old)

    prompt = tuple(range(100, 140))
    asked = [Request(episode, (*prompt, episode + 1), LONGEST) for episode in range(EPISODES)]
    replies = {}
    limits = SamplerConfig(max_prompt_tokens=64, max_response_tokens=LONGEST)
    with serve(sglang_python, folder, tmp_path) as (url,):
        config = SglangConfig(urls=(url,))
        with Servers(config, folder, limits, dtype="float32", seed=0, folder=tmp_path) as servers:
            sampler = SglangSampler(tokenizer, servers)
            sampler.set_weights(old, version=3)
            for request in asked:
                sampler.submit(request)
            wait_until(lambda: running(url) >= EPISODES // 2, limit_s=60)
            sampler.set_weights(new, version=4)
            while len(replies) < EPISODES:
                replies.update(sampler.advance(max_steps=1))
            numbers = sampler.numbers()
    # None was asked twice, none was given up.
    assert numbers["sglang/requests"] == EPISODES
    assert numbers["sglang/retries"] == numbers["sglang/left_out"] == 0
    mixed = 0
    for episode, reply in replies.items():
        versions = np.array(reply.versions)
        assert len(versions) == len(reply.ids) == len(reply.logprobs)
        assert (np.diff(versions) >= 0).all()
        assert set(reply.versions) <= {3, 4}
        mixed += len(set(reply.versions)) == 2
        ids = [*asked[episode].ids, *reply.ids]
        for version, params in ((3, old), (4, new)):
            own = logprobs_of(nnx.merge(graph, params), ids)[-len(reply.ids) :]
            gap = np.abs(own - np.array(reply.logprobs))[versions == version]
            assert (gap < 1e-4).all()
    assert mixed >= 1


# New weights come to two real servers, whole or as adapters, while a request is under way.


LIMITS = SamplerConfig(max_prompt_tokens=40, max_response_tokens=24)
LONG = 64
# On a CPU SGLang keeps no states beside those in use, which overlapping batches would need.
FLAGS = {"qwen2": (), "qwen3.5": ("disable-overlap-schedule",)}


@pytest.fixture(scope="module", params=["qwen2", "qwen3.5"])
def kind(request) -> str:
    return request.param


@pytest.fixture(scope="module")
def model(kind, tmp_path_factory) -> Path:
    folder = tmp_path_factory.mktemp("push") / "model"
    shape = TINY["model"]["tiny"] | {"kind": kind, "layers": 4}
    make_tiny(folder, ["SELECT name FROM emp"], TinyConfig(**shape), 0)
    return folder


@pytest.fixture
def urls(sglang_python, kind, model, tmp_path) -> Generator[tuple[str, ...]]:
    with serve(sglang_python, model, tmp_path, count=2, flags=FLAGS[kind]) as urls:
        yield urls


def with_tower(model, folder):
    """Copy a Qwen3.5 as it is published, with a vision tower, which servers leave out."""
    shutil.copytree(model, folder)
    config = {
        "model_type": "qwen3_5",
        "architectures": ["Qwen3_5ForConditionalGeneration"],
        "text_config": json.loads((model / "config.json").read_text()),
        "vision_config": {"model_type": "qwen3_5_vision"},
        "tie_word_embeddings": True,
        "language_model_only": True,
    }
    (folder / "config.json").write_text(json.dumps(config))
    return folder


def changed(params, rng, scale):
    """Move all weights, also those that begin with 0."""
    return jax.tree.map(
        lambda leaf: leaf + rng.normal(0, scale, leaf.shape).astype(np.float32), params
    )


def greedy_turns(sampler: Sampler) -> list[Reply]:
    """Return the greedy replies of an episode of two turns."""
    replies, request = [], Request(9, (5, 6, 7), 10, 0.0)
    for _ in range(2):
        sampler.submit(request)
        while not (ended := sampler.advance(max_steps=32)):
            pass
        ((_, reply),) = ended
        replies.append(reply)
        request = replace(request, ids=(*request.ids, *reply.ids, 8, 9))
    sampler.release(9)
    return replies


def gaps_of(servers, policy, weights, episode, tokenizer):
    """Let a server sample 16 tokens; return by how much its log-probabilities are off those of the
    policy with each of these weights, on average.
    """
    request = Request(episode, (5, 6, 7), 16)
    reply = servers.start(servers.pool.sample(request, tokenizer.stop_ids)).result(200)
    graph, _, frozen = split(policy)
    ids = [*request.ids, *reply.ids]
    own = [logprobs_of(nnx.merge(graph, one, frozen), ids)[-len(reply.ids) :] for one in weights]
    return [np.abs(one - np.array(reply.logprobs)).mean() for one in own]


@pytest.mark.timeout(900)
def test_servers_compute_what_the_learner_does(model, urls, tmp_path):
    """And their greedy replies are the native sampler's. The weights of both are split over four
    devices.
    """
    mesh = make_mesh({"fsdp": 2, "tensor": 2}, jax.devices()[:4])
    policy, tokenizer = huggingface.load(model, mesh=mesh), ChatTokenizer(model)
    params, rng = trained(policy), np.random.default_rng(0)
    native = make_sampler(policy, LIMITS, tokenizer, group_size=1, seed=0)
    config = SglangConfig(urls=urls, wait_s=60)
    told = []
    with Servers(config, model, LIMITS, dtype="float32", seed=0, folder=tmp_path) as servers:
        sampler = make_sampler(policy, LIMITS, tokenizer, group_size=1, seed=0, servers=servers)
        assert isinstance(sampler, SglangSampler)
        for version in range(3):
            before = params
            params = changed(jax.tree.map(lambda leaf: leaf * 1.2, params), rng, 0.02)
            if version == 1:
                request = Request(1, (5, 6, 7), LONG)
                asked = servers.start(servers.pool.sample(request, tokenizer.stop_ids))
            sampler.set_weights(params, version=version)
            for episode in range(len(urls)):
                close, far = gaps_of(servers, policy, (params, before), episode, tokenizer)
                assert close < 1e-4
                assert far > 1e-2  # what the weights of the step before would be off by
            native.set_weights(params, version=version)
            for served, own in zip(greedy_turns(sampler), greedy_turns(native), strict=True):
                assert served.ids == own.ids
                np.testing.assert_allclose(served.logprobs, own.logprobs, atol=1e-4)
            told.append(sampler.numbers())
        assert 0 < len(asked.result(200).ids) <= LONG
        told.append(sampler.numbers())
    assert sum(numbers["sglang/requests"] for numbers in told) == 1 + 3 * (len(urls) + 2)
    assert told[0]["sglang/servers"] == 2
    for numbers in told:
        # A reply that old and new weights wrote together may be asked for once more.
        failed = {key for key, value in numbers.items() if "/failed_" in key and value}
        assert failed <= {"sglang/failed_stale"}
    assert list(tmp_path.rglob("*.safetensors")) == []


@pytest.mark.timeout(900)
def test_a_server_is_given_adapters_alone(sglang_python, kind, model, tmp_path):
    """Some MB are pushed and nothing is paused: a reply under way is all of one version."""
    if kind == "qwen3.5":
        model = with_tower(model, tmp_path / "model")
    lora = LoraConfig(rank=4, targets=("q", "v", "down", "in_qkv", "out"))
    policy, tokenizer = huggingface.load(model), ChatTokenizer(model)
    add_adapters(policy, lora, seed=0)
    params, rng = trained(policy), np.random.default_rng(0)
    arguments = ARGUMENTS | {"lora-backend": "torch_native"} | dict.fromkeys(FLAGS[kind], True)
    config = SglangConfig(
        launch=1, python=sglang_python, arguments=arguments, variables=VARIABLES, wait_s=480
    )
    request = Request(1, (5, 6, 7), LONG)
    with Servers(
        config, model, LIMITS, dtype="float32", seed=0, folder=tmp_path, lora=lora
    ) as servers:
        sampler = make_sampler(policy, LIMITS, tokenizer, group_size=1, seed=0, servers=servers)
        assert isinstance(sampler, SglangSampler)
        before, versions = params, []
        for version in range(4):
            sampler.set_weights(params, version=version)
            asked = servers.start(servers.pool.sample(request, tokenizer.stop_ids))
            versions.append(asked)
            close, far = gaps_of(servers, policy, (params, before), 0, tokenizer)
            assert close < 1e-4
            assert version == 0 or far > 1e-2
            before = params
            params = changed(params, rng, 0.1)
        for version, asked in enumerate(versions):
            assert {*map(servers.pool.version_of, asked.result(200).versions)} == {version}
        assert sampler.numbers()["sglang/retries"] == 0


# Training with real servers that are killed, stopped, and outlive nothing.


LONG_STEPS, TRAJECTORIES = 8, 4
EVALUATION = TINY["evaluation"]
MEASURED = {1: EVALUATION["questions"], LONG_STEPS: EVALUATION["validation_questions"]}


def as_words(settings: Mapping[str, Any]) -> list[str]:
    return [f"{key}={json.dumps(value)}" for key, value in settings.items()]


def long_run(python: str) -> list[str]:
    servers = {"launch": 2, "python": python, "arguments": ARGUMENTS, "variables": VARIABLES}
    # The latter is what weights that are being brought to a stopped server have.
    servers |= {"timeout_s": 120, "wait_s": 240}
    every = dict.fromkeys(("train.steps", "train.eval_every", "train.kl_every"), LONG_STEPS)
    return as_words({**every, "rollout": {"backend": "sglang", "sglang": servers}})


def metrics(run: Path) -> list[dict[str, float]]:
    path = run / "metrics.jsonl"
    return json_lines(path) if path.exists() else []


def wait_for(is_so: Callable[[], object], job: Copy, *, limit_s: float) -> None:
    wait_until(lambda: is_so() or not job.is_running(), limit_s=limit_s)
    assert is_so(), job.said("err")


def commands() -> dict[int, str]:
    """Return the command line of every process."""
    found = {}
    for path in Path("/proc").glob("[0-9]*/cmdline"):
        with suppress(OSError):  # it has ended
            found[int(path.parent.name)] = path.read_text().replace("\0", " ")
    return found


def servers(run: Path) -> list[int]:
    """List the processes of all servers that were launched for a run."""
    words = "sglang.launch_server", str(run.parent)
    return [pid for pid, line in commands().items() if all(one in line for one in words)]


def schedulers(run: Path) -> list[int]:
    """List the processes that sample, one for each server."""
    found = (pid for pid, line in commands().items() if line.startswith("sglang::scheduler"))
    sessions = set(servers(run))
    return sorted(pid for pid in found if os.getsid(pid) in sessions)


def left_out(run: Path) -> float:
    return sum(line["sglang/left_out"] for line in metrics(run))


@pytest.mark.skipif(sys.platform != "linux", reason="looks into /proc")
@pytest.mark.timeout(1800)
def test_a_run_outlives_its_servers_and_they_do_not_outlive_it(
    sglang_python, copies, tiny, tmp_path
):
    run = tmp_path / "run"
    line = ["launch.train", "--cfg", tiny, f"run.dir={run}", *long_run(sglang_python)]
    job = copies(*line, cwd=tmp_path)
    wait_for(lambda: len(metrics(run)) >= 2, job, limit_s=600)
    assert len(servers(run)) == 2
    os.kill(job.pid, signal.SIGKILL)
    job.end()
    wait_until(lambda: not servers(run), limit_s=20)

    job = copies(*line, cwd=tmp_path)
    before = len(metrics(run))
    wait_for(lambda: len(metrics(run)) > before, job, limit_s=600)
    stopped, killed = schedulers(run)
    os.kill(stopped, signal.SIGSTOP)
    wait_for(lambda: left_out(run) >= 1, job, limit_s=300)
    os.kill(killed, signal.SIGKILL)
    assert job.end(timeout_s=600).returncode == 0
    assert not servers(run)
    assert not list((run / "weights").iterdir())

    lines = metrics(run)
    assert [line["step"] for line in lines] == list(range(1, LONG_STEPS + 1))
    for line in lines:
        # Each turn of each episode is one answered request: none is lost, none counted twice.
        # Before the first step the servers were asked the test questions, in the last one those
        # of the validation.
        measured = MEASURED.get(int(line["step"]), 0)
        asked = TRAJECTORIES * line["rollout/turns"] + measured
        assert line["sglang/requests"] == pytest.approx(asked)
        assert line["mismatch/gap_max"] < 1e-4
    assert left_out(run) >= 2
    assert sum(line["sglang/failed_deadline"] for line in lines) >= 1
    assert sum(line["sglang/restarted"] for line in lines) >= 1
    result = json.loads((run / "result.json").read_text())
    assert result["questions"] == 6


# The papers' configs with SGLang, by the command of their heads: other sizes, on a CPU.


SMALL: dict[str, Any] = {
    **{section: TINY[section] for section in ("data", "model", "executor")},
    **dict.fromkeys(("train.steps", "train.eval_every", "train.checkpoint_every"), 2),
    "sampler.slots": 8,
    "sampler.max_prompt_tokens": 2000,
    "sampler.max_response_tokens": 120,
    "train.epochs": None,
    "train.prompts_per_step": 4,
    "evaluation.questions": 4,
    "evaluation.validation_questions": 2,
    "evaluation.max_prompt_tokens": None,
    "rollout.sglang.variables": VARIABLES,
    "rollout.sglang.arguments": ARGUMENTS,
}
MORE = {"paverl": {"train.group_size": 2, "train.second_stage": None}}


def command_of(paper: str) -> list[str]:
    """Read the command with SGLang in the head of a paper's config: its settings."""
    text = (Path(configs.__file__).parent / "configs" / f"{paper}.yaml").read_text()
    found = re.search(r"^#   CUDA_VISIBLE_DEVICES=\S+ (.*?[^\\])$", text, re.MULTILINE | re.DOTALL)
    assert found
    words = shlex.split(found[1].replace("\\\n#", " "))
    start = words.index(f"{paper}.yaml")
    assert words[:start] == ["python", "-m", "launch.train", "--accel", "gpu", "--cfg"]
    return words[start + 1 :]


@pytest.mark.timeout(900)
@pytest.mark.parametrize("paper", ["progress", "expo", "paverl", "astra"])
def test_the_command_of_a_papers_config_trains_with_servers(sglang_python, tmp_path, paper):
    run, settings = tmp_path / "run", command_of(paper)
    # Two servers in place of four, and a CPU's share of its memory is of no concern.
    changes = {"launch=4": "launch=2", '["4", "5", "6", "7"]': '["0", "1"]'}
    for old, new in changes.items():
        assert sum(old in setting for setting in settings) == 1
        settings = [setting.replace(old, new) for setting in settings]
    small = {**SMALL, **MORE.get(paper, {}), "rollout.sglang.python": sglang_python}
    line = [sys.executable, "-m", "launch.train", "--accel", "cpu", "--cfg", f"{paper}.yaml"]
    done = subprocess.run(
        [*line, *as_words(small), *settings, f"run.dir={run}"],
        capture_output=True, text=True, timeout=840, cwd=ROOT, check=False,
        env=os.environ | {"XLA_FLAGS": "--xla_backend_optimization_level=0"},
    )  # fmt: skip
    assert done.returncode == 0, done.stderr[-2000:]
    assert "2 SGLang servers of each host (rollout.sglang.launch)" in done.stdout + done.stderr
    lines = json_lines(run / "metrics.jsonl")
    assert [line["step"] for line in lines] == [1, 2]
    assert all(line["sglang/requests"] > 0 and line["mismatch/gap_max"] < 1e-4 for line in lines)
    assert json.loads((run / "result.json").read_text())["questions"] == 4
