"""Samples of a policy of ours, from the sampler of the job: kept by question, or deliberated on."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import asdict
from functools import cached_property
from typing import Any

from launch import cli
from launch.build import serving
from launch.evaluation import deliberation
from launch.evaluation.cache import DiskCache
from launch.evaluation.client import Answer, CachedClient, ModelRequest
from launch.evaluation.sampling import CHUNK, Evaluator, TakenAsTheyAre
from launch.evaluation.sources import Answers, EvaluationJob, Sampled, Show
from launch.policy import PolicySource, load_policy
from minirl.model.lora import split
from minirl.model.tokenizer import ChatTokenizer
from minirl.train.rollouts import make_sampler
from minirl.types import Decoding, Request
from sqlenv.types import Example

SAMPLES = "samples"
# Episode numbers name random streams: these lie above those of evaluations.
_FIRST_EPISODE = 2**30
_STREAMS = 2**30
_STEPS = 32


def sample(
    job: EvaluationJob, policy: PolicySource, examples: Sequence[Example], show: Show
) -> Answers:
    """Sample replies to the questions that have none yet; without any such nothing is loaded."""
    folder, notes = job.out / SAMPLES, {}
    kept: list[Any] = [None] * len(examples)
    if folder.exists():
        cache = DiskCache(folder)
        kept, notes = [cache.get(one.id) for one in examples], cache.get("notes") or {}
        cache.close()
    if None in kept:
        done = kept.index(None)
        kept[done:], notes = _sample(job, policy, examples, done, show)
    samples = [
        Sampled(tuple(one["queries"]), tuple(one["replies"]), tuple(one["turns"]), one["line"])
        for one in kept
    ]
    return Answers(samples, {"sampler": job.config.rollout.backend, **notes})


def _sample(
    job: EvaluationJob, policy: PolicySource, examples: Sequence[Example], done: int, show: Show
) -> tuple[list[Mapping[str, Any]], Mapping[str, Any]]:
    config, sql = job.config, job.sql
    show(done, len(examples), cli.COMPILING)
    # Weights that cannot be read leave nothing in the folder.
    model, tokenizer = load_policy(policy, config)
    sql.check_prompts("test", map(sql.evaluation_prompt, examples), tokenizer)
    is_agentic = sql.evaluation_turns > 1
    taken = TakenAsTheyAre(sql.evaluation_prompt, config.env.wrapping)
    cache, found = DiskCache(job.out / SAMPLES), []
    with serving(config, policy.model, job.out) as servers:
        evaluator = Evaluator(
            model, tokenizer, sql.evaluation_environment() if is_agentic else taken,
            config.sampler, job.decode, seed=config.seed, max_turns=sql.evaluation_turns,
            servers=servers, record=sql.record_scored if is_agentic else None,
        )  # fmt: skip
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
    job: EvaluationJob, policy: PolicySource, examples: Sequence[Example], show: Show
) -> Answers:
    """Let a policy write several queries for each question, judge them, and take the best."""
    config = job.config
    settings = job.answer_settings(config.verbal.temperature)
    with ExitStack() as stack:
        model = _PolicyModel(job, policy, stack)
        client = stack.enter_context(CachedClient(model, job.out, settings, seed=config.seed))
        found = deliberation.deliberate(job, examples, client, show)
    return Answers(found.samples, {**found.notes, "sampler": config.rollout.backend})


class _PolicyModel:
    """Samples answers; the seed of the job and a request's own decide each.

    The policy is loaded for the first request: where all are answered already, never.
    """

    def __init__(self, job: EvaluationJob, policy: PolicySource, stack: ExitStack) -> None:
        self._job, self._policy, self._stack = job, policy, stack

    @cached_property
    def _loaded(self) -> tuple[Any, ChatTokenizer]:
        config = self._job.config
        model, tokenizer = load_policy(self._policy, config)
        servers = self._stack.enter_context(serving(config, self._policy.model, self._job.out))
        group_size = max(config.verbal.candidates, config.verbal.judgements)
        sampler = make_sampler(
            model, config.sampler, tokenizer,
            group_size=group_size, seed=config.seed, servers=servers,
        )  # fmt: skip
        sampler.set_weights(split(model)[1], version=0)
        return sampler, tokenizer

    def answer(
        self, requests: Sequence[ModelRequest], record: Callable[[ModelRequest, Answer], None]
    ) -> None:
        """Sample an answer to each request, and record it; a prompt too long has none."""
        if not requests:
            return
        sampler, tokenizer = self._loaded
        verbal, limits = self._job.config.verbal, self._job.config.sampler
        temperature = 1.0 if verbal.temperature is None else verbal.temperature
        decoding = Decoding(temperature, limits.top_p)
        longest = (limits.max_response_tokens, limits.max_reply_tokens, verbal.max_tokens)
        most = min(tokens for tokens in longest if tokens is not None)
        waiting: dict[int, tuple[ModelRequest, int]] = {}
        for request in requests:
            ids = tokenizer.encode_chat(request.messages)
            if len(ids) > limits.max_prompt_tokens:
                record(request, Answer(None, refusal="prompt over sampler.max_prompt_tokens"))
                continue
            episode = _FIRST_EPISODE + request.seed % _STREAMS
            while episode in waiting:
                episode += 1
            waiting[episode] = request, len(ids)
            sampler.submit(Request(episode, tuple(ids), most, decoding))
        while waiting:
            for episode, reply in sampler.advance(max_steps=_STEPS):
                sampler.release(episode)
                request, prompt_tokens = waiting.pop(episode)
                record(request, Answer(reply.text, prompt_tokens, len(reply.ids)))
