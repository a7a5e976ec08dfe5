"""The phases of a training job: warm start, accuracy before, learning, accuracy after."""

from __future__ import annotations

import logging
import shutil
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import asdict, dataclass, replace
from importlib import import_module
from pathlib import Path
from time import perf_counter
from typing import TYPE_CHECKING, Any
from uuid import uuid4

import numpy as np
from scipy.optimize import isotonic_regression
from scipy.stats import permutation_test

from launch import cli
from launch.build import SqlSide
from launch.config import CourseConfig, JobConfig, SecondStage, Split, dump, flat
from launch.data.preflight import check_overlap, describe_passes, describe_sampler
from launch.data.prompts import read_tokenizer
from launch.evaluation.answers import GREEDY, AnswerFile, Decode, ModelFacts, Sampled
from launch.evaluation.judge import judge_answers
from launch.evaluation.questions import QuestionSet, own_set, question_set
from launch.evaluation.results import PLACES, SAMPLES, VERDICTS, Report, read_place, with_samples
from launch.evaluation.sampling import Evaluator
from launch.files import (
    RESULT,
    check_alike,
    claim_data,
    claimed,
    fingerprints,
    write_json,
    write_text,
)
from launch.learner import load_model, model_folder, plan_memory, serving
from launch.reporting.answer import show_run
from launch.reporting.runs import outcome
from launch.screening import kept, screen
from launch.warm_start import refuse_early, start_model
from minirl.config import OptimizerConfig
from minirl.exchange import LostError, UserError
from minirl.model.decoder import Decoder
from minirl.model.tokenizer import ChatTokenizer
from minirl.run import distributed
from minirl.train.optimizer import learning_rate
from minirl.train.trainer import Trainer
from minirl.types import Progress
from sqlenv.config import OFFICIAL
from sqlenv.data.layouts import TEST_SETS, set_name
from sqlenv.executor import Executor
from sqlenv.types import Example

if TYPE_CHECKING:
    from minirl.sglang.sampler import Servers

_log = logging.getLogger(__name__)

BEFORE, BETWEEN, AFTER = PLACES
TRACKED = "tracker.txt"
"""What a run is called in W&B or Trackio."""


def train(config: JobConfig, *, accelerator: str, only: str | None = None) -> None:
    """Run a job, or what is left of it; only to the end of its warm start, if so asked."""
    began = perf_counter()
    with ExitStack() as stack:
        folder = stack.enter_context(
            distributed.held_by_first(claimed(config.folder, dump(config)))
        )
        sql = stack.enter_context(SqlSide(config, folder))
        examples, validation, test = _questions(sql)
        source = distributed.from_first(lambda: model_folder(sql, examples))
        _log.info("sampler: %s", describe_sampler(config, accelerator))
        config = config if only else plan_memory(config, folder)
        tokenizer = read_tokenizer(config, source)
        sql.check_training_prompts(examples, tokenizer)
        sql.check_test_prompts(test, tokenizer)
        refuse_early(config, sql, examples)
        # Before hours of work, since it may ask who its user is.
        log = stack.enter_context(tracked(config))
        measured = {} if only else _measure_base(config, test, sql, source)
        start_from, learned = _start(config, sql, examples, source, only=only)
        if only:
            cli.output.print(f"Model: {start_from}")
            return
        _log.info("passes: %s", describe_passes(config, len(learned)))
        model, tokenizer = load_model(config, start_from, lora=config.train.lora)
        servers = stack.enter_context(
            serving(
                config, start_from, folder, config.sampler, config.evaluation_sampler,
                lora=config.train.lora,
            )
        )  # fmt: skip
        evaluator = _evaluator(config, sql, (model, tokenizer), servers)
        measured |= _measure(
            evaluator, sql, test, folder / (BETWEEN if config.has_base else BEFORE)
        )

        def validate(params: Any, version: int) -> float:
            evaluator.set_weights(params, version=version)
            return evaluator.accuracy(validation)

        trainer = Trainer(
            model, tokenizer, sql.task(learned, tokenizer, validate=validate, log=log),
            config.train, config.sampler,
            seed=config.seed, folder=folder, servers=servers, lag=config.rollout.lag,
        )  # fmt: skip
        if trainer.steps_done < config.train.all_steps:
            # Answers of weights that the run has gone back from, as a checkpoint was damaged.
            distributed.from_first(lambda: shutil.rmtree(folder / AFTER, ignore_errors=True))
        with cli.progress_bar("learning") as progress:
            progress(trainer.steps_done, config.train.steps, "")
            trainer.run(progress)
            second = train_second_stage(trainer, config.train, progress)
        best = trainer.use_best()
        evaluator.set_weights(trainer.params, version=best)
        measured |= _measure(evaluator, sql, test, folder / AFTER)
        facts = {
            "best_step": best,
            **({"second_stage": str(second)} if second else {}),
            "seed": config.seed,
            "accelerator": accelerator,
            **evaluator.notes(),
            "seconds": round(perf_counter() - began, 1),
        }
    if measured:
        write_json(folder / RESULT, {**_gain(measured), **facts})
        show_run(folder)


