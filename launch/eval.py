"""Measure execution accuracy: of a model, or of a file of predictions.

    python -m launch.eval --cfg progress.yaml --checkpoint runs/progress-seed0 --decode vote@8
    python -m launch.eval --cfg progress.yaml --checkpoint Qwen2.5-Coder-7B-Instruct \\
        --data spider-dev --data-root data
    python -m launch.eval --cfg verbal.yaml --endpoint http://127.0.0.1:30000/v1 --model qwen \\
        --data bird-dev --data-root data
    python -m launch.eval --predictions model.sql --data spider-dev --data-root data --json out.json

With rollout.backend=sglang a checkpoint is sampled by SGLang servers, as in training.

A test set is judged by its official rule, question by question: verdicts.json in the folder of
results, or the file that --json names, has every verdict, means with 95 % intervals, and what they
are of. The folder also holds predictions.jsonl, the same in each official program's form, and
result.json. The same command goes on where an interrupted one was.
"""

from __future__ import annotations

import os
from argparse import ArgumentParser, Namespace
from collections.abc import Collection
from pathlib import Path
from typing import TYPE_CHECKING, get_args

from launch import cli
from launch.testsets import SPLITS, TEST_SETS, VERDICTS, Split, find, read_limits
from launch.votes import Decode
from minirl.errors import UserError
from sqlenv.config import DataConfig
from sqlenv.evaluators.votes import VoteBy
from sqlenv.executor import Executor

# What a file of predictions does not need is imported where it is used.
if TYPE_CHECKING:
    from launch.asked import Asked
    from launch.config import JobConfig

DIFFERING = "differing.jsonl"


def main(arguments: list[str]) -> None:
    """Run the command."""
    options = _arguments(arguments)
    _check(options)
    _check_other(options.against)
    if options.predictions is not None:
        with Executor(read_limits(options.timeout_s)) as executor:
            executor.start()
            # Much to import, while the workers start.
            from launch.eval_file import evaluate_file

            result = evaluate_file(options, executor)
        _beside(options.against, result)
    else:
        _beside(options.against, _evaluate_model(options))


def _evaluate_model(options: Namespace) -> Path:
    """Let a model answer, and judge its answers; give the folder or file of results."""
    from launch.config import load_config
    from launch.data.preflight import check_data
    from launch.run_folder import RESULT, check

    config = load_config(options.cfg, options.overrides)
    manner = config.evaluation
    decode = Decode.parse(
        options.decode, vote_temperature=manner.vote_temperature, top_p=manner.top_p
    )
    config, split = _on_test_set(config, options)
    check_data(config, split)
    if options.endpoint is None:
        cli.use_accelerator(options.accel)
    # JAX takes seconds to import, and nothing above needs it.
    from launch.asked import Asked
    from launch.eval_job import evaluate, show

    asked = Asked.find(config, options.endpoint, options.model, options.checkpoint)
    out = options.out or default_folder(config, options.data, asked, options.decode)
    settings = _settings(config, options, asked, split)
    check(out, settings, key="--out")
    if (out / RESULT).exists() and _is_judged(options, asked, out):
        cli.output.print(f"This evaluation is complete: {out / RESULT}", soft_wrap=True)
        show(out)
    else:
        evaluate(config, asked, decode, options, split=split, out=out, settings=settings)
    return options.json or out


def _is_judged(options: Namespace, asked: Asked, out: Path) -> bool:
    """Tell whether the verdicts that are asked for are there; other predictions need none."""
    from launch.judging import read_measures
    from launch.sheet import read_sheet

    wanted = {*read_measures(options.comparators, options.data)}
    path = options.json or out / VERDICTS
    if not wanted:
        return True
    if not path.exists():
        return False
    sheet = read_sheet(path)
    if sheet.settings["model"].get("weights", asked.identity) != asked.identity:
        return False
    is_own = options.comparators is None and options.test_suite is None
    # Of a test set's own measures one may be left out, where there is no test suite.
    is_whole = {*sheet.measures} <= wanted if is_own else {*sheet.measures} == wanted
    return is_whole and sheet.settings.get("timeout_s") == read_limits(options.timeout_s).timeout_s


def _check_other(other: Path | None) -> None:
    """Read the result to compare with, before hours of work.

    Raises:
        UserError: It is none.
    """
    if other is not None:
        from launch.runs import read_runs

        read_runs([f"other={other}"])


