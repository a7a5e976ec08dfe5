"""What is evaluated or exported: a run's best checkpoint, one checkpoint, or a model's folder; and
by whose settings it is asked.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from launch import cli
from launch.config import JobConfig, load_config
from launch.data.preflight import check_model
from launch.files import CONFIG, WARM_MODEL, claim_data, fingerprints
from minirl.config import LoraConfig
from minirl.exchange import UserError, named

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
    run = _run_in(where)
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
    return _of_run(run, where, moved)


def _run_in(where: Path) -> Path | None:
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


def _of_run(run: Path, checkpoint: Path, moved: Sequence[str]) -> PolicySource:
    """Take structure and tokenizer from the run's own model, whatever the job at hand says."""
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
    name = f"{run.resolve().name}-step{checkpoint.name}"
    return PolicySource(name, path, checkpoint, config, config.train.lora)


PLAIN = "plain.yaml"
"""The config of models that were trained for no prompt of ours."""
_COMMAND = "python -m launch.eval"
_SET = "--data spider-dev --data-root DIR"


def find_subject(
    cfg: str | None, overrides: Sequence[str], *, checkpoint: Path | None, endpoint: str | None
) -> JobConfig:
    """Return the job that an evaluation goes by: without a config a run has its own, and all else
    that of plain.yaml.

    Raises:
        UserError: There is nothing to evaluate, or a config is wrong.
    """
    if not (cfg or checkpoint or endpoint):
        raise UserError(
            f"nothing to evaluate; these work: `{_COMMAND} --checkpoint RUN`, "
            f"`{_COMMAND} --endpoint URL --model NAME {_SET}`, "
            f"`{_COMMAND} --predictions FILE {_SET}`"
        )
    if cfg:
        return load_config(cfg, overrides)
    if checkpoint and (run := _run_in(checkpoint)):
        # But for the devices and servers of the machine that it was made on.
        config = load_config(str(run / CONFIG), ["mesh=auto", "rollout={}", *overrides])
        return config.model_copy(update={"run": config.run.model_copy(update={"dir": run})})
    config = load_config(PLAIN, overrides)
    said = f"prompt.style={config.prompt.style} (--show-prompt prints one), "
    said += f"prompt.schema_style={config.prompt.schema_style}, one reply."
    # Standard output may be the result's.
    cli.console.print(f"Settings of {PLAIN}: {said}", soft_wrap=True)
    return config
