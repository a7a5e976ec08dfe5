"""What do witnesses refute that a comparator takes for right, and is it wrong?

    python benchmarks/witnesses.py --data DATA [--databases DB,…] [--out witnesses.json]

DATA holds Spider's databases (spider_data), distilled test suites (test_suite_database,
classical_test) and predictions (predictions/spider_dev/*.jsonl with `pred`, `gold` and `db_id`).
Of queries that are right on their own database, how many do 4 and 8 witnesses refute: of those
that a judge calls wrong, and of those that it calls right? A line of JSON each; OUT also lists the
wrong ones that are missed and the right ones that are refuted, to be looked at.

    predictions  real predictions; judged by Spider's test suite
    classical    mutants of the golds of restaurants and geography; judged by their test suites
    training     mutants of training golds on `--databases`; judged by 40 databases of random rows

Databases of random rows are made after the fuzzing of Zhong, Yu and Klein (EMNLP 2020, section 4),
and apart from the variants that witnesses are: each cell is drawn on its own, from the column's
values, from what both queries name and what is near it, and from new values. Declared keys, CHECKs
and foreign keys hold.
"""

from __future__ import annotations

import argparse
import json
import random
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import closing, suppress
from pathlib import Path
from typing import Any, NamedTuple

import apsw
from sqlglot import exp

from benchmarks._mutants import neighbours
from sqlenv.cache import DiskCache
from sqlenv.config import ExecutorConfig
from sqlenv.evaluators.comparators import Case, compare_cases
from sqlenv.evaluators.equality import matches
from sqlenv.executor import Executor
from sqlenv.schema.reading import ColumnKey
from sqlenv.sql.extraction import parse
from sqlenv.sql.lexer import quoted
from sqlenv.types import ExecutionMatch, Value
from sqlenv.witness.draw import decided_result, run_bounded
from sqlenv.witness.refutation import judge_on_witnesses
from sqlenv.witness.source import SourceDatabase, SourceTable, read_source
from sqlenv.witness.store import WitnessStore

COUNTS = (4, 8)
_CLASSICAL = 100  # questions
_GOLDS, _MUTANTS, _DATABASES = 20, 6, 40  # of a database, of a gold, and of random rows
_MOST_ROWS, _REAL_VALUES = 25, 8
_WORDS = ("amber", "basalt", "cedar", "delta")


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
    data, names = options.data, [name for name in options.databases.split(",") if name]
    found: list[dict[str, Any]] = []
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(DiskCache(Path(folder))) as cache,
        Executor(ExecutorConfig(timeout_s=60)) as executor,
    ):
        sets: tuple[tuple[str, ExecutionMatch, list[Judged]], ...] = (
            ("predictions", "spider_ex", by_suite(read_predictions(data), executor)),
            ("classical", "spider_ex", by_suite(read_classical(data), executor)),
            ("training", "set", by_random_rows(data, names, executor)),
        )
        for name, rule, judged in sets:
            golds = sorted({(one.case.database, one.case.gold) for one in judged})
            for count in COUNTS if golds else ():
                store = WitnessStore(cache, match=rule, count=count)
                start_s = time.process_time()
                made = [store.of(*gold) for gold in golds]
                seconds = time.process_time() - start_s
                scores = judge_on_witnesses([one.case for one in judged], rule, executor, store)
                refuted = [score == 0 for score in scores]
                figures, looked_at = summary(judged, refuted, made, seconds)
                figures = {"set": name, "witnesses": count, **figures}
                print(json.dumps(figures), flush=True)
                found.append(figures | looked_at)
    options.out.write_text(json.dumps(found, indent=1))


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
    found = neighbours(gold, read_source(database).column_names)
    return random.Random(gold).sample(found, min(len(found), _MUTANTS))


def by_suite(cases: Sequence[Case], executor: Executor) -> list[Judged]:
    scores = [one.scores for one in compare_cases(executor, cases, ("spider_ex", "spider_ts"))]
    return [
        Judged(case, bool(score["spider_ts"]))
        for case, score in zip(cases, scores, strict=True)
        if score["spider_ex"]
    ]


def by_random_rows(data: Path, names: Sequence[str], executor: Executor) -> list[Judged]:
    golds: dict[str, list[str]] = {}
    for line in (data / "spider_data/train_gold.sql").read_text().splitlines():
        gold, name = line.rsplit("\t", 1)
        golds.setdefault(name, []).append(gold)
    judged: list[Judged] = []
    for name in names:
        database = data / "spider_data/database" / name / f"{name}.sqlite"
        distinct = list(dict.fromkeys(golds[name]))
        for gold in random.Random(name).sample(distinct, min(len(distinct), _GOLDS)):
            cases = [Case(sql, gold, database) for sql in changed(gold, database)]
            scores = [one.scores["set"] for one in compare_cases(executor, cases, ("set",))]
            right = [case for case, score in zip(cases, scores, strict=True) if score]
            wrong = found_wrong(gold, [case.predicted for case in right], database)
            judged += [Judged(case, case.predicted not in wrong) for case in right]
    return judged


