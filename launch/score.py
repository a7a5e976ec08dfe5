"""The reward workbench: what every reward family says of predictions. No JAX, no GPU.

    python -m launch.score --db shop.sqlite --gold "SELECT …" --pred "SELECT …"
    python -m launch.score --file pairs.jsonl --json
    python -m launch.score --predictions model.sql --data-root spider_data --data dev.json

One pair gives a page, or with --json one object. A file of pairs has a JSON object a line with
`id`, `database` (a path), `gold_sql` and `pred`. A file of predictions has one a line, SQL or
(.jsonl) JSON with a field `pred` or `sql`, such as the predictions.jsonl of launch.train and
launch.eval, or is BIRD's JSON: it gives tables over all families and over the tags of
Progress-SQL's diagnostic tree (table 8 of its paper). Lines are matched with questions by their
ids, else by `question` (and `db_id`), else by their order. trajectories.jsonl of a run gives the
reward of its episodes by every family.
"""

from __future__ import annotations

import json
from argparse import Namespace
from collections.abc import Callable, Generator, Mapping, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from itertools import islice
from pathlib import Path
from typing import Any, get_args

from pydantic import ValidationError

from exchange import UserError
from launch import cli
from launch.evaluation.pairs import make_pair, read_pairs, score_all, warn_of_failing
from launch.evaluation.predictions import (
    Paired,
    Played,
    is_trajectories,
    pair_up,
    read_trajectories,
)
from launch.evaluation.process_pool import (
    make_trajectory_scorer,
    open_workbench,
    spread,
)
from launch.evaluation.questions import check_databases, check_golds
from launch.reporting.pair_view import render_page
from launch.reporting.score_tables import (
    Means,
    episode_means,
    pair_means,
    render_episodes,
    render_pairs,
)
from launch.texts import check_new
from minirl.errors import describe
from minirl.run.files import naming, whole_file
from rewards.execution import columns_of
from sqlenv.config import ExecutorConfig, Layout, SourceConfig
from sqlenv.data.layouts import DATASETS, SETS, other_dataset
from sqlenv.data.loading import read_all
from sqlenv.data.records import read_records
from sqlenv.dialects import NAMES
from sqlenv.executor.database import check_contents
from sqlenv.types import Example, Numbers

Write = Callable[[Mapping[str, Any]], None]


def main(arguments: Sequence[str]) -> None:
    """Run the command: one pair, a file of pairs, or files of predictions."""
    options = _read(arguments)
    config = _limits(options)
    if options.out:
        check_new(options.out, "--out")
    pair = {"database": options.db, "gold_sql": options.gold, "pred": options.pred}
    given = [any(part is not None for part in pair.values()), options.file, options.predictions]
    if sum(map(bool, given)) != 1 or (given[0] and (options.out or None in pair.values())):
        raise UserError(
            "give one pair (all of --db, --gold and --pred, and no --out), a file of pairs "
            "(--file) or files of predictions (--predictions)"
        )
    if options.file:
        _score_file_of_pairs(options, options.file, config)
    elif options.predictions:
        _score_predictions(options, options.predictions, config)
    else:
        _score_pair(pair, options, config)


def _score_pair(fields: Mapping[str, str], options: Namespace, config: ExecutorConfig) -> None:
    pair = make_pair(fields, options.dialect)
    check_contents(pair.example.database)
    with open_workbench(config.model_copy(update={"workers": 1}), options.numbers) as bench:
        score = bench.score(pair.example, pair.pred)
    if options.json:
        _print(score.record())
    else:
        columns = columns_of()(pair.example)
        console = cli.Console(highlight=False)
        gold_sql = pair.example.gold_sql
        console.print(render_page(pair.pred, gold_sql, score, columns, width=console.width))
    warn_of_failing([] if score.gold_ran else [pair.example.db_id])


