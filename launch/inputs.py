"""What a job needs from outside, looked for before anything is made."""

from __future__ import annotations

from pathlib import Path

from launch.config import JobConfig
from launch.folders import check_place
from launch.testsets import SPLITS, Split
from minirl.errors import UserError as ModelError
from minirl.files import check_folder
from minirl.rules import check_installed
from sqlenv.config import DataConfig
from sqlenv.database import check_database
from sqlenv.datasets import GoldRunner, LoadedData, load
from sqlenv.errors import UserError
from sqlenv.layouts import locate


def check_inputs(config: JobConfig) -> None:
    """Look for the data, the model and what is installed before anything is made.

    Raises:
        UserError: A path is not there, cannot be written, or is not laid out as its source says; or
            a setting needs a package that is not there.
    """
    if config.rollout.backend == "sglang":
        check_installed(config.rollout.sglang)
        if config.rollout.sglang.push == "disk" and config.rollout.sglang.weights is not None:
            check_place(config.rollout.sglang.weights, key="rollout.sglang.weights")
    for split in SPLITS:
        check_data(config, split)
    check_model(config)


def check_data(config: JobConfig, split: Split) -> None:
    """Look for the files of a split; demo data is made later.

    Raises:
        UserError: A path is not there, or is not laid out as its source says.
    """
    root = config.data.root
    if root is None:
        return
    if not root.is_dir():
        raise UserError(
            f"data.root: there is no folder {root.absolute()}; download the data there "
            "(README, 'Data') or set data.root=FOLDER"
        )
    for number, source in enumerate(rooted(getattr(config.data, split), root).sources):
        try:
            locate(source)
        except UserError as error:
            raise UserError(f"data.{split}.sources.{number}: {error}") from None


def rooted(split: DataConfig, root: Path) -> DataConfig:
    """Give the sources of a split whole paths."""
    sources = (source.model_copy(update={"path": root / source.path}) for source in split.sources)
    return split.model_copy(update={"sources": tuple(sources)})


def load_split(
    config: JobConfig, split: Split, root: Path, executor: GoldRunner | None = None
) -> LoadedData:
    """Read the questions of a split from a data folder.

    Raises:
        UserError: A file is damaged, a database is not there, or no question is left.
    """
    section = f"data.{split}"
    try:
        return load(rooted(getattr(config.data, split), root), executor=executor, section=section)
    except UserError as error:
        raise UserError(f"{section}: {error}") from None


def check_questions(config: JobConfig) -> None:
    """Read every question of a data folder and look at its database; no query is run.

    Raises:
        UserError: A file is damaged, a database is not there or none of SQLite's, or no question
            is left.
    """
    root = config.data.root
    if root is None:
        return
    for split in SPLITS:
        loaded = load_split(config, split, root)
        try:
            for database in dict.fromkeys(example.database for example in loaded.examples):
                check_database(database)
        except UserError as error:
            raise UserError(f"data.{split}: {error}") from None


def check_model(config: JobConfig) -> None:
    """Look for the files of the model's folder; a tiny model is made later.

    Raises:
        UserError: One is not there.
    """
    if config.model.path is None:
        return
    try:
        check_folder(config.model.path)
    except ModelError as error:
        raise UserError(
            f"model.path: {error}; download the weights there (README, 'Weights') or set "
            "model.path=FOLDER"
        ) from None
