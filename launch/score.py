"""The reward workbench: what every reward family says of predictions. No JAX, no GPU.

    python -m launch.score --db shop.sqlite --gold "SELECT …" --pred "SELECT …"
    python -m launch.score --file pairs.jsonl --json
    python -m launch.score --predictions model.sql --data-root spider_data --data dev.json
    python -m launch.score lint --data-root spider_data --data dev.json

One pair gives a page, or with --json one object. A file of pairs has a JSON object a line with
`id`, `db` (a path), `gold` and `pred`. A file of predictions has one a line, SQL or (.jsonl) JSON
with a field `pred` or `sql`, such as the predictions.jsonl of launch.train and launch.eval, or is
BIRD's JSON: it gives tables over all families and over the tags of Progress-SQL's diagnostic tree
(paper 000, table 8). Lines are matched with questions by their field `id` where they have one, else
by their order. trajectories.jsonl of a run gives the reward of its episodes by every family.
"""

from __future__ import annotations

import argparse
import json
import os
import sys
from collections import Counter
from collections.abc import Callable, Generator, Iterable, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError
from rich.console import Console
from rich.markup import escape
from rich.table import Table as RichTable

from launch import cli, lint
from launch.crew import (
    make_pair_scorer,
    make_trajectory_scorer,
    open_workbench,
    spread,
)
from launch.families import Means, episode_means, pair_means, render_episodes, render_pairs
from launch.page import render_page
from launch.pairs import Pair, make_pair, read_pairs, warn_of_failing, write_scores
from launch.predictions import is_trajectories, pair_up, read_trajectories
from rewards.progressive import columns_of
from rewards.workbench import PairScore, Workbench
from sqlenv.config import DataConfig, ExecutorConfig, Layout, SourceConfig
from sqlenv.datasets import load
from sqlenv.envs.tags import TAG_SENTENCES
from sqlenv.errors import UserError
from sqlenv.executor import Executor
from sqlenv.types import Example

Write = Callable[[Mapping[str, Any]], None]

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
    means: Mapping[str, float]


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    is_lint = list(arguments[:1]) == ["lint"]
    options = (_lint_parser() if is_lint else _parser()).parse_args(arguments[is_lint:])
    (_lint if is_lint else _score)(options, _executor_config(options))


def _score(options: argparse.Namespace, config: ExecutorConfig) -> None:
    """Do what the options ask for: one pair, a file of pairs, or files of predictions."""
    one = (options.db, options.gold, options.pred)
    asked = [any(part is not None for part in one), options.file, options.predictions]
    if sum(map(bool, asked)) != 1:
        raise UserError(
            "give one pair (--db, --gold and --pred), a file of pairs (--file) or files of "
            "predictions (--predictions)"
        )
    if options.file:
        _score_file_of_pairs(options, config)
    elif options.predictions:
        _score_predictions(options, config)
    elif options.out:
        raise UserError("--out goes with --file and --predictions; one pair is printed")
    elif None in one:
        raise UserError("one pair takes all of --db, --gold and --pred")
    else:
        _score_pair(make_pair(*one), config, as_json=options.json)


def _score_pair(pair: Pair, config: ExecutorConfig, *, as_json: bool) -> None:
    with open_workbench(config.model_copy(update={"workers": 1})) as bench:
        score = bench.score(pair.example, pair.pred)
    if as_json:
        sys.stdout.write(json.dumps(score.record()) + "\n")
        warn_of_failing([] if score.gold_ran else [pair.example.db_id])
    else:
        columns = columns_of()(pair.example)
        page = render_page(pair.pred, pair.example.gold_sql, score, columns)
        Console(highlight=False).print(page)


def _score_file_of_pairs(options: argparse.Namespace, config: ExecutorConfig) -> None:
    if not options.json:
        raise UserError("--file gives JSON lines: add --json")
    with _lines(options.out) as write:
        for record in write_scores(read_pairs(options.file), config):
            write(record)


def _score_predictions(options: argparse.Namespace, config: ExecutorConfig) -> None:
    if options.data_root is None or options.data is None:
        raise UserError("--predictions needs the questions: --data-root and --data")
    examples = _examples(options)
    # With --json and nowhere else to write, the lines take the place of the tables.
    is_table = bool(options.out) or not options.json
    with _lines(options.out or (Path(os.devnull) if is_table else None)) as write:
        episodes = [path for path in options.predictions if is_trajectories(path)]
        queries = [path for path in options.predictions if path not in episodes]
        tables = [
            *_tables_of_queries(queries, examples, config, write),
            *_tables_of_episodes(episodes, examples, config, write),
        ]
    if is_table:
        Console().print(*tables, sep="\n\n")


def _tables_of_queries(
    paths: Sequence[Path], examples: Sequence[Example], config: ExecutorConfig, write: Write
) -> list[RichTable]:
    paired = [pair_up(path, examples) for path in paths]
    jobs = [pair for pairs in paired for pair in pairs]
    scores = list(spread(make_pair_scorer, config, jobs, title="scoring"))
    warn_of_failing(
        list(dict.fromkeys(e.id for (e, _), s in zip(jobs, scores, strict=True) if not s.gold_ran))
    )
    files: list[FileScore] = []
    waiting = iter(scores)
    for path, pairs in zip(paths, paired, strict=True):
        own = list(islice(waiting, len(pairs)))
        for (example, _), score in zip(pairs, own, strict=True):
            write({"file": path.stem, "id": example.id, **score.record()})
        files.append(_summary(path.stem, own))
    means = [(file.name, file.means) for file in files]
    return [render(files), render_pairs(means)] if files else []


