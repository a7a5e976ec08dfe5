"""From the settings of a reward to the reward."""

from __future__ import annotations

from collections.abc import Callable

from rewards.config import OneShotConfig, RewardConfig
from rewards.progressive import ColumnsOf, OneShotReward, ProgressiveReward
from rewards.types import Score
from sqlenv.types import Episode

Reward = Callable[[Episode], Score]


def build_reward(config: RewardConfig, *, columns_of: ColumnsOf) -> Reward:
    """Build the reward that the settings name.

    Args:
        config: One of the reward families.
        columns_of: Column names by table of an example's database, None where unknown.
    """
    if isinstance(config, OneShotConfig):
        return OneShotReward(config)
    return ProgressiveReward(config, columns_of)
