"""SQL-ASTRA's reward: every call is scored, and the scores become one reward."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import groupby, pairwise
from typing import Literal, NamedTuple, get_args

from minirl.exchange import CreditSpan, Score
from rewards.columns import csmr
from rewards.config import AstraConfig, AtrConfig
from rewards.execution import is_correct, is_right_by_its_own, results_of
from sqlenv.evaluators.official import same_query
from sqlenv.executor import Executor
from sqlenv.types import Attempt, Episode

Shape = Literal["single", "flat", "rising", "falling", "rise_fall", "fall_rise", "oscillating"]
"""The course of an episode's scores (figure 2, right): one step, no change, one direction, one turn
up or down, several turns. The paper names rising, rise-then-fall and stagnation as examples."""
SHAPES: tuple[Shape, ...] = get_args(Shape)
_COURSES: dict[tuple[bool, ...], Shape] = {
    (): "flat",
    (True,): "rising",
    (False,): "falling",
    (True, False): "rise_fall",
    (False, True): "fall_rise",
}

BOUND = 2.0  # largest reward of an episode, and its negative the smallest (B)
_THRESHOLD = 0.6  # tau: scores above are high
_LOW_HIGH = 1.0  # factor on a rise
_LEVEL = 1e-9  # scores that differ by less are the same


class _Constants(NamedTuple):
    """What a step that stays low or high earns, and what each step after the first costs."""

    low_low: float
    high_high: float
    turn_cost: float


_CONSTANTS = {"paper": _Constants(0.0, 0.0, 0.0001), "fig2": _Constants(0.0, -0.2, 0.1)}


class AstraReward:
    """Scores the steps of an episode by their results (CSMR) and adds them up (ATR)."""

    def __init__(self, config: AstraConfig, executor: Executor) -> None:
        self._config = config
        self._executor = executor

    def __call__(self, episode: Episode) -> Score:
        """Score an episode: one part, `atr`, `last` (the last step's score) or `steps`.

        `steps` is the mean score of the replies, with a credit span over each. 0 without any step.
        """
        kind = self._config.aggregate
        spans: tuple[CreditSpan, ...] = ()
        if kind == "steps":
            spans = self._spans(episode)
            total = sum(span.value for span in spans) / max(len(spans), 1)
        else:
            scores = self.steps(episode)
            total = aggregate(scores, self._config.atr) if kind == "atr" else (scores or [0.0])[-1]
        return Score(total, is_correct(episode), {kind: total}, spans)

    def steps(self, episode: Episode) -> list[float]:
        """Score the calls, then the final query unless it repeats the last call: that of an
        episode ending in a call scores 0.
        """
        attempts = episode.attempts[:-1] if _repeats_last_call(episode) else episode.attempts
        scores = [self._score(episode, attempt) for attempt in attempts]
        is_unanswered = bool(episode.attempts) and episode.final_attempt is None
        return [*scores, 0.0] if is_unanswered else scores

    def diagnostics(self, episode: Episode) -> dict[str, float]:
        """Name numbers for the metrics: the score of the last step, and 1.0 or 0.0 for every shape
        of the scores (figure 2).
        """
        scores = self.steps(episode)
        found = shape_of(scores) if scores else None
        last = {"step_score/last": scores[-1] if scores else 0.0}
        return last | {f"shape/{shape}": float(shape == found) for shape in SHAPES}

    def _spans(self, episode: Episode) -> tuple[CreditSpan, ...]:
        """Credit each reply with its own score; a final query too that repeats the last call's."""
        return tuple(
            CreditSpan(turn, 0, len(attempt.text), self._score(episode, attempt))
            for turn, attempt in enumerate(episode.attempts)
        )

    def _score(self, episode: Episode, attempt: Attempt) -> float:
        example = episode.example
        if self._config.step_score == "binary" or is_right_by_its_own(example, attempt):
            return float(attempt.correct)
        results = results_of(self._executor, example, attempt)
        return csmr(*results, alpha=self._config.alpha)


def aggregate(scores: Sequence[float], config: AtrConfig) -> float:
    """Sum up the scores of an episode's steps: rises earn, falls cost more, every turn costs (ATR).

    The equation is not in the paper's text (section 2.3); it is what all rows of its figure 2 agree
    with: clip(sum of transition(R_{t-1}, R_t) - turn_cost * (K - 1), -B, B), with R_0 = 0.

    Returns:
        In [-BOUND, BOUND] for scores in [0, 1]; 0.0 without any step.
    """
    if not scores:
        return 0.0
    earned = sum(transition(*pair, config) for pair in pairwise([0.0, *scores]))
    total = earned - _CONSTANTS[config.kind].turn_cost * (len(scores) - 1)
    return max(-BOUND, min(BOUND, total))


def transition(before: float, after: float, config: AtrConfig) -> float:
    """Reward one step (equation 2): a rise, a fall, or staying above or below the threshold."""
    change = after - before
    if abs(change) <= _LEVEL:
        constants = _CONSTANTS[config.kind]
        return constants.high_high if after > _THRESHOLD else constants.low_low
    return (_LOW_HIGH if change > 0 else config.high_low) * abs(change)


def shape_of(scores: Sequence[float]) -> Shape:
    """Name the course of the scores of an episode's steps, of which there is at least one."""
    if len(scores) == 1:
        return "single"
    changes = (after - before for before, after in pairwise(scores))
    rises = tuple(rise for rise, _ in groupby(c > 0 for c in changes if abs(c) > _LEVEL))
    return _COURSES.get(rises, "oscillating")


def _repeats_last_call(episode: Episode) -> bool:
    """Tell whether the answer is the query of the call before it."""
    if len(episode.attempts) < 2:
        return False
    call, answer = episode.attempts[-2:]
    is_pair = (call.kind, answer.kind) == ("call", "answer")
    return is_pair and same_query(call.sql) == same_query(answer.sql)