def _beside(other: Path | None, result: Path) -> None:
    """Compare a result with another one, and list the questions on which they differ."""
    if other is not None:
        from launch.reporting.comparison import Comparison
        from launch.runs import read_runs
        from launch.texts import write_text

        differing = result / DIFFERING if result.is_dir() else result.with_suffix(f".{DIFFERING}")
        found = Comparison.of(read_runs([f"other={other}", f"this={result}"]))
        cli.output.print(*found.tables(cli.output.width), sep="\n")
        write_text(differing, found.lines())
        cli.output.print(f"Questions on which they differ: {differing}", soft_wrap=True)


def _arguments(arguments: list[str]) -> Namespace:
    parser = cli.make_parser("launch.eval", __doc__ or "", needs_config=False)
    add_arguments(parser, data=(*SPLITS, *TEST_SETS))
    add_endpoint(parser)
    parser.add_argument(
        "--decode",
        default="greedy",
        metavar="greedy|vote@N|pass@N",
        help="one greedy reply, the majority of N samples' results, or whether any of N samples is "
        "right (default: greedy)",
    )
    judged = parser.add_argument_group("test sets")
    judged.add_argument(
        "--data-root",
        type=Path,
        metavar="DIR",
        help="OmniSQL's data/ folder, the data set's own, or one that holds several downloads "
        "(default: the config's data.root)",
    )
    judged.add_argument(
        "--file",
        default="",
        metavar="NAME",
        help="question file in place of the data set's own: in its folder, or a path",
    )
    judged.add_argument(
        "--comparators",
        metavar="NAME,NAME",
        help="what answers are judged by (default: the test set's own)",
    )
    judged.add_argument(
        "--test-suite",
        type=Path,
        metavar="DIR",
        help="Spider's test suite (default: test_suite_database in the data or beside it)",
    )
    judged.add_argument(
        "--against",
        type=Path,
        metavar="RUN",
        help="another result to compare this one with: paired tests, and questions that differ",
    )
    judged.add_argument("--json", type=Path, metavar="FILE", help="write all verdicts here")
    judged.add_argument("--timeout-s", type=float, help="wall time of one query (default: 60)")
    files = parser.add_argument_group("a file of predictions, with no model")
    files.add_argument(
        "--predictions",
        type=Path,
        metavar="FILE",
        help="one query a line, JSON lines, BIRD's or OmniSQL's JSON, or Spider 2's folder",
    )
    files.add_argument(
        "--vote-by",
        choices=get_args(VoteBy),
        default="set",
        help="what makes two samples one vote: equal sets of rows as in OmniSQL, or equal printed "
        "tables as in PaVeRL-SQL (default: set)",
    )
    files.add_argument(
        "--seed", type=cli.read_seed, metavar="N", help="of the samples (default: 0)"
    )
    return parser.parse_intermixed_args(arguments)


def add_arguments(parser: ArgumentParser, *, data: Collection[str] = SPLITS) -> None:
    """Add what says who is measured, on which questions, and where results go."""
    parser.add_argument(
        "--checkpoint",
        type=Path,
        metavar="DIR",
        help="a run folder (its best checkpoint), one of its checkpoints/N, or a Hugging Face "
        "model folder; without it, what reinforcement learning starts from: the model that the "
        "warm start left in the config's run folder, else model.path",
    )
    parser.add_argument(
        "--data",
        choices=data,
        metavar="NAME",
        default="test",
        help=f"which questions: {', '.join(data)} (default: test)",
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of the results (default: evals/, named after policy, data, decoding, seed)",
    )


def add_endpoint(parser: ArgumentParser) -> None:
    """Add what names a model behind an endpoint."""
    parser.add_argument(
        "--endpoint",
        metavar="URL",
        help="an OpenAI-compatible endpoint, up to and including /v1, in place of --checkpoint",
    )
    parser.add_argument("--model", metavar="NAME", help="the endpoint's name of the model")


