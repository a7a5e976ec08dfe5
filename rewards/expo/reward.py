"""EXPO-SQL's clause-level reward (section 3.2): credit for every clause of a query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from statistics import fmean
from typing import Any, Literal, get_args

from minirl.exchange import CreditSpan, Score
from rewards.config import ExpoConfig
from rewards.execution import (
    columns_of,
    gold_result,
    is_correct,
    is_nondeterministic,
    on_witness,
)
from rewards.expo.attributes import is_computed, with_attributes
from rewards.expo.attribution import (
    blame_by_execution,
    candidates,
    find_blamed,
    with_items,
)
from rewards.expo.clauses import KINDS, Clause, scan_clauses
from rewards.expo.differences import Differences, differences
from rewards.expo.failures import trace_error
from rewards.expo.steps import Steps
from sqlenv.dialects import run_in_dialect
from sqlenv.executor import Executor
from sqlenv.executor.database import identify
from sqlenv.types import Attempt, Episode, Example, MatchMode, Numbers, SqlError, Table

VerdictCase = Literal["correct", "incorrect", "error", "format"]
CASES: tuple[VerdictCase, ...] = get_args(VerdictCase)
MATCH: MatchMode = "bag_ordered"
"""What EXPO-SQL takes for a match: its differences know order and duplicates."""

CORRECT = 1.5  # reward of every clause of a query that matches (equation 1)
INCORRECT = (-0.5, 0.5)  # of blamed and of other clauses where the result is wrong (equation 2)
ERROR = (-1.5, -0.5)  # the same where the query fails (equation 3)
FORMAT_FAIL = -1.5  # reward of a whole reply that breaks the format
MAX_STEPS = 20_000_000
"""Steps of SQLite's virtual machine that an intermediate query may take, 0.1 to 0.2 s; a share of
them where a query has more than `MANY_CLAUSES`, so that their number costs nothing.
"""
MANY_CLAUSES = 16
_REMEMBERED = 4096


@dataclass(frozen=True, slots=True)
class ClauseVerdict:
    """What is wrong with a query.

    `blamed` numbers the erroneous clauses (C_err; none of a wrong query whose clauses are not told
    apart), `differences` set the result apart from the gold result (D*; of wrong results alone).
    """

    case: VerdictCase
    clauses: tuple[Clause, ...]
    blamed: frozenset[int] = frozenset()
    differences: Differences = frozenset()


class ExpoReward:
    """Rewards each clause by execution: equations 1 to 3. For the arguments see `build_reward`."""

    def __init__(self, config: ExpoConfig, executor: Executor, numbers: Numbers) -> None:
        self._config, self._executor, self._numbers = config, executor, numbers
        # The metrics ask again for what the reward has just found.
        self._verdicts: dict[Any, ClauseVerdict] = {}

    def __call__(self, episode: Episode) -> Score:
        """Score an episode: the mean reward of the last query's clauses, and spans of every turn.

        The part is named after its case. Without any attempt the total is `FORMAT_FAIL`.
        """
        spans: list[CreditSpan] = []
        case: VerdictCase = "format"
        total = FORMAT_FAIL
        for turn, attempt in enumerate(episode.attempts):
            verdict = self.blame(episode.example, attempt)
            rewards = self.clause_rewards(verdict)
            case, total = verdict.case, self.mean_reward(verdict)
            spans += self._spans(turn, attempt, verdict, rewards)
        parts: dict[str, float] = dict.fromkeys(CASES, 0.0) | {case: total}
        return Score(total, is_correct(episode), parts, tuple(spans))

    def blame(self, example: Example, attempt: Attempt) -> ClauseVerdict:
        """Find the erroneous clauses of an attempt (section 3.2)."""
        if not attempt.sql:
            return ClauseVerdict("format", ())
        example, attempt = on_witness(example, attempt)
        # The kind of result is in the key: a time-out may not happen again.
        result = type(attempt.result)
        key = (identify(example.database), example.gold_sql, attempt.sql, attempt.correct, result)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._blame(example, attempt)
            if len(self._verdicts) >= _REMEMBERED:
                self._verdicts.clear()
            self._verdicts[key] = verdict
        return verdict

    def clause_rewards(self, verdict: ClauseVerdict) -> list[float]:
        """Return the reward of each clause, in the order of the text; the gap scaled (table 11)."""
        clauses, blamed, case = verdict.clauses, verdict.blamed, verdict.case
        if case == "correct":
            return [CORRECT] * len(clauses)
        low, high = INCORRECT if case == "incorrect" else ERROR
        is_told = self._config.clause_level in ("both", case) and bool(blamed)
        middle, gap = (low + high) / 2, self._config.gap_scale * is_told * (high - low) / 2
        return [middle - gap if n in blamed else middle + gap for n in range(len(clauses))]

    def mean_reward(self, verdict: ClauseVerdict) -> float:
        """Return the mean of the clauses' rewards; `FORMAT_FAIL` where there are no clauses."""
        return fmean(self.clause_rewards(verdict) or [FORMAT_FAIL])

    def diagnostics(self, episode: Episode) -> dict[str, float]:
        """Name numbers for the metrics: how the last query ended, and which clauses are to blame.

        Averaged over the episodes that have them, `blamed/…` are the shares of table 16.
        """
        if not episode.attempts:
            return {}
        verdict = self.blame(episode.example, episode.attempts[-1])
        numbers = {f"case/{case}": float(case == verdict.case) for case in CASES}
        if verdict.case in ("incorrect", "error"):
            kinds = {verdict.clauses[number].kind for number in verdict.blamed}
            numbers |= {
                f"blamed/{verdict.case}/{kind.replace(' ', '_')}": float(kind in kinds)
                for kind in KINDS
            }
        return numbers

    def _blame(self, example: Example, attempt: Attempt) -> ClauseVerdict:
        clauses, result = scan_clauses(attempt.sql), attempt.result
        if attempt.correct:
            return ClauseVerdict("correct", clauses)
        if isinstance(result, Table):
            return self._blame_result(example, attempt.sql, clauses, result)
        if example.dialect != "sqlite" and isinstance(result, SqlError):
            result = replace(result, offset=-1)  # the place is one in the transpiled query
        columns, traced = columns_of(example), self._config.tracing
        blamed = trace_error(attempt.sql, result, columns=columns, traced=traced)
        return ClauseVerdict("error", clauses, blamed)

    def _blame_result(
        self, example: Example, sql: str, clauses: tuple[Clause, ...], predicted: Table
    ) -> ClauseVerdict:
        """Blame clauses for a wrong result (section 3.2.2), all of them if none stands out.

        Otherwise a wrong query would be rewarded throughout.
        """
        everyone = frozenset(range(len(clauses)))
        gold = gold_result(self._executor, example)
        if not isinstance(gold, Table) or is_nondeterministic(predicted):
            return ClauseVerdict("incorrect", clauses, everyone)
        gold = with_attributes(example.gold_sql, gold)
        named = with_attributes(sql, predicted)
        sought = differences(gold, named, is_computed=is_computed(sql))
        if self._config.attribution == "types":
            blamed = candidates(clauses, sought)
            blamed = with_items(sql, blamed) if len(blamed) == 1 else frozenset[int]()
            return ClauseVerdict("incorrect", clauses, blamed, sought)

        max_steps = MAX_STEPS * MANY_CLAUSES // max(len(clauses), MANY_CLAUSES)
        execute = partial(self._executor.execute, max_steps=max_steps)
        run = partial(run_in_dialect, execute, example)
        steps = Steps(sql, predicted, run, self._numbers)
        if self._config.attribution == "execution":
            blamed = blame_by_execution(steps, gold)
        else:
            golds = Steps(example.gold_sql, gold, run, self._numbers)
            blamed = find_blamed(steps, golds, sought)
        return ClauseVerdict("incorrect", clauses, blamed or everyone, sought)

    def _spans(
        self, turn: int, attempt: Attempt, verdict: ClauseVerdict, rewards: Sequence[float]
    ) -> list[CreditSpan]:
        """Lay the rewards over a reply's query; other text has no credit (Eq. 4).

        A reply without a query is punished as a whole.
        """
        length = len(attempt.text)
        if not rewards:
            return [CreditSpan(turn, 0, length, FORMAT_FAIL)] if length else []
        start, end = attempt.answer.start, attempt.answer.end
        if attempt.text[start:end] != attempt.sql:
            raise ValueError("the query stands nowhere in the reply that it was read in")
        return [
            CreditSpan(turn, start + clause.start, start + clause.end, value)
            for clause, value in zip(verdict.clauses, rewards, strict=True)
        ]
