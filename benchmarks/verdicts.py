"""Do our verdicts equal the official programs', question by question?

    python benchmarks/verdicts.py --data ../shared/data --python official/bin/python \
        --spider test-suite-sql-eval --bird mini_dev --omnisql OmniSQL --spider2 Spider2 \
        --out verdicts.json

Runs the official programs, from folders of their repositories and in an environment that has what
they import (nltk, sqlparse, tqdm, func_timeout, pandas, psycopg2, pymysql), on every file of
predictions that can be executed, and our comparators on the same files. Programs that are not given
are left out. Prints a line a file and comparator; OUT lists every differing verdict and level of
difficulty. Exit status 1 if there is one. Also compares with the verdicts that a published toolkit
left beside its failures.

R-VES is a measurement, so only its rule can be equal: the reward of given ratios, and which
predictions are rewarded at all; rewards that differ are counted.
"""

from __future__ import annotations

import argparse
import json
import random
import sys
import tempfile
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

from benchmarks._ask import ask
from benchmarks._spider2_cases import stage, stage_omnisql
from sqlenv.config import OFFICIAL
from sqlenv.evaluators.bird import ves_reward
from sqlenv.evaluators.comparators import Case
from sqlenv.evaluators.hardness import grade
from sqlenv.executor import Executor

FAILURES = "ibm_spider_dev_failures.jsonl"


@dataclass(frozen=True, slots=True)
class Comparison:
    """One file of predictions under one comparator, or what else was compared."""

    file: str
    what: str
    questions: int
    official_right: float
    differing: list[dict[str, Any]] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class Predictions:
    """A file of predictions beside gold queries."""

    name: str
    predicted: list[str]
    gold: list[tuple[str, str]]


def main() -> None:
    options = parse_arguments()
    found = []
    for one in compare_all(options):
        found.append(one)
        share = one.official_right / max(1, one.questions)
        print(
            f"{one.file:52} {one.what:24} {one.questions:6,} verdicts, official mean {share:.4f}, "
            f"{len(one.differing)} differ",
            flush=True,
        )
    differing = sum(len(one.differing) for one in found)
    print(f"{sum(one.questions for one in found):,} verdicts compared, {differing} differ")
    if options.out:
        options.out.write_text(json.dumps([asdict(one) for one in found], indent=1) + "\n")
    sys.exit(differing > 0)


def compare_all(options: argparse.Namespace) -> Iterator[Comparison]:
    with Executor(OFFICIAL) as executor:
        yield from compare_toolkit(options.data, executor)
        if options.spider:
            yield from compare_spider(options, executor)
            yield from compare_levels(options)
        if options.bird:
            yield from compare_bird(options, executor)
            yield compare_rewards(options)
        if options.omnisql:
            yield from compare_omnisql(options, executor)
        if options.spider2:
            yield from compare_spider2(options, executor)


def spider_files(data: Path) -> Iterator[Predictions]:
    """Read the predictions on Spider dev, as the official program reads its files."""
    gold = [
        (sql.strip(), name.strip())
        for sql, name in (
            line.split("\t") for line in read_lines(data / "spider_data/dev_visible_gold.sql")
        )
    ]
    for path in sorted((data / "predictions/spider_dev").glob("*.sql")):
        yield Predictions(path.name, [line.split("\t")[0] for line in read_lines(path)], gold)
    failures = read_failures(data)
    questions = json.loads((data / "spider_data/dev_visible.json").read_text())
    asked = {one["question"]: (one["query"], one["db_id"]) for one in questions}
    known = [one for one in failures if one["question"] in asked]
    yield Predictions(
        FAILURES,
        [" ".join(one["pred"].split()) for one in known],
        [asked[one["question"]] for one in known],
    )


def read_failures(data: Path) -> list[dict[str, Any]]:
    return [json.loads(line) for line in read_lines(data / "predictions/failures" / FAILURES)]


