"""Train a model: warm start, accuracy before, reinforcement learning, accuracy after.

Every phase leaves its result and its checkpoints in the run folder, so that the same command goes
on from the last of them.
"""

from __future__ import annotations

from launch import cli
from launch.config import dump, load_config
from launch.folders import RESULT, check_place, check_run
from launch.inputs import check_inputs, check_questions
from minirl.run import preemption


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = cli.make_parser("launch.train", __doc__ or "")
    cli.add_processes(parser)
    parser.add_argument(
        "--dry-run",
        action="store_true",
        help="print the resolved settings, check all that the run needs (questions, databases, the "
        "model's files, the run folder, the device), and stop",
    )
    options = parser.parse_intermixed_args(arguments)
    cli.check_processes(options)
    config = load_config(options.cfg, options.overrides)
    if options.dry_run:
        cli.output.out(dump(config), end="")
    check_run(config)
    result = config.folder / RESULT
    if result.exists() and not options.dry_run:
        cli.output.print(f"This run is complete: {result}", soft_wrap=True)
        cli.output.print("For another one set seed=N or run.dir=FOLDER.")
        return
    check_inputs(config)
    if options.dry_run:
        check_place(config.folder, key="run.dir")
        check_questions(config)
    cli.use_accelerator(options.accel, options)
    if options.dry_run:
        cli.output.print(f"# data, model and {options.accel} are there")
        return
    # JAX takes seconds to import, and nothing above needs it.
    from launch.job import train

    with preemption.watched():
        train(config, accelerator=options.accel)


if __name__ == "__main__":
    cli.run(main)
