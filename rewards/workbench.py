"""What every reward family says of one prediction.

No family is trained on here: each has its paper's settings, and all see the same results.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any, Literal, get_args

from rewards.columns import binary_accuracy, csmr, fractional_accuracy, payment
from rewards.config import ExpoConfig, ProgressiveConfig
from rewards.execution import gold_result, is_nondeterministic, results_of
from rewards.expo.reward import ExpoReward
from rewards.progress.reward import ProgressiveReward
from sqlenv.config import AnswerConfig
from sqlenv.dialects import transpile
from sqlenv.envs.single_turn import (
    first_refuting,
    is_right,
    judge_reply,
    witnesses_of,
)
from sqlenv.executor import Executor
from sqlenv.types import (
    Answer,
    Attempt,
    Example,
    MatchMode,
    Numbers,
    Result,
    SqlError,
    Status,
    Table,
)
from sqlenv.witness.store import WitnessStore

PairStatus = Literal[Status, "not_transpiled"]
"""How a prediction ended. `not_transpiled`: it is written in another dialect than SQLite's and
cannot be transpiled, so nothing is known of its result."""
MODES: tuple[MatchMode, ...] = get_args(MatchMode)
EXPO_MATCH: MatchMode = "bag_ordered"
"""What EXPO-SQL takes for a match: its differences know order and duplicates."""


class Workbench:
    """Runs predictions and asks every family, and witnesses if there are any: what one refutes is
    scored on it, as in training. One thread at a time.
    """

    def __init__(
        self,
        executor: Executor,
        numbers: Numbers = "close",
        witnesses: WitnessStore | None = None,
    ) -> None:
        self._executor, self._witnesses = executor, witnesses
        self._config = AnswerConfig(match=EXPO_MATCH, numbers=numbers)
        self._expo = ExpoReward(ExpoConfig(), executor, numbers)
        self._progressive = ProgressiveReward(ProgressiveConfig())

    def score(self, example: Example, sql: str) -> dict[str, Any]:
        """Score one query; no text whatever raises. The record is that of docs/rewards.md, as JSON
        has it, and `seconds` leave out the gold query, whose result is there already.

        `nondeterministic`, where it stands: right by `ex` it may be, but no family pays for it.
        """
        gold_result(self._executor, example)
        start = time.perf_counter()
        sql = sql if sql.strip() else ""
        attempt = judge_reply(example, Answer(sql, sql), self._executor, self._config)
        predicted = attempt.result
        ex = {
            mode: is_right(example, sql, predicted, self._executor, mode, self._config.numbers)
            for mode in MODES
        }
        by_chance = is_nondeterministic(predicted)
        files: Sequence[Path] = ()
        if self._witnesses and ex["set"] and not by_chance:
            files = witnesses_of(example, self._witnesses)
            config = self._config.model_copy(update={"match": "set"})
            found = first_refuting(example, sql, files, self._executor, config)
            attempt = replace(attempt, correct=attempt.correct and found is None, refuted=found)
        told_by = attempt.refuted.number if attempt.refuted else None
        pair = results_of(self._executor, example, attempt)
        share = fractional_accuracy(*pair)
        paid = sum(payment(share, ran=isinstance(predicted, Table)).values())
        alignment = self._progressive.align(example, sql)
        return {
            "status": _status(example, sql, predicted),
            **({"nondeterministic": True} if by_chance else {}),
            "ex": ex,
            "progress": {
                "struct": alignment.diagnosis.struct,
                "lex": alignment.lexical,
                "tags": list(alignment.diagnosis.tags),
            },
            "expo": self._blame(example, attempt),
            "paverl": {"ex_f": share, "ex_b": binary_accuracy(*pair), "reward": paid},
            "astra": {"csmr": csmr(*pair)},
            **({"witness": {"asked": len(files), "told_by": told_by}} if files else {}),
            "seconds": round(time.perf_counter() - start, 6),
        }

    def _blame(self, example: Example, attempt: Attempt) -> dict[str, Any]:
        verdict = self._expo.blame(example, attempt)
        blamed = (verdict.clauses[number].kind for number in sorted(verdict.blamed))
        clauses = zip(verdict.clauses, self._expo.clause_rewards(verdict), strict=True)
        return {
            "case": verdict.case,
            "diff_types": sorted(verdict.differences),
            "error_clauses": list(dict.fromkeys(blamed)),
            "rewards": [
                {"clause": clause.kind, "start": clause.start, "end": clause.end, "reward": reward}
                for clause, reward in clauses
            ],
            "reward": self._expo.mean_reward(verdict),
        }


def _status(example: Example, sql: str, predicted: Result) -> PairStatus:
    if sql and isinstance(transpile(sql, example.dialect), SqlError):
        return "not_transpiled"
    return predicted.status
