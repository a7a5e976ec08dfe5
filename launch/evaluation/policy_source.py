"""Samples of a policy of ours, from the sampler of the job: kept by question, or deliberated on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from launch.build import SqlSide, serving
from launch.config import JobConfig
from launch.evaluation.client import Answer, CachedClient, ModelRequest
from launch.evaluation.decoding import Decode
from launch.evaluation.deliberation import deliberate
from launch.evaluation.digests import digest, short
from launch.evaluation.outcomes import hint
from launch.evaluation.results import ModelFacts
from launch.evaluation.sampling import Evaluator, TakenAsTheyAre
from launch.evaluation.sources import (
    Answers,
    SampleCache,
    Sampled,
    Show,
    Source,
    unread_of,
)
from launch.policy import PolicySource
from launch.weights import load_policy
from minirl.model.lora import split
from minirl.model.tokenizer import ChatTokenizer
from minirl.run import activity
from minirl.sample.pace import Pace
from minirl.train.rollouts import make_sampler
from minirl.types import Decoding, Request
from sqlenv.executor.database import fingerprint
from sqlenv.types import Example

# Episode numbers name random streams: these lie above those of evaluations.
_FIRST_EPISODE = 2**30
_STREAMS = 2**30
_STEPS = 32
_MODEL_FILES = (".json", ".safetensors", ".jinja")
_SMALL_BYTES = 1_000_000
"""Larger files of a checkpoint, of which most are the optimizer's, are told apart by their names,
which Orbax draws by chance, and sizes."""


@dataclass(frozen=True, slots=True)
class CheckpointSource(Source):
    """A policy of ours, sampled in this process or by SGLang servers."""

    policy: PolicySource
    accelerator: str

    @classmethod
    def of(
        cls, config: JobConfig, decode: Decode, policy: PolicySource, accelerator: str
    ) -> CheckpointSource:
        """Take a policy as it was trained, or one that a job's settings did not train."""
        config = config if policy.run else config.for_untrained()
        return cls(config, decode, policy.name, _identity(policy), policy, accelerator)

    def tokenizer(self) -> ChatTokenizer:
        """Read the tokenizer from the policy's folder."""
        return ChatTokenizer(self.policy.model)

    def facts(self) -> ModelFacts:
        """Describe the model, and what it was trained from."""
        policy, run = self.policy, self.policy.run
        base, backend = run.model.path if run else policy.model, self.config.rollout.backend
        return ModelFacts(
            self.name,
            str(policy.model),
            str(policy.checkpoint) if policy.checkpoint else None,
            self.identity,
            base.name if base else "tiny",
            run.reward.kind if run else None,
            None if backend == "native" else backend,
        )

    def _own_settings(self) -> Mapping[str, Any]:
        config = self.config
        place = (self.policy.checkpoint or self.policy.model).resolve()
        return {
            "weights": self.identity,
            "dtype": config.model.dtype,
            "backend": config.rollout.backend,
            "accelerator": self.accelerator,
            **config.model_dump(mode="json", include={"sampler"}),
            **(self._verbal_settings() if self.is_judge else {}),
            "places": {"model": str(place)},
        }

    def answers(self, examples: Sequence[Example], sql: SqlSide, out: Path, show: Show) -> Answers:
        """Sample replies to questions that have none yet; without any such nothing is loaded."""
        config = self.config
        sampler = {"sampler": config.rollout.backend}
        if self.is_judge:
            settings = self._client_settings(config.verbal.temperature)
            with ExitStack() as stack:
                model = _PolicyModel(config, self.policy, out, stack)
                client = CachedClient(model, out, settings, seed=config.seed)
                found = deliberate(config, examples, stack.enter_context(client), sql, show)
            return Answers(found.samples, {**found.notes, **sampler})
        settings = {key: one for key, one in self._own_settings().items() if key != "places"}
        used = {"seed", "prompt", "env", "executor", "evaluation"}
        settings |= config.model_dump(mode="json", include=used) | {"decode": self.decode.name}
        samples, notes = self._sampled(examples, SampleCache(out, settings), sql, out, show)
        unread = unread_of(samples)
        return Answers(samples, {**sampler, **notes, "hint": hint(unread, config.answer_wrapping)})

    def _sampled(
        self, examples: Sequence[Example], cache: SampleCache, sql: SqlSide, out: Path, show: Show
    ) -> tuple[Sequence[Sampled], Mapping[str, Any]]:
        """Return the samples of all questions; without any to sample nothing is loaded."""
        kept = cache.read(examples)
        if len(kept) == len(examples):
            return kept, {}
        config = self.config
        show(len(kept), len(examples), "")
        # Weights that cannot be read leave nothing in the folder.
        model, tokenizer = load_policy(self.policy, config)
        sql.check_test_prompts(examples, tokenizer)
        # A run is asked as in its training, where replies have rewards.
        is_trained = self.policy.run is not None or sql.evaluation_turns > 1
        limits = config.evaluation_sampler
        # Few questions need no cache for more.
        slots = min(limits.slots, len(examples) * self.decode.samples)
        limits = limits.model_copy(update={"slots": slots})
        wrapping = config.answer_wrapping
        taken = TakenAsTheyAre(sql.evaluation_prompt, wrapping)
        with serving(config, self.policy.model, out, limits, lora=self.policy.lora) as servers:
            evaluator = Evaluator(
                model, tokenizer, sql.evaluation_environment() if is_trained else taken,
                limits, self.decode, seed=config.seed, max_turns=sql.evaluation_turns,
                servers=servers, record=sql.record_scored if is_trained else None,
                wrapping=wrapping,
            )  # fmt: skip
            samples = evaluator.answers(examples, cache, show, stops=True)
            return samples, evaluator.notes()