def found_wrong(gold: str, queries: Sequence[str], database: Path) -> set[str]:
    """Find the queries whose result is another set of rows on a database of random rows."""
    source, wrong = read_source(database), set[str]()
    literals = [one for sql in (gold, *queries) for one in _literals(sql)]
    for number in range(_DATABASES if queries else 0):
        with closing(filled(source, literals, random.Random(f"0 {number}"))) as one:
            if (wanted := decided_result(one, gold, "set")) is None:
                continue
            for sql in set(queries) - wrong:
                result = run_bounded(one, sql)
                if result is not None and not matches(result, wanted, mode="set"):
                    wrong.add(sql)
    return wrong


def _literals(sql: str) -> Iterator[Value]:
    tree = parse(sql)
    for node in tree.find_all(exp.Literal, exp.Column) if tree else ():
        if isinstance(node, exp.Literal) and not node.is_string:
            number = float(node.name)
            yield from (number + step for step in (0, 0, -1, 1))
        elif isinstance(node, exp.Literal) or node.this.args.get("quoted"):
            text = node.name.strip("%")
            yield from (text, text, f"{text} {_WORDS[0]}", f"{_WORDS[1]} {text}")


def filled(
    source: SourceDatabase, literals: Sequence[Value], draw: random.Random
) -> apsw.Connection:
    """Make a database of random rows in memory."""
    connection = apsw.Connection(":memory:")
    connection.config(apsw.SQLITE_DBCONFIG_DQS_DDL, 1)
    connection.config(apsw.SQLITE_DBCONFIG_DQS_DML, 1)
    connection.pragma("encoding", source.encoding)
    pools = _pools(source, literals, draw)
    with connection:
        for statement in source.statements:
            connection.execute(statement)
        for table in source.tables:
            marks = ", ".join("?" * len(table.columns))
            names = ", ".join(map(quoted, table.columns))
            insert = f"INSERT OR ABORT INTO {quoted(table.name)} ({names}) VALUES ({marks})"
            for _ in range(draw.randint(1, _MOST_ROWS)):
                with suppress(apsw.MismatchError, apsw.ConstraintError, OverflowError):
                    connection.execute(insert, _row(table, pools, draw))
    while broken := [row for row in connection.execute("PRAGMA foreign_key_check") if row[1]]:
        for name, rowid, *_ in broken:
            connection.execute(f"DELETE FROM {quoted(str(name))} WHERE rowid = ?", (rowid,))
    return connection


def _row(
    table: SourceTable, pools: dict[ColumnKey, list[Value]], draw: random.Random
) -> list[Value]:
    return [
        None
        if table.has_null[at] and draw.random() < 0.1
        else draw.choice(pools[table.name.lower(), column.lower()])
        for at, column in enumerate(table.columns)
    ]


def _pools(
    source: SourceDatabase, literals: Sequence[Value], draw: random.Random
) -> dict[ColumnKey, list[Value]]:
    """Choose the values of each column; those that name another column's share its values."""
    pools: dict[ColumnKey, list[Value]] = {}
    for table in source.tables:
        for at, column in enumerate(table.columns):
            real = sorted({row[at] for row in table.rows} - {None}, key=repr)
            kinds = {str if isinstance(value, str) else float for value in real} or {str}
            whole = not any(isinstance(value, float) for value in real)
            named = [value for value in literals if type(value) in kinds]
            new = _WORDS if str in kinds else [draw.randint(0, 100) for _ in range(6)]
            found = [*draw.sample(real, min(len(real), _REAL_VALUES)), *named, *new]
            pools[table.name.lower(), column.lower()] = [
                int(value) if whole and isinstance(value, float) and value.is_integer() else value
                for value in draw.sample(found, draw.randint(2, len(found)))
            ]
    for key in source.keys:
        for own, ref in zip(key.columns, key.ref_columns, strict=True):
            pools[key.table.lower(), own.lower()] = pools[key.ref_table.lower(), ref.lower()]
    return pools


def summary(
    judged: Sequence[Judged],
    refuted: Sequence[bool],
    made: Sequence[tuple[Path, ...]],
    seconds: float,
) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return figures, and the pairs of gold and query to look at."""
    pairs = list(zip(judged, refuted, strict=True))
    lucky = [(one.case, is_refuted) for one, is_refuted in pairs if not one.is_right]
    right = [(one.case, is_refuted) for one, is_refuted in pairs if one.is_right]
    sizes = [file.stat().st_size for files in made for file in files]
    return {
        "wrong": len(lucky),
        "wrong_refuted": sum(is_refuted for _, is_refuted in lucky),
        "right": len(right),
        "right_refuted": sum(is_refuted for _, is_refuted in right),
        "golds": len(made),
        "without_a_witness": sum(not files for files in made),
        "bytes_a_gold": round(sum(sizes) / len(made)),
        "ms_a_gold": round(1000 * seconds / len(made), 1),
    }, {
        "missed": sorted({(c.gold, c.predicted) for c, is_refuted in lucky if not is_refuted}),
        "refuted": sorted({(c.gold, c.predicted) for c, is_refuted in right if is_refuted}),
    }


if __name__ == "__main__":
    main()
