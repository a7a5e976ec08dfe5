"""The warm start alone: supervised training on gold replies."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from random import Random

from flax import nnx

from launch import cli
from launch.config import JobConfig, WarmStartConfig, check_inputs, load_config
from launch.demonstrations import demonstrations
from launch.wiring import SqlSide, load_model, model_folder
from minirl import weights
from minirl.errors import UserError
from minirl.sft import supervise
from sqlenv.types import Example


def main(arguments: list[str]) -> None:
    """Run the command."""
    from launch.train import claim_folder

    parser = cli.make_parser("launch.sft", __doc__ or "")
    options = parser.parse_intermixed_args(arguments)
    config = load_config(options.cfg, options.overrides)
    if config.warm_start is None:
        raise UserError(f"{options.cfg}: warm_start is null; set warm_start.steps=N")
    check_inputs(config)
    cli.use_accelerator(options.accel)
    folder = claim_folder(config)
    with SqlSide(config, folder) as sql:
        made = start_model(config, folder, sql, sql.examples(config.data.train))
    cli.output.print(f"Model: {made}")


def start_model(config: JobConfig, folder: Path, sql: SqlSide, train: Sequence[Example]) -> Path:
    """Return the model folder that reinforcement learning starts from, after the warm start."""
    source = model_folder(config, folder, sql, train)
    warm = config.warm_start
    target = folder / "warm" / "model"
    if warm is None or target.exists():
        return source if warm is None else target
    model, tokenizer = load_model(config, source)
    chosen = _sample(train, warm, config.seed)
    with cli.progress_bar("demonstrations") as progress:
        taught = demonstrations(
            chosen,
            sql.environment(tokenizer),
            repair_share=warm.repair_share,
            seed=config.seed,
            progress=progress,
        )
    with cli.progress_bar("warm start") as progress:
        params = supervise(
            model,
            taught,
            tokenizer,
            warm,
            seed=config.seed,
            folder=folder / "warm",
            progress=progress,
        )
    nnx.update(model, params)
    weights.save(model, target, source=source)
    return target


def _sample(train: Sequence[Example], warm: WarmStartConfig, seed: int) -> Sequence[Example]:
    if warm.examples is None or warm.examples >= len(train):
        return train
    numbers = Random(f"{seed} warm start").sample(range(len(train)), warm.examples)
    return [train[number] for number in sorted(numbers)]


if __name__ == "__main__":
    cli.run(main)
