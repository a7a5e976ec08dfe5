"""The phases of a training job: warm start, accuracy before, learning, accuracy after."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict
from pathlib import Path
from time import perf_counter
from typing import Any

from launch import cli, second_stage
from launch.build import SqlSide, load_model, model_folder, serving
from launch.config import JobConfig, dump
from launch.data.contamination import check_overlap
from launch.evaluation.decoding import GREEDY, Decode
from launch.evaluation.outcomes import Outcomes
from launch.evaluation.sampling import Evaluator
from launch.evaluation.statistics import mean_interval, paired_difference
from launch.evaluation.testsets import Split
from launch.evaluation.verdicts import Verdict, accuracy, write_official
from launch.plan import plan_memory
from launch.result import Result, show
from launch.run_folder import RESULT, check_alike, claim_data, claimed
from launch.texts import write_json
from launch.warm_start import start_model
from minirl.model.config import read_config
from minirl.model.tokenizer import ChatTokenizer
from minirl.run import distributed
from minirl.run.metrics import read_metrics
from minirl.train.trainer import Trainer
from sqlenv.types import Example

_log = logging.getLogger(__name__)


def train(config: JobConfig, *, accelerator: str) -> None:
    """Run a job, or what is left of it."""
    began = perf_counter()
    with ExitStack() as stack:
        folder = stack.enter_context(
            distributed.held_by_first(claimed(config.folder, dump(config)))
        )
        sql = stack.enter_context(SqlSide(config, folder))
        limits = config.evaluation
        examples = sql.examples("train")
        validation = sql.examples("validation", limit=limits.validation_questions)
        test = sql.examples("test", limit=limits.questions)
        splits: dict[Split, Sequence[Example]] = {
            "train": examples, "validation": validation, "test": test
        }  # fmt: skip
        distributed.from_first(lambda: check_overlap(config, splits))
        facts = distributed.from_first(lambda: claim_data(folder, splits))
        distributed.gather(lambda: check_alike(splits, facts))
        source = distributed.from_first(lambda: model_folder(config, folder, sql, examples))
        config = plan_memory(config, read_config(source), folder)
        tokenizer = ChatTokenizer(source)
        sql.check_training_prompts(examples, tokenizer)
        sql.check_test_prompts(test, tokenizer)
        start_from = start_model(config, folder, sql, examples)
        model, tokenizer = load_model(config, start_from, lora=config.train.lora)
        measured = config.evaluation_sampler
        servers = stack.enter_context(
            serving(config, start_from, folder, config.sampler, measured, lora=config.train.lora)
        )
        evaluator = Evaluator(
            model,
            tokenizer,
            sql.evaluation_environment(),
            measured,
            GREEDY,
            validation=Decode(1, limits.validation_temperature, top_p=limits.top_p),
            seed=config.seed,
            max_turns=sql.evaluation_turns,
            servers=servers,
            record=sql.record_scored,
            wrapping=config.answer_wrapping,
        )
        before = _measure(evaluator, test, folder / "before")

        def validate(params: Any, version: int) -> float:
            evaluator.set_weights(params, version=version)
            return evaluator.accuracy(validation)

        trainer = Trainer(
            model, tokenizer, sql.task(examples, tokenizer, validate=validate),
            config.train, config.sampler,
            seed=config.seed, folder=folder, servers=servers, rollout=config.rollout,
        )  # fmt: skip
        with cli.progress_bar("learning") as progress:
            progress(trainer.steps_done, config.train.steps, "")
            trainer.run(progress)
            second = second_stage.train(trainer, config.train, progress)
        best = trainer.use_best()
        evaluator.set_weights(trainer.params, version=best)
        after = _measure(evaluator, test, folder / "after")
        notes = evaluator.notes()
    if not distributed.is_first():
        return
    result = {
        **_gain(before, after),
        "best_step": best,
        **({"second_stage": str(second)} if second else {}),
        "seed": config.seed,
        "accelerator": accelerator,
        **notes,
        **_course(folder),
        "seconds": round(perf_counter() - began, 1),
    }
    write_json(folder / RESULT, result)
    show(Result.model_validate(result), folder)


def _measure(evaluator: Evaluator, test: Sequence[Example], folder: Path) -> list[Verdict]:
    with cli.progress_bar(f"accuracy {folder.name}") as progress:
        verdicts = evaluator.predict(test, folder / "predictions.jsonl", progress=progress)
    distributed.from_first(lambda: write_official(verdicts, folder))
    _log.info("accuracy %s: %s", folder.name, _outcomes(verdicts).line())
    return verdicts


def _outcomes(verdicts: Sequence[Verdict]) -> Outcomes:
    return Outcomes.total(verdict.outcomes for verdict in verdicts)


def _gain(before: Sequence[Verdict], after: Sequence[Verdict]) -> dict[str, Any]:
    first, second = ([float(verdict.correct) for verdict in part] for part in (before, after))
    gain = paired_difference(first, second)
    found: dict[str, Any] = {}
    for name, value, interval in (
        ("ex_before", accuracy(before), mean_interval(first)),
        ("ex_after", accuracy(after), mean_interval(second)),
        ("gain", gain.difference, gain.ci95),
    ):
        found |= {name: round(value, 6), f"{name}_ci95": [round(bound, 6) for bound in interval]}
    outcomes = {"before": asdict(_outcomes(before)), "after": asdict(_outcomes(after))}
    return {**found, "questions": len(after), "outcomes": outcomes}


def _course(folder: Path, *, steps: int = 10) -> dict[str, Any]:
    """Average turns and reward parts over the first and last steps; list validation accuracies."""
    lines = read_metrics(folder)
    first, last = lines[:steps], lines[-steps:]

    def mean(name: str, part: Sequence[dict[str, float]]) -> float:
        return round(sum(line.get(name, 0.0) for line in part) / len(part), 6)

    names = sorted(name for name in lines[-1] if name.startswith("reward/"))
    found: dict[str, Any] = {}
    for end, part in (("", last), ("_first", first)):
        found[f"mean_turns{end}"] = mean("rollout/turns", part)
        rewards = {name.removeprefix("reward/"): mean(name, part) for name in names}
        found[f"rewards{end}"] = rewards
    key = "validation/accuracy"
    curve = [[line["step"], round(line[key], 6)] for line in lines if key in line]
    return {**found, "validation_curve": curve}