def compare_toolkit(data: Path, executor: Executor) -> Iterator[Comparison]:
    """Compare with the verdicts of IBM's toolkit, which its file of failures holds."""
    failures = read_failures(data)
    gold = [(one["gold"][0], one["db_id"]) for one in failures]
    file = Predictions(FAILURES, [one["pred"] for one in failures], gold)
    cases = spider_cases(data, file)
    for name, metric in (
        ("bag_ordered", "execution_accuracy"),
        ("bird_ex", "bird_execution_accuracy"),
    ):
        theirs = [float(one["metrics"][metric]) for one in failures]
        yield differences(file, f"{name}, {metric}", theirs, scores(executor, cases, name))


def compare_spider(options: argparse.Namespace, executor: Executor) -> Iterator[Comparison]:
    data = options.data
    for file in spider_files(data):
        cases = spider_cases(data, file)
        for name, databases, keep in (
            ("spider_ex", "spider_data/database", False),
            ("spider_ts", "test_suite_database", False),
            ("spider_ex_keep_distinct", "spider_data/database", True),
            ("spider_ts_keep_distinct", "test_suite_database", True),
        ):
            job = {"databases": str(data / databases), "keep_distinct": keep}
            answer = ask_spider(options, file, job)
            ours = scores(executor, cases, name)
            yield differences(file, name, answer["verdicts"], ours)
        ours = [grade(case.gold) for case in cases]
        yield differences(file, "hardness", answer["levels"], ours)


def ask_spider(options: argparse.Namespace, file: Predictions, job: dict[str, Any]) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        gold, predicted = Path(folder) / "gold.sql", Path(folder) / "predicted.sql"
        gold.write_text("".join(f"{sql}\t{name}\n" for sql, name in file.gold))
        predicted.write_text("".join(f"{sql}\n" for sql in file.predicted))
        files = {"gold": str(gold), "predicted": str(predicted)}
        return ask(options.python, "spider", options.spider, files | job)


def spider_cases(data: Path, file: Predictions) -> list[Case]:
    folder = data / "test_suite_database"
    suites = {name: tuple(sorted((folder / name).glob("*.sqlite"))) for _, name in file.gold}
    return [
        Case(sql, gold, data / f"spider_data/database/{name}/{name}.sqlite", suites[name])
        for sql, (gold, name) in zip(file.predicted, file.gold, strict=True)
    ]


def compare_levels(options: argparse.Namespace) -> Iterator[Comparison]:
    """Compare the levels of all gold queries of Spider, by the schemas of tables.json."""
    folder = options.data / "spider_data"
    schemas = {
        one["db_id"]: schema(one) for one in json.loads((folder / "tables.json").read_text())
    }
    for name in ("train_spider.json", "dev_visible.json"):
        records = json.loads((folder / name).read_text())
        queries = [(one["query"], one["db_id"]) for one in records]
        job = {"queries": queries, "schemas": schemas}
        levels = ask(options.python, "spider_levels", options.spider, job)["levels"]
        # A query that the official parser cannot read has no level: its program ends there.
        read = [at for at, level in enumerate(levels) if not level.startswith("failed")]
        file = Predictions(name, [], [queries[at] for at in read])
        ours = [grade(queries[at][0]) for at in read]
        yield differences(file, "hardness", [levels[at] for at in read], ours)


def schema(entry: Any) -> dict[str, list[str]]:
    tables: dict[str, list[str]] = {name.lower(): [] for name in entry["table_names_original"]}
    for table, column in entry["column_names_original"]:
        if table >= 0:
            tables[entry["table_names_original"][table].lower()].append(column.lower())
    return tables


def bird_files(data: Path) -> Iterator[Predictions]:
    questions = json.loads((data / "bird_dev/dev.json").read_text())
    for path in sorted((data / "predictions").glob("bird_*/*.jsonl")):
        records = [json.loads(line) for line in read_lines(path)]
        # The gold queries are in SQLite's dialect; predictions in another one may run all the same.
        sqlite = {one["question_id"]: one["SQL"] for one in questions}
        gold = [(" ".join(sqlite[one["question_id"]].split()), one["db_id"]) for one in records]
        predicted = [one["pred"] for one in records]
        yield Predictions(f"{path.parent.name}/{path.name}", predicted, gold)


def bird_cases(data: Path, file: Predictions) -> list[Case]:
    folder = data / "bird_dev/dev_databases"
    return [
        Case(sql, gold, folder / name / f"{name}.sqlite")
        for sql, (gold, name) in zip(file.predicted, file.gold, strict=True)
    ]


