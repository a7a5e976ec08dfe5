"""From downloads to checked questions: for launch.train, launch.eval and other programs.

    python -m launch.prepare --data-root downloads --out prepared
    python -m launch.prepare --data-root data --sample progress --out prepared --tokenizer qwen
    python -m launch.prepare --data-root spider_data/dev.json --only check
    python -m launch.train --cfg prepared/job.yaml
    python -m launch.eval --cfg progress.yaml data.root=prepared --data test

--data-root is one download (BIRD, Spider, its Syn, Realistic and DK variants, SynSQL-2.5M, Spider
2), a folder with several of them, OmniSQL's data/, or a question file in a data set's folder. Every
file is read to its end first; then every gold query is run in several ways on all cores. The folder
that --out names holds a file of questions for each set, schemas of the databases,
gold_issues.jsonl (gold queries that fail, return nothing, are slow or non-deterministic),
prepared.json (the summary) and job.yaml (settings for launch.train and launch.eval). With data.root
set to it, any config finds there the sets that its sources name, and no gold query is run again.
Run the same command again to resume.
"""

from __future__ import annotations

import argparse
import math
from pathlib import Path

import yaml
from pydantic import ValidationError

from launch import cli
from launch.config import JobConfig, load_config
from launch.data.contamination import refuse
from launch.data.mixtures import PrepareRequest
from launch.data.samples import SAMPLES
from launch.data.sets import prepare
from launch.data.summary import JOB, Summary, job_settings, remarks, render
from launch.run_folder import check, claimed
from launch.texts import write_json, write_text
from sqlenv.config import SourceConfig
from sqlenv.data.detection import choose_sets, detect
from sqlenv.data.layouts import MANIFEST, SETS, locate, other_dataset
from sqlenv.data.prepared import DATABASES, DatabaseEntry
from sqlenv.data.records import read_records
from sqlenv.dialects import NAMES
from sqlenv.errors import UserError
from sqlenv.types import Dialect


def main(arguments: list[str]) -> None:
    """Run the command."""
    options = _parser().parse_intermixed_args(arguments)
    # argparse gives a list of names all that follows, settings too.
    options.overrides += [name for name in options.data if "=" in name]
    options.data = [name for name in options.data if "=" not in name]
    cfg = options.cfg or (SAMPLES[options.sample].cfg if options.sample else "progress.yaml")
    request = _request(options, load_config(cfg, options.overrides))
    if options.json and options.json.is_dir():
        raise UserError(f"--json {options.json}: is a folder; name a file")
    settings = _settings(request, options.data_root, cfg)
    check(request.folder, settings, key="--out")
    summary = _complete(request)
    if summary is None:
        with claimed(request.folder, settings, key="--out"):
            summary = _prepare(request, cfg, is_check=options.only is not None)
    else:
        _refuse(summary, request)
        cli.console.print(f"This is complete: {request.folder}", soft_wrap=True)
    if options.json:
        write_json(options.json, summary.model_dump(mode="json"))
    cli.output.print(render(summary))
    for line in remarks(summary, request):
        cli.output.print(line, soft_wrap=True)
    if options.only is None:
        command = "launch.train" if request.learned else "launch.eval"
        line = f"to use it: python -m {command} --cfg {request.folder / JOB}"
        cli.output.print(line, soft_wrap=True)


def _prepare(request: PrepareRequest, cfg: str, *, is_check: bool) -> Summary:
    """Prepare what is asked for; the summary appears last, and only when all is there."""
    manifest = request.folder / MANIFEST
    manifest.unlink(missing_ok=True)
    files = _stamps(request)
    summary = prepare(request, files, writes_sets=not is_check)
    if not is_check:
        _refuse(summary, request)
        write_text(request.folder / JOB, job_settings(request, summary, cfg))
        write_json(manifest, summary.model_dump(mode="json"))
    return summary


def _refuse(summary: Summary, request: PrepareRequest) -> None:
    data = request.job.data
    if data.overlap == "refuse":
        refuse(summary.contamination, excluded=data.train.exclude_databases)


def _complete(request: PrepareRequest) -> Summary | None:
    """Return the summary of a folder that is up to date."""
    folder = request.folder
    try:
        summary = Summary.model_validate_json((folder / MANIFEST).read_bytes())
        lines = (folder / DATABASES).read_bytes().splitlines()
        entries = map(DatabaseEntry.model_validate_json, lines)
        same = all(Path(one.database).stat().st_size == one.bytes for one in entries)
        there = all((folder / f"{name}.jsonl").is_file() for name in summary.sets)
        return summary if same and there and summary.files == _stamps(request) else None
    except (OSError, ValidationError):
        return None


def _stamps(request: PrepareRequest) -> dict[str, tuple[int, int]]:
    """Tell this version of the question files from others."""
    files = (file for source in request.sources.values() for file in locate(source).files)
    stats = ((str(file.resolve()), file.stat()) for file in files)
    return {name: (stat.st_size, stat.st_mtime_ns) for name, stat in stats}


