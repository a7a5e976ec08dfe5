"""Pairs of a gold query and a prediction: from the command line, from a file, to JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from launch.evaluation.process_pool import make_pair_scorer, spread
from launch.texts import read_lines
from sqlenv.config import ExecutorConfig
from sqlenv.dialects import dialect_of
from sqlenv.errors import UserError
from sqlenv.executor.database import check_database
from sqlenv.types import Example

_NAMED = 3


@dataclass(frozen=True, slots=True)
class Pair:
    """A gold query and a prediction for one database; `id` is whatever the file has."""

    id: Any
    example: Example
    pred: str


def make_pair(
    fields: Mapping[str, Any],
    dialect: str = "sqlite",
    *,
    check: Callable[[Path], None] = check_database,
) -> Pair:
    """Make a pair of `db`, `gold` and `pred`; there may be `id` and `dialect`.

    A prediction that is no text is one without SQL, as in BIRD's evaluator.
    """
    database, gold, pred = (fields[name] for name in ("db", "gold", "pred"))
    if not isinstance(database, str) or not isinstance(gold, str):
        raise UserError("`db` and `gold` have to be text")
    path, name = Path(database), fields.get("id")
    try:
        check(path)
    except ValueError:  # a NUL in the path
        raise UserError(f"{database!r}: not a path") from None
    if not gold.strip():
        raise UserError("the gold query is empty")
    known = dialect_of(str(fields.get("dialect") or dialect))
    example = Example(str(name), "", path.stem, path, gold, dialect=known)
    return Pair(name, example, pred if isinstance(pred, str) else "")


def read_pairs(path: Path, dialect: str = "sqlite") -> list[Pair]:
    """Read JSON lines with the fields of `make_pair`; blank lines are left out."""
    check = cache(check_database)  # many pairs share a database

    def read(number: int, line: str) -> Pair:
        try:
            return make_pair(_fields(line), dialect, check=check)
        except UserError as error:
            raise UserError(f"{path}:{number}: {error}") from None

    return [read(*numbered) for numbered in read_lines(path)]


def _fields(line: str) -> Mapping[str, Any]:
    try:
        record = json.loads(line, parse_constant=_refuse)
    except (ValueError, RecursionError):
        record = None
    if not isinstance(record, dict) or not {"db", "gold", "pred"} <= record.keys():
        raise UserError("not a JSON object with `id`, `db`, `gold` and `pred`; write one a line")
    return record


def _refuse(constant: str) -> None:
    """NaN and the infinities are Python's, not JSON's: what is written back has to be JSON."""
    raise ValueError(constant)


def write_scores(pairs: Sequence[Pair], config: ExecutorConfig) -> Iterator[dict[str, Any]]:
    """Yield the record of each pair in order, led by its `id`; name failing golds at the end."""
    jobs = [(pair.example, pair.pred) for pair in pairs]
    failing: list[Any] = []
    for pair, score in zip(
        pairs, spread(make_pair_scorer, config, jobs, title="scoring"), strict=True
    ):
        if not score.gold_ran:
            failing.append(pair.id)
        yield {"id": pair.id, **score.record()}
    warn_of_failing(failing)


def warn_of_failing(names: Sequence[Any]) -> None:
    """Say on standard error which gold queries fail: nothing is right there."""
    if names:
        more = ", …" if len(names) > _NAMED else ""
        first = ", ".join(str(name) for name in names[:_NAMED])
        sys.stderr.write(f"warning: {len(names)} gold queries do not run: {first}{more}\n")