def _questions(sql: SqlSide) -> tuple[Sequence[Example], Sequence[Example], Sequence[Example]]:
    """Load the questions to learn from, to choose checkpoints by and to test on; note them and the
    model.
    """
    config, limits = sql.config, sql.config.evaluation
    splits: dict[Split, Sequence[Example]] = {
        "train": sql.examples("train"),
        "validation": sql.examples("validation", limit=limits.validation_questions),
        "test": sql.examples("test", limit=limits.questions),
    }
    distributed.from_first(lambda: check_overlap(config, splits))
    found = fingerprints(splits, config.model.path)
    facts = distributed.from_first(lambda: claim_data(config.folder, found))
    distributed.gather(lambda: check_alike(found, facts))
    return splits["train"], splits["validation"], splits["test"]


def _start(
    config: JobConfig, sql: SqlSide, train: Sequence[Example], source: Path, *, only: str | None
) -> tuple[Path, Sequence[Example]]:
    """Screen and warm start; return model and questions that reinforcement learning starts with."""
    own = screen(config, sql, train, source) if config.learns_own else []
    if only or config.data.train.pass_rate is None:
        return start_model(config, sql, train, source, own), train
    # Too few are refused before the warm start, where its own answers tell.
    learned = kept(config, train, own) if own else ()
    start_from = start_model(config, sql, train, source, own)
    return start_from, learned or kept(config, train, screen(config, sql, train, start_from))


def _evaluator(
    config: JobConfig, sql: SqlSide, model: tuple[Decoder, ChatTokenizer], servers: Servers | None
) -> Evaluator:
    """Make what answers the test and validation questions."""
    return Evaluator(
        *model, sql.evaluation_environment(), config.evaluation_sampler, config,
        max_turns=sql.evaluation_turns, servers=servers, record=sql.record_scored,
    )  # fmt: skip


def _measure_base(
    config: JobConfig, test: Sequence[Example], sql: SqlSide, source: Path
) -> dict[str, Report]:
    """Measure the model that the warm start begins with, if it is a trained one."""
    if not config.has_base:
        return {}
    place = config.folder / BEFORE
    last = place / SAMPLES if config.evaluation.samples else place
    # A resumed run need not read the model again, nor start its servers.
    if distributed.from_first((last / VERDICTS).exists):
        return {BEFORE: read_place(place)} if distributed.is_first() else {}
    model = load_model(config, source)
    with serving(config, source, config.folder, config.evaluation_sampler, lora=None) as servers:
        evaluator = _evaluator(config, sql, model, servers)
        return _measure(evaluator, sql, test, place)


# Questions that are sampled count from here: no test set has as many, so that their random streams
# are none of greedy answers or validations.
_SAMPLED = 2**16


