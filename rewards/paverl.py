"""PaVeRL-SQL's reward (paper 003, section III-C)."""

from __future__ import annotations

from rewards.columns import binary_accuracy, fractional_accuracy, released_accuracy
from rewards.config import PaverlConfig
from rewards.execution import GoldResults, gold_result, is_correct, is_executable, is_luck
from rewards.types import Score
from sqlenv.types import Attempt, Episode

_SHORTEST_SQL = 16
"""The released program never runs a shorter query."""


class PaverlReward:
    """Pays for the gold columns in the result of the answer, and a little for any result."""

    def __init__(self, config: PaverlConfig, executor: GoldResults) -> None:
        self._config = config
        self._executor = executor

    def __call__(self, episode: Episode) -> Score:
        """Score an episode by its answer.

        Returns:
            `columns`, 10 times the share of gold columns, or without any of them `executed`, 0.5
            for a query that runs. Both are 0 for a query that fails and without an answer.
        """
        answer = episode.answer
        ran = answer is not None and is_executable(answer) and self._is_run(answer)
        share = self._share(episode, answer) if answer is not None and ran else 0.0
        parts = payment(share, self._config, ran=ran)
        return Score(sum(parts.values()), is_correct(episode), parts)

    def _is_run(self, answer: Attempt) -> bool:
        return self._config.ex_f == "paper" or len(answer.sql) >= _SHORTEST_SQL

    def _share(self, episode: Episode, answer: Attempt) -> float:
        config, example = self._config, episode.example
        if is_luck(answer.result):
            return 0.0
        gold = gold_result(self._executor, example)
        if config.payoff == "binary":
            return binary_accuracy(answer.result, gold, extra_columns=config.extra_columns)
        if config.ex_f == "code":
            return released_accuracy(answer.result, gold, row_cutoff=config.row_cutoff)
        return fractional_accuracy(answer.result, gold)


def payment(share: float, config: PaverlConfig, *, ran: bool) -> dict[str, float]:
    """Pay for a share of gold columns, or without any for a query that ran (section III-C)."""
    return {
        "columns": config.columns_weight * share,
        "executed": config.executed if ran and not share else 0.0,
    }
