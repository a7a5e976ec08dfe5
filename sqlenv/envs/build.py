"""From the settings of an environment to the environment."""

from __future__ import annotations

from sqlenv.config import AgenticConfig, DiagnosedConfig, EnvConfig
from sqlenv.envs.agentic import Agentic
from sqlenv.envs.diagnosed import Diagnosed, Feedback
from sqlenv.envs.single_turn import BaseEnvironment, FirstPrompt, SingleTurn
from sqlenv.executor import Executor
from sqlenv.witness.store import open_store


def build_environment(
    config: EnvConfig, *, executor: Executor, first_prompt: FirstPrompt, feedback: Feedback
) -> BaseEnvironment:
    """Build the environment that the settings name, with witnesses from the cache that all runs
    share; `feedback` is what the diagnosed one says.
    """
    parts = {"executor": executor, "first_prompt": first_prompt, "witnesses": open_store(config)}
    if isinstance(config, DiagnosedConfig):
        return Diagnosed(config, feedback=feedback, **parts)
    if isinstance(config, AgenticConfig):
        return Agentic(config, **parts)
    return SingleTurn(config, **parts)


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
