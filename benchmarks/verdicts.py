"""Do our verdicts equal the official programs', question by question?

    python benchmarks/verdicts.py --data ../shared/data --python official/bin/python \
        --spider test-suite-sql-eval --bird mini_dev --spider2 Spider2 --out verdicts.json

Runs the official programs and our comparators on the same predictions. The programs are given as
folders of their repositories, and `--python` as an interpreter with their imports (nltk, sqlparse,
tqdm, func_timeout, pandas, psycopg2, pymysql); those that are not given are skipped. `--only`
selects files by a word in their names. Prints a line of JSON for each file and comparator, and one
of all; OUT lists every difference in verdict or difficulty. Exit status 1 if there is one.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from benchmarks._official import ask
from benchmarks._spider2_cases import stage
from sqlenv.config import OFFICIAL
from sqlenv.evaluators.comparators import Case, compare_cases
from sqlenv.evaluators.hardness import grade
from sqlenv.executor import Executor

FAILURES = "ibm_spider_dev_failures.jsonl"
SPIDER, SUITE, BIRD = "spider_data/database", "test_suite_database", "bird_dev/dev_databases"


@dataclass(frozen=True, slots=True)
class Agreement:
    """One file of predictions under one comparator, or what else was compared."""

    file: str
    what: str
    verdicts: int
    official_mean: float
    differing: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Predictions:
    """Predictions beside gold queries (SQL and database)."""

    name: str
    predicted: Sequence[str]
    gold: Sequence[tuple[str, str]]
    folder: Path = Path()
    suites: Path | None = None

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
        pairs = zip(self.predicted, self.gold, strict=True)
        named = [f"{sql}\t----- bird -----\t{name}" for sql, (_, name) in pairs]
        texts = {
            "gold": "".join(f"{sql}\t{name}\n" for sql, name in self.gold),
            "lines": "".join(f"{sql}\n" for sql in self.predicted),
            "bird": json.dumps({str(at): text for at, text in enumerate(named)}),
        }
        with tempfile.TemporaryDirectory() as place:
            for name, text in texts.items():
                Path(place, name).write_text(text)
            yield {name: f"{place}/{name}" for name in texts}


def main() -> None:
    options = parse_arguments()
    options.data = options.data.resolve()
    found = []
    with Executor(OFFICIAL) as executor:
        for one in compare_all(options, executor):
            found.append(asdict(one))
            print(json.dumps(found[-1] | {"differing": len(one.differing)}), flush=True)
    if options.out:
        options.out.write_text(json.dumps(found, indent=1) + "\n")
    differing = sum(len(one["differing"]) for one in found)
    print(json.dumps({"verdicts": sum(one["verdicts"] for one in found), "differing": differing}))
    sys.exit(differing > 0)


def compare_all(options: argparse.Namespace, executor: Executor) -> Iterator[Agreement]:
    yield from compare_toolkit(options.data, executor)
    if options.spider:
        for file in spider_files(options.data):
            if options.only in file.name:
                yield from compare_spider(options, executor, file)
        yield from compare_levels(options)
    if options.bird:
        for file in bird_files(options.data):
            if options.only in file.name:
                yield from compare_bird(options, executor, file)
    if options.spider2:
        yield compare_spider2(options, executor)


def compare_toolkit(data: Path, executor: Executor) -> Iterator[Agreement]:
    """Compare with the verdicts of IBM's toolkit, which its file of failures holds."""
    failures = read_failures(data)
    gold = [(one["gold"][0], one["db_id"]) for one in failures]
    file = Predictions(
        f"{FAILURES}, toolkit", [one["pred"] for one in failures], gold, data / SPIDER, data / SUITE
    )
    metrics = {"bag_ordered": "execution_accuracy", "bird_ex": "bird_execution_accuracy"}
    for name, metric in metrics.items():
        theirs = [float(one["metrics"][metric]) for one in failures]
        yield compared(executor, file, name, theirs)


def compare_spider(
    options: argparse.Namespace, executor: Executor, file: Predictions
) -> Iterator[Agreement]:
    answer: dict[str, Any] = {}
    for kind, databases in (("ex", SPIDER), ("ts", SUITE)):
        with file.staged() as job:
            answer = ask(
                options.python,
                "spider",
                options.spider,
                gold=job["gold"],
                predicted=job["lines"],
                databases=str(options.data / databases),
            )
        yield compared(executor, file, f"spider_{kind}", answer["verdicts"])
    yield differences(file, "hardness", answer["levels"], [grade(gold) for gold, _ in file.gold])


