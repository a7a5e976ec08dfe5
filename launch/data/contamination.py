"""Contamination: the databases that questions to learn from and questions to measure by share.

A checkpoint that was chosen by a test set's questions, or that has learned from its databases,
says nothing on that set: a run is refused before anything is trained, unless data.overlap=tell.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping, Sequence, Set
from pathlib import Path

from launch.config import DataSection, JobConfig, Split
from minirl.exchange import UserError
from sqlenv.config import SourceConfig
from sqlenv.data.layouts import TEST_SETS, AbsentError, locate
from sqlenv.data.loading import read_all
from sqlenv.demo import STAMP
from sqlenv.types import Example

_log = logging.getLogger(__name__)

_LEARNED: tuple[Split, ...] = ("train", "validation")
_NAMED = 5
_LISTED = 20


def check_overlap(config: JobConfig, splits: Mapping[Split, Sequence[Example]]) -> None:
    """Compare the names of the databases that are learned from and chosen by with those of all test
    sets below `data.root` or beside the sources, and of the run's own test questions. Generated
    data is left alone.

    Raises:
        UserError: A test set has some of these databases, and data.overlap=refuse. It says which
            ones to leave out, those that are left out already too.
    """
    data = config.data
    if data.root is None:
        return
    learned = {f"data.{name}": _databases(splits.get(name, ())) for name in _LEARNED}
    measured = {
        name: _databases(found) for name, found in _measured(data, data.root, splits).items()
    }
    shared = {
        (learn, measure): found
        for learn, own in learned.items()
        for measure, others in measured.items()
        if learn != measure and (found := own & others)
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
    return f"{learn} and {measure} share {len(shared):,} databases by name (such as {examples})"


def _databases(examples: Sequence[Example]) -> Set[str]:
    return {example.db_id for example in examples}


def _measured(
    data: DataSection, root: Path, splits: Mapping[Split, Sequence[Example]]
) -> dict[str, Sequence[Example]]:
    """Collect the questions to measure by and to choose by."""
    places = {root / source.path for name in _LEARNED for source in data.of(name).sources}
    away = [one for one in sorted(places) if not one.resolve().is_relative_to(root.resolve())]
    measured = {name: found for place in (*away, root) for name, found in _test_sets(place)}
    own = (one.model_copy(update={"path": root / one.path}) for one in data.test.sources)
    test = {(one.id, one.database) for one in splits.get("test", ())}
    known = ({(one.id, one.database) for one in examples} for examples in measured.values())
    if not any(test <= one for one in known) and not all(map(_is_generated, own)):
        measured["data.test"] = splits.get("test", ())
    if data.validation is not None:
        measured["data.validation"] = splits.get("validation", ())
    return measured


def _test_sets(root: Path) -> Iterator[tuple[str, Sequence[Example]]]:
    """Read the published test sets below a folder, as far as they are there."""
    for name, named in TEST_SETS.items():
        source = named.at(root)
        try:
            if not _is_generated(source):
                yield name, read_all(source, needs_databases=False)
        except AbsentError:
            pass
        except UserError as error:
            _log.warning("%s is not compared with: %s", name, error)


def _is_generated(source: SourceConfig) -> bool:
    return (locate(source).root / STAMP).is_file()
