"""Which wrong queries does each comparator let pass, and do the official programs agree?

    python benchmarks/mutations.py --data ../shared/data --python official/bin/python \
        --spider test-suite-sql-eval --bird mini_dev --out mutations.json

Changes gold queries of Spider dev (with its test suites) and of BIRD in one place at a time:
DISTINCT, order, aggregates, joins, constants and so on; also their spelling. Prints how many of the
changed queries each comparator takes for right, and where its verdict is not the official
program's. Some changes do not change the meaning, so not every one that passes is a mistake; each
text is judged once. Exit status 1 when a verdict differs for another reason than those of `CAUSES`.
Without the programs' folders only our own comparators are asked.
"""

from __future__ import annotations

import argparse
import json
import sys
import tempfile
from collections import Counter, defaultdict
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.table import Table as RichTable

from benchmarks._ask import ask
from benchmarks._mutants import SPELLINGS, mutants
from sqlenv.config import OFFICIAL
from sqlenv.evaluators.comparators import Case
from sqlenv.executor import Executor

NAMES = (
    *("set", "bag", "bag_ordered", "test_suite"),
    *("bird_ex", "bird_soft_f1", "spider_ex", "spider_ts"),
)

CAUSES = {
    "write": "the official program runs a first statement that writes; it gives no rows, which is "
    "right where the gold query gives none"
}
"""Faults of the official programs that make verdicts differ, by the change that shows them."""


@dataclass(frozen=True, slots=True)
class Mutant:
    """A changed gold query."""

    change: str
    db_id: str
    case: Case


def main() -> None:
    options = parse_arguments()
    made = [*spider_mutants(options.data), *bird_mutants(options.data)]
    with Executor(OFFICIAL) as executor:
        judged = executor.judge([mutant.case for mutant in made], NAMES)
    scores = [one.scores for one in judged]
    differing = disagreements(options, made, scores)
    Console().print(table(made, scores))
    for name, found in differing.items():
        known = Counter(CAUSES[one["change"]] for one in found if one["change"] in CAUSES)
        print(f"{name}: {len(found)} of {len(made):,} verdicts differ from the official program's")
        for cause, count in known.items():
            print(f"  {count}: {cause}")
    report = {"mutants": len(made), "passing": counts(made, scores), "differing": differing}
    if options.out:
        options.out.write_text(json.dumps(report, indent=1) + "\n")
    unknown = [one for found in differing.values() for one in found if one["change"] not in CAUSES]
    sys.exit(bool(unknown))


def spider_mutants(data: Path) -> list[Mutant]:
    lines = (data / "spider_data/dev_visible_gold.sql").read_text().splitlines()
    golds = dict.fromkeys(tuple(line.strip().split("\t")) for line in lines)
    made = []
    for gold, name in golds:
        database = data / f"spider_data/database/{name}/{name}.sqlite"
        suite = tuple(sorted((data / "test_suite_database" / name).glob("*.sqlite")))
        for change, sql in mutants(gold):
            made.append(Mutant(change, name, Case(sql, gold, database, suite)))
    return made


def bird_mutants(data: Path) -> list[Mutant]:
    made = []
    for question in json.loads((data / "bird_dev/dev.json").read_text()):
        gold, name = " ".join(question["SQL"].split()), question["db_id"]
        database = data / f"bird_dev/dev_databases/{name}/{name}.sqlite"
        for change, sql in mutants(gold):
            # There is no suite: Spider's program takes all files beside the database, which is one.
            made.append(Mutant(change, name, Case(sql, gold, database, (database,))))
    return made


