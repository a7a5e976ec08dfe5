"""Predictions on shared data, what official programs say of them, and where ours says otherwise."""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._official import ask
from sqlenv.evaluators.comparators import Case, judge_cases
from sqlenv.executor import Executor

FAILURES = "ibm_spider_dev_failures.jsonl"
SPIDER, SUITE, BIRD = "spider_data/database", "test_suite_database", "bird_dev/dev_databases"
CAUSES = {
    "write": "the official program runs a first statement that writes; it gives no rows, which is "
    "right where the gold query gives none"
}
"""Faults of the official programs that make verdicts differ, by the change that shows them."""


@dataclass(frozen=True, slots=True)
class Agreement:
    """One file of predictions under one comparator, or what else was compared."""

    file: str
    what: str
    questions: int
    official_right: float
    differing: list[dict[str, Any]] = field(default_factory=list)

    @property
    def unexplained(self) -> int:
        """Count what differs for no known cause."""
        return sum(one["change"] not in CAUSES for one in self.differing)


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions beside gold queries (SQL and database), and what was changed in each, if any."""

    name: str
    predicted: list[str]
    gold: list[tuple[str, str]]
    folder: Path = Path()
    suites: Path | None = None
    changes: list[str] = field(default_factory=list)

    def cases(self) -> list[Case]:
        found = []
        for sql, (gold, name) in zip(self.predicted, self.gold, strict=True):
            database = self.folder / name / f"{name}.sqlite"
            files = sorted((self.suites / name).glob("*.sqlite")) if self.suites else [database]
            found.append(Case(sql, gold, database, tuple(files)))
        return found

    @contextmanager
    def staged(self) -> Generator[dict[str, str]]:
        """Write gold queries, and predictions as a list and in BIRD's form."""
        with tempfile.TemporaryDirectory() as place:
            files = {name: Path(place) / name for name in ("gold", "lines", "bird")}
            files["gold"].write_text("".join(f"{sql}\t{name}\n" for sql, name in self.gold))
            files["lines"].write_text("".join(f"{sql}\n" for sql in self.predicted))
            pairs = enumerate(zip(self.predicted, self.gold, strict=True))
            entries = {
                str(at): f"{sql}\t----- bird -----\t{name}" for at, (sql, (_, name)) in pairs
            }
            files["bird"].write_text(json.dumps(entries))
            yield {name: str(path) for name, path in files.items()}


def spider_files(data: Path) -> Iterator[Predictions]:
    """Read the predictions on Spider dev, as the official program reads its files."""
    gold = spider_gold(data)
    for path in sorted((data / "predictions/spider_dev").glob("*.sql")):
        predicted = [line.split("\t")[0] for line in read_lines(path)]
        yield Predictions(path.name, predicted, gold, data / SPIDER, data / SUITE)
    questions = json.loads((data / "spider_data/dev_visible.json").read_text())
    asked = {one["question"]: (one["query"], one["db_id"]) for one in questions}
    known = [one for one in read_failures(data) if one["question"] in asked]
    predicted = [" ".join(one["pred"].split()) for one in known]
    golds = [asked[one["question"]] for one in known]
    yield Predictions(FAILURES, predicted, golds, data / SPIDER, data / SUITE)


def spider_gold(data: Path) -> list[tuple[str, str]]:
    lines = read_lines(data / "spider_data/dev_visible_gold.sql")
    return [(sql.strip(), name.strip()) for sql, name in (line.split("\t") for line in lines)]


def read_failures(data: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read_lines(data / "predictions/failures" / FAILURES)]


def bird_files(data: Path) -> Iterator[Predictions]:
    questions = json.loads((data / "bird_dev/dev.json").read_text())
    # The gold queries are in SQLite's dialect; predictions in another one may run all the same.
    sqlite = {one["question_id"]: " ".join(one["SQL"].split()) for one in questions}
    for path in sorted((data / "predictions").glob("bird_*/*.jsonl")):
        records = [json.loads(line) for line in read_lines(path)]
        gold = [(sqlite[one["question_id"]], one["db_id"]) for one in records]
        predicted = [one["pred"] for one in records]
        yield Predictions(f"{path.parent.name}/{path.name}", predicted, gold, data / BIRD)


def mutated(
    name: str, gold: Sequence[tuple[str, str]], folder: Path, suites: Path | None = None
) -> Predictions:
    # With sqlglot, which evaluators.py measures without.
    from benchmarks._mutants import mutants
    from sqlenv.witness.source import read_source

    made = []
    for sql, db_id in gold:
        columns = read_source(folder / db_id / f"{db_id}.sqlite").column_names
        made += [(change, text, (sql, db_id)) for change, text in mutants(sql, columns)]
    changes, predicted, golds = (list(column) for column in zip(*made, strict=True))
    return Predictions(name, predicted, golds, folder, suites, changes)


def ask_spider(options: argparse.Namespace, file: Predictions, databases: str) -> Any:
    with file.staged() as job:
        return ask(
            options.python,
            "spider",
            options.spider,
            gold=job["gold"],
            predicted=job["lines"],
            databases=str(options.data / databases),
        )


def ask_pairs(options: argparse.Namespace, cases: Sequence[Case], *, on_suite: bool) -> list[Any]:
    files = [case.suite[0] if on_suite else case.database for case in cases]
    pairs = [(case.predicted, case.gold, str(one)) for case, one in zip(cases, files)]  # noqa: B905
    return ask(options.python, "spider_pairs", options.spider, pairs=pairs)["verdicts"]


def ask_bird(options: argparse.Namespace, file: Predictions, metric: str) -> list[Any]:
    with file.staged() as job:
        return ask(
            options.python,
            "bird",
            options.bird / "evaluation",
            gold=job["gold"],
            predicted=job["bird"],
            databases=f"{file.folder}/",
            metric=metric,
        )["verdicts"]


def compared(
    executor: Executor,
    file: Predictions,
    name: str,
    official: Sequence[Any],
    *,
    cases: Sequence[Case] = (),
) -> Agreement:
    """Judge predictions under a comparator, and list where its program says otherwise."""
    ours = [one.scores[name] for one in judge_cases(executor, cases or file.cases(), [name])]
    return differences(file, name, official, ours)


def differences(
    file: Predictions, what: str, official: Sequence[Any], ours: Sequence[Any]
) -> Agreement:
    """List where two programs differ; a gold query that fails is wrong for ours."""
    theirs = [0 if one == "gold failed" else one for one in official]
    if len(theirs) != len(ours):
        sys.exit(f"{file.name}: {len(theirs)} official verdicts, {len(ours)} of ours")
    differing = [
        {
            "index": at,
            "official": official[at],
            "ours": ours[at],
            "gold": file.gold[at][0],
            "predicted": file.predicted[at] if file.predicted else "",
            "change": file.changes[at] if file.changes else "",
        }
        for at, (one, other) in enumerate(zip(theirs, ours, strict=True))
        if not is_same(one, other)
    ]
    right = sum(one for one in theirs if isinstance(one, int | float))
    return Agreement(file.name, what, len(ours), right, differing)


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, str) or one is None:
        return one == other
    return abs(one - other) < 1e-12


def read_lines(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text().splitlines()]
