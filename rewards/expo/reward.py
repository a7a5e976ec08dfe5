"""EXPO-SQL's clause-level reward (paper 001, section 3.2): credit for every clause of a query."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from statistics import fmean
from typing import Any, Literal, Protocol

from rewards.config import ExpoConfig
from rewards.execution import GoldResults, follows_format, gold_result, is_correct, is_luck
from rewards.expo.attributes import is_computed, with_attributes
from rewards.expo.attribution import find_blamed
from rewards.expo.clauses import KINDS, Clause, item_name, scan_clauses
from rewards.expo.differences import CANDIDATES, Differences, differences, with_missing
from rewards.expo.failures import trace_error
from rewards.progress.reward import ColumnsOf
from rewards.types import CreditSpan, Score
from sqlenv.dialects import run
from sqlenv.sql.extraction import locate_sql
from sqlenv.sql.lexer import sources
from sqlenv.types import Attempt, Episode, Example, Result, SqlError, Table, Wrapping

Case = Literal["correct", "incorrect", "error", "format"]
CASES: tuple[Case, ...] = ("correct", "incorrect", "error", "format")
_REMEMBERED = 4096


class Runner(GoldResults, Protocol):
    """What the reward needs of the executor."""

    def execute(self, database: Path, sql: str, /, *, max_steps: int | None = None) -> Result:
        """Run a query."""
        ...


@dataclass(frozen=True, slots=True)
class Verdict:
    """What is wrong with a query.

    Attributes:
        case: How the query ended.
        clauses: Its clauses; none where there is no SQL.
        blamed: Numbers of the erroneous clauses (C_err).
        differences: What sets the result apart from the gold result (D*); empty for other cases.
        is_uniform: Whether clauses are not told apart.
    """

    case: Case
    clauses: tuple[Clause, ...]
    blamed: frozenset[int] = frozenset()
    differences: Differences = frozenset()
    is_uniform: bool = False


class ExpoReward:
    """Rewards each clause by execution: equations 1 to 3.

    Args:
        config: Values and readings of the paper.
        columns_of: Column names by table of an example's database, None where unknown.
        executor: Runs the steps of wrong queries; its gold results are cached.
        wrapping: Where the SQL of a reply is.
    """

    def __init__(
        self,
        config: ExpoConfig,
        *,
        columns_of: ColumnsOf,
        executor: Runner,
        wrapping: Wrapping = "sql_tag",
    ) -> None:
        self._config = config
        self._columns_of = columns_of
        self._executor = executor
        self._wrapping: Wrapping = wrapping
        # The metrics ask again for what the reward has just found.
        self._verdicts: dict[Any, Verdict] = {}

    def __call__(self, episode: Episode) -> Score:
        """Score an episode.

        Returns:
            The mean reward of the last query's clauses, as the part named after its case, and
            credit spans of every turn. Without any attempt the total is `format_fail`.
        """
        spans: list[CreditSpan] = []
        case, total = "format", self._config.format_fail
        for turn, attempt in enumerate(episode.attempts):
            verdict = self.judge(episode.example, attempt)
            case, total = verdict.case, self.mean_reward(verdict)
            spans += self._spans(turn, attempt, verdict)
        parts = {str(name): total if name == case else 0.0 for name in CASES}
        return Score(total, is_correct(episode), parts, tuple(spans))

    def judge(self, example: Example, attempt: Attempt) -> Verdict:
        """Find the erroneous clauses of an attempt (section 3.2)."""
        strict = self._config.format == "think_sql"
        if not attempt.sql or (strict and not follows_format(attempt.text, self._wrapping)):
            return Verdict("format", ())
        # A result that another run would not give, such as a time-out, is another question.
        result = type(attempt.result)
        key = (example.database, example.gold_sql, attempt.sql, attempt.correct, result)
        verdict = self._verdicts.get(key)
        if verdict is None:
            verdict = self._judge(example, attempt)
            if len(self._verdicts) >= _REMEMBERED:
                self._verdicts.clear()
            self._verdicts[key] = verdict
        return verdict

    def clause_rewards(self, verdict: Verdict) -> list[float]:
        """Return the reward of each clause, in the order of the text."""
        blamed, other = self._values(verdict)
        return [
            blamed if number in verdict.blamed else other for number in range(len(verdict.clauses))
        ]

    def mean_reward(self, verdict: Verdict) -> float:
        """Return the mean of the clauses' rewards; `format_fail` where there are no clauses."""
        return fmean(self.clause_rewards(verdict) or [self._config.format_fail])

    def diagnostics(self, episode: Episode) -> dict[str, float]:
        """Name numbers for the metrics: how the last query ended, and who is to blame.

        Returns:
            1.0 or 0.0 for every case; for a wrong result and for a failing query also for every
            type of clause. Averaged over the episodes that have them, `blamed/…` are the shares
            of table 16.
        """
        if not episode.attempts:
            return {}
        verdict = self.judge(episode.example, episode.attempts[-1])
        numbers = {f"case/{case}": float(case == verdict.case) for case in CASES}
        if verdict.case in ("incorrect", "error"):
            kinds = {verdict.clauses[number].kind for number in verdict.blamed}
            numbers |= {
                f"blamed/{verdict.case}/{kind.replace(' ', '_')}": float(kind in kinds)
                for kind in KINDS
            }
        return numbers

    def _judge(self, example: Example, attempt: Attempt) -> Verdict:
        clauses, result = scan_clauses(attempt.sql), attempt.result
        if attempt.correct:
            return Verdict("correct", clauses)
        if isinstance(result, Table):
            return self._judge_result(example, attempt.sql, clauses, result)
        if example.dialect != "sqlite" and isinstance(result, SqlError):
            # The place is one in the query as it was carried over.
            result = replace(result, offset=-1)
        blamed = trace_error(
            attempt.sql,
            clauses,
            result,
            columns=self._columns_of(example),
            traced=self._config.tracing,
        )
        return Verdict("error", clauses, blamed)

    def _judge_result(
        self, example: Example, sql: str, clauses: tuple[Clause, ...], predicted: Table
    ) -> Verdict:
        """Blame clauses for a wrong result (section 3.2.2), and somebody in any case.

        Without the fallback a query would be rewarded everywhere when no single step makes its
        kind of error, as is the case for `row_partial`. So it is where the result depends on the
        clock or on chance.
        """
        config, everyone = self._config, frozenset(range(len(clauses)))
        gold = gold_result(self._executor, example)
        if not isinstance(gold, Table) or is_luck(predicted):
            return Verdict("incorrect", clauses, everyone)
        gold = with_attributes(example.gold_sql, gold)
        sought = self._differences(gold, sql, predicted)
        if not config.incremental:
            mapped = _candidates(clauses, sought)
            is_clear = len(mapped) == 1
            blamed = _with_items(sql, clauses, mapped) if is_clear else frozenset[int]()
            return Verdict("incorrect", clauses, blamed, sought, is_uniform=not is_clear)
        blamed = self._blame_steps(example, sql, clauses, gold, predicted, sought)
        if config.type_map == "intersect":
            is_apart = config.row_disjoint == "same_columns"
            possible = _candidates(clauses, with_missing(sought) if is_apart else sought)
            blamed &= _with_items(sql, clauses, possible)
        if not blamed and config.empty_cerr == "map" and config.type_map != "none":
            blamed = _with_items(sql, clauses, _candidates(clauses, sought))
        if not blamed and config.empty_cerr != "none":
            blamed = everyone
        return Verdict("incorrect", clauses, blamed, sought)

    def _differences(self, gold: Table, sql: str, predicted: Table) -> Differences:
        """Name what sets a result apart from the gold result (D*)."""
        if gold.width != predicted.width:
            return differences(gold, predicted)
        is_same_structure = self._config.row_partial == "computed" and is_computed(sql)
        named = with_attributes(sql, predicted)
        return differences(gold, named, is_computed=is_same_structure)

    def _blame_steps(
        self,
        example: Example,
        sql: str,
        clauses: Sequence[Clause],
        gold: Table,
        predicted: Table,
        sought: Differences,
    ) -> frozenset[int]:
        config = self._config

        def ask(database: Path, step: str) -> Result:
            return self._executor.execute(database, step, max_steps=config.max_steps)

        return find_blamed(
            sql,
            clauses,
            gold=gold,
            predicted=predicted,
            sought=sought,
            run=partial(run, ask, example),
            from_check=config.from_check,
            whole_result=config.setop_dstar == "whole",
            max_rows=config.max_step_rows,
            is_matched=config.type_map != "none",
            computed_rule=config.row_partial == "computed",
            widths_apart=config.row_disjoint == "same_columns",
        )

    def _values(self, verdict: Verdict) -> tuple[float, float]:
        """Return the rewards of a blamed clause and of another one, the gap scaled (table 11)."""
        config, case = self._config, verdict.case
        if case == "correct":
            return config.correct, config.correct
        if case == "format":
            return config.format_fail, config.format_fail
        blamed, other, uniform = {
            "incorrect": (
                config.incorrect_blamed,
                config.incorrect_other,
                config.incorrect_uniform,
            ),
            "error": (config.error_blamed, config.error_other, config.error_uniform),
        }[case]
        middle = (blamed + other) / 2
        scale = config.gap_scale if config.clause_level in ("both", case) else 0.0
        if verdict.is_uniform or not scale:
            uniform = middle if uniform is None else uniform
            return uniform, uniform
        return middle + scale * (blamed - middle), middle + scale * (other - middle)

    def _spans(self, turn: int, attempt: Attempt, verdict: Verdict) -> list[CreditSpan]:
        """Lay the rewards over the characters of a reply, each character once."""
        length, rewards = len(attempt.text), self.clause_rewards(verdict)
        if not rewards:
            return [CreditSpan(turn, 0, length, self._config.format_fail)] if length else []
        start, end = self._place(attempt)
        outside = self._outside(verdict)
        spans = [
            CreditSpan(turn, start + clause.start, start + clause.end, value)
            for clause, value in zip(verdict.clauses, rewards, strict=True)
        ]
        if outside is not None and start:
            spans.insert(0, CreditSpan(turn, 0, start, outside))
        if outside is not None and end < length:
            spans.append(CreditSpan(turn, end, length, outside))
        return spans

    def _place(self, attempt: Attempt) -> tuple[int, int]:
        start, end = locate_sql(attempt.text, self._wrapping)
        if attempt.text[start:end] != attempt.sql:
            raise ValueError(f"the reply does not hold its query as {self._wrapping} has it")
        return start, end

    def _outside(self, verdict: Verdict) -> float | None:
        """Return the credit of what is not SQL (ambiguity E5); None for no credit."""
        if self._config.outside_tokens == "zero":
            return None
        if self._config.outside_tokens == "mean":
            return self.mean_reward(verdict)
        return self._values(verdict)[0]


def _candidates(clauses: Sequence[Clause], sought: Differences) -> frozenset[int]:
    """Number the clauses that can cause one of the differences (table 12)."""
    kinds = {kind for difference in sought for kind in CANDIDATES[difference]}
    return frozenset(number for number, clause in enumerate(clauses) if clause.kind in kinds)


def _with_items(sql: str, clauses: Sequence[Clause], blamed: frozenset[int]) -> frozenset[int]:
    """Add the WITH items where a blamed FROM or JOIN reads one (table 15)."""
    items = {n: item_name(c.text(sql)) for n, c in enumerate(clauses) if c.kind == "WITH"}
    reading = [clauses[n] for n in blamed if clauses[n].kind in ("FROM", "JOIN")] if items else []
    read = {s.table for c in reading for s in sources(sql) if c.start <= s.start < c.stop}
    return blamed | frozenset(items) if read & {*items.values()} else blamed
