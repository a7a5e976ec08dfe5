"""Measure execution accuracy: of a model, or of a file of predictions.

    python -m launch.eval --checkpoint runs/progress-seed0 --decode vote@8
    python -m launch.eval --checkpoint Qwen2.5-Coder-7B-Instruct --data spider-dev --data-root data
    python -m launch.eval --endpoint http://127.0.0.1:30000/v1 --model qwen --data bird-dev \\
        --data-root data --limit 200
    python -m launch.eval --predictions model.sql --data spider-dev --data-root data --json out.json

A run is asked as it was trained: prompt, environment and sampler are its own; other models are
asked with the short prompt of plain.yaml, and may answer in any form. A config (--cfg) and settings
(key=value) take the place of these.
A checkpoint (sampled in this process, or by SGLang servers of rollout.sglang), an endpoint that
speaks OpenAI's chat completions (its key in OPENAI_API_KEY) and a file are judged alike, a test set
by its official rule: verdicts.json in the folder of results, or the file that --json names, has
every verdict and means with 95 % intervals; --official adds the answers in the forms of Spider's
and BIRD's programs. judge@K is PaVeRL-SQL's verbal RL: an endpoint's model writes queries until K
run, judges them, and the best one answers. Run the same command again to resume.
"""

from __future__ import annotations

import gc
import logging
from collections.abc import Sequence
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import Annotated, Literal
from urllib.parse import urlsplit

import yaml
from cyclopts import Parameter

from launch import cli, options
from launch.build import SqlSide
from launch.config import SPLITS, JobConfig, Split, load_config
from launch.data.preflight import check_data
from launch.data.prompts import read_tokenizer, show_prompt
from launch.evaluation.answers import Decode, ModelFacts, Source
from launch.evaluation.endpoint import EndpointSource
from launch.evaluation.judge import judge_answers
from launch.evaluation.predictions import FileSource, write_official
from launch.evaluation.questions import (
    QuestionSet,
    check_databases,
    find,
    folder_and_file,
    own_set,
    question_set,
)
from launch.evaluation.results import as_json
from launch.files import CONFIG, claim_data, claimed, fingerprints
from launch.policy import PLAIN, policy_in, run_in
from launch.tables import show_report
from minirl.exchange import UserError
from sqlenv.config import OFFICIAL, DataConfig
from sqlenv.data.layouts import TEST_SETS
from sqlenv.dialects import dialect_of
from sqlenv.evaluators.votes import VoteBy
from sqlenv.executor import Executor
from sqlenv.types import Example

_log = logging.getLogger(__name__)
# Modules and queries' trees are many objects that stay: the collector would look through them again
# and again.
_GARBAGE = 100_000
_DATA = (
    f"a split of the config ({', '.join(SPLITS)}; default: test) or a published test set: "
    f"{', '.join(TEST_SETS)}"
)


@Parameter(name="*")
@dataclass(frozen=True, slots=True, kw_only=True)
class EvalOptions:
    """Whose answers, on which questions, judged by what.

    Attributes:
        checkpoint: a run folder (its best checkpoint), one of its checkpoints/N, or a Hugging Face
            model folder
        endpoint: an OpenAI-compatible endpoint, up to and including /v1
        predictions: a file of queries, with no model: one a line, JSON lines, or one JSON value (a
            list, or an object by id)
        decode: greedy, vote@N (the majority of N samples' results), pass@N (whether any is right),
            or judge@K (the best of K by the own judgement of an endpoint's model)
        vote_by: what makes two samples one vote: equal sets of rows as in OmniSQL, or equal printed
            tables as in PaVeRL-SQL
        data_root: folder of the data: a data set's own, OmniSQL's data/, or several downloads
        file: question file in place of the data set's own: in its folder, or a path
        comparators: NAME,NAME: what answers are judged by (default: the set's own)
        test_suite: Spider's test suite (default: test_suite_database in the data or beside it)
        by: accuracy by difficulty, database, clause, tag or turns too; may be repeated
        official: also write the answers in the forms of Spider's and BIRD's programs
        out: folder of the results (default: in evals/, named after what is measured)
    """

    cfg: options.OtherConfigOption = None
    accel: options.AcceleratorOption = None
    checkpoint: Path | None = None
    endpoint: str | None = None
    model: options.ModelOption = None
    predictions: Path | None = None
    decode: str = "greedy"
    vote_by: VoteBy = "set"
    data: Annotated[str, Parameter(help=_DATA)] = "test"
    data_root: Path | None = None
    file: str = ""
    dialect: options.DialectOption = "sqlite"
    limit: options.LimitOption = None
    show_prompt: options.ShowPromptOption = False
    comparators: str | None = None
    test_suite: Path | None = None
    timeout_s: options.TimeoutOption = None
    by: tuple[Literal["difficulty", "database", "clause", "tag", "turns"], ...] = ()
    official: bool = False
    json: options.JsonOption = None
    out: Path | None = None


