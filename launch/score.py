"""Score files of predictions with the diagnostic tree: where do the queries of a model differ?

    python -m launch.score --predictions model.sql --data-root spider_data --data dev.json

Progress-SQL's offline use of its tree (paper 000, table 8): the share of predictions with each tag,
beside execution accuracy. A file has one prediction a line: SQL, or (.jsonl) JSON with a field
`pred` or `sql`, such as the predictions.jsonl of launch.train and launch.eval. Lines are matched
with questions by their field `id` where they have one, else by their order.
"""

from __future__ import annotations

import argparse
import json
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import get_args

from rich.console import Console
from rich.table import Table as RichTable

from launch import cli
from rewards.diagnosis import Diagnosis, diagnose
from rewards.lexical import lexical_similarity
from sqlenv.compare import matches
from sqlenv.config import DataConfig, ExecutorConfig, Layout, SourceConfig
from sqlenv.datasets import load
from sqlenv.envs.tags import TAG_SENTENCES
from sqlenv.errors import UserError
from sqlenv.executor import Executor
from sqlenv.schema import read_schema
from sqlenv.types import Example

CATEGORIES: Mapping[str, frozenset[str]] = {
    "SELECT": frozenset({"SELECT_ERROR", "AGGREGATE_ERROR", "DISTINCT_MISMATCH"}),
    "JOIN": frozenset({"JOIN_MISSING", "JOIN_KEY_MISMATCH", "FROM_OR_JOIN_TABLE_MISMATCH"}),
    "WHERE": frozenset({"WHERE_ERROR"}),
    "GROUP": frozenset({"GROUP_BY_MISSING", "GROUP_BY_ERROR"}),
}
"""The columns of table 8, as sets of tags."""


@dataclass(frozen=True, slots=True)
class FileScore:
    """What one file of predictions scores; shares in percent of all its predictions."""

    name: str
    count: int
    accuracy: float
    struct: float
    lexical: float
    unparsed: float
    categories: Mapping[str, float]
    tags: Mapping[str, float]


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    options = _parser().parse_args(arguments)
    examples = _examples(options)
    with Executor(ExecutorConfig()) as executor:
        scores = [score_file(path, examples, executor) for path in options.predictions]
    Console().print(render(scores))


def score_file(path: Path, examples: Sequence[Example], executor: Executor) -> FileScore:
    """Score the predictions of a file: one an example, or those that the file has by id."""
    pairs = pair_up(path, examples)
    found = [diagnose(sql, example.gold_sql, _columns(example.database)) for sql, example in pairs]
    results = executor.execute_many([(example.database, sql) for sql, example in pairs])
    golds = executor.gold_many([(example.database, example.gold_sql) for _, example in pairs])
    correct = [matches(*both, mode="set") for both in zip(results, golds, strict=True)]
    lexical = [lexical_similarity(sql, example.gold_sql) for sql, example in pairs]
    return _summary(path.stem, found, lexical, correct)


def pair_up(path: Path, examples: Sequence[Example]) -> list[tuple[str, Example]]:
    """Give each prediction of a file its question: by id if its lines have ids, else by order.

    Raises:
        UserError: An id is of no question, is there twice or only in some lines; or lines without
            ids are not as many as the questions.
    """
    predictions = _predictions(path)
    names = [name for name, _ in predictions if name is not None]
    if names:
        by_id = {example.id: example for example in examples}
        _check_ids(path, names, by_id, count=len(predictions))
        return [(sql, by_id[name]) for name, sql in predictions if name is not None]
    if len(predictions) != len(examples):
        raise UserError(
            f"{path}: {len(predictions)} predictions for {len(examples)} questions; give one a "
            "line, in the order of --data, or a .jsonl file with the field `id`"
        )
    return [(sql, example) for (_, sql), example in zip(predictions, examples, strict=True)]


def _check_ids(
    path: Path, names: Sequence[str], known: Mapping[str, Example], *, count: int
) -> None:
    if len(names) < count:
        raise UserError(f"{path}: {count - len(names)} of {count} lines have no `id`; add it")
    if unknown := [name for name in names if name not in known]:
        raise UserError(
            f"{path}: {len(unknown)} predictions are of no question of --data, the first is "
            f"{unknown[0]}; theirs are such as {min(known)}: check --data and --layout"
        )
    if len(set(names)) < count:
        twice, _ = Counter(names).most_common(1)[0]
        raise UserError(f"{path}: the id {twice} is there twice")


