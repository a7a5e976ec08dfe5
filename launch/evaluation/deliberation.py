"""Verbal RL (PaVeRL-SQL, section III-B): `--decode judge@K` on all questions of a split.

A model writes queries until K of them run, judges them, and the best one answers.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import asdict, dataclass, field
from functools import partial

from exchange import UserError
from launch.build import SqlSide
from launch.config import JobConfig
from launch.evaluation.client import Answer, CachedClient
from launch.evaluation.outcomes import Outcomes, hint, look, parts_of
from launch.evaluation.sources import Answers, Sampled, Show, outcome_of, token_limit
from rewards import verbal
from rewards.verbal import Ask, Choice, Task
from sqlenv.dialects import run_many
from sqlenv.sql.answers import answer_of
from sqlenv.types import Example, Result, Wrapping

_CHUNK = 256  # questions that are asked about together
_COUNTS = ("attempts", "executable", "refused", "judged", "left_out")


@dataclass(slots=True)
class _Tally:
    """What became of the answers so far, by question, and those that hold no query."""

    wrapping: Wrapping
    outcomes: dict[str, list[Outcomes]]
    unread: list[str] = field(default_factory=list)

    def add(self, name: str, asked: Sequence[Ask], answers: Sequence[Answer]) -> None:
        """Count the answers that were to hold a query."""
        for ask, answer in zip(asked, answers, strict=True):
            if ask.kind == "generate":
                query = answer_of(answer.text or "", self.wrapping).sql
                self.outcomes[name].append(outcome_of(answer, query))
                self.unread += [answer.text] if answer.text and not query else []


def deliberate(
    config: JobConfig, examples: Sequence[Example], client: CachedClient, sql: SqlSide, show: Show
) -> Answers:
    """Let the model write several queries for each question, judge them, and take the best."""
    wrapping, found = config.answer_wrapping, dict[str, Choice]()
    tally, is_seen = _Tally(wrapping, {one.id: [] for one in examples}), False
    for part in parts_of(len(examples), config.verbal.candidates, size=_CHUNK):
        games = {
            one.id: verbal.deliberate(_task(one, config, sql), config.verbal, seed=config.seed)
            for one in examples[part]
        }
        wishes = {name: next(game) for name, game in games.items()}
        while wishes:
            answers = client.answers(list(wishes.items()))
            for name, each in zip(list(wishes), answers, strict=True):
                tally.add(name, wishes[name], each)
                try:
                    wishes[name] = games[name].send([one.text for one in each])
                except StopIteration as end:
                    found[name] = end.value
                    del wishes[name]
            if not is_seen:
                first = Outcomes.total(one for each in tally.outcomes.values() for one in each)
                look(first, tally.unread, wrapping, limit=token_limit(config), stops=True)
                is_seen = True
            show(len(found), len(examples), f"{client.spent.completion_tokens:,} tokens written")
        # Of the few questions that come first it may be their own fault.
        if client.refusal and (part.start or part.stop == len(examples)):
            raise UserError(client.refusal)
    choices = [found[one.id] for one in examples]
    samples = [
        Sampled((one.sql,), choice=asdict(one), outcomes=Outcomes.total(tally.outcomes[example.id]))
        for example, one in zip(examples, choices, strict=True)
    ]
    return Answers(
        samples,
        {
            **{name: sum(getattr(choice, name) for choice in choices) for name in _COUNTS},
            "cost": {kind: asdict(cost) for kind, cost in sorted(client.cost.items())},
            "hint": hint(tally.unread, wrapping),
        },
    )


def _task(example: Example, config: JobConfig, sql: SqlSide) -> Task:
    def execute(queries: Sequence[str]) -> Sequence[Result]:
        return run_many(sql.executor.execute_many, [(example, query) for query in queries])

    return Task(
        prompt=sql.prompts.single_turn(example),
        judge_prompt=partial(sql.prompts.judge, example),
        extract=lambda text: answer_of(text, config.answer_wrapping).sql,
        execute=execute,
        name=example.id,
    )
