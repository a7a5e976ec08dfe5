"""Samples of a policy of ours, from the sampler of the job: kept by question, or deliberated on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from typing import Any

from launch import cli
from launch.config import JobConfig
from launch.evaluation import sources
from launch.evaluation.cache import DiskCache
from launch.evaluation.client import Answer, CachedClient, Model, Request
from launch.evaluation.decoding import Decode
from launch.evaluation.deliberation import play_in_step
from launch.evaluation.policy_client import PolicyModel
from launch.evaluation.sampling import CHUNK, Evaluator, TakenAsTheyAre
from launch.evaluation.sources import Answers, Sampled, Show, answer_settings
from launch.evaluation.targets import Target
from launch.policy import load_policy
from launch.serving import serving
from launch.wiring import SqlSide
from sqlenv.types import Example

SAMPLES = "samples"


def sample(
    target: Target,
    config: JobConfig,
    decode: Decode,
    sql: SqlSide,
    examples: Sequence[Example],
    out: Path,
    show: Show,
) -> Answers:
    """Sample replies to the questions that have none yet; without any such nothing is loaded."""
    folder, notes = out / SAMPLES, {}
    kept: list[Any] = [None] * len(examples)
    if folder.exists():
        cache = DiskCache(folder)
        kept, notes = [cache.get(one.id) for one in examples], cache.get("notes") or {}
        cache.close()
    if None in kept:
        done = kept.index(None)
        kept[done:], notes = _sample(target, config, decode, sql, examples, done, folder, show)
    samples = [_read(one) for one in kept]
    return Answers(samples, {"sampler": config.rollout.backend, **notes})


def _sample(
    target: Target,
    config: JobConfig,
    decode: Decode,
    sql: SqlSide,
    examples: Sequence[Example],
    done: int,
    folder: Path,
    show: Show,
) -> tuple[list[Mapping[str, Any]], Mapping[str, Any]]:
    assert target.policy is not None
    show(done, len(examples), cli.COMPILING)
    # Weights that cannot be read leave nothing in the folder.
    model, tokenizer = load_policy(target.policy, config)
    sql.check_prompts("test", map(sql.evaluation_prompt, examples), tokenizer)
    is_agentic = sql.evaluation_turns > 1
    taken = TakenAsTheyAre(sql.evaluation_prompt, config.env.wrapping)
    cache, found = DiskCache(folder), []
    with serving(config, target.policy.model, folder.parent) as servers:
        evaluator = Evaluator(
            model,
            tokenizer,
            sql.evaluation_environment() if is_agentic else taken,
            config.sampler,
            decode,
            seed=config.seed,
            max_turns=sql.evaluation_turns,
            servers=servers,
            record=sql.record if is_agentic else None,
        )
        for at in range(done, len(examples), CHUNK):
            part = examples[at : at + CHUNK]
            for example, one in zip(part, evaluator.sample(part, first=at), strict=True):
                found.append(asdict(one))
                cache[example.id] = found[-1]
            show(done + len(found), len(examples), "")
        evaluator.free_memory()
        notes = cache["notes"] = evaluator.notes()
    cache.close()
    return found, notes


def deliberate(
    target: Target,
    config: JobConfig,
    _decode: Decode,
    sql: SqlSide,
    examples: Sequence[Example],
    out: Path,
    show: Show,
) -> Answers:
    """Let a policy write several queries for each question, judge them, and take the best."""
    policy = target.policy
    assert policy is not None
    with ExitStack() as stack:

        def load() -> PolicyModel:
            model, tokenizer = load_policy(policy, config)
            servers = stack.enter_context(serving(config, policy.model, out))
            return PolicyModel(model, tokenizer, config, servers)

        verbal = config.verbal
        settings = answer_settings(target, verbal.temperature, verbal.max_tokens)
        client = stack.enter_context(
            CachedClient(_LoadedWhenAsked(load), out, settings, seed=config.seed)
        )
        found = sources.deliberate(examples, client, play_in_step, sql, config, show)
    return Answers(found.samples, {**found.notes, "sampler": config.rollout.backend})


class _LoadedWhenAsked:
    """A model that is loaded for the first request: where all are answered already, never."""

    def __init__(self, load: Callable[[], Model]) -> None:
        self._load = load
        self._model: Model | None = None

    def answer(
        self, requests: Sequence[Request], record: Callable[[Request, Answer], None]
    ) -> None:
        """Answer requests."""
        if requests:
            self._model = self._model or self._load()
            self._model.answer(requests, record)


def _read(fields: Mapping[str, Any]) -> Sampled:
    queries, replies, turns = (tuple(fields[name]) for name in ("queries", "replies", "turns"))
    return Sampled(queries, replies, turns, fields["line"])