@options.command
def main(*overrides: options.Overrides, given: EvalOptions = EvalOptions()) -> None:
    """Measure execution accuracy."""
    gc.set_threshold(_GARBAGE)
    options.choose("--data", given.data, (*SPLITS, *TEST_SETS))
    _check(given)
    options.check_result(given.json)
    settings = [*overrides]
    if given.limit:
        sizes = ("questions", "validation_questions")
        settings += [f"evaluation.{size}={given.limit}" for size in sizes]
    source, split = _find(given, settings)
    if given.show_prompt:
        _show_prompt(source, split)
    else:
        _answer_and_judge(given, source, split, _folder(source, given))


def _find(given: EvalOptions, settings: Sequence[str]) -> tuple[Source, Split]:
    """Find whose answers are judged: those in a file, of an endpoint, or of a policy of ours."""
    config = job_of(given, settings)
    decode = Decode.parse(given.decode, config, given.vote_by)
    if decode.kind == "judge":
        asked = config.endpoint.model_copy(update={"candidates": decode.samples})
        config = config.model_copy(update={"endpoint": asked})
    config, split = _on_test_set(config, given)
    check_data(config, split)
    name = (given.model or "").replace("/", "-")  # names the folder too
    if given.predictions:
        file = given.predictions
        facts = ModelFacts(name or (file.name if file.is_dir() else file.stem))
        return FileSource(config, decode, facts, given.predictions, split), split
    if given.endpoint and given.model:
        if config.evaluation.episode == "agentic":
            raise UserError("--endpoint: one reply a question; set evaluation.episode=single_turn")
        config = config.for_untrained()
        facts = ModelFacts(name, given.model)
        return EndpointSource(config, decode, facts, given.endpoint), split
    assert given.checkpoint is not None
    moved = [setting for setting in settings if setting.startswith("model.path=")]
    policy = policy_in(given.checkpoint, moved)
    accelerator = cli.use_accelerator(given.accel)
    # JAX takes seconds to import, and nothing above needs it.
    from launch.evaluation.sampling import CheckpointSource

    return CheckpointSource.of(config, decode, policy, accelerator), split


def job_of(given: EvalOptions, settings: Sequence[str]) -> JobConfig:
    """Return the job that an evaluation goes by: without a config a run has its own, and all else
    that of plain.yaml.
    """
    if given.data not in SPLITS and not given.cfg:  # whole, unless a part is asked for here
        settings = ["evaluation.questions=null", *settings]
    if given.predictions:
        return load_config(given.cfg or PLAIN, ["prompt.example_values=0", *settings])
    if given.cfg:
        return load_config(given.cfg, settings)
    if given.checkpoint and (run := run_in(given.checkpoint)):
        # But for the devices and servers of the machine that it was made on.
        config = load_config(str(run / CONFIG), ["mesh=auto", "rollout={}", *settings])
        return config.model_copy(update={"run": config.run.model_copy(update={"dir": run})})
    config = load_config(PLAIN, settings)
    said = f"prompt.style={config.prompt.style} (--show-prompt prints one), "
    said += f"prompt.schema_style={config.prompt.schema_style}, one reply."
    # Standard output may be the result's.
    cli.console.print(f"Settings of {PLAIN}: {said}", soft_wrap=True)
    return config


def _show_prompt(source: Source, split: Split) -> None:
    config = source.config
    with TemporaryDirectory() as spare, SqlSide(config, Path(spare)) as sql:
        example = sql.examples(split, limit=config.evaluation.of(split))[0]
        limit = config.evaluation_sampler.max_prompt_tokens
        tokenizer = read_tokenizer(config, source.folder) if source.folder else None
        show_prompt(example, sql.evaluation_prompt(example), tokenizer, limit=limit)


def _answer_and_judge(given: EvalOptions, source: Source, split: Split, out: Path | None) -> None:
    config, start = source.config, perf_counter()
    # A config's own questions have its limits, as in training.
    limits = config.executor if _is_own(given) else OFFICIAL
    if given.timeout_s:
        limits = limits.model_copy(update={"timeout_s": given.timeout_s})
    with Executor(limits) as executor, ExitStack() as stack:
        if out:
            deciding = {"split": given.data, "decode": source.decode.name, **source.deciding()}
            settings = yaml.safe_dump(deciding, sort_keys=False)
            stack.enter_context(claimed(out, settings, key="--out"))
        # Demo data needs a place too.
        place = out or Path(stack.enter_context(TemporaryDirectory()))
        sql = stack.enter_context(SqlSide(config, place))
        examples = sql.examples(split, limit=config.evaluation.of(split))
        questions = _questions(given, sql, examples)
        if out and source.is_asked:  # before hours of sampling
            check_databases(questions.databases | questions.suite_files)
            claim_data(
                out, fingerprints({given.data: examples}, source.folder, source.facts.checkpoint)
            )
        # Weights that cannot be read leave no folder behind.
        with cli.progress_bar("answers") as show:
            samples, notes = source.answers(examples, sql, show)
        if source.is_asked:
            notes = {**notes, "seconds": round(perf_counter() - start, 1)}
        report = judge_answers(
            questions, samples, source.decode, executor, sql,
            notes=notes, model=source.facts, folder=out,
        )  # fmt: skip
        options.write_result(given.json, as_json(report))
        if given.official and out:
            write_official(report.questions, out)
        if given.json != options.STDOUT:
            show_report(report, given.by)
            cli.output.print(f"Verdicts of all questions: {given.json or out}")