def _tables_of_episodes(
    paths: Sequence[Path], examples: Sequence[Example], config: ExecutorConfig, write: Write
) -> list[RichTable]:
    means: list[Means] = []
    for path in paths:
        episodes = read_trajectories(path, examples)
        jobs = [(example, turns) for _, example, turns in episodes]
        rewards = list(spread(make_trajectory_scorer, config, jobs, title=path.stem))
        for (record, example, _), reward in zip(episodes, rewards, strict=True):
            write({"file": str(path), "id": example.id, "step": record.get("step"), **reward})
        means.append((path.parent.name or path.stem, episode_means(rewards)))
    return [render_episodes(means)] if means else []


def _lint(options: argparse.Namespace, config: ExecutorConfig) -> None:
    examples = _examples(options)
    found = spread(lint.Linter(options.slow_s), config, examples, title="golds")
    findings = [finding for several in found for finding in several]
    if options.json:
        sys.stdout.writelines(json.dumps(finding.record()) + "\n" for finding in findings)
    else:
        Console(highlight=False).print(lint.render(findings, len(examples)))


@contextmanager
def _lines(path: Path | None) -> Generator[Write]:
    """Open what JSON lines go to: a file, or standard output."""
    if path is None:
        yield lambda record: print(json.dumps(record), flush=True)  # noqa: T201
        return
    try:
        file = path.open("w", encoding="utf-8")
    except OSError as error:
        raise UserError(f"{path}: cannot be written ({error.strerror})") from None
    with file:
        yield lambda record: print(json.dumps(record), file=file)


def score_file(path: Path, examples: Sequence[Example], executor: Executor) -> FileScore:
    """Score the predictions of a file, one an example and in their order, in this process."""
    bench = Workbench(executor, columns_of())
    pairs = pair_up(path, examples)
    return _summary(path.stem, [bench.score(*pair).without_results() for pair in pairs])


def render(scores: Sequence[FileScore]) -> RichTable:
    """Lay the scores out, one column a file; shares in percent."""
    table = RichTable("", *(escape(score.name) for score in scores), title="Diagnostic tree")
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


def _summary(name: str, scores: Sequence[PairScore]) -> FileScore:
    found = [score.diagnosis for score in scores]
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
        accuracy=share * sum(score.ex["set"] for score in scores),
        struct=sum(one.struct for one in found) / len(found),
        lexical=sum(score.lexical for score in scores) / len(found),
        unparsed=share * sum(not one.pred_parsed for one in found),
        categories=categories,
        tags={tag: share * tags[tag] for tag in TAG_SENTENCES},
        means=pair_means(scores),
    )


def _examples(options: argparse.Namespace) -> tuple[Example, ...]:
    source = SourceConfig(
        layout=options.layout, path=options.data_root, split="dev", file=str(options.data)
    )
    config = DataConfig(sources=(source,), drop_failing_gold=False, drop_empty_gold=False)
    return load(config).examples


def _executor_config(options: argparse.Namespace) -> ExecutorConfig:
    named = {name: getattr(options, name) for name in ("timeout_s", "max_rows", "max_bytes")}
    try:
        return ExecutorConfig(**{name: value for name, value in named.items() if value is not None})
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        raise UserError(f"--{option}: {first['msg']}") from None


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m launch.score",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    pair = parser.add_argument_group("one pair")
    pair.add_argument("--db", metavar="FILE", help="the SQLite database")
    pair.add_argument("--gold", metavar="SQL", help="the query that answers")
    pair.add_argument("--pred", metavar="SQL", help="the prediction")
    files = parser.add_argument_group("files")
    files.add_argument("--file", type=Path, help="pairs, as JSON lines")
    files.add_argument(
        "--predictions",
        nargs="+",
        type=Path,
        metavar="FILE",
        help="files of predictions, each a column of the result",
    )
    _add_data(files)
    files.add_argument("--out", type=Path, metavar="FILE", help="write JSON lines here")
    parser.add_argument("--json", action="store_true", help="JSON in place of a page or of tables")
    _add_limits(parser)
    return parser


def _lint_parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m launch.score lint",
        description=lint.__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_data(parser, required=True)
    parser.add_argument("--slow-s", type=float, default=1.0, help="slow from here (default: 1)")
    parser.add_argument("--json", action="store_true", help="a JSON object a flaw")
    _add_limits(parser)
    return parser


def _add_data(parser: argparse._ActionsContainer, *, required: bool = False) -> None:
    parser.add_argument(
        "--data-root",
        type=Path,
        metavar="DIR",
        required=required,
        help="the data set's folder, which holds its databases",
    )
    parser.add_argument(
        "--data",
        type=Path,
        metavar="FILE",
        required=required,
        help="file of the questions and gold queries, relative to --data-root",
    )
    parser.add_argument(
        "--layout",
        default="spider",
        choices=get_args(Layout),
        metavar="NAME",
        help=f"how the data set is laid out: {', '.join(get_args(Layout))} (default: spider)",
    )


def _add_limits(parser: argparse.ArgumentParser) -> None:
    limits = parser.add_argument_group("limits of one query")
    limits.add_argument("--timeout-s", type=float, help="wall time (default: 30)")
    limits.add_argument("--max-rows", type=int, help="rows of a result (default: 1,000,000)")
    limits.add_argument("--max-bytes", type=int, help="size of a result (default: 64,000,000)")


if __name__ == "__main__":
    cli.run(main)
