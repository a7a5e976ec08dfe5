"""Where reward families disagree about predictions: counted, with examples to look at.

    python benchmarks/disagreements.py
    python benchmarks/disagreements.py --data-root spider_data --data dev.json \
        --predictions one.jsonl two.jsonl

Prints the means of every family over each file, how many predictions of each file two families
judge differently, and examples of each such pair: file, question, gold query, prediction and
`launch.score`'s record of it. Without data the demo data is made, and the predictions are its gold
queries, half of them with a word lost or exchanged.
"""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain, islice
from random import Random

from rich.console import Console

from benchmarks._questions import damage, make_parser, open_questions
from launch.crew import make_pair_scorer, spread
from launch.families import Means, pair_means, render_means, render_pairs
from launch.predictions import Paired, pair_up, short_names
from rewards.workbench import PairScore
from sqlenv.config import ExecutorConfig
from sqlenv.types import Example

LOW = 0.6

Disagree = Callable[[PairScore], bool]
PAIRS: Mapping[str, Disagree] = {
    "set right, bag wrong": lambda s: s.ex["set"] and not s.ex["bag"],
    "bag right, bag_ordered wrong": lambda s: s.ex["bag"] and not s.ex["bag_ordered"],
    "set right, test_suite wrong": lambda s: s.ex["set"] and not s.ex["test_suite"],
    "test_suite right, set wrong": lambda s: s.ex["test_suite"] and not s.ex["set"],
    "set right, EXPO-SQL wrong": lambda s: s.ex["set"] and s.verdict.case != "correct",
    "EX_b 1, set wrong": lambda s: s.ex_b == 1 and not s.ex["set"],
    "EX_b 0, set right": lambda s: s.ex_b == 0 and s.ex["set"],
    "EX_f above 0, CSMR 0": lambda s: s.ex_f > 0 and s.csmr == 0,
    "CSMR above 0, EX_f 0": lambda s: s.csmr > 0 and s.ex_f == 0,
    "CSMR 1, set wrong": lambda s: s.csmr == 1 and not s.ex["set"],
    "structure 1, set wrong": lambda s: s.diagnosis.struct == 1 and not s.ex["set"],
    f"structure below {LOW}, set right": lambda s: s.diagnosis.struct < LOW and s.ex["set"],
}
"""Pairs of judgements that contradict one another."""


@dataclass(frozen=True, slots=True)
class Judged:
    """A prediction of one file."""

    file: str
    example: Example
    sql: str
    score: PairScore


def main() -> None:
    options = parse_arguments()
    console = Console(highlight=False, markup=False)
    with open_questions(options) as examples:
        files = read_files(examples, options)
        jobs = [pair for pairs in files.values() for pair in pairs]
        config = ExecutorConfig(workers=options.workers)
        scores = spread(make_pair_scorer, config, jobs, title="scoring")
        names = [name for name, pairs in files.items() for _ in pairs]
        judged = [
            Judged(name, example, sql, score)
            for name, (example, sql), score in zip(names, jobs, scores, strict=True)
        ]
    by_file = {name: [one for one in judged if one.file == name] for name in files}
    means = [(name, pair_means([one.score for one in own])) for name, own in by_file.items()]
    counts: list[Means] = [(name, count(own)) for name, own in by_file.items()]
    width = console.width
    console.print(*render_pairs(means, width=width), sep="\n\n")
    console.print(*render_means("Disagreements", list(PAIRS), counts, width=width), sep="\n\n")
    for name, disagree in PAIRS.items():
        found = [one for one in judged if disagree(one.score)]
        console.print(f"\n{name}: {len(found):,}")
        for one in choose(found, options.examples):
            console.print(describe(one), soft_wrap=True)


def read_files(examples: Sequence[Example], options: argparse.Namespace) -> dict[str, Paired]:
    if options.predictions:
        names = short_names(options.predictions)
        paired = [pair_up(path, examples) for path in options.predictions]
        return dict(zip(names, paired, strict=True))
    rng = Random(0)
    queries = [e.gold_sql for e in examples]
    queries[1::2] = [damage(sql, rng) for sql in queries[1::2]]
    return {"damaged": list(zip(examples, queries, strict=True))}


def count(judged: Sequence[Judged]) -> dict[str, int]:
    """Count the predictions that each pair of families judges differently."""
    return {name: sum(disagree(one.score) for one in judged) for name, disagree in PAIRS.items()}


def choose(judged: Sequence[Judged], most: int) -> list[Judged]:
    """Draw predictions, always the same ones; of one question only where there are too few."""
    drawn = Random(0).sample(judged, len(judged))
    of_questions = {one.example.id: one for one in drawn}
    chosen = list(of_questions.values())
    return list(islice(chain(chosen, (one for one in drawn if one not in chosen)), most))


def describe(one: Judged) -> str:
    lines = [
        f"  {one.file} {one.example.id}: {one.example.question}",
        f"    gold {' '.join(one.example.gold_sql.split())}",
        f"    pred {' '.join(one.sql.split())}",
        f"    {json.dumps(one.score.record())}",
    ]
    return "\n".join(lines)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--examples", type=int, default=5, help="examples of each pair")
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    return parser.parse_args()


if __name__ == "__main__":
    main()