def compare_levels(options: argparse.Namespace) -> Iterator[Agreement]:
    """Compare the levels of all gold queries of Spider, by the schemas of tables.json."""
    folder = options.data / "spider_data"
    tables = json.loads((folder / "tables.json").read_text())
    schemas = {one["db_id"]: schema(one) for one in tables}
    for name in ("train_spider.json", "dev_visible.json"):
        records = json.loads((folder / name).read_text())
        queries = [(one["query"], one["db_id"]) for one in records]
        answer = ask(
            options.python, "spider_levels", options.spider, queries=queries, schemas=schemas
        )
        # A query that the official parser cannot read has no level: its program ends there.
        read = [at for at, one in enumerate(answer["levels"]) if not one.startswith("failed")]
        file = Predictions(name, [], [queries[at] for at in read])
        ours = [grade(sql) for sql, _ in file.gold]
        yield differences(file, "hardness", [answer["levels"][at] for at in read], ours)


def schema(entry: Any) -> dict[str, list[str]]:
    tables: dict[str, list[str]] = {name.lower(): [] for name in entry["table_names_original"]}
    for table, column in entry["column_names_original"]:
        if table >= 0:
            tables[entry["table_names_original"][table].lower()].append(column.lower())
    return tables


def compare_bird(
    options: argparse.Namespace, executor: Executor, file: Predictions
) -> Iterator[Agreement]:
    for metric, name in (("ex", "bird_ex"), ("f1", "bird_soft_f1")):
        theirs = [float(one) for one in ask_bird(options, file, metric)]
        yield compared(executor, file, name, theirs)


def compare_spider2(options: argparse.Namespace, executor: Executor) -> Agreement:
    with tempfile.TemporaryDirectory() as place:
        cases = dict(stage(options.data / "spider2-lite", Path(place)))
        job = {"stage": place, "predicted": f"{place}/predicted", "gold": f"{place}/gold"}
        folder = options.spider2 / "spider2-lite/evaluation_suite"
        found = ask(options.python, "spider2", folder, **job)["verdicts"]
        queries = [case.predicted for case in cases.values()]
        file = Predictions("gold results, changed", queries, [(one, "") for one in cases])
        official = [found[one] for one in cases]
        return compared(executor, file, "spider2_local", official, cases=list(cases.values()))


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


def bird_gold(data: Path) -> dict[int, tuple[str, str]]:
    """Return gold query and database by number of the question."""
    questions = json.loads((data / "bird_dev/dev.json").read_text())
    return {one["question_id"]: (" ".join(one["SQL"].split()), one["db_id"]) for one in questions}


def bird_files(data: Path) -> Iterator[Predictions]:
    # The gold queries are in SQLite's dialect; predictions in another one may run all the same.
    gold = bird_gold(data)
    for path in sorted((data / "predictions").glob("bird_*/*.jsonl")):
        records = [json.loads(line) for line in read_lines(path)]
        golds = [gold[one["question_id"]] for one in records]
        predicted = [one["pred"] for one in records]
        yield Predictions(f"{path.parent.name}/{path.name}", predicted, golds, data / BIRD)


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
    ours = [one.scores[name] for one in compare_cases(executor, cases or file.cases(), [name])]
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
        }
        for at, (one, other) in enumerate(zip(theirs, ours, strict=True))
        if not is_same(one, other)
    ]
    right = sum(one for one in theirs if isinstance(one, int | float))
    return Agreement(file.name, what, len(ours), right / max(1, len(ours)), differing)


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, str) or one is None:
        return one == other
    return abs(one - other) < 1e-12


def read_lines(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text().splitlines()]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the shared data")
    parser.add_argument("--python", type=Path, help="interpreter of the programs")
    for name in ("spider", "bird", "spider2"):
        parser.add_argument(f"--{name}", type=Path, help="folder of the program's repository")
    parser.add_argument("--only", default="", help="files of predictions with this in their names")
    parser.add_argument("--out", type=Path, help="JSON file of all comparisons")
    return parser.parse_args()


if __name__ == "__main__":
    main()
