"""From downloads to checked questions: for launch.train, launch.eval and other programs.

    python -m launch.prepare --data-root downloads --out prepared
    python -m launch.prepare --data-root data --sample progress --out prepared --tokenizer qwen
    python -m launch.train --cfg prepared/job.yaml
    python -m launch.eval --cfg progress.yaml data.root=prepared --data test

--data-root is one download (BIRD, Spider, its Syn, Realistic and DK variants, SynSQL-2.5M, Spider
2), a folder with several of them, or OmniSQL's data/. Every file is read to its end first; then
every gold query is run in several ways on all cores. The folder that --out names holds a file of
questions for each set, schemas of the databases, flaws.jsonl (golds that fail, return nothing, are
slow or are not decided by the query), prepared.json (the summary) and job.yaml (settings for
launch.train and launch.eval). With data.root set to it, any config finds there the sets that its
sources name, and no gold query is run again. The same command goes on where an interrupted one was.
"""

from __future__ import annotations

import argparse
import json
import math
from pathlib import Path
from typing import Any

import yaml

from launch import cli
from launch.config import JobConfig, load_config
from launch.folders import check, claimed
from launch.inspection import Preparation
from launch.leaks import Leak, refuse
from launch.prepare_job import prepare
from launch.prepare_plan import Request
from launch.prepare_report import JOB, job_settings, remarks, render, summarise
from launch.samples import SAMPLES, check_sample
from launch.texts import write_json, write_text
from sqlenv.data.detection import choose_sets
from sqlenv.data.layouts import MANIFEST, SETS, locate
from sqlenv.data.prepared import DATABASES
from sqlenv.errors import UserError


def main(arguments: list[str]) -> None:
    """Run the command."""
    options = _parser().parse_intermixed_args(arguments)
    # argparse gives a list of names all that follows, settings too.
    options.overrides += [name for name in options.data if "=" in name]
    options.data = [name for name in options.data if "=" not in name]
    cfg = options.cfg or (SAMPLES[options.sample].cfg if options.sample else "progress.yaml")
    request = _request(options, load_config(cfg, options.overrides))
    settings = _settings(options, request, cfg)
    _check_places(options)
    check(request.folder, settings, key="--out")
    if (summary := _complete(request)) is None:
        with claimed(request.folder, settings, key="--out"):
            summary = _prepare(request, cfg)
    else:
        if request.job.data.overlap == "refuse":
            leaks = [Leak(**leak) for leak in summary["leaks"]]
            refuse(leaks, excluded=request.job.data.train.exclude_databases)
        cli.console.print(f"This is complete: {request.folder}", soft_wrap=True)
    if options.json:
        write_json(options.json, summary)
    cli.output.print(render(summary))
    for line in remarks(summary, request.folder):
        cli.output.print(line, soft_wrap=True)


def _prepare(request: Request, cfg: str) -> dict[str, Any]:
    """Prepare what is asked for; the summary appears last, and only when all is there."""
    manifest = request.folder / MANIFEST
    manifest.unlink(missing_ok=True)
    stamps = _stamps(request)
    outcome = prepare(request)
    if request.job.data.overlap == "refuse":
        refuse(outcome.leaks, excluded=request.job.data.train.exclude_databases)
    summary = summarise(request, outcome, stamps)
    write_text(request.folder / JOB, job_settings(request, outcome, cfg))
    write_json(manifest, summary)
    return summary


def _complete(request: Request) -> dict[str, Any] | None:
    """Return the summary of a folder that is up to date."""
    manifest = request.folder / MANIFEST
    try:
        summary = json.loads(manifest.read_bytes())
        lines = (request.folder / DATABASES).read_bytes().splitlines()
        entries = [json.loads(line) for line in lines]
        same = all(Path(one["database"]).stat().st_size == one["bytes"] for one in entries)
        there = all((request.folder / f"{name}.jsonl").is_file() for name in summary["sets"])
        return summary if same and there and summary["files"] == _stamps(request) else None
    except (OSError, ValueError, LookupError, TypeError):
        return None


def _stamps(request: Request) -> dict[str, list[int]]:
    """Tell this version of the question files from others."""
    files = (file for source in request.sources.values() for file in locate(source).files)
    stats = ((str(file.resolve()), file.stat()) for file in files)
    return {name: [stat.st_size, stat.st_mtime_ns] for name, stat in stats}


