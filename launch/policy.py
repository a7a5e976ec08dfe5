"""What is evaluated or exported: a run's best checkpoint, one checkpoint, or a model's folder."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch.config import JobConfig, load_config
from launch.data.preflight import check_model
from launch.files import CONFIG, WARM_MODEL, claim_data, fingerprints
from minirl.config import LoraConfig
from minirl.exchange import UserError, named

PLAIN = "plain.yaml"
"""The config of models that were trained for no prompt of ours."""
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


def policy_in(where: Path, moved: Sequence[str] = ()) -> PolicySource:
    """Find the policy in a run folder (its best checkpoint), `checkpoints/N`, or a model folder;
    `moved` are settings that say where the model of a run is now.
    """
    run = run_in(where)
    if run is None:
        return PolicySource(where.resolve().name, where)
    if run == where:
        # Orbax takes seconds to import, and a mistake above needs it not.
        from minirl.run.checkpoint import best_step

        checkpoints = run / "checkpoints"
        step = best_step(checkpoints) if checkpoints.is_dir() else None
        if step is None:
            raise UserError(f"--checkpoint {run}: this run has no checkpoint yet")
        where = checkpoints / str(step)
    # Structure and tokenizer are of the run's own model, whatever the job at hand says.
    config = load_config(str(run / CONFIG), moved)
    path = config.model.path or run / "model"
    if (run / WARM_MODEL).is_dir():
        path = run / WARM_MODEL
    elif config.warm_start is not None and config.train.lora is not None:
        raise UserError(f"{run / WARM_MODEL}: the adapters are of this model; bring it back")
    elif config.model.path is not None:
        with named(str(run / CONFIG)):  # which says where it is, to commands without settings too
            check_model(config)
        if config.train.lora is not None:
            claim_data(run, fingerprints({}, path))
    name = f"{run.resolve().name}-step{where.name}"
    return PolicySource(name, path, where, config, config.train.lora)


def run_in(where: Path) -> Path | None:
    """Return the run folder of a checkpoint: itself, or that of its `checkpoints/N`; None for a
    model's folder.
    """
    if (where / "config.json").is_file():
        return None
    run = where.resolve().parent.parent
    if (where / CONFIG).is_file():
        return where
    if where.name.isdigit() and where.is_dir() and (run / CONFIG).is_file():
        return run
    raise UserError(f"--checkpoint {where}: give {WHERE}")
