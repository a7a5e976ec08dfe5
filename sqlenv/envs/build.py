"""From the settings of an environment to the environment."""

from __future__ import annotations

from typing import Any

from sqlenv.config import AgenticConfig, DiagnosedConfig, EnvConfig
from sqlenv.envs.agentic import Agentic
from sqlenv.envs.diagnosed import Diagnosed
from sqlenv.envs.single_turn import Feedback, FirstPrompt, Runner, SingleTurn
from sqlenv.witness.store import WitnessStore

Environment = SingleTurn | Diagnosed | Agentic


def build_environment(
    config: EnvConfig,
    *,
    executor: Runner,
    first_prompt: FirstPrompt,
    feedback: Feedback,
    witnesses: WitnessStore | None = None,
) -> Environment:
    """Build the environment that the settings name."""
    kind: Any = {"diagnosed": Diagnosed, "agentic": Agentic}.get(config.kind, SingleTurn)
    return kind(
        config,
        executor=executor,
        first_prompt=first_prompt,
        feedback=feedback,
        witnesses=witnesses,
    )


def max_replies(config: EnvConfig) -> int:
    """Return the most replies of an episode."""
    if isinstance(config, AgenticConfig):
        return config.calls + 1
    return config.turns if isinstance(config, DiagnosedConfig) else 1


def shorten(config: EnvConfig, replies: int) -> EnvConfig:
    """Let an episode have at most so many replies; the last one of a tool-calling one answers."""
    if isinstance(config, AgenticConfig):
        return config.model_copy(update={"calls": min(config.calls, replies - 1)})
    if isinstance(config, DiagnosedConfig):
        return config.model_copy(update={"turns": min(config.turns, replies)})
    return config