def _request(options: argparse.Namespace, job: JobConfig) -> Request:
    sources = choose_sets(options.data_root, _names(options))
    if options.sample:
        check_sample(options.sample, sources)
    prompt = job.prompt
    comments = "full" if prompt.schema_style == "profile" else "names"
    preparation = Preparation(
        folder=options.out,
        job=job,
        hints=prompt.schema_style == "omnisql" and not options.no_hints,
        slow_s=options.slow_s,
        tokenizer=options.tokenizer,
    )
    validation = options.validation
    if validation is None:
        validation = SAMPLES[options.sample].validation if options.sample else 0
    request = Request(
        sources={
            name: source.model_copy(update={"comments": comments})
            for name, source in sources.items()
        },
        preparation=preparation,
        sample=options.sample or "",
        validation=validation,
        seed=options.seed,
        drop_missing=options.drop_missing,
    )
    if validation and not request.learned:
        raise UserError(
            f"--validation {validation}: no data set to learn from is there, only "
            f"{', '.join(sources)}"
        )
    return request


def _names(options: argparse.Namespace) -> list[str]:
    """Name the data sets that are asked for; none for all that are there."""
    named: list[str] = options.data
    if unknown := [name for name in named if name not in SETS]:
        raise UserError(f"--data {unknown[0]}: no such data set; there are {', '.join(SETS)}")
    if named and options.sample:
        named += [part.name for part in SAMPLES[options.sample].parts]
    return list(dict.fromkeys(named))


def _check_places(options: argparse.Namespace) -> None:
    """Refuse to write into the downloads, or a tokenizer that is not there.

    Raises:
        UserError: It would.
    """
    out, root = options.out.resolve(), options.data_root.resolve()
    if out == root:
        raise UserError(f"--out {options.out}: is --data-root too; write to another folder")
    if options.tokenizer and not (options.tokenizer / "tokenizer.json").is_file():
        raise UserError(
            f"--tokenizer {options.tokenizer}: no tokenizer.json in it; give a Hugging Face folder"
        )
    if options.json and options.json.is_dir():
        raise UserError(f"--json {options.json}: is a folder; name a file")


def _settings(options: argparse.Namespace, request: Request, cfg: str) -> str:
    """Write down what decides the questions."""
    job = request.job
    executor = job.executor.model_dump(mode="json", exclude={"workers", "cache_dir"})
    tokenizer = request.preparation.tokenizer
    settings = {
        "data_root": str(options.data_root.resolve()),
        "sets": list(request.sources),
        "sample": request.sample,
        "validation": request.validation,
        "seed": request.seed,
        "cfg": cfg,
        "hints": request.preparation.hints,
        "slow_s": request.preparation.slow_s,
        "drop_missing": request.drop_missing,
        "exclude_databases": list(job.data.train.exclude_databases),
        "tokenizer": str(tokenizer.resolve()) if tokenizer else None,
        "max_prompt_tokens": job.sampler.max_prompt_tokens,
        "prompt": job.prompt.model_dump(mode="json"),
        "env": job.env.model_dump(mode="json"),
        "executor": executor,
    }
    return yaml.safe_dump(settings, sort_keys=False, width=100)


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m launch.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data-root", type=Path, required=True, metavar="DIR", help="folder of the downloads"
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("prepared"),
        metavar="DIR",
        help="folder that is written (default: prepared)",
    )
    parser.add_argument(
        "--data",
        nargs="+",
        default=[],
        metavar="NAME",
        help=f"data sets: {', '.join(SETS)} (default: all that are there)",
    )
    samples = "; ".join(f"{name} ({one.about})" for name, one in SAMPLES.items())
    parser.add_argument(
        "--sample",
        choices=tuple(SAMPLES),
        metavar="NAME",
        help=f"train.jsonl holds a paper's training questions, drawn by seed: {samples}",
    )
    parser.add_argument(
        "--validation",
        type=_count,
        metavar="N",
        help="set aside about N questions to learn from, with all questions of their databases, as "
        "validation.jsonl (default: the sample's, else none)",
    )
    parser.add_argument(
        "--seed", type=cli.read_seed, default=0, help="of samples and splits (default: 0)"
    )
    parser.add_argument(
        "--cfg",
        metavar="FILE",
        help="the job that the data is for: wording, form of schemas, limits of queries "
        "(default: the sample's, else progress.yaml)",
    )
    parser.add_argument(
        "--tokenizer", type=Path, metavar="DIR", help="count prompts with this tokenizer"
    )
    parser.add_argument(
        "--no-hints", action="store_true", help="do not look for values that questions name"
    )
    parser.add_argument(
        "--drop-missing",
        action="store_true",
        help="leave out questions whose database is not there or cannot be read",
    )
    parser.add_argument(
        "--slow-s", type=_seconds, default=1.0, help="golds are slow from here (default: 1)"
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary here too")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.sub=value",
        help="settings in place of the config's, for example executor.timeout_s=10",
    )
    return parser


def _count(text: str) -> int:
    if not text.isdigit():
        raise argparse.ArgumentTypeError(f"{text}: write a number of questions, from 0")
    return int(text)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: write a number of seconds above 0")
    return value


if __name__ == "__main__":
    cli.run(main)
