"""The reward workbench: what every reward family says of a prediction. No JAX, no GPU.

    python -m launch.score --db shop.sqlite --gold "SELECT …" --pred "SELECT …"
    python -m launch.score --file pairs.jsonl --json scores.jsonl

A pair gives a JSON object. A file of pairs has a JSON object a line with `id`, `database` (a path),
`gold_sql` and `pred`, and gives a line for each, in order. Prediction files are measured by
launch.eval, which has the families' measures too (--comparators), and whose results are looked at
on the page of launch.report.
"""

from __future__ import annotations

import json as js
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from functools import cache, partial
from pathlib import Path
from typing import Annotated, Any, Literal

from cyclopts import Parameter
from cyclopts.validators import Number

from launch import cli, options
from launch.evaluation.questions import check_databases
from launch.files import check_new, numbered_lines
from launch.pool import process_pool
from minirl.exchange import UserError
from minirl.exchange.settings import at_home
from minirl.run.files import naming, whole_file
from rewards.execution import gold_result
from rewards.workbench import Workbench
from sqlenv.cache import shared_cache
from sqlenv.config import ExecutorConfig
from sqlenv.dialects import dialect_of
from sqlenv.executor import Executor
from sqlenv.executor.database import check_database
from sqlenv.types import Example, Numbers, Table
from sqlenv.witness.store import WitnessStore


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class ScoreOptions:
    """A pair or a file of pairs, and how a query runs."""

    db: Annotated[str | None, Parameter(help="one pair: a SQLite database")] = None
    gold: Annotated[str | None, Parameter(help="one pair: the query that answers")] = None
    pred: Annotated[str | None, Parameter(help="one pair: the prediction")] = None
    file: Annotated[Path | None, Parameter(help="pairs, as JSON lines")] = None
    json: Annotated[
        Path, Parameter(help="the result into this file (default: on standard output)")
    ] = options.STDOUT
    dialect: options.DialectOption = "sqlite"
    numbers: Annotated[
        Literal["close", "exact"],
        Parameter(
            help="when two numbers are the same: close (their last bits may differ) or exact (as "
            "in official programs)"
        ),
    ] = "close"
    timeout_s: options.TimeoutOption = None
    max_rows: Annotated[
        int | None, Parameter(help="rows of a result (1,000,000)", validator=Number(gte=1))
    ] = None


Pair = tuple[Example, str]
"""A gold query for one database, and a prediction."""


def score(*, given: ScoreOptions = ScoreOptions()) -> None:
    """Score one pair, or a file of pairs."""
    named = {name: getattr(given, name) for name in ("timeout_s", "max_rows")}
    limits = {name: value for name, value in named.items() if value is not None}
    config = ExecutorConfig(**limits)
    pair = {"database": given.db, "gold_sql": given.gold, "pred": given.pred}
    is_pair = any(part is not None for part in pair.values())
    if is_pair == bool(given.file) or (is_pair and None in pair.values()):
        raise UserError(
            "give one pair (all of --db, --gold and --pred) or a file of pairs "
            "(--file); a file of predictions is measured by launch.eval --predictions"
        )
    if given.json != options.STDOUT:
        check_new(given.json, "--json")
    if given.file:
        pairs = read_pairs(given.file, given.dialect)
    else:
        pairs = [(None, make_pair(pair, given.dialect))]
    _score(pairs, given, config)


main = options.Command(score)


def _score(pairs: Sequence[tuple[Any, Pair]], given: ScoreOptions, config: ExecutorConfig) -> None:
    failing = dict[str, None]()
    work = partial(_scorer, numbers=given.numbers)
    with _lines(given.json) as write:
        check_databases(example.database for _, (example, _) in pairs)
        with (
            process_pool(work, config, most=len(pairs)) as do,
            cli.progress_bar("scoring") as show,
        ):
            rows = zip(pairs, do([pair for _, pair in pairs]), strict=True)
            for done, ((name, (example, _)), (found, gold_ran)) in enumerate(rows, 1):
                write({"id": name, **found} if given.file else found)
                where = example.id if given.file else example.db_id
                failing |= {} if gold_ran else {where: None}
                if given.file:
                    show(done, len(pairs), "")
    cli.warn_of([*failing], "gold queries do not run")


@contextmanager
def _scorer(
    config: ExecutorConfig, numbers: Numbers
) -> Generator[Callable[[Pair], tuple[Mapping[str, Any], bool]]]:
    """Make what scores one pair, with witnesses of its gold query: its record, and whether that
    query ran.
    """
    with Executor(config) as executor:
        bench = Workbench(executor, numbers, WitnessStore(shared_cache(), match="set"))

        def work(pair: Pair) -> tuple[Mapping[str, Any], bool]:
            return bench.score(*pair), isinstance(gold_result(executor, pair[0]), Table)

        yield work


def make_pair(fields: Mapping[str, Any], dialect: str = "sqlite") -> Pair:
    """Make a pair of `database`, `gold_sql` and `pred`; there may be `id` and `dialect`.

    A prediction that is no text is one without SQL, as in BIRD's evaluator.
    """
    database, gold, pred = (fields[name] for name in ("database", "gold_sql", "pred"))
    if not isinstance(database, str) or not isinstance(gold, str):
        raise UserError("`database` and `gold_sql` have to be text")
    if not gold.strip():
        raise UserError("the gold query is empty")
    path, name = Path(at_home(database)), fields.get("id")
    known = dialect_of(str(fields.get("dialect") or dialect))
    example = Example(str(name), "", path.stem, path, gold, dialect=known)
    return example, pred if isinstance(pred, str) else ""


def read_pairs(path: Path, dialect: str = "sqlite") -> list[tuple[Any, Pair]]:
    """Read JSON lines with the fields of `make_pair`, each with its `id`, whatever that is; blank
    lines are left out.
    """
    check = cache(check_database)  # many pairs share a database

    def read(number: int, line: str) -> tuple[Any, Pair]:
        try:
            record = js.loads(line)
        except (ValueError, RecursionError):
            record = None
        try:
            needs = {"database", "gold_sql", "pred"}
            if not isinstance(record, dict) or not needs <= record.keys():
                raise UserError("not a JSON object with `id`, `database`, `gold_sql` and `pred`")
            pair = make_pair(record, dialect)
            check(pair[0].database)
        except UserError as error:
            raise UserError(f"{path}:{number}: {error}") from None
        return record.get("id"), pair

    return [read(*numbered) for numbered in numbered_lines(path)]


@contextmanager
def _lines(place: Path) -> Generator[Callable[[Mapping[str, Any]], None]]:
    """Open what JSON lines go to: a file, or standard output."""
    with ExitStack() as stack:
        if place == options.STDOUT:
            stack.enter_context(naming(Path("standard output")))
            yield lambda record: print(js.dumps(record), flush=True)  # noqa: T201
            return
        try:
            place.absolute().parent.stat()  # a folder that is not there is rather a slip
            file = stack.enter_context(whole_file(place))
        except OSError as error:
            raise UserError(f"--json {place}: cannot be written ({error.strerror})") from None
        yield lambda record: print(js.dumps(record), file=file)


if __name__ == "__main__":
    cli.run(main)
