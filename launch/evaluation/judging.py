"""Judge samples by several measures, question by question, on all workers."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field
from pathlib import Path
from time import perf_counter
from typing import Any, NamedTuple

from launch.cli import progress_bar
from launch.evaluation.cache import Progress
from launch.evaluation.decoding import VOTE_TIMEOUT_S, Decode, choose
from launch.evaluation.official import as_line
from launch.evaluation.results import NO_GOLD, QuestionVerdict
from launch.evaluation.testsets import TEST_SETS
from rewards.columns import binary_accuracy, csmr, fractional_accuracy
from rewards.execution import ColumnsOf, columns_of
from rewards.progress.diagnosis import diagnose, labels_of
from sqlenv.dialects import transpile
from sqlenv.errors import UserError
from sqlenv.evaluators.comparators import COMPARATORS, Case, Judgement
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
REFERENCED = frozenset(name for name, one in COMPARATORS.items() if one.needs == "reference")
"""Comparators that look at Spider 2's gold results alone; all others look at gold queries, those of
`PARTIAL` at either."""
SUITED = frozenset(name for name, one in COMPARATORS.items() if one.needs == "suite")
"""Comparators that run on a test suite."""
MEASURES: tuple[str, ...] = (*COMPARATORS, *PARTIAL)
"""Whatever a prediction can be judged by."""


def read_measures(text: str | None, name: str) -> tuple[str, ...]:
    """Read `--comparators`, or take the test set's own; a `UserError` if one is unknown."""
    if text is None:
        return TEST_SETS[name].comparators
    names = tuple(dict.fromkeys(part.strip() for part in text.split(",") if part.strip()))
    unknown = [name for name in names if name not in MEASURES]
    if unknown or not names:
        raise UserError(
            f"--comparators {text}: {'there is no ' + unknown[0] if unknown else 'names none'}; "
            f"there are {', '.join(MEASURES)}"
        )
    return names


