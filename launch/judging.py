"""Judge predictions by several measures, question by question, on all workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any

from launch.cli import progress_bar
from launch.official import as_line
from launch.sheet import NO_GOLD, Journal, Judged
from launch.testsets import TEST_SETS
from launch.verdicts import turns_of
from launch.votes import VOTE_TIMEOUT_S, Decode, choose
from rewards.columns import binary_accuracy, csmr, fractional_accuracy
from rewards.execution import ColumnsOf, columns_of
from rewards.progress.diagnosis import diagnose, labels_of
from sqlenv.config import ExecutorConfig
from sqlenv.dialects import transpile
from sqlenv.errors import UserError
from sqlenv.evaluators.comparators import COMPARATORS, Case
from sqlenv.evaluators.features import clauses_of
from sqlenv.evaluators.hardness import grade
from sqlenv.evaluators.spider2 import Reference, as_read
from sqlenv.evaluators.votes import VoteBy
from sqlenv.executor import Executor
from sqlenv.types import Example, Result, SqlError, Table

_FIRST, _MOST = 16, 256
"""Queries at a time: what an interruption may cost, and what is held in memory together."""
_SECONDS = (1.0, 4.0)
"""What takes less than the first is done more at a time, what takes more than the second less."""

PARTIAL: Mapping[str, Callable[[Result, Result], float]] = {
    "ex_f": fractional_accuracy,
    "ex_b": binary_accuracy,
    "csmr": csmr,
}
"""The papers' measures of how much of the gold result a prediction reproduces: PaVeRL-SQL's EX_f
and EX_b, SQL-ASTRA's CSMR."""

REFERENCED: frozenset[str] = frozenset(
    name for name, one in COMPARATORS.items() if one.needs == "reference"
)
"""Comparators that look at Spider 2's gold results alone; all others look at gold queries, those of
`PARTIAL` at either."""
SUITED: frozenset[str] = frozenset(
    name for name, one in COMPARATORS.items() if one.needs == "suite"
)
"""Comparators that run on a test suite."""
MEASURES: tuple[str, ...] = (*COMPARATORS, *PARTIAL)
"""Whatever a prediction can be judged by."""
_SPIDER = "spider_"


def read_measures(text: str | None, name: str) -> tuple[str, ...]:
    """Read `--comparators`, or take the test set's own.

    Raises:
        UserError: One is unknown.
    """
    if text is None:
        return TEST_SETS[name].comparators if name in TEST_SETS else ()
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [name for name in names if name not in MEASURES]
    if unknown or not names:
        raise UserError(
            f"--comparators {text}: {'there is no ' + unknown[0] if unknown else 'names none'}; "
            f"there are {', '.join(MEASURES)}"
        )
    return names


@dataclass(frozen=True, slots=True)
class Task:
    """Predictions, and how they are judged.

    Attributes:
        examples: The questions.
        samples: One query a question, or several.
        measures: Of `MEASURES`; the first is the one that the answer of `pass@n` is chosen by.
        decode: How the samples give an answer.
        vote_by: What makes two results one vote.
        suite: Files of the test suite by database; none where it is not used.
        references: Gold results by question, for Spider 2.
        turns: Replies of each sampled episode, by question; none where the model has no tool.
    """

    examples: Sequence[Example]
    samples: Sequence[Sequence[str]]
    measures: tuple[str, ...]
    decode: Decode
    vote_by: VoteBy = "set"
    suite: Mapping[str, tuple[Path, ...]] = field(default_factory=dict)
    references: Mapping[str, Reference] = field(default_factory=dict)
    turns: Sequence[Sequence[int]] = ()

    @property
    def first(self) -> str:
        """Name the measure that counts."""
        return self.measures[0]


def judge(task: Task, executor: Executor, journal: Journal) -> list[Judged]:
    """Judge all questions, or what is left of them.

    Args:
        task: What to judge.
        executor: Runs queries.
        journal: What was found before, and where to write down what is found.

    Raises:
        UserError: A database cannot be used.
    """
    several = len(task.samples[0]) > 1 if task.samples else False
    answers = [samples[0] for samples in task.samples]
    right: list[list[float]] = [[] for _ in answers]
    if several and task.decode.kind == "vote":
        answers = elect(task, executor.config, journal)
    if several:
        right = _judge_samples(task, executor, journal)
    if several and task.decode.kind == "pass":
        answers = [_oracle(*pair) for pair in zip(task.samples, right, strict=True)]
    return _judge_answers(task, executor, journal, answers, right)


