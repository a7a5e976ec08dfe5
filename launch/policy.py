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
from launch.files import CONFIG, WARM_MODEL, claim_data, fingerprints, run_of
from minirl.config import LoraConfig
from minirl.exchange import UserError

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
    if (where / "config.json").is_file():
        return PolicySource(where.resolve().name, where)
    if run := run_of(where):
        if run != where:
            return _of_run(run, where, moved)
        # Orbax takes seconds to import, and a mistake above needs it not.
        from minirl.run.checkpoint import best_step

        checkpoints = where / "checkpoints"
        step = best_step(checkpoints) if checkpoints.is_dir() else None
        if step is None:
            raise UserError(f"--checkpoint {where}: this run has no checkpoint yet")
        return _of_run(where, checkpoints / str(step), moved)
    raise UserError(f"--checkpoint {where}: give {WHERE}")


def _of_run(run: Path, checkpoint: Path, moved: Sequence[str]) -> PolicySource:
    """Take structure and tokenizer from the run's own model, whatever the job at hand says."""
    config = load_config(str(run / CONFIG), moved)
    path = config.model.path or run / "model"
    if (run / WARM_MODEL).is_dir():
        path = run / WARM_MODEL
    elif config.model.path is not None:
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
    if checkpoint and (run := run_of(checkpoint)):
        # But for the devices and servers of the machine that it was made on.
        given = {override.split("=")[0].split(".")[0] for override in overrides}
        here = {"mesh": "auto", "rollout": "{}"}
        changed = [f"{key}={value}" for key, value in here.items() if key not in given]
        config = load_config(str(run / CONFIG), [*changed, *overrides])
        return config.model_copy(update={"run": config.run.model_copy(update={"dir": run})})
    config = load_config(PLAIN, overrides)
    said = f"prompt.style={config.prompt.style} (--show-prompt prints one), "
    said += f"prompt.schema_style={config.prompt.schema_style}, one reply."
    cli.output.print(f"Settings of {PLAIN}: {said}")
    return config
