"""Measure a policy on a split, write predictions in all forms, show accuracy."""

from __future__ import annotations

from collections.abc import Generator, Sequence
from contextlib import contextmanager
from pathlib import Path
from time import perf_counter
from typing import Any

from pydantic import BaseModel

from launch import cli
from launch.config import Decode, JobConfig, Split
from launch.evaluation import Evaluator, ci95
from launch.folders import RESULT, claim_data, claimed, versions, write_json
from launch.official import write_official
from launch.policy import PolicySource, load_policy
from launch.verdicts import Verdict, accuracy, accuracy_table, breakdown, read_verdicts
from launch.wiring import SqlSide
from minirl.reading import read_json
from sqlenv.types import Example

PREDICTIONS = "predictions.jsonl"


@contextmanager
def questions(
    config: JobConfig, split: Split, *, out: Path, settings: str
) -> Generator[tuple[SqlSide, tuple[Example, ...]]]:
    """Claim a folder of results, and load the questions of a split.

    Args:
        config: The job.
        split: `validation` is cut as in training, the others to `evaluation.questions`.
        out: Folder of the results.
        settings: YAML of what decides them.

    Yields:
        Databases and prompts, and the questions.

    Raises:
        UserError: The folder belongs to other settings, or to another process.
    """
    limits = config.evaluation
    limit = limits.validation_questions if split == "validation" else limits.questions
    # Demo data is that of the run where there is one; the same settings make the same.
    made = config.folder if (config.folder / "data").is_dir() else out
    with claimed(out, settings, key="--out"), SqlSide(config, made) as sql:
        examples = sql.examples(split, limit=limit)
        yield sql, examples


def evaluate(
    config: JobConfig,
    source: PolicySource,
    decode: Decode,
    *,
    split: Split,
    out: Path,
    settings: str,
) -> None:
    """Measure a policy on the questions of a split, or on what is left of them.

    Args:
        config: The job.
        source: The policy.
        decode: How questions are answered.
        split: `validation` is cut as in training, the others to `evaluation.questions`.
        out: Folder of the results.
        settings: YAML of what decides them.
    """
    start = perf_counter()
    # Before the folder is claimed: weights that cannot be read leave none behind.
    model, tokenizer = load_policy(source, config)
    with questions(config, split, out=out, settings=settings) as (sql, examples):
        sql.check_prompts(split, map(sql.evaluation_prompt, examples), tokenizer)
        data = claim_data(out, {split: examples})
        environment = sql.evaluation_environment()
        evaluator = Evaluator(
            model,
            tokenizer,
            environment,
            config.sampler,
            decode,
            seed=config.seed,
            max_turns=sql.evaluation_turns,
        )
        with cli.progress_bar(f"accuracy {split}") as progress:
            progress(0, len(examples), cli.COMPILING)
            verdicts = evaluator.predict(examples, out / PREDICTIONS, progress=progress)
    write_official(verdicts, out)
    result = {
        **accuracies(verdicts, config),
        "decode": decode.name,
        "seed": config.seed,
        "data": data,
        "model": str(source.model),
        "checkpoint": str(source.checkpoint) if source.checkpoint else None,
        "versions": versions(),
        "seconds": round(perf_counter() - start, 1),
    }
    write_json(out / RESULT, result)
    show(out)


class _Result(BaseModel):
    """The part of `result.json` that is shown."""

    ci95: tuple[float, float]


def show(out: Path) -> None:
    """Print the results that a folder holds."""
    result = read_json(out / RESULT, _Result, advice="delete it to make it again")
    cli.output.print(accuracy_table(read_verdicts(out / PREDICTIONS), result.ci95))
    cli.output.print(f"Predictions and result: {out}", soft_wrap=True)


def accuracies(verdicts: Sequence[Verdict], config: JobConfig) -> dict[str, Any]:
    """Give accuracy with its interval, by difficulty and by database, for `result.json`."""
    parts = {
        name: {key: {"questions": count, "ex": round(ex, 6)} for key, (count, ex) in found.items()}
        for name, found in breakdown(verdicts).items()
    }
    return {
        "ex": round(accuracy(verdicts), 6),
        "ci95": ci95([float(verdict.correct) for verdict in verdicts], config),
        "questions": len(verdicts),
        "difficulty": parts["difficulty"],
        "database": parts["database"],
    }