def check_endpoint(options: Namespace) -> None:
    """Refuse what contradicts itself about who is asked.

    Raises:
        UserError: Something does.
    """
    rules = [
        (
            options.endpoint and options.checkpoint,
            "--endpoint and --checkpoint: give one of the two",
        ),
        (options.endpoint and not options.model, "--endpoint: say --model NAME too"),
        (options.model and not options.endpoint, "--model: say --endpoint URL too"),
        (
            options.endpoint and not options.endpoint.startswith(("http://", "https://")),
            f"--endpoint {options.endpoint}: write a URL, for example http://127.0.0.1:30000/v1",
        ),
        (
            "@" in (options.endpoint or "").partition("://")[2].partition("/")[0],
            "--endpoint: a URL without user and password; a key is read from OPENAI_API_KEY",
        ),
        (
            options.checkpoint and not options.checkpoint.is_dir(),
            f"--checkpoint {options.checkpoint}: no such folder",
        ),
    ]
    for is_wrong, message in rules:
        if is_wrong:
            raise UserError(message)


def _check(options: Namespace) -> None:
    """Refuse options that do not belong together.

    Raises:
        UserError: Some do not.
    """
    is_file, is_split = options.predictions is not None, options.data in SPLITS
    rules = [
        (
            is_file and (options.cfg or options.overrides),
            "--predictions: needs no --cfg and no settings",
        ),
        (
            is_file and (options.endpoint or options.checkpoint),
            "--predictions: needs no model; leave --endpoint and --checkpoint out",
        ),
        (
            not is_file and not options.cfg,
            "say --cfg FILE, or --predictions FILE to judge without a model",
        ),
        (not is_file and options.seed is not None, "--seed: set seed=N, as in the config"),
        (
            not is_file and is_split and (options.data_root or options.file),
            f"--data-root and --file: --data {options.data} is a split of the config; set "
            "data.root=FOLDER, or give a test set such as --data spider-dev",
        ),
        (
            not is_file and is_split and options.json and not options.comparators,
            "--json: say --comparators NAME too, or a test set such as --data spider-dev",
        ),
        (
            options.json and options.json.exists() and not options.json.is_file(),
            f"--json {options.json}: is no plain file, and verdicts are written down on the way; "
            "name a file",
        ),
    ]
    for is_wrong, message in rules:
        if is_wrong:
            raise UserError(message)
    if not is_file:
        check_endpoint(options)


def _on_test_set(config: JobConfig, options: Namespace) -> tuple[JobConfig, Split]:
    """Put a test set in the place of the job's test questions: all of it, whatever its golds."""
    if options.data in SPLITS:
        return config, options.data
    root = options.data_root or config.data.root
    if root is None:
        raise UserError(f"--data {options.data}: give the folder of the data, --data-root DIR")
    source, _ = find(options.data, root, options.file)
    test = DataConfig(
        sources=(source.model_copy(update={"path": Path(os.path.relpath(source.path, root))}),),
        drop_failing_gold=False,
        drop_empty_gold=False,
    )
    update = {
        "data": config.data.model_copy(update={"root": root, "demo": None, "test": test}),
        "evaluation": config.evaluation.model_copy(update={"questions": None}),
    }
    return config.model_copy(update=update), "test"


def default_folder(config: JobConfig, data: str, asked: Asked, decode: str) -> Path:
    """Name a folder after policy, sampler, data, decoding and seed."""
    layouts: dict[str, None] = {}
    if data in SPLITS:
        layouts = dict.fromkeys(source.layout for source in config.data.of(data).sources)
    sampler = asked.differs_by(config).values()
    parts = (asked.name, *sampler, *layouts, data, decode, f"seed{config.seed}")
    return Path("evals") / "-".join(parts)


def _settings(config: JobConfig, options: Namespace, asked: Asked, split: Split) -> str:
    """Write down what decides the predictions: of the job, only what evaluation looks at."""
    from launch import measured

    used = {"seed", "prompt", "env", "executor", "evaluation"}
    if asked.policy is None:
        manner = config.verbal.model_dump(mode="json", include={"max_tokens", "send_seed"})
        who, where = {"endpoint": asked.identity}, {"verbal": manner}
    else:
        used |= {"sampler"}
        dtype = config.model.dtype
        who = {"weights": asked.identity, "dtype": dtype, **asked.settings(config)}
        where = {"accelerator": options.accel}
    import yaml

    settings = {
        **who,
        "decode": options.decode,
        "split": options.data,
        **where,
        **config.model_dump(mode="json", include=used),
        "data": measured.data(config, split),
        **asked.places(config),
    }
    return yaml.safe_dump(settings, sort_keys=False, width=100)


if __name__ == "__main__":
    cli.run(main)