def _measure(
    evaluator: Evaluator, sql: SqlSide, test: Sequence[Example], folder: Path
) -> dict[str, Report]:
    """Answer and judge the test questions, greedily and by samples where the job asks for these;
    return the report by its place, and nothing where this process is not the first.
    """
    config, count, sampler = sql.config, sql.config.evaluation.samples, sql.config.sampler
    asked = {folder: (GREEDY, 0)}
    if count is not None:
        decode = Decode(count, sampler.temperature, "pass", sampler.top_p)
        asked[folder / SAMPLES] = (decode, _SAMPLED)
    answers = {}
    for place, (decode, first) in asked.items():
        with cli.progress_bar(f"accuracy {place.relative_to(config.folder)}") as progress:
            answers[place] = evaluator.answers(
                test, decode, AnswerFile(place), progress, stops=False, first=first
            )
    evaluator.free_memory()
    if not distributed.is_first():
        return {}
    reports = [_judged(sql, test, place, asked[place][0], answers[place]) for place in asked]
    return {folder.name: with_samples(*reports) if count else reports[0]}


def _judged(
    sql: SqlSide, test: Sequence[Example], folder: Path, decode: Decode, samples: Sequence[Sampled]
) -> Report:
    config, questions = sql.config, _test_set(sql.config, tuple(test))
    base = config.model.path.name if config.model.path else "tiny"
    # By the run's name: its folder may be moved before the run goes on.
    place = folder.relative_to(config.folder)
    name = f"{config.run.name}-seed{config.seed}/{place}"
    model = ModelFacts(name, base=base, reward=config.reward.kind)
    drawn = {"temperature": decode.temperature, "top_p": decode.top_p}
    notes = drawn if decode.temperature else {}
    with Executor(config.executor if questions.name == "test" else OFFICIAL) as executor:
        report = judge_answers(
            questions, samples, decode, executor, sql, notes=notes, model=model, folder=folder
        )
    _log.info("accuracy %s: %s", place, report.outcomes.line())
    return report


def _test_set(config: JobConfig, test: tuple[Example, ...]) -> QuestionSet:
    """Judge by the environment's rule, and those of one published test set by its official one."""
    own = own_set("test", test, config.env)
    source, *others = config.data.test.sources
    name = set_name(source)
    if others or name not in TEST_SETS or config.data.root is None:
        return own
    official = question_set(name, test, config.data)
    measures = tuple(dict.fromkeys([*own.measures, *official.measures]))
    return replace(official, measures=measures, witnesses=own.witnesses)


def _gain(measured: Mapping[str, Report]) -> dict[str, Any]:
    """Tell accuracy at every place by every measure, and what each stage gained."""
    last = measured["after"]
    return {
        "questions": len(last.questions),
        "databases": len({one.db_id for one in last.questions}),
        "rule": last.first,
        **outcome(measured),
        "outcomes": {place: asdict(one.outcomes) for place, one in measured.items()},
    }


# Orders that the test of a rise compares with; where there are fewer, all of them.
_PERMUTATIONS = 5000


@dataclass(frozen=True, slots=True)
class Restart:
    """How the second stage begins: from which checkpoint, of which accuracy; whether the first
    stage's accuracy rose, by which p-value; and with which optimizer.
    """

    step: int
    accuracy: float
    rose: bool
    p_value: float
    optimizer: OptimizerConfig

    def __str__(self) -> str:
        verdict = "a rise: the maximal" if self.rose else "no rise: half of the checkpoint's"
        return (
            f"second stage from step {self.step} (accuracy {self.accuracy:.3f}); the accuracies "
            f"show {verdict} rate, {self.optimizer.learning_rate:.2e} (p = {self.p_value:.4f})"
        )


def train_second_stage(
    trainer: Trainer, config: CourseConfig, progress: Progress
) -> Restart | None:
    """Train a course's second stage, if it has one, or what is left; return how it began.

    It starts from the best checkpoint of the first stage, at a rate that depends on whether the
    first stage's accuracy rose (PaVeRL-SQL, section III-C).
    """
    if config.second_stage is None:
        return None
    # Resumed, it is decided again, by the same accuracies.
    start = restart(trainer.curve, config, config.second_stage)
    _log.info("%s", start)
    trainer.begin_stage(start.optimizer, steps=config.second_steps, start=start.step)
    trainer.run(progress)
    return start


