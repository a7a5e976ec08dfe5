"""What do witnesses refute that a comparator takes for right, and is it wrong?

    python benchmarks/witnesses.py --data DATA [--databases DB,…] [--out witnesses.json]

DATA holds Spider's databases (spider_data), distilled test suites (test_suite_database,
classical_test) and predictions (predictions/spider_dev/*.jsonl with `pred`, `gold` and `db_id`).
Of queries that are right on their own database, how many do 4 and 8 witnesses refute: of those
that a judge calls wrong, and of those that it calls right? The latter are listed, to be looked at.

    predictions  real predictions; judged by Spider's test suite
    classical    mutants of the golds of restaurants and geography; judged by their test suites
    training     mutants of training golds on `--databases`; judged by 40 databases of random rows
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from pathlib import Path
from typing import Any, NamedTuple

from rich.console import Console
from rich.progress import track

from benchmarks import markdown
from benchmarks._mutants import neighbours
from benchmarks._random_databases import random_databases
from sqlenv.cache import DiskCache
from sqlenv.config import ExecutorConfig
from sqlenv.evaluators.comparators import Case, judge_cases
from sqlenv.evaluators.equality import matches
from sqlenv.executor import Executor
from sqlenv.types import ExecutionMatch
from sqlenv.witness.draw import decided_result, run_bounded
from sqlenv.witness.refutation import judge_on_witnesses
from sqlenv.witness.source import read_source
from sqlenv.witness.store import WitnessStore

COUNTS = (4, 8)
_CLASSICAL = 100  # questions
_GOLDS, _MUTANTS, _DATABASES = 20, 6, 40  # of a database, of a gold, and of random rows


class Judged(NamedTuple):
    """A query that is right on its own database, and whether it is right for the judge."""

    case: Case
    is_right: bool


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--databases", default="", help="training databases, with commas between")
    parser.add_argument("--out", type=Path, default=Path("witnesses.json"))
    options = parser.parse_args()
    found: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(DiskCache(Path(folder))) as cache,
        Executor(ExecutorConfig(timeout_s=60)) as executor,
    ):
        predictions = by_suite(read_predictions(options.data), executor)
        classical = by_suite(read_classical(options.data), executor)
        training = by_random_rows(
            options.data, filter(None, options.databases.split(",")), executor
        )
        sets: tuple[tuple[str, ExecutionMatch, list[Judged]], ...] = (
            ("predictions", "spider_ex", predictions),
            ("classical", "spider_ex", classical),
            ("training", "set", training),
        )
        for name, rule, judged in sets:
            golds = sorted({(one.case.database, one.case.gold) for one in judged})
            for count in COUNTS if golds else ():
                store = WitnessStore(cache, match=rule, count=count)
                start_s = time.process_time()
                made = [store.of(*gold) for gold in track(golds, f"{name}, {count} witnesses")]
                seconds = time.process_time() - start_s
                cases = [one.case for one in judged]
                scores = judge_on_witnesses(cases, rule, executor, store)
                refuted = [score == 0 for score in scores]
                found.append(
                    {"set": name, "witnesses": count, **summary(judged, refuted, made, seconds)}
                )
    options.out.write_text(json.dumps(found, indent=1))
    columns = [name for name in found[0] if name not in ("missed", "refuted_right")]
    rows = [[str(one[name]) for name in columns] for one in found]
    Console(width=200).print(markdown(columns, rows))


def read_predictions(data: Path) -> list[Case]:
    cases = []
    for file in sorted((data / "predictions/spider_dev").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            told = json.loads(line)
            name = told["db_id"]
            suite = tuple(sorted((data / "test_suite_database" / name).glob("*.sqlite")))
            database = data / "spider_data/database" / name / f"{name}.sqlite"
            cases.append(Case(told["pred"], told["gold"], database, suite))
    return cases


def read_classical(data: Path) -> list[Case]:
    """Change golds in one place."""
    folder = data / "classical_test"
    cases = []
    questions = json.loads((folder / "classical_test.json").read_text())
    for told in random.Random(0).sample(questions, _CLASSICAL):
        database, gold = folder / told["db_path"], told["query"].rstrip("; ")
        suite = tuple(folder / file for file in told["testsuite"])
        cases += [Case(one, gold, database, suite) for one in changed(gold, database)]
    return list(dict.fromkeys(cases))


def changed(gold: str, database: Path) -> list[str]:
    """Change a gold query in one place, in a few of all ways; the same gold always in the same."""
    found = [sql for _, sql in neighbours(gold, read_source(database).column_names)]
    return random.Random(gold).sample(found, min(len(found), _MUTANTS))


def by_suite(cases: Sequence[Case], executor: Executor) -> list[Judged]:
    scores = [one.scores for one in judge_cases(executor, cases, ("spider_ex", "spider_ts"))]
    return [
        Judged(case, bool(score["spider_ts"]))
        for case, score in zip(cases, scores, strict=True)
        if score["spider_ex"]
    ]


def by_random_rows(data: Path, names: Iterator[str], executor: Executor) -> list[Judged]:
    golds: dict[str, list[str]] = {}
    for line in (data / "spider_data/train_gold.sql").read_text().splitlines():
        gold, name = line.rsplit("\t", 1)
        golds.setdefault(name, []).append(gold)
    judged: list[Judged] = []
    for name in track(list(names), "random rows"):
        database = data / "spider_data/database" / name / f"{name}.sqlite"
        distinct = list(dict.fromkeys(golds[name]))
        for gold in random.Random(name).sample(distinct, min(len(distinct), _GOLDS)):
            cases = [Case(sql, gold, database) for sql in changed(gold, database)]
            scores = [one.scores["set"] for one in judge_cases(executor, cases, ("set",))]
            right = [case for case, score in zip(cases, scores, strict=True) if score]
            wrong = found_wrong(gold, [case.predicted for case in right], database)
            judged += [Judged(case, case.predicted not in wrong) for case in right]
    return judged


def found_wrong(gold: str, queries: Sequence[str], database: Path) -> set[str]:
    """Find the queries whose result is another set of rows on a database of random rows."""
    source, wrong = read_source(database), set[str]()
    for one in random_databases(source, (gold, *queries), _DATABASES if queries else 0, seed=0):
        if (wanted := decided_result(one, gold, "set")) is None:
            continue
        for sql in set(queries) - wrong:
            result = run_bounded(one, sql)
            if result is not None and not matches(result, wanted, mode="set"):
                wrong.add(sql)
    return wrong


def summary(
    judged: Sequence[Judged],
    refuted: Sequence[bool],
    made: Sequence[tuple[Path, ...]],
    seconds: float,
) -> dict[str, Any]:
    pairs = list(zip(judged, refuted, strict=True))
    lucky = [(one.case, is_refuted) for one, is_refuted in pairs if not one.is_right]
    right = [(one.case, is_refuted) for one, is_refuted in pairs if one.is_right]
    sizes = [file.stat().st_size for files in made for file in files]
    return {
        "wrong": len(lucky),
        "of these refuted": sum(is_refuted for _, is_refuted in lucky),
        "right": len(right),
        "of these refuted ": sum(is_refuted for _, is_refuted in right),
        "golds": len(made),
        "without a witness": sum(not files for files in made),
        "bytes a gold": round(sum(sizes) / len(made)),
        "ms a gold": round(1000 * seconds / len(made), 1),
        "missed": sorted({(c.gold, c.predicted) for c, is_refuted in lucky if not is_refuted}),
        "refuted_right": sorted({(c.gold, c.predicted) for c, is_refuted in right if is_refuted}),
    }


if __name__ == "__main__":
    main()
