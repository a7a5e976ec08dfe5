"""What every reward family says of one prediction.

No family is trained on here: each has its paper's settings, and all see the same results.
"""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any, get_args

from rewards.columns import binary_accuracy, csmr, fractional_accuracy, payment
from rewards.config import ExpoConfig, ProgressiveConfig
from rewards.execution import gold_result, is_nondeterministic, results_of
from rewards.expo.reward import MATCH, ExpoReward
from rewards.progress.reward import ProgressiveReward
from sqlenv.config import AnswerConfig
from sqlenv.dialects import transpile
from sqlenv.envs.single_turn import first_refuting, is_right, judge_reply, witnesses_of
from sqlenv.executor import Executor
from sqlenv.types import Answer, Attempt, Example, MatchMode, Numbers, Table, describe_failure
from sqlenv.witness.store import WitnessStore

MODES: tuple[MatchMode, ...] = get_args(MatchMode)


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
        self._config = AnswerConfig(match=MATCH, numbers=numbers)
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
        is_transpiled = not sql or isinstance(transpile(sql, example.dialect), str)
        files, found = (), None
        if self._witnesses and ex["set"] and not by_chance:
            files = witnesses_of(example, self._witnesses)
            config = self._config.model_copy(update={"match": "set"})
            found = first_refuting(example, sql, files, self._executor, config)
            attempt = replace(attempt, correct=attempt.correct and found is None, refuted=found)
        witness = {"asked": len(files), "told_by": found and found.number}
        pair = results_of(self._executor, example, attempt)
        share = fractional_accuracy(*pair)
        paid = sum(payment(share, ran=isinstance(predicted, Table)).values())
        alignment = self._progressive.align(example, sql)
        return {
            "status": predicted.status if is_transpiled else "not_transpiled",
            **({"message": message} if (message := describe_failure(predicted)) else {}),
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
            **({"witness": witness} if files else {}),
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