@dataclass(frozen=True, slots=True)
class JudgingTask:
    """Samples, and how they are judged.

    Attributes:
        samples: One query a question, or several.
        measures: Of `MEASURES`; the first is the one that the answer of `pass@n` is chosen by.
        suite: Files of the test suite by database, where it is used.
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


_Asked = Sequence[tuple[int, str]]
"""Queries for questions, which are given by number."""


class AllVerdicts(NamedTuple):
    """The verdicts on all questions, and of each question which samples are right."""

    questions: list[QuestionVerdict]
    right: list[list[bool]]


def judge(task: JudgingTask, executor: Executor, progress: Progress) -> AllVerdicts:
    """Judge all questions, or what is left of them; a `UserError` if a database cannot be used."""
    return _Judge(task, executor, progress).run()


class _Judge:
    """Judges the samples of a task by the first measure, and the answers by all."""

    def __init__(self, task: JudgingTask, executor: Executor, progress: Progress) -> None:
        self._task, self._executor, self._progress = task, executor, progress

    def run(self) -> AllVerdicts:
        task, first = self._task, self._task.measures[0]
        answers, right = [samples[0] for samples in task.samples], []
        if len(task.samples[0]) > 1:
            unique = [[*dict.fromkeys(samples)] for samples in task.samples]
            for place, found in enumerate(self._score("samples", unique, [first])):
                scores = (one.scores[first] == 1 for one in found)
                known = dict(zip(unique[place], scores, strict=False))
                right.append([known.get(sql, False) for sql in task.samples[place]])
            answers = self._choose(right)
        with ThreadPoolExecutor(1) as thread:  # while the workers are busy
            labels = thread.submit(self._labels, answers)
            verdicts = self._score("verdicts", [[sql] for sql in answers], task.measures)
        right = right or [[bool(one) and one[0].scores[first] == 1] for one in verdicts]
        found = enumerate(zip(answers, verdicts, right, labels.result(), strict=True))
        return AllVerdicts([self._record(place, *one) for place, one in found], right)

    def _choose(self, right: Sequence[Sequence[bool]]) -> list[str]:
        task = self._task
        if task.decode.kind == "vote":
            return choose(task.samples, self._votes(), spider=_is_spider(task.examples[0]))
        return [
            samples[marks.index(True) if True in marks else 0]
            for samples, marks in zip(task.samples, right, strict=True)
        ]

    def _labels(self, answers: Sequence[str]) -> list[dict[str, Any]]:
        """Say what each gold query has, and in what the answer differs from it."""
        columns = columns_of()
        return [
            {
                "difficulty": _level(example),
                "clauses": clauses_of(example.gold_sql) if example.gold_sql else (),
                "tags": _tags(example, sql, columns) if example.gold_sql else (),
            }
            for example, sql in zip(self._task.examples, answers, strict=True)
        ]

    def _record(
        self,
        place: int,
        sql: str,
        found: Sequence[Judgement],
        right: Sequence[bool],
        labels: Mapping[str, Any],
    ) -> QuestionVerdict:
        task, example = self._task, self._task.examples[place]
        samples, one = task.samples[place], found[0] if found else None
        turns, is_several = task.turns[place] if task.turns else (), len(task.samples[place]) > 1
        has_gold = example.gold_sql and task.measures[0] not in REFERENCED
        return QuestionVerdict(
            id=example.id,
            db_id=example.db_id,
            question=example.question,
            sql=sql,
            scores=one.scores if one else {},
            predicted=one.predicted if one else "",
            gold=one.gold if one and has_gold else NO_GOLD,
            is_late=one is not None and one.is_late,
            samples=len(samples) if is_several else 0,
            right=sum(right) if is_several else 0,
            # Of the first episode that answers with the query, else of the first one.
            turns=turns[samples.index(sql) if sql in samples else 0] if turns else 0,
            **labels,
        )

    def _votes(self) -> list[list[str | None]]:
        task, config = self._task, self._executor.config
        limits = {"timeout_s": min(config.timeout_s, VOTE_TIMEOUT_S)}
        with Executor(config.model_copy(update=limits)) as executor:

            def vote(places: Sequence[int]) -> list[Any]:
                asked = [
                    (task.examples[place].database, _carried(task.examples[place], sql))
                    for place in places
                    for sql in task.samples[place]
                ]
                found = iter(executor.votes(asked, task.vote_by))
                return [[next(found) for _ in task.samples[place]] for place in places]

            return self._resume("votes", len(task.samples[0]), vote)

    def _score(
        self, phase: str, queries: Sequence[Sequence[str]], measures: Sequence[str]
    ) -> list[list[Judgement]]:
        """Judge queries of each question; of one without a gold query there is no verdict."""
        task = self._task

        def work(places: Sequence[int]) -> list[Any]:
            golds = (
                task.examples[n].gold_sql or task.examples[n].id in task.references for n in places
            )
            own = [
                queries[n] if has_gold else () for n, has_gold in zip(places, golds, strict=True)
            ]
            asked = [(n, sql) for n, texts in zip(places, own, strict=True) for sql in texts]
            found = iter(self._judge(asked, measures) if asked else ())
            lots = ([next(found) for _ in texts] for texts in own)
            return [[[dict(j.scores), j.predicted, j.gold, j.is_late] for j in lot] for lot in lots]

        found = self._resume(phase, max(map(len, queries)), work)
        return [[Judgement(*fields) for fields in lot] for lot in found]

    def _resume(
        self, phase: str, queries: int, work: Callable[[Sequence[int]], list[Any]]
    ) -> list[Any]:
        found, total = self._progress.found(phase), len(self._task.examples)
        size, most = max(1, _FIRST // queries), max(1, _MOST // queries)
        with progress_bar(phase) as show:
            show(len(found), total, "")
            while len(found) < total:
                start_s, at = perf_counter(), len(found)
                new = work(range(at, min(at + size, total)))
                found += new
                self._progress.add(phase, at, new)
                seconds = perf_counter() - start_s
                size = min(2 * size, most) if seconds < _SECONDS[0] else size
                size = max(1, size // 2) if seconds > _SECONDS[1] else size
                show(len(found), total, "")
        return found

    def _judge(self, asked: _Asked, measures: Sequence[str]) -> list[Judgement]:
        """Judge queries; how they end is said of the form that the first measure reads."""
        groups = [
            (names, self._executor.judge([self._case(n, written(sql)) for n, sql in asked], names))
            for written, names in _by_form(measures)
        ]
        lead = next((found for names, found in groups if measures[0] in names), groups[0][1])
        partial = self._partial(asked, [name for name in measures if name in PARTIAL])
        judged = []
        for at, one in enumerate(lead):
            parts = [found[at] for _, found in groups]
            scores = partial[at] | {name: x for part in parts for name, x in part.scores.items()}
            in_order = {name: scores[name] for name in measures}
            is_late = any(part.is_late for part in parts)
            judged.append(Judgement(in_order, one.predicted, one.gold, is_late))
        return judged

    def _partial(self, asked: _Asked, names: Sequence[str]) -> list[dict[str, float]]:
        """Run queries, and compare the results with the gold result: of Spider 2 with every one
        that counts.

        There, golds are whole tables, also the columns that `spider2_local` leaves out:
        PaVeRL-SQL's measures are of the golden table, and of several the best counts, as in its
        released program.
        """
        if not names:
            return [{} for _ in asked]
        task, executor = self._task, self._executor
        texts = [(task.examples[place], sql) for place, sql in asked]
        # A query without SQL is an error.
        pairs = [(e.database, _carried(e, sql)) for e, sql in texts if sql.strip()]
        ran = iter(executor.execute_many(pairs))
        results = [next(ran) if sql.strip() else SqlError("no SQL") for _, sql in texts]
        if task.references:
            results = [as_read(one) if isinstance(one, Table) else one for one in results]
            golds = [list(task.references[example.id].tables) for example, _ in texts]
        else:
            queries = [(e.database, _carried(e, e.gold_sql)) for e, _ in texts]
            golds = [[gold] for gold in executor.gold_many(queries)]
        return [
            {name: max((PARTIAL[name](one, gold) for gold in each), default=0.0) for name in names}
            for one, each in zip(results, golds, strict=True)
        ]

    def _case(self, place: int, sql: str) -> Case:
        task, example = self._task, self._task.examples[place]
        return Case(
            predicted=_carried(example, sql),
            gold=_carried(example, example.gold_sql),
            database=example.database,
            suite=task.suite.get(example.db_id, ()),
            reference=task.references.get(example.id),
        )


def _by_form(measures: Sequence[str]) -> Iterator[tuple[Callable[[str], str], list[str]]]:
    """Share comparators out by the form that their programs read predictions in."""
    spider = [name for name in measures if name.startswith("spider_")]
    others = [name for name in measures if name in COMPARATORS and name not in spider]
    if spider:
        yield as_line, spider
    # Without any comparator, how the queries end is still asked.
    if others or not spider:
        yield str, others


def _carried(example: Example, sql: str) -> str:
    """Transpile a query to SQLite; one that cannot be is a query that does not run."""
    text = transpile(sql, example.dialect)
    return text if isinstance(text, str) else "not carried over"


def _tags(example: Example, sql: str, columns: ColumnsOf) -> tuple[str, ...]:
    """Give the tags of Progress-SQL's tree, or `none`; nothing where the gold has no tree."""
    labels = labels_of(diagnose(sql, example.gold_sql, columns(example)))
    return () if labels is None else labels or ("none",)


def _level(example: Example) -> str:
    """Give the level of difficulty; Spider's variants do not have it in their records."""
    is_graded = _is_spider(example) and not example.difficulty and example.gold_sql
    return (grade(example.gold_sql) or "") if is_graded else example.difficulty


def _is_spider(example: Example) -> bool:
    return example.source.startswith("spider") and example.source != "spider2"
