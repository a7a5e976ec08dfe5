"""Do our verdicts equal the official programs', question by question?

    python benchmarks/verdicts.py --data ../shared/data --python official/bin/python \
        --spider test-suite-sql-eval --bird mini_dev --spider2 Spider2 --out verdicts.json

Runs the official programs and our comparators on the same predictions. The programs are given as
folders of their repositories, and `--python` as an interpreter with their imports (nltk, sqlparse,
tqdm, func_timeout, pandas, psycopg2, pymysql); those that are not given are skipped. `--mutations`
compares gold queries of Spider dev and BIRD with one change each, instead of predictions; OUT then
also has the number of them that each comparator accepts. `--only` selects files by a word in their
names.

Prints a line for each file and comparator; OUT lists every difference in verdict or difficulty.
Exit status 1 if a difference has no known cause (`benchmarks._comparison.CAUSES`).
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from contextlib import closing
from dataclasses import asdict, replace
from pathlib import Path
from typing import Any

from benchmarks._comparison import (
    BIRD,
    FAILURES,
    SPIDER,
    SUITE,
    Agreement,
    Predictions,
    ask_bird,
    ask_pairs,
    ask_spider,
    bird_files,
    compared,
    differences,
    mutated,
    read_failures,
    spider_files,
    spider_gold,
)
from benchmarks._official import ask
from benchmarks._spider2_cases import stage
from sqlenv.cache import DiskCache
from sqlenv.config import OFFICIAL
from sqlenv.evaluators.comparators import Case, judge_cases
from sqlenv.evaluators.hardness import grade
from sqlenv.executor import Executor

RULES = ("set", "bag", "bag_ordered", "test_suite")


def main() -> None:
    options = parse_arguments()
    options.data = options.data.resolve()
    found, passing = [], {}
    with Executor(OFFICIAL) as executor:
        for one in (compare_mutants if options.mutations else compare_all)(options, executor):
            if isinstance(one, Mapping):
                passing |= one
                continue
            found.append(one)
            share = one.official_right / max(1, one.questions)
            print(
                f"{one.file:52} {one.what:24} {one.questions:6,} verdicts, official mean "
                f"{share:.4f}, {len(one.differing)} differ",
                flush=True,
            )
    differing = sum(len(one.differing) for one in found)
    unexplained = sum(one.unexplained for one in found)
    print(
        f"{sum(one.questions for one in found):,} verdicts compared, {differing} differ, "
        f"{differing - unexplained} of them by known faults of the programs"
    )
    if options.out:
        report = {"comparisons": [asdict(one) for one in found], "passing": passing}
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    sys.exit(unexplained > 0)


def compare_all(options: argparse.Namespace, executor: Executor) -> Iterator[Agreement]:
    spiders = [file for file in spider_files(options.data) if options.only in file.name]
    birds = [file for file in bird_files(options.data) if options.only in file.name]
    yield from compare_toolkit(options.data, executor)
    if options.spider:
        for file in spiders:
            yield from compare_spider(options, executor, file)
        yield from compare_levels(options)
    if options.bird:
        for file in birds:
            for metric, name in (("ex", "bird_ex"), ("f1", "bird_soft_f1")):
                theirs = [float(one) for one in ask_bird(options, file, metric)]
                yield compared(executor, file, name, theirs)
    if options.spider2:
        yield from compare_spider2(options, executor)


def compare_mutants(
    options: argparse.Namespace, executor: Executor
) -> Iterator[Agreement | Mapping[str, Any]]:
    """Compare on changed gold queries; then count those that each comparator takes for right, alone
    and with eight witnesses.
    """
    from sqlenv.witness.refutation import judge_on_witnesses
    from sqlenv.witness.store import WitnessStore

    data = options.data
    questions = json.loads((data / "bird_dev/dev.json").read_text())
    birds = [(" ".join(one["SQL"].split()), one["db_id"]) for one in questions]
    spiders = list(dict.fromkeys(spider_gold(data)))
    files = [
        mutated("Spider dev, changed", spiders, data / SPIDER, data / SUITE),
        # Without a suite: Spider's program takes all files beside the database, which is one.
        mutated("BIRD, changed", birds, data / BIRD),
    ]
    names = (*RULES, "bird_ex", "bird_soft_f1", "spider_ex", "spider_ts")
    for file in files:
        cases = file.cases()
        judged = [one.scores for one in judge_cases(executor, cases, names)]
        ours = {name: [one[name] for one in judged] for name in names}
        if options.spider:
            for name in ("spider_ex", "spider_ts"):
                official = ask_pairs(options, cases, on_suite=name == "spider_ts")
                yield differences(file, name, official, ours[name])
        if options.bird:
            for name, metric in (("bird_ex", "ex"), ("bird_soft_f1", "f1")):
                yield differences(file, name, ask_bird(options, file, metric), ours[name])
        with tempfile.TemporaryDirectory() as folder, closing(DiskCache(Path(folder))) as cache:
            for rule in ("bird_ex", "spider_ex"):
                store = WitnessStore(cache, match=rule)
                found = judge_on_witnesses(cases, rule, executor, store)
                ours[f"{rule}, eight witnesses"] = found
        passing: defaultdict[str, Counter[str]] = defaultdict(Counter)
        for at, change in enumerate(file.changes):
            passing[change].update(
                {name: int(one[at] == 1) for name, one in ours.items()}, mutants=1
            )
        yield {file.name: passing}


def compare_toolkit(data: Path, executor: Executor) -> Iterator[Agreement]:
    """Compare with the verdicts of IBM's toolkit, which its file of failures holds."""
    failures = read_failures(data)
    gold = [(one["gold"][0], one["db_id"]) for one in failures]
    predicted = [one["pred"] for one in failures]
    file = Predictions(FAILURES, predicted, gold, data / SPIDER, data / SUITE)
    for name, metric in (
        ("bag_ordered", "execution_accuracy"),
        ("bird_ex", "bird_execution_accuracy"),
    ):
        theirs = [float(one["metrics"][metric]) for one in failures]
        yield replace(compared(executor, file, name, theirs), what=f"{name}, {metric}")


