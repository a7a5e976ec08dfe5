"""Judge what a source gives, by one path whatever the source, and write all files of the result."""

from __future__ import annotations

import json
import logging
from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace
from itertools import islice
from pathlib import Path
from typing import Any

from exchange import UserError
from launch import cli
from launch.evaluation.judging import judge
from launch.evaluation.questions import WITNESS, QuestionSet, rule_of
from launch.evaluation.replies import Decode
from launch.evaluation.responses import RECORDED_SAMPLES, Sampled
from launch.evaluation.results import (
    VERDICTS,
    ModelFacts,
    QuestionVerdict,
    Report,
    ReportSettings,
    as_json,
    find_report,
    summarise,
    write_result,
)
from launch.files import digest, of_prompts, short, versions, write_text
from launch.reporting.record import RECORDS, RECORDS_VERSION, question, shown
from launch.tables import percent, show_table
from minirl.run.files import PART, keep_lines, naming, whole_file
from sqlenv.config import ExecutorConfig
from sqlenv.data.loading import question_digest
from sqlenv.dialects import run_many
from sqlenv.evaluators.comparators import COMPARATORS
from sqlenv.executor import Executor
from sqlenv.types import Example, Observation, Result, Table

_log = logging.getLogger(__name__)

_SHOWN_MEASURES = 3


def judge_answers(
    questions: QuestionSet,
    samples: Sequence[Sampled],
    decode: Decode,
    executor: Executor,
    *,
    notes: Mapping[str, Any],
    model: ModelFacts,
    seed: int,
    prompts: Sequence[Observation],
    is_asked: bool = True,
    folder: Path | None,
    path: Path | None = None,
) -> Report:
    """Judge answers, or what is left of them, and write the result: into a folder, a file, or both.

    Prompts are as the model was shown them; those of a file's are for the page alone.

    Raises:
        UserError: A result of other settings is there.
    """
    predictions = [one.queries for one in samples]
    suite = questions.suite_files
    settings = ReportSettings(
        data=questions.name,
        questions=len(questions.examples),
        fingerprint=question_digest(questions.examples),
        databases=digest(questions.databases),
        suite=digest(suite) if suite else None,
        model=model,
        seed=seed,
        prompt=of_prompts(prompts) if is_asked else None,
        decode=decode.name,
        vote_by=decode.vote_by if decode.temperature else None,
        corrections=questions.corrected.pin if questions.corrected else None,
        predictions=short(json.dumps(predictions).encode()),
        comparators={name: _origin(name, questions) for name in questions.measures},
        timeout_s=executor.config.timeout_s,
        versions=versions("minirl-sql"),
    )
    places = [place for place in (folder and folder / VERDICTS, path) if place]
    # Each is looked at first: none of other settings is written over.
    report, *_ = (find_report(place, settings) for place in places)
    if report is not None:
        cli.output.print(f"This evaluation is complete: {places[0]}", soft_wrap=True)
    part = places[0].with_name(places[0].name + PART)
    with ResumeFile(part, settings.deciding()) as resume_file:
        if report is None:
            verdicts, right = judge(questions, samples, decode, executor, resume_file)
            if is_asked:
                digests = [of_prompts([prompt]) for prompt in prompts]
                pairs = zip(verdicts, digests, strict=True)
                verdicts = [replace(one, prompt=digest) for one, digest in pairs]
            report = summarise(settings, verdicts, seed=seed, notes=notes)
            if folder:
                columns = (questions.examples, samples, verdicts, right)
                rows = list(zip(*columns, strict=True))
                write_trajectories(folder, rows, prompts=prompts, limits=executor.config)
                write_result(folder, report)
        if path:
            write_text(path, as_json(report))
    return report


def _origin(name: str, questions: QuestionSet) -> str:
    """Name the program of a measure, and what else decides it."""
    comparator = COMPARATORS.get(name)
    if comparator is not None and comparator.source:
        return f"{comparator.source} @ {comparator.version}"
    ours = f"minirl-sql {versions('minirl-sql')['minirl-sql']}"
    if name != WITNESS:
        return ours if questions.numbers == "exact" else f"{ours}: {questions.numbers} numbers"
    return f"{ours}: {rule_of(questions.measures)}, up to {questions.witnesses} witnesses"


