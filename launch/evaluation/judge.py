"""Judge answers by several measures, question by question, and write all files of the result."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import chain, compress
from pathlib import Path
from typing import Any, TypeVar

from launch.build import SqlSide
from launch.cli import progress_bar
from launch.evaluation.answers import Decode, ModelFacts, Sampled, hint, unread_of
from launch.evaluation.predictions import as_line
from launch.evaluation.questions import (
    PARTIAL,
    REFERENCED,
    TEXTUAL,
    WITNESS,
    QuestionSet,
    check_databases,
    rule_of,
)
from launch.evaluation.results import (
    NO_GOLD,
    QuestionVerdict,
    Report,
    ReportSettings,
    summarise,
    write_result,
)
from launch.files import digest, versions
from launch.records import answer_line, facts_of, is_right, shown, write_answers
from rewards.execution import columns_of
from rewards.progress.diagnosis import diagnose, labels_of
from rewards.workbench import Workbench
from sqlenv.cache import shared_cache
from sqlenv.data.loading import question_digest
from sqlenv.dialects import run_many, transpile
from sqlenv.evaluators.comparators import COMPARATORS, Case, CaseVerdict, compare_cases
from sqlenv.evaluators.hardness import clauses_of
from sqlenv.evaluators.spider2 import as_read
from sqlenv.evaluators.votes import VOTE_TIMEOUT_S, VoteBy, choose, votes
from sqlenv.executor import Executor
from sqlenv.types import Example, Table
from sqlenv.witness.refutation import judge_on_witnesses
from sqlenv.witness.store import WitnessStore

_TOGETHER = 128
"""Queries that are judged together; their results are in memory at once."""

_Asked = tuple[Example, str]
"""A query for a question."""
_T = TypeVar("_T")


def judge_answers(
    questions: QuestionSet,
    samples: Sequence[Sampled],
    decode: Decode,
    executor: Executor,
    sql: SqlSide,
    *,
    notes: Mapping[str, Any],
    model: ModelFacts,
    folder: Path | None,
) -> Report:
    """Judge answers, and write the result into a folder, if there is one: for the page with the
    prompts, as the model was shown them.
    """
    suite = questions.suite_files
    settings = ReportSettings(
        data=questions.name,
        questions=len(questions.examples),
        # Without what answers are judged by.
        fingerprint=question_digest(
            replace(one, gold_sql="", alternatives=(), grading_method="")
            for one in questions.examples
        ),
        golds=question_digest(questions.examples),
        databases=digest(questions.databases),
        suite=digest(suite) if suite else None,
        model=model,
        seed=sql.config.seed,
        decode=decode.name,
        vote_by=decode.vote_by if decode.temperature else None,
        comparators={name: _origin(name, questions) for name in questions.measures},
        timeout_s=executor.config.timeout_s,
        versions=versions("minirl-sql"),
    )
    verdicts, lines = judge(questions, samples, decode, executor)
    told = {"hint": hint(unread_of(samples), sql.config.answer_wrapping)}
    report = summarise(settings, verdicts, {**told, **notes})
    if folder:
        prompts = [sql.evaluation_prompt(example) for example in questions.examples]
        write_answers(folder, lines, prompts)
        write_result(folder, report)
    return report


def _origin(name: str, questions: QuestionSet) -> str:
    """Name the program of a measure, and what else decides it."""
    comparator = COMPARATORS.get(name)
    if comparator is not None and comparator.program:
        return comparator.program
    ours = f"minirl-sql {versions('minirl-sql')['minirl-sql']}"
    if name != WITNESS:
        return ours if questions.numbers == "exact" else f"{ours}: {questions.numbers} numbers"
    return f"{ours}: {rule_of(questions.measures)}, up to {questions.witnesses} witnesses"


def judge(
    questions: QuestionSet, samples: Sequence[Sampled], decode: Decode, executor: Executor
) -> tuple[list[QuestionVerdict], list[dict[str, Any]]]:
    """Judge the samples of all questions by the first measure, and the answers by all measures.

    Returns the verdicts, and the lines of `trajectories.jsonl`; a `UserError` if a database cannot
    be used.
    """
    examples, judging = questions.examples, _Judge(questions, executor)
    check_databases(questions.databases | questions.suite_files)
    answers, outcomes = judging.elect([one.queries for one in samples], decode)
    with ThreadPoolExecutor(1) as thread:  # while the workers are busy
        labels = thread.submit(_labels, examples, answers)
        judged = judging.score(
            "verdicts", [*zip(examples, answers, strict=True)], questions.measures
        )
    outcomes = outcomes or [[one] for one in judged]
    verdicts = [
        _verdict(*row)
        for row in zip(examples, samples, answers, judged, outcomes, labels.result(), strict=True)
    ]
    rows = zip(examples, samples, verdicts, outcomes, strict=True)
    return verdicts, [answer_line(*row) for row in rows]


def _verdict(
    example: Example,
    sampled: Sampled,
    sql: str,
    one: CaseVerdict,
    outcomes: Sequence[CaseVerdict],
    labels: Mapping[str, Any],
) -> QuestionVerdict:
    queries, is_several = sampled.queries, len(sampled.queries) > 1
    # Of the first episode that answers with the query, else of the first one.
    episode = queries.index(sql) if sql in queries else 0
    members = sampled.line["trajectories"][episode:] if sampled.line else ()
    has_gold = example.gold_sql and next(iter(one.scores), "") not in REFERENCED
    return QuestionVerdict(
        **facts_of(example),
        sql=sql,
        scores=one.scores,
        status=one.predicted["status"] if one.predicted else "",
        gold_status=one.gold["status"] if one.gold and has_gold else NO_GOLD,
        reply=sampled.replies[episode] if sampled.replies else "",
        samples=queries if is_several else (),
        right=sum(map(is_right, outcomes)) if is_several else 0,
        turns=sampled.turns[episode] if sampled.turns else 0,
        parts=members[0].get("parts", {}) if members else {},
        choice=sampled.choice,
        outcomes=sampled.outcomes,
        **labels,
    )


_NOT_JUDGED = CaseVerdict({}, None, None)


class _Judge:
    def __init__(self, questions: QuestionSet, executor: Executor) -> None:
        self._questions, self._executor = questions, executor

    def elect(
        self, samples: Sequence[Sequence[str]], decode: Decode
    ) -> tuple[list[str], list[list[CaseVerdict]]]:
        """Choose the answers, and say what came of all samples where there are several."""
        if len(samples[0]) == 1:
            return [each[0] for each in samples], []
        examples = self._questions.examples
        asked = [
            [(example, sql) for sql in each]
            for example, each in zip(examples, samples, strict=True)
        ]
        unique = [*dict.fromkeys(chain.from_iterable(asked))]
        judged = self.score("samples", unique, self._questions.measures[:1])
        known = dict(zip(unique, judged, strict=True))
        outcomes = [[known[one] for one in each] for each in asked]
        if decode.kind == "vote":
            elected = dict(zip(unique, self._votes(unique, decode.vote_by), strict=True))
            ballots = [[elected[one] for one in each] for each in asked]
            source = examples[0].source
            is_spider = source.startswith("spider") and source != "spider2"
            return choose(samples, ballots, spider=is_spider), outcomes
        # As an oracle would: the first query that is right, else the first one.
        first = [max(each, key=lambda one: is_right(known[one])) for each in asked]
        return [sql for _, sql in first], outcomes

    def score(
        self, phase: str, asked: Sequence[_Asked], measures: Sequence[str]
    ) -> list[CaseVerdict]:
        """Judge queries; there is no verdict on those for a question without a gold query."""
        references = self._questions.references
        has_gold = [bool(one.gold_sql or one.id in references) for one, _ in asked]
        judged = [*compress(asked, has_gold)]
        found = iter(self._by_parts(phase, judged, lambda part: self._judge(part, measures)))
        return [next(found) if gold else _NOT_JUDGED for gold in has_gold]

    def _votes(self, asked: Sequence[_Asked], by: VoteBy) -> list[str | None]:
        config = self._executor.config
        limits = {"timeout_s": min(config.timeout_s, VOTE_TIMEOUT_S)}
        with Executor(config.model_copy(update=limits)) as executor:

            def vote(part: Sequence[_Asked]) -> list[str | None]:
                queries = [(example.database, _on_sqlite(example, sql)) for example, sql in part]
                return votes(executor, queries, by)

            return self._by_parts("votes", asked, vote)

    def _by_parts(
        self, phase: str, asked: Sequence[_Asked], work: Callable[[Sequence[_Asked]], list[_T]]
    ) -> list[_T]:
        found: list[_T] = []
        with progress_bar(phase) as show:
            for at in range(0, len(asked), _TOGETHER):
                show(at, len(asked), "")
                found += work(asked[at : at + _TOGETHER])
            show(len(asked), len(asked), "")
        return found

    def _judge(self, asked: Sequence[_Asked], measures: Sequence[str]) -> list[CaseVerdict]:
        """Judge queries in the forms that the comparators' programs read predictions in; how they
        end is said of the form of the first one.
        """
        forms: dict[Callable[[str], str], list[str]] = {}
        for name in measures:
            if name in COMPARATORS:
                forms.setdefault(_form_of(name), []).append(name)
        # Without any comparator, how the queries end is still asked.
        parts = [
            (names, compare_cases(self._executor, self._cases(asked, form), names, keep=shown))
            for form, names in (forms or {str: []}).items()
        ]
        found: dict[str, Sequence[float]] = {
            name: [one.scores[name] for one in judged] for names, judged in parts for name in names
        }
        if not PARTIAL.keys().isdisjoint(measures):
            found |= self._partial(asked, measures)
        if not {*TEXTUAL}.isdisjoint(measures):
            found |= self._textual(asked)
        if WITNESS in measures:
            rule = rule_of(self._questions.measures)
            store = WitnessStore(shared_cache(), match=rule, count=self._questions.witnesses)
            cases = self._cases(asked, _form_of(rule))
            found[WITNESS] = judge_on_witnesses(cases, rule, self._executor, store)
        scores = zip(*(found[name] for name in measures), strict=True)
        ends = zip(*(judged for _, judged in parts), strict=True)
        return [
            replace(own[0], scores=dict(zip(measures, each, strict=True)))
            for each, own in zip(scores, ends, strict=True)
        ]

    def _partial(self, asked: Sequence[_Asked], measures: Sequence[str]) -> dict[str, list[float]]:
        """Run queries, and compare the results with the gold result: of Spider 2 with every one
        that counts.

        There, golds are whole tables, also the columns that `spider2_local` leaves out:
        PaVeRL-SQL's measures are of the golden table, and of several the best counts, as in its
        released program.
        """
        results = run_many(self._executor.execute_many, asked)
        if references := self._questions.references:
            results = [as_read(one) if isinstance(one, Table) else one for one in results]
            golds = [references[example.id].tables for example, _ in asked]
        else:
            queries = [(example, example.gold_sql) for example, _ in asked]
            golds = [[gold] for gold in run_many(self._executor.gold_many, queries)]
        return {
            name: [
                max((PARTIAL[name](one, gold) for gold in each), default=0.0)
                for one, each in zip(results, golds, strict=True)
            ]
            for name in PARTIAL.keys() & measures
        }

    def _textual(self, asked: Sequence[_Asked]) -> dict[str, list[float]]:
        """Compare queries with the text of the gold query, as the reward families do."""
        bench = Workbench(self._executor)
        scored = [bench.score(example, sql) for example, sql in asked]
        return {
            "struct": [one["progress"]["struct"] for one in scored],
            "lex": [one["progress"]["lex"] for one in scored],
            "clause": [one["expo"]["reward"] for one in scored],
        }

    def _cases(self, asked: Sequence[_Asked], form: Callable[[str], str]) -> list[Case]:
        questions = self._questions
        return [
            Case(
                predicted=_on_sqlite(example, form(sql)),
                gold=_on_sqlite(example, example.gold_sql),
                database=example.database,
                suite=questions.suite.get(example.db_id, ()),
                reference=questions.references.get(example.id),
                alternatives=tuple(_on_sqlite(example, gold) for gold in example.alternatives),
                grading_method=example.grading_method,
                numbers=questions.numbers,
            )
            for example, sql in asked
        ]


def _form_of(measure: str) -> Callable[[str], str]:
    """Find how the program of a measure reads predictions: Spider's from lines."""
    return as_line if measure.startswith("spider_") else str


def _on_sqlite(example: Example, sql: str) -> str:
    """Transpile a query to SQLite; one that cannot be is a query that does not run."""
    text = transpile(sql, example.dialect)
    return text if isinstance(text, str) else "not transpiled"


def _labels(examples: Sequence[Example], answers: Sequence[str]) -> list[dict[str, Any]]:
    """Say what each gold query has, and in what the answer differs from it: tags of Progress-SQL's
    tree, or `none`; nothing where the gold query has no tree.
    """
    found = []
    for example, sql in zip(examples, answers, strict=True):
        clauses: tuple[str, ...] = ()
        tags: tuple[str, ...] | None = ()
        if gold := example.gold_sql:
            clauses = clauses_of(gold)
            tags = labels_of(diagnose(sql, gold, columns_of(example)))
            tags = () if tags is None else tags or ("none",)
        found.append({"clauses": clauses, "tags": tags})
    return found