def read_predictions(path: Path) -> list[str]:
    """Read one query a line; empty lines of a file of SQL are empty queries."""
    return [sql for _, sql in _predictions(path)]


def _predictions(path: Path) -> list[tuple[str | None, str]]:
    """Read the id, where there is one, and the query of each line."""
    try:
        lines = path.read_text(encoding="utf-8").removesuffix("\n").split("\n")
    except (OSError, UnicodeDecodeError) as error:
        raise UserError(f"{path}: cannot be read as text ({error})") from error
    if path.suffix != ".jsonl":
        return [(None, line) for line in lines]
    found = []
    for number, line in enumerate(lines, start=1):
        try:
            record = json.loads(line)
            sql = record["pred" if "pred" in record else "sql"]
            found.append((record.get("id"), str(sql)))
        except (ValueError, TypeError, LookupError, AttributeError):
            raise UserError(
                f"{path}:{number}: not a JSON object with `pred` or `sql`; write one a line"
            ) from None
    return [(None if name is None else str(name), sql) for name, sql in found]


def render(scores: Sequence[FileScore]) -> RichTable:
    """Lay the scores out, one column a file; shares in percent."""
    table = RichTable("", *(score.name for score in scores), title="Diagnostic tree")
    for column in table.columns[1:]:
        column.justify = "right"

    def row(name: str, values: Iterable[str]) -> None:
        table.add_row(name, *values)

    row("questions", (f"{score.count:,}" for score in scores))
    row("execution accuracy %", (f"{score.accuracy:.1f}" for score in scores))
    row("structural alignment", (f"{score.struct:.3f}" for score in scores))
    row("lexical alignment", (f"{score.lexical:.3f}" for score in scores))
    row("not parsed %", (f"{score.unparsed:.1f}" for score in scores))
    table.add_section()
    for category in (*CATEGORIES, "average"):
        row(f"{category} errors %", (f"{score.categories[category]:.1f}" for score in scores))
    table.add_section()
    for tag in TAG_SENTENCES:
        row(f"{tag} %", (f"{score.tags[tag]:.1f}" for score in scores))
    return table


def _summary(
    name: str, found: Sequence[Diagnosis], lexical: Sequence[float], correct: Sequence[bool]
) -> FileScore:
    share = 100 / len(found)
    tags = Counter(tag for one in found for tag in one.tags)
    categories = {
        category: share * sum(not members.isdisjoint(one.tags) for one in found)
        for category, members in CATEGORIES.items()
    }
    categories["average"] = sum(categories.values()) / len(categories)
    return FileScore(
        name,
        len(found),
        accuracy=share * sum(correct),
        struct=sum(one.struct for one in found) / len(found),
        lexical=sum(lexical) / len(lexical),
        unparsed=share * sum(not one.pred_parsed for one in found),
        categories=categories,
        tags={tag: share * tags[tag] for tag in TAG_SENTENCES},
    )


@cache
def _columns(database: Path) -> Mapping[str, Sequence[str]]:
    return read_schema(database).column_names()


def _examples(options: argparse.Namespace) -> tuple[Example, ...]:
    source = SourceConfig(
        layout=options.layout, path=options.data_root, split="dev", file=str(options.data)
    )
    config = DataConfig(sources=(source,), drop_failing_gold=False, drop_empty_gold=False)
    return load(config).examples


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m launch.score",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--predictions",
        nargs="+",
        type=Path,
        required=True,
        metavar="FILE",
        help="files of predictions, each a column of the result",
    )
    parser.add_argument(
        "--data-root",
        type=Path,
        required=True,
        metavar="DIR",
        help="the data set's folder, which holds its databases",
    )
    parser.add_argument(
        "--data",
        type=Path,
        required=True,
        metavar="FILE",
        help="file of the questions and gold queries, relative to --data-root",
    )
    parser.add_argument(
        "--layout",
        default="spider",
        choices=get_args(Layout),
        metavar="NAME",
        help=f"how the data set is laid out: {', '.join(get_args(Layout))} (default: spider)",
    )
    return parser


if __name__ == "__main__":
    cli.run(main)
