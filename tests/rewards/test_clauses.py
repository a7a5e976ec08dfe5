"""Clauses as slices of a query, differences of results, clauses to blame for them."""

from __future__ import annotations

import json
import sqlite3
import time
from collections.abc import Iterable, Sequence
from itertools import pairwise
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.config import ExpoConfig
from rewards.expo.attributes import is_computed, with_attributes
from rewards.expo.attribution import find_blamed, plan_steps
from rewards.expo.clauses import WHOLE, Clause, clause_at, scan_clauses
from rewards.expo.differences import CANDIDATES, differences
from rewards.expo.failures import trace_error
from sqlenv.config import ExecutorConfig
from sqlenv.executor import Executor
from sqlenv.types import SqlError, Table

DATA = Path(__file__).parents[1] / "data"


def read(name: str) -> dict:
    return json.loads((DATA / name).read_text())


CLAUSES, DIFFERENCES = read("expo_clauses.json")["cases"], read("expo_differences.json")
INCORRECT, ERRORS = read("expo_incorrect.json"), read("expo_errors.json")
STEPS = [case for case in INCORRECT["cases"] if "steps" in case]
WORDS = (
    "select from where join left natural group by having order limit offset with as union all "
    "except values window distinct is not recursive a t x.y 'it''s' \"from\" `b [c] -- /* */ ( ) ' "
    ", ; . é 1 1.5 * = \n"
)
ANY_SQL = st.one_of(st.lists(st.sampled_from(WORDS.split(" "))).map(" ".join), st.text())


def name(case: dict) -> str:
    return case["id"]


def build(path: Path, statements: Iterable[str]) -> Path:
    with sqlite3.connect(path) as connection:
        for statement in statements:
            connection.execute(statement)
    connection.close()
    return path


@pytest.fixture(scope="module")
def executor():
    with Executor(ExecutorConfig(isolation="thread")) as executor:
        yield executor


@pytest.fixture(scope="module")
def incorrect(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("databases") / "a.sqlite", INCORRECT["database"])


@pytest.fixture(scope="module")
def failing(tmp_path_factory) -> Path:
    return build(tmp_path_factory.mktemp("databases") / "b.sqlite", ERRORS["database"])


def table(rows: Sequence[Sequence], columns: Sequence[str] | None) -> Table:
    width = len(rows[0]) if rows else 1
    return Table(tuple(columns or [f"c{i}" for i in range(width)]), tuple(map(tuple, rows)))


def labelled(sql: str, clauses: Sequence[Clause], labels: Sequence[str]) -> set[int]:
    """Number the clauses whose text starts with one of some labels, each of which must be there."""
    texts = [clause.text(sql) for clause in clauses]
    for label in labels:
        assert any(text.startswith(label) for text in texts), label
    return {n for n, text in enumerate(texts) if text.startswith(tuple(labels))}


@pytest.mark.parametrize("case", CLAUSES, ids=name)
def test_scan(case):
    sql = "".join(text for _, _, text in case["clauses"])
    clauses = scan_clauses(sql)
    found = [
        [clause.kind, None if clause.operand == WHOLE else clause.operand, sql[slice(*span)]]
        for clause in clauses
        for span in [(clause.start, clause.end)]
    ]
    assert found == case["clauses"]
    if "spans" in case:
        assert [[clause.start, clause.end] for clause in clauses] == case["spans"]


@given(ANY_SQL)
def test_clauses_cover_any_text_exactly_once(sql):
    clauses = scan_clauses(sql)
    assert "".join(sql[clause.start : clause.end] for clause in clauses) == sql
    assert all(clause.start <= clause.stop <= clause.end for clause in clauses)
    assert all(clause.start < clause.end for clause in clauses)
    for number, clause in enumerate(clauses):
        assert clause_at(clauses, clause.start) == clause_at(clauses, clause.end - 1) == number


