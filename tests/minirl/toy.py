"""A toy decoder and tokenizer, samplers of it, updates on meshes, and a toy run of reinforcement
learning, also in processes of which one is killed in the middle (see `main`).
"""

import copy
import functools
import json
import math
import os
import re
import signal
import socket
import time
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any
from unittest.mock import patch

import jax
import jax.numpy as jnp
import numpy as np
from flax import nnx
from tokenizers import Tokenizer as Bpe
from tokenizers import decoders, models
from tokenizers import pre_tokenizers as pre
from tokenizers.trainers import BpeTrainer

from minirl.config import BatchingConfig, LoraConfig, OptimizerConfig, SamplerConfig, TrainConfig
from minirl.config.algorithms import AlgorithmConfig
from minirl.exchange import Message, Score
from minirl.model.config import HybridConfig, ModelConfig
from minirl.model.decoder import Decoder
from minirl.model.lora import add_adapters, split, trained
from minirl.model.sharding import make_mesh, param_path, param_shardings
from minirl.run import distributed
from minirl.run.metrics import JsonLines
from minirl.sample.cache import ROWS
from minirl.sample.sampler import NativeSampler
from minirl.train import batching
from minirl.train.batching import MicroBatches
from minirl.train.rollouts import TrainingTask
from minirl.train.trainer import Trainer
from minirl.train.update import Learner
from minirl.types import TokenRow
from tests.plain_model import logits

# A model and a tokenizer.

VOCAB = 64
# Several, so that a random model stops now and then.
STOP_IDS = (1, 60, 61, 62, 63)
# Nothing that the model could draw.
NEVER = (VOCAB,)
CONFIG = ModelConfig(
    model_type="qwen3",
    vocab_size=VOCAB,
    hidden_size=16,
    intermediate_size=24,
    num_hidden_layers=2,
    num_attention_heads=4,
    num_key_value_heads=2,
    head_dim=8,
    attention_bias=True,
)
# The same as a Qwen3.5: one period, more value heads than key heads, half of a head is turned.
HYBRID = HybridConfig(
    **CONFIG.model_dump(exclude={"model_type", "num_hidden_layers", "attention_bias"}),
    model_type="qwen3_5_text",
    num_hidden_layers=4,
    linear_num_key_heads=2,
    linear_num_value_heads=4,
    linear_key_head_dim=8,
    linear_value_head_dim=6,
    partial_rotary_factor=0.5,
)


@dataclass(frozen=True)
class Tokenizer:
    """Ids 4 to 59 are characters; 2 and 3 stand around a message, 1 ends a reply."""

    stop_ids: tuple[int, ...] = STOP_IDS
    pad_id: int = 0

    def encode(self, text: str) -> list[int]:
        return [4 + (ord(character) - 65) % 56 for character in text]

    def encode_chat(self, messages: Sequence[Any]) -> list[int]:
        return [i for message in messages for i in [2, *self.encode(message.content), 3]]

    def encode_next(self, messages: Sequence[Any], *, closed: bool) -> list[int]:
        return ([] if closed else [1]) + self.encode_chat(messages)

    def decode(self, ids: Iterable[int]) -> str:
        return "".join(chr(61 + i) for i in ids)


def model(seed: int = 0, layers: int = 2, *, hybrid: bool = False) -> Decoder:
    """Make a decoder with clear preferences, whose modules no other test has changed."""
    return nnx.merge(*_drawn(seed, layers, hybrid))


@functools.cache
def _drawn(seed: int, layers: int, hybrid: bool) -> tuple[Any, Any]:
    """Draw its graph and parameters by NumPy, which compiles nothing.

    A hybrid's memory lasts: strong decays, whose logs sum to hundreds in a chunk, are rounded.
    """
    config = HYBRID if hybrid else CONFIG.model_copy(update={"num_hidden_layers": layers})
    rng = np.random.default_rng(seed)
    graphdef, shapes = nnx.split(nnx.eval_shape(lambda: Decoder(config, key=jax.random.key(0))))

    def draw(path: Any, leaf: Any) -> Any:
        mean = -3.0 if param_path(path).endswith("a_log") else 0.0
        return jnp.asarray(rng.normal(mean, 0.3, leaf.shape).astype(np.float32))

    return graphdef, jax.tree.map_with_path(draw, shapes)


