"""Check data sets, and warm the cache that launch.train and launch.eval look into.

    python -m launch.prepare --data-root downloads
    python -m launch.prepare --cfg progress.yaml --data-root downloads --data bird-train bird-dev
    python -m launch.prepare --data-root spider_data/dev.json
    python -m launch.prepare --cfg plain.yaml --data-root downloads --export trl --out train.parquet

--data-root is one download (BIRD, Spider, its Syn, Realistic and DK variants, SynSQL-2.5M, Spider
2), a folder with several of them, OmniSQL's data/, or a question file in a data set's folder. Every
gold query is run in several ways on all cores; those to look at (they fail, return nothing, vary or
are undecided by ties) are written to doubtful.jsonl. What takes long, such as gold results, the
values that questions name and witnesses (env.witnesses=4), is kept in the cache of the user (below
MINIRL_CACHE, if that is set), under the contents of files: no command has to be pointed to it. Run
the same command again to resume, or after a change of the data. With --export nothing is checked
but what is written: rows for TRL, verl or SkyRL (docs/rewards.md).
"""

from __future__ import annotations

import argparse
import logging
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any, get_args

from exchange import UserError
from launch import cli
from launch.config import JobConfig, load_config
from launch.data.exporting import Trainer, rows, write_rows
from launch.data.gold_checks import check_for
from launch.data.preflight import held_out, load_split
from launch.data.preparation import Request, prepare
from launch.data.prompts import Prompts
from launch.evaluation.questions import folder_and_file
from minirl.run.files import whole_file
from sqlenv.cache import cache_folder, shared_cache
from sqlenv.config import SourceConfig
from sqlenv.data.layouts import SETS, AbsentError, find_set, locate
from sqlenv.data.loading import load
from sqlenv.dialects import NAMES
from sqlenv.executor import Executor

_log = logging.getLogger(__name__)


def main(arguments: list[str]) -> None:
    """Run the command."""
    options = _arguments(arguments)
    job = load_config(options.cfg or "progress.yaml", options.overrides)
    if options.tokenizer:
        _check_tokenizer(options.tokenizer)
    root = options.data_root or job.data.root
    if root is None:
        raise UserError(
            f"--data-root: give the folder of the data; {options.cfg} generates its own"
        )
    request = Request(job, _sources(root, options, job), options.tokenizer)
    if options.export:
        _export(options, request, root)
        return
    with whole_file(options.out) as file:
        for told in prepare(request, lambda line: file.write(line + "\n")):
            cli.output.print(told, soft_wrap=True)
    cli.output.print(f"Golds to look at, one a line: {options.out}", soft_wrap=True)
    cli.output.print(f"Cache of all runs: {cache_folder('sql')}", soft_wrap=True)


def _sources(root: Path, options: argparse.Namespace, job: JobConfig) -> Mapping[str, SourceConfig]:
    """Find the data sets of these names, or all that are there, or that of a question file."""
    folder, file = folder_and_file(root, "")
    assert folder is not None
    # A part of how the job puts its questions.
    comments = "full" if job.prompt.schema_style == "profile" else "names"
    own = {"comments": comments, "dialect": NAMES[options.dialect]}
    if file:
        source = find_set(folder, Path(file))
        return {Path(file).stem: source.model_copy(update=own)}
    if unknown := [name for name in options.data if name not in SETS]:
        raise UserError(f"--data {unknown[0]}: no such data set; there are {', '.join(SETS)}")
    found = {}
    for name in dict.fromkeys(options.data or SETS):
        source = SETS[name].at(folder).model_copy(update=own)
        try:
            locate(source)
        except UserError as error:
            if options.data:
                raise UserError(f"--data-root: {name}: {error}") from None
            if not isinstance(error, AbsentError):
                _log.warning("left out: %s: %s", name, error)
        else:
            found[name] = source
    if not found:
        raise UserError(f"--data-root {root}: no data set recognised in it (docs/data.md)")
    return found


def _export(options: argparse.Namespace, request: Request, root: Path) -> None:
    """Write the questions of the sets that are named, else those that the job learns from."""
    data = request.job.data.model_copy(update={"root": root, "demo": None})
    job = request.job.model_copy(update={"data": data})
    prompts = Prompts(job.prompt, job.env)
    with Executor(job.executor, shared_cache()) as executor:
        if options.data or root.is_file():
            sources = tuple(request.sources.values())
            named = data.train.model_copy(update={"sources": sources, "total": None})
            loaded = load(named, check=check_for(named, executor, shared_cache()))
        else:
            held = held_out(job, root, executor)
            loaded = load_split(job, "train", root, executor, held=held)
    for line in loaded.lines():
        cli.output.print(line, soft_wrap=True)
    prompts.describe(loaded.descriptions)
    written = rows(options.export, loaded.examples, prompts.training)
    write_rows(options.out, written)
    cli.output.print(f"{len(written):,} rows for {options.export}: {options.out}", soft_wrap=True)


def _check_tokenizer(folder: Path) -> None:
    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"--tokenizer {folder}: no tokenizer.json in it; give a Hugging Face folder"
        )
    # Of the learner's extra, and seconds to import.
    from minirl.model.tokenizer import ChatTokenizer

    ChatTokenizer(folder)  # a mistake in it is told here, and not by each process of a pool


def _arguments(arguments: Sequence[str]) -> argparse.Namespace:
    parser = cli.Parser("launch.prepare", __doc__)
    add = parser.add_argument
    root = "folder of the downloads, or a question file (default: the config's data.root)"
    add("--data-root", type=Path, metavar="PATH", help=root)
    names = f"data sets: {', '.join(SETS)} (default: all that are there)"
    add("--data", nargs="+", default=[], metavar="NAME", help=names)
    add(
        "--cfg", metavar="FILE",
        help="the job that the data is for: form of prompts, limits of queries (default: "
        "progress.yaml)",
    )  # fmt: skip
    add(
        "--export", choices=get_args(Trainer),
        help="write rows for another trainer to --out, a .parquet or .jsonl file: the questions of "
        "--data, else those that the config learns from, with their prompts",
    )  # fmt: skip
    out: dict[str, Any] = {"type": Path, "metavar": "FILE", "default": Path("doubtful.jsonl")}
    add("--out", **out, help="file to write, each time anew (default: doubtful.jsonl)")
    counts = "count the tokens of prompts with the tokenizer of this Hugging Face folder"
    add("--tokenizer", type=Path, metavar="DIR", help=counts)
    add(
        "--dialect", default="sqlite", choices=tuple(NAMES), metavar="NAME",
        help="of gold queries whose records do not say it: "
        f"{', '.join(NAMES)} (default: sqlite)",
    )  # fmt: skip
    cli.add_overrides(parser)
    options = parser.parse_intermixed_args(arguments)
    # argparse gives a list of names all that follows, settings too.
    options.overrides += [name for name in options.data if "=" in name]
    options.data = [name for name in options.data if "=" not in name]
    return options


if __name__ == "__main__":
    cli.run(main)
