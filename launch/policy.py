"""Which weights to measure: a run's best, one checkpoint, a Hugging Face folder, a job's start."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from flax import nnx

from launch.config import JobConfig, load_config
from launch.folders import CONFIG
from launch.inputs import check_model
from launch.warm_start import FOLDER as WARM
from launch.wiring import load_model
from minirl.config import LoraConfig
from minirl.errors import UserError
from minirl.model.decoder import Decoder
from minirl.model.lora import split
from minirl.model.tokenizer import ChatTokenizer
from minirl.run.checkpoint import best_step, read_params


@dataclass(frozen=True, slots=True)
class PolicySource:
    """Where a policy is read from.

    Attributes:
        name: Short, for the names of folders.
        model: Hugging Face folder: structure, tokenizer and, without a checkpoint, the weights.
        checkpoint: Folder of one checkpoint, or None.
        run: Settings of the run that the checkpoint is of.
        lora: The adapters that the checkpoint holds; None if it holds all weights.
    """

    name: str
    model: Path
    checkpoint: Path | None = None
    run: JobConfig | None = None
    lora: LoraConfig | None = None


def find_policy(config: JobConfig, where: Path | None) -> PolicySource:
    """Find the policy to measure.

    Args:
        config: The job, whose start is taken when `where` is None: the model that the warm start
            left in the run folder if there is one, else `model.path`.
        where: A run folder (its best checkpoint), one of its `checkpoints/N`, or a Hugging Face
            folder.

    Raises:
        UserError: There is no policy.
    """
    return _start(config) if where is None else policy_in(where)


def policy_in(where: Path) -> PolicySource:
    """Find the policy in a folder; see `find_policy`."""
    if not where.is_dir():
        raise UserError(f"--checkpoint {where}: no such folder")
    if (where / "config.json").is_file():
        return PolicySource(where.resolve().name, where)
    if (where / CONFIG).is_file():
        step = best_step(where / "checkpoints") if (where / "checkpoints").is_dir() else None
        if step is None:
            raise UserError(f"--checkpoint {where}: this run has no checkpoint yet")
        return _of_run(where, where / "checkpoints" / str(step))
    run = next((folder for folder in where.resolve().parents if (folder / CONFIG).is_file()), None)
    if run is None or not where.name.isdigit() or where.resolve().parent.name != "checkpoints":
        raise UserError(
            f"--checkpoint {where}: give a run folder, one of its checkpoints/N, "
            "or a Hugging Face model folder"
        )
    return _of_run(run, where)


def load_policy(source: PolicySource, config: JobConfig) -> tuple[Decoder, ChatTokenizer]:
    """Read a policy and its tokenizer.

    Args:
        source: Where from.
        config: The job, for the devices and the type of the computation.
    """
    model, tokenizer = load_model(config, source.model, lora=source.lora)
    if source.checkpoint is not None:
        nnx.update(model, read_params(source.checkpoint, split(model)[1]))
    return model, tokenizer


def _start(config: JobConfig) -> PolicySource:
    name = f"{config.run.name}-start"
    if (config.folder / WARM).is_dir():
        return PolicySource(name, config.folder / WARM)
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
    is_warm = checkpoint.resolve().parents[1] != run.resolve()
    phase = config.warm_start if is_warm else config.train
    path = config.model.path or run / "model"
    if (run / WARM).is_dir() and not is_warm:
        path = run / WARM
    elif config.model.path is not None:
        check_model(config)
    name = f"{run.resolve().name}{'-warm' if is_warm else ''}-step{checkpoint.name}"
    return PolicySource(name, path, checkpoint, config, phase.lora if phase else None)
