"""Measure execution accuracy: of a model, or of a file of predictions.

    python -m launch.eval
    python -m launch.eval --checkpoint runs/progress-seed0 --decode vote@8
    python -m launch.eval --checkpoint Qwen2.5-Coder-7B-Instruct --data spider-dev --data-root data
    python -m launch.eval --endpoint http://127.0.0.1:30000/v1 --model qwen --data bird-dev \\
        --data-root data --limit 200
    python -m launch.eval --predictions model.sql --data spider-dev --data-root data --json out.json

Without a model it is the newest finished run below runs/. A run is asked as it was trained: prompt,
environment and sampler are its own; other models are asked with the short prompt of plain.yaml, and
may answer in any form. A config (--cfg) and settings (key=value) take the place of these.
A checkpoint (sampled in this process, or by SGLang servers with rollout.backend=sglang), an
endpoint that speaks OpenAI's chat completions (its key in OPENAI_API_KEY) and a file are judged
alike, a test set by its official rule: verdicts.json in the folder of results, or the file that
--json names, has every verdict and means with 95 % intervals. The folder also holds the answers in
each official program's form. judge@K is PaVeRL-SQL's verbal RL: the model writes queries until K
run, judges them, and the best one answers. Run the same command again to resume.
"""

from __future__ import annotations

import gc
from argparse import Namespace
from importlib.util import find_spec
from pathlib import Path
from tempfile import TemporaryDirectory
from time import perf_counter
from typing import TYPE_CHECKING, Any, get_args

from exchange import UserError
from launch import cli
from launch.evaluation.decoding import Decode
from launch.evaluation.testsets import SPLITS, TEST_SETS, Split, read_limits, sample_numbers
from sqlenv.config import DataConfig
from sqlenv.dialects import NAMES
from sqlenv.evaluators.votes import VoteBy
from sqlenv.executor import Executor

# What a file of predictions does not need is imported where it is used.
if TYPE_CHECKING:
    from collections.abc import Sequence

    from launch.config import JobConfig
    from launch.evaluation.questions import QuestionSet
    from launch.evaluation.sources import Source
    from sqlenv.types import Example

_FILE_TEMPERATURE = 0.8  # stands for that of a file of samples, which nobody knows
# Modules and queries' trees are many objects that stay: the collector would look through them again
# and again.
_GARBAGE = 100_000


def main(arguments: Sequence[str]) -> None:
    """Run the command."""
    gc.set_threshold(_GARBAGE)
    options = _read(arguments)
    _check(options)
    if options.predictions is not None:
        _evaluate_file(options, options.predictions)
    else:
        _evaluate_model(options)


def _evaluate_file(options: Namespace, path: Path) -> None:
    name = options.data
    if name not in TEST_SETS:
        raise UserError(
            f"--predictions: --data {name} is not a published test set; give one of "
            f"{', '.join(TEST_SETS)}"
        )
    decode = Decode.parse(
        options.decode, vote_temperature=_FILE_TEMPERATURE, vote_by=options.vote_by
    )
    if decode.kind == "judge":
        raise UserError(f"--decode {decode.name}: needs a model; a file takes vote@n or pass@n")
    with Executor(read_limits(options.timeout_s)) as executor:
        executor.start()
        # Much to import, while the workers start.
        from launch.evaluation.evaluate import judge_answers
        from launch.evaluation.outcomes import Outcomes
        from launch.evaluation.predictions import read_samples
        from launch.evaluation.questions import (
            find,
            folder_and_file,
            question_set,
            read_corrected,
        )
        from launch.evaluation.results import ModelFacts
        from launch.evaluation.sources import Answers, Sampled

        root, file = folder_and_file(options.data_root, options.file)
        if root is None:
            raise UserError("--predictions: give the folder of the data too, --data-root DIR")
        source, examples = find(name, root, file, dialect=NAMES[options.dialect])
        numbers = sample_numbers(len(examples), options.limit, seed=options.seed or 0)
        asked = tuple(examples[number] for number in numbers)
        samples = [
            Sampled(each, outcomes=Outcomes.total(map(Outcomes.of, each)))
            for each in read_samples(path, examples, decode, asked=asked)
        ]
        model = ModelFacts((options.model or path.stem).replace("/", "-"))  # names the folder too
        folder = options.out
        if folder is None and options.json is None:
            folder = Path("evals") / "-".join((model.name, name, decode.name))
        rule = {"comparators": options.comparators, "test_suite": options.test_suite}
        corrected = read_corrected(options.corrections, examples) if options.corrections else None
        questions = question_set(name, asked, source, root, **rule, corrected=corrected)
        judge_answers(
            questions, Answers(samples), decode, executor,
            model=model, seed=options.seed or 0, folder=folder, path=options.json,
        )  # fmt: skip