def compare_spider(
    options: argparse.Namespace, executor: Executor, file: Predictions
) -> Iterator[Agreement]:
    answer: dict[str, Any] = {}
    for kind, databases in (("ex", SPIDER), ("ts", SUITE)):
        answer = ask_spider(options, file, databases)
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


def compare_spider2(options: argparse.Namespace, executor: Executor) -> Iterator[Agreement]:
    with tempfile.TemporaryDirectory() as place:
        cases = dict(stage(options.data / "spider2-lite", Path(place)))
        job = {"stage": place, "predicted": f"{place}/predicted", "gold": f"{place}/gold"}
        folder = options.spider2 / "spider2-lite/evaluation_suite"
        found = ask(options.python, "spider2", folder, **job)["verdicts"]
        yield compare_instances(executor, cases, "spider2_local", found)


def compare_instances(
    executor: Executor, cases: Mapping[str, Case], name: str, found: Mapping[str, Any]
) -> Agreement:
    queries = [case.predicted for case in cases.values()]
    file = Predictions("gold results, changed", queries, [(one, "") for one in cases])
    official = [found[one] for one in cases]
    return compared(executor, file, name, official, cases=list(cases.values()))


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the shared data")
    parser.add_argument("--python", type=Path, help="interpreter of the programs")
    for name in ("spider", "bird", "spider2"):
        parser.add_argument(f"--{name}", type=Path, help="folder of the program's repository")
    parser.add_argument("--mutations", action="store_true", help="changed gold queries instead")
    parser.add_argument("--only", default="", help="files of predictions with this in their names")
    parser.add_argument("--out", type=Path, help="JSON file of all comparisons")
    return parser.parse_args()


if __name__ == "__main__":
    main()
