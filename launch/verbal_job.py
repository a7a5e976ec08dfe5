"""Verbal RL on a split: play the deliberations, write predictions and cost, show accuracy."""

from __future__ import annotations

import json
import logging
from collections import Counter
from collections.abc import Generator, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict
from functools import partial
from pathlib import Path
from time import perf_counter

from pydantic import BaseModel
from rich.table import Table as RichTable

from launch import cli
from launch.answers import PolicyAnswers
from launch.asked import Asked, Desk
from launch.build import SqlSide, serving
from launch.config import JobConfig
from launch.endpoint import Endpoint
from launch.eval_job import accuracies, questions
from launch.journal import Journal
from launch.official import write_official
from launch.policy import load_policy
from launch.run_folder import RESULT, claim_data, versions
from launch.testsets import Split
from launch.texts import write_json, write_text
from launch.verdicts import PREDICTIONS, Verdict, accuracy_table, read_verdicts
from minirl.run.files import Joined, keep_lines, naming, read_json
from rewards.verbal import Ask, Choice, Task, Texts, deliberate
from sqlenv.dialects import run as run_sql
from sqlenv.dialects import transpile
from sqlenv.envs.single_turn import find_matches
from sqlenv.errors import UserError
from sqlenv.sql.extraction import extract_sql
from sqlenv.types import Example, Result, SqlError

_log = logging.getLogger(__name__)

ANSWERS = "answers.jsonl"
CHOICES = "choices.jsonl"
# Questions of a policy in this process that are played side by side.
_CHUNK = 32

Game = Generator[list[Ask], Texts, Choice]


class _Line(Joined):
    """A line of the file of choices."""

    verdict: Verdict
    choice: Choice


class Choices:
    """A file of finished questions, and their verdicts by id; the whole lines of it are kept."""

    def __init__(self, path: Path, sql: SqlSide, config: JobConfig) -> None:
        self._path, self._sql, self._match = path, sql, config.env.match
        self.verdicts: dict[str, Verdict] = {}
        self._totals: Counter[str] = Counter()
        if path.exists():
            for line in keep_lines(
                path, _Line, advice="bring back the file of choices, or move it away"
            ):
                self._remember(line.verdict, line.choice)

    def add(self, example: Example, choice: Choice) -> None:
        """Judge what was chosen for a question, and write it down unless requests were refused:
        those cost nothing, and may be taken another day.
        """
        correct = self._is_correct(example, choice.sql)
        verdict = Verdict.of(example, choice.sql, correct=correct)
        if not choice.refused:
            fields = {**asdict(choice), **asdict(verdict)}
            with naming(self._path), self._path.open("a", encoding="utf-8") as file:
                file.write(json.dumps(fields) + "\n")
        self._remember(verdict, choice)

    def totals(self) -> dict[str, int]:
        """Sum the counts of all questions."""
        return {name: self._totals[name] for name in _COUNTS}

    def _remember(self, verdict: Verdict, choice: Choice) -> None:
        self.verdicts[verdict.id] = verdict
        self._totals.update({name: getattr(choice, name) for name in _COUNTS})

    def _is_correct(self, example: Example, sql: str) -> bool:
        if not sql or not example.gold_sql:
            return False
        executor = self._sql.executor
        result = run_sql(executor.execute, example, sql)
        return find_matches(example, sql, result, executor, (self._match,))[self._match]


_COUNTS = ("attempts", "executable", "refused", "judged", "left_out")


def run(config: JobConfig, asked: Asked, *, split: Split, out: Path, settings: str) -> None:
    """Answer the questions of a split, or what is left of them.

    Args:
        config: The job.
        asked: Who answers.
        split: `validation` is cut as in training, the others to `evaluation.questions`.
        out: Folder of the results.
        settings: YAML of what decides them.

    Raises:
        UserError: The endpoint fails, or takes no request at all.
    """
    start = perf_counter()
    with (
        questions(config, split, out=out, settings=settings) as (sql, examples),
        Journal(out / ANSWERS) as journal,
    ):
        data = claim_data(out, {split: examples})
        choices = Choices(out / CHOICES, sql, config)
        left = [example for example in examples if example.id not in choices.verdicts]
        with cli.progress_bar(f"verbal {split}") as progress:
            for example, choice in _answered(left, sql, journal, asked, config, out):
                choices.add(example, choice)
                status = f"{journal.spent.completion_tokens:,} tokens written"
                progress(len(choices.verdicts), len(examples), status)
        cost = {kind: asdict(cost) for kind, cost in sorted(journal.cost.items())}
    verdicts = [choices.verdicts[example.id] for example in examples]
    lines = (json.dumps(asdict(verdict)) + "\n" for verdict in verdicts)
    write_text(out / PREDICTIONS, "".join(lines))
    write_official(verdicts, out)
    known = [verdict for verdict in verdicts if verdict.gold]
    result = {
        **(accuracies(known) if known else {"questions": len(verdicts)}),
        **choices.totals(),
        "cost": cost,
        "seed": config.seed,
        "data": data,
        "model": asked.place,
        **asked.weights(),
        **asked.sampled_by(config),
        "versions": versions(),
        "seconds": round(perf_counter() - start, 1),
    }
    write_json(out / RESULT, result)
    show(out)


