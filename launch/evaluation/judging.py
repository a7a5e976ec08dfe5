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
REFERENCED = frozenset(name for name, one in COMPARATORS.items() if one.needs == "reference")
"""Comparators that look at Spider 2's gold results alone; all others look at gold queries, those of
`PARTIAL` at either."""
SUITED = frozenset(name for name, one in COMPARATORS.items() if one.needs == "suite")
"""Comparators that run on a test suite."""
MEASURES: tuple[str, ...] = (*COMPARATORS, *PARTIAL)
"""Whatever a prediction can be judged by."""


def read_measures(text: str | None, name: str, default: str = "") -> tuple[str, ...]:
    """Read `--comparators`, or take the test set's own, or the default of other questions.

    Raises:
        UserError: One is unknown.
    """
    if text is None:
        return TEST_SETS[name].comparators if name in TEST_SETS else (default,)
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
        decode: How the samples give an answer.
        vote_by: What makes two results one vote.
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


@dataclass(frozen=True, slots=True)
class _QueryVerdict:
    """What one query of a question came to; JSON's form of it is the list of its fields.

    Attributes:
        scores: By measure.
        predicted: How it ended, by the comparator that counts; `gold` likewise.
        is_late: Whether a limit of time decided a score.
    """

    scores: Mapping[str, float]
    predicted: str
    gold: str
    is_late: bool


_Asked = Sequence[tuple[int, str]]
"""Queries for questions, which are given by number."""


class AllVerdicts(NamedTuple):
    """The verdicts on all questions, and of each question which samples are right."""

    questions: list[QuestionVerdict]
    right: list[list[bool]]


def judge(task: JudgingTask, executor: Executor, progress: Progress) -> AllVerdicts:
    """Judge all questions, or what is left of them.

    Raises:
        UserError: A database cannot be used.
    """
    return _Judge(task, executor, progress).run()


