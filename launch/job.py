"""The phases of a training job: warm start, accuracy before, learning, accuracy after."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from contextlib import ExitStack
from dataclasses import asdict, replace
from pathlib import Path
from time import perf_counter
from typing import Any

from launch import cli, second_stage
from launch.build import REFUTED, SqlSide, load_model, model_folder, serving
from launch.config import JobConfig, dump
from launch.data.contamination import check_overlap
from launch.evaluation.decoding import GREEDY, Decode
from launch.evaluation.evaluate import judge_answers
from launch.evaluation.outcomes import hint
from launch.evaluation.questions import QuestionSet, question_set
from launch.evaluation.results import ModelFacts, Report
from launch.evaluation.sampling import Evaluator
from launch.evaluation.sources import Answers, SampleCache, unread_of
from launch.evaluation.statistics import paired_difference
from launch.evaluation.testsets import TEST_SETS, Split
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
from sqlenv.config import OFFICIAL
from sqlenv.data.layouts import set_name
from sqlenv.executor import Executor
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
        before = _measure(evaluator, config, test, sql, folder / "before")

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
        after = _measure(evaluator, config, test, sql, folder / "after")
        notes = evaluator.notes()
    if before is None or after is None:
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


def _measure(
    evaluator: Evaluator, config: JobConfig, test: Sequence[Example], sql: SqlSide, folder: Path
) -> Report | None:
    """Answer and judge the test questions; only the first process has a report."""
    with cli.progress_bar(f"accuracy {folder.name}") as progress:
        samples = evaluator.answers(test, SampleCache(folder), progress, stops=False)
    if not distributed.is_first():
        return None
    questions = _test_set(config, tuple(test))
    base = config.model.path.name if config.model.path else "tiny"
    # By the run's name: its folder may be moved before the run goes on.
    name = f"{config.run.name}-seed{config.seed}/{folder.name}"
    model = ModelFacts(name, base=base, reward=config.reward.kind)
    prompts = [sql.evaluation_prompt(example) for example in test]
    with Executor(OFFICIAL if len(questions.measures) > 1 else config.executor) as executor:
        report = judge_answers(
            questions, Answers(samples, {"hint": hint(unread_of(samples), config.answer_wrapping)}),
            GREEDY, executor, model=model, seed=config.seed, prompts=prompts, folder=folder,
        )  # fmt: skip
    _log.info("accuracy %s: %s", folder.name, report.outcomes.line())
    return report


def _test_set(config: JobConfig, test: tuple[Example, ...]) -> QuestionSet:
    """Judge by the environment's rule, and those of one published test set by its official one."""
    own = QuestionSet("test", test, (config.env.match,), is_judged=True)
    source, *others = config.data.test.sources
    name = set_name(source)
    if others or name not in TEST_SETS or config.data.root is None:
        return own
    place = source.model_copy(update={"path": config.data.root / source.path})
    official = question_set(name, test, place, config.data.root)
    measures = tuple(dict.fromkeys([config.env.match, *official.measures]))
    return replace(official, measures=measures, is_judged=True)


def _gain(before: Report, after: Report) -> dict[str, Any]:
    """Compare the accuracies by the environment's rule; official ones follow by name."""
    found: dict[str, Any] = {"questions": len(after.questions), "rule": before.first}
    gains = {name: _by(name, before, after) for name in before.measures}
    for key, value in gains.pop(before.first).items():
        found |= {key: value}
    outcomes = {"before": asdict(before.outcomes), "after": asdict(after.outcomes)}
    return {**found, "official": gains, "outcomes": outcomes}


def _by(name: str, before: Report, after: Report) -> dict[str, Any]:
    first, second = ([one.scores[name] for one in part.questions] for part in (before, after))
    gain = paired_difference(first, second)
    return {
        "ex_before": before.measures[name]["mean"],
        "ex_before_ci95": before.measures[name]["ci95"],
        "ex_after": after.measures[name]["mean"],
        "ex_after_ci95": after.measures[name]["ci95"],
        "gain": round(gain.difference, 6),
        "gain_ci95": [round(bound, 6) for bound in gain.ci95],
    }


def _course(folder: Path, *, steps: int = 10) -> dict[str, Any]:
    """Average turns, reward parts and what witnesses refute over the first and last steps; list
    validation accuracies.
    """
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
    for end, part in (("", last), ("_first", first)):
        if luck := [line[REFUTED] for line in part if REFUTED in line]:
            found[f"refuted_share{end}"] = round(sum(luck) / len(luck), 6)
    key = "validation/accuracy"
    curve = [[line["step"], round(line[key], 6)] for line in lines if key in line]
    return {**found, "validation_curve": curve}