class _Result(BaseModel):
    """The part of `result.json` that is shown."""

    cost: dict[str, dict[str, int]]
    attempts: int
    executable: int
    judged: int
    left_out: int
    refused: int
    ci95: tuple[float, float] | None = None


def show(out: Path) -> None:
    """Print the results that a folder holds."""
    result = read_json(out / RESULT, _Result, advice="delete it to make it again")
    if result.ci95:
        known = [verdict for verdict in read_verdicts(out / PREDICTIONS) if verdict.gold]
        cli.output.print(accuracy_table(known, result.ci95))
    table = RichTable("cost", "calls", "tokens read", "tokens written")
    for column in table.columns[1:]:
        column.justify = "right"
    for kind, cost in result.cost.items():
        table.add_row(kind, *(f"{number:,}" for number in cost.values()))
    cli.output.print(table)
    cli.output.print(
        f"{result.attempts:,} attempts, {result.executable:,} with a query that ran; "
        f"{result.judged:,} judgements, {result.left_out:,} left out; "
        f"{result.refused:,} requests refused",
        soft_wrap=True,
    )
    if result.refused:
        cli.output.print(f"Delete {out / RESULT} to ask those again.", soft_wrap=True)
    cli.output.print(f"Predictions, choices and result: {out}", soft_wrap=True)


def _answered(
    examples: Sequence[Example],
    sql: SqlSide,
    journal: Journal,
    asked: Asked,
    config: JobConfig,
    out: Path,
) -> Iterator[tuple[Example, Choice]]:
    """Play all questions; hold choices back until the model has answered anything at all."""
    by_id = {example.id: example for example in examples}
    games = {
        name: deliberate(_task(example, sql, config), config.verbal, seed=config.seed)
        for name, example in by_id.items()
    }
    held: list[tuple[Example, Choice]] = []
    for name, choice in _play(games, journal, asked, config, out) if games else ():
        held.append((by_id[name], choice))
        if not journal.refusal:
            yield from held
            held = []
    if held:
        raise UserError(f"{asked.name} took no request at all: {journal.refusal}")


def _task(example: Example, sql: SqlSide, config: JobConfig) -> Task:
    def execute(queries: Sequence[str]) -> Sequence[Result]:
        texts = [transpile(query, example.dialect) for query in queries]
        pairs = [(example.database, text) for text in texts if isinstance(text, str)]
        results = iter(sql.executor.execute_many(pairs))
        return [text if isinstance(text, SqlError) else next(results) for text in texts]

    return Task(
        prompt=sql.single_turn_prompt(example),
        judge_prompt=partial(sql.judge_prompt, example),
        extract=partial(extract_sql, tag=config.env.wrapping),
        execute=execute,
        name=example.id,
    )


def _play(
    games: Mapping[str, Game], journal: Journal, asked: Asked, config: JobConfig, out: Path
) -> Iterator[tuple[str, Choice]]:
    """Give the choices of all questions as they are made."""
    verbal = config.verbal
    if asked.policy is not None:
        model, tokenizer = load_policy(asked.policy, config)
        with serving(config, asked.policy.model, out) as servers:
            answers = PolicyAnswers(
                model, tokenizer, config.sampler, verbal, seed=config.seed, servers=servers
            )
            desk = Desk(answers, journal, asked, config)
            names = list(games)
            for at in range(0, len(names), _CHUNK):
                yield from _together({name: games[name] for name in names[at : at + _CHUNK]}, desk)
        return
    endpoint = Endpoint(asked.url, asked.identity, verbal)
    desk = Desk(endpoint, journal, asked, config)
    threads = ThreadPoolExecutor(verbal.parallel, thread_name_prefix="question")
    try:
        futures = [threads.submit(_alone, name, game, desk) for name, game in games.items()]
        for future in as_completed(futures):
            yield future.result()
    except KeyboardInterrupt:
        _log.warning(
            "calls under way end, in %g s at most; interrupt again not to wait for them",
            verbal.timeout_s,
        )
        raise
    finally:
        # After a failure or an interruption calls under way end, and no more begin.
        endpoint.stop()
        try:
            threads.shutdown(cancel_futures=True)
        except KeyboardInterrupt:
            cli.give_up()
        endpoint.close()


def _alone(name: str, game: Game, desk: Desk) -> tuple[str, Choice]:
    """Play one question to its end."""
    ((_, choice),) = _together({name: game}, desk)
    return name, choice


def _together(games: Mapping[str, Game], desk: Desk) -> Iterator[tuple[str, Choice]]:
    """Play questions in step, so that their asks are answered together."""
    wishes = {name: next(game) for name, game in games.items()}
    while wishes:
        answers = desk.texts(list(wishes.items()))
        for name, texts in zip(list(wishes), answers, strict=True):
            try:
                wishes[name] = games[name].send(texts)
            except StopIteration as end:
                del wishes[name]
                yield name, end.value
