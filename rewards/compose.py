"""From the settings of a reward to the reward."""

from __future__ import annotations

from collections.abc import Callable

from rewards.config import ExpoConfig, OneShotConfig, RewardConfig
from rewards.expo import ExpoReward, Runner
from rewards.progressive import ColumnsOf, OneShotReward, ProgressiveReward
from rewards.types import Score
from sqlenv.config import Wrapping
from sqlenv.types import Episode

Reward = Callable[[Episode], Score]


def build_reward(
    config: RewardConfig,
    *,
    columns_of: ColumnsOf,
    executor: Runner | None = None,
    wrapping: Wrapping = "sql_tag",
) -> Reward:
    """Build the reward that the settings name.

    Args:
        config: One of the reward families.
        columns_of: Column names by table of an example's database, None where unknown.
        executor: Runs queries; only the families that run some themselves need it.
        wrapping: Where the SQL of a reply is.

    Raises:
        ValueError: The family needs an executor.
    """
    if isinstance(config, OneShotConfig):
        return OneShotReward(config)
    if isinstance(config, ExpoConfig):
        if executor is None:
            raise ValueError("the clause-level reward runs parts of queries: give it an executor")
        return ExpoReward(config, columns_of=columns_of, executor=executor, wrapping=wrapping)
    return ProgressiveReward(config, columns_of)