def show(report: Report, path: Path | None, by: Collection[str] = ()) -> None:
    """Print the numbers of a report, and its parts under these headings."""
    if report.measures:
        _show_measures(report, by)
    if report.mismatch and "tag" in by:
        shares = ", ".join(f"{name} {_percent(rate)}" for name, rate in report.mismatch.items())
        cli.output.print(f"Structural mismatch with the gold query, %: {shares}", soft_wrap=True)
    if report.pass_at:
        shares = ", ".join(f"pass@{k} {_percent(share)}" for k, share in report.pass_at.items())
        cli.output.print(f"{report.first}: {shares}", soft_wrap=True)
    if report.corrected:
        cli.output.print(_corrected_line(report), soft_wrap=True)
    notes, outcomes = report.notes, report.outcomes
    cli.output.print(outcomes.line(), soft_wrap=True)
    if advice := notes.get("hint"):
        _log.warning("%s", advice)
    for kind, cost in notes.get("cost", {}).items():
        told = ", ".join(f"{number:,} {name.replace('_', ' ')}" for name, number in cost.items())
        cli.output.print(f"{kind}: {told}", soft_wrap=True)
    if "attempts" in notes:
        cli.output.print(
            f"{notes['attempts']:,} attempts, {notes['executable']:,} with a query that ran; "
            f"{notes['judged']:,} judgements, {notes['left_out']:,} left out",
            soft_wrap=True,
        )
    if lost := notes.get("refused", 0) or outcomes.refused + outcomes.failed:
        cli.output.print(
            f"{lost:,} requests without an answer; delete {path} to ask those again.",
            soft_wrap=True,
        )
    cli.warn_of(report.failing_golds, "gold queries do not run, and nothing is right there")
    cli.warn_of(report.late, "verdicts were decided by the time limit and may vary with load")


def _corrected_line(report: Report) -> str:
    """Say what corrected gold queries change."""
    found = report.corrected
    flips = "; ".join(
        f"{len(found[kind])} {word}: {', '.join(found[kind])}"
        for kind, word in (("gained", "right by the corrected gold query alone"),
                           ("lost", "right by the published one alone"))
        if found[kind]
    )  # fmt: skip
    anew = len(found["asked_anew"])
    told = f"; {anew} not judged, since the correction asks for something else" if anew else ""
    difference = percent(found["difference"], found["ci95"], " points", "+")
    return (
        f"Corrected golds ({report.settings.corrections}): {difference} on "
        f"{found['questions']:,} questions{told}. {flips or 'No verdict differs'}"
    )


def _show_measures(report: Report, by: Collection[str]) -> None:
    count = report.measures[report.first]["questions"]
    heads = {"ci95": "95 % interval", "ci95_databases": "over databases"}
    kinds = [key for key in heads if any(key in one for one in report.measures.values())]
    lines = [("", "%", *(heads[key] for key in kinds))]
    for name, one in report.measures.items():
        bounds = (" to ".join(map(_percent, one.get(key, ()))) for key in kinds)
        lines.append((name, _percent(one["mean"]), *bounds))
    title = f"{report.settings.data}, {report.settings.decode}, {count:,} questions"
    show_table(title, lines)
    names = list(report.measures)[:_SHOWN_MEASURES]
    for heading, values in report.parts.items():
        rows = [(heading, "questions", "share", *names)]
        for name, part in values.items():
            shares = (_percent(part[measure]) if measure in part else "-" for measure in names)
            rows.append((name, f"{part['questions']:,}", _percent(part["share"]), *shares))
        if heading in by:
            show_table(f"%, by {heading}", rows)


def _percent(share: float) -> str:
    return f"{100 * share:.2f}"


_CHUNK = 32  # questions whose results are in memory together
_LIMITS = {"timeout_s": 10.0, "max_bytes": 4_000_000}
"""A result beyond these is named by how it ended, and not shown."""
_KEPT = ("id", "evidence", "gold_result", "prompt", "trajectories")
"""What `predictions.jsonl` does not say of a question."""

JudgedQuestion = tuple[Example, Sampled, QuestionVerdict, Sequence[bool]]
"""A question, its samples, the verdict, and which of the samples are right."""