def test_long_hostile_text_takes_no_time():
    # Each is quadratic where a scan looks at all tokens for every clause.
    texts = [
        "select " * 14_000,
        "from (select " * 7_000,
        "natural " * 12_000 + "join",
        "(" * 99_999,
    ]
    for text in texts:
        start = time.thread_time()
        clauses = scan_clauses(text)
        result = SqlError("no such column: t.a", 3)
        assert trace_error(text, clauses, result, columns={"t": ["a"]}) <= set(range(len(clauses)))
        assert time.thread_time() - start < 5, text[:10]


@pytest.mark.parametrize("case", DIFFERENCES["cases"], ids=name)
def test_differences(case):
    reference = table(case["a"], case.get("a_columns"))
    candidate = table(case["b"], case.get("b_columns"))
    assert differences(reference, candidate) == set(case["types"])


def test_candidates_are_those_of_table_12():
    expected = {name: set(kinds) for name, kinds in DIFFERENCES["candidates"].items()}
    assert expected == CANDIDATES
    assert len(expected) == 10


def find(
    case: dict, database: Path, executor: Executor, max_rows: int
) -> tuple[set[int], set[int]]:
    """Return the clauses that clause-wise execution blames, and those of the case's labels."""
    sql = case["pred"]
    clauses = scan_clauses(sql)
    gold, predicted = executor.gold(database, case["gold"]), executor.execute(database, sql)
    assert isinstance(gold, Table)
    assert isinstance(predicted, Table)
    found = find_blamed(
        sql,
        clauses,
        ExpoConfig(),
        gold=gold,
        predicted=predicted,
        sought=differences(gold, predicted),
        run=lambda step: executor.execute(database, step),
        max_rows=max_rows,
    )
    return set(found), labelled(sql, clauses, case["blamed"])


@pytest.mark.parametrize("case", STEPS, ids=name)
def test_change_at_each_step(case, incorrect, executor):
    (chain,) = plan_steps(case["pred"], scan_clauses(case["pred"]))
    tables = [executor.execute(incorrect, step.sql) for step in chain]
    named = [with_attributes(step.sql, table) for step, table in zip(chain, tables, strict=True)]
    changes = [
        differences(*pair, is_computed=is_computed(step.sql))
        for pair, step in zip(pairwise(named), chain[1:], strict=True)
    ]
    assert [set(), *changes] == [set(types) for types in case["steps"]]
    assert tables[-1] == executor.execute(incorrect, case["pred"])


@pytest.mark.parametrize("max_rows", [1, 2, 3, 1000])
def test_filters_of_large_steps_are_judged_by_counts(max_rows, incorrect, executor):
    names = ("grouped: a filter too many", "grouped: HAVING too many", "limit", "figure 6")
    names += ("a filter that filters nothing is not blamed",)
    for case in INCORRECT["cases"]:
        if case["id"] in names:
            found, expected = find(case, incorrect, executor, max_rows=max_rows)
            assert found == expected, case["id"]


@pytest.mark.parametrize("case", ERRORS["cases"], ids=name)
def test_errors(case, failing, executor):
    sql = case["pred"]
    clauses = scan_clauses(sql)
    if "error" in case:
        result = SqlError(*case["error"])
    else:
        result = executor.execute(failing, sql)
        assert isinstance(result, SqlError)
        assert result.message == case.get("message", result.message)
    statements = ERRORS["database"]
    columns = {
        text.split()[2]: [part.split()[0] for part in text[text.index("(") + 1 : -1].split(",")]
        for text in statements
    }
    found = trace_error(
        sql,
        clauses,
        result,
        columns=columns if case.get("schema", True) else None,
        traced=case.get("traced", True),
    )
    assert found == labelled(sql, clauses, case["blamed"])


@given(ANY_SQL, st.integers(-1, 40))
def test_tracing_blames_somebody_whatever_the_text(sql, offset):
    clauses = scan_clauses(sql)
    for message in (
        *(
            "no such column: x.y",
            "ambiguous column name: a",
            "no such table: t",
            "incomplete input",
        ),
        *("misuse of aggregate: a()", 'near "from": syntax error', "datatype mismatch", "?"),
    ):
        found = trace_error(sql, clauses, SqlError(message, offset), columns={"t": ["y", "a"]})
        assert found <= set(range(len(clauses)))
        assert bool(found) == bool(clauses)
