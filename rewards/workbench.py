"""What every reward family says of one prediction, or of one episode of several turns.

No family is trained on here: each has its paper's settings, and all see the same results.
"""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, get_args

from rewards.astra import AstraReward
from rewards.columns import binary_of, csmr, fractional_accuracy
from rewards.config import (
    AstraConfig,
    ExpoConfig,
    OneShotConfig,
    PaverlConfig,
    ProgressiveConfig,
)
from rewards.execution import gold_result, is_correct, is_luck
from rewards.expo.clauses import Clause
from rewards.expo.reward import ExpoReward, Runner, Verdict
from rewards.paverl import PaverlReward, payment
from rewards.progress.diagnosis import Diagnosis
from rewards.progress.reward import ColumnsOf, OneShotReward, ProgressiveReward
from rewards.types import Turn
from sqlenv.dialects import run, transpile
from sqlenv.envs.single_turn import find_matches, judge_query
from sqlenv.evaluators.equality import matches
from sqlenv.types import (
    Attempt,
    Episode,
    Example,
    MatchMode,
    Result,
    SqlError,
    Status,
    Table,
    status_of,
)

PairStatus = Literal[Status, "not_carried"]
"""How a prediction ended. `not_carried`: it is written in another dialect than SQLite's, and cannot
be run there without a change of meaning; so nothing is known of its result."""
STATUSES: tuple[PairStatus, ...] = get_args(PairStatus)
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
        nondeterministic: Whether the result depends on the clock or on chance: right by `ex` it may
            be, but no family pays for it.
        seconds: Wall time to run and score it; the gold result is there already.
        predicted, gold: The results, for people; not part of the record.
    """

    status: PairStatus
    ex: Mapping[MatchMode, bool]
    diagnosis: Diagnosis
    lexical: float
    verdict: Verdict
    rewards: tuple[float, ...]
    expo: float
    ex_f: float
    ex_b: float
    paverl: float
    csmr: float
    gold_ran: bool
    nondeterministic: bool = False
    seconds: float = 0.0
    predicted: Result = field(default=SqlError(""), compare=False)
    gold: Result = field(default=SqlError(""), compare=False)

    def record(self) -> dict[str, Any]:
        """Write it for programs, as JSON has it."""
        verdict, diagnosis = self.verdict, self.diagnosis
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
                "error_clauses": list(
                    dict.fromkeys(verdict.clauses[n].kind for n in sorted(verdict.blamed))
                ),
                "rewards": [
                    {"clause": clause.kind, "start": clause.start, "end": clause.end, "reward": r}
                    for clause, r in self.clauses()
                ],
            },
            "paverl": {"ex_f": self.ex_f, "ex_b": self.ex_b, "reward": self.paverl},
            "astra": {"csmr": self.csmr},
            "seconds": round(self.seconds, 6),
        }

    def clauses(self) -> list[tuple[Clause, float]]:
        """Pair each clause with its reward."""
        return list(zip(self.verdict.clauses, self.rewards, strict=True))

    def without_results(self) -> PairScore:
        """Leave the results out, which may be large."""
        return replace(self, predicted=SqlError(""), gold=SqlError(""))


class Workbench:
    """Runs predictions and asks every family. One thread at a time.

    Args:
        executor: Runs queries; its gold results are cached.
        columns_of: Column names by table of an example's database, None where unknown.
    """

    def __init__(self, executor: Runner, columns_of: ColumnsOf) -> None:
        self._executor = executor
        self._expo = ExpoReward(ExpoConfig(), columns_of=columns_of, executor=executor)
        self._paverl = PaverlReward(PaverlConfig(), executor)
        self._astra = AstraReward(AstraConfig(), executor)
        self._progressive = ProgressiveReward(ProgressiveConfig(), columns_of)
        self._one_shot = OneShotReward(OneShotConfig())

    def score(self, example: Example, sql: str) -> PairScore:
        """Score one query; no text whatever raises.

        Raises:
            UserError: The example's database cannot be used.
        """
        gold = gold_result(self._executor, example)
        start = time.perf_counter()
        sql = sql if sql.strip() else ""
        predicted = run(self._executor.execute, example, sql) if sql else SqlError("no SQL")
        ex = find_matches(example, sql, predicted, self._executor, MODES)
        luck = is_luck(predicted)
        right = ex[EXPO_MATCH] and not luck
        verdict = self._expo.judge(example, Attempt(sql, sql, predicted, right))
        share = 0.0 if luck else _share(predicted, gold, is_match=ex["bag"])
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
            ex_b=binary_of(share, predicted, gold),
            paverl=sum(payment(share, PaverlConfig(), ran=isinstance(predicted, Table)).values()),
            csmr=0.0 if luck else csmr(predicted, gold),
            gold_ran=isinstance(gold, Table),
            nondeterministic=luck,
            seconds=time.perf_counter() - start,
            predicted=predicted,
            gold=gold,
        )

    def trajectory(self, example: Example, turns: Sequence[Turn]) -> dict[str, float]:
        """Reward an episode as each family does.

        Returns:
            The total of each family by its name, `correct` (the answer's execution match) and the
            number of `turns`.
        """
        attempts = tuple(self._attempt(example, turn) for turn in turns)
        episode = Episode(example, attempts)
        families = {
            "progressive": self._progressive,
            "one_shot": self._one_shot,
            "paverl": self._paverl,
            "astra": self._astra,
        }
        totals = {name: reward(episode).total for name, reward in families.items()}
        return {
            **totals,
            "expo": self._expo_total(example, attempts),
            "correct": float(is_correct(episode)),
            "turns": float(len(attempts)),
        }

    def _attempt(self, example: Example, turn: Turn) -> Attempt:
        if turn.kind == "bad_call":
            return Attempt(turn.text, "", SqlError("no call"), correct=False, kind=turn.kind)
        judged = judge_query(example, turn.text, turn.sql, self._executor, match="set")
        return replace(judged, kind=turn.kind)

    def _expo_total(self, example: Example, attempts: Sequence[Attempt]) -> float:
        """Average the rewards of the last query's clauses, as EXPO-SQL's total does."""
        if not attempts:
            return ExpoConfig().format_fail
        last, gold = attempts[-1], gold_result(self._executor, example)
        is_match = matches(last.result, gold, mode=EXPO_MATCH, gold_sql=example.gold_sql)
        correct = is_match and not is_luck(last.result)
        return self._expo.mean_reward(self._expo.judge(example, replace(last, correct=correct)))


def _status(example: Example, sql: str, predicted: Result) -> PairStatus:
    if sql and isinstance(transpile(sql, example.dialect), SqlError):
        return "not_carried"
    return status_of(predicted)


def _share(predicted: Result, gold: Result, *, is_match: bool) -> float:
    """Compute EX_f; equal bags of rows have equal columns, which need no second look."""
    if is_match and isinstance(predicted, Table) and isinstance(gold, Table) and gold.rows:
        return 1.0
    return fractional_accuracy(predicted, gold)
