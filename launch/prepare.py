"""Check data sets, and warm the cache that launch.train and launch.eval look into.

    python -m launch.prepare --data-root downloads
    python -m launch.prepare --cfg progress.yaml --data-root downloads --data bird-train bird-dev
    python -m launch.prepare --data-root spider_data/dev.json
    python -m launch.prepare --cfg plain.yaml --data-root downloads --export trl --out train.parquet

--data-root is one download (BIRD, Spider, its Syn, Realistic and DK variants, SynSQL-2.5M, Spider
2), a folder with several of them, OmniSQL's data/, or a question file in a data set's folder. Every
gold query is run on all cores; those to look at (they fail, return nothing, or depend on chance)
are written to doubtful.jsonl. What takes long, such as gold results, the values that questions name
and witnesses (env.witnesses=8), is kept in the cache of the user (below MINIRL_CACHE, if that is
set), under the contents of files: no command has to be pointed to it. Run the same command again to
resume, or after a change of the data. With --export nothing is checked but what is written: rows
for TRL, verl or SkyRL (docs/rewards.md).
"""

from __future__ import annotations

import json
import logging
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import Annotated, Literal

from cyclopts import Parameter

from launch import cli, options
from launch.build import SqlSide
from launch.config import JobConfig, load_config
from launch.data.preflight import check_data
from launch.data.prompts import Prompts
from launch.files import check_new, write_text
from minirl.exchange import UserError, broken
from minirl.run.files import whole_file
from rewards.execution import gold_result
from sqlenv.cache import cache_folder, shared_cache
from sqlenv.config import DataConfig, SourceConfig
from sqlenv.data.layouts import SETS, AbsentError, find_set, locate
from sqlenv.data.records import Record
from sqlenv.data.sources import Checked, Pool, issues_of
from sqlenv.dialects import dialect_of
from sqlenv.envs.single_turn import witnesses_of
from sqlenv.executor import Executor
from sqlenv.executor.database import check_contents
from sqlenv.types import Example, Observation, describe_failure
from sqlenv.witness.store import open_store

_log = logging.getLogger(__name__)

TrainerName = Literal["trl", "verl", "skyrl"]


@options.command
def main(
    *overrides: options.Overrides,
    data_root: Path | None = None,
    data: Annotated[
        tuple[str, ...],
        Parameter(
            help=f"data sets: {', '.join(SETS)} (default: all that are there)",
            consume_multiple=True,
        ),
    ] = (),
    cfg: str = "progress.yaml",
    export: TrainerName | None = None,
    out: Path | None = None,
    dialect: options.DialectOption = "sqlite",
) -> None:
    """Check data sets, and warm the cache.

    Args:
        data_root: folder of the downloads, or a question file (default: data.root)
        cfg: the job that the data is for: form of prompts, limits of queries (default:
            progress.yaml)
        export: write rows for another trainer to --out, a .parquet or .jsonl file: the questions of
            --data, else those that the config learns from, with their prompts
        out: a new file to write (default: doubtful.jsonl, or with --export TRAINER.jsonl, each
            time anew)
    """
    if out:
        check_new(out, "--out")
    out = out or Path(f"{export or 'doubtful'}.jsonl")
    if export:
        _check_rows_file(out)
    # What follows --data may be a setting too.
    job = load_config(cfg, [*overrides, *(word for word in data if "=" in word)])
    root = data_root or job.data.root
    if root is None:
        raise UserError(f"--data-root: give the folder of the data; {cfg} generates its own")
    names = [word for word in data if "=" not in word]
    is_named = bool(names) or root.is_file()
    sources = _sources(root, names, job, dialect) if is_named or not export else []
    if export:
        _export(export, out, job, root, sources)
        return
    write_text(out, "".join(check_sets(job, sources)))
    cli.output.print(f"Golds to look at, one a line: {out}")
    cli.output.print(f"Cache of all runs: {cache_folder('sql')}")


def _sources(root: Path, names: Sequence[str], job: JobConfig, dialect: str) -> list[SourceConfig]:
    """Find the data sets of these names, or all that are there, or that of a question file."""
    # A part of how the job puts its questions.
    comments = "full" if job.prompt.schema_style == "profile" else "names"
    own = {"comments": comments, "dialect": dialect_of(dialect)}
    if root.is_file():
        return [find_set(root.parent, root.absolute()).model_copy(update=own)]
    found = []
    for name in dict.fromkeys(options.choose("--data", name, SETS) for name in names or SETS):
        source = SETS[name].at(root, own["dialect"]).model_copy(update=own)
        try:
            locate(source)
        except UserError as error:
            if names:
                raise UserError(f"--data-root: {name}: {error}") from None
            if not isinstance(error, AbsentError):
                _log.warning("left out: %s: %s", name, error)
        else:
            found.append(source)
    if not found:
        raise UserError(f"--data-root {root}: no data set recognised in it (docs/data.md)")
    return found


