"""How often does EXPO-SQL blame the clause that a person would, and no other?

    python benchmarks/blame.py --data ../shared/data

Reads real predictions that run and are wrong, of which one clause is; which, was decided by hand
(`tests/data/expo_by_hand.json`: file, question and clause; `FROM 2` is that of the second operand
of a set operation). FROM and JOINs are one step to clause-wise execution, and so are SELECT and
GROUP BY: `step` counts the predictions of which no clause of another step is blamed. Prints a JSON
object for both sets of labels: counts by clause, and what else is blamed.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter, defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path

from rewards import score
from rewards.expo.clauses import Clause, scan_clauses

_LABELS = Path(__file__).parent.parent / "tests" / "data" / "expo_by_hand.json"
_STEPS = ({"FROM", "JOIN"}, {"SELECT", "GROUP BY"})
_BLAMED = -0.5


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--data", type=Path, required=True)
    data = parser.parse_args().data
    for name, files in json.loads(_LABELS.read_text()).items():
        counts: defaultdict[str, Counter[str]] = defaultdict(Counter)
        others = {}
        for prediction, label, blamed in measure(data, files):
            kinds = {one.removesuffix(" 2") for one in (label, *blamed)}
            is_step = any(kinds <= step for step in _STEPS) or len(kinds) == 1
            for kind in (label, "all"):
                counts[kind].update(labels=1, alone=int(blamed == {label}), step=int(is_step))
            if not is_step:
                others[f"{prediction}, {label}"] = sorted(blamed)
        print(json.dumps({"set": name, "counts": counts, "others": others}))


def measure(
    data: Path, files: Mapping[str, Mapping[str, str]]
) -> Iterator[tuple[str, str, set[str]]]:
    """Yield each prediction's name, the clause that is wrong, and those that are blamed."""
    for file, labels in files.items():
        (path,) = data.glob(f"predictions/*/{file}.jsonl")
        for row in map(json.loads, path.read_text().splitlines()):
            number = str(row.get("index", row.get("question_id")))
            if number not in labels:
                continue
            gold, sql = row.get("gold") or row["gold_sqlite"], row["pred"].strip()
            folders = (data / "spider_data/database", data / "bird_dev/dev_databases")
            name = row["db_id"]
            (database,) = (found for f in folders for found in f.glob(f"{name}/{name}.sqlite"))
            credit = score(database, gold, f"<sql>{sql}</sql>", reward="expo").credit
            clauses = zip(scan_clauses(sql), credit, strict=True)
            blamed = {_named(clause) for clause, one in clauses if one.value == _BLAMED}
            yield f"{file} {number}", labels[number], blamed


def _named(clause: Clause) -> str:
    return clause.kind + " 2" * (clause.operand > 0)


if __name__ == "__main__":
    main()
