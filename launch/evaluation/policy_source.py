"""Samples of a policy of ours, from the sampler of the job: kept by question, or deliberated on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from typing import Any

from launch import cli
from launch.build import serving
from launch.evaluation import deliberation
from launch.evaluation.cache import DiskCache
from launch.evaluation.client import Answer, CachedClient, Model, ModelRequest
from launch.evaluation.policy_client import PolicyModel
from launch.evaluation.sampling import CHUNK, Evaluator, TakenAsTheyAre
from launch.evaluation.sources import Answers, EvaluationJob, Sampled, Show
from launch.policy import load_policy
from sqlenv.types import Example

SAMPLES = "samples"


def sample(job: EvaluationJob, examples: Sequence[Example], show: Show) -> Answers:
    """Sample replies to the questions that have none yet; without any such nothing is loaded."""
    folder, notes = job.out / SAMPLES, {}
    kept: list[Any] = [None] * len(examples)
    if folder.exists():
        cache = DiskCache(folder)
        kept, notes = [cache.get(one.id) for one in examples], cache.get("notes") or {}
        cache.close()
    if None in kept:
        done = kept.index(None)
        kept[done:], notes = _sample(job, examples, done, show)
    samples = [_read(one) for one in kept]
    return Answers(samples, {"sampler": job.config.rollout.backend, **notes})


def _sample(
    job: EvaluationJob, examples: Sequence[Example], done: int, show: Show
) -> tuple[list[Mapping[str, Any]], Mapping[str, Any]]:
    config, policy, sql = job.config, job.target.policy, job.sql
    assert policy is not None
    show(done, len(examples), cli.COMPILING)
    # Weights that cannot be read leave nothing in the folder.
    model, tokenizer = load_policy(policy, config)
    sql.check_prompts("test", map(sql.evaluation_prompt, examples), tokenizer)
    is_agentic = sql.evaluation_turns > 1
    taken = TakenAsTheyAre(sql.evaluation_prompt, config.env.wrapping)
    cache, found = DiskCache(job.out / SAMPLES), []
    with serving(config, policy.model, job.out) as servers:
        evaluator = Evaluator(
            model,
            tokenizer,
            sql.evaluation_environment() if is_agentic else taken,
            config.sampler,
            job.decode,
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


def deliberate(job: EvaluationJob, examples: Sequence[Example], show: Show) -> Answers:
    """Let a policy write several queries for each question, judge them, and take the best."""
    config, policy = job.config, job.target.policy
    assert policy is not None
    with ExitStack() as stack:

        def load() -> PolicyModel:
            model, tokenizer = load_policy(policy, config)
            servers = stack.enter_context(serving(config, policy.model, job.out))
            return PolicyModel(model, tokenizer, config, servers)

        settings = job.answer_settings(config.verbal.temperature)
        client = CachedClient(_LoadedWhenAsked(load), job.out, settings, seed=config.seed)
        with client:
            play = deliberation.play_in_step
            found = deliberation.deliberate(job, examples, client, play, show)
    return Answers(found.samples, {**found.notes, "sampler": config.rollout.backend})


class _LoadedWhenAsked:
    """A model that is loaded for the first request: where all are answered already, never."""

    def __init__(self, load: Callable[[], Model]) -> None:
        self._load = load
        self._model: Model | None = None

    def answer(
        self, requests: Sequence[ModelRequest], record: Callable[[ModelRequest, Answer], None]
    ) -> None:
        """Answer requests."""
        if requests:
            self._model = self._model or self._load()
            self._model.answer(requests, record)


def _read(fields: Mapping[str, Any]) -> Sampled:
    queries, replies, turns = (tuple(fields[name]) for name in ("queries", "replies", "turns"))
    return Sampled(queries, replies, turns, fields["line"])
