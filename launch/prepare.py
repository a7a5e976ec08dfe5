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
set to it, any config whose sources have "path: ." finds its sets there, and no gold query is run
again. Run the same command again to resume.
"""

from __future__ import annotations

import argparse
import math
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import yaml

from launch import cli
from launch.config import JobConfig, load_config
from launch.data.request import PrepareRequest
from launch.data.samples import SAMPLES
from launch.data.sets import KEYED, prepare
from launch.data.summary import JOB, job_settings, remarks, render
from launch.run_folder import claimed
from launch.texts import write_json, write_text
from sqlenv.config import DataConfig, SourceConfig
from sqlenv.data.detection import choose_sets, detect
from sqlenv.data.layouts import (
    MANIFEST,
    SETS,
    check_question_file,
    locate,
    other_dataset,
    set_name,
)
from sqlenv.data.records import read_records
from sqlenv.dialects import NAMES
from sqlenv.errors import UserError
from sqlenv.types import Dialect


def main(arguments: list[str]) -> None:
    """Run the command."""
    options = _arguments(arguments)
    cfg = options.cfg or (SAMPLES[options.sample].cfg if options.sample else "progress.yaml")
    request = _request(options, load_config(cfg, options.overrides))
    writes_sets = options.only is None
    settings = _settings(request, options.data_root, cfg)
    with claimed(request.folder, settings, key="--out", keyed=KEYED) as folder:
        summary = prepare(request, writes_sets=writes_sets)
        if writes_sets:
            write_text(folder / JOB, job_settings(request, summary, cfg))
            # It appears last, when all is there.
            write_json(folder / MANIFEST, summary.model_dump(mode="json"))
    cli.output.print(render(summary))
    for line in remarks(summary, request):
        cli.output.print(line, soft_wrap=True)
    if writes_sets:
        module = "launch.train" if request.learned else "launch.eval"
        line = f"to use it: {cli.command(module, '--cfg', folder / JOB)}"
        cli.output.print(line, soft_wrap=True, markup=False)


def _request(options: argparse.Namespace, job: JobConfig) -> PrepareRequest:
    # Whole paths: what is prepared is used from any folder.
    root, out, sample = options.data_root.absolute(), options.out, options.sample or ""
    section = SAMPLES[sample].data() if sample else None
    parts = [set_name(source) for source in section.train.sources] if section else []
    sources = _sources(root, [*options.data, *parts] if options.data else [], options.dialect)
    if missing := [name for name in parts if name not in sources]:
        raise UserError(
            f"--sample {sample}: needs {', '.join(dict.fromkeys(missing))}, which --data-root does "
            f"not have; it has {', '.join(sources)}"
        )
    for path in (source.path for source in sources.values()):
        if str(path).encode(errors="replace").decode() != str(path):
            raise UserError(f"--data-root {path}: its name is not UTF-8; rename it")
    if out.resolve() == root.resolve():
        raise UserError(f"--out {out}: is --data-root too; write to another folder")
    if options.tokenizer:
        _check_tokenizer(options.tokenizer)
    style = job.prompt.schema_style
    comments = {"comments": "full" if style == "profile" else "names"}
    sources = {name: source.model_copy(update=comments) for name, source in sources.items()}
    learned = parts or [name for name, source in sources.items() if source.split == "train"]
    mixture = _mixture(section.train if section else None, [sources[name] for name in learned])
    validation = options.validation
    if validation is None:
        validation = section.held_out or 0 if section else 0
    if validation and not learned:
        raise UserError(
            f"--validation {validation}: no data set to learn from is there, only "
            f"{', '.join(sources)}"
        )
    more = {
        "seed": options.seed,
        "drop_missing_database": options.drop_missing,
        "exclude_databases": job.data.train.exclude_databases,
    }
    return PrepareRequest(
        sources=sources,
        folder=out,
        job=job,
        learned=tuple(dict.fromkeys(learned)),
        mixture=mixture and mixture.model_copy(update=more),
        value_matches=style == "omnisql" and not options.no_value_matches,
        slow_s=options.slow_s,
        tokenizer=options.tokenizer,
        sample=sample,
        validation=validation,
        seed=options.seed,
        drop_missing=options.drop_missing,
    )


def _check_tokenizer(folder: Path) -> None:
    if not (folder / "tokenizer.json").is_file():
        raise UserError(
            f"--tokenizer {folder}: no tokenizer.json in it; give a Hugging Face folder"
        )
    # Of the learner's extra, and seconds to import.
    from minirl.model.tokenizer import ChatTokenizer

    ChatTokenizer(folder)  # a mistake in it is told here, and not by each process of a pool


def _mixture(sample: DataConfig | None, found: Sequence[SourceConfig]) -> DataConfig | None:
    """Say how data sets are learned from: as a paper does, each where it was found, or all."""
    if sample is None:
        return DataConfig(sources=tuple(found)) if found else None
    changes = ({"path": one.path, "comments": one.comments} for one in found)
    sources = zip(sample.sources, changes, strict=True)
    own = tuple(source.model_copy(update=change) for source, change in sources)
    return sample.model_copy(update={"sources": own})


def _sources(root: Path, names: Sequence[str], dialect: str) -> dict[str, SourceConfig]:
    """Find the data sets of these names, or all that are there."""
    if root.is_file():
        return _question_file(root, NAMES[dialect])
    if unknown := [name for name in names if name not in SETS]:
        raise UserError(f"--data {unknown[0]}: no such data set; there are {', '.join(SETS)}")
    return choose_sets(root, list(dict.fromkeys(names)))


def _question_file(file: Path, dialect: Dialect) -> dict[str, SourceConfig]:
    """Find the data set that a question file is of, by its place or the fields of its records."""
    check_question_file(file, key="--data-root")
    for name, source in detect(file.parent).sources.items():
        if [one.resolve() for one in locate(source).files] == [file.resolve()]:
            return {name: source.model_copy(update={"dialect": dialect})}
    layout = other_dataset("spider", next(read_records(file))) or "spider"
    where = {"layout": layout, "path": file.parent, "split": "dev", "file": file.name}
    return {file.stem: SourceConfig.model_validate({**where, "dialect": dialect})}


def _settings(request: PrepareRequest, data_root: Path, cfg: str) -> str:
    job, tokenizer = request.job, request.tokenizer
    names = ("sample", "validation", "seed", "value_matches", "slow_s", "drop_missing")
    settings = {
        "data_root": str(data_root.resolve()),
        "sets": list(request.sources),
        "cfg": cfg,
        **{name: getattr(request, name) for name in names},
        "exclude_databases": list(job.data.train.exclude_databases),
        "tokenizer": str(tokenizer.resolve()) if tokenizer else None,
        "max_prompt_tokens": job.sampler.max_prompt_tokens,
        "max_test_prompt_tokens": job.evaluation_sampler.max_prompt_tokens,
        "prompt": job.prompt.model_dump(mode="json"),
        "env": job.env.model_dump(mode="json"),
        "executor": job.executor.model_dump(mode="json", exclude={"workers", "cache_dir"}),
    }
    return yaml.safe_dump(settings, sort_keys=False, width=100)


def _arguments(arguments: list[str]) -> argparse.Namespace:
    parser = cli.Parser("launch.prepare", __doc__)
    add = parser.add_argument
    folder: dict[str, Any] = {"type": Path, "metavar": "DIR"}
    root = "folder of the downloads, or a question file in a data set's folder"
    add("--data-root", type=Path, required=True, metavar="PATH", help=root)
    add("--out", **folder, default=Path("prepared"), help="folder to write (default: prepared)")
    only = "check the gold queries and write gold_issues.jsonl, but no sets"
    add("--only", choices=("check",), help=only)
    names = f"data sets: {', '.join(SETS)} (default: all that are there)"
    add("--data", nargs="+", default=[], metavar="NAME", help=names)
    samples = "; ".join(f"{name} ({one.about})" for name, one in SAMPLES.items())
    add(
        "--sample", choices=tuple(SAMPLES), metavar="NAME",
        help=f"train.jsonl holds a paper's training questions, drawn by seed: {samples}",
    )  # fmt: skip
    add(
        "--validation", type=cli.read_seed, metavar="N",
        help="set aside about N questions to learn from, with all questions of their databases, as "
        "validation.jsonl (default: the sample's, else none)",
    )  # fmt: skip
    add("--seed", type=cli.read_seed, default=0, help="of samples and splits (default: 0)")
    add(
        "--cfg", metavar="FILE",
        help="the job that the data is for: wording, form of schemas, limits of queries "
        "(default: the sample's, else progress.yaml)",
    )  # fmt: skip
    add("--tokenizer", **folder, help="count prompts with this tokenizer")
    matches = "do not look for values that questions name"
    add("--no-value-matches", action="store_true", help=matches)
    missing = "leave out questions whose database is not there or cannot be read"
    add("--drop-missing", action="store_true", help=missing)
    add("--slow-s", type=_seconds, default=1.0, help="golds are slow from here (default: 1)")
    add(
        "--dialect", default="sqlite", choices=tuple(NAMES), metavar="NAME",
        help="of the gold queries of a question file whose records do not say it: "
        f"{', '.join(NAMES)} (default: sqlite)",
    )  # fmt: skip
    cli.add_overrides(parser)
    options = parser.parse_intermixed_args(arguments)
    # argparse gives a list of names all that follows, settings too.
    options.overrides += [name for name in options.data if "=" in name]
    options.data = [name for name in options.data if "=" not in name]
    return options


def _seconds(text: str) -> float:
    value = float(text)
    if not 0 < value < math.inf:
        raise argparse.ArgumentTypeError(f"{text}: write a number of seconds above 0")
    return value


if __name__ == "__main__":
    cli.run(main)