def _oracle(samples: Sequence[str], right: Sequence[float]) -> str:
    """Choose the first sample that is right, else the first one."""
    return samples[right.index(1.0) if 1.0 in right else 0]


def elect(task: Task, config: ExecutorConfig, journal: Journal) -> list[str]:
    """Let the samples of each question vote."""
    # OmniSQL's vote fails where the text of a cell is no UTF-8, and so has its own executor.
    limits = {"timeout_s": min(config.timeout_s, VOTE_TIMEOUT_S), "text": "strict"}
    with Executor(config.model_copy(update=limits)) as executor:

        def vote(places: Sequence[int]) -> list[Any]:
            asked = [(task.examples[place], sql) for place in places for sql in task.samples[place]]
            pairs = [(example.database, _carried(example, sql)) for example, sql in asked]
            found = iter(executor.votes(pairs, task.vote_by))
            return [[next(found) for _ in task.samples[place]] for place in places]

        ballots = _go_on("votes", task, journal, vote)
    return choose(task.samples, ballots, spider=_is_spider(task.examples[0]))


def _judge_samples(task: Task, executor: Executor, journal: Journal) -> list[list[float]]:
    """Judge every sample by the first measure, equal ones once."""

    def judge_some(places: Sequence[int]) -> list[Any]:
        asked = [(place, sql) for place in places for sql in dict.fromkeys(task.samples[place])]
        scores = _scores(task, executor, asked, (task.first,))
        known = {pair: score[task.first] for pair, (score, _) in zip(asked, scores, strict=True)}
        return [[known[place, sql] for sql in task.samples[place]] for place in places]

    return _go_on("samples", task, journal, judge_some)


def _judge_answers(
    task: Task,
    executor: Executor,
    journal: Journal,
    answers: Sequence[str],
    right: Sequence[Sequence[float]],
) -> list[Judged]:
    def judge_some(places: Sequence[int]) -> list[Any]:
        asked = [(place, answers[place]) for place in places]
        return [
            {"scores": scores, **statuses}
            for scores, statuses in _scores(task, executor, asked, task.measures)
        ]

    found = _go_on("verdicts", task, journal, judge_some)
    labels = _label(task.examples, answers)
    turns = task.turns or [()] * len(answers)
    return [
        Judged(
            id=example.id,
            db_id=example.db_id,
            difficulty=_level(example),
            question=example.question,
            sql=sql,
            samples=len(sampled),
            right=sum(score == 1 for score in sampled),
            turns=turns_of(sql, samples, turns),
            **label,
            **verdict,
        )
        for example, sql, samples, turns, sampled, label, verdict in zip(
            task.examples, answers, task.samples, turns, right, labels, found, strict=True
        )
    ]


def _label(examples: Sequence[Example], answers: Sequence[str]) -> list[dict[str, Any]]:
    """Say of each question what its gold query has, and in what the answer differs from it."""
    columns = columns_of()
    return [
        {"clauses": clauses_of(example.gold_sql), "tags": _tags(example, sql, columns)}
        if example.gold_sql
        else {}
        for example, sql in zip(examples, answers, strict=True)
    ]


def _tags(example: Example, sql: str, columns: ColumnsOf) -> tuple[str, ...]:
    """Give the tags of Progress-SQL's tree, or `none`; nothing where the gold has no tree."""
    labels = labels_of(diagnose(sql, example.gold_sql, columns(example)))
    return () if labels is None else labels or ("none",)


def _level(example: Example) -> str:
    """Give the level of difficulty; Spider's variants do not have it in their records."""
    is_spider = _is_spider(example) and not example.difficulty
    return (grade(example.gold_sql) or "") if is_spider else example.difficulty


def _is_spider(example: Example) -> bool:
    return example.source.startswith("spider") and example.source != "spider2"


