"""Train a model: warm start, accuracy before, reinforcement learning, accuracy after.

Every phase leaves its result and its checkpoints in the run folder. Run the same command again to
resume.
"""

from __future__ import annotations

from argparse import Namespace
from pathlib import Path
from tempfile import TemporaryDirectory

from exchange import UserError
from launch import cli
from launch.config import JobConfig, dump, load_config
from launch.data.preflight import check_data, check_inputs, check_model
from launch.evaluation.testsets import SPLITS
from launch.result import Result, show
from launch.run_folder import RESULT, check, check_place
from minirl.run import preemption
from minirl.run.files import read_json


def main(arguments: list[str]) -> None:
    """Run the command."""
    options = make_parser().parse_intermixed_args(arguments)
    config = _limited(load_config(options.cfg, options.overrides), options)
    if options.show_prompt:
        cli.use_accelerator(options.accel)
        _show_prompt(config)
        return
    settings = dump(config)
    if options.yaml and not options.dry_run:
        raise UserError("--yaml: shows the settings of --dry-run; give that too")
    if options.only and config.warm_start is None:
        raise UserError(f"{options.cfg}: warm_start is null; set warm_start.steps=N")
    check(config.folder, settings)
    result = config.folder / RESULT
    if result.exists() and not options.dry_run:
        cli.output.print(f"This run is complete: {result}", soft_wrap=True)
        show(read_json(result, Result, advice="delete it to make it again"), config.folder)
        cli.output.print("For another one set seed=N or run.dir=FOLDER.")
        return
    check_inputs(config)
    if options.dry_run:
        check_place(config.folder, key="run.dir")
    cli.use_accelerator(options.accel, options, folder=config.folder)
    # JAX takes seconds to import, and nothing above needs it.
    from minirl.model.sharding import make_mesh

    if config.mesh != "auto":
        make_mesh(config.mesh.model_dump())
    if options.dry_run:
        _describe(config, settings if options.yaml else None)
        return
    from launch.job import train
    from launch.warm_start import only_warm_start

    with preemption.watched():
        if options.only:
            cli.output.print(f"Model: {only_warm_start(config)}", soft_wrap=True)
        else:
            train(config, accelerator=options.accel)


def _limited(config: JobConfig, options: Namespace) -> JobConfig:
    """Let a job have at most so many questions of each split, as settings of its own."""
    if options.limit is None:
        return config
    found = {
        "data.train.total": config.data.train.total,
        "evaluation.questions": config.evaluation.questions,
        "evaluation.validation_questions": config.evaluation.validation_questions,
    }
    if config.data.held_out is not None:
        found["data.held_out"] = config.data.held_out
    limits = [f"{key}={min(options.limit, n or options.limit)}" for key, n in found.items()]
    return load_config(options.cfg, [*options.overrides, *limits])


def _show_prompt(config: JobConfig) -> None:
    """Print a training prompt; a tiny model that is not made yet has no tokenizer."""
    from launch.build import SqlSide
    from launch.data.shown_prompt import show_prompt
    from minirl.model.tokenizer import ChatTokenizer

    for split in SPLITS:
        check_data(config, split)
    check_model(config)
    # Of all questions one is enough.
    one = config.data.train.model_copy(update={"total": 1})
    data = config.data.model_copy(update={"train": one, "held_out": config.data.held_out and 1})
    config = config.model_copy(update={"data": data})
    model = config.model.path or config.folder / "model"
    tokenizer = ChatTokenizer(model) if model.is_dir() else None
    with TemporaryDirectory() as spare:
        made = config.folder if (config.folder / "data").is_dir() else Path(spare)
        with SqlSide(config, made) as sql:
            example = sql.examples("train")[0]
            prompt = sql.training_prompt(example, tokenizer)
        show_prompt(example, prompt, tokenizer, limit=config.sampler.max_prompt_tokens)


def _describe(config: JobConfig, settings: str | None) -> None:
    """Print what the run would be, with its settings as comments of those."""
    from launch.dry_run import describe_run

    lines = describe_run(config)
    if settings is not None:
        cli.output.out(settings, end="")
    for name, line in lines.items():
        start = "" if settings is None else "# "
        cli.output.print(f"{start}{name:<10} {line}", markup=False, soft_wrap=True)


def make_parser() -> cli.Parser:
    """Make the command's parser."""
    parser = cli.make_parser("launch.train", __doc__)
    cli.add_processes(parser)
    cli.add_questions(parser.add_argument)
    parser.add_argument(
        "--only",
        choices=("warm-start",),
        help="stop after this phase; the whole command goes on from the model that it leaves",
    )
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="check all that the run needs (questions, databases, names and shapes of the model's "
        "tensors, the run folder, the device), say what the run would be, and stop",
    )
    parser.add_argument(
        "--yaml", action="store_true", help="with --dry-run: print the resolved settings too"
    )
    return parser


if __name__ == "__main__":
    cli.run(main)
