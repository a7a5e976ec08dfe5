"""From the settings of a reward to the reward."""

from __future__ import annotations

from collections.abc import Callable

from minirl.exchange import Score
from rewards.astra import AstraReward
from rewards.columns import PaverlReward
from rewards.config import (
    ExecutionConfig,
    ExpoConfig,
    OneShotConfig,
    PaverlConfig,
    ProgressiveConfig,
    RewardConfig,
)
from rewards.execution import execution_reward
from rewards.expo.reward import ExpoReward
from rewards.progress.reward import ProgressiveReward, one_shot_reward
from sqlenv.executor import Executor
from sqlenv.types import Episode, Numbers

Reward = Callable[[Episode], Score]


def build_reward(config: RewardConfig, executor: Executor, numbers: Numbers = "close") -> Reward:
    """Build the reward that the settings name; `numbers` are compared as the environment does."""
    if isinstance(config, ProgressiveConfig):
        return ProgressiveReward(config)
    if isinstance(config, OneShotConfig):
        return one_shot_reward
    if isinstance(config, ExecutionConfig):
        return execution_reward
    if isinstance(config, ExpoConfig):
        return ExpoReward(config, executor, numbers)
    if isinstance(config, PaverlConfig):
        return PaverlReward(config, executor)
    return AstraReward(config, executor)