def _evaluate_model(options: Namespace) -> None:
    from launch.data.preflight import check_data
    from launch.evaluation.subject import find_subject, limited
    from launch.policy import find_policy

    given = {name: getattr(options, name) for name in ("checkpoint", "endpoint", "data")}
    config, checkpoint = find_subject(options.cfg, options.overrides, **given)
    limits = config.evaluation
    decode = Decode.parse(
        options.decode,
        vote_temperature=limits.vote_temperature,
        top_p=limits.top_p,
        candidates=config.verbal.candidates,
        vote_by=options.vote_by,
    )
    if decode.kind == "judge":
        verbal = config.verbal.model_copy(update={"candidates": decode.samples})
        config = config.model_copy(update={"verbal": verbal})
    config, split = _on_test_set(limited(config, options.limit), options)
    check_data(config, split)
    source: Source
    if options.endpoint is None:
        policy = find_policy(config, checkpoint)
        cli.use_accelerator(options.accel)
        # JAX takes seconds to import, and nothing above needs it.
        from launch.evaluation.policy_source import CheckpointSource

        source = CheckpointSource.of(config, decode, policy, options.accel)
    else:
        from launch.evaluation.sources import EndpointSource

        name = options.model.replace("/", "-")
        config = config.for_untrained()
        source = EndpointSource(config, decode, name, options.model, options.endpoint)
    if options.show_prompt:
        _show_prompt(source, split)
    else:
        out = options.out or _default_folder(source, options)
        _answer_and_judge(options, source, split, out)


def _show_prompt(source: Source, split: Split) -> None:
    from launch.build import SqlSide
    from launch.data.shown_prompt import show_prompt

    config = source.config
    with TemporaryDirectory() as spare, SqlSide(config, _demo_folder(config, Path(spare))) as sql:
        example = sql.examples(split, limit=config.evaluation.of(split))[0]
        limit = config.evaluation_sampler.max_prompt_tokens
        show_prompt(example, source.prompt(example, sql), source.tokenizer(), limit=limit)


def _demo_folder(config: JobConfig, other: Path) -> Path:
    """Return where demo data lies: that of the run, if there is one; the same settings make the
    same.
    """
    return config.folder if (config.folder / "data").is_dir() else other


def _answer_and_judge(options: Namespace, source: Source, split: Split, out: Path) -> None:
    import yaml

    from launch.build import SqlSide
    from launch.evaluation.client import ANSWERS
    from launch.evaluation.evaluate import judge_answers
    from launch.evaluation.questions import check_databases
    from launch.evaluation.sources import Answers
    from launch.run_folder import claim_data, claimed

    config = source.config
    settings = yaml.safe_dump(source.settings(split, options.data), sort_keys=False, width=100)
    made = _demo_folder(config, out)
    start = perf_counter()
    # Answers that were paid for serve another reading of them.
    with claimed(out, settings, key="--out", keyed={ANSWERS}), SqlSide(config, made) as sql:
        examples = sql.examples(split, limit=config.evaluation.of(split))
        questions = _questions(options, config, examples)
        check_databases(questions.databases | questions.suite_files)  # before hours of sampling
        # Weights that cannot be read leave no folder behind.
        with cli.progress_bar("answers") as show:
            found = source.answers(examples, sql, out, show)
        claim_data(out, {split: examples})
        seconds = {"seconds": round(perf_counter() - start, 1)}
        # A config's own questions have its limits, as in training.
        has_own = _is_own(options) and options.timeout_s is None
        with Executor(config.executor if has_own else read_limits(options.timeout_s)) as executor:
            judge_answers(
                questions,
                Answers(found.samples, {**found.notes, **seconds}),
                source.decode,
                executor,
                model=source.facts(),
                seed=config.seed,
                prompts=[source.prompt(example, sql) for example in examples],
                folder=out,
                path=options.json,
            )


