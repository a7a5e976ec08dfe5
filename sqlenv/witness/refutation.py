"""Whether predictions are right on all witnesses of their gold queries, and what is shown of a
witness that refutes one.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from sqlenv.dialects import run_in_dialect, transpile
from sqlenv.evaluators.comparators import Case, QueryRuns, compare_case, outcome_of
from sqlenv.executor import Executor
from sqlenv.sql.extraction import tables_of
from sqlenv.sql.lexer import quoted
from sqlenv.types import Example, ExecutionMatch, Result, RunQuery
from sqlenv.witness.store import WitnessStore


def rows_on(
    witness: Path, example: Example, sql: str, execute: RunQuery
) -> tuple[Mapping[str, Result], Result]:
    """Read the tables that a query and its gold query name on a witness, and what the latter gives
    there.
    """
    queries = (transpile(one, example.dialect) for one in (example.gold_sql, sql))
    named = (name for one in queries if isinstance(one, str) for name in tables_of(one))
    names = {name.lower(): name for name in named}
    tables = {name: execute(witness, f"SELECT * FROM {quoted(name)}") for name in names.values()}
    return tables, run_in_dialect(execute, replace(example, database=witness), example.gold_sql)


def judge_on_witnesses(
    cases: Sequence[Case], rule: ExecutionMatch, executor: Executor, witnesses: WitnessStore
) -> list[float]:
    """Judge cases by a rule; 1 is right on the case's database and on every witness, there but for
    the last bits of numbers; a question with a rule of its own has none (`witnesses_of`).

    Raises:
        UserError: A database cannot be read.
    """
    runs = QueryRuns(executor.execute)

    def score(case: Case) -> float:
        own = compare_case(case, [rule], runs).scores[rule]
        if own != 1 or case.grading_method:
            return own
        files = witnesses.of(case.database, case.gold)
        there = (replace(case, database=file, numbers="close") for file in files)
        return float(all(outcome_of(one, rule, runs).score == 1 for one in there))

    return executor.map(score, cases)