def compare_bird(options: argparse.Namespace, executor: Executor) -> Iterator[Comparison]:
    for file in bird_files(options.data):
        cases = bird_cases(options.data, file)
        for metric, name in (("ex", "bird_ex"), ("f1", "bird_soft_f1"), ("ves", "bird_r_ves")):
            if metric == "ves" and not options.r_ves:
                continue
            answer = ask_bird(options, file, metric)
            ours = scores(executor, cases, name)
            official = [float(one) for one in answer["verdicts"]]
            if metric == "ves":
                again = [float(one) for one in ask_bird(options, file, metric)["verdicts"]]
                yield from compare_ves(file, official, again, ours)
            else:
                yield differences(file, name, official, ours)


def compare_ves(
    file: Predictions, official: Sequence[float], again: Sequence[float], ours: Sequence[float]
) -> Iterator[Comparison]:
    """Compare which predictions are rewarded; how much, with what two official runs differ by."""
    first, second = ([reward**0.5 for reward in rewards] for rewards in (official, again))
    rewarded = [[float(score > 0) for score in scores] for scores in (first, ours)]
    yield differences(file, "bird_r_ves above 0", *rewarded)
    means = [100 * sum(scores) / len(scores) for scores in (first, second, ours)]
    equal = [
        sum(abs(one - other) < 1e-9 for one, other in zip(first, others, strict=True) if one)
        for others in (second, ours)
    ]
    print(
        f"{file.name}: R-VES {means[0]:.2f}, official again {means[1]:.2f}, ours {means[2]:.2f}; "
        f"of {sum(rewarded[0]):.0f} rewards above 0 equal {equal[0]} and {equal[1]}",
        flush=True,
    )


def ask_bird(options: argparse.Namespace, file: Predictions, metric: str) -> Any:
    with tempfile.TemporaryDirectory() as folder:
        gold, predicted = Path(folder) / "gold.sql", Path(folder) / "predicted.json"
        gold.write_text("".join(f"{sql}\t{name}\n" for sql, name in file.gold))
        entries = {
            str(number): f"{sql}\t----- bird -----\t{name}"
            for number, (sql, (_, name)) in enumerate(zip(file.predicted, file.gold, strict=True))
        }
        predicted.write_text(json.dumps(entries))
        databases = f"{options.data / 'bird_dev/dev_databases'}/"
        job = {"gold": str(gold), "predicted": str(predicted), "databases": databases}
        folder = options.bird / "evaluation"
        return ask(options.python, "bird", folder, job | {"metric": metric})


def compare_rewards(options: argparse.Namespace) -> Comparison:
    """Compare the reward of ratios of times, drawn with outliers and near the limits of bins."""
    rng = random.Random(0)
    ratios = []
    for _ in range(500):
        middle = rng.choice([0.1, 0.25, 0.5, 1.0, 2.0, 4.0])
        drawn = [middle * rng.lognormvariate(0, 0.2) for _ in range(100)]
        drawn[: rng.randrange(4)] = [middle * 50] * rng.randrange(4)
        ratios.append(drawn)
    job = {"ratios": ratios}
    official = ask(options.python, "ves_rewards", options.bird / "evaluation", job)["rewards"]
    file = Predictions("drawn ratios", [], [("", "")] * len(ratios))
    return differences(file, "reward of R-VES", official, [ves_reward(one) for one in ratios])


def compare_omnisql(options: argparse.Namespace, executor: Executor) -> Iterator[Comparison]:
    folder = options.omnisql / "train_and_evaluate"
    for file in bird_files(options.data):
        cases = bird_cases(options.data, file)
        databases = str(options.data / "bird_dev/dev_databases")
        records = [{"question": "", "SQL": sql, "db_id": name} for sql, name in file.gold]
        with tempfile.TemporaryDirectory() as place:
            # The program tells BIRD's files by their names.
            files = {name: Path(place) / f"{name}_bird.json" for name in ("gold", "predicted")}
            files["gold"].write_text(json.dumps(records))
            files["predicted"].write_text(
                json.dumps([{"pred_sqls": [sql]} for sql in file.predicted])
            )
            job = {name: str(path) for name, path in files.items()} | {"databases": databases}
            answer = ask(options.python, "omnisql_bird", folder, job)
        yield differences(
            file, "omnisql_bird", answer["verdicts"], scores(executor, cases, "omnisql_bird")
        )
    if options.spider:
        for file in spider_files(options.data):
            yield from compare_omnisql_spider(options, executor, file)