def spread(source: Decoder, mesh: Any) -> Decoder:
    """Copy a model to the devices of a mesh; None for the first device."""
    graph, params = nnx.split(source)
    if mesh is None:
        return nnx.merge(graph, copied(params))

    def shard(leaf, to):
        return jax.make_array_from_callback(leaf.shape, to, np.asarray(leaf).__getitem__)

    found = nnx.merge(graph, jax.tree.map(shard, params, param_shardings(params, mesh)))
    found.mesh = mesh
    return found


def adapted(source: Decoder, lora: LoraConfig) -> Decoder:
    """Give a model adapters that add something already."""
    add_adapters(source, lora, seed=0)
    graph, params, frozen = split(source)
    rng = np.random.default_rng(0)

    def draw(leaf):
        return jax.device_put(rng.normal(0, 0.3, leaf.shape).astype(np.float32), leaf.sharding)

    return nnx.merge(graph, jax.tree.map(draw, params), frozen)


def train_bpe(texts: Iterable[str], *, vocab_size: int) -> Bpe:
    """Train a tokenizer in the manner of Qwen's, whose decoder joins a quote and what follows."""
    tokenizer = Bpe(models.BPE())
    tokenizer.pre_tokenizer = pre.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.Sequence([decoders.ByteLevel(), decoders.Replace("' ", "'")])
    trainer = BpeTrainer(
        vocab_size=vocab_size,
        special_tokens=["<|endoftext|>", "<|im_start|>", "<|im_end|>"],
        initial_alphabet=pre.ByteLevel.alphabet(),
        show_progress=False,
    )
    tokenizer.train_from_iterator(texts, trainer)
    return tokenizer


# Sampling.


def sampler(source, *, group_size=1, seed=0, stop_ids=STOP_IDS, rows=(), **settings: Any):
    """Make a sampler with weights, and with programs for these numbers of rows beside that of all
    its slots.
    """
    sizes: dict[str, Any] = {"slots": 4, "max_prompt_tokens": 48, "max_response_tokens": 48}
    config = SamplerConfig(**{**sizes, **settings})
    with patch.dict(ROWS, dict.fromkeys(ROWS, rows)):
        found = NativeSampler(source, config, Tokenizer(stop_ids), group_size=group_size, seed=seed)
    found.set_weights(trained(source), version=0)
    return found


def run(sampler: NativeSampler, requests: Sequence[Any], *, max_steps: int = 32) -> dict[int, Any]:
    """Sample one reply an episode until all have ended."""
    replies: dict[int, Any] = {}
    for request in requests:
        sampler.submit(request)
    while len(replies) < len(requests):
        for episode, reply in sampler.advance(max_steps=max_steps):
            replies[episode] = reply
            sampler.release(episode)
    return replies


