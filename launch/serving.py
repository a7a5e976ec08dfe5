"""The servers of a job, if it has any."""

from __future__ import annotations

from contextlib import AbstractContextManager, nullcontext
from pathlib import Path

from launch.config import JobConfig
from minirl.sglang.sampler import Servers


def serving(config: JobConfig, model: Path, folder: Path) -> AbstractContextManager[Servers | None]:
    """Return the servers that sample, to be entered; None for the native sampler.

    Args:
        config: The job.
        model: Hugging Face folder that training starts from.
        folder: The run folder.
    """
    if config.rollout.backend == "native":
        return nullcontext()
    return Servers(
        config.rollout.sglang,
        model,
        config.sampler,
        dtype=config.model.dtype,
        seed=config.seed,
        folder=folder,
    )