def disagreements(
    options: argparse.Namespace, made: Sequence[Mutant], scores: Sequence[Any]
) -> dict[str, list[dict[str, Any]]]:
    official: dict[str, Sequence[Any]] = {}
    if options.spider:
        official["spider_ex"] = ask_spider(options, [(m.case, m.case.database) for m in made])
        official["spider_ts"] = ask_spider(options, [(m.case, m.case.suite[0]) for m in made])
    if options.bird:
        official["bird_ex"] = ask_bird(options, made, "ex")
        official["bird_soft_f1"] = ask_bird(options, made, "f1")
    return {
        name: [
            {"change": mutant.change, "gold": mutant.case.gold, "predicted": mutant.case.predicted}
            | {"official": verdict, "ours": own[name], "database": mutant.db_id}
            for mutant, verdict, own in zip(made, verdicts, scores, strict=True)
            if isinstance(verdict, str) or abs(verdict - own[name]) > 1e-12
        ]
        for name, verdicts in official.items()
    }


def ask_spider(options: argparse.Namespace, cases: Sequence[tuple[Case, Path]]) -> list[Any]:
    pairs = [(case.predicted, case.gold, str(database.resolve())) for case, database in cases]
    job = {"pairs": pairs, "keep_distinct": False}
    return ask(options.python, "spider_pairs", options.spider, job)["verdicts"]


def ask_bird(options: argparse.Namespace, made: Sequence[Mutant], metric: str) -> list[Any]:
    """Ask BIRD's program, one call for the databases of each folder."""
    verdicts: list[Any] = [None] * len(made)
    folders: defaultdict[Path, list[int]] = defaultdict(list)
    for at, mutant in enumerate(made):
        folders[mutant.case.database.parents[1]].append(at)
    for databases, places in folders.items():
        with tempfile.TemporaryDirectory() as folder:
            gold, predicted = Path(folder) / "gold.sql", Path(folder) / "predicted.json"
            chosen = [made[at] for at in places]
            gold.write_text("".join(f"{one.case.gold}\t{one.db_id}\n" for one in chosen))
            entries = {
                str(at): f"{one.case.predicted}\t----- bird -----\t{one.db_id}"
                for at, one in enumerate(chosen)
            }
            predicted.write_text(json.dumps(entries))
            job = {"gold": str(gold), "predicted": str(predicted), "metric": metric}
            job |= {"databases": f"{databases.resolve()}/"}
            found = ask(options.python, "bird", options.bird / "evaluation", job)["verdicts"]
        for at, verdict in zip(places, found, strict=True):
            verdicts[at] = verdict
    return verdicts


def counts(made: Sequence[Mutant], scores: Sequence[Any]) -> dict[str, dict[str, int]]:
    """Count the mutants of each change, and those that each comparator takes for right."""
    passing: defaultdict[str, Counter[str]] = defaultdict(Counter)
    for mutant, own in zip(made, scores, strict=True):
        passing[mutant.change].update({name: int(own[name] == 1) for name in NAMES})
        passing[mutant.change]["mutants"] += 1
    return {change: dict(found) for change, found in passing.items()}


def table(made: Sequence[Mutant], scores: Sequence[Any]) -> RichTable:
    shown = RichTable("change", "mutants", *NAMES, title=f"Taken for right, of {len(made):,}")
    for column in shown.columns[1:]:
        column.justify = "right"
    passing = counts(made, scores)
    meaning = [change for change in passing if change not in SPELLINGS]
    for changes in (meaning, [change for change in passing if change in SPELLINGS]):
        for change in changes:
            shown.add_row(change, *(f"{passing[change][name]:,}" for name in ("mutants", *NAMES)))
        total = Counter[str]()
        for change in changes:
            total.update(passing[change])
        shown.add_row("all", *(f"{total[name]:,}" for name in ("mutants", *NAMES)))
        shown.add_section()
    return shown


def parse_arguments() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True, help="folder of the shared data")
    parser.add_argument("--python", type=Path, help="interpreter of the official programs")
    parser.add_argument("--spider", type=Path, help="folder of taoyds/test-suite-sql-eval")
    parser.add_argument("--bird", type=Path, help="folder of bird-bench/mini_dev")
    parser.add_argument("--out", type=Path, help="JSON file of the counts and differing verdicts")
    return parser.parse_args()


if __name__ == "__main__":
    main()