def restart(
    curve: Sequence[tuple[int, float]], config: CourseConfig, stage: SecondStage
) -> Restart:
    """Decide how the second stage begins, from the evaluations (updates done, accuracy) and the
    checkpoints of the first.

    It starts from the most accurate checkpoint, of equals the newest, with a cosine without
    warm-up: at the maximal rate if the accuracy rose (`rise_p_value` at most alpha; fewer than four
    accuracies never show it at the usual level), else at half of the rate that the checkpoint's
    update had.

    Note:
        The paper tells a plateau from fluctuation, and not what follows on an accuracy that still
        rises: the maximal rate too.
    """
    steps, every = config.steps, config.checkpoint_every
    points = [point for point in curve if point[0] <= steps]
    saved = [(value, step) for step, value in points if step % every == 0 or step == steps]
    accuracy, step = max(saved)
    p_value = rise_p_value([value for _, value in points])
    rose, rate = p_value <= stage.alpha, config.optimizer.learning_rate
    if not rose:
        rate = float(learning_rate(config.optimizer, steps=steps)(step - 1)) / 2
    cosine = {"schedule": "cosine", "warmup_steps": 0, "final_fraction": stage.final_fraction}
    optimizer = config.optimizer.model_copy(update={**cosine, "learning_rate": rate})
    return Restart(step, accuracy, rose, p_value, optimizer)


def rise_p_value(accuracies: Sequence[float]) -> float:
    """Test a curve for a rise, of whatever shape, against an order by chance.

    Bartholomew's test for ordered alternatives (Biometrika 46, 1959): the share of the curve's
    variance that the best non-decreasing curve explains, compared with that of its permutations.
    A rise that ends early and is followed by a long plateau counts as one, which tests of a
    correlation with time (Mann-Kendall, a slope) miss. The p-value is exact for up to 6 accuracies,
    and 1.0 for a curve that is constant, or shorter than two.
    """
    values = np.asarray(accuracies, np.float64)
    if len(values) < 2 or np.ptp(values) == 0:
        return 1.0
    variance = np.square(values - values.mean()).sum()

    def explained(order: np.ndarray) -> float:
        levels = isotonic_regression(order).x
        # Sums in another order differ in their last digits.
        return round(float(np.square(levels - values.mean()).sum() / variance), 9)

    found = permutation_test(
        (values,),
        explained,
        permutation_type="pairings",
        n_resamples=_PERMUTATIONS,
        alternative="greater",
        rng=np.random.default_rng(0),
    )
    return float(found.pvalue)


Log = Callable[[int, Mapping[str, float]], None]


@contextmanager
def tracked(config: JobConfig) -> Generator[Log]:
    """Open the run in its tracker, and return what tells it a step: nobody where there is none, or
    another process has it.

    A resumed run goes on in the same one, and logs the steps since its last checkpoint again.
    """
    tracker, path = config.run.tracker, config.folder / TRACKED
    if tracker is None or not distributed.is_first():
        yield lambda _step, _numbers: None
        return
    if tracker == "tensorboard":
        board = import_module("tensorboardX").SummaryWriter(str(config.folder / tracker))

        def send(numbers: Mapping[str, float], step: int) -> None:
            for key, number in numbers.items():
                board.add_scalar(key, number, step)

        end = board.close
    else:
        library: Any = import_module(tracker)  # Trackio's calls are those of wandb
        settings = dict(flat(config.model_dump(mode="json")))
        if not path.exists():  # other folders may have runs of this name and seed
            write_text(path, f"{config.run.name}-seed{config.seed}-{uuid4().hex[:6]}")
        name = path.read_text(encoding="utf-8")
        known = {"id": name} if tracker == "wandb" else {}
        opened = {"project": config.run.name, "name": name, "config": settings, "resume": "allow"}
        try:
            library.init(**opened, **known)
        except Exception as error:
            raise UserError(f"run.tracker={tracker} cannot begin: {error}") from error
        send, end = library.log, library.finish

    def log(step: int, numbers: Mapping[str, float]) -> None:
        try:
            send(dict(numbers), step=step)
        except Exception as error:  # as where servers have gone, all steps are saved
            raise LostError(f"run.tracker={tracker} has failed: {error!r}") from error

    try:
        yield log
    finally:
        end()
