"""Pairs of a gold query and a prediction: from the command line, from a file, to JSON lines."""

from __future__ import annotations

import json
import logging
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Any

from exchange import UserError
from launch.evaluation.process_pool import make_pair_scorer, spread
from launch.texts import read_lines
from rewards.workbench import PairScore
from sqlenv.config import ExecutorConfig
from sqlenv.dialects import dialect_of
from sqlenv.executor.database import check_database
from sqlenv.types import Example, Numbers

_log = logging.getLogger(__name__)
_NAMED = 3


@dataclass(frozen=True, slots=True)
class Pair:
    """A gold query and a prediction for one database; `id` is whatever the file has."""

    id: Any
    example: Example
    pred: str


_FORMER = {"db": "database", "gold": "gold_sql"}
"""Names of fields in earlier versions."""


def make_pair(fields: Mapping[str, Any], dialect: str = "sqlite") -> Pair:
    """Make a pair of `database`, `gold_sql` and `pred`; there may be `id` and `dialect`.

    A prediction that is no text is one without SQL, as in BIRD's evaluator.
    """
    database, gold, pred = (fields[name] for name in ("database", "gold_sql", "pred"))
    if not isinstance(database, str) or not isinstance(gold, str):
        raise UserError("`database` and `gold_sql` have to be text")
    if not gold.strip():
        raise UserError("the gold query is empty")
    path, name = Path(database), fields.get("id")
    known = dialect_of(str(fields.get("dialect") or dialect))
    example = Example(str(name), "", path.stem, path, gold, dialect=known)
    return Pair(name, example, pred if isinstance(pred, str) else "")


def read_pairs(path: Path, dialect: str = "sqlite") -> list[Pair]:
    """Read JSON lines with the fields of `make_pair`; blank lines are left out."""
    check = cache(check_database)  # many pairs share a database
    tell = cache(lambda old: _log.info("%s: %s is read as %s", path, old, _FORMER[old]))

    def read(number: int, line: str) -> Pair:
        try:
            record = json.loads(line)
        except (ValueError, RecursionError):
            record = None
        try:
            if isinstance(record, dict):
                for old in _FORMER.keys() & record.keys():
                    tell(old)
                    record.setdefault(_FORMER[old], record[old])
            needs = {"database", "gold_sql", "pred"}
            if not isinstance(record, dict) or not needs <= record.keys():
                raise UserError("not a JSON object with `id`, `database`, `gold_sql` and `pred`")
            pair = make_pair(record, dialect)
            check(pair.example.database)
        except UserError as error:
            raise UserError(f"{path}:{number}: {error}") from None
        return pair

    return [read(*numbered) for numbered in read_lines(path)]


def score_all(
    pairs: Sequence[tuple[Example, str]], config: ExecutorConfig, numbers: Numbers
) -> Iterator[PairScore]:
    """Score predictions in order on all cores; say on standard error which gold queries fail at
    the end: nothing is right there.
    """
    failing: dict[str, None] = {}
    scores = spread(partial(make_pair_scorer, numbers=numbers), config, pairs, title="scoring")
    for (example, _), score in zip(pairs, scores, strict=True):
        if not score.gold_ran:
            failing[example.id] = None
        yield score
    warn_of_failing([*failing])


def warn_of_failing(names: Sequence[str]) -> None:
    """Name gold queries that do not run on standard error."""
    if names:
        more = ", …" if len(names) > _NAMED else ""
        sys.stderr.write(
            f"warning: {len(names)} gold queries do not run: {', '.join(names[:_NAMED])}{more}\n"
        )
