"""What do witnesses refute that a comparator takes for right, and is it wrong?

    python benchmarks/witnesses.py --data DATA [--out witnesses.json]

DATA holds Spider's databases (spider_data/database), its distilled test suites
(test_suite_database/DB/*.sqlite) and predictions (predictions/spider_dev/*.jsonl with `pred`,
`gold` and `db_id`). Spider's test suite, which the witnesses have never seen, is the judge: of the
predictions that are right by EX and wrong by the suite, how many does one of 1, 2, 4, 8 witnesses
refute; and of those that are right by the suite? The latter are listed, to be looked at.
"""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Sequence
from contextlib import closing
from pathlib import Path
from typing import Any

from rich.console import Console
from rich.progress import track

from benchmarks import markdown
from sqlenv.cache import DiskCache
from sqlenv.config import ExecutorConfig
from sqlenv.evaluators.comparators import Case
from sqlenv.executor import Executor
from sqlenv.witness.refutation import judge_on_witnesses
from sqlenv.witness.store import WitnessStore

COUNTS = (1, 2, 4, 8)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    parser.add_argument("--out", type=Path, default=Path("witnesses.json"))
    options = parser.parse_args()
    cases = read_cases(options.data)
    with (
        tempfile.TemporaryDirectory() as folder,
        closing(DiskCache(Path(folder))) as cache,
        Executor(ExecutorConfig(timeout_s=60)) as executor,
    ):
        verdicts = [
            (one.scores["spider_ex"], one.scores["spider_ts"])
            for one in executor.judge(cases, ("spider_ex", "spider_ts"))
        ]
        right = [(case, ts) for case, (ex, ts) in zip(cases, verdicts, strict=True) if ex]
        golds = sorted({(case.database, case.gold) for case, _ in right})
        found: dict[int, dict[str, Any]] = {}
        for count in COUNTS:
            store = WitnessStore(cache, match="spider_ex", count=count)
            start_s = time.process_time()
            made = [store.of(*gold) for gold in track(golds, f"{count} witnesses")]
            seconds = time.process_time() - start_s
            scores = judge_on_witnesses([case for case, _ in right], "spider_ex", executor, store)
            found[count] = summary(right, [score == 0 for score in scores], made, seconds)
    options.out.write_text(json.dumps(found, indent=1))
    columns = [name for name in found[COUNTS[0]] if name != "refuted_right"]
    rows = [[str(count), *(str(found[count][name]) for name in columns)] for count in COUNTS]
    Console(width=200).print(markdown(("witnesses", *columns), rows))


def read_cases(data: Path) -> list[Case]:
    cases = []
    for file in sorted((data / "predictions/spider_dev").glob("*.jsonl")):
        for line in file.read_text().splitlines():
            told = json.loads(line)
            name = told["db_id"]
            suite = tuple(sorted((data / "test_suite_database" / name).glob("*.sqlite")))
            database = data / "spider_data/database" / name / f"{name}.sqlite"
            cases.append(Case(told["pred"], told["gold"], database, suite))
    return cases


def summary(
    right: Sequence[tuple[Case, float]],
    refuted: Sequence[bool],
    made: Sequence[tuple[Path, ...]],
    seconds: float,
) -> dict[str, Any]:
    lucky = [one for (_, ts), one in zip(right, refuted, strict=True) if not ts]
    kept = [(case, one) for (case, ts), one in zip(right, refuted, strict=True) if ts]
    sizes = [file.stat().st_size for files in made for file in files]
    return {
        "right by EX, wrong by the suite": len(lucky),
        "of these refuted": sum(lucky),
        "right by the suite": len(kept),
        "of these refuted ": sum(one for _, one in kept),
        "golds": len(made),
        "without a witness": sum(not files for files in made),
        "bytes a gold": round(sum(sizes) / len(made)),
        "ms a gold": round(1000 * seconds / len(made), 1),
        "refuted_right": sorted({(case.gold, case.predicted) for case, one in kept if one}),
    }


if __name__ == "__main__":
    main()