def _request(options: argparse.Namespace, job: JobConfig) -> PrepareRequest:
    root, out, sample = options.data_root, options.out, options.sample or ""
    if root.is_file():
        sources = _question_file(root, NAMES[options.dialect])
    else:
        sources = choose_sets(root, _names(options.data, sample))
    parts = dict.fromkeys(part.name for part in SAMPLES[sample].parts) if sample else {}
    if missing := [name for name in parts if name not in sources]:
        raise UserError(
            f"--sample {sample}: needs {', '.join(missing)}, which --data-root does not have; it "
            f"has {', '.join(sources)}"
        )
    if out.resolve() == root.resolve():
        raise UserError(f"--out {out}: is --data-root too; write to another folder")
    if options.tokenizer and not (options.tokenizer / "tokenizer.json").is_file():
        raise UserError(
            f"--tokenizer {options.tokenizer}: no tokenizer.json in it; give a Hugging Face folder"
        )
    style = job.prompt.schema_style
    validation = SAMPLES[sample].validation if sample else 0
    changes = {"comments": "full" if style == "profile" else "names"}
    request = PrepareRequest(
        sources={name: source.model_copy(update=changes) for name, source in sources.items()},
        folder=out,
        job=job,
        value_matches=style == "omnisql" and not options.no_value_matches,
        slow_s=options.slow_s,
        tokenizer=options.tokenizer,
        sample=sample,
        validation=validation if options.validation is None else options.validation,
        seed=options.seed,
        drop_missing=options.drop_missing,
    )
    if request.validation and not request.learned:
        raise UserError(
            f"--validation {request.validation}: no data set to learn from is there, only "
            f"{', '.join(sources)}"
        )
    return request


def _question_file(file: Path, dialect: Dialect) -> dict[str, SourceConfig]:
    """Find the data set that a question file is of, by its place or the fields of its records."""
    for name, source in detect(file.parent).sources.items():
        if [one.resolve() for one in locate(source).files] == [file.resolve()]:
            return {name: source.model_copy(update={"dialect": dialect})}
    layout = other_dataset("spider", next(read_records(file))) or "spider"
    try:
        source = SourceConfig.model_validate(
            {"layout": layout, "path": file.parent, "split": "dev", "file": file.name}
        )
    except ValidationError:
        raise UserError(f"--data-root {file}: its records are of {layout}") from None
    return {file.stem: source.model_copy(update={"dialect": dialect})}


def _names(named: list[str], sample: str) -> list[str]:
    """Name the data sets that are asked for; none for all that are there."""
    if unknown := [name for name in named if name not in SETS]:
        raise UserError(f"--data {unknown[0]}: no such data set; there are {', '.join(SETS)}")
    parts = [part.name for part in SAMPLES[sample].parts] if named and sample else []
    return list(dict.fromkeys([*named, *parts]))


def _settings(request: PrepareRequest, data_root: Path, cfg: str) -> str:
    """Write down what decides the questions."""
    job, tokenizer = request.job, request.tokenizer
    settings = {
        "data_root": str(data_root.resolve()),
        "sets": list(request.sources),
        "sample": request.sample,
        "validation": request.validation,
        "seed": request.seed,
        "cfg": cfg,
        "value_matches": request.value_matches,
        "slow_s": request.slow_s,
        "drop_missing": request.drop_missing,
        "exclude_databases": list(job.data.train.exclude_databases),
        "tokenizer": str(tokenizer.resolve()) if tokenizer else None,
        "max_prompt_tokens": job.sampler.max_prompt_tokens,
        "prompt": job.prompt.model_dump(mode="json"),
        "env": job.env.model_dump(mode="json"),
        "executor": job.executor.model_dump(mode="json", exclude={"workers", "cache_dir"}),
    }
    return yaml.safe_dump(settings, sort_keys=False, width=100)


def _parser() -> argparse.ArgumentParser:
    parser = cli.Parser(
        prog="python -m launch.prepare",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--data-root",
        type=Path,
        required=True,
        metavar="PATH",
        help="folder of the downloads, or a question file in a data set's folder",
    )
    parser.add_argument(
        "--out",
        type=Path,
        default=Path("prepared"),
        metavar="DIR",
        help="folder that is written (default: prepared)",
    )
    parser.add_argument(
        "--only",
        choices=("check",),
        help="check the gold queries and write gold_issues.jsonl, but no sets",
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
        type=cli.read_seed,
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
        "--no-value-matches", action="store_true", help="do not look for values that questions name"
    )
    parser.add_argument(
        "--drop-missing",
        action="store_true",
        help="leave out questions whose database is not there or cannot be read",
    )
    parser.add_argument(
        "--slow-s", type=_seconds, default=1.0, help="golds are slow from here (default: 1)"
    )
    parser.add_argument(
        "--dialect",
        default="sqlite",
        choices=tuple(NAMES),
        metavar="NAME",
        help="of the gold queries of a question file whose records do not say it: "
        f"{', '.join(NAMES)} (default: sqlite)",
    )
    parser.add_argument("--json", type=Path, metavar="FILE", help="write the summary here too")
    parser.add_argument(
        "overrides",
        nargs="*",
        metavar="key.sub=value",
        help="settings in place of the config's, for example executor.timeout_s=10",
    )
    return parser


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: write a number of seconds above 0")
    return value


if __name__ == "__main__":
    cli.run(main)
