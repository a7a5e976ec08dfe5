"""What is evaluated, and by whose settings: a config's, the run's own, or plain.yaml's."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from pathlib import Path

from exchange import UserError
from launch import cli
from launch.config import JobConfig, flat, load_config
from launch.evaluation.testsets import SPLITS
from launch.run_folder import CONFIG, RESULT, run_of
from minirl.config import RolloutConfig

_log = logging.getLogger(__name__)

PLAIN = "plain.yaml"
"""The config of models that were trained for no prompt of ours."""
_RUNS = Path("runs")
_MACHINE = frozenset({"sampler.slots", "sampler.cache_gb"})
"""Settings of the sampler that decide nothing but time and memory."""
_TOLD = 4
_COMMAND = "python -m launch.eval"
_SET = "--data spider-dev --data-root DIR"


def find_subject(
    cfg: str | None,
    overrides: Sequence[str],
    *,
    checkpoint: Path | None,
    endpoint: str | None,
    data: str,
) -> tuple[JobConfig, Path | None]:
    """Return the job that an evaluation goes by, and the folder of the policy if one is named.

    Without a config a run has its own, and all else that of plain.yaml; without a model too, it is
    the newest finished run.

    Raises:
        UserError: There is nothing to evaluate, or a config is wrong.
    """
    if not (cfg or checkpoint or endpoint):
        checkpoint = _newest_run()
        where = f"its {data} split" if data in SPLITS else data
        said = f"No model is named: this is {checkpoint}, the newest finished run, on {where}."
        cli.output.print(said, soft_wrap=True)
    run = run_of(checkpoint) if checkpoint else None
    if cfg:
        config = load_config(cfg, overrides)
        if run:
            _tell_differences(cfg, config, run)
    elif run:
        config = _own_config(run, overrides)
    else:
        config = load_config(PLAIN, overrides)
        cli.output.print(_stated(config), soft_wrap=True)
    return config, checkpoint


def _stated(config: JobConfig) -> str:
    prompt = config.prompt
    return (
        f"Settings of {PLAIN}: prompt.style={prompt.style} (--show-prompt prints one), "
        f"prompt.schema_style={prompt.schema_style}, one reply."
    )


def _newest_run() -> Path:
    """Find the run below `runs` that finished last."""
    finished = [path for path in _RUNS.rglob(RESULT) if (path.parent / CONFIG).is_file()]
    if not finished:
        raise UserError(
            f"nothing to evaluate: no finished run is below {_RUNS}/. These work: "
            f"`{_COMMAND} --checkpoint RUN`, `{_COMMAND} --endpoint URL --model NAME {_SET}`, "
            f"`{_COMMAND} --predictions FILE {_SET}`"
        )
    return max(finished, key=lambda path: path.stat().st_mtime_ns).parent


def _own_config(run: Path, overrides: Sequence[str]) -> JobConfig:
    """Read the config of a run, but for the devices and servers of the machine it was made on."""
    config = load_config(str(run / CONFIG), overrides)
    changed: dict[str, object] = {"run": config.run.model_copy(update={"dir": run})}
    given = {override.split("=")[0].split(".")[0] for override in overrides}
    here = {"mesh": "auto", "rollout": RolloutConfig()}
    return config.model_copy(
        update=changed | {key: value for key, value in here.items() if key not in given}
    )


def _tell_differences(cfg: str, config: JobConfig, run: Path) -> None:
    """Say in a line how a config asks in another way than the run was trained."""
    if found := [*_differences(config, load_config(str(run / CONFIG), ()))]:
        more = f" and {len(found) - _TOLD} more" if len(found) > _TOLD else ""
        _log.warning(
            "--cfg %s is not how %s was trained: %s%s; without --cfg its own config is taken",
            cfg, run, ", ".join(found[:_TOLD]), more,
        )  # fmt: skip


def _differences(config: JobConfig, trained: JobConfig) -> Iterator[str]:
    sections = {"prompt", "env", "sampler"}
    here, there = (
        dict(flat(one.model_dump(mode="json", include=sections))) for one in (config, trained)
    )
    for key in (key for key in there if key in here and key not in _MACHINE):
        if here[key] != there[key]:
            yield f"{key} is {here[key]} (there {there[key]})"


def limited(config: JobConfig, questions: int | None) -> JobConfig:
    """Let an evaluation have at most so many questions of any split, sampled by seed."""
    if questions is None:
        return config
    update = {"questions": questions, "validation_questions": questions}
    return config.model_copy(update={"evaluation": config.evaluation.model_copy(update=update)})
