"""Pairs of a gold query and a prediction: from the command line, from a file, to JSON lines."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

from launch.crew import make_pair_scorer, spread
from sqlenv.config import ExecutorConfig
from sqlenv.database import check_database
from sqlenv.errors import UserError
from sqlenv.types import Example

_NAMED = 3


@dataclass(frozen=True, slots=True)
class Pair:
    """A gold query and a prediction for one database; `id` is whatever the file has."""

    id: Any
    example: Example
    pred: str


def make_pair(
    database: str,
    gold: str,
    pred: str,
    name: Any = None,
    *,
    check: Callable[[Path], None] = check_database,
) -> Pair:
    """Make a pair of what a user gives.

    Raises:
        UserError: The database cannot be used, or the gold query is blank.
    """
    path = Path(database)
    try:
        check(path)
    except ValueError:  # a NUL in the path
        raise UserError(f"{database!r}: not a path") from None
    if not gold.strip():
        raise UserError("the gold query is empty")
    return Pair(name, Example(str(name), "", path.stem, path, gold), pred)


def read_pairs(path: Path) -> list[Pair]:
    """Read JSON lines with `id`, `db`, `gold` and `pred`; blank lines are left out.

    A prediction that is no text is one without SQL, as in BIRD's evaluator.

    Raises:
        UserError: The file or one of its lines is not of this form, or a database cannot be used.
    """
    try:
        lines = path.read_text(encoding="utf-8").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text ({error})") from None
    check = cache(check_database)  # many pairs share a database
    return [_read(path, at, line, check) for at, line in enumerate(lines, 1) if line.strip()]


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


def _read(path: Path, number: int, line: str, check: Callable[[Path], None]) -> Pair:
    try:
        record = json.loads(line)
        database, gold, pred = (record[name] for name in ("db", "gold", "pred"))
    except (ValueError, TypeError, LookupError, RecursionError):
        raise UserError(
            f"{path}:{number}: not a JSON object with `id`, `db`, `gold` and `pred`; "
            "write one a line"
        ) from None
    if not isinstance(database, str) or not isinstance(gold, str):
        raise UserError(f"{path}:{number}: `db` and `gold` have to be text")
    try:
        text = pred if isinstance(pred, str) else ""
        return make_pair(database, gold, text, record.get("id"), check=check)
    except UserError as error:
        raise UserError(f"{path}:{number}: {error}") from None
