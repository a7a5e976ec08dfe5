"""The warm start alone: supervised training on demonstrations.

`launch.train` with the same settings goes on from the model it leaves in the run folder.
"""

from __future__ import annotations

from launch import cli
from launch.config import load_config
from launch.folders import check_run
from launch.inputs import check_inputs
from minirl.errors import UserError
from minirl.run import preemption


def main(arguments: list[str]) -> None:
    """Run the command."""
    parser = cli.make_parser("launch.sft", __doc__ or "")
    cli.add_processes(parser)
    options = parser.parse_intermixed_args(arguments)
    cli.check_processes(options)
    config = load_config(options.cfg, options.overrides)
    if config.warm_start is None:
        raise UserError(f"{options.cfg}: warm_start is null; set warm_start.steps=N")
    check_run(config)
    check_inputs(config)
    cli.use_accelerator(options.accel, options)
    # JAX takes seconds to import, and nothing above needs it.
    from launch.warm_start import only_warm_start

    with preemption.watched():
        model = only_warm_start(config)
    cli.output.print(f"Model: {model}", soft_wrap=True)


if __name__ == "__main__":
    cli.run(main)
