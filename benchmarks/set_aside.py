"""Set questions of Spider's training databases aside, to measure on what nothing was chosen by.

    python benchmarks/set_aside.py SPIDER FOLDER

SPIDER has train_spider.json and database/. FOLDER gets `aside.json`, questions of twenty databases
that are set aside whole, `held.json`, 200 questions of the other databases, `train.json`, all the
others, and a link to the databases: a `data.root` for launch.train with

    data.train.sources='[{layout: spider, path: ., file: train.json}]'

The seed of the choice is fixed. Prints how many there are as a JSON object.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from random import Random

SEED = "set aside"
DATABASES, MOST, HELD = 20, 15, 200
"""Databases set aside, questions of each that are asked, questions of the others."""


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("spider", type=lambda text: Path(text).resolve())
    parser.add_argument("folder", type=Path)
    options = parser.parse_args()
    root: Path = options.spider
    there = {path.stem for path in (root / "database").glob("*/*.sqlite")}
    whole = json.loads((root / "train_spider.json").read_text(encoding="utf-8"))
    questions = [one for one in whole if one["db_id"] in there]
    rng = Random(SEED)
    names = sorted({one["db_id"] for one in questions})
    chosen = set(rng.sample(names, DATABASES))
    aside = []
    for name in sorted(chosen):
        own = [one for one in questions if one["db_id"] == name]
        aside += rng.sample(own, min(MOST, len(own)))
    others = [one for one in questions if one["db_id"] not in chosen]
    held = set(rng.sample(range(len(others)), HELD))
    parts = {
        "aside": aside,
        "held": [one for n, one in enumerate(others) if n in held],
        "train": [one for n, one in enumerate(others) if n not in held],
    }
    options.folder.mkdir(parents=True, exist_ok=True)
    for name, part in parts.items():
        (options.folder / f"{name}.json").write_text(json.dumps(part, indent=1), encoding="utf-8")
    for name in ("database", "tables.json"):
        link = options.folder / name
        if not link.is_symlink():
            link.symlink_to(root / name)
    print(json.dumps({name: len(part) for name, part in parts.items()}))


if __name__ == "__main__":
    main()
