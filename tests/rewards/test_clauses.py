"""Clauses as slices of a query, differences of results, clauses to blame for them."""

from __future__ import annotations

import time
from collections.abc import Sequence
from itertools import pairwise

import pytest
from hypothesis import given
from hypothesis import strategies as st

from rewards.execution import KnownColumns, columns_of
from rewards.expo import attribution, steps
from rewards.expo.attributes import is_computed, with_attributes
from rewards.expo.attribution import find_blamed
from rewards.expo.clauses import WHOLE, clause_at, scan_clauses
from rewards.expo.differences import CANDIDATES, differences
from rewards.expo.failures import trace_error
from rewards.expo.steps import Steps, plan_steps
from sqlenv.types import Example, Result, SqlError, Table
from tests.vectors import read

from .conftest import labelled

DIFFERENCES, ERRORS = read("expo_differences"), read("expo_errors")
INCORRECT, BLAME = read("expo_incorrect"), read("expo_blame")
ATTRIBUTES = read("expo_attributes")
KNOWN = KnownColumns({"t": frozenset("ya")})
WORDS = (
    "select from where join left natural group by having order limit offset with as union all "
    "except values window distinct is not recursive case end over a t x.y 'it''s' \"from\" `b [c] "
    "-- /* */ ( ) ' , ; . é 1 1.5 * = \n"
)
ANY_SQL = st.one_of(st.lists(st.sampled_from(WORDS.split(" "))).map(" ".join), st.text())


def name(case: dict) -> str:
    return case["id"]


@pytest.fixture(scope="module")
def incorrect(make_database):
    return make_database(INCORRECT["database"])


@pytest.fixture(scope="module")
def blame(make_database):
    return make_database(BLAME["database"])


@pytest.fixture(scope="module")
def failing(make_database):
    return make_database(ERRORS["database"])


@pytest.mark.parametrize("case", read("expo_clauses")["cases"], ids=name)
def test_scan(case):
    sql = "".join(text for _, _, text in case["clauses"])
    clauses = scan_clauses(sql)
    operands = [None if clause.operand == WHOLE else clause.operand for clause in clauses]
    found = [
        [clause.kind, operand, sql[clause.start : clause.end]]
        for clause, operand in zip(clauses, operands, strict=True)
    ]
    assert found == case["clauses"]
    if "spans" in case:
        assert [[clause.start, clause.end] for clause in clauses] == case["spans"]


MESSAGES = (
    *("no such column: x.y", "ambiguous column name: a", "no such table: t", "incomplete input"),
    *("misuse of aggregate: a()", 'near "from": syntax error', "datatype mismatch", "?"),
)


@given(ANY_SQL, st.integers(-1, 40), st.lists(st.sampled_from("nsvé")))
def test_clauses_cover_any_text_exactly_once(sql, offset, names):
    clauses = scan_clauses(sql)
    assert "".join(sql[clause.start : clause.end] for clause in clauses) == sql
    assert all(clause.start <= clause.stop <= clause.end for clause in clauses)
    assert all(clause.start < clause.end for clause in clauses)
    for number, clause in enumerate(clauses):
        assert clause_at(clauses, clause.start) == clause_at(clauses, clause.end - 1) == number
    for message in MESSAGES:
        found = trace_error(sql, SqlError(message, offset), columns=KNOWN)
        assert found <= set(range(len(clauses)))
        assert bool(found) == bool(clauses)
    assert len(with_attributes(sql, Table(tuple(names), ())).columns) == len(names)


def test_long_hostile_text_takes_no_time():
    # Each is quadratic where a scan looks at all tokens for every clause.
    for text in (
        "select " * 14_000,
        "from (select " * 7_000,
        "natural " * 12_000 + "join",
        "(" * 99_999,
    ):
        start = time.thread_time()
        clauses = scan_clauses(text)
        result = SqlError("no such column: t.a", 3)
        assert trace_error(text, result, columns=KNOWN) <= set(range(len(clauses)))
        assert time.thread_time() - start < 5, text[:10]