def _score_file_of_pairs(options: Namespace, path: Path, config: ExecutorConfig) -> None:
    if not (options.json or options.out):
        raise UserError("--file gives JSON lines: add --json, or --out FILE")
    pairs = read_pairs(path, options.dialect)
    with _lines(options) as write:
        check_databases(pair.example.database for pair in pairs)
        scores = score_all([(pair.example, pair.pred) for pair in pairs], config, options.numbers)
        for pair, score in zip(pairs, scores, strict=True):
            write({"id": pair.id, **score.record()})


def _score_predictions(options: Namespace, paths: Sequence[Path], config: ExecutorConfig) -> None:
    if options.data is None:
        raise UserError("--predictions needs the questions: --data FILE")
    examples = _examples(options)
    paired: list[tuple[str, Paired]] = []
    played: list[tuple[str, Sequence[Played]]] = []
    for name, path in zip(short_names(paths), paths, strict=True):
        if is_trajectories(path):
            played.append((name, read_trajectories(path, examples)))
        else:
            paired.append((name, pair_up(path, examples)))
    asked = [example for _, pairs in paired for example, _ in pairs]
    asked += [example for _, episodes in played for _, example, _ in episodes]
    check_golds(list(dict.fromkeys(asked)))
    with _lines(options) as write:
        check_databases(example.database for example in asked)
        pairs = _score_queries(paired, config, options.numbers, write)
        rewards = _score_episodes(played, config, options.numbers, write)
    # With --json and nowhere else to write, the lines take the place of the tables.
    if options.out or not options.json:
        console = cli.Console()
        width = console.width
        tables = (*render_pairs(pairs, width=width), *render_episodes(rewards, width=width))
        console.print(*tables, sep="\n\n")


def _score_queries(
    files: Sequence[tuple[str, Paired]], config: ExecutorConfig, numbers: Numbers, write: Write
) -> list[Means]:
    every = [pair for _, pairs in files for pair in pairs]
    scores = iter(list(score_all(every, config, numbers)))
    means: list[Means] = []
    for name, pairs in files:
        own = list(islice(scores, len(pairs)))
        for (example, _), score in zip(pairs, own, strict=True):
            write({"file": name, "id": example.id, **score.record()})
        means.append((name, pair_means(own)))
    return means


def _score_episodes(
    files: Sequence[tuple[str, Sequence[Played]]],
    config: ExecutorConfig,
    numbers: Numbers,
    write: Write,
) -> list[Means]:
    make = partial(make_trajectory_scorer, numbers=numbers)
    means: list[Means] = []
    for name, episodes in files:
        jobs = [(example, turns) for _, example, turns in episodes]
        rewards = list(spread(make, config, jobs, title=name))
        for (record, example, _), reward in zip(episodes, rewards, strict=True):
            write({"file": name, "id": example.id, "step": record.get("step"), **reward})
        means.append((name, episode_means(rewards)))
    return means


def short_names(paths: Sequence[Path]) -> list[str]:
    """Name files by their stems, led by as many folders as it takes to tell them apart: runs call
    all their files alike.
    """
    parts = [(*path.parts[:-1], path.stem) for path in paths]
    for count in range(1, max(map(len, parts), default=0) + 1):
        names = ["/".join(each[-count:]) for each in parts]
        if len(set(names)) == len(set(paths)):
            return names
    return [str(path) for path in paths]  # alike but for their endings


@contextmanager
def _lines(options: Namespace) -> Generator[Write]:
    """Open what JSON lines go to: a file, else standard output with --json, else nothing."""
    if options.out is None:
        yield _print if options.json else lambda _record: None
        return
    with ExitStack() as stack:
        try:
            options.out.absolute().parent.stat()  # a folder that is not there is rather a slip
            file = stack.enter_context(whole_file(options.out))
        except OSError as error:
            reason = error.strerror
            raise UserError(f"--out {options.out}: cannot be written ({reason})") from None
        yield lambda record: print(json.dumps(record), file=file)


