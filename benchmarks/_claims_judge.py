"""Teach a policy of `claims.py` to judge: a warm start on scores of its own queries.

Run as a command on one core. A demonstration shows prompt 2 of PaVeRL-SQL with the distinct queries
that the policy sampled for a training question and that ran, and replies 1 for each that is right
and 0 for the others. As many other demonstrations repeat a sampled query as the answer to its
question, so that the policy keeps on answering as it does.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterator, Sequence
from pathlib import Path

from flax import nnx

from benchmarks._claims_outcomes import candidates
from launch import cli
from launch.build import SqlSide
from launch.config import JobConfig, load_config
from launch.data.reply_format import ReplyFormat
from launch.policy import policy_in
from launch.weights import load_policy
from minirl.model import huggingface
from minirl.train.supervised import Demonstration, supervise
from sqlenv.types import Example


def main() -> None:
    """Teach the policy of a run, and write it as a model folder."""
    options = _options()
    cli.use_accelerator("cpu")
    config = load_config(str(options.run / "config.yaml"), options.overrides)
    policy = policy_in(options.run)
    model, tokenizer = load_policy(policy, config)
    warm = config.warm_start
    assert warm is not None
    with SqlSide(config, options.out) as sql:
        examples = {one.id: one for one in sql.examples("test")}
        taught = [
            demonstration
            for verdict in map(json.loads, options.samples.open(encoding="utf-8"))
            for demonstration in demonstrations(
                examples[verdict["id"]], verdict["samples"], sql, config
            )
        ]
    params = supervise(
        model, taught, tokenizer, warm, seed=config.seed, folder=options.out / "training"
    )
    nnx.update(model, params)
    huggingface.save(model, options.out / "model", source=policy.model)


def demonstrations(
    example: Example, samples: Sequence[str], sql: SqlSide, config: JobConfig
) -> Iterator[Demonstration]:
    """Demonstrate how to judge the queries sampled for a question, and the first as the answer.

    Nothing where fewer than two distinct ones run.
    """
    found = candidates(example, samples, sql.executor)
    if len(found) < 2:
        return
    prompt = sql.prompts.judge(example, list(found))
    scores = judgement(list(found.values()))
    yield Demonstration((prompt,), (), scores, key=(example.db_id, len(found)))
    answer = ReplyFormat.of(config).answer(next(iter(found)))
    yield Demonstration((sql.prompts.single_turn(example),), (), answer, key=example.db_id)


def judgement(is_right: Sequence[bool]) -> str:
    """Write the scores of queries as prompt 2 asks for them."""
    lines = "\n".join(f"SQL{number}: {int(one)}" for number, one in enumerate(is_right, start=1))
    return f"<think>\n</think>\n<scores>\n{lines}\n</scores>"


def _options() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--run", type=Path, required=True, help="run folder of the policy")
    parser.add_argument("--samples", type=Path, required=True, help="its predictions.jsonl")
    parser.add_argument("--out", type=Path, required=True, help="folder of the taught policy")
    parser.add_argument("overrides", nargs="*", metavar="key=value")
    return parser.parse_args()


if __name__ == "__main__":
    main()