def _go_on(
    phase: str, task: Task, journal: Journal, work: Callable[[Sequence[int]], list[Any]]
) -> list[Any]:
    """Do the questions of a phase that are not in the journal, some at a time."""
    found = journal.of(phase)
    # Votes and verdicts of samples take many queries a question.
    queries = 1 if phase == "verdicts" else len(task.samples[0])
    size, total = max(1, _FIRST // queries), len(task.examples)
    with progress_bar(phase) as progress:
        progress(len(found), total, "")
        while len(found) < total:
            start_s = perf_counter()
            journal.add(phase, work(range(len(found), min(len(found) + size, total))))
            size = _next_size(size, perf_counter() - start_s, most=max(1, _MOST // queries))
            progress(len(found), total, "")
    return found


def _next_size(size: int, seconds: float, *, most: int) -> int:
    """Say how many questions come next, so that an interruption costs some seconds."""
    quick, slow = _SECONDS
    if seconds < quick:
        return min(2 * size, most)
    return max(1, size // 2) if seconds > slow else size


def _scores(
    task: Task, executor: Executor, asked: Sequence[tuple[int, str]], measures: Sequence[str]
) -> list[tuple[dict[str, float], dict[str, Any]]]:
    """Score queries for questions, given by number; also say how both queries ended."""
    found: list[dict[str, float]] = [{} for _ in asked]
    statuses: list[dict[str, Any]] = [{} for _ in asked]
    for written, names in _by_form(measures):
        cases = [_case(task, task.examples[place], written(sql)) for place, sql in asked]
        for at, judgement in enumerate(executor.judge(cases, names)):
            found[at] |= judgement.scores
            has_gold = task.examples[asked[at][0]].gold_sql and measures[0] not in REFERENCED
            gold = judgement.gold if has_gold else NO_GOLD
            is_late = judgement.is_late or statuses[at].get("is_late", False)
            # How queries end is said of the comparator that counts.
            if not statuses[at] or measures[0] in names:
                statuses[at] = {"predicted": judgement.predicted, "gold": gold}
            statuses[at]["is_late"] = is_late
    partial = [name for name in measures if name in PARTIAL]
    if partial:
        questions = [(task.examples[place], sql) for place, sql in asked]
        for scores, pairs in zip(found, _pairs(task, executor, questions), strict=True):
            scores |= {
                name: max((PARTIAL[name](*pair) for pair in pairs), default=0.0) for name in partial
            }
    return [
        ({name: scores[name] for name in measures}, status)
        for scores, status in zip(found, statuses, strict=True)
    ]


def _pairs(
    task: Task, executor: Executor, asked: Sequence[tuple[Example, str]]
) -> list[list[tuple[Result, Result]]]:
    """Run queries, and put the gold result beside each: of Spider 2 every one that counts.

    There, golds are whole tables, also the columns that `spider2_local` leaves out: PaVeRL-SQL's
    measures are of the golden table, and of several the best counts, as in its released program.
    """
    results = _run(executor, asked)
    if not task.references:
        golds = executor.gold_many([(e.database, _carried(e, e.gold_sql)) for e, _ in asked])
        return [[pair] for pair in zip(results, golds, strict=True)]
    read = (as_read(result) if isinstance(result, Table) else result for result in results)
    return [
        [(result, gold) for gold in task.references[example.id].tables]
        for (example, _), result in zip(asked, read, strict=True)
    ]


def _by_form(measures: Sequence[str]) -> Iterator[tuple[Callable[[str], str], list[str]]]:
    """Share comparators out by the form that their programs read predictions in."""
    spider = [name for name in measures if name.startswith(_SPIDER)]
    others = [name for name in measures if name in COMPARATORS and name not in spider]
    if spider:
        yield as_line, spider
    # Without any comparator, how the queries end is still asked.
    if others or not spider:
        yield str, others


def _case(task: Task, example: Example, sql: str) -> Case:
    return Case(
        predicted=_carried(example, sql),
        gold=_carried(example, example.gold_sql),
        database=example.database,
        suite=task.suite.get(example.db_id, ()),
        reference=task.references.get(example.id),
    )


def _carried(example: Example, sql: str) -> str:
    """Write a query for SQLite; one that cannot be is a query that does not run."""
    text = transpile(sql, example.dialect)
    return text if isinstance(text, str) else "not carried over"


def _run(executor: Executor, asked: Sequence[tuple[Example, str]]) -> list[Result]:
    """Run predicted queries; one without SQL is an error."""
    pairs = [(example.database, _carried(example, sql)) for example, sql in asked if sql.strip()]
    results = iter(executor.execute_many(pairs))
    return [next(results) if sql.strip() else SqlError("no SQL") for _, sql in asked]
