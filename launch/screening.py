"""The screening: which training questions can teach a policy, and what it answers right itself."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from functools import partial
from pathlib import Path
from random import Random
from shutil import copyfile
from typing import Any

from launch import cli
from launch.build import SqlSide
from launch.config import JobConfig
from launch.data.prompts import read_tokenizer
from launch.evaluation.answers import AnswerFile, Decode, Sampled
from launch.evaluation.sampling import Evaluator
from launch.files import (
    SCREENED_SHARES,
    SCREENING,
    bytes_digest,
    database_digest,
    model_digest,
    write_json,
    write_text,
)
from launch.learner import load_model, serving
from minirl.exchange import UserError
from minirl.run import distributed
from minirl.run.files import read_lines
from minirl.train.rollouts import spread
from sqlenv.cache import shared_cache
from sqlenv.data.loading import question_digest
from sqlenv.envs.build import max_replies
from sqlenv.sql.lexer import tokens
from sqlenv.types import Example

_log = logging.getLogger(__name__)

MOST_ANSWERS = 2
"""Different right queries of a question that a warm start learns."""
_ANSWERS = "screening"


@dataclass(frozen=True, slots=True)
class OwnAnswer:
    """A right query that the policy wrote, and the reply that it stands in, which may follow others
    (`turn`, from 1).
    """

    sql: str
    reply: str
    turn: int


@dataclass(frozen=True, slots=True)
class Screened:
    """What a policy's sampled answers say of a training question.

    Attributes:
        number: The question's, among those of training.
        right: How many of the `samples` are right: on all witnesses, where these are asked.
        answers: Different right queries, the commonest first, at most `MOST_ANSWERS`.
    """

    number: int
    id: str
    db_id: str
    difficulty: str
    samples: int
    right: int
    answers: tuple[OwnAnswer, ...]

    @property
    def rate(self) -> float:
        """Return the share of right answers."""
        return self.right / self.samples


def screen(
    config: JobConfig, sql: SqlSide, train: Sequence[Example], model: Path
) -> list[Screened]:
    """Sample answers to training questions by the model of a folder, or what is left of it.

    The run folder has the answers so far and what they come to, and is read by a resumed run. What
    they come to is in the cache too, by the contents of all that decides it, for other runs.
    """
    path = config.folder / SCREENING
    strata = [example.db_id for example in train]
    limit = config.screen.questions
    # The smaller one of two screenings is the beginning of the larger one.
    size = min(limit or len(train), len(set(strata)))
    order = spread(strata, size, Random(f"{config.seed} screening"), first=size)[:limit]
    if distributed.from_first(path.exists):
        return _read(path, len(order))
    asked = [train[number] for number in order]
    cache, key = shared_cache(), f"screening {_digest(config, sql, order, asked, model)}"
    if (cached := distributed.from_first(lambda: cache.stored(key))) is not None:
        _log.info("screening: another run of these settings had the same, %s", cached)
        found = _read(cached, len(order))
    else:
        sampled = _sample(config, sql, asked, model)
        found = [
            _screened(number, example, one)
            for number, example, one in zip(order, asked, sampled, strict=True)
        ]
    distributed.from_first(lambda: _write(config.folder, found))
    distributed.from_first(lambda: cache.made_file(key, partial(copyfile, path)))
    return found


def _read(path: Path, expected: int) -> list[Screened]:
    advice = "delete it to screen again"
    lines = distributed.from_first(lambda: list(read_lines(path, Screened, advice=advice)))
    if (count := len(lines)) != expected:
        raise UserError(f"{path}: cut off, holds {count:,} of {expected:,} questions; {advice}")
    return [screened for _, screened in lines]


def _digest(
    config: JobConfig, sql: SqlSide, order: Sequence[int], asked: Sequence[Example], model: Path
) -> str:
    """Digest all that decides a screening: weights, questions, databases, prompts, settings."""
    tokenizer = read_tokenizer(config, model)
    prompts = (sql.training_prompt(example, tokenizer) for example in asked)
    facts = [
        model_digest(model),
        config.model.dtype,
        [*order],
        question_digest(asked),
        database_digest(asked),
        [[(message.role, message.content) for message in prompt] for prompt in prompts],
        config.train.group_size,
        config.seed,
        config.sampler.model_dump(exclude={"slots", "cache_gb"}),
        config.executor.model_dump(mode="json", exclude={"workers"}),
        config.prompt.template,
        config.env.model_dump(mode="json"),
    ]
    return bytes_digest(json.dumps(facts).encode())


def _sample(
    config: JobConfig, sql: SqlSide, asked: Sequence[Example], model: Path
) -> list[Sampled]:
    folder, limits, samples = config.folder, config.sampler, config.train.group_size
    decode = Decode(samples, limits.temperature, "pass", limits.top_p)
    decoder, tokenizer = load_model(config, model)
    # Queries are looked for as in training.
    evaluation = config.evaluation.model_copy(update={"wrapping": None})
    read = config.model_copy(update={"evaluation": evaluation})
    with (
        serving(config, model, folder, limits, lora=None) as servers,
        cli.progress_bar("screening") as progress,
    ):
        evaluator = Evaluator(
            decoder, tokenizer, sql.environment(tokenizer), limits, read,
            group_size=samples, max_turns=max_replies(config.env), servers=servers,
        )  # fmt: skip
        file = AnswerFile(folder / _ANSWERS)
        found = evaluator.answers(asked, decode, file, progress, stops=False)
        evaluator.free_memory()
        return found


def _screened(number: int, example: Example, sampled: Sampled) -> Screened:
    known: defaultdict[tuple[str, ...], list[int]] = defaultdict(list)
    for n, sql in enumerate(sampled.queries):
        if sampled.right[n] and sampled.ends[n] == "stop":
            known[tokens(sql)].append(n)
    commonest = sorted(known.values(), key=len, reverse=True)[:MOST_ANSWERS]
    turns = sampled.turns or (1,) * len(sampled.queries)
    return Screened(
        number, example.id, example.db_id, example.difficulty,
        samples=len(sampled.queries), right=sum(sampled.right),
        answers=tuple(
            OwnAnswer(sampled.queries[n], sampled.replies[n], turns[n])
            for n, *_ in commonest
        ),
    )  # fmt: skip


def _write(folder: Path, found: Sequence[Screened]) -> None:
    every, parts = shares(found), by_part(found)
    write_json(folder / SCREENED_SHARES, {"all": every, **parts})
    for name, part in {"all": every, **parts["difficulty"]}.items():
        told = (f"{100 * part[kind]:.0f} % {kind}" for kind in ("never", "sometimes", "always"))
        _log.info(
            "screening, %s: of %d questions %s right", name, part["questions"], ", ".join(told)
        )
    write_text(folder / SCREENING, "".join(f"{json.dumps(asdict(one))}\n" for one in found))


def shares(found: Sequence[Screened]) -> dict[str, Any]:
    """Count the questions, and give the shares of which no answer, some or all answers are right,
    and of all right answers.
    """
    count = len(found)
    return {
        "questions": count,
        "never": sum(one.right == 0 for one in found) / count,
        "sometimes": sum(0 < one.right < one.samples for one in found) / count,
        "always": sum(one.right == one.samples for one in found) / count,
        "right": sum(one.rate for one in found) / count,
    }


def by_part(found: Sequence[Screened]) -> dict[str, dict[str, dict[str, Any]]]:
    """Give the `shares` by level of difficulty and by database."""
    parts = {name: defaultdict[str, list[Screened]](list) for name in ("difficulty", "database")}
    for one in found:
        parts["difficulty"][one.difficulty or "unknown"].append(one)
        parts["database"][one.db_id].append(one)
    return {
        name: {key: shares(each) for key, each in sorted(part.items())}
        for name, part in parts.items()
    }


def kept(
    config: JobConfig, train: Sequence[Example], found: Iterable[Screened]
) -> tuple[Example, ...]:
    """Keep the training questions whose pass rate is one of `data.train.pass_rate`.

    Raises:
        UserError: They are fewer than a step asks.
    """
    band = config.data.train.pass_rate
    assert band is not None
    low, high = band
    numbers = sorted(one.number for one in found if low <= one.rate <= high)
    _log.info(
        "screening: %d questions are right in %g to %g %% of their answers, and are learned from",
        len(numbers), 100 * low, 100 * high,
    )  # fmt: skip
    if len(numbers) < config.train.prompts_per_step:
        raise UserError(
            f"data.train.pass_rate={list(band)} keeps {len(numbers)} questions, fewer than "
            f"train.prompts_per_step={config.train.prompts_per_step}; widen it, or screen more "
            "(screen.questions)"
        )
    return tuple(train[number] for number in numbers)
