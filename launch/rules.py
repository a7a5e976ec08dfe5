"""The rules between settings of different parts."""

from __future__ import annotations

from typing import TYPE_CHECKING

from rewards.config import contradictions as of_reward_and_env

if TYPE_CHECKING:
    from launch.config import JobConfig


def contradictions(config: JobConfig) -> list[tuple[bool, str]]:
    """List rules that settings may break: whether they do, and a line that says what to write."""
    demo, root = config.data.demo, config.data.root
    source = config.model
    return [
        (
            (demo is None) == (root is None),
            "data: give one of data.demo (generated) and data.root (a folder); "
            "set the other to null",
        ),
        (
            (config.data.validation is None) == (config.data.held_out is None),
            "data: give one of data.validation (questions of their own) and data.held_out (a "
            "number of questions of training databases); set the other to null",
        ),
        (
            config.train.epochs is not None and config.data.train.total is None,
            "train.epochs: counts passes over data.train.total questions; set that, or "
            "train.steps=N",
        ),
        (
            config.train.epochs is not None and "steps" in config.train.model_fields_set,
            "train: give one of train.steps and train.epochs",
        ),
        (
            (source.path is None) == (source.tiny is None),
            "model: give one of model.path (a folder) and model.tiny (made on the spot); "
            "set the other to null",
        ),
        (
            config.sampler.temperature == 0,
            "sampler.temperature: 0 is greedy, and GRPO learns from samples; use 1.0",
        ),
        (
            (config.sampler.max_reply_tokens or 0) > config.sampler.max_response_tokens,
            "sampler.max_reply_tokens: larger than sampler.max_response_tokens",
        ),
        *of_reward_and_env(config.reward, config.env),
        (
            config.reward.kind == "astra"
            and config.reward.aggregate == "steps"
            and config.train.algorithm.estimator != "direct",
            "reward.aggregate: the scores of steps are advantages as they are; set "
            "train.algorithm.estimator=direct",
        ),
        (
            config.evaluation.episode == "agentic" and config.env.kind != "agentic",
            "evaluation.episode: agentic measures tool-calling episodes; set env.kind=agentic, or "
            "use single_turn",
        ),
        (
            config.env.kind == "agentic" and config.prompt.style == "progress",
            "prompt.style: progress asks for one reply in <sql> tags; with env.kind=agentic use "
            "omnisql",
        ),
    ]