def _is_own(options: Namespace) -> bool:
    """Tell whether a split of the config is judged by the config's own rule."""
    return options.data in SPLITS and not options.comparators


def _questions(options: Namespace, config: JobConfig, examples: tuple[Example, ...]) -> QuestionSet:
    from launch.evaluation.questions import QuestionSet, question_set, read_corrected
    from sqlenv.data.loading import read_all

    if _is_own(options):
        return QuestionSet(options.data, examples, (config.env.match,))
    root, source = config.data.root or Path(), config.data.test.sources[0]
    place = source.model_copy(update={"path": root / source.path})
    rule = {"comparators": options.comparators, "test_suite": options.test_suite}
    corrected = None
    if options.corrections:  # of all questions: those that are asked may be a sample
        corrected = read_corrected(options.corrections, read_all(place))
    return question_set(options.data, examples, place, root, **rule, corrected=corrected)


def _on_test_set(config: JobConfig, options: Namespace) -> tuple[JobConfig, Split]:
    """Put a test set in the place of the job's test questions, whatever its golds."""
    if splits := [split for split in SPLITS if split == options.data]:
        return config, splits[0]
    from launch.evaluation.questions import find, folder_and_file

    root, file = folder_and_file(options.data_root or config.data.root, options.file)
    if root is None:
        raise UserError(f"--data {options.data}: give the folder of the data, --data-root DIR")
    key = "--data-root" if options.data_root else "data.root"
    source, _ = find(options.data, root, file, key=key, dialect=NAMES[options.dialect])
    # Comments are a part of how the job puts its questions.
    own = {"path": Path(), "comments": config.data.test.sources[0].comments}
    test = DataConfig(sources=(source.model_copy(update=own),), exclude=())
    data = config.data.model_copy(update={"root": root, "demo": None, "test": test})
    return config.model_copy(update={"data": data}), "test"


def _default_folder(source: Source, options: Namespace) -> Path:
    config, layouts, data = source.config, [], options.data
    if data in SPLITS:
        layouts = [*dict.fromkeys(one.layout for one in config.data.of(data).sources)]
    sampler = filter(None, [source.facts().sampler])
    size = [f"limit{options.limit}"] if options.limit else []
    ends = (source.decode.name, *size, f"seed{config.seed}")
    parts = (source.name, *sampler, *layouts, data, *ends)
    return Path("evals") / "-".join(parts)


def _check(options: Namespace) -> None:
    is_file, is_split = options.predictions is not None, options.data in SPLITS
    url, model = options.endpoint or "", options.model
    checkpoint, out = options.checkpoint, options.json
    split = f"--data {options.data} is a split of the config"
    mistakes = {
        "--predictions: needs no --cfg, no settings and no model": is_file
        and (options.cfg or options.overrides or url or checkpoint),
        "--predictions: a file has no prompt; leave --show-prompt out": is_file
        and options.show_prompt,
        "--seed: set seed=N, as in the config": not is_file and options.seed is not None,
        f"--data-root, --file and --dialect: {split}; set data.root=FOLDER, or give a test set": (
            is_split
            and not is_file
            and (options.data_root or options.file or options.dialect != "sqlite")
        ),
        f"--corrections: {split}, judged by its own rule; name --comparators too, or set "
        "data.test.sources.0.corrections=FILE": options.corrections and _is_own(options),
        f"--json {out}: is no plain file": out and out.exists() and not out.is_file(),
        "--endpoint and --checkpoint: give one of the two": url and checkpoint,
        "--endpoint: say --model NAME too": url and not model,
        "--model: say --endpoint URL too": model and not url and not is_file,
        f"--endpoint {url}: write a URL, such as http://127.0.0.1:30000/v1": url
        and not url.startswith(("http://", "https://")),
        "--endpoint: a URL without user and password; a key is read from OPENAI_API_KEY": "@"
        in url.partition("://")[2].partition("/")[0],
        "--endpoint needs the openai package: pip install '.[openai]'": url
        and find_spec("openai") is None,
    }
    for message, is_wrong in mistakes.items():
        if is_wrong:
            raise UserError(message)


