"""SkyRL's form of an environment: text in, text out, the reward with the last step.

    skyrl_gym.register(id="sql", entry_point="rewards.adapters.skyrl:SqlEnv")

SkyRL makes only subclasses of its own `Env`. Where it is installed `SqlEnv` is one; elsewhere the
same class is there without that base.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib import import_module
from importlib.util import find_spec
from typing import Any

from rewards.adapters.scoring import (
    Scored,
    example_of,
    mapping_of,
    plain,
    read_settings,
    scorer_of,
)
from sqlenv.envs.build import max_replies, shorten
from sqlenv.types import Episode

_Base: Any = (
    import_module("skyrl_gym.envs.base_text_env").BaseTextEnv if find_spec("skyrl_gym") else object
)
ChatMessage = Mapping[str, str]


class SqlEnv(_Base):
    """One question, played in the environment of the settings, and rewarded at its end.

    The prompt is the data set's. SkyRL takes a number a step, so credit for parts of a reply stays
    unused.

    Args:
        env_config: SkyRL's settings of this environment: those of `AdapterConfig`.
        extras: The row of the data set: `database` (path of a SQLite file), the gold query as
            `reward_spec.ground_truth`; and `max_turns`, which SkyRL adds: the most replies.
        settings: Settings given at registration; `env_config` goes before them.

    Raises:
        UserError: A setting, the database or the gold query is missing or wrong.
    """

    def __init__(
        self,
        env_config: Mapping[str, Any] | None = None,
        extras: Mapping[str, Any] | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> None:
        super().__init__()
        row = extras or {}
        config = read_settings({**(settings or {}), **(env_config or {})})
        gold = mapping_of(row.get("reward_spec")).get("ground_truth")
        self._scorer = scorer_of(config)
        allowed = max_replies(config.env)
        self.turns, self.max_turns = 0, min(int(plain(row.get("max_turns")) or allowed), allowed)
        self._environment = self._scorer.environment(shorten(config.env, self.max_turns))
        self._episode = Episode(example_of(row, gold_sql=gold))
        self._score: Scored | None = None

    def init(self, prompt: Sequence[ChatMessage]) -> tuple[Sequence[ChatMessage], dict[str, Any]]:
        """Begin with the data set's prompt, unchanged."""
        return prompt, {}

    def step(self, action: str) -> dict[str, Any]:
        """Judge a reply.

        Returns:
            SkyRL's step output: the next `observations` (none at the end), `reward` (0 before the
            end), `done`, and as `metadata` whether the query was right, and at the end how it ended
            (`status`), what it was (`sql`) and whether there was one (`sql_found`).
        """
        self.turns += 1
        self._episode, observation = self._environment.step(self._episode, action)
        if observation is None:
            self._score = self._scorer.scored(self._episode)
        return {
            "observations": [
                {"role": message.role, "content": message.content} for message in observation or ()
            ],
            "reward": self._score.total if self._score else 0.0,
            "done": observation is None,
            "metadata": {
                "correct": self._episode.attempts[-1].correct,
                **(self._score.why() if self._score else {}),
            },
        }

    def get_metrics(self) -> dict[str, float]:
        """Name the numbers of an episode: turns, execution match, parts of the reward."""
        score = self._score
        if score is None:
            return {"turns": float(self.turns)}
        parts = {f"reward/{name}": value for name, value in score.parts.items()}
        return {"turns": float(self.turns), "correct": float(score.correct), **parts}