def table(rows: Sequence[Sequence], columns: Sequence[str] | None) -> Table:
    width = len(rows[0]) if rows else 1
    return Table(tuple(columns or [f"c{i}" for i in range(width)]), tuple(map(tuple, rows)))


@pytest.mark.parametrize("case", DIFFERENCES["cases"], ids=name)
def test_differences(case):
    reference = table(case["a"], case.get("a_columns"))
    candidate = table(case["b"], case.get("b_columns"))
    assert differences(reference, candidate) == set(case["types"])


def test_candidates_are_those_of_table_12():
    expected = {name: set(kinds) for name, kinds in DIFFERENCES["candidates"].items()}
    assert expected == CANDIDATES
    assert len(expected) == 10


@pytest.mark.parametrize(
    ("sql", "expected"),
    ATTRIBUTES["attributes"],
)
def test_attributes(sql, expected, blame, executor):
    result = executor.execute(blame, sql)
    assert isinstance(result, Table)
    named = with_attributes(sql, result)
    assert list(named.columns) == expected
    assert named.rows == result.rows
    # Of another query's result no more is named than it has.
    for other in ((), ("x",) * 9):
        assert len(with_attributes(sql, Table(other, ())).columns) == len(other)


@pytest.mark.parametrize(
    ("sql", "expected"),
    ATTRIBUTES["computed"],
)
def test_queries_that_compute_all_their_outputs(sql, expected):
    assert is_computed(sql) is expected


@pytest.mark.parametrize("case", [c for c in INCORRECT["cases"] if "steps" in c], ids=name)
def test_change_at_each_step(case, incorrect, executor):
    plan = plan_steps(case["pred"])
    chain = [*plan.operands[0], *plan.tail]
    tables = [executor.execute(incorrect, step.sql) for step in chain]
    named = [with_attributes(step.sql, table) for step, table in zip(chain, tables, strict=True)]
    changes = [
        differences(*pair, is_computed=is_computed(step.sql))
        for pair, step in zip(pairwise(named), chain[1:], strict=True)
    ]
    assert [set(), *changes] == [set(types) for types in case["steps"]]
    assert tables[-1] == executor.execute(incorrect, case["pred"])


COUNTED = (
    *("grouped: a filter too many", "grouped: HAVING too many", "limit", "figure 6"),
    "a filter that filters nothing is not blamed",
)


@pytest.mark.parametrize("max_rows", [1, 2, 3, 1000])
@pytest.mark.parametrize("case", [c for c in INCORRECT["cases"] if c["id"] in COUNTED], ids=name)
def test_filters_of_large_steps_are_judged_by_counts(
    case, max_rows, incorrect, executor, monkeypatch
):
    for module in (attribution, steps):
        monkeypatch.setattr(module, "MAX_STEP_ROWS", max_rows)
        monkeypatch.setattr(module, "MAX_WHOLE_ROWS", max_rows)
    sql = case["pred"]
    gold, predicted = executor.gold(incorrect, case["gold"]), executor.execute(incorrect, sql)
    asked = []

    def run(step: str) -> Result:
        asked.append(step.rpartition("\nLIMIT ")[0])
        return executor.execute(incorrect, step)

    own, golds = Steps(sql, predicted, run, "close"), Steps(case["gold"], gold, run, "close")
    found = find_blamed(own, golds, differences(gold, predicted))
    assert found == labelled(sql, scan_clauses(sql), case["blamed"])
    # Rows that were read need not be asked for one by one.
    filters = [step for step in asked if "\nWHERE" in step and step.startswith("SELECT *")]
    assert len(filters) == len(set(filters))


@pytest.mark.parametrize("case", ERRORS["cases"], ids=name)
def test_errors(case, failing, executor):
    sql = case["pred"]
    clauses = scan_clauses(sql)
    result = SqlError(*case["error"]) if "error" in case else executor.execute(failing, sql)
    assert isinstance(result, SqlError)
    assert result.message == case.get("message", result.message)
    columns = columns_of(Example("", "", "", failing, ""))
    found = trace_error(
        sql,
        result,
        columns=columns if case.get("schema", True) else None,
        traced=case.get("traced", True),
    )
    assert found == labelled(sql, clauses, case["blamed"])
