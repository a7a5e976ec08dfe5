"""What a run learns from and chooses checkpoints by, compared with the published test sets.

A checkpoint that was chosen by a test set's questions, or that has learned from its databases,
says nothing on that set: the run is refused before anything is trained, unless data.overlap=tell.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property, lru_cache
from pathlib import Path

from launch.config import JobConfig
from launch.evaluation.testsets import TEST_SETS, Split
from launch.leaks import Leak, Questions, database_leaks, refuse, shape_of
from sqlenv.config import DataConfig, SourceConfig
from sqlenv.data.detection import detect
from sqlenv.data.layouts import MANIFEST, SETS, is_file, locate, question_files
from sqlenv.data.sources import Pool
from sqlenv.demo import STAMP
from sqlenv.errors import UserError
from sqlenv.executor.database import Identity, fingerprint, identify
from sqlenv.schema.reading import read_schema
from sqlenv.types import Example

_log = logging.getLogger(__name__)

_LEARNED: tuple[Split, ...] = ("train", "validation")


def check_published(config: JobConfig) -> None:
    """Refuse to learn from a published test set, or to choose checkpoints by it.

    Raises:
        UserError: A source of data.train or data.validation is one.
    """
    if config.data.root is None:
        return
    for split in _LEARNED:
        for number, source in enumerate(config.data.of(split).sources):
            name = _published(source.model_copy(update={"path": config.data.root / source.path}))
            if name is None:
                continue
            line = f"data.{split}.sources.{number}: is the test set {name}"
            if config.data.overlap == "tell":
                _log.warning("%s", line)
                continue
            advice = (
                "choose checkpoints by training databases (data.held_out=200)"
                if split == "validation"
                else "learn from a training set"
            )
            raise UserError(
                f"{line}; {advice}, or set data.overlap=tell if the questions are others"
            )


def _published(source: SourceConfig) -> str | None:
    """Name the published test set that a source reads; generated data is none."""
    location = locate(source)
    if (location.root / STAMP).is_file():
        return None
    if location.layout == "prepared":
        return next((name for name in TEST_SETS if location.files[0].stem == name), None)
    for name in TEST_SETS:
        named = SETS[name]
        own = SourceConfig(
            layout=named.layout, path=location.root, split=named.split, file=named.file
        )
        if named.layout == source.layout and set(question_files(location.root, own)).intersection(
            location.files
        ):
            return name
    return None


def check_overlap(config: JobConfig, splits: Mapping[Split, Sequence[Example]]) -> None:
    """Compare what is learned from and chosen by with all test sets below `data.root`.

    Args:
        config: The job; with generated data there is nothing to compare.
        splits: Questions, as they are used. Those of `test` are compared with too, unless all of
            them are generated or of test sets that were found below `data.root`.

    Raises:
        UserError: A test set has some of these questions or databases, and data.overlap=refuse.
    """
    root = config.data.root
    if root is None:
        return
    measured = dict(_test_sets(root))
    own = [source.model_copy(update={"path": root / source.path}) for source in
           config.data.test.sources]  # fmt: skip
    if not all(_published(source) in measured or _is_generated(source) for source in own):
        measured["data.test"] = splits.get("test", ())
    learned = {f"data.{name}": splits[name] for name in _LEARNED if name in splits}
    if config.data.validation is not None:
        measured["data.validation"] = splits.get("validation", ())
    leaks = _leaks(learned, measured)
    if config.data.overlap == "refuse":
        more = "" if config.data.validation is None else ", choose by others (data.held_out=200)"
        refuse(leaks, excluded=config.data.train.exclude_databases, more=more)
    for leak in leaks:
        tell = _log.info if leak.kind == "wording of a question" else _log.warning
        tell("%s", leak.line())


def _leaks(
    learned: Mapping[str, Sequence[Example]], measured: Mapping[str, Sequence[Example]]
) -> list[Leak]:
    questions = Questions(_shape)
    for name, examples in measured.items():
        for example in examples:
            questions.measure(name, example)
    for name, examples in learned.items():
        for example in examples:
            questions.learn(name, example)
    there, here = ({name: _databases(found) for name, found in side.items()}
                   for side in (learned, measured))  # fmt: skip
    return [*database_leaks(there, here, shapes=False), *questions.leaks()]


def _test_sets(root: Path) -> Iterator[tuple[str, Sequence[Example]]]:
    """Read the published test sets below a folder, as far as they are there."""
    for name, source in _sources(root).items():
        if name not in TEST_SETS or _is_generated(source):
            continue
        everything = DataConfig(sources=(source,), drop_missing_database=True)
        try:
            pool = Pool(source, locate(source), everything, None)
            pool.drops = set()
            yield name, tuple(checked.example for checked in pool.questions())
        except UserError as error:
            _log.warning("%s is not compared with: %s", name, error)


def _sources(root: Path) -> Mapping[str, SourceConfig]:
    if not (root / MANIFEST).is_file():
        found = detect(root)
        for name in TEST_SETS:
            if name in found.left:
                _log.warning("%s is not compared with: %s", name, found.left[name])
        return found.sources
    there = (name for name in TEST_SETS if (root / f"{name}.jsonl").is_file())
    return {
        name: SourceConfig(layout="prepared", path=root, file=f"{name}.jsonl") for name in there
    }


def _is_generated(source: SourceConfig) -> bool:
    return (locate(source).root / STAMP).is_file()


@dataclass(frozen=True)
class _OnDisk:
    """A database of some questions, read as far as it has to be."""

    db_id: str
    path: Path

    @cached_property
    def bytes(self) -> int:
        return self.path.stat().st_size if is_file(self.path) else -1

    @cached_property
    def fingerprint(self) -> str:
        return fingerprint(self.path) if is_file(self.path) else self.db_id

    @property
    def shape(self) -> str:
        return _shape(self.path)


def _databases(examples: Sequence[Example]) -> list[_OnDisk]:
    pairs = dict.fromkeys((example.db_id, example.database) for example in examples)
    return [_OnDisk(*pair) for pair in pairs]


def _shape(path: Path) -> str:
    """Digest the tables and columns of a database; one that is not there has those of no other."""
    try:
        return _shape_of_version(identify(path))
    except UserError:
        return str(path)


@lru_cache(maxsize=1024)
def _shape_of_version(identity: Identity) -> str:
    return shape_of(read_schema(Path(identity[0]), examples=0))
