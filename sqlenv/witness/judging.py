"""Whether predictions are right on their databases and on all witnesses of their gold queries."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path

from sqlenv.evaluators.comparators import Case
from sqlenv.executor import Executor
from sqlenv.types import ExecutionMatch
from sqlenv.witness.store import WitnessStore


def judge_on_witnesses(
    cases: Sequence[Case], rule: ExecutionMatch, executor: Executor, witnesses: WitnessStore
) -> list[float]:
    """Judge cases by a rule; 1 is right on the case's database and on every witness.

    Raises:
        UserError: A database cannot be read.
    """
    scores = [one.scores[rule] for one in executor.judge(cases, [rule])]
    asked: list[tuple[int, Path]] = [
        (number, file)
        for number, (case, score) in enumerate(zip(cases, scores, strict=True))
        if score == 1
        for file in witnesses.of(case.database, case.gold).files
    ]
    there = [replace(cases[number], database=file) for number, file in asked]
    for (number, _), judged in zip(asked, executor.judge(there, [rule]), strict=True):
        scores[number] = min(scores[number], judged.scores[rule])
    return scores
