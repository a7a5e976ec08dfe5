"""The sources of samples: a file, an endpoint, a checkpoint. Whatever they give is judged alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch import cli
from sqlenv.config import AgenticConfig
from sqlenv.errors import UserError
from sqlenv.sql.extraction import extract_sql
from sqlenv.types import Example

if TYPE_CHECKING:
    from launch.build import SqlSide
    from launch.config import JobConfig
    from launch.evaluation.client import CachedClient
    from launch.evaluation.decoding import Decode
    from launch.evaluation.targets import Target

RECORDED_SAMPLES = 8
"""Samples of a question that `trajectories.jsonl` has."""
_CHUNK = 128  # questions that are asked together

Show = Callable[[int, int, str], None]


@dataclass(frozen=True, slots=True)
class Sampled:
    """What a source gives to one question.

    Attributes:
        queries: One, or several samples.
        replies: The texts that they stand in; none in a file of predictions.
        turns: Replies of each episode, where the model may call a tool.
        line: Of `trajectories.jsonl`, where episodes have several turns.
        choice: How the query was chosen among the model's own, with `judge@K`.
    """

    queries: tuple[str, ...]
    replies: tuple[str, ...] = ()
    turns: tuple[int, ...] = ()
    line: Mapping[str, Any] | None = None
    choice: Mapping[str, Any] | None = None


@dataclass(frozen=True, slots=True)
class Answers:
    """What a source gives to all questions, and what it says of its work."""

    samples: Sequence[Sampled]
    notes: Mapping[str, Any] = field(default_factory=dict)


@dataclass(frozen=True, slots=True)
class EvaluationJob:
    """A model that is asked: who, how, and the folder where answers are kept."""

    target: Target
    config: JobConfig
    decode: Decode
    sql: SqlSide
    out: Path

    def answer_settings(self, temperature: float | None, top_p: float = 1.0) -> list[tuple]:
        """List what decides an answer beside its messages and seed."""
        model = [("model", self.target.identity), ("temperature", temperature)]
        top = [("top_p", top_p)] if top_p < 1 else []
        return [*model, ("max_tokens", self.config.verbal.max_tokens), *top]


def answers_of(job: EvaluationJob, examples: Sequence[Example]) -> Answers:
    """Let a model answer the questions, or what is left of them; a `UserError` if it cannot."""
    with cli.progress_bar("answers") as show:
        if job.target.policy is None:
            return _ask_endpoint(job, examples, show)
        from launch.evaluation import policy_source  # imports JAX

        is_judge = job.decode.kind == "judge"
        ask = policy_source.deliberate if is_judge else policy_source.sample
        return ask(job, job.target.policy, examples, show)


def _ask_endpoint(job: EvaluationJob, examples: Sequence[Example], show: Show) -> Answers:
    """Ask an endpoint; every answer is paid for once.

    Its temperature is that of the decoding unless that of `verbal` is null, where none is sent.
    """
    from launch.evaluation.client import CachedClient
    from launch.evaluation.deliberation import deliberate
    from launch.evaluation.endpoint import Endpoint

    config, decode, target = job.config, job.decode, job.target
    is_judge, verbal = decode.kind == "judge", config.verbal
    if isinstance(config.env, AgenticConfig) and config.evaluation.episode == "agentic":
        raise UserError("--endpoint: one reply a question; set evaluation.episode=single_turn")
    if not is_judge and verbal.temperature is not None:
        verbal = verbal.model_copy(update={"temperature": decode.temperature})
    top_p = 1.0 if is_judge or not decode.temperature else decode.top_p
    endpoint = Endpoint(target.url, target.identity, verbal, top_p=top_p)
    settings = job.answer_settings(verbal.temperature, top_p)
    try:
        with CachedClient(endpoint, job.out, settings, seed=config.seed) as client:
            return (deliberate if is_judge else _ask)(job, examples, client, show)
    finally:
        endpoint.close()


def _ask(
    job: EvaluationJob, examples: Sequence[Example], client: CachedClient, show: Show
) -> Answers:
    from rewards.verbal import Ask

    texts: list[list[str | None]] = []
    for at in range(0, len(examples), _CHUNK):
        asked = [(one.id, job.sql.prompts.single_turn(one)) for one in examples[at : at + _CHUNK]]
        numbers = range(job.decode.samples)
        texts += client.texts(
            [(name, [Ask("generate", n, prompt) for n in numbers]) for name, prompt in asked]
        )
        if client.refusal:
            raise UserError(f"the endpoint took no request at all: {client.refusal}")
        show(len(texts), len(examples), f"{client.spent.completion_tokens:,} tokens written")
    replies = [tuple(text or "" for text in each) for each in texts]
    tag = job.config.env.wrapping
    samples = [Sampled(tuple(extract_sql(text, tag) for text in each), each) for each in replies]
    refused = sum(text is None for each in texts for text in each)
    return Answers(samples, {**asdict(client.spent), "refused": refused})
