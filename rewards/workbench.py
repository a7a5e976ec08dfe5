"""What every reward family says of one prediction.

No family is trained on here: each has its paper's settings, and all see the same results.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any, Literal, get_args

from rewards.columns import binary_accuracy, csmr, fractional_accuracy, payment
from rewards.config import ExpoConfig, ProgressiveConfig
from rewards.execution import gold_result, is_nondeterministic, on_witness, payable
from rewards.expo.reward import ClauseVerdict, ExpoReward
from rewards.progress.diagnosis import Diagnosis
from rewards.progress.reward import ProgressiveReward
from sqlenv.config import AnswerConfig
from sqlenv.dialects import transpile
from sqlenv.envs.single_turn import (
    Runner,
    first_refuting,
    is_right,
    judge_reply,
    witnesses_of,
)
from sqlenv.types import (
    Answer,
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


@dataclass(frozen=True, slots=True)
class PairScore:
    """One prediction beside its gold query.

    Attributes:
        ex: Execution accuracy under each comparator.
        rewards: EXPO-SQL's reward of each clause, in the order of the text.
        expo: Their mean, EXPO-SQL's total.
        paverl: PaVeRL-SQL's reward.
        gold_ran: Whether the gold query gave a table; where it did not, nothing is right.
        nondeterministic: Right by `ex` it may be, but no family pays for it.
        seconds: Wall time to run and score it; the gold result is there already.
        witnesses: How many small databases a prediction that is right by `set` was tried on.
        told_by: The number of the first of them on which it is wrong, from 1; None where it is
            right on all.
    """

    status: PairStatus
    ex: Mapping[MatchMode, bool]
    diagnosis: Diagnosis
    lexical: float
    verdict: ClauseVerdict
    rewards: tuple[float, ...]
    expo: float
    ex_f: float
    ex_b: float
    paverl: float
    csmr: float
    gold_ran: bool
    nondeterministic: bool = False
    seconds: float = 0.0
    witnesses: int = 0
    told_by: int | None = None

    def record(self) -> dict[str, Any]:
        """Write it for programs, as JSON has it."""
        verdict, diagnosis = self.verdict, self.diagnosis
        blamed = (verdict.clauses[number].kind for number in sorted(verdict.blamed))
        clauses = zip(verdict.clauses, self.rewards, strict=True)
        witness = {"asked": self.witnesses, "told_by": self.told_by}
        return {
            "status": self.status,
            **({"nondeterministic": True} if self.nondeterministic else {}),
            "ex": dict(self.ex),
            "progress": {
                "struct": diagnosis.struct,
                "lex": self.lexical,
                "tags": list(diagnosis.tags),
            },
            "expo": {
                "case": verdict.case,
                "diff_types": sorted(verdict.differences),
                "error_clauses": list(dict.fromkeys(blamed)),
                "rewards": [
                    {"clause": clause.kind, "start": clause.start, "end": clause.end, "reward": r}
                    for clause, r in clauses
                ],
            },
            "paverl": {"ex_f": self.ex_f, "ex_b": self.ex_b, "reward": self.paverl},
            "astra": {"csmr": self.csmr},
            **({"witness": witness} if self.witnesses else {}),
            "seconds": round(self.seconds, 6),
        }


class Workbench:
    """Runs predictions and asks every family, and witnesses if there are any: what one refutes is
    scored on it, as in training. One thread at a time.
    """

    def __init__(
        self,
        executor: Runner,
        numbers: Numbers = "close",
        witnesses: WitnessStore | None = None,
    ) -> None:
        self._executor, self._witnesses = executor, witnesses
        self._config = AnswerConfig(match=EXPO_MATCH, numbers=numbers)
        self._expo = ExpoReward(ExpoConfig(), executor=executor, numbers=numbers)
        self._progressive = ProgressiveReward(ProgressiveConfig())

    def score(self, example: Example, sql: str) -> PairScore:
        """Score one query; no text whatever raises."""
        gold = gold_result(self._executor, example)
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
        verdict = self._expo.blame(example, attempt)
        asked, shown = on_witness(example, attempt)
        pair = payable(shown.result), gold_result(self._executor, asked)
        share = fractional_accuracy(*pair)
        alignment = self._progressive.align(example, sql)
        return PairScore(
            status=_status(example, sql, predicted),
            ex=ex,
            diagnosis=alignment.diagnosis,
            lexical=alignment.lexical,
            verdict=verdict,
            rewards=tuple(self._expo.clause_rewards(verdict)),
            expo=self._expo.mean_reward(verdict),
            ex_f=share,
            ex_b=binary_accuracy(*pair),
            paverl=sum(payment(share, ran=isinstance(predicted, Table)).values()),
            csmr=csmr(*pair),
            gold_ran=isinstance(gold, Table),
            nondeterministic=by_chance,
            seconds=time.perf_counter() - start,
            witnesses=len(files),
            told_by=attempt.refuted.number if attempt.refuted else None,
        )


def _status(example: Example, sql: str, predicted: Result) -> PairStatus:
    if sql and isinstance(transpile(sql, example.dialect), SqlError):
        return "not_transpiled"
    return predicted.status
