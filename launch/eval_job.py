"""Measure a policy on a split, write predictions in all forms, show accuracy."""

from __future__ import annotations

import hashlib
import json
from argparse import Namespace
from collections.abc import Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from time import perf_counter
from typing import Any

from pydantic import BaseModel

from launch import cli
from launch.asked import Asked
from launch.build import SqlSide, serving
from launch.config import JobConfig
from launch.eval_file import (
    Data,
    judge_into,
    prepare,
    settings_of,
    show_sheet,
)
from launch.evaluation import Evaluator, ci95
from launch.judging import Task, read_measures
from launch.official import write_official
from launch.policy import load_policy
from launch.run_folder import RESULT, claim_data, claimed, versions
from launch.served import ANSWERS, served
from launch.sheet import Sheet, read_sheet
from launch.testsets import VERDICTS, Split, read_limits
from launch.texts import write_json
from launch.verdicts import (
    PREDICTIONS,
    Verdict,
    accuracy,
    accuracy_table,
    breakdown,
    read_verdicts,
)
from launch.votes import Decode
from minirl.model.decoder import Decoder
from minirl.model.tokenizer import ChatTokenizer
from minirl.run.files import read_json
from sqlenv.executor import Executor
from sqlenv.types import Example, Observation


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
    asked: Asked,
    decode: Decode,
    options: Namespace,
    *,
    split: Split,
    out: Path,
    settings: str,
) -> None:
    """Measure a policy on the questions of a split, or on what is left of them.

    Args:
        config: The job.
        asked: The policy, or the endpoint.
        decode: How questions are answered.
        options: `data`, the name of the questions, and what answers are judged by.
        split: `validation` is cut as in training, the others to `evaluation.questions`.
        out: Folder of the results.
        settings: YAML of what decides them.
    """
    start = perf_counter()
    # Before the folder is claimed: weights that cannot be read leave none behind.
    loaded = load_policy(asked.policy, config) if asked.policy else None
    with questions(config, split, out=out, settings=settings) as (sql, examples):
        if loaded:
            sql.check_prompts(split, map(sql.evaluation_prompt, examples), loaded[1])
        judged = _judged(config, examples, options)
        data = claim_data(out, {split: examples})
        with _evaluator(config, asked, loaded, decode, sql, out) as evaluator:
            with cli.progress_bar(f"accuracy {options.data}") as progress:
                progress(0, len(examples), cli.COMPILING if loaded else "")
                verdicts = evaluator.predict(examples, out / PREDICTIONS, progress=progress)
            notes = evaluator.notes()
        prompt = prompts_hash(map(sql.evaluation_prompt, examples))
    model = describe(asked, config)
    sheet = _sheet(judged, verdicts, decode, config, options, model, prompt, out)
    answers = [one.sql for one in (sheet.questions if sheet else verdicts)]
    write_official([replace(one, sql=sql) for one, sql in zip(verdicts, answers, strict=True)], out)
    known = [verdict for verdict in verdicts if verdict.gold]
    result = {
        **(accuracies(known) if known else {"questions": len(verdicts)}),
        "decode": decode.name,
        "seed": config.seed,
        "data": data,
        **model,
        **asked.sampled_by(config),
        "prompt": prompt,
        **({"measures": sheet.measures, "pass_at": sheet.pass_at} if sheet else {}),
        **notes,
        "versions": versions(),
        "seconds": round(perf_counter() - start, 1),
    }
    write_json(out / RESULT, result)
    show(out)


@contextmanager
def _evaluator(
    config: JobConfig,
    asked: Asked,
    loaded: tuple[Decoder, ChatTokenizer] | None,
    decode: Decode,
    sql: SqlSide,
    out: Path,
) -> Generator[Evaluator]:
    """Make who answers: the job's sampler, or an endpoint."""
    environment = sql.evaluation_environment()
    if loaded is None:
        with served(
            asked, config, decode, environment, out / ANSWERS, record=sql.record
        ) as evaluator:
            yield evaluator
        return
    assert asked.policy is not None
    with serving(config, asked.policy.model, out) as servers:
        yield Evaluator(
            *loaded,
            environment,
            config.sampler,
            decode,
            seed=config.seed,
            max_turns=sql.evaluation_turns,
            servers=servers,
            record=sql.record,
        )