def _read(arguments: Sequence[str]) -> Namespace:
    parser = cli.make_parser("launch.eval", __doc__, example="--decode pass@8", needs_config=False)
    folder: dict[str, Any] = {"type": Path, "metavar": "DIR"}
    file: dict[str, Any] = {"type": Path, "metavar": "FILE"}
    add = parser.add_argument_group("whose answers").add_argument
    add(
        "--checkpoint", **folder,
        help="a run folder (its best checkpoint), one of its checkpoints/N, or a Hugging Face "
        "model folder (default: the newest finished run below runs/; with --cfg what reinforcement "
        "learning starts from: the model that the warm start left in the config's run folder, "
        "else model.path)",
    )  # fmt: skip
    add("--endpoint", metavar="URL", help="an OpenAI-compatible endpoint, up to and including /v1")
    add("--model", metavar="NAME", help="the endpoint's name of the model")
    add(
        "--predictions", **file,
        help="a file of queries, with no model: one a line, JSON lines, BIRD's or OmniSQL's JSON, "
        "or Spider 2's folder",
    )  # fmt: skip
    add(
        "--decode", default="greedy", metavar="greedy|vote@N|pass@N|judge@K",
        help="one greedy reply, the majority of N samples' results, whether any of N samples is "
        "right, or the best of K by the model's own judgement (default: greedy)",
    )  # fmt: skip
    add(
        "--vote-by", choices=get_args(VoteBy), default="set",
        help="what makes two samples one vote: equal sets of rows as in OmniSQL, or equal printed "
        "tables as in PaVeRL-SQL (default: set)",
    )  # fmt: skip
    add("--seed", type=cli.read_seed, metavar="N", help="of a file's samples (default: 0)")
    names = (*SPLITS, *TEST_SETS)
    add = parser.add_argument_group("which questions").add_argument
    add(
        "--data", choices=names, metavar="NAME", default="test",
        help=f"a split of the config or a test set: {', '.join(names)} (default: test)",
    )  # fmt: skip
    add(
        "--data-root", **folder,
        help="OmniSQL's data/ folder, the data set's own, or one that holds several downloads "
        "(default: the config's data.root)",
    )  # fmt: skip
    other = "question file in place of the data set's own: in its folder, or a path"
    add("--file", default="", metavar="NAME", help=other)
    add(
        "--dialect", default="sqlite", choices=tuple(NAMES), metavar="NAME",
        help="what gold queries and answers of a test set are written in, where a record does not "
        f"say it: {', '.join(NAMES)} (default: sqlite)",
    )  # fmt: skip
    cli.add_questions(add)
    add = parser.add_argument_group("judging and results").add_argument
    own = "what answers are judged by (default: the test set's own)"
    add("--comparators", metavar="NAME,NAME", help=own)
    add(
        "--corrections", metavar="FILE[@SHA256]",
        help="corrected gold queries by question id: their verdict stands beside the published one",
    )  # fmt: skip
    suite = "Spider's test suite (default: test_suite_database in the data or beside it)"
    add("--test-suite", **folder, help=suite)
    add("--timeout-s", type=float, help="wall time of one query (default: 60)")
    add("--json", **file, help="write all verdicts here")
    where = "folder of the results (default: evals/, named after model, data, decoding, seed)"
    add("--out", **folder, help=where)
    return parser.parse_intermixed_args(arguments)


if __name__ == "__main__":
    cli.run(main)