def _identity(policy: PolicySource) -> str:
    model = [path for path in policy.model.iterdir() if path.suffix in _MODEL_FILES]
    lora = policy.lora and policy.lora.model_dump(mode="json")
    parts: list[Any] = [digest([path for path in model if path.is_file()]), lora]
    if policy.checkpoint is not None:
        files = filter(Path.is_file, policy.checkpoint.rglob("*"))
        parts += sorted(_file(path, policy.checkpoint) for path in files)
    return short(json.dumps(parts).encode())


def _file(path: Path, checkpoint: Path) -> tuple[str, int, str]:
    size = path.stat().st_size
    contents = fingerprint(path) if size <= _SMALL_BYTES else ""
    return str(path.relative_to(checkpoint)), size, contents


class _PolicyModel:
    """Samples answers; the seed of the job and a request's own decide each.

    The policy is loaded for the first request: where all are answered already, never.
    """

    def __init__(
        self, config: JobConfig, policy: PolicySource, out: Path, stack: ExitStack
    ) -> None:
        self._config, self._policy, self._out, self._stack = config, policy, out, stack

    @cached_property
    def _loaded(self) -> tuple[Any, ChatTokenizer]:
        config = self._config
        model, tokenizer = load_policy(self._policy, config)
        limits = config.evaluation_sampler
        policy = self._policy
        servers = self._stack.enter_context(
            serving(config, policy.model, self._out, limits, lora=policy.lora)
        )
        group_size = max(config.verbal.candidates, config.verbal.judgements)
        sampler = make_sampler(
            model, limits, tokenizer,
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
        verbal, limits = self._config.verbal, self._config.evaluation_sampler
        temperature = 1.0 if verbal.temperature is None else verbal.temperature
        decoding = Decoding(temperature, limits.top_p)
        longest = (limits.max_response_tokens, limits.max_reply_tokens, verbal.max_tokens)
        most = min(tokens for tokens in longest if tokens is not None)
        waiting: dict[int, tuple[ModelRequest, int]] = {}
        prompts: set[tuple[int, ...]] = set()
        for request in requests:
            ids = tokenizer.encode_chat(request.messages)
            if len(ids) > limits.max_prompt_tokens:
                limit = f"evaluation.max_prompt_tokens={limits.max_prompt_tokens}"
                refusal = f"a prompt has {len(ids)} tokens; {limit} is too small"
                record(request, Answer(None, refusal=refusal, end="too_long"))
                continue
            episode = _FIRST_EPISODE + request.seed % _STREAMS
            while episode in waiting:
                episode += 1
            waiting[episode] = request, len(ids)
            prompts.add(tuple(ids))
            sampler.submit(Request(episode, tuple(ids), most, decoding))
        pace = Pace(sampler.work)
        with activity.doing(lambda: ", ".join(pace.words(prompts=len(prompts)))):
            while waiting:
                for episode, reply in sampler.advance(max_steps=_STEPS):
                    sampler.release(episode)
                    request, prompt_tokens = waiting.pop(episode)
                    told = Answer(reply.text, prompt_tokens, len(reply.ids), end=reply.finish)
                    record(request, told)
                pace.note()
