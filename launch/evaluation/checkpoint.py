"""Samples of a policy of ours, from the sampler of the job: kept by question, or deliberated on."""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from functools import cached_property
from operator import attrgetter
from pathlib import Path
from typing import Any

from launch.build import SqlSide, serving
from launch.config import JobConfig
from launch.data.prompts import read_tokenizer
from launch.evaluation.replies import Decode, hint
from launch.evaluation.responses import (
    CachedClient,
    ModelRequest,
    ModelResponse,
    SampleCache,
    Sampled,
)
from launch.evaluation.results import ModelFacts
from launch.evaluation.sampling import Evaluator, TakenAsTheyAre
from launch.evaluation.sources import Source, SourceOutput, deliberate, unread_of
from launch.files import model_digest, short
from launch.policy import PolicySource
from launch.weights import load_policy
from minirl.model.tokenizer import ChatTokenizer
from minirl.types import Progress
from sqlenv.executor.database import fingerprint
from sqlenv.types import Example

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
        run, backend = policy.run, config.rollout.sampler
        base = run.model.path if run else policy.model
        facts = ModelFacts(
            policy.name,
            str(policy.model),
            str(policy.checkpoint) if policy.checkpoint else None,
            _identity(policy),
            base.name if base else "tiny",
            run.reward.kind if run else None,
            None if backend == "native" else backend,
        )
        return cls(config if run else config.for_untrained(), decode, facts, policy, accelerator)

    def tokenizer(self) -> ChatTokenizer:
        """Read the tokenizer from the policy's folder."""
        return read_tokenizer(self.config, self.policy.model)

    def _own_settings(self) -> Mapping[str, Any]:
        config = self.config
        place = (self.policy.checkpoint or self.policy.model).resolve()
        return {
            "weights": self.identity,
            "dtype": config.model.dtype,
            "backend": config.rollout.sampler,
            "accelerator": self.accelerator,
            **config.model_dump(mode="json", include={"sampler"}),
            **(self._verbal_settings() if self.is_judge else {}),
            "places": {"model": str(place)},
        }

    def answers(
        self, examples: Sequence[Example], sql: SqlSide, out: Path, show: Progress
    ) -> SourceOutput:
        """Sample replies to questions that have none yet; without any such nothing is loaded."""
        config = self.config
        sampler = {"sampler": config.rollout.sampler}
        if self.is_judge:
            settings = self._client_settings(config.verbal.temperature)
            with ExitStack() as stack:
                model = _PolicyModel(config, self.policy, out, stack)
                client = CachedClient(model, out, settings, seed=config.seed)
                found, notes = deliberate(config, examples, stack.enter_context(client), sql, show)
            return found, {**notes, **sampler}
        settings = {key: one for key, one in self._own_settings().items() if key != "places"}
        settings |= self._job_settings()
        samples, notes = self._sampled(examples, SampleCache(out, settings), sql, out, show)
        told = hint(unread_of(samples), config.answer_wrapping)
        return samples, {**sampler, **notes, "hint": told}

    def _sampled(
        self,
        examples: Sequence[Example],
        cache: SampleCache,
        sql: SqlSide,
        out: Path,
        show: Progress,
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
            evaluator.free_memory()
            return samples, evaluator.notes()


def _identity(policy: PolicySource) -> str:
    lora = policy.lora and policy.lora.model_dump(mode="json")
    parts: list[Any] = [model_digest(policy.model), lora]
    if policy.checkpoint is not None:
        files = filter(Path.is_file, policy.checkpoint.rglob("*"))
        parts += sorted(_file(path, policy.checkpoint) for path in files)
    return short(json.dumps(parts).encode())


def _file(path: Path, checkpoint: Path) -> tuple[str, int, str]:
    size = path.stat().st_size
    contents = fingerprint(path) if size <= _SMALL_BYTES else ""
    return str(path.relative_to(checkpoint)), size, contents


class _PolicyModel:
    """Answers requests, each as an episode of one reply.

    The policy is loaded for the first request: where all are answered already, never.
    """

    def __init__(
        self, config: JobConfig, policy: PolicySource, out: Path, stack: ExitStack
    ) -> None:
        self._config, self._policy, self._out, self._stack = config, policy, out, stack
        verbal, limits = config.verbal, config.evaluation_sampler
        longest = (limits.max_response_tokens, limits.max_reply_tokens, verbal.max_tokens)
        most = min(tokens for tokens in longest if tokens is not None)
        self._limits = limits.model_copy(
            update={"max_response_tokens": most, "max_reply_tokens": None}
        )
        temperature = 1.0 if verbal.temperature is None else verbal.temperature
        self._decode = Decode(1, temperature, top_p=limits.top_p)
        self._asked = 0

    @cached_property
    def _evaluator(self) -> Evaluator:
        config, policy, limits = self._config, self._policy, self._limits
        model, tokenizer = load_policy(policy, config)
        servers = self._stack.enter_context(
            serving(config, policy.model, self._out, limits, lora=policy.lora)
        )
        asked = TakenAsTheyAre(attrgetter("messages"), config.answer_wrapping)
        # The samples that share a prompt in memory.
        samples = max(config.verbal.candidates, config.verbal.judgements)
        together = replace(self._decode, samples=samples)
        return Evaluator(
            model, tokenizer, asked, limits, together, seed=config.seed, servers=servers
        )

    def answer(
        self, requests: Sequence[Any], record: Callable[[ModelRequest, ModelResponse], None]
    ) -> None:
        """Sample an answer to each request, and record it; a prompt too long has none."""
        if not requests:
            return
        found = self._evaluator.sample(requests, first=self._asked, decode=self._decode)
        self._asked += len(requests)
        limit = f"evaluation.max_prompt_tokens={self._limits.max_prompt_tokens}"
        refusal = f"a prompt is too long; {limit} is too small"
        for request, one in zip(requests, found, strict=True):
            counts, (end,), (reply,) = one.outcomes, one.ends, one.replies
            answer = ModelResponse(reply, counts.prompt_tokens, counts.reply_tokens, end=end)
            record(
                request,
                answer if end != "too_long" else ModelResponse(None, refusal=refusal, end=end),
            )
