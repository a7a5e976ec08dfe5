"""Seconds to score 512 trajectories of 4 turns: execution, diagnostic tree, lexical alignment.

    python benchmarks/score_trajectories.py
    python benchmarks/score_trajectories.py --data-root spider_data --data dev.json \
        --predictions one.jsonl two.jsonl three.jsonl four.jsonl

Prints one JSON object. Gold results and gold trees are there already, as after a run's first epoch;
everything else is cold. With `--groups` 8 trajectories share each question, as in training, so that
queries repeat; without, the trajectories are as different as the predictions allow. Without data
the demo data is made, and the predictions are its gold queries with a word lost or exchanged.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import time
from collections.abc import Generator, Sequence
from contextlib import contextmanager

from benchmarks._questions import damage, make_parser, open_questions
from launch.predictions import read_predictions
from rewards.config import ProgressiveConfig
from rewards.progress.diagnosis import diagnose
from rewards.progress.reward import ProgressiveReward, lexical_similarity
from sqlenv.config import ExecutorConfig
from sqlenv.evaluators.equality import matches
from sqlenv.executor import Executor
from sqlenv.schema.reading import read_schema
from sqlenv.types import Attempt, Episode, Example

TRAJECTORIES, TURNS, GROUP = 512, 4, 8
Plan = list[tuple[Example, tuple[str, ...]]]


def main() -> None:
    options = parse_arguments()
    with open_questions(options) as examples:
        plan = plan_trajectories(examples, options)
        with Executor(ExecutorConfig(isolation=options.isolation)) as executor:
            print(json.dumps(measure(plan, executor), indent=1))


def measure(plan: Plan, executor: Executor) -> dict[str, float | int]:
    columns = {e.database: read_schema(e.database).column_names() for e, _ in plan}
    golds = executor.gold_many([(e.database, e.gold_sql) for e, _ in plan])
    for example, _ in plan:
        diagnose(example.gold_sql, example.gold_sql, columns[example.database])
        lexical_similarity(example.gold_sql, example.gold_sql)
    executor.execute_many([(plan[0][0].database, "SELECT 1")] * 8)  # the workers have started
    attempts = [(example, sql) for example, queries in plan for sql in queries]
    seconds: dict[str, float] = {}
    with timed(seconds, "execution"):
        results = executor.execute_many([(e.database, sql) for e, sql in attempts])
        correct = [
            matches(result, golds[at // TURNS], mode="set") for at, result in enumerate(results)
        ]
    with timed(seconds, "tree"):
        for example, sql in attempts:
            diagnose(sql, example.gold_sql, columns[example.database])
    with timed(seconds, "lexical"):
        for example, sql in attempts:
            lexical_similarity(sql, example.gold_sql)
    reward = ProgressiveReward(ProgressiveConfig(), lambda example: columns[example.database])
    with timed(seconds, "reward"):
        made = [Attempt("", sql, results[i], correct[i]) for i, (_, sql) in enumerate(attempts)]
        for at, (example, _) in enumerate(plan):
            reward(Episode(example, tuple(made[at * TURNS : (at + 1) * TURNS])))
    return {
        **{f"{name}_s": round(value, 3) for name, value in seconds.items()},
        "total_s": round(sum(seconds.values()), 3),
        "trajectories": len(plan),
        "attempts": len(attempts),
        "distinct_queries": len({(e.db_id, sql) for e, sql in attempts}),
        "correct": sum(correct),
        "cpu_count": os.cpu_count() or 0,
    }


def plan_trajectories(examples: Sequence[Example], options: argparse.Namespace) -> Plan:
    if options.predictions:
        files = [read_predictions(path) for path in options.predictions]
    else:
        files = [
            [damage(e.gold_sql, random.Random(f"{e.id}/{turn}")) for e in examples]
            for turn in range(TURNS + 1)
        ]
    asked = TRAJECTORIES // GROUP if options.groups else TRAJECTORIES
    return [trajectory(examples, files, at, asked) for at in range(TRAJECTORIES)]


def trajectory(
    examples: Sequence[Example], files: Sequence[Sequence[str]], at: int, asked: int
) -> tuple[Example, tuple[str, ...]]:
    """Take one question, and a prediction of another file for every turn."""
    which = at % min(asked, len(examples))
    shift = at // min(asked, len(examples))
    queries = tuple(files[(turn + shift) % len(files)][which] for turn in range(TURNS))
    return examples[which], queries


@contextmanager
def timed(seconds: dict[str, float], name: str) -> Generator[None]:
    start = time.perf_counter()
    yield
    seconds[name] = time.perf_counter() - start


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--groups", action="store_true")
    parser.add_argument("--isolation", choices=("thread", "process"), default="process")
    return parser.parse_args()


if __name__ == "__main__":
    main()
