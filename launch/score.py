"""The reward workbench: what every reward family says of a prediction. No JAX, no GPU.

    python -m launch.score --db shop.sqlite --gold "SELECT …" --pred "SELECT …"

Prints a JSON object. Many predictions are measured by launch.eval --predictions, which has the
families' measures too (--comparators), or scored in Python by `rewards.workbench.Workbench`.
"""

from __future__ import annotations

import json
import logging
from pathlib import Path
from typing import Literal

from launch import cli, options
from minirl.exchange import UserError
from rewards.execution import gold_result
from rewards.workbench import Workbench
from sqlenv.cache import shared_cache
from sqlenv.config import ExecutorConfig
from sqlenv.dialects import dialect_of
from sqlenv.executor import Executor
from sqlenv.executor.database import check_contents
from sqlenv.types import Example, Table, describe_failure
from sqlenv.witness.store import WitnessStore

_log = logging.getLogger(__name__)


@options.command
def main(
    *,
    db: Path,
    gold: str,
    pred: str,
    dialect: options.DialectOption = "sqlite",
    numbers: Literal["close", "exact"] = "close",
    timeout_s: options.TimeoutOption = None,
) -> None:
    """Score a prediction.

    Args:
        db: a SQLite database
        gold: the query that answers
        pred: the prediction
        numbers: when two numbers are the same: close (their last bits may differ) or exact (as in
            official programs)
    """
    if not gold.strip():
        raise UserError("--gold: the gold query is empty")
    check_contents(db)
    example = Example("", "", db.stem, db, gold, dialect=dialect_of(dialect))
    config = ExecutorConfig(workers=1, **({"timeout_s": timeout_s} if timeout_s else {}))
    with Executor(config) as executor:
        store = WitnessStore(shared_cache(), match="set")
        print(json.dumps(Workbench(executor, numbers, store).score(example, pred)))  # noqa: T201
        result = gold_result(executor, example)
    if not isinstance(result, Table):
        _log.warning(
            "--gold: does not run, and nothing is right by it: %s", describe_failure(result)
        )


if __name__ == "__main__":
    cli.run(main)
