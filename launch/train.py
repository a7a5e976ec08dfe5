"""Train a model: warm start, accuracy before, reinforcement learning, accuracy after.

    python -m launch.train --cfg progress-demo.yaml seed=1 run.dir=second

Every phase leaves its result and its checkpoints in the run folder. Run the same command again to
resume. For several processes run it on every host: Slurm and TPU slices tell them of each other,
elsewhere give --coordinator, --processes and --process.
"""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Literal

from launch import cli, options
from launch.build import SqlSide
from launch.config import JobConfig, dump, load_config
from launch.data import preflight
from launch.data.prompts import measure, read_tokenizer, show_prompt
from launch.files import RESULT, check_place, check_settings
from launch.reporting.answer import show_run
from minirl.exchange import UserError
from minirl.run import preemption


@options.command
def main(
    *overrides: options.Overrides,
    cfg: options.ConfigOption,
    accel: options.AcceleratorOption = None,
    limit: options.LimitOption = None,
    show_prompt: options.ShowPromptOption = False,
    only: Literal["warm-start"] | None = None,
    dry_run: bool = False,
    yaml: bool = False,
    coordinator: str | None = None,
    processes: int | None = None,
    process: int | None = None,
) -> None:
    """Train a model.

    Args:
        only: stop after this phase; without it, the same command continues from there
        dry_run: check all that the run needs (questions, databases, the model's tensors, the run
            folder, the device), say what the run would be, and stop
        yaml: as --dry-run, with the resolved settings
        coordinator: several processes: HOST:PORT of the first, or auto to let JAX find it
        processes: several processes: how many there are
        process: several processes: number of this one, from 0
    """
    # Of all questions one is enough for a prompt.
    limit = 1 if show_prompt else limit
    config = _limited(load_config(cfg, overrides), cfg, overrides, limit)
    if show_prompt:
        preflight.check_inputs(config)
        cli.use_accelerator(accel)
        _show_prompt(config)
        return
    resolved = dump(config)
    dry_run = dry_run or yaml
    if only and config.warm_start is None:
        raise UserError(f"{cfg}: warm_start is null; set warm_start.steps=N")
    check_settings(config.folder, resolved)
    result = config.folder / RESULT
    if result.exists() and not dry_run:
        cli.output.print(f"This run is complete: {result}")
        show_run(config.folder)
        cli.output.print("For another one set seed=N or run.dir=FOLDER.")
        return
    preflight.check_inputs(config)
    check_place(config.folder, key="run.dir")
    others = (coordinator, processes, process)
    accelerator = cli.use_accelerator(accel, others)
    # JAX takes seconds to import, and nothing above needs it.
    from minirl.model.sharding import make_mesh

    if config.mesh != "auto":
        make_mesh(config.mesh.model_dump())
    if dry_run:
        told = describe_run(config, accelerator)
        if yaml:
            cli.output.out(resolved, end="")
        for name, line in told.items():  # beside the settings, as comments of these
            cli.output.print(f"{'# ' if yaml else ''}{name:<10} {line}")
        return
    from launch import job

    with preemption.watched():
        job.train(config, accelerator=accelerator, only=only)


def _limited(config: JobConfig, cfg: str, settings: Sequence[str], limit: int | None) -> JobConfig:
    """Let a job have at most so many questions of each split, as settings of its own."""
    if limit is None:
        return config
    found = {
        "data.train.total": config.data.train.total,
        "evaluation.questions": config.evaluation.questions,
        "evaluation.validation_questions": config.evaluation.validation_questions,
    }
    if config.data.held_out is not None:
        found["data.held_out"] = config.data.held_out
    limits = [f"{key}={min(limit, n or limit)}" for key, n in found.items()]
    return load_config(cfg, [*settings, *limits])


def _show_prompt(config: JobConfig) -> None:
    """Print a training prompt; a tiny model that is not made yet has no tokenizer."""
    model = config.model.path or config.folder / "model"
    tokenizer = read_tokenizer(config, model) if model.is_dir() else None
    with TemporaryDirectory() as spare, SqlSide(config, Path(spare)) as sql:
        example = sql.examples("train")[0]
        prompt = sql.training_prompt(example, tokenizer)
        show_prompt(example, prompt, tokenizer, limit=config.sampler.max_prompt_tokens)


def describe_run(config: JobConfig, accelerator: str) -> dict[str, str]:
    """Check the model's files and all questions, and say in six lines what the run would be.

    Raises:
        UserError: The run would miss something.
    """
    from launch.learner import plan_phase
    from launch.warm_start import plan_early
    from minirl.model.huggingface import check_files, shapes_of

    tokenizer = None
    if config.model.path is not None:
        check_files(config.model.path, shapes_of(config.model.path))
        tokenizer = read_tokenizer(config, config.model.path)
    course, warm = config.train, config.warm_start
    with TemporaryDirectory() as scratch, SqlSide(config, Path(scratch)) as sql:
        loaded = preflight.check_questions(config, sql.root)
        train = loaded["train"].examples
        sql.prompts.describe(loaded["train"].descriptions)
        found = {split: len(data.examples) for split, data in loaded.items()}
        asked = {split: min(n, config.evaluation.of(split) or n) for split, n in found.items()}
        screened = "" if config.data.train.pass_rate is None else ", before the screening"
        first, limit = sql.prompts.training(train[0]), config.sampler.max_prompt_tokens
        memory, before = str(plan_phase(config, "train")), ""
        if warm is not None:
            memory += f"; for the warm start {plan_early(config, sql, train)}"
            before = f"after {f'{warm.steps:,}' if warm.steps else 'one pass'} of the warm start, "
        return {
            "questions": f"{found['train']:,} to learn from, {asked['validation']:,} of "
            f"{found['validation']:,} to choose checkpoints by, {asked['test']:,} of "
            f"{found['test']:,} to test on",
            "passes": preflight.describe_passes(config, found["train"]) + screened,
            "steps": f"{before}{course.all_steps:,} of {course.prompts_per_step} prompts x "
            f"{course.group_size} answers",
            "sampler": preflight.describe_sampler(config, accelerator),
            "memory": memory,
            "prompt": f"{measure(first, tokenizer, limit=limit)[1]} (--show-prompt prints it)",
        }


if __name__ == "__main__":
    cli.run(main)