def check_sets(job: JobConfig, sources: Iterable[SourceConfig]) -> list[str]:
    """Check all questions of data sets by what a job asks for, and warm the cache; return golds to
    look at, a line each, and tell what there is of each set.
    """
    prompts, witnesses, doubtful = Prompts(job.prompt, job.env), open_store(job.env), list[str]()
    with Executor(job.executor, shared_cache()) as executor:

        def inspect(example: Example) -> Checked:
            try:
                check_contents(example.database)
            except UserError as error:
                return Checked(example, ("unreadable database",), str(error))
            prompts.matches(example)
            if witnesses is not None:
                witnesses_of(example, witnesses)
            result = gold_result(executor, example)
            return Checked(example, issues_of(result), describe_failure(result))

        def check(examples: Sequence[Example]) -> Iterator[Checked]:
            for checked in executor.map(inspect, examples):
                if {*checked.issues} - {"scalar"}:
                    doubtful.append(_line(checked) + "\n")
                yield checked

        with cli.progress_bar("reading"):
            pools = [Pool(source, _everything(job, source), check) for source in sources]
        for pool in pools:
            with cli.progress_bar(f"checking {pool.name}") as update:
                for done, (_, example) in enumerate(pool.draw(pool.left), 1):
                    if not example.gold_sql:  # which nothing checks
                        prompts.matches(example)
                    update(done, pool.total, "")
            cli.output.print(pool.line())
    return doubtful


def _everything(job: JobConfig, source: SourceConfig) -> DataConfig:
    """Ask for every question that has a database, but those that the job does not learn from."""
    excluded = job.data.train.exclude_databases if source.split == "train" else ()
    return DataConfig(
        sources=(source,), exclude=(), exclude_databases=excluded, drop_missing_database=True
    )


def _line(checked: Checked) -> str:
    one, found = checked.example, {"issues": checked.issues, "note": checked.note}
    asked = {"id": one.id, "question_id": one.question_id, "db_id": one.db_id}
    return json.dumps(asked | found | {"gold_sql": one.gold_sql}, ensure_ascii=False)


def _export(
    trainer: TrainerName, out: Path, job: JobConfig, root: Path, named: Sequence[SourceConfig]
) -> None:
    """Write the questions of the sets that are named, else those that the job learns from."""
    data = job.data.model_copy(update={"root": root, "demo": None})
    if named:  # all of them, and by their own paths
        train = data.train.model_copy(update={"sources": tuple(named), "total": None})
        data = data.model_copy(update={"root": Path(), "train": train, "held_out": None})
    job = job.model_copy(update={"data": data})
    check_data(job, "train")
    with SqlSide(job, Path()) as sql:
        written = rows(trainer, sql.examples("train"), sql.prompts.training)
    _write_rows(out, written)
    cli.output.print(f"{len(written):,} rows for {trainer}: {out}")
    if job.prompt.template:
        setting = _TEMPLATE[trainer]
        cli.output.print(f"prompt.template: set {setting} to {job.prompt.template}")


def rows(
    trainer: TrainerName, examples: Sequence[Example], prompt: Callable[[Example], Observation]
) -> list[Record]:
    """Write questions with their prompts, as messages, in the form that a trainer loads.

    Marks of turns in prompts are broken. The rewards of `rewards.adapters` find what they need: the
    gold query, the path of the database, and where some question has them more gold queries and its
    own rule.
    """
    names = ["id", "question_id", "db_id", "question", "evidence", "dialect"]
    names += ["grading_method"] * any(one.grading_method for one in examples)
    has_more = any(one.alternatives for one in examples)
    found = []
    for one in examples:
        facts: Record = {name: getattr(one, name) for name in names}
        facts["database"] = str(one.database.resolve())
        facts |= {"alternatives": list(one.alternatives)} if has_more else {}
        messages = [{"role": m.role, "content": broken(m.content)} for m in prompt(one)]
        found.append(_row(trainer, messages, one.gold_sql, facts))
    return found


def _row(trainer: TrainerName, prompt: Sequence[Record], gold_sql: str, facts: Record) -> Record:
    match trainer:
        case "trl":
            return {"prompt": prompt, "gold_sql": gold_sql, **facts}
        case "verl":
            reward = {"style": "rule", "ground_truth": gold_sql}
            name = {"data_source": "sql", "ability": "sql"}
            return {**name, "prompt": prompt, "reward_model": reward, "extra_info": facts}
        case "skyrl":
            reward = {"method": "rule", "ground_truth": gold_sql}
            return {"prompt": prompt, "env_class": "sql", "reward_spec": reward, **facts}


# Where each trainer takes arguments of the chat template: rows have none.
_TEMPLATE: Mapping[TrainerName, str] = {
    "trl": "GRPOConfig.chat_template_kwargs",
    "verl": "data.apply_chat_template_kwargs",
    "skyrl": "generator.chat_template_kwargs",
}


def _check_rows_file(path: Path) -> None:
    """Refuse a file that rows cannot be written to, before the work that makes them."""
    if path.suffix not in (".parquet", ".jsonl"):
        raise UserError(f"--out {path}: name a .parquet or a .jsonl file")
    if path.suffix == ".parquet" and find_spec("pyarrow") is None:
        raise UserError(
            f"--out {path}: Parquet needs pyarrow, which TRL and verl bring along: "
            "pip install pyarrow, or name a .jsonl file"
        )


def _write_rows(path: Path, written: Sequence[Record]) -> None:
    """Write rows as Parquet (.parquet) or as JSON lines (.jsonl), whole or not at all."""
    with whole_file(path) as file:
        if path.suffix == ".jsonl":
            file.writelines(json.dumps(row, ensure_ascii=False) + "\n" for row in written)
            return
        import pyarrow
        from pyarrow import parquet

        parquet.write_table(pyarrow.Table.from_pylist(list(written)), file.buffer)


if __name__ == "__main__":
    cli.run(main)
