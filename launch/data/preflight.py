"""Preflight: what a job needs from outside, and that it learns from nothing that it is measured by,
looked for before anything is made.

A checkpoint that was chosen by a test set's questions, or that has learned from its databases,
says nothing on that set: a run is refused before anything is trained, unless data.overlap=tell.
"""

from __future__ import annotations

import json
import logging
import os
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence, Set
from functools import cache
from importlib.util import find_spec
from pathlib import Path
from random import Random
from typing import TypeVar

from launch.config import SPLITS, DataSection, JobConfig, Split
from launch.files import check_place
from minirl.config import SGLANG_PYTHON
from minirl.exchange import UserError, named
from minirl.model.config import check_folder, read_config
from sqlenv.config import SourceConfig
from sqlenv.data.layouts import TEST_SETS, AbsentError, locate
from sqlenv.data.loading import LoadedData, asked_in, hold_out, load
from sqlenv.data.questions import text_digest
from sqlenv.data.sources import by_running
from sqlenv.demo import STAMP
from sqlenv.executor import Executor
from sqlenv.executor.database import check_database
from sqlenv.types import Example

_log = logging.getLogger(__name__)
_LEARNED: tuple[Split, ...] = ("train", "validation")
_NAMED = 5
_LISTED = 20
# Share of a test set's questions that others ask in the same words by chance: of Spider's, how many
# flights there are, 0.5 %.
_COMMON = 0.05
_T = TypeVar("_T")
_Asked = frozenset[tuple[str, int]]
"""Questions by the name of the database and the digest of the text."""


def check_inputs(config: JobConfig) -> None:
    """Look for the data, the model and what is installed."""
    if config.rollout.sampler == "sglang":
        servers = config.rollout.sglang
        if servers.launch:
            servers.find_python()
        if servers.weights is not None:
            check_place(servers.weights, key="rollout.sglang.weights")
        _check_adapters(config)
    if (tracker := config.run.tracker) is not None:
        package = "tensorboardX" if tracker == "tensorboard" else tracker
        if find_spec(package) is None:
            raise UserError(f"run.tracker: {package} is not installed: pip install {package}")
    for split in SPLITS:
        check_data(config, split)
    check_model(config)


def _check_adapters(config: JobConfig) -> None:
    """Adapters belong to the weights that a server is started with. SGLang knows the sizes of
    Qwen3.5's only in a folder with the vision tower, which a warm start leaves out.
    """
    path = config.model.path
    if config.train.lora is None:
        return
    if config.rollout.sglang.urls and (config.warm_start or config.data.train.pass_rate):
        raise UserError(
            "train.lora: warm start and screening bring other weights to running servers "
            "(rollout.sglang.urls) than adapters belong to; use rollout.sglang.launch=N"
        )
    if path is None or not (path / "config.json").is_file():
        return
    is_hybrid = read_config(path).hybrid is not None
    has_tower = "text_config" in json.loads((path / "config.json").read_bytes())
    if is_hybrid and (config.warm_start is not None or not has_tower):
        raise UserError(
            "train.lora: SGLang takes adapters of Qwen3.5 only for a folder with the vision tower, "
            "which a warm start leaves out; set train.lora=null, or let the native sampler answer"
        )


def check_data(config: JobConfig, split: Split) -> None:
    """Look for the files of a split; demo data is made later."""
    root = config.data.root
    if root is None:
        return
    if not root.is_dir():
        raise UserError(
            f"data.root: there is no folder {root.absolute()}; download the data there "
            "(docs/data.md) or set data.root=FOLDER"
        )
    # What is held out is read as `data.train`.
    is_held_out = split == "validation" and config.data.validation is None
    section = "train" if is_held_out else split
    for number, source in enumerate(config.data.of(split, root).sources):
        with named(f"data.{section}.sources.{number}"):
            locate(source)


def split_reader(
    config: JobConfig, root: Path, executor: Executor | None = None
) -> Callable[[Split], LoadedData]:
    """Return what reads the questions of a split; gold queries are run if there is an executor.

    Where `data.validation` is not given, databases are chosen once that are held out for it.
    """

    @cache
    def held_out(count: int) -> frozenset[str]:
        with named("data.held_out"):
            return hold_out(config.data.of("train", root), count, by_running(executor))

    def read(split: Split) -> LoadedData:
        data, count = config.data.of(split, root), config.data.held_out
        held = held_out(count) if count and split != "test" else None
        # Where nothing is left out, whoever needs what a gold query gives asks for it.
        is_checked = data.exclude or any(source.corrections for source in data.sources)
        with named(f"data.{split}"):
            return load(
                data,
                check=by_running(executor if is_checked else None),
                accept=lambda db_id: held is None or (db_id in held) == (split == "validation"),
            )

    return read


def check_questions(config: JobConfig, root: Path | None = None) -> dict[Split, LoadedData]:
    """Read every question of a data folder, or of demo data in another one, and look at its
    database; no query is run.
    """
    root = config.data.root or root
    assert root is not None
    read = split_reader(config, root)
    loaded = {split: read(split) for split in SPLITS}
    for split, data in loaded.items():
        for database in dict.fromkeys(example.database for example in data.examples):
            with named(f"data.{split}"):
                check_database(database)
    check_overlap(config, {split: data.examples for split, data in loaded.items()})
    return loaded


