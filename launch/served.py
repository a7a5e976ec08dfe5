"""Answers of an endpoint, sampled and judged as those of a policy in this process."""

from __future__ import annotations

import logging
from collections.abc import Generator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from launch.asked import Asked, Desk
from launch.config import JobConfig
from launch.endpoint import Endpoint
from launch.evaluation import (
    RECORDED_SAMPLES,
    Evaluator,
    Line,
    Record,
    WithoutRows,
    right_one,
    vote,
)
from launch.journal import Journal
from launch.verdicts import Verdict
from launch.votes import Decode
from minirl.errors import UserError
from rewards.verbal import Ask
from sqlenv.envs.agentic import Agentic
from sqlenv.envs.single_turn import SingleTurn
from sqlenv.types import Example

_log = logging.getLogger(__name__)

ANSWERS = "answers.jsonl"


class Served(Evaluator):
    """Measures the accuracy of a model behind an endpoint. Every answer is paid for once.

    Args:
        desk: Asks, and keeps answers.
        journal: What was answered, and what it cost.
        environment: Judges replies.
        decode: How questions are answered.
        workers: Replies that are judged at a time.
        record: Writes an episode down for a person to look at.
    """

    def __init__(
        self,
        desk: Desk,
        journal: Journal,
        environment: SingleTurn,
        decode: Decode,
        workers: int,
        *,
        record: Record,
    ) -> None:
        self._desk, self._journal = desk, journal
        self._environment, self._decode, self._workers = (
            WithoutRows(environment, record),
            decode,
            workers,
        )
        self._choose = right_one if decode.kind == "pass" else vote
        self._refused = 0

    def notes(self) -> dict[str, Any]:
        """Give the cost in tokens, and how many requests were refused."""
        spent = self._journal.spent
        return {
            "calls": spent.calls,
            "prompt_tokens": spent.prompt_tokens,
            "completion_tokens": spent.completion_tokens,
            "refused": self._refused,
        }

    def _free_memory(self) -> None:
        """Hold nothing: the weights are elsewhere."""

    def _answer(
        self, examples: Sequence[Example], *, first: int
    ) -> tuple[list[Verdict], list[Line]]:
        begun = [self._environment.reset(example) for example in examples]
        wishes = [
            (
                example.id,
                [Ask("generate", number, prompt) for number in range(self._decode.samples)],
            )
            for example, (_, prompt) in zip(examples, begun, strict=True)
        ]
        texts = self._desk.texts(wishes)
        refused = sum(text is None for each in texts for text in each)
        self._refused += refused
        if self._journal.refusal:
            raise UserError(f"the endpoint took no request at all: {self._journal.refusal}")
        jobs = [
            (episode, text or "")
            for (episode, _), each in zip(begun, texts, strict=True)
            for text in each
        ]
        with ThreadPoolExecutor(self._workers) as threads:
            judged = iter(threads.map(lambda job: self._environment.step(*job)[0], jobs))
            groups = [[next(judged) for _ in range(self._decode.samples)] for _ in examples]
        lines = [
            _line("\n".join(message.content for message in prompt), group)
            for (_, prompt), group in zip(begun, groups, strict=True)
        ]
        verdicts = [
            self._verdict(example, group) for example, group in zip(examples, groups, strict=True)
        ]
        return verdicts, lines


def _line(prompt: str, episodes: Sequence[Any]) -> Line:
    """Write down the first samples of a question."""
    records = [episode.record for episode in episodes[:RECORDED_SAMPLES]]
    told = [{"turns": record["turns"]} for record in records]
    return {**records[0]["example"], "prompt": prompt, "trajectories": told}


@contextmanager
def served(
    asked: Asked,
    config: JobConfig,
    decode: Decode,
    environment: SingleTurn | Agentic,
    answers: Path,
    *,
    record: Record,
) -> Generator[Served]:
    """Open what asks an endpoint.

    Args:
        asked: Names the endpoint and its model.
        config: The job; `verbal` says how calls are made.
        decode: How questions are answered; its temperature is sent, unless that of `verbal` is
            null, and its top-p where it has one.
        environment: Judges replies.
        answers: Where answers are kept.
        record: Writes an episode down for a person to look at.

    Raises:
        UserError: The episode has several turns.
    """
    if isinstance(environment, Agentic):
        raise UserError("--endpoint: one reply a question; set evaluation.episode=single_turn")
    is_free = config.verbal.temperature is None
    verbal = config.verbal.model_copy(
        update={"temperature": None if is_free else decode.temperature}
    )
    top_p = decode.top_p if decode.temperature else 1.0
    endpoint = Endpoint(asked.url, asked.identity, verbal, top_p=top_p)
    try:
        with Journal(answers) as journal:
            manner = config.model_copy(update={"verbal": verbal})
            desk = Desk(endpoint, journal, asked, manner, top_p=top_p)
            yield Served(desk, journal, environment, decode, config.executor.workers, record=record)
    finally:
        # After a failure or an interruption calls under way end, and no more begin.
        endpoint.stop()
        endpoint.close()