class _Judge:
    """Judges the samples of a task; none of them twice by one measure."""

    def __init__(self, task: JudgingTask, executor: Executor, progress: Progress) -> None:
        self._task, self._executor, self._progress = task, executor, progress
        self._known: dict[tuple[int, str], _QueryVerdict] = {}
        # Questions without a gold query, as some of a config's own are, cannot be judged.
        self._judged = [bool(one.gold_sql or one.id in task.references) for one in task.examples]

    def run(self) -> AllVerdicts:
        task = self._task
        answers = [samples[0] for samples in task.samples]
        if len(task.samples[0]) > 1:
            unique = [[*dict.fromkeys(samples)] for samples in task.samples]
            self._score("samples", unique, task.measures[:1])
            if task.decode.kind == "vote":
                spider = _is_spider(task.examples[0])
                answers = choose(task.samples, self._votes(), spider=spider)
            else:
                answers = [
                    next((sql for sql in samples if self._is_right(place, sql)), samples[0])
                    for place, samples in enumerate(task.samples)
                ]
        with ThreadPoolExecutor(1) as thread:  # while the workers are busy
            labels = thread.submit(self._labels, answers)
            self._score("verdicts", [[sql] for sql in answers], task.measures)
        questions = zip(answers, labels.result(), strict=True)
        return AllVerdicts(
            [self._record(place, *one) for place, one in enumerate(questions)],
            [[self._is_right(n, sql) for sql in each] for n, each in enumerate(task.samples)],
        )

    def _is_right(self, place: int, sql: str) -> bool:
        found = self._known.get((place, sql))
        return found is not None and found.scores[self._task.measures[0]] == 1

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

    def _record(self, place: int, sql: str, labels: Mapping[str, Any]) -> QuestionVerdict:
        task, example = self._task, self._task.examples[place]
        samples, found = task.samples[place], self._known.get((place, sql))
        turns = task.turns[place] if task.turns else ()
        return QuestionVerdict(
            id=example.id,
            db_id=example.db_id,
            question=example.question,
            sql=sql,
            scores=found.scores if found else {},
            predicted=found.predicted if found else "",
            gold=found.gold if found else NO_GOLD,
            is_late=found is not None and found.is_late,
            samples=len(samples) if len(samples) > 1 else 0,
            right=sum(self._is_right(place, one) for one in samples) if len(samples) > 1 else 0,
            # Of the first episode that answers with the query, else of the first one.
            turns=turns[samples.index(sql) if sql in samples else 0] if turns else 0,
            **labels,
        )

    def _votes(self) -> list[list[str | None]]:
        """Let the samples of each question vote."""
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
        self, phase: str, queries: Sequence[Sequence[str]], measures: tuple[str, ...]
    ) -> None:
        """Judge queries of each question by the measures that they are not judged by yet."""

        def work(places: Sequence[int]) -> list[Any]:
            asked = [(n, sql) for n in places if self._judged[n] for sql in queries[n]]
            groups: dict[tuple[str, ...], list[tuple[int, str]]] = {}
            for pair in asked:
                old = self._known[pair].scores if pair in self._known else {}
                missing = tuple(name for name in measures if name not in old)
                groups.setdefault(missing, []).append(pair)
            for missing, group in groups.items():
                found = self._judge_some(group, missing) if missing else ()
                for pair, new in zip(group, found, strict=False):
                    self._known[pair] = _joined(self._known.get(pair), new)
            found = [[self._known.get((n, sql)) for sql in queries[n]] for n in places]
            return [[[*_values(one)] for one in each if one] for each in found]

        found = self._resume(phase, max(map(len, queries)), work)
        for place, (texts, each) in enumerate(zip(queries, found, strict=True)):
            self._known |= {
                (place, sql): _QueryVerdict(*values)
                for sql, values in zip(texts, each, strict=False)
            }

    def _resume(
        self, phase: str, queries: int, work: Callable[[Sequence[int]], list[Any]]
    ) -> list[Any]:
        """Do what is left of a phase, some questions at a time."""
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

    def _judge_some(self, asked: _Asked, measures: Sequence[str]) -> list[_QueryVerdict]:
        """Judge queries; how they end is said of the comparator that comes first."""
        task = self._task
        scores: list[dict[str, float]] = [{} for _ in asked]
        ends: list[tuple[str, str]] = [("", "") for _ in asked]
        late = [False for _ in asked]
        for written, names in _by_form(measures):
            cases = [self._case(place, written(sql)) for place, sql in asked]
            for at, one in enumerate(self._executor.judge(cases, names)):
                scores[at] |= one.scores
                late[at] |= one.is_late
                has_gold = task.examples[asked[at][0]].gold_sql and measures[0] not in REFERENCED
                if not ends[at][0] or measures[0] in names:
                    ends[at] = one.predicted, one.gold if has_gold else NO_GOLD
        if partial := [name for name in measures if name in PARTIAL]:
            for found, pairs in zip(scores, self._pairs(asked), strict=True):
                for name in partial:
                    found[name] = max((PARTIAL[name](*pair) for pair in pairs), default=0.0)
        return [
            _QueryVerdict({name: found[name] for name in measures}, *end, is_late)
            for found, end, is_late in zip(scores, ends, late, strict=True)
        ]

    def _pairs(self, asked: _Asked) -> list[list[tuple[Result, Result]]]:
        """Run queries, and put the gold result beside each: of Spider 2 every one that counts.

        There, golds are whole tables, also the columns that `spider2_local` leaves out:
        PaVeRL-SQL's measures are of the golden table, and of several the best counts, as in its
        released program.
        """
        task, executor = self._task, self._executor
        texts = [(task.examples[place], sql) for place, sql in asked]
        # A query without SQL is an error.
        pairs = [(e.database, _carried(e, sql)) for e, sql in texts if sql.strip()]
        ran = iter(executor.execute_many(pairs))
        results = [next(ran) if sql.strip() else SqlError("no SQL") for _, sql in texts]
        if not task.references:
            golds = executor.gold_many([(e.database, _carried(e, e.gold_sql)) for e, _ in texts])
            return [[pair] for pair in zip(results, golds, strict=True)]
        read = (as_read(result) if isinstance(result, Table) else result for result in results)
        return [
            [(result, gold) for gold in task.references[example.id].tables]
            for (example, _), result in zip(texts, read, strict=True)
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


def _values(found: _QueryVerdict) -> tuple[Any, ...]:
    return found.scores, found.predicted, found.gold, found.is_late


def _joined(first: _QueryVerdict | None, more: _QueryVerdict) -> _QueryVerdict:
    if first is None:
        return more
    scores = {**first.scores, **more.scores}
    return _QueryVerdict(scores, first.predicted, first.gold, first.is_late or more.is_late)


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
