"""The sources of samples: a file, an endpoint, a checkpoint. Whatever they give is judged alike."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any

from launch import cli
from launch.evaluation.decoding import Decode
from sqlenv.config import AgenticConfig
from sqlenv.errors import UserError
from sqlenv.sql.extraction import extract_sql
from sqlenv.types import Example

if TYPE_CHECKING:
    from launch.config import JobConfig
    from launch.evaluation.client import CachedClient
    from launch.evaluation.targets import Target
    from launch.wiring import SqlSide

RECORDED_SAMPLES = 8
"""Samples of a question that `trajectories.jsonl` has."""
CHOICES = "choices.jsonl"
_CHUNK = 128
"""Questions that are asked together."""

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


def answers_of(
    target: Target,
    config: JobConfig,
    decode: Decode,
    sql: SqlSide,
    examples: Sequence[Example],
    out: Path,
) -> Answers:
    """Let a model answer the questions, or what is left of them.

    Args:
        target: Who answers.
        config: The job.
        decode: How questions are answered.
        sql: Its prompts.
        examples: The questions.
        out: Folder of the results, where answers are kept.

    Raises:
        UserError: The model cannot be used.
    """
    with cli.progress_bar("answers") as show:
        if target.policy is None:
            return _ask_endpoint(target, config, decode, sql, examples, out, show)
        from launch.evaluation import policy_source  # imports JAX

        ask = policy_source.deliberate if decode.kind == "judge" else policy_source.sample
        return ask(target, config, decode, sql, examples, out, show)


def _ask_endpoint(
    target: Target,
    config: JobConfig,
    decode: Decode,
    sql: SqlSide,
    examples: Sequence[Example],
    out: Path,
    show: Show,
) -> Answers:
    """Ask an endpoint; every answer is paid for once.

    Its temperature is that of the decoding unless that of `verbal` is null, where none is sent.
    """
    from launch.evaluation.client import CachedClient
    from launch.evaluation.endpoint import Endpoint

    env, verbal = config.env, config.verbal
    if isinstance(env, AgenticConfig) and config.evaluation.episode == "agentic":
        raise UserError("--endpoint: one reply a question; set evaluation.episode=single_turn")
    if decode.kind != "judge" and verbal.temperature is not None:
        verbal = verbal.model_copy(update={"temperature": decode.temperature})
    top_p = decode.top_p if decode.temperature and decode.kind != "judge" else 1.0
    endpoint = Endpoint(target.url, target.identity, verbal, top_p=top_p)
    settings = answer_settings(target, verbal.temperature, verbal.max_tokens, top_p)
    try:
        with CachedClient(endpoint, out, settings, seed=config.seed) as client:
            if decode.kind == "judge":
                from launch.evaluation.deliberation import play_apart

                play = play_apart(endpoint, verbal.parallel, verbal.timeout_s)
                return deliberate(examples, client, play, sql, config, show)
            return _ask(examples, client, decode, sql, config, show)
    finally:
        # After a failure or an interruption calls under way end, and no more begin.
        endpoint.stop()
        endpoint.close()


def _ask(
    examples: Sequence[Example],
    client: CachedClient,
    decode: Decode,
    sql: SqlSide,
    config: JobConfig,
    show: Show,
) -> Answers:
    """Ask for replies to each question."""
    from rewards.verbal import Ask

    texts: list[list[str | None]] = []
    for at in range(0, len(examples), _CHUNK):
        prompts = [(one.id, sql.single_turn_prompt(one)) for one in examples[at : at + _CHUNK]]
        asks = [
            (name, [Ask("generate", number, prompt) for number in range(decode.samples)])
            for name, prompt in prompts
        ]
        texts += client.texts(asks)
        if client.refusal:
            raise UserError(f"the endpoint took no request at all: {client.refusal}")
        show(len(texts), len(examples), f"{client.spent.completion_tokens:,} tokens written")
    replies = [tuple(text or "" for text in each) for each in texts]
    samples = [
        Sampled(tuple(extract_sql(text, config.env.wrapping) for text in each), each)
        for each in replies
    ]
    refused = sum(text is None for each in texts for text in each)
    return Answers(samples, {**asdict(client.spent), "refused": refused})


def deliberate(
    examples: Sequence[Example],
    client: CachedClient,
    play: Any,
    sql: SqlSide,
    config: JobConfig,
    show: Show,
) -> Answers:
    """Let the model write several queries for each question, judge them, and take the best."""
    from launch.evaluation.deliberation import choose_all

    choices = choose_all(examples, client, play, sql, config, show)
    counts = ("attempts", "executable", "refused", "judged", "left_out")
    return Answers(
        [Sampled((choice.sql,), choice=asdict(choice)) for choice in choices],
        {
            **{name: sum(getattr(choice, name) for choice in choices) for name in counts},
            "cost": {kind: asdict(cost) for kind, cost in sorted(client.cost.items())},
        },
    )


def answer_settings(
    target: Target, temperature: float | None, max_tokens: int, top_p: float = 1.0
) -> list[tuple[str, Any]]:
    """List what decides an answer beside its messages and seed."""
    top = [("top_p", top_p)] if top_p < 1 else []
    model = [("model", target.identity), ("temperature", temperature)]
    return [*model, ("max_tokens", max_tokens), *top]
