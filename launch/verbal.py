"""Verbal RL: a model writes several queries for a question, judges them, and the best is taken.

    python -m launch.verbal --cfg verbal.yaml --endpoint http://127.0.0.1:30000/v1 --model qwen
    python -m launch.verbal --cfg progress-demo.yaml --checkpoint runs/progress-demo-seed0

PaVeRL-SQL's way without training (paper 003, section III-B). The model is one behind an endpoint
that speaks OpenAI's chat completions (a key is read from OPENAI_API_KEY and from nowhere else), or
a policy of ours, sampled in this process or by SGLang servers (rollout.backend=sglang). The folder
it names holds predictions as launch.eval writes them, choices.jsonl with candidates and scores,
answers.jsonl with every answer that was paid for, and result.json with accuracy and cost. The same
command goes on where an interrupted one was.
"""

from __future__ import annotations

from argparse import Namespace
from typing import TYPE_CHECKING

import yaml

from launch import cli
from launch.config import JobConfig, load_config
from launch.data.preflight import check_data
from launch.eval import add_arguments, add_endpoint, check_endpoint, default_folder
from launch.run_folder import RESULT, check

if TYPE_CHECKING:
    from launch.asked import Asked


def main(arguments: list[str]) -> None:
    """Run the command."""
    options = _arguments(arguments)
    config = load_config(options.cfg, options.overrides)
    check_endpoint(options)
    check_data(config, options.data)
    if options.endpoint is None:
        cli.use_accelerator(options.accel)
    # JAX takes seconds to import, and nothing above needs it.
    from launch.asked import Asked
    from launch.verbal_job import run, show

    asked = Asked.find(config, options.endpoint, options.model, options.checkpoint)
    out = options.out or default_folder(config, options.data, asked, "verbal")
    settings = _settings(config, options, asked)
    check(out, settings, key="--out")
    if (out / RESULT).exists():
        cli.output.print(f"This job is complete: {out / RESULT}", soft_wrap=True)
        show(out)
        return
    run(config, asked, split=options.data, out=out, settings=settings)


def _arguments(arguments: list[str]) -> Namespace:
    parser = cli.make_parser("launch.verbal", __doc__ or "")
    add_arguments(parser)
    add_endpoint(parser)
    return parser.parse_intermixed_args(arguments)


# How calls are made may change between two starts, and so may the address of a server.
_MANNERS = {"parallel", "timeout_s", "retries"}


def _settings(config: JobConfig, options: Namespace, asked: Asked) -> str:
    """Write down what decides the predictions."""
    from launch import measured

    used = {"seed", "prompt", "env", "executor", "evaluation"}
    native = {"sampler"} if options.endpoint is None else set()
    numerics = {"dtype": config.model.dtype, "accelerator": options.accel} if native else {}
    settings = {
        "model": asked.identity,
        **asked.settings(config),
        **numerics,
        "split": options.data,
        **config.model_dump(mode="json", include=used | native),
        "data": measured.data(config, options.data),
        "verbal": config.verbal.model_dump(mode="json", exclude=_MANNERS),
        **asked.places(config),
    }
    return yaml.safe_dump(settings, sort_keys=False, width=100)


if __name__ == "__main__":
    cli.run(main)