def _print(record: Mapping[str, Any]) -> None:
    with naming(Path("standard output")):
        print(json.dumps(record), flush=True)  # noqa: T201


def _examples(options: Namespace) -> tuple[Example, ...]:
    data, layout = options.data, options.layout
    if (named := SETS.get(str(data))) and options.data_root:
        source = named.at(options.data_root)
        return read_all(source.model_copy(update={"dialect": NAMES[options.dialect]}))
    root, file = (options.data_root, data) if options.data_root else (data.parent, Path(data.name))
    option = "--data-root" if options.data_root else f"--data {data}:"
    if not root.is_dir():
        raise UserError(f"{option} {root}: no such folder; give the data set's")
    places = [root / base / file for base in (DATASETS[layout].omnisql, "")]
    questions = next((path for path in places if path.is_file()), None)
    if questions is None:
        raise UserError(f"--data {file}: not in {root}; give one of its files")
    if other := other_dataset(layout, next(read_records(questions))):
        advice = f"say --layout {other}" if other in DATASETS else "give the data set's own file"
        raise UserError(f"--data {file}: its records are of {other}, not of {layout}; {advice}")
    dialect = NAMES[options.dialect]
    source = SourceConfig(layout=layout, path=root, split="dev", file=str(file), dialect=dialect)
    try:
        return read_all(source)
    except UserError as error:
        raise UserError(f"--data {file} as --layout {layout}: {error}") from None


def _limits(options: Namespace) -> ExecutorConfig:
    named = {name: getattr(options, name) for name in ("timeout_s", "max_rows", "max_bytes")}
    given = {name: value for name, value in named.items() if value is not None}
    try:
        return ExecutorConfig(isolation="process", **given)
    except ValidationError as error:
        first = error.errors()[0]
        option = str(first["loc"][0]).replace("_", "-")
        raise UserError(f"--{option}: {describe(first)}") from None


def _read(arguments: Sequence[str]) -> Namespace:
    parser = cli.Parser("launch.score", __doc__)
    file: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    add = parser.add_argument_group("one pair").add_argument
    add("--db", metavar="FILE", help="the SQLite database")
    add("--gold", metavar="SQL", help="the query that answers")
    add("--pred", metavar="SQL", help="the prediction")
    add = parser.add_argument_group("files").add_argument
    add("--file", type=Path, help="pairs, as JSON lines")
    add("--predictions", nargs="+", **file, help="files, each a column of the result")
    root = "the data set's folder, which holds its databases (default: the folder of --data)"
    add("--data-root", type=Path, metavar="DIR", help=root)
    data = "a data set by name, such as spider-dev, or a file of questions; below --data-root"
    add("--data", **file, help=data)
    layouts = get_args(Layout)
    add(
        "--layout", default="spider", choices=layouts, metavar="NAME",
        help=f"how the data set is laid out: {', '.join(layouts)} (default: spider)",
    )  # fmt: skip
    add("--out", **file, help="write JSON lines here")
    parser.add_argument("--json", action="store_true", help="JSON in place of a page or of tables")
    parser.add_argument(
        "--dialect", default="sqlite", choices=tuple(NAMES), metavar="NAME",
        help=f"what queries are written in, where a record does not say it: {', '.join(NAMES)} "
        "(default: sqlite); others run on SQLite where they mean the same there",
    )  # fmt: skip
    parser.add_argument(
        "--numbers", default="close", choices=get_args(Numbers), metavar="RULE",
        help="when two numbers are the same: close (their last bits may differ; the default) or "
        "exact (as in official programs)",
    )  # fmt: skip
    add = parser.add_argument_group("limits of one query").add_argument
    add("--timeout-s", type=float, help="wall time (default: 30)")
    add("--max-rows", type=int, help="rows of a result (default: 1,000,000)")
    add("--max-bytes", type=int, help="size of a result (default: 64,000,000)")
    return parser.parse_args(arguments)


if __name__ == "__main__":
    cli.run(main)
