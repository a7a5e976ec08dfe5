"""From the settings of a reward to the reward."""

from __future__ import annotations

from collections.abc import Callable

from rewards.astra import AstraReward
from rewards.config import AstraConfig, OneShotConfig, PaverlConfig, RewardConfig
from rewards.execution import GoldResults
from rewards.paverl import PaverlReward
from rewards.progressive import ColumnsOf, OneShotReward, ProgressiveReward
from rewards.types import Score
from sqlenv.types import Episode

Reward = Callable[[Episode], Score]


def build_reward(
    config: RewardConfig, *, columns_of: ColumnsOf, executor: GoldResults | None = None
) -> Reward:
    """Build the reward that the settings name.

    Args:
        config: One of the reward families.
        columns_of: Column names by table of an example's database, None where unknown.
        executor: Gives gold results, to the families that compare with them.

    Raises:
        ValueError: The family needs an executor.
    """
    if isinstance(config, PaverlConfig | AstraConfig):
        if executor is None:
            raise ValueError(f"the reward {config.kind} needs an executor")
        if isinstance(config, PaverlConfig):
            return PaverlReward(config, executor)
        return AstraReward(config, executor)
    if isinstance(config, OneShotConfig):
        return OneShotReward(config)
    return ProgressiveReward(config, columns_of)
