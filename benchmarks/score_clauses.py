"""Milliseconds to find the erroneous clauses of 64 wrong queries (EXPO-SQL, section 6.5).

    python benchmarks/score_clauses.py
    python benchmarks/score_clauses.py --data-root spider_data --data dev.json \
        --predictions one.jsonl two.jsonl

Prints one JSON object. The queries run and give a wrong result; that result and the gold result
are there already, as an environment leaves them. Clauses, steps and credit are cold. Every wrong
prediction is measured, in batches of 64, on connections that are open. Without data the demo data
is made, and the predictions are its gold queries with a word lost or exchanged.
"""

from __future__ import annotations

import argparse
import json
import os
import random
import statistics
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path

from benchmarks._questions import damage, make_parser, open_questions
from launch.predictions import read_predictions
from rewards.config import ExpoConfig
from rewards.expo.reward import ExpoReward
from sqlenv.config import ExecutorConfig
from sqlenv.evaluators.equality import matches
from sqlenv.executor import Executor
from sqlenv.schema.reading import read_schema
from sqlenv.types import Attempt, Episode, Example, Result, Table

BATCH = 64
REPLY = "<think> … </think>\n<sql>{}</sql>"


class CountingRunner:
    """Counts the queries that the reward runs."""

    def __init__(self, executor: Executor) -> None:
        self._executor = executor
        self.count = 0

    def gold(self, database: Path, sql: str, /) -> Result:
        return self._executor.gold(database, sql)

    def execute(self, database: Path, sql: str, /, *, max_steps: int | None = None) -> Result:
        self.count += 1
        return self._executor.execute(database, sql, max_steps=max_steps)


def main() -> None:
    options = parse_arguments()
    with open_questions(options) as examples:
        pairs = pair_up(examples, options.predictions)
        with Executor(ExecutorConfig(isolation=options.isolation)) as executor:
            print(json.dumps(measure(wrong_episodes(pairs, executor), executor, options.runs)))


def measure(episodes: list[Episode], executor: Executor, runs: int) -> dict[str, object]:
    columns = {e.example.database: read_schema(e.example.database).column_names() for e in episodes}
    batches = [episodes[at : at + BATCH] for at in range(0, len(episodes), BATCH)]
    best = [float("inf")] * len(batches)
    runner = CountingRunner(executor)
    blamed: Counter[str] = Counter()
    for run in range(runs):
        runner.count = 0
        blamed.clear()
        for number, batch in enumerate(batches):
            fresh = [respace(episode, run) for episode in batch]
            reward = ExpoReward(
                ExpoConfig(), columns_of=lambda e: columns[e.database], executor=runner
            )
            start = time.perf_counter()
            for episode in fresh:
                reward(episode)
            seconds = time.perf_counter() - start
            best[number] = min(best[number], seconds * BATCH / len(batch))
            blamed.update(
                name.rsplit("/", 1)[1]
                for episode in fresh
                for name, value in reward.diagnostics(episode).items()
                if value and name.startswith("blamed/")
            )
    milliseconds = sorted(1000 * seconds for seconds in best)
    return {
        "batch_of_64_ms": round(statistics.fmean(milliseconds), 1),
        "fastest_batch_ms": round(milliseconds[0], 1),
        "slowest_batch_ms": round(milliseconds[-1], 1),
        "queries_run_each": round(runner.count / len(episodes), 2),
        "blamed_share": {
            kind: round(count / len(episodes), 3) for kind, count in blamed.most_common()
        },
        "wrong_queries": len(episodes),
        "batches": len(batches),
        "cpu_count": os.cpu_count() or 0,
    }


def respace(episode: Episode, run: int) -> Episode:
    """Write the query with other blanks, so that no cache knows its text."""
    (attempt,) = episode.attempts
    sql = attempt.sql.replace(" ", " " * (run + 1), 1)
    return Episode(
        episode.example, (Attempt(REPLY.format(sql), sql, attempt.result, correct=False),)
    )


def pair_up(examples: Sequence[Example], predictions: list[Path]) -> list[tuple[Example, str]]:
    if not predictions:
        return [(e, damage(e.gold_sql, random.Random(e.id))) for e in examples]
    return [
        pair for path in predictions for pair in zip(examples, read_predictions(path), strict=True)
    ]


def wrong_episodes(pairs: list[tuple[Example, str]], executor: Executor) -> list[Episode]:
    """Keep the predictions that run and are wrong, in an order that mixes the databases."""
    pairs = [(example, sql.strip()) for example, sql in pairs]
    golds = executor.gold_many([(e.database, e.gold_sql) for e, _ in pairs])
    results = executor.execute_many([(e.database, sql) for e, sql in pairs])
    found = [
        Episode(example, (Attempt(REPLY.format(sql), sql, result, correct=False),))
        for (example, sql), gold, result in zip(pairs, golds, results, strict=True)
        if isinstance(result, Table)
        and not matches(result, gold, mode="bag_ordered", gold_sql=example.gold_sql)
    ]
    random.Random(0).shuffle(found)
    return found


def parse_arguments() -> argparse.Namespace:
    parser = make_parser(__doc__.splitlines()[0])
    parser.add_argument("--isolation", choices=("thread", "process"), default="process")
    parser.add_argument("--runs", type=int, default=5, help="of which the fastest counts")
    return parser.parse_args()


if __name__ == "__main__":
    main()
