"""From the row of a data set and a model's replies to a score; what all adapters share."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from functools import lru_cache
from pathlib import Path
from typing import Any

from pydantic import ValidationError

from rewards.compose import build_reward
from rewards.config import ProgressiveConfig, RewardConfig
from rewards.progressive import columns_of
from rewards.types import Score
from sqlenv.compare import MatchMode
from sqlenv.config import ExecutorConfig, Settings, Wrapping
from sqlenv.dialects import NAMES
from sqlenv.envs.single_turn import judge
from sqlenv.errors import UserError
from sqlenv.executor import Executor
from sqlenv.types import Attempt, Episode, Example


class AdapterConfig(Settings):
    """What a reward inside another trainer needs to be told."""

    reward: RewardConfig = ProgressiveConfig()
    """The reward family."""

    match: MatchMode = "set"
    """How a result is compared with the gold result."""

    wrapping: Wrapping = "sql_tag"
    """Where the SQL of a reply is: the last `<sql>…</sql>`, or the last fence marked `sql`."""

    executor: ExecutorConfig = ExecutorConfig()
    """How queries run, and what one of them may use up."""


class Scorer:
    """Judges replies by execution and rewards them. Threads may share one; forks may not."""

    def __init__(self, config: AdapterConfig) -> None:
        self.config = config
        self.executor = Executor(config.executor)
        self.columns_of = columns_of()
        self.reward = build_reward(config.reward, columns_of=self.columns_of)
        self._threads = ThreadPoolExecutor(config.executor.workers, thread_name_prefix="rewards")

    def score(self, example: Example, replies: Sequence[str]) -> Score:
        """Score the replies of one episode, one a turn; no reply whatever raises.

        Raises:
            UserError: The example's database cannot be used.
        """
        return self.reward(Episode(example, tuple(self._judge(example, r) for r in replies)))

    def score_many(self, episodes: Sequence[tuple[Example, Sequence[str]]]) -> list[Score]:
        """Score episodes on all workers, in order."""
        return list(self._threads.map(lambda pair: self.score(*pair), episodes))

    def _judge(self, example: Example, reply: str) -> Attempt:
        config = self.config
        return judge(example, reply, self.executor, wrapping=config.wrapping, match=config.match)


def read_settings(settings: AdapterConfig | Mapping[str, Any] | None) -> AdapterConfig:
    """Read an adapter's settings from a mapping, also one of OmegaConf's.

    Raises:
        UserError: A key is unknown, of a wrong type, or contradicts another one.
    """
    try:
        config = AdapterConfig.model_validate(_plain(settings or {}))
    except ValidationError as error:
        first = error.errors()[0]
        where = ".".join(map(str, first["loc"]))
        raise UserError(f"settings of the SQL reward: {where}: {first['msg']}") from None
    if config.reward.kind == "progressive" and config.wrapping != "sql_tag":
        raise UserError("wrapping: the progressive reward judges the <sql> tag; use sql_tag")
    return config


def scorer_of(config: AdapterConfig) -> Scorer:
    """Return the scorer of these settings in this process; it is made when first needed.

    Trainers pickle reward functions and fork; an executor allows neither.
    """
    return _scorer(config, os.getpid())


@lru_cache(maxsize=8)
def _scorer(config: AdapterConfig, _process: int) -> Scorer:
    return Scorer(config)


def example_of(row: Mapping[str, Any], *, gold_sql: str | None = None) -> Example:
    """Read a question from the row of a data set.

    Args:
        row: `database`, the path of a SQLite file; `gold_sql`, unless it is given apart; and where
            there are any `id` and `dialect`. The prompt is the trainer's, so the rest is not read.
        gold_sql: The gold query of trainers that have their own name for it.

    Raises:
        UserError: The database or the gold query is missing.
    """
    found = {"database": row.get("database"), "gold_sql": gold_sql or row.get("gold_sql")}
    for name, value in found.items():
        if not isinstance(value, str | Path) or not str(value).strip():
            raise UserError(
                f"the SQL reward needs {name} in every row of the data: "
                "database is the path of a SQLite file, gold_sql the query that answers"
            )
    database = Path(str(found["database"]))
    dialect = NAMES.get(str(row.get("dialect") or "sqlite").lower())
    if dialect is None:
        raise UserError(f"dialect {row['dialect']}: should be one of {', '.join(NAMES)}")
    return Example(
        id=str(row.get("id", "")),
        question="",
        db_id=database.stem,
        database=database,
        gold_sql=str(found["gold_sql"]).strip(),
        dialect=dialect,
    )


def _plain(value: Any) -> Any:
    """Turn mappings of any kind into dicts, which pydantic asks for."""
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    return value