def compare_omnisql_spider(
    options: argparse.Namespace, executor: Executor, file: Predictions
) -> Iterator[Comparison]:
    """Let OmniSQL write the predictions, and Spider's program judge what it wrote."""
    data = options.data
    with tempfile.TemporaryDirectory() as place:
        gold, predicted = Path(place) / "gold.sql", Path(place) / "predicted.json"
        gold.write_text("".join(f"{sql}\t{name}\n" for sql, name in file.gold))
        predicted.write_text(json.dumps([{"pred_sqls": [sql]} for sql in file.predicted]))
        files = {"gold": str(gold), "predicted": str(predicted)}
        job = files | {"databases": str(data / "spider_data/database")}
        folder = options.omnisql / "train_and_evaluate"
        written = ask(options.python, "omnisql_spider", folder, job)["written"]
    theirs = Predictions(file.name, written, file.gold)
    cases = spider_cases(data, file)
    for name, databases in (("ex", "spider_data/database"), ("ts", "test_suite_database")):
        job = {"databases": str(data / databases), "keep_distinct": False}
        verdicts = ask_spider(options, theirs, job)["verdicts"]
        what = f"omnisql_spider_{name}"
        yield differences(file, what, verdicts, scores(executor, cases, what))


def compare_spider2(options: argparse.Namespace, executor: Executor) -> Iterator[Comparison]:
    with tempfile.TemporaryDirectory() as place:
        cases = dict(stage(options.data / "spider2-lite", Path(place)))
        job = {"stage": place, "predicted": f"{place}/predicted", "gold": f"{place}/gold"}
        folder = options.spider2 / "spider2-lite/evaluation_suite"
        found = ask(options.python, "spider2", folder, job)["verdicts"]
        ours = scores(executor, list(cases.values()), "spider2_local")
        queries = [case.predicted for case in cases.values()]
        file = Predictions("gold results, changed", queries, [(name, "") for name in cases])
        yield differences(file, "spider2_local", [found[name] for name in cases], ours)
        if options.omnisql:
            chosen = stage_omnisql(Path(place), cases)
            job = {
                "results": f"{place}/gold/exec_result",
                "databases": f"{place}/omnisql",
                **{name: f"{place}/{name}.json" for name in ("gold", "predicted", "standards")},
            }
            program = options.omnisql / "train_and_evaluate"
            found = ask(options.python, "omnisql_spider2", program, job)["verdicts"]
            ours = scores(executor, list(chosen.values()), "omnisql_spider2")
            queries = [case.predicted for case in chosen.values()]
            file = Predictions("gold results, changed", queries, [(name, "") for name in chosen])
            yield differences(file, "omnisql_spider2", [found[name] for name in chosen], ours)


def scores(executor: Executor, cases: Sequence[Case], name: str) -> list[float]:
    return [judged.scores[name] for judged in executor.judge(cases, [name])]


def differences(
    file: Predictions, what: str, official: Sequence[Any], ours: Sequence[Any]
) -> Comparison:
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
    return Comparison(file.name, what, len(ours), right, differing)


def is_same(one: Any, other: Any) -> bool:
    if isinstance(one, str) or one is None:
        return one == other
    return abs(one - other) < 1e-12


def read_lines(path: Path) -> list[str]:
    return [line.strip() for line in path.read_text().splitlines()]


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the shared data")
    parser.add_argument("--python", type=Path, required=True, help="interpreter of the programs")
    for name in ("spider", "bird", "omnisql", "spider2"):
        parser.add_argument(f"--{name}", type=Path, help="folder of the program's repository")
    parser.add_argument("--r-ves", action="store_true", help="also measure R-VES; takes minutes")
    parser.add_argument("--out", type=Path, help="JSON file of all comparisons")
    return parser.parse_args()


if __name__ == "__main__":
    main()