def sample(
    questions: Sequence[_T], limit: int | None, *, seed: int, purpose: str = "limit"
) -> Sequence[_T]:
    """Choose at most so many questions by seed, in order; each purpose has its own."""
    if limit is None or len(questions) <= limit:
        return questions
    numbers = Random(f"{seed} {purpose}").sample(range(len(questions)), limit)
    return [questions[number] for number in sorted(numbers)]


def describe_passes(config: JobConfig, questions: int) -> str:
    """Say how often a job goes over its questions to learn from."""
    asked = config.train.all_steps * config.train.prompts_per_step
    return f"{asked / questions:.2f} over {questions:,} questions"


def check_model(config: JobConfig) -> None:
    """Look for the files of the model's folder; a tiny model is made later."""
    if config.model.path is None:
        return
    try:
        check_folder(config.model.path)
    except UserError as error:
        raise UserError(
            f"model.path: {error}; download the weights there (docs/training.md) or set "
            "model.path=FOLDER"
        ) from None


def describe_sampler(config: JobConfig, accelerator: str) -> str:
    """Say who samples, and why; on GPUs, where SGLang is at hand, also how it would."""
    rollout = config.rollout
    python = rollout.sglang.python or os.environ.get(SGLANG_PYTHON)
    if accelerator != "gpu" or rollout.sampler != "native" or python is None:
        return str(rollout)
    return f"{rollout}; {python} has SGLang, which samples with rollout.sglang.launch=N"


def check_overlap(config: JobConfig, splits: Mapping[Split, Sequence[Example]]) -> None:
    """Compare the questions that are learned from and chosen by, and the names of their databases,
    with those of all test sets below `data.root` or beside the sources, and of the run's own test
    questions. Generated data is left alone.

    Raises:
        UserError: A test set has some of these, and data.overlap=refuse. It says which databases to
            leave out, those that are left out already too.
    """
    data = config.data
    if data.root is None:
        return
    learned = {f"data.{name}": _asked_by(splits[name]) for name in _LEARNED}
    measured = _measured(data, data.root, splits)
    shared = {
        (learn, measure): found
        for learn, own in learned.items()
        for measure, others in measured.items()
        if learn != measure and (found := _shared(own, others))
    }
    # To choose by what was learned is told.
    refused = [pair for pair in shared if pair[1] != "data.validation" and data.overlap == "refuse"]
    if refused:
        names = set(data.train.exclude_databases).union(*(shared[pair] for pair in refused))
        listed = ", ".join(sorted(names)[:_LISTED]) + ", ..." * (len(names) > _LISTED)
        more = "" if data.validation is None else ", choose by others (data.held_out=200)"
        raise UserError(
            f"{'; '.join(_line(*pair, shared[pair]) for pair in refused)}; leave these out "
            f"(data.train.exclude_databases='[{listed}]'){more}, or set data.overlap=tell to go "
            "on with them"
        )
    for pair, found in shared.items():
        _log.warning("%s", _line(*pair, found))


def _line(learn: str, measure: str, shared: Set[str]) -> str:
    """Say in a line what two sets share."""
    examples = ", ".join(sorted(shared)[:_NAMED])
    count = f"{len(shared):,} databases, by their names or questions"
    return f"{learn} and {measure} share {count} (such as {examples})"


def _shared(learned: _Asked, measured: _Asked) -> Set[str]:
    """Name the databases of the learned questions that are measured by: those of the same name, and
    where more questions are the same than anybody asks of any database, those of these.
    """
    texts = {text for _, text in measured}
    same = {(name, text) for name, text in learned if text in texts}
    names = {name for name, _ in learned} & {name for name, _ in measured}
    if len({text for _, text in same}) > max(1, _COMMON * len(texts)):
        # One question, such as how many there are, may be asked of any.
        counts = Counter(name for name, _ in same)
        names |= {name for name, count in counts.items() if count > 1} or {*counts}
    return names


def _asked_by(examples: Sequence[Example]) -> _Asked:
    return frozenset((one.db_id, text_digest(one.question)) for one in examples)


def _measured(
    data: DataSection, root: Path, splits: Mapping[Split, Sequence[Example]]
) -> dict[str, _Asked]:
    """Return the questions to measure by and to choose by."""
    places = {one.path for name in _LEARNED for one in data.of(name, root).sources}
    away = [one for one in sorted(places) if not one.resolve().is_relative_to(root.resolve())]
    measured = {name: found for place in (*away, root) for name, found in _test_sets(place)}
    test, own = _asked_by(splits["test"]), data.of("test", root).sources
    if not any(test <= one for one in measured.values()) and not all(map(_is_generated, own)):
        measured["data.test"] = test
    if data.validation is not None:
        measured["data.validation"] = _asked_by(splits["validation"])
    return measured


def _test_sets(root: Path) -> Iterator[tuple[str, _Asked]]:
    """Read the questions of the published test sets below a folder, as far as they are there."""
    for name, published in TEST_SETS.items():
        source = published.at(root)
        try:
            if not _is_generated(source):
                yield name, asked_in(source)
        except AbsentError:
            pass
        except UserError as error:
            _log.warning("%s is not compared with: %s", name, error)


def _is_generated(source: SourceConfig) -> bool:
    return (locate(source).root / STAMP).is_file()
