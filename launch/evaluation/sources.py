"""The sources of samples: a file, an endpoint, a checkpoint. Whatever they give is judged alike."""

from __future__ import annotations

from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import TYPE_CHECKING, Any, Protocol

from launch import cli
from launch.evaluation.cache import DiskCache
from launch.evaluation.decoding import Decode
from launch.evaluation.targets import Target
from sqlenv.config import AgenticConfig
from sqlenv.errors import UserError
from sqlenv.sql.extraction import extract_sql
from sqlenv.types import Example

if TYPE_CHECKING:
    from launch.config import JobConfig
    from launch.evaluation.client import CachedClient
    from launch.wiring import SqlSide

RECORDED_SAMPLES = 8
"""Samples of a question that `trajectories.jsonl` has."""
CHOICES = "choices.jsonl"
_CHUNK = 128
"""Questions that are sampled together: what an interruption of a policy may cost."""

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


class Source(Protocol):
    """A model that is asked, and what belongs to it while it is."""

    def __call__(self, examples: Sequence[Example], show: Show) -> Answers:
        """Answer all questions."""
        ...


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
    open_source = _endpoint if target.policy is None else _policy
    with (
        open_source(target, config, decode, sql, out) as source,
        cli.progress_bar("answers") as show,
    ):
        return source(examples, show)


@contextmanager
def _endpoint(
    target: Target, config: JobConfig, decode: Decode, sql: SqlSide, out: Path
) -> Generator[Source]:
    """Open an endpoint; every answer is paid for once.

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
    settings = _answer_settings(target, verbal.temperature, verbal.max_tokens, top_p)
    try:
        with CachedClient(endpoint, out, settings, seed=config.seed) as client:
            if decode.kind == "judge":
                from launch.evaluation.deliberation import play_apart

                play = play_apart(endpoint, verbal.parallel, verbal.timeout_s)
                yield lambda examples, show: _judged(examples, client, play, sql, config, show)
            else:
                yield lambda examples, show: _asked(examples, client, decode, sql, config, show)
    finally:
        # After a failure or an interruption calls under way end, and no more begin.
        endpoint.stop()
        endpoint.close()


def _asked(
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


def _judged(
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


@contextmanager
def _policy(
    target: Target, config: JobConfig, decode: Decode, sql: SqlSide, out: Path
) -> Generator[Source]:
    """Open a policy; its weights are read only if there is a question left to sample."""
    from launch.policy import load_policy
    from launch.serving import serving

    policy = target.policy
    assert policy is not None
    sampler = {"sampler": config.rollout.backend}

    def sample(examples: Sequence[Example], show: Show) -> Answers:
        cache = DiskCache(out / "samples")
        kept = [cache.get(example.id) for example in examples]
        done = next((n for n, one in enumerate(kept) if one is None), len(kept))
        notes = cache.get("notes") or {}
        if done < len(examples):
            from launch.evaluation.sampling import Evaluator, TakenAsTheyAre

            show(done, len(examples), cli.COMPILING)
            model, tokenizer = load_policy(policy, config)
            sql.check_prompts("test", map(sql.evaluation_prompt, examples), tokenizer)
            is_agentic = sql.evaluation_turns > 1
            with serving(config, policy.model, out) as servers:
                evaluator = Evaluator(
                    model,
                    tokenizer,
                    sql.evaluation_environment()
                    if is_agentic
                    else TakenAsTheyAre(sql.evaluation_prompt, config.env.wrapping),
                    config.sampler,
                    decode,
                    seed=config.seed,
                    max_turns=sql.evaluation_turns,
                    servers=servers,
                    record=sql.record if is_agentic else None,
                )
                for at in range(done, len(examples), _CHUNK):
                    new = evaluator.sample(examples[at : at + _CHUNK], first=at)
                    for example, one in zip(examples[at:], new, strict=False):
                        cache[example.id] = asdict(one)
                    kept[at : at + len(new)] = map(asdict, new)
                    show(at + len(new), len(examples), "")
                evaluator.free_memory()
                notes = cache["notes"] = evaluator.notes()
        cache.close()
        return Answers([_read(one) for one in kept], sampler | notes)

    def judge(examples: Sequence[Example], show: Show) -> Answers:
        from launch.evaluation.client import CachedClient
        from launch.evaluation.deliberation import play_in_step
        from launch.evaluation.policy_client import PolicyModel

        verbal = config.verbal
        settings = _answer_settings(target, verbal.temperature, verbal.max_tokens)
        model = load_policy(policy, config)
        with (
            serving(config, policy.model, out) as servers,
            CachedClient(
                PolicyModel(*model, config, servers), out, settings, seed=config.seed
            ) as client,
        ):
            found = _judged(examples, client, play_in_step, sql, config, show)
        return Answers(found.samples, {**found.notes, **sampler})

    yield judge if decode.kind == "judge" else sample


def _read(fields: Mapping[str, Any]) -> Sampled:
    queries, replies, turns = (tuple(fields[name]) for name in ("queries", "replies", "turns"))
    return Sampled(queries, replies, turns, fields["line"])


def _answer_settings(
    target: Target, temperature: float | None, max_tokens: int, top_p: float = 1.0
) -> list[tuple[str, Any]]:
    """List what decides an answer beside its messages and seed."""
    top = [("top_p", top_p)] if top_p < 1 else []
    model = [("model", target.identity), ("temperature", temperature)]
    return [*model, ("max_tokens", max_tokens), *top]
