"""Verbal RL (PaVeRL-SQL, section III-B and appendix A): sample candidates, let a model judge them.

`deliberate` is a generator: it yields requests for a model, all at once where they do not depend on
one another, and is sent the answers.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass
from random import Random
from statistics import fmean
from typing import Literal

from sqlglot import exp
from sqlglot.errors import SqlglotError

from rewards.config import JudgeConfig
from sqlenv.evaluators.official import same_query
from sqlenv.sql.answers import block_of
from sqlenv.sql.extraction import parse_copy
from sqlenv.types import Observation, Result, Table

RequestKind = Literal["generate", "judge"]


@dataclass(frozen=True, slots=True)
class ReplyRequest:
    """A request for an answer of the model; `number` counts those of one kind and question."""

    kind: RequestKind
    number: int
    messages: Observation


Texts = Sequence[str | None]
"""Answers in the order of the requests; None where the model refused one."""


@dataclass(frozen=True, slots=True)
class Task:
    """One question: its prompts (1 asks for SQL, 2 for a score of each query), how SQL is found in
    an answer ("" where there is none) and run, and the name of the random stream of ties.
    """

    prompt: Observation
    judge_prompt: Callable[[Sequence[str]], Observation]
    extract: Callable[[str], str]
    execute: Callable[[Sequence[str]], Sequence[Result]]
    name: str


@dataclass(slots=True)
class Choice:
    """What came of one question, counted while it is played.

    Attributes:
        sql: The query chosen; empty when no answer held one.
        candidates: The distinct executable queries, in the order of the answers.
        scores: Mean score of each candidate; empty when there was nothing to judge.
        executable: Answers whose query ran, repetitions included.
        refused: Requests of both kinds that the model refused.
        judged: Judgements that the scores are means of.
        left_out: Judgements without an answer that could be parsed.
    """

    sql: str = ""
    candidates: tuple[str, ...] = ()
    scores: tuple[float, ...] = ()
    attempts: int = 0
    executable: int = 0
    refused: int = 0
    judged: int = 0
    left_out: int = 0


def deliberate(
    task: Task, config: JudgeConfig, *, seed: int
) -> Generator[list[ReplyRequest], Texts, Choice]:
    """Collect executable candidates, have the whole set judged, and choose the best, ties by seed.

    A single candidate is chosen unjudged. Without one that runs, the query of the last answer that
    holds one.

    Note:
        The released code demands a row of result, does not deduplicate, repeats unparsable
        judgements without bound, and returns candidate 0 where the best is unique.
    """
    choice = Choice()
    kept = choice.candidates = yield from _collect(task, config, choice)
    if len(kept) < 2:
        choice.sql = kept[0] if kept else choice.sql
        return choice
    judged = yield from _judge(task.judge_prompt(kept), len(kept), config, choice)
    choice.judged, choice.left_out = len(judged), config.judgements - len(judged)
    choice.scores = mean_scores(judged, len(kept))
    choice.sql = best(kept, choice.scores, Random(f"{seed} {task.name}"))
    return choice


def _collect(
    task: Task, config: JudgeConfig, choice: Choice
) -> Generator[list[ReplyRequest], Texts, tuple[str, ...]]:
    """Ask in waves of as many answers as are missing; of twice as many after an empty one.

    Returns the candidates; the choice is the last query for now.
    """
    kept: dict[str, str] = {}
    widening = 1
    while size := min(
        (config.candidates - len(kept)) * widening, config.attempts - choice.attempts
    ):
        texts = yield [
            ReplyRequest("generate", choice.attempts + i, task.prompt) for i in range(size)
        ]
        choice.attempts += size
        choice.refused += sum(text is None for text in texts)
        queries = [sql for text in texts if text and (sql := task.extract(text))]
        choice.sql = queries[-1] if queries else choice.sql
        before = len(kept)
        for sql, result in zip(queries, task.execute(queries), strict=True):
            if isinstance(result, Table) and len(kept) < config.candidates:
                choice.executable += 1
                kept.setdefault(normalise_sql(sql), sql)
        widening = 1 if len(kept) > before else widening * 2
        if all(text is None for text in texts):
            break
    return tuple(kept.values())


def _judge(
    prompt: Observation, count: int, config: JudgeConfig, choice: Choice
) -> Generator[list[ReplyRequest], Texts, list[tuple[float, ...]]]:
    """Ask for all judgements at once, and a few times again for those that cannot be parsed.

    Returns the scores of each that can.
    """
    scores: list[tuple[float, ...]] = []
    asked = 0
    for _ in range(1 + config.judge_retries):
        missing = config.judgements - len(scores)
        if not missing:
            break
        texts = yield [ReplyRequest("judge", asked + i, prompt) for i in range(missing)]
        asked += missing
        choice.refused += sum(text is None for text in texts)
        scores += [parsed for text in texts if (parsed := parse_scores(text or "", count))]
        if all(text is None for text in texts):
            break
    return scores


_NUMBER = r"[+-]?(?:\d+\.?\d*|\.\d+)(?:e[+-]?\d+)?"
_LINE = re.compile(
    rf"^[ \t*`-]*SQL[ \t]*(\d{{1,4}})[ \t*`]*[:=][ \t*`]*({_NUMBER})[*`,;.]*(?=\s|$)",
    re.MULTILINE | re.IGNORECASE,
)


def parse_scores(text: str, count: int) -> tuple[float, ...] | None:
    """Read a judgement: the lines `SQLi: x` of the last `<scores>` block, reasoning ignored.

    One score for each of `count` queries, clamped to [0, 1]; None where one has none or two.
    """
    lines = _LINE.findall(block_of(text, "scores"))
    scores = {int(number): float(value) for number, value in lines}
    if len(lines) != count or scores.keys() != set(range(1, count + 1)):
        return None
    return tuple(min(1.0, max(0.0, scores[number])) for number in range(1, count + 1))


def mean_scores(judgements: Sequence[Sequence[float]], count: int) -> tuple[float, ...]:
    """Average judgements (rows) candidate by candidate; zeros without any judgement."""
    if not judgements:
        return (0.0,) * count
    return tuple(fmean(column) for column in zip(*judgements, strict=True))


def best(candidates: Sequence[str], scores: Sequence[float], rng: Random) -> str:
    """Return the candidate of the highest score; of equal ones (to 1e-9) any, by `rng`."""
    highest = max(scores)
    tied = [c for c, score in zip(candidates, scores, strict=True) if highest - score <= 1e-9]
    return rng.choice(tied)


def normalise_sql(sql: str) -> str:
    """Write a query so that spelling does not matter: blanks, comments, case, optional words.

    Strings and quoted names, which may be strings, stay as they are.
    """
    tree = parse_copy(sql)
    if tree is not None:
        for name in tree.find_all(exp.Identifier):
            if not name.quoted:
                name.set("this", name.name.lower())
        try:
            return tree.sql(dialect="sqlite", comments=False)
        except (SqlglotError, RecursionError):
            pass
    return same_query(sql)
