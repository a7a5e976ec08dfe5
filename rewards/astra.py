"""SQL-ASTRA's reward (paper 004): every call is scored, and the scores become one reward."""

from __future__ import annotations

from rewards.columns import csmr
from rewards.config import AstraConfig
from rewards.execution import GoldResults, gold_result, is_correct, is_luck
from rewards.trajectory import SHAPES, aggregate, shape_of
from rewards.types import CreditSpan, Score
from sqlenv.sql.extraction import one_line
from sqlenv.types import Attempt, AttemptKind, Episode


class AstraReward:
    """Scores the steps of an episode by their results (CSMR) and adds them up (ATR)."""

    def __init__(self, config: AstraConfig, executor: GoldResults) -> None:
        self._config = config
        self._executor = executor

    def __call__(self, episode: Episode) -> Score:
        """Score an episode.

        Returns:
            One part, named after what the scores come to: `atr`; `last`, the score of the last
            step; or `steps`, the mean score of the replies, with a credit span over each of them.
            0 without any step.
        """
        kind = self._config.aggregate
        if kind == "steps":
            spans = self._spans(episode)
            total = sum(span.value for span in spans) / max(len(spans), 1)
            return Score(total, is_correct(episode), {"steps": total}, spans)
        scores = self.steps(episode)
        total = aggregate(scores, self._config.atr) if kind == "atr" else (scores or [0.0])[-1]
        return Score(total, is_correct(episode), {kind: total})

    def steps(self, episode: Episode) -> list[float]:
        """Score the steps: the calls, then the final query.

        An episode that ends in a call answers nothing: its final query is empty, and scores 0.
        """
        attempts = [one for one in episode.attempts if self._is_scored(one)]
        if self._repeats_last_call(episode):
            attempts = attempts[:-1]
        scores = [self._score(episode, attempt) for attempt in attempts]
        is_unanswered = bool(episode.attempts) and episode.answer is None
        return [*scores, 0.0] if is_unanswered and self._config.final_step != "never" else scores

    def diagnostics(self, episode: Episode) -> dict[str, float]:
        """Name numbers for the metrics: which course the scores took (figure 2).

        Returns:
            1.0 or 0.0 for every shape; averaged over episodes they are shares.
        """
        scores = self.steps(episode)
        found = shape_of(scores) if scores else None
        return {f"shape/{shape}": float(shape == found) for shape in SHAPES}

    def _spans(self, episode: Episode) -> tuple[CreditSpan, ...]:
        """Credit each reply with its own score; a final query too that repeats the last call's."""
        return tuple(
            CreditSpan(turn, 0, len(attempt.text), self._score(episode, attempt))
            for turn, attempt in enumerate(episode.attempts)
            if self._is_scored(attempt)
        )

    def _is_scored(self, attempt: Attempt) -> bool:
        config = self._config
        scored: dict[AttemptKind, bool] = {
            "call": True,
            "bad_call": config.bad_call == "zero",
            "answer": config.final_step != "never",
        }
        return scored[attempt.kind]

    def _repeats_last_call(self, episode: Episode) -> bool:
        if self._config.final_step != "dedup" or len(episode.attempts) < 2:
            return False
        call, answer = episode.attempts[-2:]
        if answer.kind != "answer" or call.kind != "call":
            return False
        return bare(call.sql) == bare(answer.sql)

    def _score(self, episode: Episode, attempt: Attempt) -> float:
        config, example = self._config, episode.example
        if config.step_score == "binary":
            return float(attempt.correct)
        if is_luck(attempt.result):
            return 0.0
        return csmr(
            attempt.result,
            gold_result(self._executor, example),
            alpha=config.alpha,
            match=config.match,
            gold_sql=example.gold_sql,
        )


def bare(sql: str) -> str:
    """Write a query so that comments, line ends and the semicolon make no other query of it."""
    return one_line(sql).rstrip("; ")
