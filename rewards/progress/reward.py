"""Progress-SQL's progressive reward (section 4.2) and its one-shot baseline."""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise

from minirl.exchange import Score
from rewards.config import ProgressiveConfig
from rewards.execution import columns_of, first_match, is_correct, is_executable
from rewards.progress.diagnosis import Diagnosis, diagnose, jaccard
from sqlenv.cache import cached
from sqlenv.prompts import tag_sentences
from sqlenv.sql.lexer import tokens
from sqlenv.types import Episode, Example

FORMAT, MATCH, EXECUTABLE = 0.5, 2.0, 0.5
"""Rewards of the required `<think>…</think> <sql>…</sql>`, of a match at the first turn and, in the
one-shot baseline, of a query that runs."""
GAIN, STAGNATION = 1.0, -0.25
"""Factor on the rise of alignment from the first to the last query, and reward without a rise."""
_ROUNDING = 1e-9  # alignments that differ by less are the same


@dataclass(frozen=True, slots=True)
class Alignment:
    """How close a query is to the gold query, in structure and in words."""

    value: float
    lexical: float
    diagnosis: Diagnosis


class ProgressiveReward:
    """Rewards the progress from the first to the last query of an episode (equation 4)."""

    def __init__(self, config: ProgressiveConfig) -> None:
        self._config = config

    def __call__(self, episode: Episode) -> Score:
        """Score an episode: the sum of `format`, `execution`, `latency` and `alignment`.

        Without any attempt the total is the stagnation reward, as for attempts that never rise.
        """
        final = episode.final_attempt
        parts = {
            "format": FORMAT * (final is not None and final.answer.in_form),
            "execution": self._execution(episode),
            "latency": self._latency(episode),
            "alignment": self._alignment(episode),
        }
        return Score(sum(parts.values()), is_correct(episode), parts)

    def align(self, example: Example, sql: str) -> Alignment:
        """Measure F of one query, in [0, 1]: the mean of structure and words, or one of them."""
        found = diagnose(sql, example.gold_sql, columns_of(example))
        lexical = lexical_similarity(sql, example.gold_sql)
        value = {
            "both": (found.struct + lexical) / 2,
            "structural": found.struct,
            "lexical": lexical,
        }
        return Alignment(value[self._config.alignment], lexical, found)

    def diagnostics(self, episode: Episode) -> dict[str, float]:
        """Name numbers for the metrics, from the first and the last query."""
        if not episode.attempts:
            return {}
        first, last = self._ends(episode)
        return {
            "align/first": first.value,
            "align/last": last.value,
            "struct/last": last.diagnosis.struct,
            "lexical/last": last.lexical,
            # A tag that no episode of a step has is a zero in its metrics, not a gap.
            **{f"tag/{tag}": float(tag in last.diagnosis.tags) for tag in tag_sentences()},
        }

    def _ends(self, episode: Episode) -> tuple[Alignment, Alignment]:
        first, last = episode.attempts[0].sql, episode.attempts[-1].sql
        return self.align(episode.example, first), self.align(episode.example, last)

    def _execution(self, episode: Episode) -> float:
        """Reward the change of execution status (equation 3)."""
        if not episode.attempts:
            return 0.0
        first, last = is_executable(episode.attempts[0]), is_executable(episode.attempts[-1])
        if last:
            return self._config.keep if first else self._config.recovery
        return self._config.deterioration if first else 0.0

    def _latency(self, episode: Episode) -> float:
        """Reward a match, less for every turn it comes later (equation 2); nothing where a trainer
        has gone on to a wrong answer.
        """
        turn = first_match(episode) if is_correct(episode) else None
        return MATCH * self._config.decay ** (turn - 1) if turn else 0.0

    def _alignment(self, episode: Episode) -> float:
        """Reward a rise of alignment, punish its absence (equation 1)."""
        if self._config.align_k1 == "zero" and first_match(episode) == 1:
            return 0.0
        if len(episode.attempts) > 1:
            first, last = self._ends(episode)
            if (rise := last.value - first.value) > _ROUNDING:
                return GAIN * rise
        return STAGNATION


def one_shot_reward(episode: Episode) -> Score:
    """Reward the last query alone: match, executable, format (the paper's baseline).

    Without any attempt all parts are 0.
    """
    attempts = episode.attempts[-1:]
    parts = {
        "match": MATCH * is_correct(episode),
        "executable": EXECUTABLE * any(map(is_executable, attempts)),
        "format": FORMAT * any(attempt.answer.in_form for attempt in attempts),
    }
    return Score(sum(parts.values()), is_correct(episode), parts)


def lexical_similarity(pred_sql: str, gold_sql: str) -> float:
    """Score how many pairs of adjacent tokens two queries share: Jaccard of the sets (section 4.2).

    Where neither side has a pair: 1.0 for the same single token, else 0.0.
    """
    pred, gold = _pairs(pred_sql), _pairs(gold_sql)
    if not pred and not gold:
        words = tokens(pred_sql)
        return float(bool(words) and words == tokens(gold_sql))
    return jaccard(pred, gold)


@cached(maxsize=2048)
def _pairs(sql: str) -> frozenset[tuple[str, str]]:
    return frozenset(pairwise(tokens(sql)))