def _is_own(given: EvalOptions) -> bool:
    """Tell whether a split of the config is judged by the config's own rule."""
    return given.data in SPLITS and not given.comparators


def _questions(given: EvalOptions, sql: SqlSide, examples: tuple[Example, ...]) -> QuestionSet:
    if _is_own(given):
        return own_set(given.data, examples, sql.config.env)
    published, is_whole = TEST_SETS.get(given.data), sql.config.evaluation.questions is None
    if published and is_whole and len(examples) != published.questions:
        _log.warning(
            "%s: %d questions, and %d as published: not to be compared with published numbers",
            given.data, len(examples), published.questions,
        )  # fmt: skip
    data = sql.config.data.model_copy(update={"root": sql.root})
    rule = {"comparators": given.comparators, "test_suite": given.test_suite}
    return question_set(given.data, examples, data, **rule)


def _on_test_set(config: JobConfig, given: EvalOptions) -> tuple[JobConfig, Split]:
    """Put a test set in the place of the job's test questions, whatever its golds."""
    if splits := [split for split in SPLITS if split == given.data]:
        return config, splits[0]
    root, file = folder_and_file(given.data_root or config.data.root, given.file)
    if root is None:
        raise UserError(f"--data {given.data}: give the folder of the data, --data-root DIR")
    key = "--data-root" if given.data_root else "data.root"
    source = find(given.data, root, file, key=key, dialect=dialect_of(given.dialect))
    # How the job puts its questions, and what it judges by.
    own = config.data.test.sources[0].model_dump(include={"comments", "corrections"})
    source = source.model_copy(update={"path": Path(), **own})
    test = DataConfig(sources=(source,), exclude=())
    data = config.data.model_copy(update={"root": root, "demo": None, "test": test})
    return config.model_copy(update={"data": data}), "test"


def _folder(source: Source, given: EvalOptions) -> Path | None:
    """Name the folder of the results; a file whose result is one file needs none."""
    if given.out or (given.json and not source.is_asked and not given.official):
        return given.out
    config, data, facts = source.config, given.data, source.facts
    layouts = [one.layout for one in config.data.of(data).sources] if data in SPLITS else []
    words = [facts.name, facts.sampler, *dict.fromkeys(layouts), data, source.decode.name]
    if source.is_asked:
        words += [f"limit{given.limit}" if given.limit else None, f"seed{config.seed}"]
    return Path("evals") / "-".join(filter(None, words))


def _is_address(url: str) -> bool:
    """Tell whether a URL names a host without a user, and a port that there can be."""
    with suppress(ValueError):
        parts = urlsplit(url)
        is_host = bool(parts.hostname) and "@" not in parts.netloc
        return parts.scheme in ("http", "https") and is_host and parts.port != 0
    return False


def _check(given: EvalOptions) -> None:
    is_file, is_split = given.predictions is not None, given.data in SPLITS
    url, model = given.endpoint or "", given.model
    has_place = given.data_root or given.file or given.dialect != "sqlite"
    command, test_set = "python -m launch.eval", "--data spider-dev --data-root DIR"
    mistakes = {
        "--predictions: needs no model": is_file and (url or given.checkpoint),
        f"--predictions: --data {given.data} is not a published test set; give one of "
        f"{', '.join(TEST_SETS)}": is_file and is_split and not given.cfg,
        f"--data-root, --file and --dialect: --data {given.data} is a split of the config; set "
        "data.root=FOLDER, or give a test set": is_split and has_place,
        f"--decode {given.decode}: needs a model that is asked; give --endpoint URL": not url
        and given.decode.startswith("judge"),
        "--official: the official programs judge whole sets; leave out --limit": given.official
        and given.limit,
        "--endpoint and --checkpoint: give one of the two": url and given.checkpoint,
        "--endpoint: say --model NAME too": url and not model,
        "--model: say --endpoint URL too": model and not url and not is_file,
        f"--endpoint {url.rpartition('@')[2]}: write a URL, such as http://127.0.0.1:30000/v1, "
        "without user and password; a key is read from OPENAI_API_KEY": url
        and not _is_address(url),
        "--endpoint needs the openai package: pip install '.[openai]'": url
        and find_spec("openai") is None,
        f"nothing to evaluate; these work: `{command} --checkpoint RUN` (or a model's folder), "
        f"`{command} --endpoint URL --model NAME {test_set}`, "
        f"`{command} --predictions FILE {test_set}`": not (is_file or url or given.checkpoint),
        # Else the data would be looked for first.
        f"--predictions {given.predictions}: no such file; check the path": given.predictions
        and not given.predictions.exists(),
    }
    for message, is_wrong in mistakes.items():
        if is_wrong:
            raise UserError(message)


if __name__ == "__main__":
    cli.run(main)
