"""Measure execution accuracy: overall, by difficulty and by database.

    python -m launch.eval --cfg progress.yaml --checkpoint runs/progress-seed0 --decode vote@8

The folder it names holds predictions.jsonl, the same for the official evaluators (predictions.sql
for Spider, predictions_bird.json for BIRD) and result.json. The same command goes on where an
interrupted one was.
"""

from __future__ import annotations

from argparse import ArgumentParser, Namespace
from pathlib import Path

import yaml

from launch import cli
from launch.config import SPLITS, Decode, JobConfig, Split, load_config
from launch.folders import RESULT, check
from launch.inputs import check_data
from minirl.errors import UserError


def main(arguments: list[str]) -> None:
    """Run the command."""
    options = _arguments(arguments)
    config = load_config(options.cfg, options.overrides)
    decode = Decode.parse(options.decode, vote_temperature=config.evaluation.vote_temperature)
    check_data(config, options.data)
    if options.checkpoint is not None and not options.checkpoint.is_dir():
        raise UserError(f"--checkpoint {options.checkpoint}: no such folder")
    cli.use_accelerator(options.accel)
    # JAX takes seconds to import, and nothing above needs it.
    from launch.eval_job import evaluate, show
    from launch.policy import find_policy

    source = find_policy(config, options.checkpoint)
    out = options.out or default_folder(config, options.data, source.name, options.decode)
    settings = _settings(config, options, model=source.model, checkpoint=source.checkpoint)
    check(out, settings, key="--out")
    if (out / RESULT).exists():
        cli.output.print(f"This evaluation is complete: {out / RESULT}", soft_wrap=True)
        show(out)
        return
    evaluate(config, source, decode, split=options.data, out=out, settings=settings)


def _arguments(arguments: list[str]) -> Namespace:
    parser = cli.make_parser("launch.eval", __doc__ or "")
    add_arguments(parser)
    parser.add_argument(
        "--decode",
        default="greedy",
        metavar="greedy|vote@N",
        help="one greedy reply, or the majority of N samples' results (default: greedy)",
    )
    return parser.parse_intermixed_args(arguments)


def add_arguments(parser: ArgumentParser) -> None:
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
        "--data", choices=SPLITS, default="test", help="which questions (default: test)"
    )
    parser.add_argument(
        "--out",
        type=Path,
        metavar="DIR",
        help="folder of the results (default: evals/, named after policy, data, decoding, seed)",
    )


def default_folder(config: JobConfig, split: Split, name: str, decode: str) -> Path:
    """Name a folder after policy, data, decoding and seed."""
    sources = getattr(config.data, split).sources
    data = dict.fromkeys(source.layout for source in sources)
    parts = (name, *data, split, decode, f"seed{config.seed}")
    return Path("evals") / "-".join(parts)


def _settings(
    config: JobConfig, options: Namespace, *, model: Path, checkpoint: Path | None
) -> str:
    """Write down what decides the predictions: of the job, only what evaluation looks at."""
    used = {"seed", "data", "prompt", "env", "executor", "sampler", "evaluation"}
    settings = {
        "model": str(model.resolve()),
        "checkpoint": str(checkpoint.resolve()) if checkpoint else None,
        "dtype": config.model.dtype,
        "decode": options.decode,
        "split": options.data,
        "accelerator": options.accel,
        **config.model_dump(mode="json", include=used),
    }
    return yaml.safe_dump(settings, sort_keys=False, width=100)


if __name__ == "__main__":
    cli.run(main)
