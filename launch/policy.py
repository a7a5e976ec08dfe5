"""Policies: a run's best checkpoint, one checkpoint, a Hugging Face folder, or a job's start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from exchange import UserError
from launch.config import JobConfig, load_config
from launch.data.preflight import check_model
from launch.run_folder import CONFIG, WARM_MODEL, run_of
from minirl.config import LoraConfig

WHERE = "a run folder (its best checkpoint), one of its checkpoints/N, or a model folder"


@dataclass(frozen=True, slots=True)
class PolicySource:
    """Where a policy is read from; its name is for folders.

    Attributes:
        model: Hugging Face folder: structure, tokenizer and, without a checkpoint, the weights.
        run: Settings of the run that the checkpoint is of.
        lora: The adapters that the checkpoint holds; None if it holds all weights.
    """

    name: str
    model: Path
    checkpoint: Path | None = None
    run: JobConfig | None = None
    lora: LoraConfig | None = None


def policy_in(where: Path) -> PolicySource:
    """Find the policy in a run folder (its best checkpoint), `checkpoints/N`, or a model folder."""
    if (where / "config.json").is_file():
        return PolicySource(where.resolve().name, where)
    if run := run_of(where):
        if run != where:
            return _of_run(run, where)
        # Orbax takes seconds to import, and a mistake above needs it not.
        from minirl.run.checkpoint import best_step

        checkpoints = where / "checkpoints"
        step = best_step(checkpoints) if checkpoints.is_dir() else None
        if step is None:
            raise UserError(f"--checkpoint {where}: this run has no checkpoint yet")
        return _of_run(where, checkpoints / str(step))
    raise UserError(
        f"--checkpoint {where}: give {WHERE} (launch.export --gguf makes one of a GGUF file)"
    )


def find_policy(config: JobConfig, where: Path | None) -> PolicySource:
    """Find the policy to measure: in a folder, or the start of a job (that of the warm start)."""
    if where is not None:
        return policy_in(where)
    name = f"{config.run.name}-start"
    if (config.folder / WARM_MODEL).is_dir():
        return PolicySource(name, config.folder / WARM_MODEL)
    if config.model.path is not None:
        check_model(config)
        return PolicySource(config.model.path.resolve().name, config.model.path)
    if config.warm_start is None and (config.folder / "model").is_dir():
        return PolicySource(name, config.folder / "model")
    raise UserError(
        f"model.tiny: {config.folder} holds no model yet; run launch.train with these settings "
        "first, or give --checkpoint"
    )


def _of_run(run: Path, checkpoint: Path) -> PolicySource:
    """Take structure and tokenizer from the run's own model, whatever the job at hand says."""
    config = load_config(str(run / CONFIG), ())
    path = config.model.path or run / "model"
    if (run / WARM_MODEL).is_dir():
        path = run / WARM_MODEL
    elif config.model.path is not None:
        check_model(config)
    name = f"{run.resolve().name}-step{checkpoint.name}"
    return PolicySource(name, path, checkpoint, config, config.train.lora)