def prompts_hash(prompts: Iterable[Observation]) -> str:
    """Digest the prompts of all questions, as the model is shown them."""
    digest = hashlib.sha256()
    for prompt in prompts:
        digest.update(json.dumps([[m.role, m.content] for m in prompt]).encode())
    return digest.hexdigest()[:16]


def describe(asked: Asked, config: JobConfig) -> dict[str, Any]:
    """Say whose answers they are: what a table of runs has to know."""
    policy = asked.policy
    if policy is None:
        return {"name": asked.name, "model": asked.identity, "checkpoint": None}
    run = policy.run
    base = run.model.path if run else policy.model
    return {
        "name": asked.name,
        "model": str(policy.model),
        "checkpoint": str(policy.checkpoint) if policy.checkpoint else None,
        **asked.weights(),
        "base": base.name if base else "tiny",
        "reward": run.reward.kind if run else None,
        **asked.differs_by(config),
    }


def _judged(config: JobConfig, examples: tuple[Example, ...], options: Namespace) -> Data | None:
    """Find what answers are judged by, before any is asked for; None if `env.match` alone."""
    measures = read_measures(options.comparators, options.data)
    if not measures:
        return None
    root = config.data.root or Path()
    source = config.data.test.sources[0]
    place = source.model_copy(update={"path": root / source.path})
    return prepare(options.data, examples, place, root, options)


def _sheet(
    judged: Data | None,
    verdicts: Sequence[Verdict],
    decode: Decode,
    config: JobConfig,
    options: Namespace,
    model: Mapping[str, Any],
    prompt: str,
    out: Path,
) -> Sheet | None:
    if judged is None:
        return None
    # Whom samples elect is decided here too, by the test set's rules: the job's own limits and
    # comparator, by which they were counted while sampling, may be others.
    task = Task(
        judged.examples,
        [verdict.samples or (verdict.sql,) for verdict in verdicts],
        judged.measures,
        decode,
        suite=judged.suite,
        references=judged.references,
        turns=[verdict.turns for verdict in verdicts],
    )
    path, seed, limits = options.json or out / VERDICTS, config.seed, read_limits(options.timeout_s)
    facts = settings_of(
        judged, task, timeout_s=limits.timeout_s, model=model, seed=seed, prompt=prompt
    )
    with Executor(limits) as executor:
        return judge_into(path, task, executor, facts, seed=seed)


class _Result(BaseModel):
    """The part of `result.json` that is shown."""

    questions: int
    ci95: tuple[float, float] | None = None


def show(out: Path) -> None:
    """Print the results that a folder holds."""
    result = read_json(out / RESULT, _Result, advice="delete it to make it again")
    if (out / VERDICTS).exists():
        show_sheet(read_sheet(out / VERDICTS))
    elif result.ci95:
        known = [verdict for verdict in read_verdicts(out / PREDICTIONS) if verdict.gold]
        cli.output.print(accuracy_table(known, result.ci95))
    cli.output.print(f"Predictions and result: {out}", soft_wrap=True)


def accuracies(verdicts: Sequence[Verdict]) -> dict[str, Any]:
    """Give accuracy with its interval, and by parts with their shares, for `result.json`."""
    parts = {
        name: {
            key: {"questions": count, "share": round(count / len(verdicts), 6), "ex": round(ex, 6)}
            for key, (count, ex) in found.items()
        }
        for name, found in breakdown(verdicts).items()
        if name != "overall"
    }
    return {
        "ex": round(accuracy(verdicts), 6),
        "ci95": ci95(verdicts),
        "questions": len(verdicts),
        **parts,
    }
