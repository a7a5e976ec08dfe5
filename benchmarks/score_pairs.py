"""Predictions a second that all reward families score together, and seconds of execution accuracy.

    python benchmarks/score_pairs.py
    python benchmarks/score_pairs.py --data-root spider_data --data dev.json \
        --predictions one.jsonl two.jsonl

Prints one JSON object. The gold results are there already; each prediction is one turn, and its
results, trees and clauses are cold. Processes have started. `ex_s` is execution accuracy alone,
gold queries included: the time of one file's questions. Without data the demo data is made, and the
predictions are its gold queries, half of them with a word lost or exchanged.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Sequence
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from pathlib import Path
from statistics import median

from benchmarks._questions import damage, make_parser, open_questions
from launch.predictions import read_predictions
from rewards.execution import columns_of
from rewards.workbench import Workbench
from sqlenv.config import ExecutorConfig
from sqlenv.evaluators.equality import matches
from sqlenv.executor import Executor
from sqlenv.types import Example

Job = tuple[Example, str]


def main() -> None:
    options = parse_arguments()
    with open_questions(options) as examples:
        files = read_jobs(examples, options.predictions)
        jobs = [job for pairs in files for job in pairs]
        seconds = [time_families(jobs, options.workers) for _ in range(options.runs)]
        alone = [time_accuracy(files[0], options.workers) for _ in range(options.runs)]
        print(
            json.dumps(
                {
                    "predictions": len(jobs),
                    "predictions_a_second": round(len(jobs) / median(seconds)),
                    "best_predictions_a_second": round(len(jobs) / min(seconds)),
                    "ex_questions": len(files[0]),
                    "ex_s": round(median(alone), 3),
                    "best_ex_s": round(min(alone), 3),
                    "runs": options.runs,
                    "workers": options.workers,
                    "cpu_count": os.cpu_count(),
                }
            )
        )


def read_jobs(examples: Sequence[Example], predictions: list[Path]) -> list[list[Job]]:
    if not predictions:
        rng = random.Random(0)
        return [
            [
                (e, damage(e.gold_sql, rng) if at % 2 else e.gold_sql)
                for at, e in enumerate(examples)
            ]
        ]
    return [list(zip(examples, read_predictions(path), strict=True)) for path in predictions]


def time_families(jobs: list[Job], workers: int) -> float:
    """Time the scoring in processes that have seen the gold queries and nothing else."""
    context = get_context("spawn")
    golds = list(dict.fromkeys((e.database, e.gold_sql) for e, _ in jobs))
    chunks = [jobs[at : at + 16] for at in range(0, len(jobs), 16)]
    with ProcessPoolExecutor(workers, context, start, (golds,)) as pool:
        # As many at once as there are processes: each has to have started.
        list(pool.map(time.sleep, [0.5] * workers))
        begin = time.perf_counter()
        list(pool.map(score, chunks))
        return time.perf_counter() - begin


def time_accuracy(pairs: list[Job], workers: int) -> float:
    with Executor(ExecutorConfig(workers=workers)) as executor:
        executor.execute_many([(pairs[0][0].database, f"SELECT {n}") for n in range(64)])
        begin = time.perf_counter()
        golds = executor.gold_many([(e.database, e.gold_sql) for e, _ in pairs])
        found = executor.execute_many([(e.database, sql) for e, sql in pairs])
        for result, gold in zip(found, golds, strict=True):
            matches(result, gold, mode="set")
        return time.perf_counter() - begin


_benches: list[Workbench] = []


def start(golds: list[tuple[Path, str]]) -> None:
    executor = Executor(ExecutorConfig(workers=1))
    executor.gold_many(golds)
    _benches.append(Workbench(executor, columns_of()))


def score(jobs: list[Job]) -> None:
    for job in jobs:
        _benches[0].score(*job)


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--workers", type=int, default=os.cpu_count())
    return parser.parse_args()


if __name__ == "__main__":
    main()