def next_logprobs(source: Decoder, ids: Sequence[int], *, temperature: float = 1.0) -> np.ndarray:
    """Return log-probabilities of the next token after every prefix, by a full forward pass."""
    tokens_BT = np.zeros((1, -(-len(ids) // 128) * 128), np.int32)
    tokens_BT[0, : len(ids)] = ids
    logits_TV = np.asarray(logits(source, tokens_BT))[0, : len(ids)] / np.float32(temperature)
    return logits_TV - np.logaddexp.reduce(logits_TV, axis=-1, keepdims=True)


# An update.

# Gradients are cut to Adam's epsilon, so that a weight moves in proportion to its own. Otherwise it
# moves by the learning rate, and where its gradient is nearly 0 rounding decides which way.
SMOOTH = OptimizerConfig(learning_rate=2.0, weight_decay=0.0, max_grad_norm=1e-8)


# It drowns what weights round.
RATE = 1024.0


def gradient_of(learner: Learner, params: Any, batches: Any, **options: Any) -> tuple[Any, Any]:
    """Return the numbers of an update by `optax.sgd(1.0)`, and its gradient."""
    state = learner.init(copied(params))
    state, numbers, _ = learner.update(state, batches, rate=RATE, **options)

    def moved(old, new):
        return (np.asarray(old) - np.asarray(new)) / RATE

    return numbers, jax.tree.map(moved, params, state.params)


def make_groups(lengths: Iterable[tuple[int, Any]]) -> list[list[TokenRow]]:
    """Make groups of rows around a policy that the model is not; each token has an advantage of its
    own. Of each group the lengths are that of its prompt, and those of the turns of each row:
    sampled, observed, sampled, ... Some groups' rows begin alike.
    """
    rng = np.random.default_rng(3)
    groups = []
    for number, (prompt_length, turns_of_rows) in enumerate(lengths):
        prompt, common = (rng.integers(4, 60, size) for size in (prompt_length, number % 3))
        group = []
        for turns in turns_of_rows:
            answer = rng.integers(4, 60, sum(turns))
            answer[: len(common)] = common
            ids = np.concatenate([prompt, answer])
            is_action = np.repeat(np.arange(-1, len(turns)) % 2 == 0, [prompt_length, *turns])
            logprobs, advantage = rng.normal(-4, 0.2, len(ids)), rng.uniform(0.5, 2, len(ids))
            group.append(TokenRow(ids, is_action, logprobs, advantage, prompt_length))
        groups.append(group)
    return groups


def batches(*, parts: int = 1, **sizes: int) -> MicroBatches:
    """Make micro-batches of eight groups of four rows of three turns."""
    rng = np.random.default_rng(0)
    groups = make_groups((int(rng.integers(3, 12)), rng.integers(1, 5, (4, 3))) for _ in range(8))
    few = {"micro_batch_tokens": 384, "prompt_multiple": 12, "answer_multiple": 16}
    given = BatchingConfig(**{**few, **sizes})
    return MicroBatches(groups, aggregation="token_mean", sizes=given, pad_id=0, parts=parts)


# A run.

STEPS = 8
SAMPLED = "sampled.jsonl"
TRAIN = TrainConfig(
    steps=STEPS,
    prompts_per_step=4,
    group_size=8,
    algorithm=AlgorithmConfig(),
    optimizer=SMOOTH,
    # Two groups a micro-batch, whatever they say: there is room for the longest, and the rows of
    # three are too many. So few programs are compiled.
    batching=BatchingConfig(micro_batch_tokens=384, prompt_multiple=8, answer_multiple=32),
    eval_every=2,
    checkpoint_every=2,
    # Needs one more compilation, in every life that comes so far.
    kl_every=8,
    sample_every=3,
    env_workers=2,
)
SAMPLER = SamplerConfig(slots=16, max_prompt_tokens=8, max_response_tokens=20, max_reply_tokens=6)
# Of two processes with two devices each.
OF_SEVERAL = {"fsdp": 2, "tensor": 2}
EXAMPLES = ("AB", "CDE", "F", "GH", "IJKL", "MNO")
# What is said of the weights after so many updates; step 4 is the best and not among the newest.
ACCURACY = {2: 0.25, 4: 0.75, 6: 0.5, 8: 0.5}


# Courses that a run can take: changes of the settings.
COURSES: dict[str, dict[str, Any]] = {
    "short": {"steps": 4, "eval_every": 2, "checkpoint_every": 1, "kl_every": 2, "average": 0.5},
    # Few groups are mixed, so that a step takes several rounds; then two updates, each of two
    # micro-batches, whose ratio compares with the step's start; some are skipped. Then a second
    # stage, from the second step's weights.
    "all": {
        "steps": 4,
        "mini_batches": 2,
        "algorithm": AlgorithmConfig(correctness_filter="mixed", max_rounds=3),
        "optimizer": SMOOTH.model_copy(update={"schedule": "cosine"}),
        "average": 0.5,
        "batching": TRAIN.batching.model_copy(update={"micro_batch_tokens": 192}),
        "eval_every": 1,
        "checkpoint_every": 2,
    },
}
# What is said of the weights there: the best of the first stage has no checkpoint.
ACCURACY_OF_ALL = {1: 0.25, 2: 0.5, 3: 0.75, 4: 0.25, 5: 0.25, 6: 0.25}


@dataclass(frozen=True)
class Episode:
    example: str
    replies: tuple[str, ...] = ()


class Capitals:
    """Wants replies of capital letters alone, and gives a second chance."""

    def reset(self, example):
        return Episode(example), [Message("user", example)]

    def step(self, episode, reply):
        episode = replace(episode, replies=(*episode.replies, reply))
        is_over = score(episode).correct or len(episode.replies) == 2
        return episode, None if is_over else [Message("user", "NO")]


def scored(total, correct, spans=()):
    return Score(total, correct, {"letters": total}, spans)


def score(episode):
    """Pay the share of capitals in the last reply."""
    reply = episode.replies[-1]
    share = sum("A" <= letter < "a" for letter in reply) / max(len(reply), 1)
    return scored(share, share == 1)


def seldom_mixed(episode):
    """Call some replies to two of the examples correct, and none to the others; a reward that is
    no number lets an update be skipped.
    """
    letter = episode.replies[-1][:1]
    is_right = episode.example in {"AB", "GH"} and letter < "P"
    return scored(math.nan if letter == "b" else score(episode).total, is_right)


def write_sampled(folder, step, groups, rows):
    """Write what a sampled step hands on, a line a trajectory."""
    lines = JsonLines(folder / SAMPLED, resume_step=step - 1)
    for group, known in zip(groups, rows, strict=True):
        for trajectory, row in zip(group, known or [None] * len(group), strict=True):
            advantage = None if row is None else np.round(row.advantage, 6).tolist()
            lines.write(step, {"record": trajectory.episode.record, "advantage": advantage})


# Learners by what their programs depend on: they hold no weights of a model without adapters, and
# each would trace and compile all of them anew.
LEARNERS: dict[Any, Learner] = {}


def known_learner(settings, source, loss, optimizer, **options):
    """Return a learner with the programs of an earlier one of the same settings."""
    if source.layers.lora is not None:
        return Learner(source, loss, optimizer, **options)
    key = (*settings, nnx.graphdef(source))
    if key not in LEARNERS:
        LEARNERS[key] = Learner(source, loss, optimizer, **options)
    return copy.copy(LEARNERS[key])


def of_one_length(micro_batches):
    """Make micro-batches whose lists of tokens have one length: one program serves all."""

    def make(groups):
        with patch.object(batching, "_LIST_LENGTHS", 1):
            return micro_batches(groups)

    return make


def ignore(*_):
    """Look at no progress, and track nothing."""


def trainer(
    folder, *, source=None, examples=EXAMPLES, validate=None, judge=score, servers=None,
    lag=0, write=None, log=ignore, **changes,
):  # fmt: skip
    """Make a trainer on a copy of a toy model: the update takes the arrays over.

    It has one layer: nothing of a run depends on their number, and programs compile sooner.
    """
    config = TRAIN.model_copy(update=changes)
    task = TrainingTask(
        environment=Capitals(),
        score=judge,
        describe=lambda episode: {"toy/letters": float(len(episode.replies[-1]))},
        record=lambda episode: {
            "example": {"id": episode.example},
            "turns": [{"said": reply} for reply in episode.replies],
        },
        write=write or partial(write_sampled, folder),
        train=examples,
        validate=validate or (lambda params, version: ACCURACY.get(version, 0.0)),
        max_turns=2,
        log=log,
    )
    mesh = make_mesh(OF_SEVERAL) if distributed.count() > 1 else None
    source = spread(source or model(layers=1), mesh)
    settings = (config.algorithm, config.optimizer, SAMPLER.temperature)
    known = patch("minirl.train.trainer.Learner", partial(known_learner, settings))
    # One program of the sampler serves rows of any number.
    with known, patch.dict(ROWS, cpu=()):
        made = Trainer(
            source, Tokenizer(), task, config, SAMPLER,
            seed=0, folder=folder, servers=servers, lag=lag,
        )  # fmt: skip
    made._micro_batches = of_one_length(made._micro_batches)
    return made


def take_course(folder, course):
    judge, accuracy = (seldom_mixed, ACCURACY_OF_ALL) if course == "all" else (score, ACCURACY)

    def validate(params, version):
        distributed.check()  # as the rollouts of an evaluation do
        return accuracy[version]

    return trainer(folder, validate=validate, judge=judge, **COURSES[course])


def run_course(trainer, course, progress=ignore):
    """Run all stages of a trainer's course."""
    trainer.run(progress)
    if course == "all":
        trainer.begin_stage(trainer._config.optimizer, steps=2, start=2)
        trainer.run(progress)


@jax.jit
def copied(params):
    """Copy weights, which an update will take over."""
    return jax.tree.map(jnp.copy, params)


def metrics_of(folder):
    """Return the lines of `metrics.jsonl` without what depends on the clock."""
    records = map(json.loads, (folder / "metrics.jsonl").read_text().splitlines())
    return [
        {key: value for key, value in record.items() if not key.startswith("time/")}
        for record in records
    ]


def die():
    os.kill(os.getpid(), signal.SIGKILL)


def be_told():
    # In the main thread the handler has run when this returns; after os.kill Python 3.11 may run it
    # later.
    signal.raise_signal(signal.SIGTERM)


def arm(trainer, moment, at, end, *, nth=1):
    """Let `end` be called before the nth call of a method in a step."""
    owner = {
        "advance": trainer._sampler,
        "_apply": trainer._learner,
        "update": trainer._learner,
        "numbers": trainer._sampler,
        "save": trainer._checkpoints,
    }[moment]
    function, steps = getattr(owner, moment), []

    def call(*args, **kwargs):
        # After its step a checkpoint is written, and samplers are asked how its validation went;
        # everything else happens within it.
        steps.append(trainer.steps_done + (moment not in ("save", "numbers")))
        if steps[-1] == at and steps.count(at) == nth:
            end()
        return function(*args, **kwargs)

    setattr(owner, moment, call)


# Processes that find each other.

# On a free core a process takes ten seconds, on a loaded machine minutes.
LIMIT_S = 480


def processes(copies, arguments, *, code):
    """Start two processes of this code, with two devices each; they are told where they meet."""
    flags = re.sub(r"device_count=\d+", "device_count=2", os.environ["XLA_FLAGS"])
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        coordinator = f"127.0.0.1:{free.getsockname()[1]}"
    here, count = Path(__file__).parent, 2
    return [
        copies(*arguments, coordinator, count, process, cwd=here, code=code, XLA_FLAGS=flags)
        for process in range(count)
    ]


def ends(started):
    """Return status, output and errors of all; those that do not end are killed, and it shows."""
    until = time.monotonic() + LIMIT_S
    ended = [one.end(timeout_s=max(until - time.monotonic(), 0.1)) for one in started]
    return [(one.returncode, one.stdout, one.stderr) for one in ended]


def main(folder, course, moment, at, coordinator, count, process):
    """Run a course in one of several processes; the last of them is killed."""
    place = int(count), int(process)
    distributed.join(coordinator, *place, heartbeat_s=10)
    made = take_course(Path(folder), course)
    if int(process) == int(count) - 1:
        arm(made, moment, int(at), die)
    run_course(made, course)