def write_trajectories(
    folder: Path,
    rows: Sequence[JudgedQuestion],
    *,
    prompts: Sequence[Observation],
    limits: ExecutorConfig,
) -> None:
    """Write down each question, its first samples and their results."""
    update = {name: min(value, getattr(limits, name)) for name, value in _LIMITS.items()}
    with (
        Executor(limits.model_copy(update=update)) as executor,
        whole_file(folder / RECORDS) as file,
    ):
        file.write(json.dumps({"step": 0, "version": RECORDS_VERSION}) + "\n")
        for at in range(0, len(rows), _CHUNK):
            part = rows[at : at + _CHUNK]
            asked = [(row[0], sql) for row in part for sql in _queries(row)]
            results = iter(run_many(executor.execute_many, asked))
            for number, row in enumerate(part, at):
                own = list(islice(results, len(_queries(row))))
                line = {"step": number + 1, **_line(row, own)}
                if prompts:
                    line["prompt"] = "\n".join(one.content for one in prompts[number])
                file.write(json.dumps(line) + "\n")


def _queries(row: JudgedQuestion) -> list[str]:
    """List what is run anew: the gold query and the first samples, unless they are recorded."""
    example, sampled, _, _ = row
    return [] if sampled.line else [example.gold_sql, *sampled.queries[:RECORDED_SAMPLES]]


def _line(row: JudgedQuestion, results: Sequence[Result]) -> Mapping[str, Any]:
    example, sampled, judged, right = row
    if sampled.line is not None:
        # The verdicts of the evaluation take the place of the environment's.
        for member, correct in zip(sampled.line["trajectories"], right, strict=False):
            for turn in member["turns"][-1:]:
                if turn.get("kind", "answer") == "answer":
                    turn["correct"] = correct
        return {key: sampled.line[key] for key in _KEPT if key in sampled.line}
    gold, *found = results
    turns = []
    replies = sampled.replies or [""] * len(found)
    ends = sampled.ends or ["stop"] * len(found)
    places = sampled.places or [-1] * len(found)
    columns = (sampled.queries, replies, ends, places, found, right)
    for sql, reply, end, place, result, correct in zip(*columns, strict=False):
        is_answer = sql == judged.sql
        tags = [tag for tag in judged.tags if tag != "none"] if is_answer and not correct else []
        is_too_large = is_answer and not isinstance(result, Table) and judged.status == "ok"
        seen = {"status": "ok"} if is_too_large else shown(result)
        said = {"reply": reply, "finish": end} if sampled.replies else {}
        said |= {"place": place} if place >= 0 else {}
        known = {"sql": sql, "kind": "answer", "correct": correct, "tags": tags}
        turns.append({**said, **known, "result": seen})
    asked = question(example, gold if example.gold_sql else None)
    asked["trajectories"] = [{"turns": [turn]} for turn in turns]
    return {key: asked[key] for key in _KEPT if key in asked}


class ResumeFile:
    """What was found so far of several lists, in a file of JSON lines that is gone when the block
    ends well; one that was begun with other settings is refused.
    """

    def __init__(self, path: Path, settings: object) -> None:
        self._path, self._settings = path, settings
        self._found: defaultdict[str, list[Any]] = defaultdict(list)
        lines = keep_lines(path, list, advice="delete it to begin anew") if path.exists() else []
        if lines and lines[0] != [settings]:
            raise UserError(
                f"{path}: was begun with other settings; repeat these, or delete it to begin anew"
            )
        for name, piece in lines[1:]:
            self._found[name] += piece

    def __enter__(self) -> ResumeFile:
        return self

    def __exit__(self, kind: type[BaseException] | None, *_exception: object) -> None:
        if kind is None:
            self._path.unlink(missing_ok=True)

    def found(self, name: str) -> list[Any]:
        """Return a list as far as it goes."""
        return list(self._found[name])

    def add(self, name: str, piece: list[Any]) -> None:
        """Keep the next piece of a list."""
        with naming(self._path):
            self._path.parent.mkdir(parents=True, exist_ok=True)
            with self._path.open("a", encoding="utf-8") as file:
                begin = [] if file.tell() else [[self._settings]]
                file.writelines(json.dumps(line) + "\n" for line in (*begin, [name, piece]))
